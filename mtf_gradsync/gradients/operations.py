"""The base class of operations on lists of gradients, and pending (not yet reduced) sums."""

from __future__ import annotations

import dataclasses
from typing import (
    Any,
    Callable,
    Collection,
    NamedTuple,
    Optional,
    Sequence,
)

from mtf_gradsync._common import map_by_key
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import (
    gradients_calls,
    loop_body,
    lowered_on,
    reduced_value,
    set_operation_outputs,
)
from mtf_gradsync._private.tensorflow import control_flow_context
from mtf_gradsync.mesh.axes import ProcessorGroups
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.reduce.parts import Cuts, take_parts
from mtf_gradsync.reduce.strategy import reduce_scatter_by

MaybeGradients = Sequence[Optional[mtf.Tensor]]


class GradientOperation(mtf.Operation):
    """An operation on a list of tensors, all of which are lowered at once.

    Attributes:
      takes_pending: whether the operation can read pending (not yet reduced) inputs as they are.
        Inputs that the operation declared by `PendingSums.declare_use` with `reduced=True` are
        reduced all the same. If `takes_pending` is false, all pending inputs are reduced, unless
        the operation is linear in them.
      is_linear: whether the operation's outputs are linear in all of its inputs together.
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
        """Adds the operation to the graph of its inputs.

        Args:
          inputs: the tensors that the operation reads.
          shapes: the shape of each output.
          name: the name of the operation.
          dtypes: the dtype of each output. None gives an output the dtype of the input at the same
            position.
          mesh: the mesh of the outputs; None takes the mesh of the inputs.
        """
        super().__init__(list(inputs), mesh=mesh, name=name)
        dtypes = dtypes or [x.dtype for x in inputs]
        tensors = [
            mtf.Tensor(self, shape, dtype, index=index)
            for index, (shape, dtype) in enumerate(zip(shapes, dtypes))
        ]
        set_operation_outputs(self, tensors)

    def set_outputs(self, lowering: mtf.Lowering, values: Sequence[Any]) -> None:
        """Records `values` as the lowered values of the operation's outputs, in order."""
        for output, value in zip(self.outputs, values):
            lowering.set_tensor_lowering(output, value)


class _OnMesh(GradientOperation):
    """A copy of a tensor that no mesh splits, on the processors of another mesh."""

    def __init__(self, x: mtf.Tensor, mesh: mtf.Mesh):
        super().__init__([x], [x.shape], "on_mesh", mesh=mesh)

    def lower(self, lowering: mtf.Lowering) -> None:
        self.set_outputs(lowering, [lowered_on(lowering, self.inputs[0], self.mesh)])


def on_mesh(x: mtf.Tensor, mesh: mtf.Mesh) -> mtf.Tensor:
    """Returns a tensor on `mesh`: the tensor itself, or a copy if it is on another mesh.

    The tensor must be a scalar, or have only dimensions that neither mesh splits. Nothing is
    reduced.
    """
    return x if x.mesh is mesh else _OnMesh(x, mesh).outputs[0]


def gradient_name(grad: mtf.Tensor) -> str:
    """Returns words for a gradient in messages: "the gradient of variable 'w'".

    If the gradient's variable is not known, the words have the name of the gradient's tensor.
    """
    variable_of = {
        y: x
        for call in gradients_calls(grad.graph)
        for y, x in zip(call.outputs, call.inputs)
        if isinstance(x.operation, mtf.Variable)
    }
    tensor = grad
    while tensor not in variable_of:
        operation = tensor.operation
        if tensor not in operation.outputs or not operation.inputs:
            return f"gradient {grad.name!r}"
        position = operation.outputs.index(tensor)
        if isinstance(operation, mtf.WhileLoopOperation):
            tensor = loop_body(operation).outputs[position]
        else:
            # A list of gradients, or a gradient and what it is multiplied by.
            inputs = operation.inputs
            tensor = inputs[position if len(inputs) >= len(operation.outputs) else 0]
    return f"the gradient of variable {variable_of[tensor].operation.name!r}"


def reduced_values(lowering: mtf.Lowering, tensors: Sequence[mtf.Tensor]) -> list[Any]:
    """Returns a `LaidOutTensor` for each tensor; pending tensors are reduced first."""
    return [lowering.tensors[t].to_laid_out_tensor() for t in tensors]


def reshaped(mesh_impl: Any, value: Any, shape: Sequence[int]) -> Any:
    """Returns a `LaidOutTensor` like `value`, with every slice reshaped to `shape`."""
    return mesh_impl.slicewise(lambda x: tf.reshape(x, shape), value)


def map_present(
    grads: MaybeGradients, make: Callable[[list[mtf.Tensor]], Sequence[mtf.Tensor]]
) -> list[mtf.Tensor | None]:
    """Calls `make` with the gradients that are not None, and puts None back between its results.

    `make` returns a tensor for each gradient that it gets. So the returned list has a tensor or
    None for each item of `grads`. If all items are None, `make` is not called.
    """
    present = [g for g in grads if g is not None]
    if not present:
        return list(grads)
    results = iter(make(present))
    return [None if g is None else next(results) for g in grads]


def map_by_mesh(
    grads: Sequence[mtf.Tensor],
    make: Callable[[mtf.Mesh, list[mtf.Tensor]], Sequence[mtf.Tensor]],
) -> list[mtf.Tensor]:
    """Calls `make` once for each mesh, with the mesh and the gradients on it.

    `make` returns a tensor for each gradient that it gets. All of these tensors are returned, in
    the order of `grads`.
    """

    def of_mesh(mesh: mtf.Mesh, some: list[int]) -> Sequence[mtf.Tensor]:
        return make(mesh, [grads[i] for i in some])

    return map_by_key([g.mesh for g in grads], of_mesh)


def dims_to_sum(
    grads: Sequence[mtf.Tensor], variables: Sequence[mtf.Variable]
) -> list[list[mtf.Dimension]]:
    """Returns for each gradient the dims that its variable lacks: its shard dims."""
    return [[d for d in g.shape.dims if d not in v.shape.dims] for g, v in zip(grads, variables)]


def current_context() -> Any:
    """Returns a value that is equal for operations of the same graph, loop and branch."""
    graph = tf.get_default_graph()
    return graph, control_flow_context(graph)


@dataclasses.dataclass(eq=False, repr=False)
class PendingSum(mtf.LazyAllreduceSum):
    """A lowered tensor that is a sum over processors, each of which holds one term (its part).

    The parts and their sum are computed only when they are first used.

    Attributes:
      mesh_impl: the mesh of the tensor.
      mesh_axes: numbers of the mesh axes to sum over.
      make_part: a function that returns the `LaidOutTensor` of the parts.
      make_reduced: a function that is called with this object, makes the sum, and calls
        `set_reduced`.
      slice_shape: the shape of a processor's part, and of a slice of the sum.
      add_counter_fn: a function of Mesh-TF that counts all-reduces; it is called when the sum is
        made.
      sources: the lowered tensors that the sum is computed from, if it is computed from reduced
        tensors and not by a reduction of the parts.
      context: the graph, loop or branch in which this object was made; see `current_context`.
    """

    mesh_impl: mtf.MeshImpl
    mesh_axes: list[int]
    make_part: Callable[[], Any]
    make_reduced: Callable[[PendingSum], None]
    slice_shape: Sequence[int] = ()
    add_counter_fn: Callable[[], None] | None = None
    sources: Sequence[Any] = ()
    context: Any = dataclasses.field(default_factory=current_context)
    _part: Any = None
    _reduced_value: Any = None

    @property
    def laid_out_input(self) -> Any:
        """The `LaidOutTensor` of the parts."""
        if self._part is None:
            self._part = self.make_part()
        return self._part

    @property
    def is_reduced(self) -> bool:
        """Whether the sum has been made."""
        return self._reduced_value is not None

    @property
    def is_complete(self) -> bool:
        """Whether both the parts and the sum have been made."""
        return self.is_reduced and self._part is not None

    @property
    def sends_nothing(self) -> bool:
        """Whether reading the sum now would send nothing, because all communication is done."""
        return self.is_reduced or (bool(self.sources) and all(map(_sends_nothing, self.sources)))

    def set_reduced(self, value: Any) -> None:
        """Stores the sum, a `LaidOutTensor`; called by the function that has made the sum."""
        self._reduced_value = value
        if self.add_counter_fn:
            self.add_counter_fn()

    def to_laid_out_tensor(self) -> Any:
        """Returns the `LaidOutTensor` of the sum; the first call makes the sum."""
        if self._reduced_value is None:
            self.make_reduced(self)
        return self._reduced_value

    @property
    def tensor_list(self) -> list[tf.Tensor]:
        """The tf tensors of the slices of the sum, which is made if it has not been made yet."""
        return self.to_laid_out_tensor().tensor_list


def _sends_nothing(lowered: Any) -> bool:
    if isinstance(lowered, PendingSum):
        return lowered.sends_nothing
    return not isinstance(lowered, mtf.LazyAllreduceSum) or reduced_value(lowered) is not None


class PartialSum(NamedTuple):
    """A lowered tensor and the mesh axes that it has not been summed over yet.

    Attributes:
      value: a `LaidOutTensor`; each processor's slice is its part of the sum.
      mesh_axes: sorted indices of mesh axes; empty if the sum is reduced.
    """

    value: Any
    mesh_axes: tuple[int, ...]


def partial_sum(
    lowering: mtf.Lowering,
    tensor: mtf.Tensor,
    dims: Sequence[mtf.Dimension] = (),
    reduced: bool = False,
) -> PartialSum:
    """Returns a tensor's parts: each processor's term, and the mesh axes still to sum over.

    If `reduced` is false, the parts of a pending tensor are returned even if its sum was already
    made for another reader. If `reduced` is true, a pending tensor is reduced first.

    `dims` are further dimensions of the tensor to sum over. Each processor sums its own slice over
    `dims`, so that its term lacks these dimensions. The mesh axes that split `dims` are among the
    axes still to sum over, also if `reduced` is true.
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
    """Reduces partial sums over their mesh axes, and returns a `LaidOutTensor` for each, in order.

    Sums with the same mesh axes are reduced together, by `strategy`. `cuts` has, for each sum, the
    cuts by which it is divided into parts, so that each processor gets only its part. A sum without
    cuts is returned whole to each processor, and so are all sums if `cuts` is None.
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
    results = map_by_key(keys, reduce)
    for number, (cut, some) in enumerate(zip(cuts, sent)):
        if len(some) < len(cut):
            left = [c for c in cut if c not in some]
            results[number] = take_parts(mesh_impl, results[number], left)
    return results


def terms_of_processors(
    lowering: mtf.Lowering,
    grads: Sequence[mtf.Tensor],
    sum_dims: Sequence[Sequence[mtf.Dimension]],
    replica_axes: Sequence[Collection[int]],
    strategy: Strategy,
) -> list[Any]:
    """Returns for each gradient a `LaidOutTensor` of terms that add up to the gradient.

    Each processor has one term. The sum of the terms over the mesh axes `replica_axes` is the
    gradient.

    Args:
      lowering: the lowering.
      grads: gradients of one mesh, pending, reduced or per shard.
      sum_dims: for each gradient the dims to sum over, such as its shard dims. The terms lack these
        dims.
      replica_axes: for each gradient the mesh axes along which every processor has its own term.
      strategy: the strategy that reduces gradients over all other axes.
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
        equal_shares(mesh_impl, value, set(axes).difference(s.mesh_axes))
        for value, s, axes in zip(values, sums, replica_axes)
    ]


def equal_shares(mesh_impl: Any, value: Any, mesh_axes: Collection[int]) -> Any:
    """Returns equal shares of a tensor that is the same on all processors along `mesh_axes`.

    `value` is the `LaidOutTensor` of the tensor, and the result is the `LaidOutTensor` of the
    shares. Each share is the tensor divided by the number of processors along the axes, so that the
    sum of the shares over the axes is the tensor.
    """
    count = mtf.Shape([mesh_impl.shape.dims[axis] for axis in mesh_axes]).size
    if count == 1:
        return value
    return mesh_impl.slicewise(lambda x: x / tf.cast(count, x.dtype), value)
