"""Loads what commands need: the package and TensorFlow, without their noise, and gin files."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import logging
import os
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Iterator, Sequence

from mtf_gradsync.extension import did_you_mean
from mtf_gradsync.runtimes._common import ConfigError, TrainingError, configs_dir
from mtf_gradsync.tools.train.cli.flags import names_in

# TensorFlow's and XLA's C++ log from here on (2: errors, 3: what ends the process). Libraries that
# are looked for and absent are "errors" there; real ones raise exceptions, too.
_FATAL_ALONE = "3"
_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


def import_package(verbosity: int) -> None:
    """Imports the whole of ``mtf_gradsync``, unless this is done already.

    `verbosity` is the value of the flag --verbosity. If the value is below 0, TensorFlow's C++ code
    logs fatal errors only, unless TF_CPP_MIN_LOG_LEVEL in the environment asks for more.
    """
    package = sys.modules["mtf_gradsync"]
    is_quiet = verbosity < 0 and os.environ.get(_LEVEL, _FATAL_ALONE) == _FATAL_ALONE
    if is_quiet:
        os.environ[_LEVEL] = _FATAL_ALONE
        # Mesh-TensorFlow's imports raise this warning.
        warnings.filterwarnings("ignore", "pkg_resources is deprecated")
    if not hasattr(package, "__all__"):
        quiet = _without_cpp_messages() if is_quiet else contextlib.nullcontext()
        with _loading_message(), quiet:
            importlib.reload(package)
        # Building graphs makes many objects and little garbage: the search for garbage took a fifth
        # of the time. Imported objects stay.
        gc.freeze()
        gc.set_threshold(100_000, 20, 20)


@contextlib.contextmanager
def _loading_message(seconds: float = 1.0) -> Iterator[None]:
    """Shows on a terminal that TensorFlow loads, if the block takes more than `seconds` seconds."""
    if not (sys.stderr and sys.stderr.isatty()):
        yield
        return

    def say() -> None:
        # Read only here, because `_without_cpp_messages` may have replaced it in the meantime.
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
def _without_cpp_messages() -> Iterator[None]:
    """Hides what C++ code prints to standard error inside the block.

    While it is imported, TensorFlow 2.17 or later prints lines before a log level can be set. If
    the block raises an exception, the hidden lines are printed. If the block crashes the process,
    Python's fault handler prints the place in the code.
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


@contextlib.contextmanager
def loaded_config(args: argparse.Namespace, before: Sequence[str] = ()) -> Iterator[None]:
    """Prepares TensorFlow for a mesh program, and loads gin's configuration for the block.

    `args` are a command's parsed flags, with the flags of `add_gin_arguments`. The gin files
    `before` are loaded before the gin files that the flags name. If a function that the config
    names raises an exception inside the block, a `ConfigError` is raised in its place.
    """
    paths = names_in(args.gin_location_prefix)
    files = [*before, *names_in(args.gin_file)]
    if not files and not args.gin_param:
        raise ConfigError(
            f"Give at least one --gin_file or --gin_param: without a config there is nothing to "
            f"{args.command} (mtf-gradsync init lists configs)"
        )
    for name in files:
        _check_gin_file_exists(name, paths)
    import_package(args.verbosity)
    # Imported here because it takes seconds, which `--help` need not wait for.
    from absl import flags
    from absl import logging as absl_logging

    from mtf_gradsync.runtimes.settings import enable_mesh_defaults
    from mtf_gradsync.tools.train import gin_files
    from mtf_gradsync.tools.train.figures import check_drawing

    absl_logging.set_verbosity(args.verbosity)
    # TensorFlow warns about every v1 call of Mesh-TensorFlow, which is all of them.
    quiet, info, debug = logging.ERROR, logging.INFO, logging.DEBUG
    level = quiet if args.verbosity < 0 else info if args.verbosity == 0 else debug
    logging.getLogger("tensorflow").setLevel(level)
    # What a config imports may read absl flags; they have their defaults here.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    enable_mesh_defaults()

    ignored = gin_files.load(files, args.gin_param, paths)
    if ignored:
        print(f"these settings of the config have no effect and are ignored: {', '.join(ignored)}")
    if getattr(args, "png", None):
        check_drawing()
    try:
        yield
    except (ConfigError, TrainingError):
        raise
    except (ValueError, TypeError, AttributeError, RuntimeError, KeyError, AssertionError) as error:
        raise ConfigError(gin_files.explain_error(error)) from error


def _check_gin_file_exists(name: str, paths: Sequence[str]) -> None:
    """Raises ConfigError if a gin file does not exist, without importing TensorFlow.

    `name` is the gin file's name, and `paths` are the folders that --gin_location_prefix names.
    The file may also be in the current folder, or among the package's configs.
    """
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
