"""Descriptions of how the gradients of a step are reduced."""

from __future__ import annotations

from typing import Callable, Mapping, NamedTuple, Sequence

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.reduce.strategy import has_gradient_reduction
from mtf_gradsync.step import Branch


class Reduction(NamedTuple):
    """How a wrapper reduces gradients.

    Attributes:
      strategy: the reduction strategy.
      batch_dims: names of the dimensions that the batch is split along.
      axes: the replica axes; None if the wrapper does not know them.
      name: the wrapper's name.
      other_axes: for per-shard gradients, the strategy for sums over mesh axes other than the
        replica axes; None for `strategy`.
    """

    strategy: Strategy
    batch_dims: tuple[str, ...]
    axes: ReplicaAxes | None = None
    name: str = ""
    other_axes: Strategy | None = None

    @property
    def reduces_gradients(self) -> bool:
        """Whether the strategy reduces gradients by `reduce_gradients`."""
        return has_gradient_reduction(self.strategy)


class Partition(NamedTuple):
    """How updates are sharded: which part of a variable each replica updates.

    `shapes_of` gives the shapes of the parts of variables that get gradients in one step, without
    those that are not split. The name is the wrapper's.
    """

    axes: ReplicaAxes
    strategy: Strategy
    shapes_of: Callable[[Sequence[mtf.Variable]], Mapping[mtf.Variable, mtf.Shape]]
    name: str = ""


class Reduced(NamedTuple):
    """The first reduction of a step.

    Attributes:
      parts: the gradients before it, not None, pending or per shard.
      sums: the gradients after it, reduced or in parts.
      branch: the branch of the step that has them; None if every step has.
      strategy: the reduction strategy.
    """

    parts: list[mtf.Tensor]
    sums: list[mtf.Tensor]
    branch: Branch | None
    strategy: Strategy
