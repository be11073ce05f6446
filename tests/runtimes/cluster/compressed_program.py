"""What two processes send each other in compressed sums of gradients, by one device of each."""

from __future__ import annotations

from typing import Any, Callable

from benchmarks import two_processes
from benchmarks.cluster import LocalCluster
from mtf_gradsync import reduce, simd
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.reduce.low_rank import LowRankState
from mtf_gradsync.reduce.quantized import QuantizationErrors

SHAPES = [[256, 512], [512, 256], [512]]
RUNS, RANK = 3, 4
STATELESS = (None,) * len(SHAPES)
STRATEGIES: dict[str, tuple[Callable[[], Any], Any]] = {
    "float32": (reduce.FusedAllReduce, ()),
    "8 bits": (reduce.QuantizedAllReduce, QuantizationErrors(STATELESS)),
    "4 bits": (lambda: reduce.QuantizedAllReduce(4), QuantizationErrors(STATELESS)),
    "low rank": (lambda: reduce.LowRankAllReduce(RANK, warm_start=False), None),
}


def _measured(cluster: LocalCluster, strategy: Any, state: Any) -> dict[str, Any]:
    """Bytes of one sum over both processes, on the graph's edges and on the sockets; the sums."""
    devices = cluster.devices[:: two_processes.EACH]
    with tf.Graph().as_default() as graph:
        impl = mtf.placement_mesh_impl.PlacementMeshImpl(
            mtf.convert_to_shape("all:2"), mtf.LayoutRules([]), devices
        )

        def drawn(number: int) -> list[tf.Tensor]:
            seeds = [[number, processor] for processor in range(len(devices))]
            made = lambda seed: tf.random.stateless_normal(SHAPES[number], seed)  # noqa: E731
            return mtf.parallel(devices, made, seeds)

        values = [impl.LaidOutTensor(drawn(number)) for number in range(len(SHAPES))]
        if state is None:
            step = impl.LaidOutTensor(mtf.parallel(devices, lambda: tf.constant(0)))
            state = LowRankState(step, STATELESS, STATELESS)
        groups = reduce.ProcessorGroups.along(impl, [0])
        sums, _ = strategy.reduce_gradients(impl, values, groups, state)
        used = [mtf.parallel(devices, tf.identity, x.tensor_list) for x in sums]
        run = [x.op for one in used for x in one]
        edges = simd.count_process_transfers(run).bytes
        found: dict[str, Any] = {"edges": edges, "sockets": None}
        with tf.Session(cluster.target, graph=graph, config=two_processes.config(False)) as session:
            session.run(run)
            before = cluster.bytes_on_sockets()
            for _ in range(RUNS):
                session.run(run)
            if before is not None:
                found["sockets"] = (cluster.bytes_on_sockets() - before) / RUNS
            parts = session.run([x.tensor_list for x in values])
            both = session.run(used)
    found["same"] = all(a.tobytes() == b.tobytes() for a, b in both)
    # Sizes of what is off, and of the sum.
    found["off"] = [float(abs(a + b - c[0]).max()) for (a, b), c in zip(parts, both)]
    found["largest"] = [float(max(abs(a).max(), abs(b).max())) for a, b in parts]
    return found


def measured_by_strategy(cluster: LocalCluster) -> dict[str, Any]:
    """What `_measured` finds, by name of the strategy."""
    return {name: _measured(cluster, make(), state) for name, (make, state) in STRATEGIES.items()}
