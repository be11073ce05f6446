"""The commands that look at a training step without training: report, compile, plan, verify."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from typing import Any, Callable, Sequence

from mtf_gradsync.extension import ConfigError, TrainingError
from mtf_gradsync.runtimes._signals import Interruption
from mtf_gradsync.tools.train.cli.arguments import (
    Command,
    add_gin_arguments,
    add_json_argument,
    loaded_config,
    make_output_folder,
    named_write_errors,
    number,
    output_path,
    output_paths,
    whole_number,
    write_output,
)

_REPORT_DESCRIPTION = """\
Builds the training step that gin files describe, with bare Mesh-TensorFlow (the innermost
optimizer alone) and with the optimizer of the config, and lists what their cores exchange:
collectives of the SIMD (TPU) program, transfers between the devices of a placement mesh.
Nothing is trained, no data is read, and no TPU is needed."""

_REPORT_EPILOG = """\
examples:
  mtf-gradsync report --gin_file=lm_cpu_mesh.gin
  mtf-gradsync report --gin_file=lm_cpu_mesh.gin --json=report.json --png=report.png
  mtf-gradsync report --gin_file=my_model.gin --gin_param="train.run.mesh_shape = 'batch:32'"

docs/simd.md explains the tables."""


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the subcommand."""
    add_gin_arguments(parser)
    parser.add_argument(
        "--rows", action="store_true", help="print every collective and transfer, one a line"
    )
    add_json_argument(parser, "write all rows and totals as JSON")
    parser.add_argument("--png", metavar="FILE", help="draw both steps side by side")
    parser.add_argument(
        "--no_placement",
        action="store_true",
        help="skip the placement mesh, whose graphs take long to build on large meshes",
    )


def _report(args: argparse.Namespace) -> int:
    """Runs the subcommand and returns the exit code."""
    json_file, png_file = output_paths({"--json": args.json, "--png": args.png})
    with loaded_config(args):
        # Imported here because it takes seconds, which `--help` need not wait for.
        from tqdm import tqdm

        from mtf_gradsync.tools.train import gin_files
        from mtf_gradsync.tools.train.comparison import as_text, compare_with_bare, plot_comparison
        from mtf_gradsync.tools.train.figures import check_drawing
        from mtf_gradsync.tools.train.model import resolve_job

        if png_file:
            check_drawing()
        job = resolve_job(gin_files.bound_run_config())
        # None: on terminals only.
        with tqdm(total=2, desc="building", unit="step", leave=False, disable=None) as bar:
            comparison = compare_with_bare(job, not args.no_placement, bar.update)
    print(as_text(comparison, args.rows))
    write_output("--json", json_file, comparison.to_json() + "\n")
    if png_file:
        with named_write_errors("--png", png_file):
            plot_comparison(comparison, png_file)
    return 0


_COMPILE_DESCRIPTION = """\
Builds the training step that gin files describe as a TPU program and compiles it with the real TPU
compiler. Prints whether it is accepted, the collectives before and after the compiler's
optimizations, the memory per core and an estimate of a step's cost. Nothing is
trained and no TPU is needed.

Needs the extra "tpu": in a clone, pip install ".[train,tpu]"."""

_COMPILE_EPILOG = """\
examples:
  mtf-gradsync compile --gin_file=configs/lm_cpu_mesh.gin --topology=v3:2x2
  mtf-gradsync compile --gin_file=lm_cpu_mesh.gin --topology=v5e:2x4 --json=compiled.json

The topology must have as many cores as the config's mesh. Exit code 0: accepted, 1: refused.
docs/tpu.md says what the numbers mean."""


def _compile_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the subcommand."""
    add_gin_arguments(parser)
    parser.add_argument(
        "--topology",
        default="v3:2x2",
        metavar="NAME",
        help="TPU generation and chips, or a slice as in v4-8 (default: v3:2x2, which has 8 cores)",
    )
    add_json_argument(parser, "write the result as JSON, too")
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
        help="write the program before and after optimization there, as HLO text",
    )


def _compile(args: argparse.Namespace) -> int:
    """Runs the subcommand and returns the exit code."""
    json_file = output_path("--json", args.json)
    make_output_folder("--save_hlo", args.save_hlo)
    # So that SIGTERM, too, ends the compiler and removes its folder.
    with Interruption(), loaded_config(args):
        compiled = compile_config(
            args.topology, args.save_hlo, args.compare_with_bare, args.update_not_split
        )
    print(compiled)
    write_output("--json", json_file, compiled.to_json() + "\n")
    return 0 if compiled.accepted else 1


def compile_config(
    topology: str,
    save_hlo: str | None = None,
    compare_with_bare: bool = False,
    update_not_split: bool = False,
) -> Any:
    """Compiles the training step of gin's configuration by `mtf_gradsync.xla.compile_for_tpu`.

    With compare_with_bare, the innermost optimizer alone is estimated, too. The step counter and
    the learning rate that follows from it stay outside the program, on the host, as with
    TPUEstimator.
    """
    # Imported here because it takes seconds, which `--help` need not wait for.
    from mtf_gradsync.extension import tf
    from mtf_gradsync.runtimes import xla
    from mtf_gradsync.runtimes.simd.program import compiled_only
    from mtf_gradsync.tools.train import gin_files
    from mtf_gradsync.tools.train.comparison import innermost_of
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
        try:
            return xla.compile_for_tpu(
                program, [graph.loss], topology, save_hlo, bare, update_not_split, bare_fetches
            )
        except xla.CompilerDiedError as error:
            raise TrainingError(str(error)) from error
        except ValueError as error:
            raise ConfigError(str(error)) from error


_PLAN_DESCRIPTION = """\
Predicts what the training step that gin files describe would cost on TPUs, for each mesh shape
that the chips can have: whether it fits, the time of its operations, what goes along each mesh
axis and how long that takes over the links, the step, tokens per second, share of the peak.
Nothing is trained, no data is read, and no TPU is needed: the compiler is (the extra [tpu])."""

_PLAN_EPILOG = """\
examples:
  mtf-gradsync plan --gin_file=lm_cpu_mesh.gin --topologies=v5e:2x4,v5p:2x2x2
  mtf-gradsync plan --gin_file=my_model.gin --topologies=v5e:16x16 --jobs=4 --json=plan.json
  mtf-gradsync plan --gin_file=my_model.gin --topologies=v5e:4x4 \\
      --mesh_shape="batch:16;model:1" --mesh_shape="batch:8;model:2"

Ctrl-C and SIGTERM print what was found until then. docs/plan.md explains the table."""


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
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
    add_json_argument(parser, "write the plan as JSON, too")
    parser.add_argument("--png", metavar="FILE", help="draw it")


def _whole_numbers(text: str) -> tuple[int, ...]:
    """Reads --inner_steps."""
    return tuple(map(whole_number(1), text.split(",")))


def _price(text: str) -> float | dict[str, float]:
    """Reads --price."""
    try:
        if ":" not in text:
            return number(text)
        pairs = (part.split(":") for part in text.split(","))
        return {generation: number(dollars) for generation, dollars in pairs}
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(
            f"expected dollars for an hour of a chip, like 1.2 or v5e:1.2,v5p:4.2; got {text!r}"
        ) from None


def _plan(args: argparse.Namespace) -> int:
    """Runs the subcommand and returns the exit code."""
    json_file, png_file = output_paths({"--json": args.json, "--png": args.png})
    if args.jobs < 1:
        raise ConfigError(f"--jobs must be 1 or more; got {args.jobs}")
    with Interruption() as stop, loaded_config(args):
        if png_file:
            from mtf_gradsync.tools.train.figures import check_drawing

            check_drawing()
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
    write_output("--json", json_file, plan.to_json() + "\n")
    if png_file:
        with named_write_errors("--png", png_file):
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
    from mtf_gradsync.tools.train.config import axes_of
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
            **more,
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


_VERIFY_DESCRIPTION = """\
Shows whether an update of the training that gin files describe is the same however it is divided.
From the same values and batches it makes one update on one core without wrappers, and one in each
division: the config's mesh, its cores along one axis, another order of axes, microbatch steps, each
wrapper taken out, a masked shard, each runtime. It compares the gradients that reach the innermost
optimizer, new values and slots on all cores, and the losses: equal to rounding, NOT EQUAL (the
first variable that differs, by what factor, and what brings it in), or not shown, and why."""

_VERIFY_EPILOG = """\
examples:
  mtf-gradsync verify --gin_file=lm_cpu_mesh.gin
  mtf-gradsync verify --gin_file=my.gin --mesh_shape="batch:2;model:4" --divisions=wrappers
  mtf-gradsync verify --gin_file=my.gin --without=dropout --json=verified.json --png=verified.png

Exit code 0: equal, 1: NOT EQUAL, 3: not shown. docs/guides/verify.md explains the table."""


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the subcommand."""
    add_gin_arguments(parser)
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
    parser.add_argument(
        "--steps", type=whole_number(1), default=1, metavar="N", help="updates (default: 1)"
    )
    parser.add_argument(
        "--runtime",
        default="cpu_replicas",
        metavar="NAME",
        help="where divisions run: placement_mesh, cpu_replicas or xla (default: cpu_replicas)",
    )
    parser.add_argument(
        "--own_values",
        action="store_true",
        help="begin with the config's own first values, and not with values moved a little",
    )
    add_json_argument(parser, "write all errors as JSON, too")
    parser.add_argument("--png", metavar="FILE", help="draw the error of each variable")


def _verify(args: argparse.Namespace) -> int:
    """Runs the subcommand and returns the exit code."""
    json_file, png_file = output_paths({"--json": args.json, "--png": args.png})
    with Interruption() as stop, loaded_config(args):
        from mtf_gradsync.tools.train.figures import check_drawing
        from mtf_gradsync.tools.train.verifying import verify_config

        if png_file:
            check_drawing()
        stop.check()
        found = verify_config(
            args.mesh_shape,
            args.steps,
            None if args.divisions is None else args.divisions.split(","),
            (args.without or "").split(",") if args.without else (),
            args.runtime,
            args.own_values,
        )
    print(found)
    write_output("--json", json_file, found.to_json() + "\n")
    if png_file:
        with named_write_errors("--png", png_file):
            found.plot(png_file)
    return found.exit_code


VERIFY = Command(
    "prove that an update is the same however it is divided",
    _VERIFY_DESCRIPTION,
    _VERIFY_EPILOG,
    _verify_arguments,
    _verify,
)
REPORT = Command(
    "list what the cores exchange in a training step, bare and wrapped",
    _REPORT_DESCRIPTION,
    _REPORT_EPILOG,
    _report_arguments,
    _report,
)
COMPILE = Command(
    "compile what gin files describe for a TPU, without a TPU",
    _COMPILE_DESCRIPTION,
    _COMPILE_EPILOG,
    _compile_arguments,
    _compile,
)
PLAN = Command(
    "predict what a training costs on TPUs for each mesh shape, without a TPU",
    _PLAN_DESCRIPTION,
    _PLAN_EPILOG,
    _plan_arguments,
    _plan,
)
