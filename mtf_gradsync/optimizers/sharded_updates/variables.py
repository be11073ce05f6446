"""The variables that the inner optimizer updates, and the gather of their new values."""

from __future__ import annotations

import operator
from typing import Mapping, Sequence

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync._private.mesh_tensorflow import give_assign_fn, init_replacement, reassign
from mtf_gradsync.gradients.scatter import GatherParts, TakePart
from mtf_gradsync.gradients.stage import StageOperation, reduced_values
from mtf_gradsync.mesh.kind import is_simd
from mtf_gradsync.step import Plan

# Functions of assignments that change a variable element by element.
ELEMENTWISE = (mtf.assign_slice, mtf.assign_add_slice, mtf.assign_sub_slice)
_CHANGES = {mtf.assign_add_slice: operator.add, mtf.assign_sub_slice: operator.sub}


class PartOfVariable(mtf.Variable):
    """Each replica's part of a variable, as a variable of the same name and dtypes.

    Its shape is that of the full variable with some dimensions renamed, so that the layout splits
    it, and slots of its shape, over the replica axes. The graph does not list it; `assign_gathered`
    replaces it by the full variable in assignments.
    """

    def __init__(self, full: mtf.Variable, shape: mtf.Shape):
        init_replacement(self, full, TakePart(full.value, shape).outputs[0])
        self.full = full


def assign_gathered(
    updates: Sequence[mtf.Operation], parts: Mapping[mtf.Variable, PartOfVariable]
) -> None:
    """Makes assignments to parts assign the gathered values to the full variables.

    `parts` has each variable that is split, with its part; a ValueError says where an assigned
    value does not have the shape of the part.
    """
    assignments = [u for u in updates if isinstance(u, mtf.Assign)]
    for update in assignments:
        _assign_new_values(update, parts)
    # Keys are an assignment and the position of the variable in it.
    sent: dict[tuple[mtf.Assign, int], tuple[mtf.Tensor, mtf.Shape]] = {}
    for update in assignments:
        for position, (variable, value) in enumerate(zip(update.variables, update.inputs)):
            full = _full(variable)
            if full not in parts:
                continue
            shape = parts[full].shape
            if value.shape != shape:
                raise ValueError(
                    f"The inner optimizer assigns a value of shape {value.shape.to_string} to its "
                    f"part of {full.name!r}, which has the shape {shape.to_string}. "
                    "ShardedUpdateOptimizer needs an optimizer that assigns values of the shape of "
                    "the variable that it was given."
                )
            # Such an assignment casts to this dtype: a cast before the gather gives the same bits.
            if update.assign_fn in ELEMENTWISE and value.dtype != full.slice_dtype:
                value = mtf.cast(value, full.slice_dtype)
            sent[update, position] = value, full.shape
    if not sent:
        return
    values, shapes = zip(*sent.values())
    gathered = dict(zip(sent, GatherParts(values, shapes).outputs))
    for update in assignments:
        new = [gathered.get((update, i), value) for i, value in enumerate(update.inputs)]
        reassign(update, list(map(_full, update.variables)), new)
    # Assignments have to follow the gather of their values.
    Plan.of(assignments[0].graph).arrange(assignments)


def _assign_new_values(update: mtf.Assign, parts: Mapping[mtf.Variable, PartOfVariable]) -> None:
    """Makes an assignment of changes assign new values, if no other one writes its variables.

    If changes were gathered, a TPU would apply them in the layout of the gathered tensor: its
    compiler would copy the variable to that layout and back.
    """
    if update.assign_fn not in _CHANGES:
        return
    same_dtype = all(
        v.activation_dtype == v.slice_dtype == x.dtype
        for v, x in zip(update.variables, update.inputs)
    )
    if same_dtype and any(_full(v) in parts for v in update.variables):
        reassign(update, update.variables, NewValues(update).outputs)


class NewValues(StageOperation):
    """Computes new values of variables from the changes that an update assigns.

    Its lowering makes the update assign the new values. On placement meshes, and where other
    assignments write the variables too, the outputs are the changes, and the update stays.
    """

    def __init__(self, update: mtf.Assign):
        self._update, self._assign_fn = update, update.assign_fn
        self._names = {v.name for v in update.variables}
        changes, values = update.inputs, [v.value for v in update.variables]
        super().__init__([*changes, *values], [x.shape for x in changes], "new_values")

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        mesh_impl = lowering.mesh_impl(self)
        values, count = reduced_values(lowering, self.inputs), len(self.outputs)
        results, old = values[:count], values[count:]
        assign_fn = self._assign_fn
        if is_simd(mesh_impl) and self._is_only_writer():
            change, assign_fn = _CHANGES[assign_fn], mtf.assign_slice
            results = [mesh_impl.slicewise(change, *pair) for pair in zip(old, results)]
        give_assign_fn(self._update, assign_fn)
        self.set_outputs(lowering, results)

    def _is_only_writer(self) -> bool:
        """Returns whether no other assignment writes these variables."""
        others = (
            getattr(v, "original_names", [v.name])
            for op in self.graph.operations
            if isinstance(op, mtf.Assign) and op is not self._update
            for v in op.variables
        )
        return self._names.isdisjoint(name for names in others for name in names)


def _full(variable: mtf.Variable) -> mtf.Variable:
    return variable.full if isinstance(variable, PartOfVariable) else variable
