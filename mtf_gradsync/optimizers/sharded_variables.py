"""The parts of variables that shards update: their shapes, slots and assignments."""

from __future__ import annotations

import itertools
import math
import operator
import types
from typing import Any, Callable, Collection, Mapping, NamedTuple, Sequence

from mtf_gradsync._common import some_lines
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync._private.mesh_tensorflow import (
    init_replacement,
    mesh_impls_with,
    move_outputs,
    reassign,
    reshape_variable,
    set_assign_fn,
)
from mtf_gradsync.gradients.flow import Flow, is_product_or_sum
from mtf_gradsync.gradients.layout import Layout
from mtf_gradsync.gradients.operations import GradientOperation, reduced_values
from mtf_gradsync.gradients.pending import PendingSums
from mtf_gradsync.gradients.reduce_gradients import GatherParts, TakePart
from mtf_gradsync.mesh.axes import ReplicaAxes, is_simd
from mtf_gradsync.mesh.devices import shares_all
from mtf_gradsync.optimizers.state import assigned_variables
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.step.plan import StepPlan

# Rows and columns of the tiles in which a TPU stores the last two dimensions of its layout.
_TILE = (8, 128)
# By default, variables of fewer elements are not split.
MIN_SIZE = 128


def shapes_of_parts(
    variables: Sequence[mtf.Variable],
    axes: ReplicaAxes,
    fixed_dims: Collection[str] = (),
    min_size: int | None = None,
    before: Mapping[mtf.Variable, mtf.Shape] = types.MappingProxyType({}),
) -> dict[mtf.Variable, mtf.Shape]:
    """Returns the shape of a replica's part of each variable that is split over the replicas.

    Args:
      variables: the variables that get gradients in the step that is being built.
      axes: the replica axes.
      fixed_dims: names of dimensions that must not be split.
      min_size: variables of fewer elements are not split. None means `MIN_SIZE`; variables whose
        parts save few of a TPU's tiles (`saves_tiles`) are then not split either, unless nothing
        else can be split.
      before: what earlier steps of the graph have chosen: for each of their variables the shape of
        the part, or the variable's own shape if it was not split. The choice stays, because the
        variable's slots are split in the same way.

    Returns:
      A dictionary from variables to shapes of parts, as `shape_of_part` returns them. Variables
      that are not split are not in it.
    """
    least, slice_shape = MIN_SIZE if min_size is None else min_size, axes.slice_shape
    parts = {v: before[v] for v in variables if v in before and before[v] != v.shape}
    new = {
        v: shape
        for v in variables
        if v not in before and (shape := shape_of_part(v.shape, axes, fixed_dims, least)) != v.shape
    }
    if min_size is None:
        saving = {
            v: shape
            for v, shape in new.items()
            if saves_tiles(slice_shape(v.shape), slice_shape(shape))
        }
        # Parts that cost more than they save are better than none: the user asked for parts.
        new = saving if saving or parts else new
    return {**parts, **new}


def replicas_share_copies(axes: ReplicaAxes) -> bool:
    """Returns whether replicas use one copy of each variable, because devices share one memory.

    On a mesh whose replicas share copies, each variable has one update for all replicas, so that
    splitting the update would only add operations. `axes` are the replica axes of the mesh.
    """
    impls = mesh_impls_with(axes.mesh_shape, axes.layout)
    return bool(impls) and all(map(shares_all, impls))


def nothing_to_split(
    variables: Sequence[mtf.Variable],
    axes: ReplicaAxes,
    fixed_dims: Collection[str] = (),
    min_size: int = 0,
) -> str:
    """Returns, for an error, why none of the variables can be split over the replica axes.

    The text begins with "has nothing to split", and has a line for each variable. `fixed_dims` are
    names of dimensions that are not split, and `min_size` is the number of elements that a variable
    must have to be split.
    """
    lines = [
        f"\n  {v.name!r} of shape {v.shape.to_string} "
        f"{why_unsplit(v.shape, axes, fixed_dims, min_size)}"
        for v in variables
    ]
    return (
        f"has nothing to split over the replica axes {[d.name for d in axes.shard_dims]} of the "
        f"mesh {axes.mesh_shape.to_string}:{some_lines(lines)}\n"
    )


def shape_of_part(
    shape: mtf.Shape, axes: ReplicaAxes, fixed_dims: Collection[str] = (), min_size: int = 0
) -> mtf.Shape:
    """Returns a variable's shape with dimensions renamed so that the layout splits them.

    `shape` is the variable's shape, and `axes` are the replica axes with the mesh and layout. For
    each replica axis over which the layout does not split the variable, one dimension is given the
    name of the shard dim along that axis. This dimension is chosen from those that no mesh axis
    splits and whose size is a multiple of the axis's size: it is the one whose parts take the
    fewest of a TPU's tiles. If several dimensions tie, the first is chosen, because parts along the
    first dimension are contiguous in memory. Sizes and order of dimensions do not change.

    A variable of fewer elements than `min_size`, or without a dimension to split, keeps its shape.
    Dimensions whose name is in `fixed_dims` keep their name.
    """
    if shape.size < min_size:
        return shape
    full, dims = axes.slice_shape(shape), list(shape.dims)
    layout = axes.layout.tensor_layout(shape, axes.mesh_shape)
    is_free = [layout[i] is None and d.name not in fixed_dims for i, d in enumerate(dims)]
    for shard_dim in sorted(axes.free_shard_dims(shape), key=lambda d: -d.size):
        parts = {
            number: [*dims[:number], mtf.Dimension(shard_dim.name, dim.size), *dims[number + 1 :]]
            for number, dim in enumerate(dims)
            if is_free[number] and shard_dim.size > 1 and dim.size % shard_dim.size == 0
        }
        if parts:
            sizes = {n: axes.slice_shape(mtf.Shape(part)) for n, part in parts.items()}
            number = min(parts, key=lambda n: tiles(full, sizes[n])[1])
            dims, is_free[number] = parts[number], False
    return mtf.Shape(dims)


def saves_tiles(full: Sequence[int], part: Sequence[int]) -> bool:
    """Returns whether splitting a core's slice of a variable saves enough of a TPU's tiles.

    `full` is the shape of the slice, and `part` the shape of the replica's part of it. A TPU stores
    tensors in tiles, and pads tiles that are not full. The result is true if the part takes fewer
    tiles than the slice, and the difference is more than two thirds of what it would be without
    padding. A part that leaves most of its tiles empty takes about as much memory and time as the
    full slice, and the compiler copies the slice to another layout and back.
    """
    of_full, of_part = tiles(full, part)
    numbers, numbers_of_part = math.prod(full), math.prod(part)
    # In whole numbers: (of_full - of_part) / of_full > 2/3 * (1 - numbers_of_part / numbers)
    return 3 * (of_full - of_part) * numbers > 2 * of_full * (numbers - numbers_of_part)


def tiles(full: Sequence[int], part: Sequence[int]) -> tuple[int, int]:
    """Counts a TPU's tiles for a tensor, and for a part of the tensor in the same layout.

    `full` is the shape of the tensor, and `part` the shape of its part. A TPU stores two of a
    tensor's dimensions in tiles of 8 x 128 numbers: the last two dimensions, unless two others take
    fewer tiles. For vectors, numbers are counted in place of tiles.
    """
    if len(full) < 2:
        return math.prod(full), math.prod(part)
    numbers = reversed(range(len(full)))
    in_layout = min(
        itertools.permutations(numbers, 2),
        key=lambda columns_rows: _count_tiles(full, *columns_rows),
    )
    return _count_tiles(full, *in_layout), _count_tiles(part, *in_layout)


def _count_tiles(sizes: Sequence[int], columns: int, rows: int) -> int:
    """Returns the number of tiles that a tensor of shape `sizes` takes.

    `columns` and `rows` are the positions of the two dimensions that are stored in tiles.
    """
    others = math.prod(sizes) // (sizes[columns] * sizes[rows])
    return others * math.ceil(sizes[rows] / _TILE[0]) * math.ceil(sizes[columns] / _TILE[1])


class SlotShapes(NamedTuple):
    """Two shapes of a slot, in which several smaller dimensions take the place of one dimension.

    The first of the smaller dimensions has the size of the mesh axis that splits the slot's
    dimension, and is split over that axis. After it come a dimension for each replica axis, and a
    last dimension with the remaining size. To reshape the slot to the shape `full` moves no data
    between processors.

    Attributes:
      full: the shape in which the layout does not split the dimensions for replica axes.
      part: the shape in which the dimensions for replica axes have the names of shard dims, so that
        the layout splits them.
    """

    full: mtf.Shape
    part: mtf.Shape


def shapes_of_split_slot(
    shape: mtf.Shape, axes: ReplicaAxes, min_size: int = 0
) -> SlotShapes | None:
    """Returns shapes for a slot by which the mesh splits it over the replica axes, too.

    A mesh axis splits one of the slot's dimensions already, and Mesh-TF splits a dimension over one
    mesh axis only. So this dimension is replaced by several. For example, the mesh
    "model:4;batch:2" splits `ff` of the slot [ff=1024] over `model`. The result has the full shape
    [ff=4, ff_batch=2, ff_rest=128], which the mesh splits over `model` only, and the part [ff=4,
    batch=2, ff_rest=128], which it splits over both axes. The slot is gathered for each update,
    because the optimizer needs the variable's own shape.

    `shape` is the slot's shape, and `axes` are the replica axes. The replaced dimension is the
    first that meets two conditions. A mesh axis splits it. And its size is a multiple of a product:
    the size of this axis, times the sizes of all replica axes that do not split the slot yet. The
    result is None if there is no such dimension, if the slot is split over all replica axes
    already, or if it has fewer elements than `min_size`.
    """
    free = [d for d in axes.free_shard_dims(shape) if d.size > 1]
    if not free or shape.size < min_size:
        return None
    layout = axes.layout.tensor_layout(shape, axes.mesh_shape)
    for number, dim in enumerate(shape.dims):
        if layout[number] is None:
            continue
        axis_size = axes.mesh_shape.dims[layout[number]].size
        rest, remainder = divmod(dim.size, axis_size * mtf.Shape(free).size)
        if remainder:
            continue
        before, after = shape.dims[:number], shape.dims[number + 1 :]
        first, last = mtf.Dimension(dim.name, axis_size), mtf.Dimension(f"{dim.name}_rest", rest)
        unsplit = [mtf.Dimension(f"{dim.name}_{d.name}", d.size) for d in free]
        return SlotShapes(
            mtf.Shape([*before, first, *unsplit, last, *after]),
            mtf.Shape([*before, first, *free, last, *after]),
        )
    return None


def why_unsplit(
    shape: mtf.Shape, axes: ReplicaAxes, fixed_dims: Collection[str] = (), min_size: int = 0
) -> str:
    """Returns why `shape_of_part` does not split a variable, in words to put after its name.

    An example of a result is "is a scalar".

    Args:
      shape: the variable's shape.
      axes: the replica axes, over which variables are split.
      fixed_dims: names of dimensions that are not split.
      min_size: the number of elements that a variable must have to be split.
    """
    if not shape.dims:
        return "is a scalar"
    free = [d for d in axes.free_shard_dims(shape) if d.size > 1]
    if not free:
        return "is split over the replica axes already"
    if shape.size < min_size:
        return f"has fewer than {min_size} elements"
    sizes = " or ".join(str(d.size) for d in free)
    layout = axes.layout.tensor_layout(shape, axes.mesh_shape)
    if all(layout[i] is not None for i in range(len(shape.dims))):
        return "has no dimension that is not split already"
    names = [d.name for i, d in enumerate(shape.dims) if layout[i] is None and d.name in fixed_dims]
    also = f", and the optimizer knows {names} by name" if names else ""
    return f"has no unsplit dimension that {sizes} divides{also}"


# Functions of assignments that change a variable element by element.
ELEMENTWISE = (mtf.assign_slice, mtf.assign_add_slice, mtf.assign_sub_slice)
_CHANGES = {mtf.assign_add_slice: operator.add, mtf.assign_sub_slice: operator.sub}


class PartOfVariable(mtf.Variable):
    """Each replica's part of a variable, as a variable of the same name and dtypes.

    The part has the shape of the full variable, but some dimensions have other names. By these
    names the layout splits the part, and slots of the same shape, over the replica axes. The
    graph's lists of variables do not have the part, and `assign_gathered` replaces it by the full
    variable in assignments.

    Attributes:
      full: the full variable.
    """

    def __init__(self, full: mtf.Variable, shape: mtf.Shape):
        init_replacement(self, full, TakePart(full.value, shape).outputs[0])
        self.full = full


def assign_gathered(
    updates: Sequence[mtf.Operation], parts: Mapping[mtf.Variable, PartOfVariable]
) -> None:
    """Makes an inner optimizer's assignments to parts of variables assign to the full variables.

    The values that replicas have computed for their parts are gathered before they are assigned.
    `updates` are the inner optimizer's operations, and `parts` has each variable that is split,
    with its part. Raises ValueError if a value that is assigned to a part has another shape.
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
    StepPlan.of(assignments[0].graph).move_to_end(assignments)


def _assign_new_values(update: mtf.Assign, parts: Mapping[mtf.Variable, PartOfVariable]) -> None:
    """Makes an assignment write new values, if it adds changes to variables that are split.

    The assignment `update` stays as it is if it adds nothing, if none of its variables is in
    `parts` (the variables that are split), or if dtypes differ. `NewValues` computes the new
    values. It does so only in SIMD programs in which no other assignment writes the variables;
    otherwise the assignment goes on adding changes. The reason is that a TPU would add gathered
    changes in the layout of the gathered tensor: its compiler would copy the variable to that
    layout and back.
    """
    if update.assign_fn not in _CHANGES:
        return
    same_dtype = all(
        v.activation_dtype == v.slice_dtype == x.dtype
        for v, x in zip(update.variables, update.inputs)
    )
    if same_dtype and any(_full(v) in parts for v in update.variables):
        reassign(update, update.variables, NewValues(update).outputs)


class NewValues(GradientOperation):
    """The new values of variables, computed from the changes that an update adds to them.

    On a SIMD mesh the outputs of this operation are the new values. When the operation is lowered,
    it changes the update, so that the update assigns them. On placement meshes, and if another
    assignment also writes one of the variables, the outputs are the changes, and the update goes on
    adding them to the variables.
    """

    def __init__(self, update: mtf.Assign):
        self._update, self._assign_fn = update, update.assign_fn
        self._names = {v.name for v in update.variables}
        changes, values = update.inputs, [v.value for v in update.variables]
        super().__init__([*changes, *values], [x.shape for x in changes], "new_values")

    def lower(self, lowering: mtf.Lowering) -> None:
        mesh_impl = lowering.mesh_impl(self)
        values, count = reduced_values(lowering, self.inputs), len(self.outputs)
        results, old = values[:count], values[count:]
        assign_fn = self._assign_fn
        if is_simd(mesh_impl) and self._is_only_writer():
            change, assign_fn = _CHANGES[assign_fn], mtf.assign_slice
            results = [mesh_impl.slicewise(change, *pair) for pair in zip(old, results)]
        set_assign_fn(self._update, assign_fn)
        self.set_outputs(lowering, results)

    def _is_only_writer(self) -> bool:
        """Returns whether no assignment of the graph but the update writes one of its variables."""
        others = (op for op in self.graph.operations if op is not self._update)
        return self._names.isdisjoint(assigned_variables(others))


def _full(variable: mtf.Variable) -> mtf.Variable:
    return variable.full if isinstance(variable, PartOfVariable) else variable


# The fewest elements of a slot that is gathered. The compiler for TPUs (libtpu 0.0.42, v5e) takes
# some 15 KB of code for a gather, and 25 statistics of 128 to 512 elements took 1.2 MB more than
# they saved.
MIN_GATHERED_SIZE = 16 * 1024


def partition_slots(
    slots: Sequence[mtf.Variable],
    updates: Sequence[mtf.Operation],
    shapes_of: Callable[[mtf.Shape], SlotShapes | None],
) -> list[mtf.Operation]:
    """Splits slots over the replicas; returns operations that gather the slots' full values.

    Args:
      slots: the slots to split. No operations but those of the update read or write them.
      updates: the operations of the update. Their assignments are changed so that they write the
        parts of slots.
      shapes_of: a function of a slot's shape that returns the shapes by which to split the slot;
        None for a slot that is not split.

    Returns:
      Operations that have to be lowered before those of the update; [] if no slot is split.
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
    parts = [reshape_variable(slot, shapes.part) for slot, shapes in split.items()]
    gather = GatherParts(parts, [shapes.full for shapes in split.values()])
    reshapes = []
    for full, old in zip(gather.outputs, old_values):
        reshapes.append(mtf.reshape(full, old.shape).operation)
        move_outputs(reshapes[-1], [old])
    return [gather, *reshapes]


def group_sums(operations: Sequence[mtf.Operation], axes: ReplicaAxes, strategy: Strategy) -> None:
    """Moves operations to the end of their graph, in an order that reduces many sums together.

    `ShardedUpdateOptimizer` calls this function for the operations of an update. Sums that do not
    depend on each other are made before the first of these sums is used, and `strategy` reduces
    them together. Each operation comes after those that it depends on. No operation outside of
    `operations` may use the outputs of `operations`. `axes` are the replica axes.
    """
    sums = [t for op in operations if is_product_or_sum(op) for t in op.outputs]
    graph = types.SimpleNamespace(operations=list(operations))
    flow = Flow(graph, (), Layout.of(axes, operations[0].mesh), sums)
    pending = [t for t in sums if t in flow.axes and not flow.is_derived(t)]
    level_of: dict[mtf.Operation, int] = {}
    for operation in operations:
        level = 0
        is_pending = any(t in flow.axes for t in operation.outputs)
        for source in operation.inputs:
            waits = source in flow.axes and (
                not is_pending or source in flow.forced.get(operation, ())
            )
            level = max(level, level_of.get(source.operation, 0) + waits)
        level_of[operation] = level
    # Mesh-TF runs assignments last in any case; they keep their order.
    last = max(level_of.values()) + 1
    order = sorted(operations, key=lambda op: last if isinstance(op, mtf.Assign) else level_of[op])
    StepPlan.of(operations[0].graph).move_to_end(order)
    if pending:
        PendingSums.declare_use(pending, True, axes.batch_dims, strategy, are_sums=True)
