"""Every wrapper that the small programs are wrapped in, alone and some around each other."""

from __future__ import annotations

from typing import Any, NamedTuple

import mtf_gradsync as gs
from tests import wrappers

NORM, DECAY, INNER_STEPS = 0.2, 0.5, 2
_GIVEN = {
    "clip_norm": NORM,
    "decay": DECAY,
    "inner_steps": INNER_STEPS,
    "outer_learning_rate": 1.0,
    "outer_momentum": 0.0,
    "leave_out_not_finite": True,
}
# These get no axes, and check nothing before they add up.
_WITHOUT_AXES = ("cross_shard", "average", "synced")
# What is skipped where a shard's examples have a NaN.
_SKIPPED = {
    "local": "step",
    "sharded sums": "step",
    "loss_scale": "step",
    "replicas": "shard",
    "islands": "island",
}


class SummedInALine:
    """What a program without an optimizer does."""

    def __init__(self, opt):
        self.opt = opt

    def apply_grads(self, grads, variables, *own):
        return self.opt.apply_grads(gs.sum_shards(grads), variables, *own)

    def apply_grad(self, grad, variable):
        return self.opt.apply_grad(*gs.sum_shards([grad]), variable)


def wrap(name: str, opt: Any, axes: gs.ReplicaAxes, suffix: str = "") -> Any:
    """Makes one of `WRAPPERS` around an optimizer; the names of its wrappers get the suffix."""
    if name in ("bare", "sum_shards"):
        return opt if name == "bare" else SummedInALine(opt)
    for part in reversed(wrappers.parts(name)):
        more = {"axes": axes, "should_skip_update_fn": gs.skip_not_finite}
        more = {} if part in _WITHOUT_AXES else more
        its_name = f"{wrappers.KINDS[part].name}{suffix}"
        opt = wrappers.wrap(part, opt, name=its_name, **_GIVEN, **more)
    return opt


class Wrapper(NamedTuple):
    """A wrapper, or some around each other.

    Attributes:
      parts: what it is made of.
      micro_steps: how many steps make an update.
      nan: what is skipped where a shard's examples have a NaN: "shard", "step" or "island"; ""
        where everything becomes NaN, so that none is given.
    """

    parts: list[str]
    micro_steps: int = 1
    nan: str = ""


def _made_of(stack: str) -> Wrapper:
    parts = wrappers.parts(stack)
    skipped = next((_SKIPPED[part] for part in parts if part in _SKIPPED), "")
    return Wrapper(parts, wrappers.passes(stack), skipped)


_STACKS = [
    # These two are tested around others alone, and one island is no other training.
    *(name for name in wrappers.KINDS if name not in ("average", "sharded sums", "one island")),
    "average(cross_shard)",
    "sharded sums(clip(sharded))",
    "average(synced(cross_shard))",
    "average(clip(sharded))",
    "loss_scale(local(sharded))",
    "local(sharded)",
    "loss_scale(cross_shard)",
    "replicas(clip)",
]
WRAPPERS = {
    "bare": Wrapper(["bare"]),
    # Its own stage: sums over the shards, and nothing else.
    "sum_shards": Wrapper(["cross_shard"]),
    **{stack: _made_of(stack) for stack in _STACKS},
}
