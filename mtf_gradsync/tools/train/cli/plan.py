r"""Predict what a training costs on TPUs for each mesh shape, without a TPU.

Predicts what the training step that gin files describe would cost on TPUs, for each mesh shape
that the chips can have: whether it fits, the time of its operations, what goes along each mesh
axis and how long that takes over the links, the step, tokens per second, share of the peak.
Nothing is trained, no data is read, and no TPU is needed: the compiler is (the extra [tpu]).

Examples:
  mtf-gradsync plan --gin_file=lm_cpu_mesh.gin --topologies=v5e:2x4,v5p:2x2x2
  mtf-gradsync plan --gin_file=my_model.gin --topologies=v5e:16x16 --jobs=4 --json=plan.json
  mtf-gradsync plan --gin_file=my_model.gin --topologies=v5e:4x4 \
      --mesh_shape="batch:16;model:1" --mesh_shape="batch:8;model:2"

Ctrl-C and SIGTERM print what was found until then. docs/plan.md explains the table.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from typing import Any, Callable, Sequence

from mtf_gradsync.runtimes._common import ConfigError, TrainingError
from mtf_gradsync.runtimes._signals import Interruption
from mtf_gradsync.tools.train.cli.flags import (
    add_gin_arguments,
    add_output_arguments,
    number,
    output_paths,
    whole_number,
    write_found,
)
from mtf_gradsync.tools.train.cli.loading import loaded_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the subcommand."""
    add_gin_arguments(parser)
    parser.add_argument(
        "--topologies",
        default="v5e:2x4",
        metavar="NAME[,NAME...]",
        help="TPU generations and chips, or slices as in v4-8 (default: v5e:2x4)",
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
    parser.add_argument(
        "--dcn_bandwidth",
        type=number,
        metavar="GB/S",
        help="what a chip sends over the data center network between slices, needed for topologies "
        "of several, as in 2xv5e:4x4",
    )
    parser.add_argument(
        "--inner_steps",
        type=_whole_numbers,
        default=(10, 36, 100),
        metavar="H[,H...]",
        help="steps after which slices would exchange values, to say when fewer messages pay "
        "(default: 10,36,100)",
    )
    parser.add_argument(
        "--price",
        type=_price,
        metavar="CHIP_HOUR",
        help="dollars for an hour of a chip, one number or one for each generation, as in "
        "v5e:1.2,v5p:4.2: adds what a billion tokens cost (default: no price)",
    )
    add_output_arguments(parser, "write the plan as JSON, too", picture="draw it")


def _whole_numbers(text: str) -> tuple[int, ...]:
    """Parses the value of --inner_steps."""
    return tuple(map(whole_number(1), text.split(",")))


def _price(text: str) -> float | dict[str, float]:
    """Parses the value of --price."""
    try:
        if ":" not in text:
            return number(text)
        pairs = (part.split(":") for part in text.split(","))
        return {generation: number(dollars) for generation, dollars in pairs}
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(
            f"expected dollars for an hour of a chip, like 1.2 or v5e:1.2,v5p:4.2; got {text!r}"
        ) from None


def main(args: argparse.Namespace) -> int:
    """Runs the subcommand and returns the exit code."""
    paths = output_paths({"--json": args.json, "--png": args.png})
    if args.jobs < 1:
        raise ConfigError(f"--jobs must be 1 or more; got {args.jobs}")
    with Interruption() as stop, loaded_config(args):
        plan = plan_config(
            args.topologies,
            args.mesh_shape,
            args.layout,
            args.jobs,
            begins=stop.check,
            price=args.price,
            dcn_bandwidth=args.dcn_bandwidth,
            inner_steps=args.inner_steps,
        )
    print(plan)
    write_found(paths, plan.to_json(), lambda path: plan.plot(str(path)))
    if plan.stopped_by is not None:
        return 128 + plan.stopped_by  # as a shell says it
    return 0 if plan.rows else 1


def plan_config(
    topologies: str,
    mesh_shapes: Sequence[str] | None = None,
    layouts: Sequence[str] | None = None,
    jobs: int = 1,
    begins: Callable[[], None] = lambda: None,
    **more: Any,
) -> Any:
    """Plans the training step that gin's configuration describes, as `mtf_gradsync.plan` does.

    Without mesh_shapes it takes all factorizations over the axes of the config's mesh, without
    layouts the config's. `begins` is called when all is imported and checked. `more` are price,
    dcn_bandwidth and inner_steps of `mtf_gradsync.plan`.
    """
    # Not above: these take seconds, which `--help` need not.
    from mtf_gradsync.extension import tf
    from mtf_gradsync.runtimes import xla
    from mtf_gradsync.tools import planning
    from mtf_gradsync.tools.train import gin_files
    from mtf_gradsync.tools.train.errors import raised_as
    from mtf_gradsync.tools.train.mesh_settings import axes_of
    from mtf_gradsync.tools.train.model import TrainingJob, resolve_job
    from mtf_gradsync.tools.train.train_graph import build_simd, forward_loss, steps_per_update

    config = gin_files.bound_run_config()

    def job_on(mesh_shape: str, layout: str) -> TrainingJob:
        return resolve_job(
            dataclasses.replace(
                config, mesh_shape=mesh_shape, layout_rules=layout, mesh_devices=None
            )
        )

    # One core divides everything: what is wrong here is wrong on each mesh.
    alone = job_on("all:1", layout="")
    axes = None if mesh_shapes else axes_of(config.mesh_shape)

    def build(mesh_shape: str, layout: str) -> planning.Built:
        job = job_on(mesh_shape, layout)
        with gin_files.bound_to_mesh(mesh_shape, layout):
            graph, program = build_simd(job)
        return planning.Built(
            program,
            [graph.loss],
            job.tokens_per_step,
            graph.num_parameters,
            steps_per_update(graph.optimizers),
            needed,
        )

    rules = list(layouts or [_as_text(config.layout_rules)])
    begins()
    needed: float | None = None
    # A model in a loop has no count, and the plan takes its parameters.
    with tf.Graph().as_default(), contextlib.suppress(ValueError):
        needed = planning.model_flops(forward_loss(alone))
    with raised_as(TrainingError, xla.XlaMissingError), raised_as(ConfigError, ValueError):
        return planning.plan(
            build,
            topologies,
            rules,
            mesh_shapes,
            axes,
            jobs,
            progress=True,
            refusals=(ConfigError,),
            **more,
        )


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
