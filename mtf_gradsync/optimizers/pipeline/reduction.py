"""Descriptions of how the gradients of a step are reduced."""

from __future__ import annotations

from typing import Callable, Iterable, Mapping, NamedTuple, Sequence

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


# What wrappers take for batch_dims where they are given nothing.
_DEFAULT_BATCH_DIMS = ("batch",)


def shard_names(reductions: Iterable[Reduction]) -> tuple[str, ...]:
    """Returns the names of a stack's shard dims, from how each of its wrappers reduces gradients.

    They are all names that wrappers know, by their replica axes or as batch_dims, in any order of
    the wrappers. The default batch_dims count only if no wrapper knows any.
    """
    names = [(r.batch_dims if r.axes is None else r.axes.batch_dims, r.axes) for r in reductions]
    known = [some for some, axes in names if axes is not None or some != _DEFAULT_BATCH_DIMS]
    return tuple(dict.fromkeys(name for some in known or [_DEFAULT_BATCH_DIMS] for name in some))


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
