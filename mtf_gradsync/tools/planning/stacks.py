"""The stacks of wrappers among which the command `plan --best` chooses."""

from __future__ import annotations

from typing import NamedTuple, Sequence

#: Where gradients of several microbatch steps are added up; see `GradientAccumulationOptimizer`.
SUMS = ("local", "synced", "sharded")


class StackSettings(NamedTuple):
    """The settings of a stack of wrappers, as far as they decide the cost of an update.

    Attributes:
      steps: the number of microbatch steps that make an update (K).
      sums: how gradients of microbatch steps are accumulated: one of `SUMS`; "" for a single step.
      sharded_updates: whether each replica updates its part of every variable (ZeRO-1).
      reducer: the strategy that reduces gradients: "fused", or, if replicas lie along several mesh
        axes, "hierarchical".
      inner_steps: the number of steps from one outer step (DiLoCo) to the next; 0 for no outer
        steps. With outer steps, training leads to other values than without them. The other
        settings do not change these values.
    """

    steps: int = 1
    sums: str = ""
    sharded_updates: bool = False
    reducer: str = "fused"
    inner_steps: int = 0

    def __str__(self) -> str:
        parts = [f"{self.sums} sums of {self.steps} microbatch steps"] if self.steps > 1 else []
        parts += ["sharded updates"] if self.sharded_updates else []
        if self.inner_steps:
            parts.append(f"an outer step after {self.inner_steps} steps")
        elif not parts or self.reducer != "fused":
            parts.append(f"{self.reducer} sum")
        return ", ".join(parts)


def stacks_of(
    steps: Sequence[int], shards: int, replica_axes: int, inner_steps: Sequence[int] = ()
) -> list[StackSettings]:
    """Returns all stacks of wrappers among which `plan --best` chooses for one mesh.

    Args:
      steps: numbers to consider for `StackSettings.steps`, the microbatch steps in an update.
      shards: the number of replicas; with one there is nothing to shard or to reduce.
      replica_axes: the number of mesh axes along which replicas lie.
      inner_steps: numbers to consider for `StackSettings.inner_steps`, the steps between two outer
        steps. Stacks with outer steps are listed only if there are several shards and `steps` has a
        1.
    """
    reducers = ["fused", "hierarchical"] if replica_axes > 1 else ["fused"]
    found = []
    for count in steps:
        for sums in ("",) if count == 1 else SUMS if shards > 1 else SUMS[:1]:
            for is_sharded in (False, True)[: 1 + (shards > 1)]:
                # A sharded update reduces gradients by a reduce-scatter, so it has no choice here.
                of_stack = reducers if not is_sharded else reducers[:1]
                found += [StackSettings(count, sums, is_sharded, reducer) for reducer in of_stack]
    if shards > 1 and 1 in steps:
        found += [StackSettings(inner_steps=number) for number in inner_steps]
    return found
