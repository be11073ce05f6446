r"""Train a transformer that gin files describe.

Trains a mesh_tensorflow.transformer model that gin files describe. Then prints the model's
perplexity on held-out text beside the perplexity of a unigram baseline, and continuations of
held-out text that the model has written. Leaves a page with plots (report.html) and TensorBoard
event files in the run's directory.

Ctrl-C stops the training after the current step and saves a checkpoint. If the same command is
given again, the training goes on from this checkpoint.

Examples:
  mtf-gradsync train --gin_file=configs/lm_cpu_mesh.gin
  mtf-gradsync train --gin_file=lm_cpu_mesh.gin --gin_param="train.run.train_steps = 50"
  mtf-gradsync train --gin_file=my_model.gin --gin_file=my_data.gin --model_dir=runs/mine
  mtf-gradsync train --gin_file=my_model.gin --cluster_spec=worker=a:2222,b:2222 \
      --job_name=worker --task_index=0      (on a; on b with --task_index=1)

docs/training.md lists the bindings of train.run and the files that a run writes.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from pathlib import Path

from mtf_gradsync.runtimes._common import ACCEPT_FLAG, CONFIG_FILE, SKIP_FLAG, ConfigError
from mtf_gradsync.runtimes.processes.members import LOST_PROCESS_EXIT_CODE, MissingProcessesError
from mtf_gradsync.tools.train.cli import flags
from mtf_gradsync.tools.train.cli.loading import loaded_config
from mtf_gradsync.tools.train.cli.process_flags import add_cluster_arguments, is_alone, run_by_flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``mtf-gradsync train`` to its parser."""
    flags.add_gin_arguments(parser)
    parser.add_argument(
        "--model_dir",
        metavar="DIR",
        help="folder of checkpoints and results (default: runs/ and the last gin file's name)",
    )
    parser.add_argument(
        ACCEPT_FLAG,
        action="store_true",
        help="go on from a checkpoint of another configuration, or with other data: a variable "
        "of the checkpoint alone is dropped, and one of the run alone begins as in a new run",
    )
    parser.add_argument(
        SKIP_FLAG,
        action="store_true",
        help="if the newest checkpoint is damaged, put it aside and go on from an older checkpoint",
    )
    add_cluster_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Runs ``mtf-gradsync train`` with its parsed flags `args`, and returns the exit code.

    The exit code is 0 for a finished run, 128 + n if signal n has stopped the run, and
    LOST_PROCESS_EXIT_CODE if one of several processes was lost.
    """
    files = flags.names_in(args.gin_file)
    if args.model_dir and not (files or args.gin_param):
        left = Path(args.model_dir) / CONFIG_FILE
        if left.is_file():
            raise ConfigError(
                f"Give the config that made {args.model_dir}, or the one that this run has left: "
                f"--gin_file={left}"
            )
    model_dir = args.model_dir or os.path.join("runs", Path(files[-1]).stem if files else "train")
    # Of several processes only one writes there, and finds out after the meeting.
    if is_alone(args):
        flags.check_model_dir(model_dir)
    with loaded_config(args):
        # Imported here because it takes seconds, which `--help` need not wait for.
        from mtf_gradsync.tools.train import gin_files
        from mtf_gradsync.tools.train.run import Accepted, run

        accepted = Accepted(args.accept_checkpoint_differences, args.skip_damaged_checkpoint)
        config = gin_files.bound_run_config()
        try:
            work = functools.partial(run, accepted=accepted)
            result = run_by_flags(args, config, model_dir, work)
        except MissingProcessesError as error:
            print(f"mtf-gradsync: error: {error}", file=sys.stderr)
            return LOST_PROCESS_EXIT_CODE
    return 0 if result is None or result.stopped_by is None else 128 + result.stopped_by
