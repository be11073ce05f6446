"""The plan's part for pending sums: what wrappers want of gradients, and which sums that takes."""

from __future__ import annotations

import functools
from typing import NamedTuple, Sequence

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.gradients.pending.batch import used_axes
from mtf_gradsync.gradients.pending.flow import Flow
from mtf_gradsync.gradients.pending.layout import Axes, Layout
from mtf_gradsync.gradients.pending.lowering import PendingLowering, Together
from mtf_gradsync.gradients.pending.unsummed import Unsummed
from mtf_gradsync.gradients.stage import StageOperation
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.step import Part, Plan


class _Want(NamedTuple):
    """Gradients that somebody wants.

    Attributes:
      tensors: the gradients.
      whole: whether they are wanted summed, or as each processor's part.
      batch_dims: names of the dimensions of the batch; None where nobody has said them.
      strategy: how sums cross the mesh.
      are_sums: whether they are sums themselves, over whatever axes of the mesh.
    """

    tensors: tuple[mtf.Tensor, ...]
    whole: bool
    batch_dims: tuple[str, ...] | None
    strategy: Strategy
    are_sums: bool


class PendingSums(Part):
    """Lets sums stay pending, and makes those behind all wanted gradients together."""

    def __init__(self) -> None:
        self._wants: tuple[_Want, ...] = ()

    @classmethod
    def want(
        cls,
        tensors: Sequence[mtf.Tensor],
        whole: bool,
        batch_dims: Sequence[str] | None,
        strategy: Strategy,
        are_sums: bool = False,
    ) -> None:
        """Says that gradients are going to be used.

        The sums behind all gradients that are wanted whole cross the mesh together, by the
        strategy, at the first place that needs one of them, which may be in the model.

        Args:
          tensors: gradients of one graph, at least one.
          whole: whether they are wanted summed, or as each processor's part.
          batch_dims: names of the dimensions that the batch is split along; None where nobody has
            said them.
          strategy: how sums cross the mesh.
          are_sums: whether they are sums themselves, over whatever axes of the mesh: then they
            cross together where each shard holds its own part of them, too.
        """
        plan = Plan.of(tensors[0].graph)
        plan.adopt()
        part = plan.part(cls)
        names = None if batch_dims is None else tuple(batch_dims)
        part._wants += (_Want(tuple(tensors), whole, names, strategy, are_sums),)

    @classmethod
    def of_lowering(cls, lowering: mtf.Lowering) -> PendingLowering:
        """What pending sums do in a lowering that has begun."""
        parts = Plan.of(lowering.graph).lowered(lowering).parts
        return next(part for part in parts if isinstance(part, PendingLowering))

    def begin(self, lowering: mtf.Lowering) -> PendingLowering:
        """See `Part.begin`."""
        graph = lowering.graph
        targets, sums = (
            [t for want in self._wants if want.are_sums is are for t in want.tensors]
            for are in (False, True)
        )
        names = [want.batch_dims for want in self._wants]

        def axis_of(mesh: mtf.Mesh, dim: mtf.Dimension) -> int | None:
            return lowering.mesh_to_impl[mesh].tensor_dimension_to_mesh_axis(dim)

        @functools.lru_cache(maxsize=None)
        def replica_axes(mesh: mtf.Mesh) -> Axes:
            return used_axes(graph, mesh, axis_of, [*targets, *sums], names)

        flow = Flow(graph, targets, Layout(axis_of, replica_axes), sums)
        return PendingLowering(lowering, flow, self._together(flow), Unsummed(flow, targets))

    def _together(self, flow: Flow) -> dict[mtf.Tensor, Together]:
        """The sums that are made together, in the order in which they were asked for."""
        found: dict[mtf.Tensor, Together] = {}
        for want in self._wants:
            for tensor in flow.sums_behind(want.tensors, want.whole):
                found.setdefault(tensor, Together(want.strategy, by_program=False))
        if self._wants:
            # What the program itself needs whole, a norm that it logs say, while wrappers want
            # each processor's part: it may not need that on every step.
            own = [
                t
                for operation, tensors in flow.forced.items()
                if not isinstance(operation, StageOperation)
                for t in tensors
            ]
            for tensor in flow.sums_behind(own, True):
                found.setdefault(tensor, Together(self._wants[0].strategy, by_program=True))
        return found
