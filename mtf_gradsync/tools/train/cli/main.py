"""The command ``mtf-gradsync``: its parser, and one line and an exit code for each error."""

from __future__ import annotations

import argparse
import contextlib
import errno
import inspect
import os
import re
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, NoReturn, Sequence

from mtf_gradsync.extension import did_you_mean
from mtf_gradsync.runtimes._common import ConfigError, TrainingError
from mtf_gradsync.runtimes._signals import Interruption, signal_of
from mtf_gradsync.tools.train.cli import (
    compile,
    env,
    init,
    islands,
    plan,
    report,
    sample,
    timeline,
    train,
    verify,
)

EXIT_FAILED = 1
EXIT_BAD_CONFIG = 2

_COMMANDS: dict[str, Any] = {
    command.__name__.rpartition(".")[2]: command
    for command in (init, train, sample, report, compile, plan, verify, timeline, islands, env)
}


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command line, with a subparser for each command."""
    parser = argparse.ArgumentParser(
        prog="mtf-gradsync",
        description="Gradient synchronization for Mesh-TensorFlow.",
        epilog="mtf-gradsync COMMAND --help tells more about a command.",
    )
    version = env.version_of("mtf-gradsync") or "of a checkout that is not installed"
    parser.add_argument("--version", action="version", version=f"mtf-gradsync {version}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, command in _COMMANDS.items():
        # The docstring of a command's module is its help; `python -OO` has none.
        title, text = (inspect.getdoc(command) or "\n\n").split("\n\n", 1)
        description, examples, more = text.partition("\n\nExamples:\n")
        subparser = subparsers.add_parser(
            name,
            help=title[:1].lower() + title[1:].rstrip("."),
            description=description,
            epilog=f"examples:\n{more}" if examples else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run_command=command.main, command=name, parser=subparser)
    return parser


def _refuse_unknown_arguments(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """Ends the process with an error that names unknown arguments and suggests a known one.

    `parser` is the parser of the subcommand, and `unknown` are the arguments that it does not have.
    """
    hint = ""
    known = re.findall(r"(?<![\w-])--\w+", parser.format_help())
    for argument in unknown:
        if argument.startswith("-"):
            hint = did_you_mean(argument.split("=")[0], known, most=1)
        elif Path(argument).suffix == ".gin" and "--gin_file" in known:
            hint = f"; a config is given by --gin_file={argument}"
        elif Path(argument).is_dir() and "--model_dir" in known:
            hint = f"; a run's directory is given by --model_dir={argument}"
        if hint:
            break
    said = f"unrecognized arguments: {' '.join(unknown)}{hint}"
    parser.error(said)


# Errors from the state of the system, which are no fault of an argument.
_NO_FAULT = (errno.EDQUOT, errno.EIO, errno.ENOSPC)


def _as_line(error: Exception) -> str:
    """Returns the text of `error` for the user; for an OSError the reason and the file."""
    if isinstance(error, UnicodeEncodeError):
        return f"{error.object[:80]!r} is no text that can be written as {error.encoding}"
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    name = "" if error.filename is None else repr(error.filename)
    short = name if len(name) <= 80 else f"{name[:60]}... ({len(name)} characters)"
    return f"{error.strerror}: {short}" if name else error.strerror


def main(argv: list[str] | None = None) -> int:
    """Runs the command that `argv` gives, by default the process's arguments.

    Returns the exit code: 0 if the command has done its work, 1 if the command has failed, 2 for
    bad arguments or a bad config, and 128 + n if signal n has stopped the command. A ConfigError,
    TrainingError, OSError or UnicodeError is shown to the user as one line, without a traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        # Names of files need not be text, and samples may have letters that a terminal does not.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        _refuse_unknown_arguments(getattr(args, "parser", parser), unknown)
    if not hasattr(args, "run_command"):
        parser.print_help()
        return 0
    try:
        # So that SIGTERM, too, removes temporary folders and ends the processes of the command.
        with Interruption():
            code = _run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader has seen enough, as in `| head`. Python would write once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (ConfigError, TrainingError, OSError, UnicodeError) as error:
        if getattr(args, "verbosity", 0) >= 1:
            traceback.print_exc()
        print(f"mtf-gradsync: error: {_as_line(error)}", file=sys.stderr)
        failed = isinstance(error, TrainingError) or getattr(error, "errno", None) in _NO_FAULT
        return EXIT_FAILED if failed else EXIT_BAD_CONFIG
    except KeyboardInterrupt as error:
        print("mtf-gradsync: interrupted", file=sys.stderr)
        return 128 + signal_of(error)


def _run(args: argparse.Namespace) -> int:
    """Runs the command that the parsed flags `args` name, and returns its exit code.

    With --json=-, the command writes only the JSON to standard output, and all else to standard
    error.
    """
    if getattr(args, "json", None) != "-":
        return args.run_command(args)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "output.json")
        args.json = str(file)
        with contextlib.redirect_stdout(sys.stderr):
            code = args.run_command(args)
        if file.exists():
            sys.stdout.write(file.read_text(encoding="utf-8"))
    return code


if __name__ == "__main__":
    sys.exit(main())
