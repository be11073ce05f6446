"""The layout of a program: its tensors and batch over the mesh, and what shards hold."""

from __future__ import annotations

from typing import Callable, Collection, Iterable, NamedTuple, Sequence

from mtf_gradsync._common import walk, warn_once
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync._private.mesh_tensorflow import gradients_calls, loop_body, meshes_made
from mtf_gradsync.gradients.operations import GradientOperation
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.step import ValuesAfter
from mtf_gradsync.step.plan import flat

Axes = frozenset


class Layout(NamedTuple):
    """The layout of tensors, before or while a graph is lowered.

    Attributes:
      axis_of: returns the mesh axis that splits a tensor dimension on a mesh, or None.
      replica_axes: the mesh axes of a mesh that the batch is split over.
      own: the replica axes along which each shard's slice of a tensor is of that shard's data alone
        (see `own_slices`). None takes all axes that split the tensor, which is enough where shards
        are only added up.
    """

    axis_of: Callable[[mtf.Mesh, mtf.Dimension], int | None]
    replica_axes: Callable[[mtf.Mesh], Axes]
    own: Callable[[mtf.Tensor], Axes] | None = None

    @classmethod
    def of(cls, axes: ReplicaAxes, of_mesh: mtf.Mesh) -> Layout:
        """Returns the layout of a graph, one of whose meshes has these replica axes.

        How tensors of other meshes are split is not known: it is as if nothing split them.
        """

        def axis_of(mesh: mtf.Mesh, dim: mtf.Dimension) -> int | None:
            if mesh is not of_mesh:
                return None
            return axes.layout.tensor_dimension_to_mesh_axis(dim, axes.mesh_shape)

        return cls(axis_of, lambda mesh: Axes(axes.mesh_axes if mesh is of_mesh else ()))

    def split(self, tensor: mtf.Tensor) -> Axes:
        """Returns the mesh axes that a tensor is split over."""
        axes = {self.axis_of(tensor.mesh, d) for d in tensor.shape.dims}
        return Axes(axes - {None})

    def split_over_shards(self, tensor: mtf.Tensor) -> Axes:
        """Returns the replica axes along which each shard has its own slice of a tensor."""
        split = self.split(tensor) & self.replica_axes(tensor.mesh)
        return split & self.own(tensor) if split and self.own else split

    def of_shards(self, tensor: mtf.Tensor) -> bool:
        """Returns whether each shard holds its own part of a tensor."""
        replica_axes = self.replica_axes(tensor.mesh)
        return bool(replica_axes) and self.split_over_shards(tensor).issuperset(replica_axes)

    def order(self, shape: mtf.Shape, mesh: mtf.Mesh) -> dict[int, int]:
        """Returns, for each mesh axis that splits a shape, the product of the dimensions before."""
        before, found = 1, {}
        for dim in shape.dims:
            axis = self.axis_of(mesh, dim)
            if axis is not None:
                found[axis] = before
            before *= dim.size
        return found

    def stays_in_place(self, operation: mtf.ReshapeOperation) -> bool:
        """Returns whether a reshape moves nothing between processors."""
        (source,), (result,) = operation.inputs, operation.outputs
        mesh = operation.mesh
        return self.order(source.shape, mesh) == self.order(result.shape, mesh)


# Operations without inputs that bring no data of the batch.
_WITHOUT_DATA = (
    mtf.Variable,
    mtf.Constant,
    mtf.RandomOperation,
    mtf.RangeOperation,
    GradientOperation,
    ValuesAfter,
)


def own_slices(
    graph: mtf.Graph, layout: Layout, batch_dims: Collection[str]
) -> Callable[[mtf.Tensor], Axes]:
    """Returns a function: the replica axes along which a slice has only its shard's data.

    A batch dimension holds only a shard's own data, and so does a tensor that is computed in place
    from such slices. A slice along another dimension that is split over a replica axis holds more:
    experts get examples of all shards by a reshape that moves them, sums over the shards are
    broadcast to a variable that is split, and an input with a dimension of variables is a factor
    for experts.
    """
    known: dict[mtf.Tensor, Axes] = {}
    of_variables = {tuple(v.shape.dims) for v in graph.trainable_variables}
    names = {d.name for dims in of_variables for d in dims}

    def own(tensor: mtf.Tensor, found: Axes = frozenset()) -> Axes:
        if tensor in known:
            return known[tensor]
        split = {layout.axis_of(tensor.mesh, d): d.name for d in tensor.shape.dims}
        replica_axes = layout.replica_axes(tensor.mesh).intersection(split)
        return Axes(a for a in replica_axes if split[a] in batch_dims or a in found)

    def computed(operation: mtf.Operation, position: int) -> Axes:
        """Returns the axes along which an output is computed from own slices."""
        output, inputs = operation.outputs[position], list(map(own, operation.inputs))
        if isinstance(operation, mtf.WhileLoopOperation):
            return own(loop_body(operation).outputs[position])
        if not inputs:
            if isinstance(operation, _WITHOUT_DATA):
                return Axes()
            data = [d for d in output.shape.dims if d.name not in names]
            return Axes({layout.axis_of(output.mesh, d) for d in data} - {None})
        if isinstance(operation, GradientOperation) and len(inputs) >= len(operation.outputs):
            return inputs[position]  # a list of gradients
        if isinstance(operation, mtf.ReshapeOperation):
            (source,), mesh = operation.inputs, operation.mesh
            before, after = (layout.order(x.shape, mesh) for x in (source, output))
            return Axes(a for a in inputs[0] if before[a] == after.get(a))
        if isinstance(operation, mtf.AddOperation) and tuple(output.shape.dims) in of_variables:
            # With a term that all shards share, a variable's gradient is no shard's own.
            return inputs[0].intersection(*inputs)
        return Axes().union(*inputs)

    for operation in flat(graph.operations):
        for position, output in enumerate(operation.outputs):
            known[output] = own(output, computed(operation, position))
    return own


AxisOf = Callable[[mtf.Mesh, mtf.Dimension], "int | None"]
# Operations without inputs that bring no data.
_MADE = (mtf.Variable, mtf.Constant, mtf.RandomOperation, mtf.RangeOperation)
# Their outputs have dimensions that data do not have.
_WIDENS = (mtf.BroadcastOperation, mtf.OneHotOperation, mtf.WhileLoopOperation, GradientOperation)
# Operations on the way from each example's loss to the loss.
_TO_LOSS = (
    mtf.AddOperation,
    mtf.ReduceOperation,
    mtf.ReshapeOperation,
    mtf.ScalarAddOperation,
    mtf.ScalarMultiplyOperation,
)


# Their outputs are the same lowered objects as their inputs, pending or not.
_PASSES_ON = (mtf.StopGradient, mtf.CustomGradientOperation)


def passes_on(operation: mtf.Operation) -> bool:
    """Returns whether an operation's lowered outputs are its lowered inputs."""
    return isinstance(operation, _PASSES_ON)


class Split(NamedTuple):
    """The dimensions that split inputs and losses.

    Attributes:
      dims: for each mesh axis the name of the dimension that is split over it.
      is_of_weights: whether variables have all of these dimensions, too: then the axes may be those
        of model parallelism.
    """

    dims: dict[int, str]
    is_of_weights: bool


def used_axes(
    graph: mtf.Graph,
    mesh: mtf.Mesh,
    axis_of: AxisOf,
    targets: Sequence[mtf.Tensor],
    names: Iterable[Sequence[str] | None],
) -> Axes:
    """Returns the mesh axes that the batch of a program is split over.

    `names` has the dimensions' names that each wrapper was given, or None, and the axes are those
    of all these dimensions. If the graph lacks one of these dimensions, or none were given, the
    axes are those that split inputs and losses.
    """
    names = list(names)
    given = list(dict.fromkeys(name for some in names for name in some or ()))
    if not given and None not in names:
        return Axes()  # the batch is not split at all
    missing = missing_names(graph, mesh, given)
    by_name = {name: axis_of(mesh, mtf.Dimension(name, 1)) for name in given}
    resolved = Axes({by_name[name] for name in given if name not in missing} - {None})
    if resolved and not missing:
        return resolved
    found = split_of_inputs(graph, mesh, axis_of, targets)
    if not found.dims:
        return Axes(set(by_name.values()) - {None})
    others = {axis: dim for axis, dim in found.dims.items() if axis not in resolved}
    if not found.is_of_weights:
        _warn_of_missing(graph, given, missing, others)
    return resolved | Axes(found.dims)


def find_axes(targets: Sequence[mtf.Tensor], names: Sequence[str]) -> ReplicaAxes | None:
    """Returns the replica axes of the program's one mesh, for gradients without given axes.

    The axes are those that split the dimensions `names`. If the graph lacks such a dimension, the
    axes are those that split its inputs, and a warning says so. None if the program has made no
    mesh yet or several, the targets are on several meshes, or the mesh splits none of the
    dimensions.
    """
    made = meshes_made()
    if len(made) != 1 or len({t.mesh for t in targets}) != 1:
        return None
    (mesh_shape, layout), graph, mesh = made[0], targets[0].graph, targets[0].mesh

    def axis_of(mesh: mtf.Mesh, dim: mtf.Dimension) -> int | None:
        del mesh
        return layout.tensor_dimension_to_mesh_axis(dim, mesh_shape)

    missing = missing_names(graph, mesh, names)
    split = {axis_of(mesh, mtf.Dimension(name, 1)) for name in names if name not in missing}
    if missing or (names and split <= {None}):
        found = split_of_inputs(graph, mesh, axis_of, targets)
        others = {axis: dim for axis, dim in found.dims.items() if axis not in split}
        # The axes may be those of model parallelism if variables have the dimensions, too.
        if others and not found.is_of_weights:
            _warn_of_missing(graph, names, missing, others)
            names = _better(names, missing, others)
    if not any(axis_of(mesh, mtf.Dimension(name, 1)) is not None for name in names):
        return None
    return ReplicaAxes(mesh_shape, layout, names)


def _warn_of_missing(
    graph: mtf.Graph, given: Sequence[str], missing: Sequence[str], others: dict[int, str]
) -> None:
    # Names for another mesh are no mistake.
    nowhere = missing_names(graph, None, missing)
    if nowhere and others:
        warn_once(
            f"batch dims {nowhere}",
            "No tensor of the graph has the dimensions %s of batch_dims, and its inputs are split "
            "along %s: the mesh axes of these are taken as replica axes. Give batch_dims=%s.",
            nowhere,
            sorted(others.values()),
            _better(given, nowhere, others),
        )


def check_batch_dims(targets: Sequence[mtf.Tensor], axes: ReplicaAxes) -> None:
    """Raises ValueError if the inputs are split over other axes than the replica axes.

    It looks at the inputs only if no tensor has one of the dimensions in `batch_dims`.
    """
    graph, mesh = targets[0].graph, targets[0].mesh
    missing = missing_names(graph, mesh, axes.batch_dims)
    if not missing:
        return
    found = split_of_inputs(graph, mesh, Layout.of(axes, mesh).axis_of, targets)
    others = {axis: dim for axis, dim in found.dims.items() if axis not in axes.mesh_axes}
    if others and not found.is_of_weights:
        raise ValueError(
            f"No tensor of the graph has the dimensions {missing} of batch_dims, and its inputs "
            f"are split along {sorted(others.values())}, which {axes!r} does not have: its shards "
            "would not be those of the batch. Give "
            f"batch_dims={_better(axes.batch_dims, missing, others)}."
        )


def names_of_batch(targets: Sequence[mtf.Tensor], axes: ReplicaAxes) -> set[str]:
    """Returns the known names of dimensions that the batch is split along."""
    graph, mesh = targets[0].graph, targets[0].mesh
    if not missing_names(graph, mesh, axes.batch_dims):
        return set(axes.batch_dims)
    found = split_of_inputs(graph, mesh, Layout.of(axes, mesh).axis_of, targets)
    return {*axes.batch_dims, *(() if found.is_of_weights else found.dims.values())}


def _better(
    names: Sequence[str], missing: Sequence[str], others: dict[int, str]
) -> tuple[str, ...]:
    return (*(name for name in names if name not in missing), *sorted(others.values()))


def missing_names(graph: mtf.Graph, mesh: mtf.Mesh | None, names: Sequence[str]) -> list[str]:
    """Returns the names that are no dimension of a mesh's tensors; of any mesh's for None."""
    known = {
        dim.name
        for operation in flat(graph.operations)
        if mesh in (None, operation.mesh) and not isinstance(operation, GradientOperation)
        for tensor in operation.outputs
        for dim in tensor.shape.dims
    }
    return [name for name in names if name not in known]


def split_of_inputs(
    graph: mtf.Graph, mesh: mtf.Mesh, axis_of: AxisOf, targets: Sequence[mtf.Tensor]
) -> Split:
    """Returns the dimensions that split the inputs and the losses of gradients.

    These dimensions are on the mesh axes that split both inputs and losses, if any. A dimension
    that a variable also has counts as one of the model, unless there is no other.
    """
    weights = {
        dim.name for v in graph.trainable_variables if v.mesh is mesh for dim in v.shape.dims
    }
    both = [
        [dim for t in tensors if t.mesh is mesh for dim in t.shape.dims]
        for tensors in (_data(graph, targets), _losses(graph))
    ]
    for of_weights in (False, True):
        inputs, losses = (
            {
                axis: dim.name
                for dim in dims
                for axis in [axis_of(mesh, dim)]
                if axis is not None and (of_weights or dim.name not in weights)
            }
            for dims in both
        )
        dims = {axis: name for axis, name in inputs.items() if axis in losses}
        dims = dims or {**losses, **inputs}
        if dims:
            return Split(dims, of_weights)
    return Split({}, False)


def _data(graph: mtf.Graph, targets: Sequence[mtf.Tensor]) -> list[mtf.Tensor]:
    """Returns the tensors that bring a program's data to the mesh, for gradients."""
    needed = _before(targets)
    found: dict[mtf.Tensor, None] = {}
    for operation in flat(graph.operations):
        if operation not in needed or isinstance(operation, (*_MADE, *_WIDENS)):
            continue
        of_data = len(operation.inputs) == 1 and operation.inputs[0] in found
        if of_data or not operation.inputs:
            found.update(dict.fromkeys(operation.outputs))
    return list(found)


def _losses(graph: mtf.Graph) -> list[mtf.Tensor]:
    """Returns losses, and the tensors that they are sums of."""

    def terms(tensor: mtf.Tensor) -> list[mtf.Tensor]:
        operation = tensor.operation
        is_sum = isinstance(operation, _TO_LOSS) or passes_on(operation)
        return operation.inputs if is_sum or not tensor.shape.dims else []

    losses = [loss for call in gradients_calls(graph) for loss in call.losses]
    return [t for t in walk(losses, terms) if not isinstance(t.operation, mtf.Variable)]


def _before(targets: Sequence[mtf.Tensor]) -> set[mtf.Operation]:
    """Returns all operations that compute tensors."""

    def sources(operation: mtf.Operation) -> list[mtf.Operation]:
        is_loop = isinstance(operation, mtf.WhileLoopOperation)
        body = loop_body(operation).outputs if is_loop else []
        return [t.operation for t in (*operation.inputs, *body)]

    return set(walk([t.operation for t in targets], sources))
