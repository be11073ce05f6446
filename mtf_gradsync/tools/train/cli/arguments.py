"""What commands share: their arguments and output files, and how they load a config."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import logging
import math
import os
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping, NamedTuple, Sequence

from mtf_gradsync.extension import (
    CONFIG_FILE,
    ConfigError,
    TrainingError,
    configs_dir,
    did_you_mean,
)

if TYPE_CHECKING:
    from mtf_gradsync.runtimes.cluster import Task


class Command(NamedTuple):
    """A subcommand: its texts, and functions of its parser and of its parsed arguments.

    `main` returns the exit code.
    """

    help: str
    description: str
    epilog: str | None
    add_arguments: Callable[[argparse.ArgumentParser], None]
    main: Callable[[argparse.Namespace], int]


def output_path(flag: str, name: str | None) -> Path | None:
    """Returns the path of a file to write, None for no name; raises if it cannot be written."""
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
    """Adds --json, whose file `write_output` writes."""
    parser.add_argument("--json", metavar="FILE", help=f"{what}; - is standard output")


def write_output(flag: str, path: Path | None, text: str) -> None:
    """Writes what a command has found to the file of a flag, if there is one, in one step."""
    if path is None:
        return
    # A device cannot be replaced.
    is_file = path.is_file() or not path.exists()
    beside = path.with_name(f".{path.name}.{os.getpid()}") if is_file else path
    with named_write_errors(flag, path):
        try:
            beside.write_text(text, encoding="utf-8")
            if is_file:
                os.replace(beside, path)
        except OSError:
            if is_file:
                beside.unlink(missing_ok=True)
            raise


def output_paths(names: Mapping[str, str | None]) -> list[Path | None]:
    """Returns the `output_path` of each flag; raises if two flags name the same file.

    Those of --png and --plot have to be named as pictures.
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
    """Makes a folder to write files to, unless no name is given; raises if it cannot be made."""
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
    """Turns an OSError of the block, of a full disk say, into a TrainingError with the flag."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise TrainingError(f"{flag}={path} cannot be written: {reason}") from error


# TensorFlow's and XLA's C++ log from here on (2: errors, 3: what ends the process). Libraries that
# are looked for and absent are "errors" there; real ones raise exceptions, too.
_FATAL_ALONE = "3"
_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


def import_package(verbosity: int) -> None:
    """Imports ``mtf_gradsync``, unless the command was started with it imported.

    With a verbosity below 0, and no lower TF_CPP_MIN_LOG_LEVEL in the environment, TensorFlow's C++
    code logs fatal errors only.
    """
    package = sys.modules["mtf_gradsync"]
    is_quiet = verbosity < 0 and os.environ.get(_LEVEL, _FATAL_ALONE) == _FATAL_ALONE
    if is_quiet:
        os.environ[_LEVEL] = _FATAL_ALONE
        # Mesh-TensorFlow's imports raise this warning.
        warnings.filterwarnings("ignore", "pkg_resources is deprecated")
    if not hasattr(package, "__all__"):
        quiet = _without_lines_of_c() if is_quiet else contextlib.nullcontext()
        with _saying_that_it_loads(), quiet:
            importlib.reload(package)
        # To build graphs makes many objects and little garbage: to look for it took a fifth of the
        # time. What was imported stays.
        gc.freeze()
        gc.set_threshold(100_000, 20, 20)


@contextlib.contextmanager
def _saying_that_it_loads(seconds: float = 1.0) -> Iterator[None]:
    """Prints a line on a terminal if the block takes longer."""
    if not (sys.stderr and sys.stderr.isatty()):
        yield
        return

    def say() -> None:
        # Where standard error is then: meanwhile it may be hidden from C++ code.
        print("Loading TensorFlow and Mesh-TensorFlow ...", file=sys.stderr, flush=True)

    timer = threading.Timer(seconds, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


@contextlib.contextmanager
def _without_lines_of_c() -> Iterator[None]:
    """Hides what C++ code prints, which TensorFlow 2.17 and later do before a log level is set.

    If the block raises, what was hidden is printed; if it ends the process, Python says where.
    """
    try:
        real = os.dup(2)
    except OSError:  # there is no standard error
        yield
        return
    before, was_enabled = sys.stderr, faulthandler.is_enabled()
    with tempfile.TemporaryFile() as held:
        # Python's own lines go on to be seen. Not closed: logging's handlers may have kept it.
        sys.stderr = os.fdopen(os.dup(real), "w", buffering=1)
        faulthandler.enable(sys.stderr)
        os.dup2(held.fileno(), 2)
        failed = True
        try:
            yield
            failed = False
        finally:
            os.dup2(real, 2)
            os.close(real)
            sys.stderr = before
            faulthandler.disable()
            if was_enabled:
                faulthandler.enable()
            if failed:
                held.seek(0)
                os.write(2, held.read())


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


def whole_number(least: int = 1, below: int | None = None) -> Callable[[str], int]:
    """Returns a type of arguments for argparse: whole numbers from `least` on."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least or (below and int(text) >= below):
            most = f" below {below}" if below else ""
            raise argparse.ArgumentTypeError(
                f"expected a whole number of {least} or more{most}; got {text!r}"
            )
        return int(text)

    return read


def number(text: str) -> float:
    """Returns the number in a text, of 0 or more; for another text argparse reports an error."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of 0 or more; got {text!r}")
    return value


def config_of_run(model_dir: str) -> str:
    """Returns the name of the config file that a run has left in its directory."""
    config_file = Path(model_dir) / CONFIG_FILE
    if not config_file.is_file():
        raise ConfigError(
            f"--model_dir={model_dir} is no run: it has no {config_file.name}, which "
            "mtf-gradsync train writes"
        )
    return str(config_file)


def gin_file_names(args: argparse.Namespace) -> list[str]:
    """Returns the names of the gin files; an argument may list several."""
    return _split_lists(args.gin_file)


@contextlib.contextmanager
def loaded_config(args: argparse.Namespace, before: Sequence[str] = ()) -> Iterator[None]:
    """Prepares TensorFlow for a mesh program and loads gin's configuration, `before` first.

    Errors that the config's own functions raise leave the block as a `ConfigError`.
    """
    paths = _split_lists(args.gin_location_prefix)
    files = [*before, *gin_file_names(args)]
    if not files and not args.gin_param:
        raise ConfigError(
            f"Give at least one --gin_file or --gin_param: without a config there is nothing to "
            f"{args.command} (mtf-gradsync init lists configs)"
        )
    for name in files:
        _check_is_there(name, paths)
    import_package(args.verbosity)
    # Imported here because it takes seconds, which `--help` need not wait for.
    from absl import flags
    from absl import logging as absl_logging

    from mtf_gradsync.extension import enable_mesh_defaults
    from mtf_gradsync.tools.train import gin_files

    absl_logging.set_verbosity(args.verbosity)
    # TensorFlow warns about every v1 call of Mesh-TensorFlow, which is all of them.
    quiet, info, debug = logging.ERROR, logging.INFO, logging.DEBUG
    level = quiet if args.verbosity < 0 else info if args.verbosity == 0 else debug
    logging.getLogger("tensorflow").setLevel(level)
    # Mesh-TensorFlow reads absl flags; they have their defaults here.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    enable_mesh_defaults()

    ignored = gin_files.load(files, args.gin_param, paths)
    if ignored:
        print(f"without meaning here, ignored: {', '.join(ignored)}")
    try:
        yield
    except (ConfigError, TrainingError):
        raise
    except (ValueError, TypeError, AttributeError, RuntimeError, KeyError, AssertionError) as error:
        raise ConfigError(gin_files.explain(error)) from error


def _check_is_there(name: str, paths: Sequence[str]) -> None:
    """Raises ConfigError for a gin file that is nowhere, before TensorFlow is imported."""
    folders = [Path(), *map(Path, paths), configs_dir(), configs_dir().parent]
    if "://" in name or any(Path(folder, name).exists() for folder in folders):
        return
    # gin also finds files of packages, by paths such as mesh_tensorflow/transformer/gin/x.gin.
    package = Path(name).parts[0]
    if package.isidentifier() and importlib.util.find_spec(package) is not None:
        return
    hint = did_you_mean(Path(name).name, [p.name for p in configs_dir().iterdir()], 1)
    hint = hint or " (mtf-gradsync init lists configs)"
    text = Path(name).with_suffix(".txt")
    if text.is_file():
        hint = f"; mtf-gradsync init --text {text} makes it"
    raise ConfigError(f"--gin_file={name}: there is no such file{hint}")


def check_model_dir(model_dir: str) -> None:
    """Raises ConfigError where a file stands in the way of a directory to write to."""
    path = Path(model_dir)
    first = next((one for one in (path, *path.parents) if one.exists()), None)
    if first is not None and not first.is_dir():
        raise ConfigError(f"--model_dir={model_dir} cannot be written to: {first} is a file")


def _split_lists(values: list[str]) -> list[str]:
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


_TASK = ("cluster_spec", "job_name", "task_index")
_PROCESS = ("coordinator", "num_processes", "process_id")


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that say which processes there are, and which of them this one is."""
    group = parser.add_argument_group(
        "several processes",
        "A placement mesh over tf.train.Servers: give --cluster_spec, --job_name and\n"
        "--task_index to each, or TF_CONFIG in its environment. XLA devices of several\n"
        "processes: give --coordinator, --num_processes and --process_id to each.",
    )
    group.add_argument(
        "--cluster_spec",
        metavar="SPEC",
        help='all tasks, like worker=host1:2222,host2:2222 or {"worker": ["host1:2222", ...]}',
    )
    group.add_argument("--job_name", metavar="JOB", help="the job of this task: chief, worker, ps")
    group.add_argument(
        "--task_index", type=whole_number(0), metavar="N", help="its number in the job, from 0"
    )
    group.add_argument(
        "--watch_port",
        type=whole_number(1, 1 << 16),
        metavar="PORT",
        help="where the tasks meet on the chief's machine (default: the first port after the "
        "chief's that no task has)",
    )
    group.add_argument(
        "--open_to_network",
        action="store_true",
        help="let TensorFlow's server, which obeys anybody, be called by other machines although "
        "the cluster's addresses are of this one",
    )
    group.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="address of process 0; the port is any free one there",
    )
    group.add_argument(
        "--num_processes", type=whole_number(1), metavar="N", help="how many there are"
    )
    group.add_argument(
        "--process_id", type=whole_number(0), metavar="N", help="which one this is, from 0"
    )
    group.add_argument(
        "--timeout",
        type=number,
        default=300.0,
        metavar="SECONDS",
        help="how long to wait for the others at the start (default: 300)",
    )
    group.add_argument(
        "--silence",
        type=number,
        default=20.0,
        metavar="SECONDS",
        help="without a sign of life for this long a process is lost (default: 20)",
    )


def is_alone(args: argparse.Namespace) -> bool:
    """Returns whether neither a flag nor TF_CONFIG says that this is one of several processes."""
    flags = any(getattr(args, name) is not None for name in (*_TASK, *_PROCESS))
    return not flags and not os.environ.get("TF_CONFIG")


def task_of_flags(args: argparse.Namespace) -> Task | None:
    """Returns the task that this process is by the flags or, without them, by TF_CONFIG.

    For a run in one process it returns None.
    """
    from mtf_gradsync.runtimes.cluster import task_of_environment, task_of_spec

    values = _all_or_none(args, _TASK)
    task: Task | None
    try:
        if values:
            task, source = task_of_spec(**values), "--cluster_spec"
        else:
            task, source = task_of_environment(), "TF_CONFIG"
            # So it is set for jobs of one process, too.
            if task is None or len(task.names) == 1:
                return None
    except ValueError as error:
        raise ConfigError(f"--cluster_spec: {error}" if values else str(error)) from error
    print(f"{task.names[task.number]} of the {len(task.names)} tasks of a cluster ({source})")
    return task


def process_of_flags(args: argparse.Namespace) -> dict[str, Any] | None:
    """Returns the flags of a process of XLA devices by name, or None if there are no such flags."""
    values = _all_or_none(args, _PROCESS)
    if values is None:
        return None
    if any(getattr(args, name) is not None for name in _TASK):
        raise ConfigError(
            f"--coordinator={args.coordinator} is for XLA devices, --cluster_spec for a placement "
            "mesh: give one of them"
        )
    if not 0 <= values["process_id"] < values["num_processes"]:
        raise ConfigError(
            f"--process_id must be between 0 and {values['num_processes'] - 1}; got "
            f"{values['process_id']}"
        )
    return values


def _all_or_none(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any] | None:
    values = {name: getattr(args, name) for name in names}
    given = [f"--{name}" for name, value in values.items() if value is not None]
    missing = [f"--{name}" for name, value in values.items() if value is None]
    if given and missing:
        raise ConfigError(f"{', '.join(given)} without {' and '.join(missing)}: give all three")
    return values if given else None
