"""Checks of gradients and variables, operations on sets of gradients, and their partial sums."""

from __future__ import annotations

from typing import (
    Any,
    Callable,
    Collection,
    Hashable,
    Iterable,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    TypeVar,
)

from mtf_gradsync._common import elements
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import give_outputs, lowered_on
from mtf_gradsync.mesh.axes import ProcessorGroups
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.reduce.parts import Cuts, take_parts
from mtf_gradsync.reduce.strategy import reduce_scatter_by

MaybeGradients = Sequence[Optional[mtf.Tensor]]
GradsAndVars = List[Tuple[Optional[mtf.Tensor], mtf.Variable]]


def check_gradients(grads: MaybeGradients) -> list[mtf.Tensor | None]:
    """Returns grads as a new list.

    Raises:
      TypeError: something is neither an mtf tensor nor None.
      ValueError: gradients are of several mtf graphs.
    """
    found = elements(grads)
    if found is None:
        raise TypeError(f"grads must be a list of mtf.Tensor or None, got {grads!r}.")
    grads = found
    for index, grad in enumerate(grads):
        if grad is not None and not isinstance(grad, mtf.Tensor):
            raise TypeError(f"grads must hold mtf.Tensor or None, but grads[{index}] is {grad!r}.")
    if len({g.graph for g in grads if g is not None}) > 1:
        raise ValueError(f"grads must be of one mtf graph, got those of several: {grads!r}.")
    return grads


def check_present(grads: MaybeGradients) -> list[mtf.Tensor]:
    """Returns those gradients that are not None, for what needs one at least.

    Raises:
      TypeError: as `check_gradients`, or a gradient is of whole numbers.
      ValueError: as `check_gradients`, or there is no gradient.
    """
    grads = check_gradients(grads)
    present = [g for g in grads if g is not None]
    if not present:
        raise ValueError(f"grads must have a gradient that is not None, got {grads!r}.")
    for grad in present:
        if not grad.dtype.is_floating:
            raise TypeError(f"grads must be of floating dtypes, got {grad!r} of {grad.dtype.name}.")
    return present


def check_variables(variables: Iterable[Any]) -> list[mtf.Variable]:
    """Returns variables, or variables of given values, as a new list of mtf.Variable."""
    found = elements(variables)
    if found is None:
        raise TypeError(f"variables must be a list of mtf.Variable, got {variables!r}.")
    result = []
    for index, variable in enumerate(found):
        if isinstance(variable, mtf.Tensor) and isinstance(variable.operation, mtf.Variable):
            variable = variable.operation
        if not isinstance(variable, mtf.Variable):
            raise TypeError(
                f"variables must hold mtf.Variable, but variables[{index}] is {variable!r}."
            )
        result.append(variable)
    return result


def check_grads_and_variables(
    grads: Sequence[Any], variables: Sequence[Any], same_shapes: bool = False
) -> tuple[list[mtf.Tensor | None], list[mtf.Variable]]:
    """Returns gradients and variables as new lists, which belong together.

    With `same_shapes`, gradients of an optimizer without shards, their shapes are checked, too.

    Raises:
      TypeError: something is no gradient, no variable, or a gradient of integers.
      ValueError: lengths differ, a variable is listed twice, a gradient is on another mesh than
        its variable or (with `same_shapes`) of another shape, or there are several graphs.
    """
    variables = check_variables(variables)
    count = len({v.graph for v in variables})
    if count > 1:
        raise ValueError(
            f"The variables are of several mtf graphs, {count}: apply those of each by itself."
        )
    grads = check_gradients(grads)
    if len(grads) != len(variables):
        raise ValueError(
            f"grads and variables must have the same length, got {len(grads)} gradients for "
            f"{len(variables)} variables."
        )
    seen = set()
    for grad, variable in zip(grads, variables):
        if grad is not None and not grad.dtype.is_floating:
            raise TypeError(
                f"The gradient of {variable.name!r} must be of a floating dtype, got {grad.dtype}."
            )
        if variable in seen:
            raise ValueError(f"Variable {variable.name!r} is twice in variables; give it once.")
        seen.add(variable)
        if grad is not None and grad.mesh is not variable.mesh:
            raise ValueError(
                f"The gradient {grad.name!r} and its variable {variable.name!r} are on different "
                "meshes."
            )
        if same_shapes and grad is not None and grad.shape != variable.shape:
            raise ValueError(
                f"The gradient of {variable.name!r} has shape {grad.shape.to_string}, but the "
                f"variable has {variable.shape.to_string}."
            )
    return grads, variables


def check_one_mesh(grads: MaybeGradients, what: str) -> None:
    """Raises ValueError if gradients are on several meshes; `what` needs those of one mesh."""
    first: dict[mtf.Mesh, str] = {}
    for grad in grads:
        if grad is not None:
            first.setdefault(grad.mesh, grad.name)
    if len(first) > 1:
        raise ValueError(
            f"{what} needs gradients of one mesh, because shards are of one mesh, but "
            f"{' and '.join(map(repr, first.values()))} are on different ones: call it for those "
            "of each mesh."
        )


def check_pairs(grads_and_vars: Any) -> GradsAndVars:
    """Returns the argument of apply_gradients as a new list of (gradient or None, variable).

    Raises:
      TypeError: as `check_grads_and_variables`.
      ValueError: it is not a list of pairs, or empty, or as `check_grads_and_variables`.
    """
    wanted = "a list of (gradient, variable) pairs as compute_gradients returns"
    pairs = elements(grads_and_vars)
    if pairs is None:
        raise ValueError(f"grads_and_vars must be {wanted}, got {grads_and_vars!r}.")
    for index, pair in enumerate(pairs):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ValueError(f"grads_and_vars must be {wanted}, but item {index} is {pair!r}.")
    if not pairs:
        raise ValueError(f"grads_and_vars must be {wanted}, got no pair at all.")
    given, owners = zip(*pairs)
    grads, variables = check_grads_and_variables(given, owners)
    return list(zip(grads, variables))


def check_step(global_step: Any) -> None:
    """Raises TypeError if global_step is neither None nor a scalar mtf or tf variable."""
    if global_step is None:
        return
    if isinstance(global_step, mtf.Tensor):
        global_step = global_step.operation
    if isinstance(global_step, mtf.Variable):
        shape = global_step.shape.to_integer_list
    elif callable(getattr(global_step, "assign_add", None)):  # every kind of tf variable
        shape = global_step.shape.as_list()
    else:
        raise TypeError(
            f"global_step must be an mtf.Variable or a tf.Variable, got {global_step!r}."
        )
    if shape:
        raise ValueError(f"global_step must be a scalar variable, got shape {shape}.")


class StageOperation(mtf.Operation):
    """An operation on a list of tensors, all of which are lowered at once.

    Attributes:
      takes_pending: whether it reads pending sums as they are, but for those for which it called
        `PendingSums.want` with `reduced=True`. If false, all inputs of an operation that is not
        linear are reduced.
      is_linear: whether its outputs are linear in all of its inputs together.
    """

    takes_pending = False
    is_linear = False

    def __init__(
        self,
        inputs: Sequence[mtf.Tensor],
        shapes: Sequence[mtf.Shape],
        name: str,
        dtypes: Any = None,
        mesh: mtf.Mesh | None = None,
    ):
        """Adds the operation.

        Its outputs have the dtypes of the inputs, in order, and lie on their mesh, unless others
        are given.
        """
        super().__init__(list(inputs), mesh=mesh, name=name)
        dtypes = dtypes or [x.dtype for x in inputs]
        tensors = [
            mtf.Tensor(self, shape, dtype, index=index)
            for index, (shape, dtype) in enumerate(zip(shapes, dtypes))
        ]
        give_outputs(self, tensors)

    def set_outputs(self, lowering: mtf.Lowering, values: Sequence[Any]) -> None:
        """Records the lowered outputs, in order."""
        for output, value in zip(self.outputs, values):
            lowering.set_tensor_lowering(output, value)


class _OnMesh(StageOperation):
    """Gives a tensor that no mesh splits to the processors of another mesh."""

    def __init__(self, x: mtf.Tensor, mesh: mtf.Mesh):
        super().__init__([x], [x.shape], "on_mesh", mesh=mesh)

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        self.set_outputs(lowering, [lowered_on(lowering, self.inputs[0], self.mesh)])


def on_mesh(x: mtf.Tensor, mesh: mtf.Mesh) -> mtf.Tensor:
    """Returns a tensor on another mesh of the same graph, if it is not on it already.

    The tensor is a scalar, or has dimensions that neither mesh splits. Nothing is reduced.
    """
    return x if x.mesh is mesh else _OnMesh(x, mesh).outputs[0]


def reduced_values(lowering: mtf.Lowering, tensors: Sequence[mtf.Tensor]) -> list[Any]:
    """Returns the lowered values of tensors, reduced over all of their pending axes."""
    return [lowering.tensors[t].to_laid_out_tensor() for t in tensors]


def reshaped(mesh_impl: Any, value: Any, shape: Sequence[int]) -> Any:
    """Reshapes each slice of a `LaidOutTensor`."""
    return mesh_impl.slicewise(lambda x: tf.reshape(x, shape), value)


def dims_to_sum(
    grads: Sequence[mtf.Tensor], variables: Sequence[mtf.Variable]
) -> list[list[mtf.Dimension]]:
    """Returns for each gradient the dims that its variable lacks: its shard dims."""
    return [[d for d in g.shape.dims if d not in v.shape.dims] for g, v in zip(grads, variables)]


_K = TypeVar("_K", bound=Hashable)


class PartialSum(NamedTuple):
    """A lowered tensor and the mesh axes that it has not been summed over yet.

    Attributes:
      value: a `LaidOutTensor`; each processor's slice is its part of the sum.
      mesh_axes: sorted indices of mesh axes; empty once the sum is reduced.
    """

    value: Any
    mesh_axes: tuple[int, ...]


def partial_sum(
    lowering: mtf.Lowering,
    tensor: mtf.Tensor,
    dims: Sequence[mtf.Dimension] = (),
    reduced: bool = False,
) -> PartialSum:
    """Returns the partial sums behind a tensor, even if it was reduced for another reader.

    Each processor also sums its own slice over `dims`, which the value then lacks; mesh axes that
    split them are still to be summed over. With `reduced`, the sum behind the tensor itself is
    reduced first, so that only sums over `dims` are left.
    """
    lowered = lowering.tensors[tensor]
    # LazyAllreduceSum is what Mesh-TF 0.1.21 gives a reduction over a split dimension; the name
    # is exported by mesh_tensorflow.
    if isinstance(lowered, mtf.LazyAllreduceSum) and not reduced:
        value, mesh_axes = lowered.laid_out_input.to_laid_out_tensor(), set(lowered.mesh_axes)
    else:
        value, mesh_axes = lowered.to_laid_out_tensor(), set()
    if dims:
        mesh_impl = lowering.mesh_impl(tensor)
        layout = mesh_impl.tensor_layout(tensor.shape)
        slice_shape = mesh_impl.slice_shape(tensor.shape)
        positions = [i for i, d in enumerate(tensor.shape.dims) if d in dims]
        mesh_axes |= {layout[i] for i in positions} - {None}
        if all(slice_shape[i] == 1 for i in positions):
            rest = [size for i, size in enumerate(slice_shape) if i not in positions]
            value = mesh_impl.slicewise(lambda x: tf.reshape(x, rest), value)
        else:
            value = mesh_impl.slicewise(lambda x: tf.reduce_sum(x, positions), value)
    return PartialSum(value, tuple(sorted(mesh_axes)))


def reduce_partial_sums(
    mesh_impl: Any,
    sums: Sequence[PartialSum],
    strategy: Strategy,
    cuts: Sequence[Cuts] | None = None,
) -> list[Any]:
    """Reduces partial sums over their mesh axes, those with the same axes together.

    Returns a `LaidOutTensor` for each, in order. With `cuts`, which say how each sum is cut, each
    processor gets its part of the sum, and the whole sum without.
    """
    cuts = [()] * len(sums) if cuts is None else cuts
    # Along the other mesh axes processors hold the same sum already.
    sent = [tuple(c for c in cut if c.mesh_axis in s.mesh_axes) for s, cut in zip(sums, cuts)]

    def reduce(key: tuple[tuple[int, ...], bool], indices: list[int]) -> list[Any]:
        mesh_axes, is_cut = key
        values = [sums[i].value for i in indices]
        if not mesh_axes:
            return values
        groups = ProcessorGroups.along(mesh_impl, mesh_axes)
        if not is_cut:
            return strategy.all_reduce(mesh_impl, values, groups)
        return reduce_scatter_by(strategy, mesh_impl, values, groups, [sent[i] for i in indices])

    keys = [(s.mesh_axes, bool(some)) for s, some in zip(sums, sent)]
    return [
        take_parts(mesh_impl, result, [c for c in cut if c not in some])
        for result, cut, some in zip(by_key(keys, reduce), cuts, sent)
    ]


def by_key(keys: Sequence[_K], make: Callable[[_K, list[int]], Sequence[Any]]) -> list[Any]:
    """Calls `make` once for each different key, and returns a result for each position in `keys`.

    `make` gets a key and all positions that have it, and returns a result for each of them.
    """
    positions: dict[_K, list[int]] = {}
    for position, key in enumerate(keys):
        positions.setdefault(key, []).append(position)
    results: dict[int, Any] = {}
    for key, some in positions.items():
        results.update(zip(some, make(key, some)))
    return [results[position] for position in range(len(keys))]


def terms_of_processors(
    lowering: mtf.Lowering,
    grads: Sequence[mtf.Tensor],
    sum_dims: Sequence[Sequence[mtf.Dimension]],
    replica_axes: Sequence[Collection[int]],
    strategy: Strategy,
) -> list[Any]:
    """Returns each processor's terms of gradients, whose sums over replica axes are the gradients.

    Gradients are pending, reduced or per shard. For each, `sum_dims` has the dims to sum over, and
    `replica_axes` the mesh axes along which processors keep terms of their own; the strategy
    reduces over all others.
    """
    mesh_impl = lowering.mesh_impl(grads[0])
    sums = [partial_sum(lowering, grad, dims) for grad, dims in zip(grads, sum_dims)]
    others = [
        PartialSum(s.value, tuple(axis for axis in s.mesh_axes if axis not in axes))
        for s, axes in zip(sums, replica_axes)
    ]
    values = reduce_partial_sums(mesh_impl, others, strategy)
    # Along an axis where a gradient is reduced already every processor takes an equal share, so
    # that the sum over the axis is the gradient.
    return [
        share(mesh_impl, value, set(axes).difference(s.mesh_axes))
        for value, s, axes in zip(values, sums, replica_axes)
    ]


def share(mesh_impl: Any, value: Any, mesh_axes: Collection[int]) -> Any:
    """Divides a tensor by the number of processors that hold it along mesh axes.

    The sum of these equal shares over the axes is the tensor.
    """
    count = mtf.Shape([mesh_impl.shape.dims[axis] for axis in mesh_axes]).size
    if count == 1:
        return value
    return mesh_impl.slicewise(lambda x: x / tf.cast(count, x.dtype), value)
