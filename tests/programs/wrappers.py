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


class Maker(NamedTuple):
    """Makes wrappers.

    Attributes:
      axes: the replica axes.
      suffix: of their names.
    """

    axes: gs.ReplicaAxes
    suffix: str = ""

    def __call__(self, cls, opt, *args, **kwargs):
        return cls(opt, *args, name=f"{cls.__name__}{self.suffix}", **kwargs)


class Wrapper(NamedTuple):
    """A wrapper, or some around each other.

    Attributes:
      wrap: makes it around an optimizer.
      parts: what it is made of.
      micro_steps: how many steps make an update.
      nan: what is skipped where a shard's examples have a NaN: "shard", "step" or "island"; ""
        where everything becomes NaN, so that none is given.
      inner_steps: after how many steps islands meet.
      clips: whether it clips by the norm of all gradients.
      shards: whether updates are sharded.
      averages: whether it averages the variables.
    """

    wrap: Callable[[Any, Maker], Any]
    parts: tuple[str, ...]
    micro_steps: int = 1
    nan: str = ""
    inner_steps: int = 0
    clips: bool = False
    shards: bool = False
    averages: bool = False


def local(opt, make):
    how = {"should_skip_update_fn": gs.skip_not_finite, "axes": make.axes}
    return make(gs.GradientAccumulationOptimizer, opt, 2, True, **how)


def replicas(opt, make):
    return make(gs.SyncReplicasOptimizer, opt, 1, axes=make.axes)


def sharded(opt, make):
    return make(gs.ShardedUpdateOptimizer, opt, min_size=1, axes=make.axes)


def clipped(opt, make):
    return make(gs.ClipByGlobalNormOptimizer, opt, NORM, axes=make.axes)


def scaled(opt, make):
    return make(gs.LossScaleOptimizer, opt, axes=make.axes)


def cross_shard(opt, make):
    return make(gs.CrossShardOptimizer, opt)


def averaged(opt, make):
    return make(gs.AverageOptimizer, opt, DECAY)


def synced(opt, make):
    return make(gs.GradientAccumulationOptimizer, opt, 2, True, accumulate="synced")


def sharded_sums(opt, make):
    how = {"should_skip_update_fn": gs.skip_not_finite, "axes": make.axes}
    return make(gs.GradientAccumulationOptimizer, opt, 2, True, accumulate="sharded", **how)


def islands(opt, make):
    how = {"leave_out_not_finite": True, "axes": make.axes}
    return make(gs.OuterOptimizer, opt, INNER_STEPS, 1.0, 0.0, **how)


def around(*wraps):
    """Makes several around each other, the outermost first."""

    def wrap(opt, make):
        for inner in reversed(wraps):
            opt = inner(opt, make)
        return opt

    return wrap


WRAPPERS = {
    "bare": Wrapper(lambda opt, make: opt, ("bare",)),
    "cross_shard": Wrapper(cross_shard, ("cross_shard",)),
    # Its own stage: sums over the shards, and nothing else.
    "sum_shards": Wrapper(lambda opt, make: SummedInALine(opt), ("cross_shard",)),
    "local": Wrapper(local, ("local",), 2, "step"),
    "synced": Wrapper(synced, ("synced",), 2),
    "replicas": Wrapper(replicas, ("replicas",), nan="shard"),
    "loss_scale": Wrapper(scaled, ("loss_scale",), nan="step"),
    "clip": Wrapper(clipped, ("clip",), clips=True),
    "sharded": Wrapper(sharded, ("sharded",), shards=True),
    "average": Wrapper(around(averaged, cross_shard), ("average", "cross_shard"), averages=True),
    "islands": Wrapper(islands, ("islands",), nan="island", inner_steps=INNER_STEPS),
    "sharded_sums(clip(sharded))": Wrapper(
        around(sharded_sums, clipped, sharded),
        ("sharded_sums", "clip", "sharded"),
        2,
        "step",
        clips=True,
        shards=True,
    ),
    "average(synced(cross_shard))": Wrapper(
        around(averaged, synced, cross_shard),
        ("average", "synced", "cross_shard"),
        2,
        averages=True,
    ),
    "average(clip(sharded))": Wrapper(
        around(averaged, clipped, sharded),
        ("average", "clip", "sharded"),
        clips=True,
        shards=True,
        averages=True,
    ),
    "loss_scale(local(sharded))": Wrapper(
        around(scaled, local, sharded), ("loss_scale", "local", "sharded"), 2, "step", shards=True
    ),
    "local(sharded)": Wrapper(around(local, sharded), ("local", "sharded"), 2, "step", shards=True),
    "loss_scale(cross_shard)": Wrapper(
        around(scaled, cross_shard), ("loss_scale", "cross_shard"), nan="step"
    ),
    "replicas(clip)": Wrapper(
        around(replicas, clipped), ("replicas", "clip"), nan="shard", clips=True
    ),
}
