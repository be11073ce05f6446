"""The command ``mtf-gradsync``: finds the subcommand and turns errors into one message."""

from __future__ import annotations

import argparse
import sys
import traceback

from mtf_gradsync._signals import signal_of
from mtf_gradsync.runtimes.errors import ConfigError, TrainingError
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

# Each has HELP, DESCRIPTION and EPILOG, add_arguments(parser), and main(args).
_COMMANDS = {
    "init": init_command,
    "train": train_command,
    "sample": sample_command,
    "report": report_command,
    "compile": compile_command,
    "plan": plan_command,
    "timeline": timeline_command,
    "env": env_command,
}

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
    for name, command in _COMMANDS.items():
        subparser = subparsers.add_parser(
            name,
            help=command.HELP,
            description=command.DESCRIPTION,
            epilog=command.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run_command=command.main)
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
    except KeyboardInterrupt as error:
        print("mtf-gradsync: interrupted", file=sys.stderr)
        return 128 + signal_of(error)


if __name__ == "__main__":
    sys.exit(main())
