"""A placement mesh over the tasks of a cluster: each task runs this program.

``python -m tests.runtimes.cluster.mesh_program <cluster spec> <job> <task> <file>``: task 0
computes all cases and writes their values to the file; the others serve their devices until they
are killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any, Callable

import absl.flags
import numpy as np

import mtf_gradsync as gs
from mtf_gradsync import reduce
from mtf_gradsync._private.libraries import mtf, tf
from tests import grappler, models
from tests.reduce import on_mesh

TASKS, EACH = 2, 2
MESH, LAYOUT = "rows:2;cols:2", "batch:rows;hidden:cols"
DEVICES = [f"/job:worker/task:{t}/device:CPU:{d}" for t in range(TASKS) for d in range(EACH)]
LEADER = "/job:worker/task:0"
STEPS, K = 4, 2
# The case that a timeline is recorded of, and its file.
RECORDED, TRACE = "train fused", "trace.json"

STRATEGIES: dict[str, Callable[[], Any]] = {
    "fused": lambda: reduce.FusedAllReduce(),
    "one_device": lambda: reduce.ReductionToOneDevice(DEVICES[-1]),
    "ring": lambda: reduce.RingAllReduce(),
    "packs": lambda: reduce.AllReduce("add_n", num_packs=3),
    "ring_packs": lambda: reduce.AllReduce("ring", num_packs=2),
    "levels": lambda: reduce.HierarchicalAllReduce(),
    "ring_levels": lambda: reduce.HierarchicalAllReduce("ring/ring"),
    "collective": lambda: reduce.CollectiveAllReduce(),
    "collective_apart": lambda: reduce.CollectiveAllReduce(merge_scope=1),
    "best": lambda: reduce.BestAllReduce(),
}
SHAPES = [(), (3,), (64, 33)]


def arrays() -> list[np.ndarray]:
    """What each processor adds to a sum."""
    rng = np.random.RandomState(0)
    return [rng.randn(TASKS * EACH, *shape).astype("f") for shape in SHAPES]


def optimizers() -> dict[str, Callable[[], Any]]:
    """Optimizers by the name of a case; the model is trained with Momentum."""

    def cross(strategy: Callable[[], Any]) -> Any:
        return gs.CrossShardOptimizer(models.OPTIMIZERS["momentum"](), reducer=strategy())

    def accumulate(strategy: Callable[[], Any]) -> Any:
        return gs.GradientAccumulationOptimizer(
            models.OPTIMIZERS["momentum"](), K, mesh_shape=MESH, layout=LAYOUT, reducer=strategy()
        )

    made = {}
    # The sums below are by every strategy; a step does no more with them.
    for name in ("fused", "levels"):
        made[f"train {name}"] = lambda name=name: cross(STRATEGIES[name])
    made["accumulate collective"] = lambda: accumulate(STRATEGIES["collective"])
    made["mesh collective"] = lambda: cross(STRATEGIES["collective"])
    # The rows are the processes: each is an island.
    made["outer fused"] = lambda: gs.OuterOptimizer(
        models.OPTIMIZERS["momentum"](), K, outer_momentum=0.5, mesh_shape=MESH, layout=LAYOUT
    )
    return made


def placement(case: str, devices: list[str] = DEVICES) -> Any:
    """Mesh-TF's mesh, or for "mesh <strategy>" the package's with that strategy."""
    kind, strategy = case.split()
    if kind == "mesh":
        return gs.placement_mesh_impl(MESH, LAYOUT, devices, STRATEGIES[strategy]())
    return mtf.placement_mesh_impl.PlacementMeshImpl(
        mtf.convert_to_shape(MESH), mtf.convert_to_layout_rules(LAYOUT), devices
    )


def train(
    case: str, mesh_impl: Any, target: str, config: tf.ConfigProto, trace: str | None = None
) -> dict[str, np.ndarray]:
    """Trains the model of the tests, and writes a timeline of it; returns its variables."""
    with tf.Graph().as_default():
        tf.set_random_seed(1)
        feeds = models.mlp_batches(STEPS)
        inputs = {name: tf.placeholder(tf.float32, x.shape) for name, x in feeds[0].items()}
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        operations, _ = models.train(optimizers()[case])(mesh, inputs)
        lowering = mtf.Lowering(graph, {mesh: mesh_impl})
        step = [lowering.lowered_operation(op) for op in operations]
        init = [tf.global_variables_initializer(), tf.local_variables_initializer()]
        to_slices, to_masters = lowering.copy_masters_to_slices(), lowering.copy_slices_to_masters()
        masters = {v.op.name: v for v in tf.global_variables()}
        with tf.Session(target, config=config) as session:
            session.run(init)
            session.run(to_slices)
            with gs.timeline(session, trace) if trace else contextlib.nullcontext():
                for feed in feeds:
                    session.run(step, {inputs[name]: x for name, x in feed.items()})
            session.run(to_masters)
            return session.run(masters)


def sums(strategy: str, target: str) -> list[np.ndarray]:
    """Sums of `arrays` over every set of mesh axes."""

    def make(impl: Any, values: list) -> list:
        return [
            x
            for axes in on_mesh.subsets(MESH)
            for x in STRATEGIES[strategy]().all_reduce(
                impl, values, reduce.ProcessorGroups.along(impl, axes)
            )
        ]

    return on_mesh.run("placement", MESH, arrays(), make, devices=DEVICES, target=target)


def main(spec: str, job: str, task: str, path: str) -> None:
    """Computes, or serves."""
    # The test holds the port for it.
    os.environ["TF_GRPC_REUSE_PORT"] = "1"
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    tf.logging.set_verbosity(tf.logging.ERROR)
    absl.flags.FLAGS.mark_as_parsed()
    grappler.turn_off()
    config = gs.session_config(num_cpu_devices=EACH, collective_group_leader=LEADER)
    server = tf.train.Server(json.loads(spec), job, int(task), config=config)
    if int(task) > 0:
        server.join()
    values: dict[str, Any] = {}
    for case in optimizers():
        trace = os.path.join(os.path.dirname(path), TRACE) if case == RECORDED else None
        for name, x in train(case, placement(case), server.target, config, trace).items():
            values[f"{case}|{name}"] = x
    for strategy in STRATEGIES:
        for number, x in enumerate(sums(strategy, server.target)):
            values[f"sum {strategy}|{number}"] = x
    np.savez(path, **values)


if __name__ == "__main__":
    main(*sys.argv[1:])
