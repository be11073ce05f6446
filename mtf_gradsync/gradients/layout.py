"""The split of a program's tensors and batch over the mesh, and the data that each shard holds."""

from __future__ import annotations

from typing import Callable, Collection, Iterable, NamedTuple, Sequence

from mtf_gradsync._common import walk, warn_once
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync._private.mesh_tensorflow import gradients_calls, loop_body, meshes_made
from mtf_gradsync.gradients.operations import GradientOperation
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.step.conditional import ValuesAfter
from mtf_gradsync.step.plan import flat

Axes = frozenset


class Layout(NamedTuple):
    """The split of tensors over meshes, known before a graph is lowered or while it is.

    Attributes:
      axis_of: a function of a mesh and a tensor dimension. It returns the number of the mesh axis
        that splits the dimension, or None.
      replica_axes: a function of a mesh. It returns the mesh axes that the batch is split over.
      own_data_axes: a function of a tensor, made by `find_own_data_axes`. It returns the replica
        axes along which each slice of the tensor was computed from one shard's data alone. If
        `own_data_axes` is None, all replica axes that split a tensor count as such axes; this is
        enough for programs that only add up the shards' terms.
    """

    axis_of: Callable[[mtf.Mesh, mtf.Dimension], int | None]
    replica_axes: Callable[[mtf.Mesh], Axes]
    own_data_axes: Callable[[mtf.Tensor], Axes] | None = None

    @classmethod
    def of(cls, axes: ReplicaAxes, of_mesh: mtf.Mesh) -> Layout:
        """Returns the layout of a graph in which the mesh `of_mesh` has the replica axes `axes`.

        Nothing is known of other meshes: their tensors count as not split.
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
        """Returns the replica axes along which each slice of a tensor has one shard's data alone.

        The returned axes split the tensor. If the attribute `own_data_axes`, a function, is not
        None, the returned axes are also among the axes that it returns for the tensor.
        """
        split = self.split(tensor) & self.replica_axes(tensor.mesh)
        return split & self.own_data_axes(tensor) if split and self.own_data_axes else split

    def is_split_over_shards(self, tensor: mtf.Tensor) -> bool:
        """Returns whether each shard has its own slice of a tensor, of its own data alone.

        The result is false if `split_over_shards` lacks one of the replica axes, or if there are no
        replica axes.
        """
        replica_axes = self.replica_axes(tensor.mesh)
        return bool(replica_axes) and self.split_over_shards(tensor).issuperset(replica_axes)

    def sizes_before_axes(self, tensor: mtf.Tensor) -> dict[int, int]:
        """Returns, for each mesh axis that splits a tensor, the size of what precedes the split.

        This size is the product of the sizes of all dimensions before the dimension that the axis
        splits: `{1: 12}` if mesh axis 1 splits the last dimension of shape [4, 3, 8]. A reshape
        that changes none of these products moves no data between processors.
        """
        before, found = 1, {}
        for dim in tensor.shape.dims:
            axis = self.axis_of(tensor.mesh, dim)
            if axis is not None:
                found[axis] = before
            before *= dim.size
        return found


# Operations without inputs that bring no data.
_MADE = (mtf.Variable, mtf.Constant, mtf.RandomOperation, mtf.RangeOperation)


def find_own_data_axes(
    graph: mtf.Graph, layout: Layout, batch_dims: Collection[str]
) -> Callable[[mtf.Tensor], Axes]:
    """Returns the function of a tensor that `Layout.own_data_axes` is to be set to.

    The returned function takes a tensor, and returns the replica axes along which each slice of the
    tensor was computed from the data of one shard alone. `layout` is a layout whose attribute
    `own_data_axes` is not set yet, and `batch_dims` are the names of the batch dimensions.

    Each slice along a batch dimension has the data of one shard alone. So has each slice of a
    tensor that is computed from such slices without moving data between processors. There are three
    cases in which slices along another dimension, split over a replica axis, have data of several
    shards. A reshape has moved the examples of all shards to experts. A sum over the shards was
    broadcast to a variable that is split. Or the tensor is an input of the program, and the
    dimension is one of a variable, such as the experts of a mixture.
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

    def axes_of_output(operation: mtf.Operation, position: int) -> Axes:
        """Returns the mesh axes along which each slice of an output has one shard's data alone.

        The output is `operation.outputs[position]`. The result follows from the operation's kind,
        and from the axes along which its inputs have one shard's data alone.
        """
        output, inputs = operation.outputs[position], list(map(own, operation.inputs))
        if isinstance(operation, mtf.WhileLoopOperation):
            return own(loop_body(operation).outputs[position])
        if not inputs:
            if isinstance(operation, (*_MADE, GradientOperation, ValuesAfter)):
                return Axes()
            data = [d for d in output.shape.dims if d.name not in names]
            return Axes({layout.axis_of(output.mesh, d) for d in data} - {None})
        if isinstance(operation, GradientOperation) and len(inputs) >= len(operation.outputs):
            return inputs[position]  # a list of gradients
        if isinstance(operation, mtf.ReshapeOperation):
            before, after = map(layout.sizes_before_axes, (*operation.inputs, output))
            return Axes(a for a in inputs[0] if before[a] == after.get(a))
        if isinstance(operation, mtf.AddOperation) and tuple(output.shape.dims) in of_variables:
            # With a term that all shards share, a variable's gradient is no shard's own.
            return inputs[0].intersection(*inputs)
        return Axes().union(*inputs)

    for operation in flat(graph.operations):
        for position, output in enumerate(operation.outputs):
            known[output] = own(output, axes_of_output(operation, position))
    return own


AxisOf = Callable[[mtf.Mesh, mtf.Dimension], "int | None"]
# Operations whose outputs have dimensions that their inputs, the data, do not have.
_WIDENS = (mtf.BroadcastOperation, mtf.OneHotOperation, mtf.WhileLoopOperation, GradientOperation)
#: Operations whose outputs are lowered to the same objects as their inputs, pending or not.
IDENTITIES = (mtf.StopGradient, mtf.CustomGradientOperation)
# Operations on the way from each example's loss to the loss.
_TO_LOSS = (
    mtf.AddOperation,
    mtf.ReduceOperation,
    mtf.ReshapeOperation,
    mtf.ScalarAddOperation,
    mtf.ScalarMultiplyOperation,
    *IDENTITIES,
)


class Split(NamedTuple):
    """The dimensions along which the layout splits a program's inputs and losses.

    Attributes:
      dims: mesh axis -> the name of the dimension that is split over it.
      is_of_weights: whether variables also have these dimensions. The mesh axes may then serve
        model parallelism, and not split the batch.
    """

    dims: dict[int, str]
    is_of_weights: bool


def batch_axes(
    graph: mtf.Graph,
    mesh: mtf.Mesh,
    axis_of: AxisOf,
    targets: Sequence[mtf.Tensor],
    names: Iterable[Sequence[str] | None],
) -> Axes:
    """Returns the mesh axes that the batch of a program is split over.

    The axes are those that split the batch dimensions whose names wrappers were given. If a given
    name is not a dimension of any tensor, or no names were given, the mesh axes that split inputs
    and losses are returned, too.

    Args:
      graph: the program's graph.
      mesh: the mesh whose axes are asked for.
      axis_of: a function of a mesh and a tensor dimension. It returns the number of the mesh axis
        that splits the dimension, or None.
      targets: the gradients that wrappers use. Only inputs that they depend on are looked at.
      names: for each wrapper the names of batch dimensions that it was given, or None.
    """
    names = list(names)
    given = list(dict.fromkeys(name for some in names for name in some or ()))
    if not given and None not in names:
        return Axes()  # the batch is not split at all
    missing = unknown_dim_names(graph, mesh, given)
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


def find_replica_axes(targets: Sequence[mtf.Tensor], names: Sequence[str]) -> ReplicaAxes | None:
    """Returns the replica axes of the program's only mesh, found by the names of batch dimensions.

    The replica axes are the mesh axes that split the dimensions `names`. If a name is not a
    dimension of any tensor, a warning says so. The mesh axes that split the inputs of `targets`
    (gradients of one graph) are then taken in its place. Returns None if the program has made no
    mesh or several, if the targets are on several meshes, or if the mesh splits none of the
    dimensions.
    """
    made = meshes_made()
    if len(made) != 1 or len({t.mesh for t in targets}) != 1:
        return None
    (mesh_shape, layout), graph, mesh = made[0], targets[0].graph, targets[0].mesh

    def axis_of(mesh: mtf.Mesh, dim: mtf.Dimension) -> int | None:
        del mesh
        return layout.tensor_dimension_to_mesh_axis(dim, mesh_shape)

    missing = unknown_dim_names(graph, mesh, names)
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
    nowhere = unknown_dim_names(graph, None, missing)
    if nowhere and others:
        warn_once(
            f"batch dims {nowhere}",
            "No tensor of the graph has the dimensions %s of batch_dims, and the graph's inputs "
            "are split along %s: the mesh axes that split these inputs are taken as replica axes. "
            "Give batch_dims=%s.",
            nowhere,
            sorted(others.values()),
            _better(given, nowhere, others),
        )


def check_batch_dims(targets: Sequence[mtf.Tensor], axes: ReplicaAxes) -> None:
    """Raises ValueError if inputs are split over a mesh axis that is not in `axes`.

    The inputs are those that `targets` (gradients of one mesh) depend on. They are checked only if
    one of the names `axes.batch_dims` is not a dimension of any tensor.
    """
    missing, split = _missing_names(targets, axes)
    others = {axis: dim for axis, dim in split.items() if axis not in axes.mesh_axes}
    if others:
        raise ValueError(
            f"No tensor of the graph has the dimensions {missing} of batch_dims, and the graph's "
            f"inputs are split along {sorted(others.values())}, which {axes!r} does not have: the "
            "shards of these axes would not be the shards of the batch. Give "
            f"batch_dims={_better(axes.batch_dims, missing, others)}."
        )


def batch_dim_names(targets: Sequence[mtf.Tensor], axes: ReplicaAxes) -> set[str]:
    """Returns the names of the dimensions that the batch is split along.

    The names are those in `axes.batch_dims`. If one of them is not a dimension of any tensor, more
    names are returned: those of the dimensions along which the inputs of `targets` (gradients of
    one mesh) are split.
    """
    _, split = _missing_names(targets, axes)
    return {*axes.batch_dims, *split.values()}


def _missing_names(
    targets: Sequence[mtf.Tensor], axes: ReplicaAxes
) -> tuple[list[str], dict[int, str]]:
    """Returns those of `axes.batch_dims` that are not a dimension of any tensor, and what may be.

    The second result is empty if no name is missing. Otherwise it has, for each mesh axis, the name
    of the dimension along which the axis splits inputs of `targets`. Dimensions that variables have
    are left out, because the axes that split them may be those of model parallelism.
    """
    graph, mesh = targets[0].graph, targets[0].mesh
    missing = unknown_dim_names(graph, mesh, axes.batch_dims)
    if not missing:
        return [], {}
    found = split_of_inputs(graph, mesh, Layout.of(axes, mesh).axis_of, targets)
    return missing, {} if found.is_of_weights else found.dims


def _better(
    names: Sequence[str], missing: Sequence[str], others: dict[int, str]
) -> tuple[str, ...]:
    return (*(name for name in names if name not in missing), *sorted(others.values()))


def unknown_dim_names(graph: mtf.Graph, mesh: mtf.Mesh | None, names: Sequence[str]) -> list[str]:
    """Returns those of `names` that are not a dimension of any tensor on `mesh`.

    If `mesh` is None, the names are looked for among the dimensions of the tensors of all meshes.
    """
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
    """Returns the dimensions along which the layout splits a program's inputs and losses.

    The inputs are those that `targets` (gradients) depend on, and the losses include the loss of
    each example. Some mesh axes may split both an input and a loss. Then only dimensions that are
    split over these axes are returned. Dimensions that a variable also has are returned only if
    there are no other dimensions to return. `axis_of` is a function of a mesh and a dimension that
    returns the number of the mesh axis which splits the dimension, or None.
    """
    weights = {
        dim.name for v in graph.trainable_variables if v.mesh is mesh for dim in v.shape.dims
    }
    both = [
        [dim for t in tensors if t.mesh is mesh for dim in t.shape.dims]
        for tensors in (_input_data(graph, targets), _losses(graph))
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


def _input_data(graph: mtf.Graph, targets: Sequence[mtf.Tensor]) -> list[mtf.Tensor]:
    """Returns the tensors that hold a program's input data, if `targets` depend on them.

    The input data are in the imported tensors. They are also in the outputs of operations that have
    one tensor with input data as their only input (a cast, for example).
    """
    needed = _operations_before(targets)
    found: dict[mtf.Tensor, None] = {}
    for operation in flat(graph.operations):
        if operation not in needed or isinstance(operation, (*_MADE, *_WIDENS)):
            continue
        of_data = len(operation.inputs) == 1 and operation.inputs[0] in found
        if of_data or not operation.inputs:
            found.update(dict.fromkeys(operation.outputs))
    return list(found)


def _losses(graph: mtf.Graph) -> list[mtf.Tensor]:
    """Returns the losses of a graph, and the tensors that are added up to make the losses."""

    def terms(tensor: mtf.Tensor) -> list[mtf.Tensor]:
        operation = tensor.operation
        is_sum = isinstance(operation, _TO_LOSS)
        return operation.inputs if is_sum or not tensor.shape.dims else []

    losses = [loss for call in gradients_calls(graph) for loss in call.losses]
    return [t for t in walk(losses, terms) if not isinstance(t.operation, mtf.Variable)]


def _operations_before(targets: Sequence[mtf.Tensor]) -> set[mtf.Operation]:
    """Returns all operations that compute `targets`, directly or indirectly."""

    def sources(operation: mtf.Operation) -> list[mtf.Operation]:
        is_loop = isinstance(operation, mtf.WhileLoopOperation)
        body = loop_body(operation).outputs if is_loop else []
        return [t.operation for t in (*operation.inputs, *body)]

    return set(walk([t.operation for t in targets], sources))
