"""Gradients that are linear in sums over the shards, made again without some of the shards.

The gradient of a variable that the layout splits over the batch's own mesh axis may be made of sums
over the shards that the model itself needs: a sum of products with the examples, broadcast to the
variable's slices, for example. Each shard's part is gone from it. But it is still there before the
sum, so that the sum can leave out shards, and what follows can be done again with the result.
"""

from __future__ import annotations

from typing import Sequence

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.gradients.pending import Flow, Layout
from mtf_gradsync.gradients.pending.linear import linear_positions, passes_on
from mtf_gradsync.gradients.stage import StageOperation, reduced_values


class MadeOfSums:
    """A gradient that is linear in sums over the shards.

    Attributes:
      sums: pending tensors, from which each shard's part is recoverable.
      shared: tensors without data of any shard that the gradient is linear in, too, as those of a
        penalty on weights.
    """

    def __init__(
        self,
        grad: mtf.Tensor,
        sums: Sequence[mtf.Tensor],
        shared: Sequence[mtf.Tensor],
        operations: Sequence[mtf.Operation],
    ):
        """Describes `grad`, which the operations compute, in order, from the other tensors."""
        self._grad, self._operations = grad, list(operations)
        self.sums, self.shared = list(sums), list(shared)

    def remade(self, sums: Sequence[mtf.Tensor], shared: Sequence[mtf.Tensor]) -> mtf.Tensor:
        """Returns the gradient for other values of `sums` and `shared`, which are reduced."""
        given = [*self.sums, *self.shared]
        return _MakeAgain(self._grad, given, [*sums, *shared], self._operations).outputs[0]


class _MakeAgain(StageOperation):
    """Lowers operations once more, with other values in place of some tensors."""

    def __init__(
        self,
        result: mtf.Tensor,
        given: Sequence[mtf.Tensor],
        values: Sequence[mtf.Tensor],
        operations: Sequence[mtf.Operation],
    ):
        self._result, self._operations = result, list(operations)
        made = {*given, *(t for op in operations for t in op.outputs)}
        factors = dict.fromkeys(t for op in operations for t in op.inputs if t not in made)
        self._replaced = [*given, *factors]
        super().__init__([*values, *factors], [result.shape], "make_again", [result.dtype])

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        values = dict(zip(self._replaced, reduced_values(lowering, self.inputs)))
        changed = [*values, *(t for op in self._operations for t in op.outputs)]
        before = {t: lowering.tensors[t] for t in changed}
        lowering.tensors.update(values)
        try:
            for operation in self._operations:
                operation.lower_itself(lowering)
            result = lowering.tensors[self._result].to_laid_out_tensor()
        finally:
            lowering.tensors.update(before)
        self.set_outputs(lowering, [result])


def made_of_sums(grad: mtf.Tensor, flow: Flow, layout: Layout) -> MadeOfSums | None:
    """Finds the sums that a gradient is linear in; None if there are none, or it is not linear."""
    replica_axes = layout.replica_axes(grad.mesh)
    outside = set(grad.graph.operations)

    def is_pending(tensor: mtf.Tensor) -> bool:
        return bool(flow.axes.get(tensor, frozenset()) & replica_axes)

    sums: dict[mtf.Tensor, None] = {}
    shared: dict[mtf.Tensor, None] = {}
    operations: set[mtf.Operation] = set()
    todo, seen = [grad], set()
    while todo:
        tensor = todo.pop()
        if tensor in seen:
            continue
        seen.add(tensor)
        operation = tensor.operation
        if tensor is not grad and flow.mixes_shards(tensor) is None:
            if layout.split(tensor) & replica_axes and is_pending(tensor):
                return None
            (sums if is_pending(tensor) else shared)[tensor] = None
            continue
        inputs = operation.inputs
        mixed = [i for i, x in enumerate(inputs) if is_pending(x) or flow.mixes_shards(x)]
        positions = mixed if passes_on(operation) else linear_positions(operation, mixed)
        if (
            not mixed
            or positions is None
            or operation not in outside
            or isinstance(operation, (mtf.ScalarAddOperation, mtf.CustomGradientOperation))
            or any(layout.split_over_shards(inputs[i]) for i in positions)
        ):
            return None
        operations.add(operation)
        todo += [inputs[i] for i in positions]
    in_order = [op for op in grad.graph.operations if op in operations]
    return MadeOfSums(grad, list(sums), list(shared), in_order) if sums else None
