"""What this package uses of Mesh-TensorFlow that has no public name, one function each.

All were read on Mesh-TF 0.1.21; ``tests/private/test_mesh_tensorflow.py`` has a test of each that
fails where a version means something else.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, NamedTuple

from mtf_gradsync._private.libraries import mtf, tf

#: The collection of a graph in which a SIMD mesh keeps the slices of variables; the one of global
#: variables leaves them out.
SLICES_COLLECTION = "TPU_VAR"


def kept_sum(lazy: mtf.LazyAllreduceSum) -> Any:
    """The `LaidOutTensor` that a pending sum has become for one of its readers, None before."""
    return lazy._reduced


def bfloat16_group_size(mesh_impl: mtf.MeshImpl) -> int:
    """The largest group in which a SIMD mesh sums bfloat16 without a cast to float32."""
    return mesh_impl._allreduce_in_bfloat16_max_group_size


def restored_lowering(hook: mtf.MtfRestoreHook) -> mtf.Lowering:
    """The lowering whose masters an `MtfRestoreHook` copies to their slices."""
    return hook._lowering


def give_outputs(operation: mtf.Operation, tensors: list[mtf.Tensor]) -> None:
    """Gives a new operation its outputs, along all of whose dimensions it may be split."""
    operation._outputs = tensors
    # Mesh-TF's automatic layout asks for it once inputs and outputs are known.
    operation._splittable_dims, operation._unsplittable_dims = (
        operation._initialize_all_dimensions_as_splittable()
    )


def init_stand_in(stand_in: mtf.Variable, variable: mtf.Variable, value: mtf.Tensor) -> None:
    """Initializes a variable that stands for another one and has another value.

    It stands in none of the graph's lists and has no master of its own; name and dtypes are those
    of the other one.
    """
    vars(stand_in).update(vars(variable))
    stand_in._inputs = []
    stand_in._outputs = [value]


class _Reshaped:
    """A master variable, seen in another shape. TensorFlow takes it as a tensor and in `assign`."""

    def __init__(self, master: tf.Variable, shape: list[int]):
        self._master = master
        self.shape, self.dtype, self.device = tf.TensorShape(shape), master.dtype, master.device

    def value(self) -> tf.Tensor:
        return tf.reshape(self._master, self.shape)

    def assign(self, value: tf.Tensor, name: str | None = None) -> Any:
        return tf.assign(self._master, tf.reshape(value, self._master.shape), name=name)


def _as_tensor(x: _Reshaped, dtype: Any = None, name: Any = None, as_ref: bool = False) -> Any:
    del name, as_ref
    return x.value() if dtype in (None, x.dtype) else NotImplemented


tf.register_tensor_conversion_function(_Reshaped, _as_tensor)


def give_value(variable: mtf.Variable, shape: mtf.Shape) -> mtf.Tensor:
    """Gives a variable that is not lowered yet a value of another shape with as many elements.

    Its master, and so what checkpoints hold, keeps its shape.

    Args:
      variable: the variable.
      shape: of the new value.

    Returns:
      The new value. The old one is to become the output of another operation (`take_over`).
    """
    variable._outputs = [mtf.Tensor(variable, shape, variable.activation_dtype)]
    master = variable.get_master()
    if shape.to_integer_list != master.shape.as_list():
        # Autostack asks the master of what it stacks to be one that can be assigned to.
        seen = _Reshaped(master, shape.to_integer_list)
        variable.get_master = lambda: seen
        variable.assign_to_master = seen.assign
    return variable._outputs[0]


def take_over(operation: mtf.Operation, tensors: list[mtf.Tensor]) -> None:
    """Makes tensors outputs of a new operation, as Mesh-TF's autostack does."""
    for tensor in tensors:
        tensor._operation = operation
    give_outputs(operation, tensors)


def reassign(
    operation: mtf.Assign, variables: list[mtf.Variable], values: list[mtf.Tensor]
) -> None:
    """Makes an assignment one of other values to other variables, as Mesh-TF's autostack does."""
    operation._variables, operation._inputs = list(variables), list(values)


def give_assign_fn(operation: mtf.Assign, assign_fn: Any) -> None:
    """Has an assignment write its values by another function, such as `mtf.assign_slice`."""
    operation._assign_fn = assign_fn


def dims_known_by_name(optimizer: Any) -> tuple[str, ...]:
    """Names of dimensions that an optimizer treats in a way of their own, as Adafactor can."""
    return tuple(getattr(optimizer, "_stacked_dim_names", ()))


def slice_function(
    operation: mtf.SlicewiseOperation | mtf.BinaryOpWithBroadcasting,
) -> Callable[..., Any]:
    """The function of tf tensors that an operation calls on the slices of its inputs.

    `AddOperation` and `MinMaxOperation` are binary operations too.
    """
    return operation._tf_fn


def scalar_added(operation: mtf.ScalarAddOperation) -> Any:
    """The number or tf scalar that is added to every element."""
    return operation._scalar


def scalar_multiplied(operation: mtf.ScalarMultiplyOperation) -> Any:
    """The number or tf scalar that every element is multiplied by."""
    return operation._scalar


def reduction(operation: mtf.ReduceOperation) -> str:
    """How a reduction combines elements: "SUM", "MAX" or "MIN"."""
    return operation._reduction_fn_string


class DifferentiatedOperation(NamedTuple):
    """What a `GenericGradOperation` differentiates.

    Its outputs are the gradients of the operation's inputs, in order.

    Attributes:
      operation: the forward operation.
      output_gradients: an `mtf.Tensor` for each of its outputs.
    """

    operation: mtf.Operation
    output_gradients: list[mtf.Tensor]


def differentiated(operation: mtf.GenericGradOperation) -> DifferentiatedOperation:
    """The operation that a gradient by `tf.gradients` is of."""
    return DifferentiatedOperation(operation._forward_op, operation._grad_ys)


def custom_gradient_results(operation: mtf.CustomGradientOperation) -> list[mtf.Tensor]:
    """The tensors that an operation with a gradient of its own passes on, one for each output."""
    return operation._fn_outputs


class LoopPart(NamedTuple):
    """The condition or the body of an `mtf.while_loop`.

    Attributes:
      inputs: the tensors that stand for the loop's variables in it.
      operations: what it is made of, in order; the loop's own list. They stand in no graph's list
        of operations.
      outputs: what it returns. The body of a loop with accumulators has more outputs than inputs;
        those past the inputs are summed over the iterations.
    """

    inputs: list[mtf.Tensor]
    operations: list[mtf.Operation]
    outputs: list[mtf.Tensor]


def loop_condition(operation: mtf.WhileLoopOperation) -> LoopPart:
    """The condition of a loop; its only output says whether to go on."""
    return LoopPart(operation._cond_inputs, operation._cond_ops, [operation._cond_output])


def loop_body(operation: mtf.WhileLoopOperation) -> LoopPart:
    """The body of a loop."""
    return LoopPart(operation._body_inputs, operation._body_ops, list(operation._body_outputs))


# What Mesh-TF multiplies masks by.
_MASK = -1e9


def keep_masks_finite() -> None:
    """Makes float16 masks be multiplied by the smallest finite number in place of -1e9.

    That is infinite in float16: the product with the zeros of what is not masked is NaN.
    """
    made = mtf.ScalarMultiplyOperation.__init__
    if hasattr(made, "__wrapped__"):
        return

    @functools.wraps(made)
    def make(self: mtf.ScalarMultiplyOperation, x: mtf.Tensor, scalar: Any, **how: Any) -> None:
        if x.dtype == tf.float16 and isinstance(scalar, float) and scalar == _MASK:
            scalar = float(tf.float16.min)
        made(self, x, scalar, **how)

    mtf.ScalarMultiplyOperation.__init__ = make


def check_imported_shapes() -> None:
    """Makes a step fail whose input has another shape than the mtf tensor that it becomes.

    Where TensorFlow does not know the shape before, a placement mesh and a SIMD mesh would take
    as much of the input as the mtf tensor has, and train on a part of the batch.
    """
    made = mtf.ImportOperation.__init__
    if hasattr(made, "__wrapped__"):
        return

    @functools.wraps(made)
    def make(
        self: mtf.ImportOperation,
        mesh: mtf.Mesh,
        tf_tensor: Any,
        shape: mtf.Shape,
        name: str | None = None,
    ) -> None:
        tf_tensor = tf.convert_to_tensor(tf_tensor)
        expected = shape.to_integer_list
        is_known = tf_tensor.shape.is_fully_defined()
        if not is_known and tf_tensor.shape.is_compatible_with(expected):
            tf_tensor = tf.ensure_shape(tf_tensor, expected)
        made(self, mesh, tf_tensor, shape, name)

    mtf.ImportOperation.__init__ = make


class Seed(mtf.Constant):
    """The gradient of a loss by itself, with which `mtf.gradients` begins: ones.

    Attributes:
      scale: what they are multiplied by: None, a number or an mtf scalar.
      rounded: what rounds a scale to one that every loss beside this one can hold.
    """

    scale: Any = None
    rounded: Callable[[tf.Tensor], tf.Tensor] = staticmethod(tf.identity)

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        super().lower(lowering)
        if self.scale is None:
            return
        (ones,) = self.outputs
        value, mesh_impl = lowering.tensors[ones].to_laid_out_tensor(), lowering.mesh_impl(self)
        if isinstance(self.scale, mtf.Tensor):
            scale = lowering.tensors[self.scale].to_laid_out_tensor()
            value = mesh_impl.slicewise(self._scaled, value, scale)
        else:
            value = mesh_impl.slicewise(lambda x: self._scaled(x, tf.constant(self.scale)), value)
        lowering.set_tensor_lowering(ones, value)

    def _scaled(self, ones: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
        return ones * tf.cast(self.rounded(scale), ones.dtype)


class GradientsCall(NamedTuple):
    """A call of `mtf.gradients` that began with ones.

    Attributes:
      losses: what was differentiated.
      seeds: one for each loss.
      outputs: the gradients, without those that are None.
      inputs: of each of those, what it is the gradient of.
    """

    losses: list[mtf.Tensor]
    seeds: list[Seed]
    outputs: list[mtf.Tensor]
    inputs: list[mtf.Tensor]


# Where an mtf graph keeps its `GradientsCall`s.
_CALLS = "mtf_gradsync_gradients"


def note_gradients() -> None:
    """Makes every mtf graph keep which losses were differentiated in it; see `gradients_calls`."""
    made = mtf.gradients
    if hasattr(made, "__wrapped__"):
        return

    @functools.wraps(made)
    def differentiate_and_note(
        ys: list[mtf.Tensor],
        xs: list[mtf.Tensor],
        grad_ys: list[mtf.Tensor] | None = None,
        operations: list[mtf.Operation] | None = None,
    ) -> list[mtf.Tensor | None]:
        if grad_ys:
            return made(ys, xs, grad_ys, operations)
        seeds = [Seed(y.mesh, 1.0, y.shape, y.dtype) for y in ys]
        grads = made(ys, xs, [seed.outputs[0] for seed in seeds], operations)
        pairs = [(g, x) for g, x in zip(grads, xs) if g is not None]
        call = GradientsCall(list(ys), seeds, [g for g, _ in pairs], [x for _, x in pairs])
        vars(ys[0].graph).setdefault(_CALLS, []).append(call)
        return grads

    mtf.gradients = mtf.ops.gradients = differentiate_and_note


def gradients_calls(graph: mtf.Graph) -> list[GradientsCall]:
    """The calls of `mtf.gradients` in a graph, and in the loops in it, in order."""
    return list(vars(graph).get(_CALLS, ()))


# Where a tf graph keeps the meshes that were made in it. Keys that are no text are not exported.
_MESHES = ("mtf_gradsync meshes",)


def note_meshes() -> None:
    """Makes every graph of TensorFlow's keep which meshes are made in it; see `meshes_made`."""
    made = mtf.MeshImpl.__init__
    if hasattr(made, "__wrapped__"):
        return

    @functools.wraps(made)
    def make_and_note(self: mtf.MeshImpl, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        tf.add_to_collection(_MESHES, self)

    mtf.MeshImpl.__init__ = make_and_note


def mesh_impls_made() -> list[mtf.MeshImpl]:
    """The meshes that were made in TensorFlow's default graph."""
    return list(tf.get_collection(_MESHES))


def meshes_made() -> list[tuple[mtf.Shape, mtf.LayoutRules]]:
    """The different meshes that were made in TensorFlow's default graph, as shapes and layouts."""
    # Layout rules are not compared by their pairs, which are a set.
    different = {
        mesh_key(impl.shape, impl.layout_rules): (impl.shape, impl.layout_rules)
        for impl in mesh_impls_made()
    }
    return list(different.values())


def forget_mesh(graph: tf.Graph, mesh_impl: mtf.MeshImpl) -> None:
    """Takes a mesh out of those that were made in a graph."""
    made = graph.get_collection_ref(_MESHES)
    made[:] = [mesh for mesh in made if mesh is not mesh_impl]


def mesh_key(shape: mtf.Shape, layout: mtf.LayoutRules) -> tuple[str, frozenset]:
    """What is equal for meshes of one shape and layout."""
    return shape.to_string, frozenset(layout._pairs)
