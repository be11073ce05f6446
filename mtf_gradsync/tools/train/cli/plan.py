r"""Predict what a training costs on TPUs for each mesh shape, without a TPU.

Predicts what the training step that gin files describe would cost on TPUs, for each mesh shape
that the chips can have: whether the program fits into memory, the time of its operations, the bytes
that cores put into collectives along each mesh axis and the time that these take on the links, the
time of a step, tokens per second, and the share of the chips' peak. Nothing is trained, no data is
read, and no TPU is needed. The TPU compiler is needed (extra [tpu]).

Examples:
  mtf-gradsync plan --gin_file=lm_cpu_mesh.gin --topologies=v5e:2x4,v5p:2x2x2
  mtf-gradsync plan --gin_file=my_model.gin --topologies=v5e:16x16 --jobs=4 --json=plan.json
  mtf-gradsync plan --gin_file=my_model.gin --topologies=v5e:4x4 \
      --mesh_shape="batch:16;model:1" --mesh_shape="batch:8;model:2"
  mtf-gradsync plan --best --chips=v5e:256 --budget_bytes=12e9 --gin_file=my_model.gin

With --best the command finds the best division of the training: the mesh, the layout, the number of
microbatch steps and the wrappers for which an update fits into memory and is predicted to take the
shortest time. It prints the gin lines for this division, and proves on this machine that the
division trains the same. The exit code is 0 if a division is found and proved, 1 if none fits or
the proof finds it NOT EQUAL, and 3 if the proof shows neither.

Ctrl-C and SIGTERM end the search for meshes; the command then prints what the search has found.
docs/plan.md explains the printed table.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any, Callable, Sequence

from mtf_gradsync.runtimes._common import ConfigError, TrainingError
from mtf_gradsync.runtimes._signals import Interruption
from mtf_gradsync.tools.train.cli import flags
from mtf_gradsync.tools.train.cli.loading import loaded_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``mtf-gradsync plan`` to its parser."""
    flags.add_gin_arguments(parser)
    parser.add_argument(
        "--topologies",
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
        help="layout rules to look at; may be given several times (default: the config's; --best "
        "adds rules where these do not split the batch or the model)",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="compilers at once (default: 1)"
    )
    parser.add_argument(
        "--dcn_bandwidth",
        type=flags.nonnegative_number,
        metavar="GB/S",
        help="GB/s that a chip sends over the data center network between TPU slices; needed for "
        "topologies of several slices, as in 2xv5e:4x4",
    )
    parser.add_argument(
        "--inner_steps",
        type=_whole_numbers,
        metavar="H[,H...]",
        help="numbers of steps after which TPU slices would exchange values; the plan says whether "
        "this saves time (default: 10,36,100)",
    )
    parser.add_argument(
        "--price",
        type=_price,
        metavar="CHIP_HOUR",
        help="dollars for an hour of a chip, one number or one for each generation, as in "
        "v5e:1.2,v5p:4.2: the plan then says what a billion tokens cost (default: no price)",
    )
    best = parser.add_argument_group("find the best division")
    best.add_argument(
        "--best",
        action="store_true",
        help="find the division of the training with the shortest predicted update",
    )
    best.add_argument(
        "--chips", metavar="NAME:COUNT", help="chips to use, as in v5e:256; with --best"
    )
    best.add_argument(
        "--budget_bytes",
        "--budget-bytes",
        type=flags.nonnegative_number,
        metavar="BYTES",
        help="memory of a chip that the program may use (default: what the compiler allows)",
    )
    best.add_argument(
        "--most_steps",
        type=flags.whole_number(1),
        metavar="K",
        help="the most microbatch steps of an update (default: 64)",
    )
    best.add_argument(
        "--outer_steps",
        action="store_true",
        help="consider outer steps, too, after --inner_steps steps; they change the training",
    )
    best.add_argument(
        "--no_proof", action="store_true", help="do not verify the division on this machine"
    )
    flags.add_output_arguments(parser, "write the plan as JSON, too", picture="draw it")


def _whole_numbers(text: str) -> tuple[int, ...]:
    """Parses the value of --inner_steps: whole numbers with commas, such as "10,36,100"."""
    return tuple(map(flags.whole_number(1), text.split(",")))


def _price(text: str) -> float | dict[str, float]:
    """Parses the value of --price, dollars for an hour of a chip.

    The result is one number, or, for a text such as "v5e:1.2,v5p:4.2", a dictionary with a number
    for each generation of TPUs.
    """
    try:
        if ":" not in text:
            return flags.nonnegative_number(text)
        pairs = (part.split(":") for part in text.split(","))
        return {generation: flags.nonnegative_number(dollars) for generation, dollars in pairs}
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(
            f"expected dollars for an hour of a chip, like 1.2 or v5e:1.2,v5p:4.2; got {text!r}"
        ) from None


def main(args: argparse.Namespace) -> int:
    """Runs ``mtf-gradsync plan`` with its parsed flags `args`, and returns the exit code.

    The exit code is 0 if there is a plan, 1 if no mesh can be planned, and 128 + n if signal n has
    ended the search. With --best it is 0 if a division was found and, if asked for, proved; 1 if no
    division fits or the proof finds it NOT EQUAL; and 3 if the proof does not show whether the
    division is equal.
    """
    paths = flags.output_paths({"--json": args.json, "--png": args.png})
    if args.jobs < 1:
        raise ConfigError(f"--jobs must be 1 or more; got {args.jobs}")
    _check_together(args)
    if args.best:
        return _run_best(args, paths)
    with Interruption() as stop, loaded_config(args):
        plan = plan_config(
            args.topologies or _TOPOLOGIES,
            args.mesh_shape,
            args.layout,
            args.jobs,
            begins=stop.check,
            price=args.price,
            dcn_bandwidth=args.dcn_bandwidth,
            inner_steps=args.inner_steps or _INNER_STEPS,
        )
    print(plan)
    flags.write_json_and_picture(paths, plan.to_json(), lambda path: plan.plot(str(path)))
    if plan.stopped_by is not None:
        return 128 + plan.stopped_by  # as a shell says it
    return 0 if plan.rows else 1


_TOPOLOGIES, _INNER_STEPS, _MOST_STEPS = "v5e:2x4", (10, 36, 100), 64
_OF_BEST = ("chips", "budget_bytes", "most_steps", "outer_steps", "no_proof")


def _check_together(args: argparse.Namespace) -> None:
    """Raises ConfigError for flags that contradict each other."""
    given = [name for name in _OF_BEST if getattr(args, name)]
    if not args.best:
        if given:
            raise ConfigError(f"--{given[0]} is for plan --best")
        return
    if args.chips is None:
        raise ConfigError(f"--best needs --chips, as in --chips=v5e:256; got {args.chips}")
    others = {"topologies": "--chips names them", "price": "", "png": "there is no picture of it"}
    for name, why in others.items():
        if getattr(args, name):
            raise ConfigError(f"--{name} does not go with --best{why and ': '}{why}")
    if args.jobs != 1:
        raise ConfigError(
            f"--jobs={args.jobs} does not go with --best: one program is compiled at a time"
        )
    if args.budget_bytes == 0:
        raise ConfigError(f"--budget_bytes must be more than 0; got {args.budget_bytes:g}")
    if args.inner_steps and not args.outer_steps:
        raise ConfigError(
            "--inner_steps goes with --best only where --outer_steps is given, too; got "
            f"--inner_steps={args.inner_steps[0]} alone"
        )


def _run_best(args: argparse.Namespace, paths: Sequence[Any]) -> int:
    """Runs ``plan --best``: finds the best division, proves it, and returns the exit code.

    The first of `paths` is the path that the flag --json names, or None. The exit code is 0 if a
    division was found and, if asked for, proved; 1 if no division fits or the proof finds it NOT
    EQUAL; 3 if the proof does not show whether the division is equal.
    """
    with Interruption() as stop, loaded_config(args):
        # Not above: these take seconds, which `--help` need not.
        from mtf_gradsync.runtimes import xla
        from mtf_gradsync.tools.planning.machines import TpuMachine, topology_of
        from mtf_gradsync.tools.train import best_division, gin_files
        from mtf_gradsync.tools.train.errors import raised_as
        from mtf_gradsync.tools.train.mesh_settings import axes_of, read_layout

        config = gin_files.bound_run_config()
        layouts = args.layout or [_layout_text(config.layout_rules)]
        # What cannot be read is refused before the search.
        for layout in layouts:
            read_layout(layout)
        for shape in args.mesh_shape or ():
            axes_of(shape)
        stop.check()
        with raised_as(TrainingError, xla.XlaMissingError, xla.CompilerDiedError):
            with raised_as(ConfigError, ValueError):
                dcn = None if args.dcn_bandwidth is None else 1e9 * args.dcn_bandwidth
                machine = TpuMachine(topology_of(args.chips), dcn, by_branches=True)
            budget = args.budget_bytes and args.budget_bytes * machine.chips / machine.cores
            found, code = best_division.find_and_prove(
                machine,
                layouts,
                args.mesh_shape,
                budget,
                args.most_steps or _MOST_STEPS,
                (args.inner_steps or _INNER_STEPS) if args.outer_steps else (),
                not args.no_proof,
                completes=args.layout is None,
            )
    flags.write_output("--json", paths[0], found.to_json() + "\n")
    return code


def plan_config(
    topologies: str,
    mesh_shapes: Sequence[str] | None = None,
    layouts: Sequence[str] | None = None,
    jobs: int = 1,
    begins: Callable[[], None] = lambda: None,
    **more: Any,
) -> Any:
    """Returns a plan of the training step that gin's configuration describes.

    Args:
      topologies: the TPUs to predict for, such as "v5e:2x4,v5p:2x2x2".
      mesh_shapes: mesh shapes to plan for; None for all meshes of the TPUs that have the axes of
        the config's mesh.
      layouts: layouts to plan for, each a text of layout rules; None for the config's layout.
      jobs: how many compilers run at once.
      begins: a function that is called once all modules are imported and the settings of the config
        are checked.
      **more: three arguments of `mtf_gradsync.plan`: price (dollars for an hour of a chip),
        dcn_bandwidth (of the network between TPU slices, in GB/s for each chip) and inner_steps
        (numbers of steps between two outer steps).
    """
    # Not above: these take seconds, which `--help` need not.
    from mtf_gradsync.extension import tf
    from mtf_gradsync.runtimes import xla
    from mtf_gradsync.tools import planning
    from mtf_gradsync.tools._private.gin import bound
    from mtf_gradsync.tools.train import gin_files
    from mtf_gradsync.tools.train.errors import raised_as
    from mtf_gradsync.tools.train.mesh_settings import axes_of
    from mtf_gradsync.tools.train.model import resolve_job
    from mtf_gradsync.tools.train.train_graph import build_simd, forward_loss, steps_per_update

    config = gin_files.bound_run_config()

    # One core divides everything: what is wrong here is wrong on each mesh.
    alone = resolve_job(config.on_mesh("all:1", layout=""))
    axes = None if mesh_shapes else axes_of(config.mesh_shape)

    def build(mesh_shape: str, layout: str) -> planning.Built:
        job = resolve_job(config.on_mesh(mesh_shape, layout))
        with bound(gin_files.mesh_lines(mesh_shape, layout)):
            graph, program = build_simd(job)
        return planning.Built(
            program,
            [graph.loss],
            job.tokens_per_step,
            graph.num_parameters,
            steps_per_update(graph.optimizers),
            needed,
        )

    rules = list(layouts or [_layout_text(config.layout_rules)])
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


def _layout_text(layout: Any) -> str:
    """Returns layout rules as text, such as "batch:batch;heads:model".

    `layout` is a text of layout rules, or has pairs of a tensor dimension's name and a mesh axis's
    name. Raises ConfigError for another value.
    """
    if isinstance(layout, str):
        return layout
    try:
        return ";".join(":".join(rule) for rule in layout)
    except TypeError as error:
        raise ConfigError(
            f"train.run.layout_rules = {layout!r} is no text; give --layout"
        ) from error
