"""Slots that lack the dimension that their variable is cut along are kept in parts all the same.

Adafactor's factored statistics are such: of a matrix whose rows are split over the replicas, the
statistics of columns are needed whole by every replica. Large ones are kept in parts, gathered for
the update, and each replica writes its part. Small ones stay whole: a gather and what it needs in
temporaries and code would take more than they save.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync._private.mesh_tensorflow import give_value, reassign, take_over
from mtf_gradsync.gradients.scatter import GatherParts, TakePart
from mtf_gradsync.optimizers.sharded_updates.cutting import Splitting

# Elements of a slot that is worth a gather. The compiler for TPUs (libtpu 0.0.42, v5e) takes some
# 15 KB of code for one, and 25 statistics of 128 to 512 elements took 1.2 MB more than they saved.
WORTH_A_GATHER = 16 * 1024
# They change element by element.
_BY_ELEMENT = (mtf.assign_slice, mtf.assign_add_slice, mtf.assign_sub_slice)


def keep_in_parts(
    slots: Sequence[mtf.Variable],
    updates: Sequence[mtf.Operation],
    split: Callable[[mtf.Shape], Splitting | None],
) -> list[mtf.Operation]:
    """Lays slots out over the replicas that an update has made whole.

    Args:
      slots: variables that nothing but the update uses.
      updates: what the inner optimizer returned. Its assignments are changed in place.
      split: from the shape of a slot to how it is split, or None.

    Returns:
      The operations that have to come before the update's.
    """
    writers: dict[mtf.Variable, list[Any]] = {}
    for update in updates:
        for variable in getattr(update, "variables", ()):
            writers.setdefault(variable, []).append(update)
    found = {
        slot: split(slot.shape)
        for slot in slots
        # An assignment that is not among them, or has a way of its own, wants the whole slot.
        if slot in writers
        and all(getattr(w, "assign_fn", None) in _BY_ELEMENT for w in writers[slot])
    }
    cut = {slot: shapes for slot, shapes in found.items() if shapes is not None}
    if not cut:
        return []
    for update in dict.fromkeys(w for slot in cut for w in writers[slot]):
        values = list(update.inputs)
        for number, variable in enumerate(update.variables):
            if variable in cut:
                apart = mtf.reshape(values[number], cut[variable].apart)
                values[number] = TakePart(apart, cut[variable].part).outputs[0]
        reassign(update, update.variables, values)
    wholes = [slot.value for slot in cut]
    parts = [give_value(slot, shapes.part) for slot, shapes in cut.items()]
    gather = GatherParts(parts, [shapes.apart for shapes in cut.values()])
    joins = []
    for apart, whole in zip(gather.outputs, wholes):
        joins.append(mtf.reshape(apart, whole.shape).operation)
        take_over(joins[-1], [whole])
    return [gather, *joins]
