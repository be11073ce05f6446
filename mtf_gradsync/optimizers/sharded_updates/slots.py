"""Partitions slots that do not have the dimension along which their variable is split.

Adafactor's factored statistics are such slots: if the rows of a matrix are split over the replicas,
each replica needs the statistics of all columns. Large ones are partitioned: they are gathered for
the update, and each replica writes its part. Small ones are not, because the gather would take more
memory for temporaries and code than it saves.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync._private.mesh_tensorflow import give_value, reassign, take_over
from mtf_gradsync.gradients.scatter import GatherParts, TakePart
from mtf_gradsync.optimizers.sharded_updates.shapes import SlotShapes
from mtf_gradsync.optimizers.sharded_updates.variables import ELEMENTWISE

# The fewest elements of a slot that is gathered. The compiler for TPUs (libtpu 0.0.42, v5e) takes
# some 15 KB of code for a gather, and 25 statistics of 128 to 512 elements took 1.2 MB more than
# they saved.
MIN_GATHERED_SIZE = 16 * 1024


def partition_slots(
    slots: Sequence[mtf.Variable],
    updates: Sequence[mtf.Operation],
    shapes_of: Callable[[mtf.Shape], SlotShapes | None],
) -> list[mtf.Operation]:
    """Splits slots over the replicas, and returns operations that gather their full values.

    These have to be lowered before those of the update, of which assignments are changed in place.
    Only the update may read and write the slots. `shapes_of` gives the shapes to split a slot of
    some shape by, or None for one that stays unsplit.
    """
    writers: dict[mtf.Variable, list[Any]] = {}
    for update in updates:
        for variable in getattr(update, "variables", ()):
            writers.setdefault(variable, []).append(update)
    split = {
        slot: shapes
        for slot in slots
        # Any other assignment may need the full value of the slot.
        if slot in writers
        and all(getattr(w, "assign_fn", None) in ELEMENTWISE for w in writers[slot])
        and (shapes := shapes_of(slot.shape))
    }
    if not split:
        return []
    for update in dict.fromkeys(w for slot in split for w in writers[slot]):
        values = list(update.inputs)
        for number, variable in enumerate(update.variables):
            if variable in split:
                full = mtf.reshape(values[number], split[variable].full)
                values[number] = TakePart(full, split[variable].part).outputs[0]
        reassign(update, update.variables, values)
    old_values = [slot.value for slot in split]
    parts = [give_value(slot, shapes.part) for slot, shapes in split.items()]
    gather = GatherParts(parts, [shapes.full for shapes in split.values()])
    reshapes = []
    for full, old in zip(gather.outputs, old_values):
        reshapes.append(mtf.reshape(full, old.shape).operation)
        take_over(reshapes[-1], [old])
    return [gather, *reshapes]
