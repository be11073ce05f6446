"""``mtf-gradsync plan``: what a training would cost on chips that are not there, on each mesh."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, Callable, Sequence

from mtf_gradsync._signals import Interruption
from mtf_gradsync.runtimes.errors import ConfigError, TrainingError
from mtf_gradsync.train.cli.gin_arguments import add_gin_arguments, loaded_config
from mtf_gradsync.train.cli.outputs import output_paths, writing

HELP = "predict what a training costs on TPUs for each mesh shape, without a TPU"
DESCRIPTION = """\
Predicts what the training step that gin files describe would cost on TPUs, for each mesh shape
that the chips can have: whether it fits, the TPU compiler's estimate, what goes along each mesh
axis and how long that takes over the links, the step, tokens per second, share of the peak.
Nothing is trained, no data is read, and no TPU is needed: the compiler is (the extra [tpu])."""

EPILOG = """\
examples:
  mtf-gradsync plan --gin_file=lm_cpu_mesh.gin --topologies=v5e:2x4,v5p:2x2x2
  mtf-gradsync plan --gin_file=my_model.gin --topologies=v5e:16x16 --jobs=4 --json=plan.json
  mtf-gradsync plan --gin_file=my_model.gin --topologies=v5e:4x4 \\
      --mesh_shape="batch:16;model:1" --mesh_shape="batch:8;model:2"

Ctrl-C and SIGTERM print what was found until then. docs/plan.md explains the table."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the subcommand."""
    add_gin_arguments(parser)
    parser.add_argument(
        "--topologies",
        default="v5e:2x4",
        metavar="NAME[,NAME...]",
        help="TPU generations and chips (default: v5e:2x4); cpu:8 is eight CPU devices of this "
        "machine, at rates that are measured first",
    )
    parser.add_argument(
        "--mesh_shape",
        action="append",
        metavar="SHAPE",
        help="mesh shape to look at; may be given several times (default: all factorizations of "
        "the cores over the axes of the config's mesh)",
    )
    parser.add_argument(
        "--layout",
        action="append",
        metavar="RULES",
        help="layout rules to look at; may be given several times (default: the config's)",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="compilers at once (default: 1)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the plan as JSON, too")
    parser.add_argument("--png", metavar="FILE", help="draw it")


def main(args: argparse.Namespace) -> int:
    """Runs the subcommand and returns the exit code."""
    json_file, png_file = output_paths({"--json": args.json, "--png": args.png})
    if args.jobs < 1:
        raise ConfigError(f"--jobs must be 1 or more; got {args.jobs}")
    with Interruption() as stop, loaded_config(args):
        if png_file:
            from mtf_gradsync.train.figures import check_drawing

            check_drawing()
        plan = plan_config(
            args.topologies, args.mesh_shape, args.layout, args.jobs, begins=stop.check
        )
    print(plan)
    if json_file:
        with writing("--json", json_file):
            json_file.write_text(plan.to_json() + "\n", encoding="utf-8")
    if png_file:
        with writing("--png", png_file):
            plan.plot(str(png_file))
    if plan.stopped_by is not None:
        return 128 + plan.stopped_by  # as a shell says it
    return 0 if plan.rows else 1


def plan_config(
    topologies: str,
    mesh_shapes: Sequence[str] | None = None,
    layouts: Sequence[str] | None = None,
    jobs: int = 1,
    begins: Callable[[], None] = lambda: None,
) -> Any:
    """Plans the training step that gin's configuration describes, as `mtf_gradsync.plan` does.

    Without mesh_shapes it takes all factorizations over the axes of the config's mesh, without
    layouts the config's. `begins` is called when all is imported and checked.
    """
    # Not above: these take seconds, which `--help` need not.
    from mtf_gradsync import planning, xla
    from mtf_gradsync.train import gin_files
    from mtf_gradsync.train.config import axes_of
    from mtf_gradsync.train.model import TrainingJob, resolve_job
    from mtf_gradsync.train.train_graph import build_simd

    config = gin_files.run_config()

    def job_on(mesh_shape: str, layout: str) -> TrainingJob:
        return resolve_job(
            dataclasses.replace(
                config, mesh_shape=mesh_shape, layout_rules=layout, mesh_devices=None
            )
        )

    # One core divides everything: what is wrong here is wrong on each mesh.
    job_on("all:1", layout="")
    axes = None if mesh_shapes else axes_of(config.mesh_shape)

    def build(mesh_shape: str, layout: str) -> planning.Built:
        job = job_on(mesh_shape, layout)
        with gin_files.on_mesh(mesh_shape, layout):
            graph, program = build_simd(job)
        return planning.Built(program, [graph.loss], job.tokens_per_step)

    rules = list(layouts or [_as_text(config.layout_rules)])
    begins()
    try:
        return planning.plan(
            build,
            topologies,
            rules,
            mesh_shapes,
            axes,
            jobs,
            progress=True,
            refusals=(ConfigError,),
        )
    except xla.XlaMissingError as error:
        raise TrainingError(str(error)) from error
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _as_text(layout: Any) -> str:
    """Returns layout rules as text, from text or from pairs of names."""
    if isinstance(layout, str):
        return layout
    try:
        return ";".join(":".join(rule) for rule in layout)
    except TypeError as error:
        raise ConfigError(
            f"train.run.layout_rules = {layout!r} is no text; give --layout"
        ) from error
