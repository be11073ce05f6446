"""Access to what this package uses of Mesh-TensorFlow that has no public name: a function for each.

All functions of this module were checked with Mesh-TF 0.1.21.
``tests/private/test_mesh_tensorflow.py`` has a test of each function, which fails if another
version of Mesh-TF changes what the function relies on.
"""

from __future__ import annotations

import re
from typing import Any, Callable, NamedTuple

from mtf_gradsync._private.libraries import mtf, tf


def reduced_value(lazy: mtf.LazyAllreduceSum) -> Any:
    """Returns the `LaidOutTensor` of a pending sum that was reduced already; None if it was not."""
    return lazy._reduced


def bfloat16_group_size(mesh_impl: mtf.MeshImpl) -> int:
    """Returns the largest group in which a SIMD mesh sums bfloat16 without a cast to float32."""
    return mesh_impl._allreduce_in_bfloat16_max_group_size


def set_operation_outputs(operation: mtf.Operation, tensors: list[mtf.Tensor]) -> None:
    """Sets the outputs of a new operation, which has its inputs already.

    All dimensions of its inputs and outputs may be split over the mesh.
    """
    operation._outputs = tensors
    # Mesh-TF's automatic layout asks for it once inputs and outputs are known.
    operation._splittable_dims, operation._unsplittable_dims = (
        operation._initialize_all_dimensions_as_splittable()
    )


def init_replacement(replacement: mtf.Variable, variable: mtf.Variable, value: mtf.Tensor) -> None:
    """Initializes `replacement`, a variable that takes the place of `variable` in an optimizer.

    This function is called in place of `mtf.Variable`'s constructor. The replacement has the name
    and the dtypes of `variable`, and `value` as its value. It has no master (the variable that
    checkpoints hold), and is in none of the graph's lists.
    """
    vars(replacement).update(vars(variable))
    replacement._inputs = []
    replacement._outputs = [value]


class Reshaped:
    """A tf variable that reads and assigns its values in another shape.

    An object of this class can be used as a tensor, and in TensorFlow's assignments.
    """

    def __init__(self, variable: Any, shape: list[int]):
        self._variable = variable
        self.shape, self.dtype = tf.TensorShape(shape), variable.dtype.base_dtype
        # The object that stands for all slices on a SIMD mesh has no device.
        self.device = getattr(variable, "device", "")

    def value(self) -> tf.Tensor:
        """Returns the variable's value in this shape, read now."""
        return tf.reshape(self._variable, self.shape)

    def assign(self, value: tf.Tensor, name: str | None = None) -> Any:
        """Assigns `value`, which has this object's shape; `tf.assign` calls this method."""
        return tf.assign(self._variable, self._as_held(value), name=name)

    def assign_add(self, value: tf.Tensor, name: str | None = None) -> Any:
        """Adds `value`, which has this object's shape; `tf.assign_add` calls this method."""
        return tf.assign_add(self._variable, self._as_held(value), name=name)

    def assign_sub(self, value: tf.Tensor, name: str | None = None) -> Any:
        """Subtracts `value`, which has this object's shape; `tf.assign_sub` calls this method."""
        return tf.assign_sub(self._variable, self._as_held(value), name=name)

    def _as_held(self, value: tf.Tensor) -> tf.Tensor:
        return tf.reshape(value, self._variable.shape)


def _as_tensor(x: Reshaped, dtype: Any = None, name: Any = None, as_ref: bool = False) -> Any:
    del name, as_ref
    return x.value() if dtype in (None, x.dtype) else NotImplemented


tf.register_tensor_conversion_function(Reshaped, _as_tensor)


def reshape_variable(variable: mtf.Variable, shape: mtf.Shape) -> mtf.Tensor:
    """Changes the shape of a variable that is not lowered yet; returns its new value, a tensor.

    The new shape must have as many elements as the old shape. The variable's master, which
    checkpoints hold, keeps the old shape. Operations still read the tensor that was the variable's
    value before the call. The caller has to make this tensor, by `move_outputs`, the output of an
    operation that reshapes the new value.
    """
    variable._outputs = [mtf.Tensor(variable, shape, variable.activation_dtype)]
    master = variable.get_master()
    if shape.to_integer_list != master.shape.as_list():
        # Autostack assigns to masters, so that the reshaped master has to allow it.
        seen = Reshaped(master, shape.to_integer_list)
        variable.get_master = lambda: seen
        variable.assign_to_master = seen.assign
    return variable._outputs[0]


def master_of(variable: mtf.Variable) -> tf.Variable:
    """Returns the master of a variable: the tf variable that checkpoints hold, in their shape."""
    return variable._master


def set_copy_to_slices(laid_out_variable: Any, copy: tf.Operation) -> None:
    """Sets the operation by which a lowered variable copies its master to its slices."""
    laid_out_variable._copy_master_to_slices = copy


def keep_unstacked(variable: mtf.Variable, dtype: mtf.VariableDType) -> None:
    """Sets the dtype of a variable to `dtype`, so that Mesh-TF's autostack does not stack it.

    Autostack stacks variables of one shape and dtype. So no other variable of the same shape may
    have the dtype `dtype`. The variable must not be lowered yet.
    """
    variable._dtype = dtype


def move_outputs(operation: mtf.Operation, tensors: list[mtf.Tensor]) -> None:
    """Makes existing tensors the outputs of `operation`, in place of the operation that made them.

    `operation` is new and has its inputs already. Mesh-TF's autostack moves tensors in this way.
    """
    for tensor in tensors:
        tensor._operation = operation
    set_operation_outputs(operation, tensors)


def reassign(
    operation: mtf.Assign, variables: list[mtf.Variable], values: list[mtf.Tensor]
) -> None:
    """Makes an assignment write other variables: `variables`, with a value for each.

    Mesh-TF's autostack changes assignments in the same way.
    """
    operation._variables, operation._inputs = list(variables), list(values)


def set_assign_fn(operation: mtf.Assign, assign_fn: Any) -> None:
    """Sets the function by which an assignment writes each slice, such as `mtf.assign_slice`."""
    operation._assign_fn = assign_fn


def stacked_dim_names(optimizer: Any) -> tuple[str, ...]:
    """Returns the argument `stacked_dim_names` of Mesh-TF's Adafactor; () for other optimizers.

    Adafactor factors no second moments along dimensions with these names. Each position along these
    dimensions has its own parameter scale.
    """
    return tuple(getattr(optimizer, "_stacked_dim_names", ()))


def variable_patterns(optimizer: Any) -> dict[str, str | tuple[str, ...]]:
    """Returns the regular expressions by which an optimizer picks variables.

    The keys of the result are the names of three arguments of Mesh-TF's optimizers, such as
    "exclude_from_weight_decay". The values are tuples of expressions, empty if the optimizer has
    none. If an argument is a string and no list, the value is the string itself: Mesh-TF 0.1.21
    then takes each letter of the string as an expression.
    """
    given = {
        name: getattr(optimizer, name, None) or ()
        for name in ("exclude_from_weight_decay", "variable_search")
    }
    parts = getattr(optimizer, "_exclude_from_parameter_scale", None) or ()
    given["exclude_from_parameter_scale"] = (
        parts if isinstance(parts, str) else [re.escape(part) for part in parts]
    )
    return {k: x if isinstance(x, str) else tuple(x) for k, x in given.items()}


def scale_setting(optimizer: Any) -> Any:
    """Returns Adafactor's `multiply_by_parameter_scale`; True for other optimizers."""
    return getattr(optimizer, "_multiply_by_parameter_scale", True)


def slice_function(
    operation: mtf.SlicewiseOperation | mtf.BinaryOpWithBroadcasting,
) -> Callable[..., Any]:
    """Returns the function of tf tensors that an operation calls on the slices of its inputs."""
    return operation._tf_fn


def scalar_of(operation: mtf.ScalarAddOperation | mtf.ScalarMultiplyOperation) -> Any:
    """Returns the number or tf scalar that an operation adds to, or multiplies, all elements by."""
    return operation._scalar


def reduction_kind(operation: mtf.ReduceOperation) -> str:
    """Returns how a reduction combines elements: "SUM", "MAX" or "MIN"."""
    return operation._reduction_fn_string


def output_gradients(operation: mtf.GenericGradOperation) -> list[mtf.Tensor]:
    """Returns those inputs of a gradient operation that are gradients of the loss.

    The gradient operation has one such input for each output of the forward operation, and they are
    its last inputs.
    """
    return operation._grad_ys


def custom_gradient_results(operation: mtf.CustomGradientOperation) -> list[mtf.Tensor]:
    """Returns the tensors that an operation with a custom gradient returns unchanged as outputs."""
    return operation._fn_outputs


class LoopPart(NamedTuple):
    """The condition or the body of an `mtf.while_loop`.

    Attributes:
      inputs: the tensors that stand for the loop's variables inside of it.
      operations: the operations of the loop, in a list of the loop; they are in no graph's list.
      outputs: the tensors that the condition or the body returns. The outputs after the first
        `len(inputs)` are accumulators, which are summed over the iterations.
    """

    inputs: list[mtf.Tensor]
    operations: list[mtf.Operation]
    outputs: list[mtf.Tensor]


def loop_condition(operation: mtf.WhileLoopOperation) -> LoopPart:
    """Returns the condition of a loop; its only output says whether another iteration follows."""
    return LoopPart(operation._cond_inputs, operation._cond_ops, [operation._cond_output])


def loop_body(operation: mtf.WhileLoopOperation) -> LoopPart:
    """Returns the body of a loop."""
    return LoopPart(operation._body_inputs, operation._body_ops, list(operation._body_outputs))


def computed_from(tensor: mtf.Tensor) -> list[mtf.Tensor]:
    """Returns the tensors that a tensor is directly computed from: its operation's inputs.

    For an output of a loop, the result has only the output of the loop's body at the same position.
    """
    operation = tensor.operation
    if isinstance(operation, mtf.WhileLoopOperation) and tensor in operation.outputs:
        return [loop_body(operation).outputs[operation.outputs.index(tensor)]]
    return operation.inputs


# A tf graph's collection of its meshes. Collections whose keys are no text are not exported.
MESHES = ("mtf_gradsync meshes",)


def mesh_impls_made() -> list[mtf.MeshImpl]:
    """Returns the `mtf.MeshImpl`s that were made in TensorFlow's default graph, oldest first."""
    return list(tf.get_collection(MESHES))


def meshes_made() -> list[tuple[mtf.Shape, mtf.LayoutRules]]:
    """Returns the shape and layout of each mesh that was made in TensorFlow's default graph.

    Meshes of equal shape and layout are listed once.
    """
    # Layout rules have no comparison of their own; their pairs are a set.
    different = {
        mesh_key(impl.shape, impl.layout_rules): (impl.shape, impl.layout_rules)
        for impl in mesh_impls_made()
    }
    return list(different.values())


def mesh_impls_with(shape: mtf.Shape, layout: mtf.LayoutRules) -> list[mtf.MeshImpl]:
    """Returns those of `mesh_impls_made()` that have the given shape and layout."""
    key = mesh_key(shape, layout)
    return [x for x in mesh_impls_made() if mesh_key(x.shape, x.layout_rules) == key]


def forget_mesh(graph: tf.Graph, mesh_impl: mtf.MeshImpl) -> None:
    """Removes a mesh from the record of meshes made in a graph, which `meshes_made` returns."""
    made = graph.get_collection_ref(MESHES)
    made[:] = [mesh for mesh in made if mesh is not mesh_impl]


def mesh_key(shape: mtf.Shape, layout: mtf.LayoutRules) -> tuple[str, frozenset]:
    """Returns a key that is equal for meshes with the same shape and layout."""
    return shape.to_string, frozenset(layout._pairs)


def lowered_on(lowering: mtf.Lowering, x: mtf.Tensor, mesh: mtf.Mesh) -> Any:
    """Returns the lowered value of `x` as a `LaidOutTensor` on `mesh`, and reduces a pending one.

    If `x` is on another mesh than `mesh`, that other mesh must not split `x`.
    """
    value = lowering.tensors[x].to_laid_out_tensor()
    if x.mesh is mesh:
        return value
    own, other = lowering.mesh_impl(x), lowering.mesh_impl(mesh)
    slices = list(value.tensor_list)
    if not isinstance(other, mtf.simd_mesh_impl.SimdMeshImpl):
        on_device = dict(zip(own.devices, slices))
        slices = [on_device.get(device, slices[0]) for device in other.devices]
    return other.LaidOutTensor(slices)


class Seed(mtf.Constant):
    """The ones with which `mtf.gradients` begins: the gradient of a loss with respect to itself.

    Attributes:
      scale: a factor that multiplies the ones: None, a number or an mtf scalar.
      rounded: a function that rounds a scale to a number that the dtypes of all losses can hold.
    """

    scale: Any = None
    rounded: Callable[[tf.Tensor], tf.Tensor] = staticmethod(tf.identity)

    def lower(self, lowering: mtf.Lowering) -> None:
        super().lower(lowering)
        if self.scale is None:
            return
        (ones,) = self.outputs
        value, mesh_impl = lowering.tensors[ones].to_laid_out_tensor(), lowering.mesh_impl(self)
        if isinstance(self.scale, mtf.Tensor):
            scale = lowered_on(lowering, self.scale, self.mesh)
            value = mesh_impl.slicewise(self._scaled, value, scale)
        else:
            value = mesh_impl.slicewise(lambda x: self._scaled(x, tf.constant(self.scale)), value)
        lowering.set_tensor_lowering(ones, value)

    def _scaled(self, ones: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
        return ones * tf.cast(self.rounded(scale), ones.dtype)


class GradientsCall(NamedTuple):
    """A call of `mtf.gradients` for losses, without given output gradients.

    Attributes:
      losses: the tensors that were differentiated.
      seeds: for each loss the ones that the call began with.
      outputs: the gradients that are not None.
      inputs: for each of these gradients, the tensor that the losses were differentiated by.
    """

    losses: list[mtf.Tensor]
    seeds: list[Seed]
    outputs: list[mtf.Tensor]
    inputs: list[mtf.Tensor]


# The attribute of an mtf graph for its `GradientsCall`s.
CALLS = "mtf_gradsync_gradients"


def gradients_calls(graph: mtf.Graph) -> list[GradientsCall]:
    """Returns the calls of `mtf.gradients` in a graph and its loops, the first call first."""
    return list(vars(graph).get(CALLS, ()))
