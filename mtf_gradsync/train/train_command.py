"""``mtf-gradsync train``: trains what gin files describe."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import Any

from mtf_gradsync.train.errors import ConfigError, TrainingError

_DESCRIPTION = """\
Trains a mesh_tensorflow.transformer model that gin files describe, then prints held-out
perplexity beside a unigram baseline, lets the model write, and draws the loss curve.

Ctrl-C stops after the current step and saves a checkpoint; the same command goes on from there."""

_EPILOG = """\
examples:
  mtf-gradsync train --gin_file=configs/lm_cpu_mesh.gin
  mtf-gradsync train --gin_file=lm_cpu_mesh.gin --gin_param="train.run.train_steps = 50"
  mtf-gradsync train --gin_file=my_model.gin --gin_file=my_data.gin --model_dir=runs/mine

docs/training.md lists the bindings of train.run and the files that a run writes."""

_VERBOSITY = {"error": -2, "warning": -1, "info": 0, "debug": 1}


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand to the parser of ``mtf-gradsync``."""
    parser = subparsers.add_parser(
        "train",
        help="train a transformer that gin files describe",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
        "--model_dir",
        metavar="DIR",
        help="where checkpoints and results go (default: runs/ and the name of the last gin file)",
    )
    parser.add_argument(
        "--verbosity",
        type=_verbosity,
        default=-1,
        metavar="LEVEL",
        help="-1 or warning (default), 0 or info: Mesh-TensorFlow's log too; "
        "1 or debug: also tracebacks of errors",
    )
    parser.set_defaults(run_command=main)


def main(args: argparse.Namespace) -> int:
    """Runs the subcommand and returns the exit code."""
    # Not above: these take seconds, which `--help` need not.
    from absl import flags
    from absl import logging as absl_logging

    from mtf_gradsync.train import gin_files
    from mtf_gradsync.train.run import run
    from mtf_gradsync.train.session import enable_mesh_defaults

    absl_logging.set_verbosity(args.verbosity)
    # TensorFlow warns about every v1 call of Mesh-TensorFlow, which is all of them.
    quiet, info, debug = logging.ERROR, logging.INFO, logging.DEBUG
    level = quiet if args.verbosity < 0 else info if args.verbosity == 0 else debug
    logging.getLogger("tensorflow").setLevel(level)
    # Mesh-TensorFlow reads absl flags; they have their defaults here.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    enable_mesh_defaults()

    files = _split_lists(args.gin_file)
    ignored = gin_files.load(files, args.gin_param, _split_lists(args.gin_location_prefix))
    if ignored:
        print(f"without meaning here, ignored: {', '.join(ignored)}")
    model_dir = args.model_dir or os.path.join("runs", Path(files[-1]).stem if files else "train")
    try:
        result = run(model_dir=model_dir)
    except (ConfigError, TrainingError):
        raise
    except (ValueError, TypeError, AttributeError, RuntimeError, KeyError, AssertionError) as error:
        raise ConfigError(gin_files.explain(error)) from error
    return 0 if result.stopped_by is None else 128 + result.stopped_by


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
