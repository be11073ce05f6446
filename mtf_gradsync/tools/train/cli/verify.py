"""Prove that an update is the same however it is divided.

Shows whether an update of the training that gin files describe is the same however the update is
divided over cores and steps. From the same values and batches the command makes one update on one
core without wrappers, and one update in each division: on the config's mesh, with all cores along
one mesh axis, with another order of mesh axes, in microbatch steps, with each wrapper taken out,
with a masked shard, and on each runtime. It compares the gradients that reach the innermost
optimizer, the new values and slots on all cores, and the losses. For each division the answer is
one of three: equal to rounding; NOT EQUAL, with the first variable that differs, the factor by
which it differs, and the part of the division that causes the difference; or not shown, and why.

Examples:
  mtf-gradsync verify --gin_file=lm_cpu_mesh.gin
  mtf-gradsync verify --gin_file=my.gin --mesh_shape="batch:2;model:4" --divisions=wrappers
  mtf-gradsync verify --gin_file=my.gin --without=dropout --json=verified.json --png=verified.png

The exit code is 0 if all divisions are equal, 1 if one is NOT EQUAL, and 3 if equality was not
shown. docs/guides/verify.md explains the table that this command prints.
"""

from __future__ import annotations

import argparse

from mtf_gradsync.runtimes._signals import Interruption
from mtf_gradsync.tools.train.cli import flags
from mtf_gradsync.tools.train.cli.loading import loaded_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``mtf-gradsync verify`` to its parser."""
    flags.add_gin_arguments(parser)
    parser.add_argument(
        "--mesh_shape",
        action="append",
        metavar="SHAPE",
        help="mesh shape to try; may be given several times (default: those of --divisions)",
    )
    parser.add_argument(
        "--divisions",
        metavar="KIND[,KIND...]",
        help="batch, model, order, microbatches, wrappers, masked, runtimes (default: all, or with "
        "--mesh_shape none)",
    )
    parser.add_argument(
        "--without",
        metavar="WHAT[,WHAT...]",
        help="what to take out of the model: dropout, random",
    )
    flags.add_number(parser, "--steps", "N", "updates", 1, flags.whole_number())
    parser.add_argument(
        "--runtime",
        default="cpu_replicas",
        metavar="NAME",
        help="where divisions run: placement_mesh, cpu_replicas or xla (default: cpu_replicas)",
    )
    parser.add_argument(
        "--own_values",
        action="store_true",
        help="begin with the config's own initial values; by default they are moved a little",
    )
    flags.add_output_arguments(
        parser, "write all errors as JSON, too", picture="draw the error of each variable"
    )


def main(args: argparse.Namespace) -> int:
    """Runs ``mtf-gradsync verify`` with its parsed flags `args`, and returns the exit code.

    The exit code is 0 if the divisions are equal, 1 if one is NOT EQUAL, and 3 if equality was not
    shown.
    """
    paths = flags.output_paths({"--json": args.json, "--png": args.png})
    with Interruption() as stop, loaded_config(args):
        from mtf_gradsync.tools.train.verifying import verify_config

        stop.check()
        found = verify_config(
            args.mesh_shape,
            args.steps,
            None if args.divisions is None else args.divisions.split(","),
            args.without.split(",") if args.without else (),
            args.runtime,
            args.own_values,
        )
    print(found)
    flags.write_json_and_picture(paths, found.to_json(), found.plot)
    return found.exit_code
