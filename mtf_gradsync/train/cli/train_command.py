"""``mtf-gradsync train``: trains what gin files describe."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from mtf_gradsync.processes.members import LOST_PROCESS_EXIT_CODE, MissingProcessesError
from mtf_gradsync.runtimes.errors import ACCEPT_FLAG, SKIP_FLAG
from mtf_gradsync.train.cli.cluster_arguments import (
    add_cluster_arguments,
    process_of_flags,
    task_of_flags,
)
from mtf_gradsync.train.cli.gin_arguments import add_gin_arguments, gin_file_names, loaded_config

HELP = "train a transformer that gin files describe"
DESCRIPTION = """\
Trains a mesh_tensorflow.transformer model that gin files describe, then prints held-out
perplexity beside a unigram baseline, lets the model write, and leaves a page with plots
(report.html) and TensorBoard event files.

Ctrl-C stops after the current step and saves a checkpoint; the same command goes on from there."""

EPILOG = """\
examples:
  mtf-gradsync train --gin_file=configs/lm_cpu_mesh.gin
  mtf-gradsync train --gin_file=lm_cpu_mesh.gin --gin_param="train.run.train_steps = 50"
  mtf-gradsync train --gin_file=my_model.gin --gin_file=my_data.gin --model_dir=runs/mine
  mtf-gradsync train --gin_file=my_model.gin --cluster_spec=worker=a:2222,b:2222 \\
      --job_name=worker --task_index=0      (on a; on b with --task_index=1)

docs/training.md lists the bindings of train.run and the files that a run writes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the subcommand."""
    add_gin_arguments(parser)
    parser.add_argument(
        "--model_dir",
        metavar="DIR",
        help="where checkpoints and results go (default: runs/ and the name of the last gin file)",
    )
    parser.add_argument(
        ACCEPT_FLAG,
        action="store_true",
        help="go on from a checkpoint of another configuration: what only one of them has is "
        "dropped, or begins as in a new run",
    )
    parser.add_argument(
        SKIP_FLAG,
        action="store_true",
        help="where the newest checkpoint is damaged, put it aside and go on from an older one",
    )
    add_cluster_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Runs the subcommand and returns the exit code."""
    files = gin_file_names(args)
    model_dir = args.model_dir or os.path.join("runs", Path(files[-1]).stem if files else "train")
    with loaded_config(args):
        # Imported here because it takes seconds, which `--help` need not wait for.
        from mtf_gradsync.train import gin_files
        from mtf_gradsync.train.processes import run_on_cluster, run_on_processes
        from mtf_gradsync.train.run import Accepted, RunResult, run

        accepted = Accepted(
            differences=args.accept_checkpoint_differences, damage=args.skip_damaged_checkpoint
        )
        process = process_of_flags(args)
        task = None if process else task_of_flags(args)
        config = gin_files.run_config()
        watch = {"timeout": args.timeout, "silence": args.silence}
        result: RunResult | None
        try:
            if process:
                result = run_on_processes(config, model_dir, **process, **watch, accepted=accepted)
            elif task:
                watch["watch_port"] = args.watch_port
                result = run_on_cluster(config, model_dir, task, **watch, accepted=accepted)
            else:
                result = run(config, model_dir, accepted=accepted)
        except MissingProcessesError as error:
            print(f"mtf-gradsync: error: {error}", file=sys.stderr)
            return LOST_PROCESS_EXIT_CODE
    return 0 if result is None or result.stopped_by is None else 128 + result.stopped_by
