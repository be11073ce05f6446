"""The command ``mtf-gradsync``: its subcommands, one of them here, and one message for an error."""

from __future__ import annotations

import argparse
import collections
import contextlib
import errno
import importlib.metadata
import json
import os
import platform
import re
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Iterator, NoReturn, Sequence

from mtf_gradsync.extension import ConfigError, TrainingError, did_you_mean
from mtf_gradsync.runtimes._signals import signal_of
from mtf_gradsync.tools.train.cli import init, islands, runs, steps
from mtf_gradsync.tools.train.cli.arguments import (
    Command,
    add_json_argument,
    import_package,
    output_path,
    write_output,
)

EXIT_FAILED = 1
EXIT_BAD_CONFIG = 2

_ENV_DESCRIPTION = """\
Prints versions, the runtimes that train.run.runtime can name here and why others cannot run, and
the devices. Paste it into a bug report."""

_LIBRARIES = (
    "mtf-gradsync",
    "tensorflow",
    "mesh-tensorflow",
    "gin-config",
    "numpy",
    "jax",
    "jaxlib",
    "libtpu",
)


def _env_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the subcommand."""
    add_json_argument(parser, "write the same as JSON, too")


def _env(args: argparse.Namespace) -> int:
    """Runs the subcommand and returns the exit code."""
    json_file = output_path("--json", args.json)
    found: dict[str, str] = {}

    def show(name: str, value: str) -> None:
        found[name] = value
        print(f"{name:<24}{value}")

    show("Python", f"{platform.python_version()}, {sys.executable}")
    show("machine", f"{platform.platform()}, {os.cpu_count()} processors")
    for name in _LIBRARIES:
        show(name, version_of(name) or "not installed")
    # First what cannot fail: this command is for finding out why an environment is broken.
    sys.stdout.flush()
    code = 0
    try:
        import_package(verbosity=-1)
    except ImportError as error:
        show("runtimes", f"none, TensorFlow or Mesh-TensorFlow cannot be imported: {error}")
        code = EXIT_FAILED
    else:
        for name, value in _facts():
            show(name, value)
    write_output("--json", json_file, json.dumps(found, indent=2) + "\n")
    return code


def version_of(name: str) -> str:
    """Returns the version of a distribution; "" where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _facts() -> Iterator[tuple[str, str]]:
    """Yields names and values of what is known once the package is imported."""
    import mtf_gradsync
    from mtf_gradsync.extension import ESTIMATOR_AVAILABLE, tf
    from mtf_gradsync.runtimes import xla
    from mtf_gradsync.runtimes.sessions import fastest_runtime
    from mtf_gradsync.tools.train.config import transformer_utils

    yield "package", str(Path(mtf_gradsync.__file__).parent)
    yield "tf.estimator", "there" if ESTIMATOR_AVAILABLE else "gone: mtf_gradsync.estimator"
    found, no_xla = "", xla.why_no_xla()
    if not no_xla:
        try:
            # One device: asking for more would make more CPU devices.
            (first,) = xla.devices_for(1)
            kinds = collections.Counter(d.device_kind for d in first.client.devices())
            found = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
            if first.platform == "cpu":
                found = "cpu, as many as the mesh has cores"
        except xla.DevicesError as error:
            no_xla = str(error)
    yield "runtime xla", f"no: {no_xla}" if no_xla else f"yes, on {found}"
    yield "runtime cpu_replicas", "yes"
    devices = collections.Counter(d.device_type for d in tf.config.list_physical_devices())
    listed = ", ".join(f"{number} {kind}" for kind, number in devices.items())
    yield "runtime placement_mesh", f"yes, on {listed} of TensorFlow"
    yield "runtime fastest", f"is {fastest_runtime()[0]}"
    yield "TPU compiler", xla.why_no_tpu_compiler() or "there, for mtf-gradsync compile"
    try:
        transformer_utils()
        yield "extra train", "yes"
    except ConfigError as error:
        yield "extra train", f"no: {error}"
    yield "compiled programs", f"kept in {xla.default_cache_dir() or 'no folder'}"


ENV = Command(
    "print versions, runtimes and devices of this machine",
    _ENV_DESCRIPTION,
    None,
    _env_arguments,
    _env,
)

ISLANDS = Command(
    islands.HELP, islands.DESCRIPTION, islands.EPILOG, islands.add_arguments, islands.main
)

_COMMANDS = {
    "init": init.INIT,
    "train": runs.TRAIN,
    "sample": runs.SAMPLE,
    "report": steps.REPORT,
    "compile": steps.COMPILE,
    "plan": steps.PLAN,
    "verify": steps.VERIFY,
    "timeline": runs.TIMELINE,
    "islands": ISLANDS,
    "env": ENV,
}


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="mtf-gradsync",
        description="Gradient synchronization for Mesh-TensorFlow.",
        epilog="mtf-gradsync COMMAND --help tells more about a command.",
    )
    version = version_of("mtf-gradsync") or "of a checkout that is not installed"
    parser.add_argument("--version", action="version", version=f"mtf-gradsync {version}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, command in _COMMANDS.items():
        subparser = subparsers.add_parser(
            name,
            help=command.help,
            description=command.description,
            epilog=command.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run_command=command.main, command=name, parser=subparser)
    return parser


def _refuse(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """Ends the command because of arguments that it does not have, with similar ones."""
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


# What the system says of itself, and not of an argument.
_NO_FAULT = (errno.EDQUOT, errno.EIO, errno.ENOSPC)


def _as_line(error: Exception) -> str:
    """Returns what an error says; of the system's errors the reason and the file."""
    if isinstance(error, UnicodeEncodeError):
        return f"{error.object[:80]!r} is no text that can be written as {error.encoding}"
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    name = "" if error.filename is None else repr(error.filename)
    short = name if len(name) <= 80 else f"{name[:60]}... ({len(name)} characters)"
    return f"{error.strerror}: {short}" if name else error.strerror


def main(argv: list[str] | None = None) -> int:
    """Runs the command line of the process, or of `argv`, and returns the exit code.

    It is 0 when done, 1 when failed, 2 for bad arguments or config, 128 + n stopped by signal n.
    What the system says of a name or a text that it does not take is one line, too.
    """
    for stream in (sys.stdout, sys.stderr):
        # Names of files need not be text, and samples may have letters that a terminal does not.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        _refuse(getattr(args, "parser", parser), unknown)
    if not hasattr(args, "run_command"):
        parser.print_help()
        return 0
    try:
        code = _run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Who reads has seen enough, as in `| head`. Python would try again at its end.
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
    """Runs a command; with --json=-, its standard output is JSON, and all else goes to stderr."""
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
