"""The flags that commands share, and the files that they write."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Sequence

from mtf_gradsync.runtimes._common import CONFIG_FILE, ConfigError, TrainingError, write_text


def output_path(flag: str, name: str | None) -> Path | None:
    """Returns the path of the file that a flag such as "--json" names; None if it names none.

    `name` is the value of `flag`. Raises ConfigError if the file cannot be written.
    """
    if not name:
        return None
    path = Path(name)
    try:
        if path.is_dir():
            raise ConfigError(f"{flag}={name} is a folder; name a file, such as {path / 'output'}")
        if not path.parent.is_dir():
            raise ConfigError(f"{flag}={name} cannot be written: {path.parent} must be a directory")
        is_new = not os.path.lexists(path)
        if is_new or path.is_file():
            # Opened, as neither permissions nor /proc tell what can be made there.
            with open(path, "ab"):
                pass
            if is_new:
                path.unlink()
        elif not os.access(path, os.W_OK):
            raise ConfigError(f"{flag}={name} cannot be written: permission denied")
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{flag}={name} cannot be written: {reason}") from error
    return path


def add_json_argument(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds the flag --json, whose file `write_output` writes.

    `what` is the flag's help, such as "write the result as JSON, too".
    """
    parser.add_argument("--json", metavar="FILE", help=f"{what}; - is standard output")


def add_output_arguments(parser: argparse.ArgumentParser, what: str, picture: str) -> None:
    """Adds the flags --json and --png, whose files `write_json_and_picture` writes.

    `what` is the help of --json, and `picture` is the help of --png.
    """
    add_json_argument(parser, what)
    parser.add_argument("--png", metavar="FILE", help=picture)


def write_json_and_picture(
    paths: Sequence[Path | None], text: str, draw: Callable[[Path], Any]
) -> None:
    """Writes the result of a command to the files that --json and --png name.

    `paths` are the path of the JSON file and the path of the picture. Nothing is written for a path
    that is None. `text` is the JSON text, and `draw` is a function that writes the picture to a
    path.
    """
    json_file, png_file = paths
    write_output("--json", json_file, text + "\n")
    if png_file:
        with named_write_errors("--png", png_file):
            draw(png_file)


def write_output(flag: str, path: Path | None, text: str) -> None:
    """Writes `text` to the file that a flag names, atomically; nothing if `path` is None.

    Raises TrainingError, with the name of the `flag` in its text, if the file cannot be written.
    """
    if path is None:
        return
    with named_write_errors(flag, path):
        write_text(path, text)


def output_paths(names: Mapping[str, str | None]) -> list[Path | None]:
    """Returns the `output_path` of each flag, in the order of `names`, which has values by flag.

    Raises ConfigError if a file cannot be written, if two flags name the same file, or if the file
    of --png or --plot does not end in .png.
    """
    paths = {flag: output_path(flag, name) for flag, name in names.items()}
    flags: dict[Path, str] = {}
    for flag, path in paths.items():
        # A device takes all that is written to it.
        if path is not None and (path.is_file() or not path.exists()):
            other = flags.setdefault(Path(os.path.realpath(path)), flag)
            if other != flag:
                raise ConfigError(f"{other} and {flag} name the same file: {path}")
        is_picture = path is None or path.suffix.lower() == ".png" or path.is_char_device()
        if flag in ("--png", "--plot") and not is_picture:
            raise ConfigError(f"{flag}={path} writes a PNG picture: its name must end in .png")
    return list(paths.values())


def make_output_folder(flag: str, name: str | None) -> None:
    """Makes the folder `name` that a flag names, with its parents; nothing if `name` is None.

    Raises ConfigError, with the name of the `flag` in its text, if the folder cannot be made or
    written to.
    """
    if not name:
        return
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag}={name} cannot be made: {error.strerror or error}") from error
    if not os.access(name, os.W_OK):
        raise ConfigError(f"{flag}={name} cannot be written to: permission denied")


@contextlib.contextmanager
def named_write_errors(flag: str, path: Path) -> Iterator[None]:
    """Turns an OSError of the block, as of a full disk, into a TrainingError for the user.

    The error says that `path`, the file that `flag` names, cannot be written, and why.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise TrainingError(f"{flag}={path} cannot be written: {reason}") from error


_VERBOSITY = {"error": -2, "warning": -1, "info": 0, "debug": 1}


def add_gin_arguments(parser: Any) -> None:
    """Adds --gin_file, --gin_param, --gin_location_prefix and --verbosity."""
    parser.add_argument(
        "--gin_file",
        action="append",
        default=[],
        metavar="FILE[,FILE...]",
        help="gin file; may be given several times, later ones override",
    )
    parser.add_argument(
        "--gin_param",
        action="append",
        default=[],
        metavar="BINDING",
        help="gin binding that overrides the files; may be given several times",
    )
    parser.add_argument(
        "--gin_location_prefix",
        action="append",
        default=[],
        metavar="DIR[,DIR...]",
        help="directory to look for gin files in, besides the current one and the package's own",
    )
    parser.add_argument(
        "--verbosity",
        type=_verbosity,
        default=-1,
        metavar="LEVEL",
        help="-1 or warning (default), 0 or info: Mesh-TensorFlow's log too; "
        "1 or debug: also tracebacks of errors",
    )


def add_number(
    parser: Any,
    flag: str,
    metavar: str,
    what: str,
    default: float | None = None,
    kind: Callable[[str], float] | None = None,
) -> None:
    """Adds a flag for a number; its help is `what`, and the default if there is one.

    `kind` parses the number, such as a result of `whole_number`; None takes `nonnegative_number`.
    """
    shown = "" if default is None else f" (default: {default:g})"
    parser.add_argument(
        flag,
        type=kind or nonnegative_number,
        default=default,
        metavar=metavar,
        help=f"{what}{shown}",
    )


def whole_number(least: int = 1, below: int | None = None) -> Callable[[str], int]:
    """Returns a function, for `type=` of argparse, that parses a whole number of `least` or more.

    Unless `below` is None, the number also has to be less than `below`. The returned function
    raises ArgumentTypeError for any other text.
    """

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least or (below and int(text) >= below):
            most = f" below {below}" if below else ""
            raise argparse.ArgumentTypeError(
                f"expected a whole number of {least} or more{most}; got {text!r}"
            )
        return int(text)

    return read


def nonnegative_number(text: str) -> float:
    """Parses a finite number of 0 or more; raises argparse.ArgumentTypeError for another text."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of 0 or more; got {text!r}")
    return value


def config_of_run(model_dir: str) -> str:
    """Returns the path of the config file that a run left in its directory.

    Raises ConfigError, which names the flag --model_dir, if the directory has no config file.
    """
    config_file = Path(model_dir) / CONFIG_FILE
    if not config_file.is_file():
        raise ConfigError(
            f"--model_dir={model_dir} is no run: it has no {config_file.name}, which "
            "mtf-gradsync train writes"
        )
    return str(config_file)


def check_model_dir(model_dir: str) -> None:
    """Raises ConfigError if the path of a run's directory, or of a folder above it, is a file."""
    path = Path(model_dir)
    first = next((one for one in (path, *path.parents) if one.exists()), None)
    if first is not None and not first.is_dir():
        raise ConfigError(f"--model_dir={model_dir} cannot be written to: {first} is a file")


def names_in(values: Sequence[str]) -> list[str]:
    """Returns the names in the values of a flag; a value is one name or several with commas."""
    return [part for value in values for part in value.split(",") if part]


def _verbosity(text: str) -> int:
    if text in _VERBOSITY:
        return _VERBOSITY[text]
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected a number or one of {', '.join(_VERBOSITY)}; got {text!r}"
        ) from None
