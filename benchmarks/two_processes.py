"""What crosses between two processes in a sum over a 2x4 mesh, and how long a step takes."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from types import MappingProxyType
from typing import Any, Callable, Iterator, Mapping, NamedTuple

import numpy as np

import mtf_gradsync as gs
from benchmarks import models, report, timing
from benchmarks.cluster import LocalCluster
from mtf_gradsync import reduce, simd
from mtf_gradsync._private.libraries import mtf, tf

TASKS, EACH = 2, 4
RING, TWO_LEVELS, COMPRESSED = "flat ring", "two levels", "two levels, bfloat16"
# The wrapper's and all other sums of a step by one strategy.
WHOLE_MESH = "two levels, whole mesh"
# As the wrappers take them. The ring is what Mesh-TF does for itself, tensor by tensor.
STRATEGIES: dict[str, Callable[[], reduce.Strategy]] = {
    RING: reduce.RingAllReduce,
    "flat ring, 1 pack": lambda: reduce.AllReduce("ring", num_packs=1),
    "on one device, in turns": reduce.FusedAllReduce,
    TWO_LEVELS: reduce.HierarchicalAllReduce,
    "two levels, 4 packs": lambda: reduce.HierarchicalAllReduce(num_packs=4),
    COMPRESSED: lambda: reduce.CompressedAllReduce(reduce.HierarchicalAllReduce()),
    "collective": reduce.CollectiveAllReduce,
    "the chosen": reduce.BestAllReduce,
}
# Bytes between the processes, over those of one copy of each gradient each way.
TARGETS = {TWO_LEVELS: 1.0, COMPRESSED: 0.5}
_COLUMNS = (
    "strategy",
    "tensors",
    "bytes on edges",
    "edges/ring",
    "bytes on sockets",
    "sockets/ring",
    "sum ms",
    "sum/ring",
    "step ms",
    "step/ring",
)


class Reduction(NamedTuple):
    """One sum of a model's gradients over all processors, in a graph of its own.

    Attributes:
      graph: the graph.
      initialize: sets the gradients.
      used: what to run: an operation for each processor and gradient that uses the sum there.
      transfers: what crosses between the processes.
    """

    graph: tf.Graph
    initialize: tf.Operation
    used: list[tf.Operation]
    transfers: simd.ProcessTransfers


def measure(options: report.Options) -> report.Table:
    """Starts the processes and runs the sums alone, then training steps."""
    with LocalCluster(TASKS, EACH) as cluster:
        return measure_on(cluster, options)


def measure_on(
    cluster: LocalCluster,
    options: report.Options,
    strategies: Mapping[str, Callable[[], reduce.Strategy]] = MappingProxyType(STRATEGIES),
) -> report.Table:
    """Does what `measure` does, on processes that run.

    Args:
      cluster: the processes.
      options: how long and how large.
      strategies: those to measure, the ones of `TARGETS` and the ring among them.

    Returns:
      The table.
    """
    model = dense(*((2, 32) if options.quick else (8, 256)))
    programs = {models.BARE: _training(model, cluster, models.BARE, None)}
    for name, make in strategies.items():
        programs[name] = _training(model, cluster, name, make())
    two_levels = reduce.HierarchicalAllReduce()
    whole_mesh = functools.partial(gs.placement_mesh_impl, reducer=two_levels)
    programs[WHOLE_MESH] = _training(model, cluster, WHOLE_MESH, two_levels, whole_mesh)
    shapes = [v.shape.to_integer_list for v in programs[RING].lowering.graph.trainable_variables]
    sums = {n: reduction(cluster.devices, shapes, make()) for n, make in strategies.items()}
    seconds, sockets = _time_sums(cluster, sums, options)
    steps = _time_steps(cluster, model, programs, options)
    rows = []
    for name in programs:
        row: report.Row = dict.fromkeys(_COLUMNS)
        row["strategy"] = name
        if name in sums:
            tensors, row["bytes on edges"], _ = sums[name].transfers
            row["tensors"] = tensors
            if tensors is not None:
                row["edges/ring"] = row["bytes on edges"] / sums[RING].transfers.bytes
            if sockets is not None:
                row["bytes on sockets"] = round(sockets[name])
                row["sockets/ring"] = sockets[name] / sockets[RING]
            row["sum ms"] = timing.spread([1e3 * s for s in seconds[name]])
            row["sum/ring"] = timing.ratio(seconds, name, RING)
        row["step ms"] = timing.spread([1e3 * s for s in steps[name]])
        row["step/ring"] = timing.ratio(steps, name, RING)
        rows.append(row)
    one_copy = 4 * sum(int(np.prod(shape)) for shape in shapes)
    return report.Table(
        name="two_processes",
        title=f"Sums of {len(shapes)} gradients, {one_copy:,} bytes on each of 8 processors, over "
        "2 processes; training steps",
        rows=rows,
        notes=(
            "The mesh is rows:2;cols:4, a process a row, and sums run over both axes.",
            "edges: what crosses between the processes by the graph's edges in one sum of all"
            " gradients. sockets: all that they really send, the protocol included.",
            "A collective sends by itself: its bytes are on no edge of the graph.",
            "sum: the sums alone, Grappler off. step: a training step; bare is Mesh-TF alone.",
        ),
        targets=[
            report.Target(
                f"bytes of {name}, over one copy of each gradient each way",
                sums[name].transfers.bytes / (TASKS * one_copy),
                bound,
            )
            for name, bound in TARGETS.items()
        ],
        plot=lambda axes: _plot(axes, rows),
    )


def dense(layers: int, width: int) -> models.Model:
    """Dense layers on sequences; batch and length are split, so that sums run over both axes."""
    batch, length = 16, 16
    rng = np.random.RandomState(0)
    values = [(rng.randn(width, width) / np.sqrt(width)).astype("f") for _ in range(layers)]

    def make_loss(mesh: mtf.Mesh, x: tf.Tensor) -> mtf.Tensor:
        rows = [mtf.Dimension("batch", batch), mtf.Dimension("length", length)]
        # Two names, because no tensor can have a dimension twice.
        dims = [mtf.Dimension("even", width), mtf.Dimension("odd", width)]
        h = mtf.import_tf_tensor(mesh, x, mtf.Shape([*rows, dims[0]]))
        for number, value in enumerate(values):
            dim_in, dim_out = dims[number % 2], dims[(number + 1) % 2]
            w = mtf.get_variable(
                mesh, f"w{number}", [dim_in, dim_out], initializer=tf.constant_initializer(value)
            )
            b = mtf.get_variable(mesh, f"b{number}", [dim_out], initializer=tf.zeros_initializer())
            h = mtf.tanh(mtf.einsum([h, w], [*rows, dim_out]) + b)
        return mtf.reduce_mean(mtf.square(h))

    return models.Model(
        name="dense",
        mesh_shape=f"rows:{TASKS};cols:{EACH}",
        layout="batch:rows;length:cols",
        make_loss=make_loss,
        make_optimizer=lambda: mtf.optimize.SgdOptimizer(0.1),
        batch=rng.randn(batch, length, width).astype("f"),
    )


def reduction(devices: list[str], shapes: list[list[int]], strategy: Any) -> Reduction:
    """Builds one sum of float32 values of some shapes over all processors of the 2x4 mesh."""
    with tf.Graph().as_default() as graph:
        impl = mtf.placement_mesh_impl.PlacementMeshImpl(
            mtf.convert_to_shape(f"rows:{TASKS};cols:{EACH}"), mtf.LayoutRules([]), devices
        )
        values = []
        for number, shape in enumerate(shapes):
            slices = []
            for processor, device in enumerate(devices):
                with tf.device(device):
                    variable = tf.get_local_variable(
                        f"x{number}_{processor}", initializer=tf.fill(shape, processor + 1.0)
                    )
                    slices.append(variable.read_value())
            values.append(impl.LaidOutTensor(slices))
        groups = reduce.ProcessorGroups.along(impl, [0, 1])
        used = []
        for total in strategy.all_reduce(impl, values, groups):
            # Used where it is: a tensor that is fetched would go to the client instead.
            used += [x.op for x in mtf.parallel(list(devices), tf.identity, total.tensor_list)]
        transfers = simd.count_process_transfers(used)
        if isinstance(strategy, reduce.CollectiveAllReduce):
            transfers = transfers._replace(tensors=None, bytes=None)
        return Reduction(graph, tf.local_variables_initializer(), used, transfers)


def config(grappler: bool) -> tf.ConfigProto:
    """The session's options; without Grappler the graph runs as it was counted."""
    options = gs.session_config(num_cpu_devices=EACH)
    options.graph_options.rewrite_options.disable_meta_optimizer = not grappler
    return options


def _training(
    model: models.Model,
    cluster: LocalCluster,
    name: str,
    reducer: Any,
    mesh_impl: Callable[..., Any] = mtf.placement_mesh_impl.PlacementMeshImpl,
) -> models.Program:
    @contextlib.contextmanager
    def mesh_block() -> Iterator[Any]:
        # Variables live in the servers: those of one name would be one variable of all programs.
        with tf.get_default_graph().container(re.sub("[^a-z0-9]+", "_", name)):
            yield mesh_impl(
                mtf.convert_to_shape(model.mesh_shape),
                mtf.convert_to_layout_rules(model.layout),
                cluster.devices,
            )

    variant = models.BARE if reducer is None else models.WRAPPED
    return models.build(model, variant, mesh_block, reducer=reducer)


def _time_sums(
    cluster: LocalCluster, reductions: dict[str, Reduction], options: report.Options
) -> tuple[dict[str, list[float]], dict[str, float] | None]:
    """Seconds of each sum, and bytes on the sockets where the system tells them."""
    runs, sockets = {}, {}
    with contextlib.ExitStack() as stack:
        for name, one in reductions.items():
            session = stack.enter_context(
                tf.Session(cluster.target, graph=one.graph, config=config(grappler=False))
            )
            session.run(one.initialize)
            runs[name] = session.make_callable(one.used)
        for name, run in runs.items():
            for _ in range(3):
                run()
            before, count = cluster.bytes_on_sockets(), 5
            for _ in range(count):
                run()
            if before is not None:
                sockets[name] = (cluster.bytes_on_sockets() - before) / count
        return timing.interleave(runs, options.rounds, 3, "sums"), sockets or None


def _time_steps(
    cluster: LocalCluster,
    model: models.Model,
    programs: dict[str, models.Program],
    options: report.Options,
) -> dict[str, list[float]]:
    with contextlib.ExitStack() as stack:
        steps = {}
        for name, program in programs.items():
            with program.graph.as_default():
                initialize = tf.global_variables_initializer()
                to_slices = program.lowering.copy_masters_to_slices()
            session = stack.enter_context(
                tf.Session(
                    cluster.target, graph=program.graph, config=config(grappler=not options.quick)
                )
            )
            session.run(initialize)
            session.run(to_slices)
            run = session.make_callable([program.loss, program.update], feed_list=[program.x])
            steps[name] = lambda run=run: run(model.batch)[0]
        # The first steps are slow: TensorFlow places and rewrites the graph.
        models.check_same_training({n: [step() for _ in range(3)] for n, step in steps.items()})
        return timing.interleave(steps, options.rounds, 2, "training steps")


def _plot(axes: Any, rows: list[report.Row]) -> None:
    shown = [row for row in rows if row["sum/ring"] is not None]
    for number, column in enumerate(("sockets/ring", "sum/ring", "step/ring")):
        values = [row[column] for row in shown]
        heights = [v.median if isinstance(v, timing.Spread) else v or 0.0 for v in values]
        places = [i + 0.27 * number for i in range(len(shown))]
        axes.bar(places, heights, 0.25, label=column.replace("sockets", "bytes on sockets"))
    axes.set_xticks([i + 0.27 for i in range(len(shown))])
    axes.set_xticklabels([row["strategy"].replace(", ", ",\n") for row in shown], fontsize=7)
    axes.set_ylabel("relative to the flat ring")
    axes.set_ylim(top=1.35 * axes.get_ylim()[1])
    axes.legend()


if __name__ == "__main__":
    sys.exit(report.main([measure], "python -m benchmarks.two_processes"))
