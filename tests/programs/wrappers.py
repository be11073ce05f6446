"""Every wrapper that the small programs are wrapped in, alone and some around each other."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import mtf_gradsync as gs

NORM, DECAY, INNER_STEPS = 0.2, 0.5, 2


class SummedInALine:
    """What a program without an optimizer does."""

    def __init__(self, opt):
        self.opt = opt

    def apply_grads(self, grads, variables, *own):
        return self.opt.apply_grads(gs.sum_shards(grads), variables, *own)

    def apply_grad(self, grad, variable):
        return self.opt.apply_grad(*gs.sum_shards([grad]), variable)


class Wrapper(NamedTuple):
    """A wrapper, or some around each other.

    Attributes:
      wrap: makes it around an optimizer; takes the replica axes.
      parts: what it is made of.
      micro_steps: how many steps make an update.
      nan: what is skipped where a shard's examples have a NaN: "shard", "step" or "island"; ""
        where everything becomes NaN, so that none is given.
      inner_steps: after how many steps islands meet.
      clips: whether it clips by the norm of all gradients.
      shards: whether updates are sharded.
      averages: whether it averages the variables.
    """

    wrap: Callable[[Any, gs.ReplicaAxes], Any]
    parts: tuple[str, ...]
    micro_steps: int = 1
    nan: str = ""
    inner_steps: int = 0
    clips: bool = False
    shards: bool = False
    averages: bool = False


def local(opt, axes):
    return gs.GradientAccumulationOptimizer(opt, 2, True, gs.skip_not_finite, axes=axes)


def sharded(opt, axes):
    return gs.ShardedUpdateOptimizer(opt, min_size=1, axes=axes)


def clipped(opt, axes):
    return gs.ClipByGlobalNormOptimizer(opt, NORM, axes=axes)


WRAPPERS = {
    "bare": Wrapper(lambda opt, axes: opt, ("bare",)),
    "cross_shard": Wrapper(lambda opt, axes: gs.CrossShardOptimizer(opt), ("cross_shard",)),
    # Its own stage: sums over the shards, and nothing else.
    "sum_shards": Wrapper(lambda opt, axes: SummedInALine(opt), ("cross_shard",)),
    "local": Wrapper(local, ("local",), 2, "step"),
    "synced": Wrapper(
        lambda opt, axes: gs.GradientAccumulationOptimizer(opt, 2, True, accumulate="synced"),
        ("synced",),
        2,
    ),
    "replicas": Wrapper(
        lambda opt, axes: gs.SyncReplicasOptimizer(opt, 1, axes=axes), ("replicas",), nan="shard"
    ),
    "loss_scale": Wrapper(
        lambda opt, axes: gs.LossScaleOptimizer(opt, axes=axes), ("loss_scale",), nan="step"
    ),
    "clip": Wrapper(clipped, ("clip",), clips=True),
    "sharded": Wrapper(sharded, ("sharded",), shards=True),
    "average": Wrapper(
        lambda opt, axes: gs.AverageOptimizer(gs.CrossShardOptimizer(opt), DECAY),
        ("average", "cross_shard"),
        averages=True,
    ),
    "islands": Wrapper(
        lambda opt, axes: gs.OuterOptimizer(
            opt, INNER_STEPS, 1.0, 0.0, leave_out_not_finite=True, axes=axes
        ),
        ("islands",),
        nan="island",
        inner_steps=INNER_STEPS,
    ),
    "average(clip(sharded))": Wrapper(
        lambda opt, axes: gs.AverageOptimizer(clipped(sharded(opt, axes), axes), DECAY),
        ("average", "clip", "sharded"),
        clips=True,
        shards=True,
        averages=True,
    ),
    "loss_scale(local(sharded))": Wrapper(
        lambda opt, axes: gs.LossScaleOptimizer(local(sharded(opt, axes), axes)),
        ("loss_scale", "local", "sharded"),
        2,
        "step",
        shards=True,
    ),
    "local(sharded)": Wrapper(
        lambda opt, axes: local(sharded(opt, axes), axes),
        ("local", "sharded"),
        2,
        "step",
        shards=True,
    ),
    "loss_scale(cross_shard)": Wrapper(
        lambda opt, axes: gs.LossScaleOptimizer(gs.CrossShardOptimizer(opt), axes=axes),
        ("loss_scale", "cross_shard"),
        nan="step",
    ),
    "replicas(clip)": Wrapper(
        lambda opt, axes: gs.SyncReplicasOptimizer(clipped(opt, axes), 1, axes=axes),
        ("replicas", "clip"),
        nan="shard",
        clips=True,
    ),
}
