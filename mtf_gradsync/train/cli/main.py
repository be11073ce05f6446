"""The command ``mtf-gradsync``: finds the subcommand and turns errors into one message."""

from __future__ import annotations

import argparse
import sys
import traceback

from mtf_gradsync.train.cli import (
    compile_command,
    env_command,
    init_command,
    plan_command,
    report_command,
    sample_command,
    timeline_command,
    train_command,
)
from mtf_gradsync.train.errors import ConfigError, TrainingError

# Each has add_parser(subparsers), and its parser sets `run_command`.
_COMMANDS = (
    init_command,
    train_command,
    sample_command,
    report_command,
    compile_command,
    plan_command,
    timeline_command,
    env_command,
)

EXIT_FAILED = 1
EXIT_BAD_CONFIG = 2
# A shell's way to say "ended by signal n", here n = 2.
EXIT_INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="mtf-gradsync",
        description="Gradient synchronization for Mesh-TensorFlow.",
        epilog="mtf-gradsync COMMAND --help tells more about a command.",
    )
    version = env_command.version_of("mtf-gradsync") or "of a checkout that is not installed"
    parser.add_argument("--version", action="version", version=f"mtf-gradsync {version}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the command line of the process, or of `argv`, and returns the exit code.

    It is 0 when done, 1 when failed, 2 for bad arguments or config, 128 + n stopped by signal n.
    """
    args = build_parser().parse_args(argv)
    try:
        return args.run_command(args)
    except (ConfigError, TrainingError) as error:
        if getattr(args, "verbosity", 0) >= 1:
            traceback.print_exc()
        print(f"mtf-gradsync: error: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED
    except KeyboardInterrupt:
        print("mtf-gradsync: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
