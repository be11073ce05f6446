"""Compile what gin files describe for a TPU, without a TPU.

Builds the training step that gin files describe, as a TPU program, and compiles the program with
the real TPU compiler. Prints whether the compiler accepts the program, the collectives before and
after the compiler's optimizations, the memory per core and an estimate of a step's cost. Nothing is
trained and no TPU is needed.

This command needs the extra "tpu": in a clone, pip install ".[train,tpu]".

Examples:
  mtf-gradsync compile --gin_file=configs/lm_cpu_mesh.gin --topology=v3:2x2
  mtf-gradsync compile --gin_file=lm_cpu_mesh.gin --topology=v5e:2x4 --json=compiled.json

The topology must have as many cores as the config's mesh. The exit code is 0 if the compiler
accepts the program, and 1 if it refuses the program. docs/tpu.md says what the printed numbers
mean.
"""

from __future__ import annotations

import argparse
from typing import Any

from mtf_gradsync.runtimes._common import ConfigError, TrainingError
from mtf_gradsync.tools.train.cli import flags
from mtf_gradsync.tools.train.cli.loading import loaded_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``mtf-gradsync compile`` to its parser."""
    flags.add_gin_arguments(parser)
    parser.add_argument(
        "--topology",
        default="v3:2x2",
        metavar="NAME",
        help="TPU generation and chips, or a TPU slice as in v4-8 (default: v3:2x2, of 8 cores)",
    )
    flags.add_json_argument(parser, "write the result as JSON, too")
    parser.add_argument(
        "--compare_with_bare",
        action="store_true",
        help="show the estimate for the innermost optimizer alone, too",
    )
    parser.add_argument(
        "--update_not_split",
        action="store_true",
        help="compile a second time without splitting the update over the cores, to compare bytes",
    )
    parser.add_argument(
        "--save_hlo",
        metavar="DIR",
        help="write the program before and after optimization to this folder, as HLO text",
    )


def main(args: argparse.Namespace) -> int:
    """Runs ``mtf-gradsync compile`` with its parsed flags `args`, and returns the exit code.

    The exit code is 0 if the TPU compiler accepts the training step, and 1 if it refuses the step.
    """
    json_file = flags.output_path("--json", args.json)
    flags.make_output_folder("--save_hlo", args.save_hlo)
    with loaded_config(args):
        compiled = compile_config(
            args.topology, args.save_hlo, args.compare_with_bare, args.update_not_split
        )
    print(compiled)
    flags.write_output("--json", json_file, compiled.to_json() + "\n")
    return 0 if compiled.accepted else 1


def compile_config(
    topology: str,
    save_hlo: str | None = None,
    compare_with_bare: bool = False,
    update_not_split: bool = False,
) -> Any:
    """Compiles the training step of gin's configuration by `mtf_gradsync.xla.compile_for_tpu`.

    `topology` names the TPU, such as "v5e:2x4". `save_hlo` is a folder into which the program is
    written as text. With `update_not_split` the step is also compiled without splitting the update
    over the cores. With `compare_with_bare` a step with the innermost optimizer alone is estimated,
    too. The step counter and the learning rate, which follows from the counter, stay outside the
    program, on the host, as with TPUEstimator. Returns the result of `compile_for_tpu`.
    """
    # Imported here because it takes seconds, which `--help` need not wait for.
    from mtf_gradsync.extension import tf
    from mtf_gradsync.runtimes import xla
    from mtf_gradsync.runtimes.simd.program import compiled_only
    from mtf_gradsync.tools.train import gin_files
    from mtf_gradsync.tools.train.comparison import innermost_of
    from mtf_gradsync.tools.train.errors import raised_as
    from mtf_gradsync.tools.train.model import resolve_job
    from mtf_gradsync.tools.train.train_graph import build_simd

    # Before the graph, which may take a minute.
    missing = xla.why_no_tpu_compiler()
    if missing:
        raise TrainingError(missing)
    job = resolve_job(gin_files.bound_run_config())
    bare, bare_fetches = None, []
    if compare_with_bare:
        with tf.Graph().as_default(), compiled_only():
            bare_graph, bare = build_simd(job._replace(optimizer=innermost_of(job.optimizer)))
            bare_fetches = [bare_graph.loss]
    with tf.Graph().as_default(), compiled_only():
        graph, program = build_simd(job)
        with raised_as(TrainingError, xla.CompilerDiedError), raised_as(ConfigError, ValueError):
            return xla.compile_for_tpu(
                program, [graph.loss], topology, save_hlo, bare, update_not_split, bare_fetches
            )
