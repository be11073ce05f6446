"""Values of islands: fragments, the variables and slices that hold values, and losses."""

from __future__ import annotations

import math
import re
from typing import Any, Callable, Collection, Iterable, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import (
    Reshaped,
    init_replacement,
    keep_unstacked,
    master_of,
    reshape_variable,
    set_operation_outputs,
)
from mtf_gradsync._private.tensorflow import root_scope
from mtf_gradsync.gradients.measures import NotFinite
from mtf_gradsync.gradients.operations import (
    GradientOperation,
    PartialSum,
    reduce_partial_sums,
    reduced_values,
    reshaped,
)
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.mesh.devices import writers_of
from mtf_gradsync.optimizers.pipeline.strategy_state import Owner, VariablePiece
from mtf_gradsync.optimizers.state import (
    ISLAND,
    STATE_COLLECTION,
    StateNote,
    UncheckpointedVariable,
    derived_variable,
    named_state,
    note_state,
    without_autostack,
)
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.step.conditional import ValuesAfter
from mtf_gradsync.step.plan import ExtensionLowering, PlanExtension, StepPlan
from mtf_gradsync.step.writes import CURE

# The number of a layer in a variable's name, as in "decoder/layer_003/kernel" or "h3/w".
_NUMBER = re.compile(r"\d+(?=/)")


def fragments_of(
    variables: Sequence[mtf.Variable], count: int, axes: ReplicaAxes, by_rows: bool = False
) -> list[list[Owner]]:
    """Splits variables into `count` fragments, each with an equal share of all their numbers.

    A variable counts by the number of elements in the slice of it that a core holds, because a core
    sends its slices in an outer step. The size of slices follows from the mesh and layout of
    `axes`.

    Layer l belongs to fragment l modulo `count`, as in streaming DiLoCo. The number of a layer is
    found in the names of the layer's variables (the first number at the end of a part of the name).
    Variables that belong to no layer go to fragments that have less than their share, the largest
    variable first. So do the variables of layers that would make a fragment larger than its share.
    A variable that fits into no fragment is cut into pieces (`VariablePiece`): ranges of the
    numbers in each core's slice, at most one for each fragment.

    No fragment is larger than an equal share, rounded up to a whole number, if `by_rows` is false.
    If it is true, variables are cut only between rows, so that a piece of a matrix is a matrix. A
    fragment may then be larger than its share, by less than a row of a variable that is cut. A
    fragment is a list of variables, and of pieces of variables, in the order of `variables`.
    """
    shapes = {v: axes.slice_shape(v.shape) for v in variables}
    sizes = {v: math.prod(shape) for v, shape in shapes.items()}
    room = [-(-sum(sizes.values()) // count)] * count
    fragments: list[dict[mtf.Variable, Owner]] = [{} for _ in range(count)]

    def put(variable: mtf.Variable, number: int) -> None:
        fragments[number][variable] = variable
        room[number] -= sizes[variable]

    def cut(variable: mtf.Variable) -> None:
        unit = shapes[variable][-1] if by_rows and len(shapes[variable]) > 1 else 1
        units = [max(0, space) // unit for space in room]
        missing = sizes[variable] // unit - sum(units)
        largest_rest_first = sorted(range(count), key=lambda i: units[i] * unit - room[i])
        for number in largest_rest_first[: max(0, missing)]:
            units[number] += 1
        start, errors = 0, dict[str, mtf.Variable]()
        for number in sorted(range(count), key=lambda i: -units[i]):
            stop = min(start + units[number] * unit, sizes[variable])
            if stop - start == sizes[variable]:
                put(variable, number)
            elif stop > start:
                piece = VariablePiece(variable, number, start, stop, shapes[variable], errors)
                fragments[number][variable] = piece
                room[number] -= stop - start
            start = stop

    numbers = {v: _NUMBER.search(v.name) for v in variables}
    layers = sorted({int(found.group()) for found in numbers.values() if found})
    for variable, found in numbers.items():
        if found:
            number = layers.index(int(found.group())) % count
            if sizes[variable] <= room[number]:
                put(variable, number)
    placed = {v for fragment in fragments for v in fragment}
    for variable in sorted((v for v in variables if v not in placed), key=lambda v: -sizes[v]):
        number = max(range(count), key=lambda i: room[i])
        if sizes[variable] <= room[number]:
            put(variable, number)
        else:
            cut(variable)
    return [[some[v] for v in variables if v in some] for some in fragments]


class SameSlices(GradientOperation):
    """An operation that reshapes tensors: each processor reshapes its own slices.

    The tensors have values that differ between islands. The dimensions that number islands are
    added to their shapes, or removed from them. Nothing is sent, and the slices keep their size.
    """

    def __init__(self, tensors: Sequence[mtf.Tensor], shapes: Sequence[mtf.Shape]):
        super().__init__(tensors, shapes, "same_slices")

    def lower(self, lowering: mtf.Lowering) -> None:
        mesh_impl = lowering.mesh_impl(self)
        values = reduced_values(lowering, self.inputs)
        shapes = [mesh_impl.slice_shape(output.shape) for output in self.outputs]
        self.set_outputs(lowering, [reshaped(mesh_impl, *x) for x in zip(values, shapes)])


class Agreed(GradientOperation):
    """An operation that makes one boolean, the same on all islands, out of the islands' booleans.

    The input `holds` is a boolean tensor that may differ from island to island. The output has the
    same shape and is the same on all islands. With `by_any` the output is true if `holds` is true
    on any island; without `by_any`, if `holds` is true on all islands. `strategy` reduces the
    counts of islands.
    """

    def __init__(self, holds: mtf.Tensor, by_any: bool, islands: ReplicaAxes, strategy: Strategy):
        self._by_any, self._islands, self._strategy = by_any, islands, strategy
        super().__init__([holds], [holds.shape], "agreed")

    def lower(self, lowering: mtf.Lowering) -> None:
        mesh_impl = lowering.mesh_impl(self)
        (holds,) = reduced_values(lowering, self.inputs)
        counts = mesh_impl.slicewise(lambda x: tf.cast(x, tf.float32), holds)
        axes = tuple(sorted(self._islands.mesh_axes))
        (count,) = reduce_partial_sums(mesh_impl, [PartialSum(counts, axes)], self._strategy)
        least = 0.5 if self._by_any else self._islands.num_shards - 0.5
        self.set_outputs(lowering, [mesh_impl.slicewise(lambda x: x > least, count)])


# Operations whose outputs are the same on all islands.
_SAME_EVERYWHERE = (Agreed, NotFinite)


def differing_variables(
    operations: Sequence[mtf.Operation],
    sources: Iterable[mtf.Tensor],
    candidates: Collection[mtf.Variable],
) -> list[mtf.Variable]:
    """Returns those variables among `candidates` to which islands assign different values.

    The result is in the order of `candidates`. `sources` are tensors whose values differ between
    islands. Tensors that are computed from `sources` differ between islands, too, except the
    outputs of `Agreed` and `NotFinite`, which are equal on all islands. `operations` are all
    operations of the graph, in order.
    """
    differs: set[mtf.Tensor] = set(sources)
    found: set[mtf.Variable] = set()
    while True:
        before = len(found)
        for operation in operations:
            reads = operation.reads if isinstance(operation, ValuesAfter) else ()
            differs.update(x for x, v in zip(operation.outputs, reads) if v.value in differs)
            is_same = isinstance(operation, _SAME_EVERYWHERE)
            if is_same or not differs.intersection(operation.inputs):
                continue
            differs.update(operation.outputs)
            written = getattr(operation, "variables", ())
            is_one_by_one = len(written) == len(operation.inputs)
            for number, variable in enumerate(written):
                value = operation.inputs[number] if is_one_by_one else None
                if variable in candidates and (value is None or value in differs):
                    found.add(variable)
                    differs.add(variable.value)
        if len(found) == before:
            return [v for v in candidates if v in found]


class OuterVariable(mtf.Variable):
    """The outer values of a variable: the value of its master, which all islands share."""

    def __init__(self, variable: mtf.Variable):
        init_replacement(self, variable, None)
        self._trainable = False
        keep_unstacked(self, without_autostack(variable.dtype))
        set_operation_outputs(self, [mtf.Tensor(self, variable.shape, variable.activation_dtype)])
        self.graph.operations.insert(0, self)
        self.graph.all_variables.append(self)


def hold_slots_by_islands(
    slots: Sequence[mtf.Variable], island_dims: Sequence[mtf.Dimension]
) -> None:
    """Gives slots a value for each island, in variables that replace the slots in checkpoints.

    The variables in place of the slots are `<slot>/island`. Their first dimensions are
    `island_dims`: the dimensions that number the islands, none for a single island.
    """
    graph = tf.get_default_graph()
    notes = {note.name: note for note in graph.get_collection(STATE_COLLECTION)}
    for slot in slots:
        hold_by_islands(slot, island_dims, notes.get(slot.name))
        if isinstance(slot, UncheckpointedVariable):
            continue
        collection = graph.get_collection_ref(tf.GraphKeys.GLOBAL_VARIABLES)
        collection[:] = [x for x in collection if x is not master_of(slot)]


def hold_by_islands(
    variable: mtf.Variable,
    island_dims: Sequence[mtf.Dimension],
    note: StateNote | None = None,
    mean_weight: str | None = None,
) -> mtf.Variable:
    """Makes the variable `<variable>/island`, which stores a value of `variable` for each island.

    The returned variable is called the holder. After the call it has the slices of `variable`, so
    that checkpoints have each island's value. The function has to be called before `variable` is
    lowered.

    Args:
      variable: a mesh variable or a slot.
      island_dims: the dimensions that number the islands. They become the holder's first
        dimensions.
      note: the note on how checkpoints of other runs are read into `variable`; None if there is
        none.
      mean_weight: for a variable of the model, the name of the variable with the weights of islands
        (see `StateNote`): `variable` then keeps a master of its own, with the outer values, and
        islands begin with its value when training begins. None for other variables: islands begin
        with the variable's initial value.
    """
    name, dims = f"{variable.name}/{ISLAND}", list(island_dims)
    shape = mtf.Shape([*dims, *variable.shape.dims])
    if isinstance(variable, UncheckpointedVariable):
        holder = named_state(variable.mesh, name, shape, variable.slice_dtype, checkpointed=False)
    else:
        master = master_of(variable)
        sizes = master.shape.as_list()
        is_cut = sizes != variable.shape.to_integer_list
        rest = [mtf.Dimension(f"_{i}", n) for i, n in enumerate(sizes)]
        saved = mtf.Shape([*dims, *rest]) if is_cut else shape

        def make(initializer: Any) -> mtf.Variable:
            with root_scope():
                made = mtf.get_variable(
                    variable.mesh,
                    name,
                    saved,
                    without_autostack(variable.dtype),
                    initializer=initializer,
                    trainable=False,
                ).operation
            if is_cut:
                reshape_variable(made, shape)
            return made

        def initial(to: Any, dtype: Any = None, **_: Any) -> tf.Tensor:
            return tf.broadcast_to(tf.cast(master.initial_value, dtype), to)

        holder = derived_variable(variable, make) if mean_weight else make(initial)
        note = note or StateNote(variable.name, one_shape=True, start=None)
        how = {"num_island_dims": len(dims), "held": variable.name, "mean_weight": mean_weight}
        note_state(holder, note._replace(**how))
    keep_unstacked(variable, without_autostack(variable.dtype))
    StepPlan.of(variable.graph).extension(IslandVariables).hold(variable, holder)
    return holder


class IslandVariables(PlanExtension):
    """A graph's record of variables that have a value for each island, and of their holders.

    The holder of a variable is another variable, which stores the values of all islands. Its
    additional dimensions number the islands.
    """

    def __init__(self) -> None:
        self._held_by: dict[mtf.Variable, mtf.Variable] = {}

    def hold(self, variable: mtf.Variable, by: mtf.Variable) -> None:
        """Stores a variable's values in the variable `by`, its holder.

        The first dimensions of the holder number the islands, and the others are those of the
        variable. Autostack must leave both the variable and the holder alone (`without_autostack`).
        """
        self._held_by = {**self._held_by, variable: by}
        # The holder is lowered first, because the variable's slices are made of its slices.
        operations = variable.graph.operations
        operations.remove(by)
        operations.insert(0, by)
        if StepPlan.of(variable.graph).is_written_in_place(variable):
            StepPlan.of(variable.graph).write_in_place(by)

    def holder(self, variable: mtf.Variable) -> mtf.Variable | None:
        """Returns the variable that stores a variable's values; None if islands share one value."""
        return self._held_by.get(variable)

    def begin(self, lowering: mtf.Lowering) -> ExtensionLowering:
        return _IslandsLowering(lowering, self._held_by)


class _IslandsLowering(ExtensionLowering):
    def __init__(self, lowering: mtf.Lowering, held_by: dict[mtf.Variable, mtf.Variable]):
        self._lowering, self._held_by = lowering, held_by

    def lower_variable(self, variable: mtf.Variable) -> bool:
        holder = self._held_by.get(variable)
        if holder is None:
            return False
        lowering, mesh_impl = self._lowering, self._lowering.mesh_impl(variable)
        _check_no_refs(variable, lowering.variables[holder])
        shape = mesh_impl.slice_shape(variable.shape)
        slices = HeldSlices(variable, lowering.variables[holder], mesh_impl, shape)
        lowering.variables[variable] = slices
        value: Any = slices.laid_out_tensor
        if not StepPlan.of(lowering.graph).is_written_in_place(variable):
            held = lowering.tensors[holder.value].to_laid_out_tensor()
            value = mesh_impl.slicewise(lambda x: tf.reshape(x, shape), held)
        lowering.set_tensor_lowering(variable.value, value)
        return True


def _check_no_refs(variable: mtf.Variable, held: Any) -> None:
    # Measured: with momentum inside, values of about 1 are off by up to 0.4 after 20 steps.
    if any(x.dtype != x.dtype.base_dtype for x in held.laid_out_tensor.all_slices):
        raise ValueError(
            f"Each island of the mesh has its own value of {variable.name!r}, but this variable is "
            "a TensorFlow ref variable: reads and writes of ref variables race, and islands would "
            f"train on wrong values. {CURE}"
        )


class HeldSlices:
    """A lowered variable whose slices are those of its holder, reshaped.

    The holder is the variable that stores the values of all islands (`IslandVariables`). Only the
    holder has a master (the variable that checkpoints hold).

    Attributes:
      laid_out_tensor: the reshaped slices, of the shape that a core's slice of the variable has.
      writers: for each processor the number of the processor that writes its slice. Processors may
        share a slice.
    """

    def __init__(self, variable: mtf.Variable, held: Any, mesh_impl: Any, shape: list[int]):
        self._variable, self._held = variable, held
        slices = held.laid_out_tensor.tensor_list
        # Processors that share a slice of the holder share the reshaped slice, too.
        self._seen = {id(x): Reshaped(x, shape) for x in slices}
        self.laid_out_tensor = mesh_impl.LaidOutTensor([self._seen[id(x)] for x in slices])
        self.writers = writers_of(held)
        with mtf.utils.outside_all_rewrites(), tf.control_dependencies(None):
            self.copy_master_to_slices = self.copy_slices_to_master = tf.no_op()

    def assign_to_slices(self, assign_fn: Callable[..., Any], values: Sequence[Any]) -> Any:
        """Assigns a value to each slice; returns the tf operation.

        The numbers of the slices lie in another mesh variable, which the operation changes.
        Mesh-TF's assignments call this method. `assign_fn(variable, slice, value)` assigns one
        slice of this mesh variable, and `values` has a tf tensor of that slice's shape for each.
        """

        def assign(_: Any, x: Any, value: Any) -> Any:
            return assign_fn(self._variable, self._seen[id(x)], value)

        return self._held.assign_to_slices(assign, values)
