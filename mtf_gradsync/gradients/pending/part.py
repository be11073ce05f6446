"""The plan's part for pending sums: which gradients wrappers use, and in which form."""

from __future__ import annotations

import functools
from typing import NamedTuple, Sequence

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.gradients.pending.batch import used_axes
from mtf_gradsync.gradients.pending.flow import Flow
from mtf_gradsync.gradients.pending.layout import Axes, Layout
from mtf_gradsync.gradients.pending.lowering import Bucket, PendingLowering
from mtf_gradsync.gradients.pending.unsummed import Unsummed
from mtf_gradsync.gradients.stage import StageOperation
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.step import Part, Plan


class _Want(NamedTuple):
    """Gradients that a wrapper uses; the fields are the arguments of `PendingSums.want`."""

    tensors: tuple[mtf.Tensor, ...]
    reduced: bool
    batch_dims: tuple[str, ...] | None
    strategy: Strategy
    are_sums: bool


class PendingSums(Part):
    """Keeps sums pending, and reduces those behind all gradients together."""

    def __init__(self) -> None:
        self._wants: tuple[_Want, ...] = ()

    @classmethod
    def want(
        cls,
        tensors: Sequence[mtf.Tensor],
        reduced: bool,
        batch_dims: Sequence[str] | None,
        strategy: Strategy,
        are_sums: bool = False,
    ) -> None:
        """Declares that gradients of one mesh are going to be used, reduced or as they are.

        The sums behind all gradients that are to be reduced are reduced together, at the first
        place that needs one of them, which may be in the model. Without `batch_dims` the graph
        tells what the batch is split along. Tensors that `are_sums` themselves, over any mesh axes,
        are reduced together even if each shard holds its own part of them.
        """
        if not tensors:
            return
        plan = Plan.of(tensors[0].graph)
        plan.adopt()
        part = plan.part(cls)
        names = None if batch_dims is None else tuple(batch_dims)
        part._wants += (_Want(tuple(tensors), reduced, names, strategy, are_sums),)

    @classmethod
    def of_lowering(cls, lowering: mtf.Lowering) -> PendingLowering:
        """Returns the pending sums of a lowering that has begun."""
        parts = Plan.of(lowering.graph).lowered(lowering).parts
        return next(part for part in parts if isinstance(part, PendingLowering))

    def begin(self, lowering: mtf.Lowering) -> PendingLowering:
        """See `Part.begin`."""
        graph = lowering.graph
        targets, sums = (
            [t for want in self._wants if want.are_sums is are for t in want.tensors]
            for are in (False, True)
        )

        def axis_of(mesh: mtf.Mesh, dim: mtf.Dimension) -> int | None:
            return lowering.mesh_to_impl[mesh].tensor_dimension_to_mesh_axis(dim)

        @functools.lru_cache(maxsize=None)
        def replica_axes(mesh: mtf.Mesh) -> Axes:
            own = [want for want in self._wants if want.tensors[0].mesh is mesh]
            names = [want.batch_dims for want in own or self._wants]
            return used_axes(graph, mesh, axis_of, [*targets, *sums], names)

        flow = Flow(graph, targets, Layout(axis_of, replica_axes), sums)
        return PendingLowering(lowering, flow, self._buckets(flow), Unsummed(flow, targets))

    def _buckets(self, flow: Flow) -> dict[mtf.Tensor, Bucket]:
        """The sums that are reduced together, in the order in which they were declared."""
        found: dict[mtf.Tensor, Bucket] = {}
        for want in self._wants:
            for tensor in flow.sums_behind(want.tensors, want.reduced):
                found.setdefault(tensor, Bucket(want.strategy, by_program=False))
        if self._wants:
            # Sums that only the program itself needs reduced, for a norm that it logs for example,
            # apart from the others: it may not need them on every step.
            own = [
                t
                for operation, tensors in flow.forced.items()
                if not isinstance(operation, StageOperation)
                for t in tensors
            ]
            for tensor in flow.sums_behind(own, True):
                found.setdefault(tensor, Bucket(self._wants[0].strategy, by_program=True))
        return found
