"""Variables with a value for each island, and their outer values.

Their names are a checkpoint format: `<variable>/island` holds the islands' values of a variable or
slot; the variable itself holds the outer values.
"""

from __future__ import annotations

from typing import Any, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import (
    give_outputs,
    give_value,
    init_replacement,
    keep_unstacked,
    master_of,
)
from mtf_gradsync._scopes import root_scope
from mtf_gradsync.optimizers.state.resharding import STATE_COLLECTION, StateNote
from mtf_gradsync.optimizers.state.restoring import note_state
from mtf_gradsync.optimizers.state.variables import (
    UncheckpointedVariable,
    named_state,
    unstacked_as,
)
from mtf_gradsync.step import Islands, Plan


class OuterVariable(mtf.Variable):
    """The outer values of a variable: its master, which all islands share."""

    def __init__(self, variable: mtf.Variable):
        init_replacement(self, variable, None)
        self._trainable = False
        keep_unstacked(self, unstacked_as(variable.dtype))
        give_outputs(self, [mtf.Tensor(self, variable.shape, variable.activation_dtype)])
        self.graph.operations.insert(0, self)
        self.graph.all_variables.append(self)


def hold_slots_by_islands(
    slots: Sequence[mtf.Variable], island_dims: Sequence[mtf.Dimension]
) -> None:
    """Gives slots a value for each island; checkpoints have the holders in place of the slots."""
    graph = tf.get_default_graph()
    notes = {note.name: note for note in graph.get_collection(STATE_COLLECTION)}
    for slot in slots:
        note: StateNote = notes.get(slot.name, StateNote(slot.name))
        start = slot.name if not note.num_shard_dims else note.start
        hold_by_islands(slot, island_dims, start=start, counter=note.counter)
        if isinstance(slot, UncheckpointedVariable):
            continue
        collection = graph.get_collection_ref(tf.GraphKeys.GLOBAL_VARIABLES)
        collection[:] = [x for x in collection if x is not master_of(slot)]


def hold_by_islands(
    variable: mtf.Variable, island_dims: Sequence[mtf.Dimension], **note: Any
) -> mtf.Variable:
    """Gives a variable that is not lowered yet a value for each island, and returns the holder.

    All islands begin with the variable's value. `note` has fields of the holder's `StateNote`.
    """
    name, dims = f"{variable.name}/island", list(island_dims)
    shape = mtf.Shape([*dims, *variable.shape.dims])
    if isinstance(variable, UncheckpointedVariable):
        holder = named_state(variable.mesh, name, shape, variable.slice_dtype, checkpointed=False)
    else:
        master = master_of(variable)
        sizes = master.shape.as_list()
        is_cut = sizes != variable.shape.to_integer_list
        rest = [mtf.Dimension(f"_{i}", n) for i, n in enumerate(sizes)]
        saved = mtf.Shape([*dims, *rest]) if is_cut else shape

        def initial(to: Any, dtype: Any = None, **_: Any) -> tf.Tensor:
            return tf.broadcast_to(tf.cast(master.initial_value, dtype), to)

        with root_scope():
            holder = mtf.get_variable(
                variable.mesh,
                name,
                saved,
                unstacked_as(variable.dtype),
                initializer=initial,
                trainable=False,
            ).operation
        if is_cut:
            give_value(holder, shape)
        note_state(holder, num_shard_dims=len(dims), is_mean=True, **note)
    keep_unstacked(variable, unstacked_as(variable.dtype))
    Plan.of(variable.graph).part(Islands).hold(variable, holder)
    return holder
