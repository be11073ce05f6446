"""The arguments of every command that reads gin files, and what they do."""

from __future__ import annotations

import argparse
import contextlib
import logging
from pathlib import Path
from typing import Any, Iterator, Sequence

from mtf_gradsync.runtimes.errors import ConfigError, TrainingError
from mtf_gradsync.train.cli.package import import_package

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


def positive_count(text: str) -> int:
    """Returns the positive whole number in a text; for another text argparse reports an error."""
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive whole number; got {text!r}")
    return int(text)


def config_of_run(model_dir: str) -> str:
    """Returns the name of the config file that a run has left in its directory."""
    config_file = Path(model_dir) / "operative_config.gin"
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
        raise ConfigError("Give at least one --gin_file or --gin_param; there is nothing to train")
    import_package(args.verbosity)
    # Imported here because it takes seconds, which `--help` need not wait for.
    from absl import flags
    from absl import logging as absl_logging

    from mtf_gradsync.session import enable_mesh_defaults
    from mtf_gradsync.train import gin_files

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
