"""List what the cores exchange in a training step, bare and wrapped.

Builds the training step that gin files describe, with bare Mesh-TensorFlow (the innermost
optimizer alone) and with the optimizer of the config. Then lists what the cores exchange in the two
steps: the collectives of the SIMD (TPU) program, and the transfers between the devices of a
placement mesh. Nothing is trained, no data is read, and no TPU is needed.

Examples:
  mtf-gradsync report --gin_file=lm_cpu_mesh.gin
  mtf-gradsync report --gin_file=lm_cpu_mesh.gin --json=report.json --png=report.png
  mtf-gradsync report --gin_file=my_model.gin --gin_param="train.run.mesh_shape = 'batch:32'"

docs/simd.md explains the tables that this command prints.
"""

from __future__ import annotations

import argparse

from mtf_gradsync.tools.train.cli import flags
from mtf_gradsync.tools.train.cli.loading import loaded_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``mtf-gradsync report`` to its parser."""
    flags.add_gin_arguments(parser)
    parser.add_argument(
        "--rows",
        action="store_true",
        help="print every collective and transfer, each in a line of its own",
    )
    flags.add_output_arguments(
        parser, "write all rows and totals as JSON", picture="draw both steps side by side"
    )
    parser.add_argument(
        "--no_placement",
        action="store_true",
        help="skip the placement mesh, whose graphs take long to build on large meshes",
    )


def main(args: argparse.Namespace) -> int:
    """Runs ``mtf-gradsync report`` with its parsed flags `args`, and returns the exit code.

    The exit code is 0. A config whose training step cannot be built raises ConfigError.
    """
    paths = flags.output_paths({"--json": args.json, "--png": args.png})
    with loaded_config(args):
        # Imported here because it takes seconds, which `--help` need not wait for.
        from tqdm import tqdm

        from mtf_gradsync.tools.train import gin_files
        from mtf_gradsync.tools.train.comparison import as_text, compare_with_bare, plot_comparison
        from mtf_gradsync.tools.train.model import resolve_job

        job = resolve_job(gin_files.bound_run_config())
        # None: on terminals only.
        with tqdm(total=2, desc="building", unit="step", leave=False, disable=None) as bar:
            comparison = compare_with_bare(job, not args.no_placement, bar.update)
    print(as_text(comparison, args.rows))
    flags.write_json_and_picture(
        paths, comparison.to_json(), lambda path: plot_comparison(comparison, path)
    )
    return 0
