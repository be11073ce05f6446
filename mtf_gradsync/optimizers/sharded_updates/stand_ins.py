"""What an inner optimizer sees in place of a variable of which each replica updates a part."""

from __future__ import annotations

import operator
from typing import Mapping, Sequence

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync._private.mesh_tensorflow import give_assign_fn, init_stand_in, reassign
from mtf_gradsync.gradients.scatter import GatherParts, TakePart
from mtf_gradsync.gradients.stage import StageOperation, reduced_values
from mtf_gradsync.mesh.kind import is_simd
from mtf_gradsync.step import Plan


class PartOfVariable(mtf.Variable):
    """A variable's part, as a variable of the same name and dtypes.

    Its dimensions are laid out over the replica axes, and so are slots of its shape. It is in none
    of the graph's lists; what is assigned to it is put together by `assign_whole`.

    Attributes:
      whole: the variable.
    """

    def __init__(self, whole: mtf.Variable, shape: mtf.Shape):
        """Takes each processor's part.

        Args:
          whole: the variable.
          shape: `whole.shape` with other names of dimensions.
        """
        init_stand_in(self, whole, TakePart(whole.value, shape).outputs[0])
        self.whole = whole


# They change element by element what they are given cast to: sent in that dtype, bits stay.
_CASTING = (mtf.assign_slice, mtf.assign_add_slice, mtf.assign_sub_slice)


def assign_whole(
    updates: Sequence[mtf.Operation], parts: Mapping[mtf.Variable, PartOfVariable]
) -> None:
    """Makes assignments to parts ones to the whole variables, of what is gathered.

    Args:
      updates: what an inner optimizer returned. Its assignments are changed in place.
      parts: variable -> its part.

    Raises:
      ValueError: what is assigned does not have the shape of the part.
    """
    found = [u for u in updates if isinstance(u, mtf.Assign)]
    for update in found:
        send_new_values(update, parts)
    # By the assignment and the place in it: what is sent, and the shape of the whole.
    sent: dict[tuple[mtf.Assign, int], tuple[mtf.Tensor, mtf.Shape]] = {}
    for update in found:
        for place, (variable, value) in enumerate(zip(update.variables, update.inputs)):
            whole = _whole(variable)
            if whole not in parts:
                continue
            shape = parts[whole].shape
            if value.shape != shape:
                raise ValueError(
                    f"The inner optimizer assigns a value of shape {value.shape.to_string} to "
                    f"{whole.name!r}, whose part has the shape {shape.to_string}. "
                    "ShardedUpdateOptimizer works around optimizers that keep the shape of the "
                    "variable that they are given."
                )
            if update.assign_fn in _CASTING and value.dtype != whole.slice_dtype:
                value = mtf.cast(value, whole.slice_dtype)
            sent[update, place] = value, whole.shape
    if not sent:
        return
    values, shapes = zip(*sent.values())
    gathered = dict(zip(sent, GatherParts(values, shapes).outputs))
    for update in found:
        new = [gathered.get((update, i), value) for i, value in enumerate(update.inputs)]
        reassign(update, list(map(_whole, update.variables)), new)
    # Behind what they assign.
    Plan.of(found[0].graph).arrange(found)


def send_new_values(update: mtf.Assign, parts: Mapping[mtf.Variable, PartOfVariable]) -> None:
    """Has new values sent in place of changes, where nothing else changes the variables.

    A change that was gathered is taken from the variable in the layout of what was gathered: the
    compiler for TPUs copies the variable to it and back.

    Args:
      update: an assignment of changes to parts and whole variables.
      parts: variable -> its part.
    """
    if update.assign_fn not in _CHANGES:
        return
    alike = all(
        v.activation_dtype == v.slice_dtype == x.dtype
        for v, x in zip(update.variables, update.inputs)
    )
    if alike and any(_whole(v) in parts for v in update.variables):
        reassign(update, update.variables, NewValues(update).outputs)


_CHANGES = {mtf.assign_add_slice: operator.add, mtf.assign_sub_slice: operator.sub}


class NewValues(StageOperation):
    """Values and their changes -> the new values, or the changes where others change them too."""

    def __init__(self, update: mtf.Assign):
        """Adds the operation.

        Args:
          update: assigns the changes; on SIMD meshes it is made to assign new values when the
            operation is lowered.
        """
        self._update, self._assign_fn = update, update.assign_fn
        self._names = {v.name for v in update.variables}
        changes = list(update.inputs)
        inputs = [*(v.value for v in update.variables), *changes]
        super().__init__(
            inputs, [x.shape for x in changes], "new_values", [x.dtype for x in changes]
        )

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        mesh_impl = lowering.mesh_impl(self)
        given = reduced_values(lowering, self.inputs)
        old, results = given[: len(self.outputs)], given[len(self.outputs) :]
        assign_fn = self._assign_fn
        if is_simd(mesh_impl) and self._is_alone():
            change, assign_fn = _CHANGES[assign_fn], mtf.assign_slice
            results = [mesh_impl.slicewise(change, *pair) for pair in zip(old, results)]
        give_assign_fn(self._update, assign_fn)
        self.set_outputs(lowering, results)

    def _is_alone(self) -> bool:
        """Whether no other assignment writes these variables."""
        others = (
            getattr(v, "original_names", [v.name])
            for op in self.graph.operations
            if isinstance(op, mtf.Assign) and op is not self._update
            for v in op.variables
        )
        return self._names.isdisjoint(name for names in others for name in names)


def _whole(variable: mtf.Variable) -> mtf.Variable:
    return variable.whole if isinstance(variable, PartOfVariable) else variable
