"""What a type checker tells who uses the package; `make lint` runs mypy over it.

Each line that is wrong says which error mypy has to find there: where it finds none, the comment is
an error. Nothing is called.
"""

# ruff: noqa: B018

import mtf_gradsync as gs
from mtf_gradsync import estimator
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.reduce import AllReduce, CompressedAllReduce, HierarchicalAllReduce


class Plain:
    pass


class Mine:
    def apply_grads(self, grads: list, variables: list) -> list:
        return []


class Takes:
    def apply_grads(self, grads: list, variables: list, grad_scale: float) -> list:
        return []


def calls() -> None:
    """Right ones and wrong ones."""
    mine = Mine()
    gs.CrossShardOptimizer(Takes()).apply_grads([], [], grad_scale=2.0)
    gs.CrossShardOptimizer(mine)
    gs.CrossShardOptimizer(mine, reduction="weighted_mean")
    gs.CrossShardOptimizer(mine, reduction="meen")  # type: ignore[arg-type]
    gs.CrossShardOptimizer(mine, reduction=tf.losses.Reduction.SUM)
    gs.CrossShardOptimizer(tf.train.AdamOptimizer(0.1))
    gs.CrossShardOptimizer(mtf.optimize.AdafactorOptimizer, learning_rate=0.1)
    gs.CrossShardOptimizer(Mine, learning_rate=0.1)
    gs.CrossShardOptimizer(lambda learning_rate: mine, learning_rate=0.1)
    gs.CrossShardOptimizer(Plain())  # type: ignore[arg-type]
    gs.CrossShardOptimizer(Plain, learning_rate=0.1)  # type: ignore[arg-type]
    gs.CrossShardOptimizer(mine, mesh_shape="batch:4", layout="batch:batch")
    gs.CrossShardOptimizer(mine, mesh_shape=mtf.Shape([]), layout=mtf.LayoutRules([]))
    gs.CrossShardOptimizer(mine, mesh_shape=[("batch", 4)], layout=[("batch", "batch")])
    gs.CrossShardOptimizer(mine, mesh_shape=4, layout="batch:batch")  # type: ignore[arg-type]
    gs.CrossShardOptimizer(mine, mesh_shape="batch:4", layout=4)  # type: ignore[arg-type]
    gs.CrossShardOptimizer(mine, axes=gs.ReplicaAxes("batch:4", "batch:batch"))
    gs.CrossShardOptimizer(mine, axes="batch:4")  # type: ignore[arg-type]
    inner = gs.ClipByGlobalNormOptimizer(gs.MeshOptimizer(tf.train.AdamOptimizer(0.1)), 1.0)
    gs.ClipByGlobalNormOptimizer(Plain(), 1.0)  # type: ignore[arg-type]
    gs.GradientAccumulationOptimizer(inner, 4, accumulate="local")
    gs.GradientAccumulationOptimizer(inner, 4, accumulate="locl")  # type: ignore[arg-type]
    gs.GradientAccumulationOptimizer(Plain(), 4)  # type: ignore[arg-type]
    gs.LossScaleOptimizer(inner, loss_scale=128.0)
    gs.LossScaleOptimizer(inner, loss_scale="dynamik")  # type: ignore[arg-type]
    gs.ShardedUpdateOptimizer(inner, axes=4)  # type: ignore[arg-type]
    gs.SyncReplicasOptimizer(inner, 4, mesh_shape=4)  # type: ignore[arg-type]
    gs.MeshOptimizer(inner.opt)
    gs.MeshOptimizer(Plain())  # type: ignore[arg-type]
    gs.CrossShardOptimizer(mine, reducer=AllReduce("ring"))
    gs.CrossShardOptimizer(mine, reducer="ring")  # type: ignore[arg-type]
    AllReduce("rnig")  # type: ignore[arg-type]
    CompressedAllReduce(wire_dtype="float16")
    CompressedAllReduce(wire_dtype=tf.bfloat16)
    CompressedAllReduce(wire_dtype="float8")  # type: ignore[arg-type]
    HierarchicalAllReduce([("ring", 1, 1024), ("add_n/add_n", 2, -1)])
    HierarchicalAllReduce("add_n/adn")  # type: ignore[arg-type]
    gs.LowRankAllReduce(rank="2")  # type: ignore[arg-type]
    gs.reduce.BestAllReduce().all_reduce
    gs.reduce.NothingAllReduce  # type: ignore[attr-defined]
    gs.xla.session
    gs.xla.sesion  # type: ignore[attr-defined]
    gs.simd.nothing  # type: ignore[attr-defined]
    gs.islands.Folder("gs://islands")
    gs.islands.nothing  # type: ignore[attr-defined]
    gs.plan(1)  # type: ignore[arg-type, call-arg]
    gs.nothing  # type: ignore[attr-defined]
    gs.verify(1)  # type: ignore[arg-type, call-arg]
    estimator.Estimator(print, runtime="cpu_replicas")
    estimator.Estimator(print, runtime="cpu")  # type: ignore[arg-type]
