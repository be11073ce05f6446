"""The command ``mtf-gradsync``: its subcommands, two of them here, and one message for an error."""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import os
import platform
import sys
import traceback
from pathlib import Path
from typing import Iterator, Sequence

from mtf_gradsync._common import ConfigError, TrainingError, configs_dir
from mtf_gradsync._signals import signal_of
from mtf_gradsync.train.cli import islands, runs, steps
from mtf_gradsync.train.cli.arguments import Command, import_package, output_path

EXIT_FAILED = 1
EXIT_BAD_CONFIG = 2

_INIT_DESCRIPTION = """\
Copies a gin file that comes with the package, to be changed and trained. Without a name it lists
what there is. A file that is there already stays as it is. With --text it trains on text files of
yours; the last tenth is held out."""

_INIT_EPILOG = """\
examples:
  mtf-gradsync init
  mtf-gradsync init lm_cpu_mesh
  mtf-gradsync init lm_cpu_mesh my_model.gin
  mtf-gradsync init --text novel.txt letters.txt"""

_COMMAND = "mtf-gradsync train --gin_file="
# The config that --text takes by itself.
_OF_TEXT = "lm_cpu_mesh"


def _init_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the subcommand."""
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="which one; none lists them")
    parser.add_argument(
        "file", nargs="?", metavar="FILE", help="the copy (default: CONFIG.gin in this directory)"
    )
    parser.add_argument(
        "--text", nargs="+", metavar="TEXT", default=[],
        help=f"UTF-8 text files to train on (CONFIG: {_OF_TEXT})",
    )  # fmt: skip


def _init(args: argparse.Namespace) -> int:
    """Runs the subcommand and returns the exit code."""
    texts = _examples()
    if args.text and args.config is None:
        args.config = _OF_TEXT
    if args.config is None:
        for name, text in texts.items():
            print(f"{name}\n    {_summary(text)}")
        return 0
    name = Path(args.config).stem
    if name not in texts:
        raise ConfigError(f"There is no config {args.config!r}; there are {', '.join(texts)}")
    path = output_path("FILE", args.file or f"{name}.gin")
    text = texts[name].replace(f"{_COMMAND}configs/{name}.gin", f"{_COMMAND}{path}")
    if args.text:
        text += _on_text(args.text)
    assert path is not None
    try:
        with open(path, "x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} is there already; name another FILE") from None
    print(f"{path} is a copy of {name}.gin. To train it:\n  {_COMMAND}{path}")
    return 0


def _on_text(names: Sequence[str]) -> str:
    """Returns what makes a config train on text files, which are read once to check them."""
    for name in names:
        try:
            is_empty = not Path(name).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--text: cannot read {name!r} as UTF-8: {error}") from error
        if is_empty:
            raise ConfigError(f"--text: {name!r} is empty")
    files = "".join(f"    {str(Path(name).absolute())!r},\n" for name in names)
    return (
        "\n# The text, in place of Python's documentation.\n"
        "train.run.train_dataset_fn = @text_files\n"
        f"train.run.eval_dataset_fn = @text_files\ntext_files.files = [\n{files}]\n"
    )


def _examples() -> dict[str, str]:
    """Returns the configs that can be trained as they are, by name."""
    files = sorted(configs_dir().glob("*.gin"))
    texts = {path.stem: path.read_text(encoding="utf-8") for path in files}
    return {name: text for name, text in texts.items() if _COMMAND in text}


def _summary(text: str) -> str:
    """Returns the first sentences of a config's comment."""
    lines = text.splitlines()[1:]
    comment = lines[: lines.index("#")] if "#" in lines else lines[:1]
    return "\n    ".join(line.lstrip("# ") for line in comment)


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
    """Adds nothing: the subcommand takes no arguments."""


def _env(args: argparse.Namespace) -> int:
    """Runs the subcommand and returns the exit code."""
    del args
    _print("Python", f"{platform.python_version()}, {sys.executable}")
    _print("machine", f"{platform.platform()}, {os.cpu_count()} processors")
    for name in _LIBRARIES:
        _print(name, version_of(name) or "not installed")
    # First what cannot fail: this command is for finding out why an environment is broken.
    sys.stdout.flush()
    try:
        import_package(verbosity=-1)
    except ImportError as error:
        _print("runtimes", f"none, TensorFlow or Mesh-TensorFlow cannot be imported: {error}")
        return EXIT_FAILED
    for name, value in _facts():
        _print(name, value)
    return 0


def version_of(name: str) -> str:
    """Returns the version of a distribution; "" where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _print(name: str, value: str) -> None:
    print(f"{name:<24}{value}")


def _facts() -> Iterator[tuple[str, str]]:
    """Yields names and values of what is known once the package is imported."""
    import mtf_gradsync
    from mtf_gradsync import xla
    from mtf_gradsync._private.libraries import ESTIMATOR_AVAILABLE, tf
    from mtf_gradsync.train.config import transformer_utils

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
    yield "runtime fastest", f"is {'cpu_replicas' if no_xla else 'xla'}"
    yield "TPU compiler", xla.why_no_tpu_compiler() or "there, for mtf-gradsync compile"
    try:
        transformer_utils()
        yield "extra train", "yes"
    except ConfigError as error:
        yield "extra train", f"no: {error}"
    yield "compiled programs", f"kept in {xla.default_cache_dir() or 'no folder'}"


INIT = Command(
    "copy an example config to start from", _INIT_DESCRIPTION, _INIT_EPILOG, _init_arguments, _init
)
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
    "init": INIT,
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
        subparser.set_defaults(run_command=command.main)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the command line of the process, or of `argv`, and returns the exit code.

    It is 0 when done, 1 when failed, 2 for bad arguments or config, 128 + n stopped by signal n.
    """
    for stream in (sys.stdout, sys.stderr):
        # Names of files need not be text, and samples may have letters that a terminal does not.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    parser = build_parser()
    args = parser.parse_args(argv)
    if not hasattr(args, "run_command"):
        parser.print_help()
        return 0
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
