"""Parts of Mesh-TensorFlow without a public name that this package uses, one function each.

All were checked with Mesh-TF 0.1.21; ``tests/private/test_mesh_tensorflow.py`` has a test of each,
which fails if a version changes its meaning.
"""

from __future__ import annotations

import re
from typing import Any, Callable, NamedTuple

from mtf_gradsync._private.libraries import mtf, tf


def sum_made_by(lazy: mtf.LazyAllreduceSum) -> Any:
    """Returns the `LaidOutTensor` of a pending sum that is reduced already; None if it is not."""
    return lazy._reduced


def bfloat16_group_size(mesh_impl: mtf.MeshImpl) -> int:
    """Returns the largest group in which a SIMD mesh sums bfloat16 without a cast to float32."""
    return mesh_impl._allreduce_in_bfloat16_max_group_size


def give_outputs(operation: mtf.Operation, tensors: list[mtf.Tensor]) -> None:
    """Gives a new operation its outputs, all of whose dimensions may be split."""
    operation._outputs = tensors
    # Mesh-TF's automatic layout asks for it once inputs and outputs are known.
    operation._splittable_dims, operation._unsplittable_dims = (
        operation._initialize_all_dimensions_as_splittable()
    )


def init_replacement(replacement: mtf.Variable, variable: mtf.Variable, value: mtf.Tensor) -> None:
    """Initializes a variable, with its own value, that replaces another in an optimizer.

    The new variable has the other's name and dtypes, no master, and is in none of the graph's
    lists.
    """
    vars(replacement).update(vars(variable))
    replacement._inputs = []
    replacement._outputs = [value]


class Reshaped:
    """A variable, seen in another shape. TensorFlow takes it as a tensor and in assignments."""

    def __init__(self, variable: Any, shape: list[int]):
        self._variable = variable
        self.shape, self.dtype = tf.TensorShape(shape), variable.dtype.base_dtype
        # What stands for the slices of a SIMD mesh has no device of its own.
        self.device = getattr(variable, "device", "")

    def value(self) -> tf.Tensor:
        """Reads the variable."""
        return tf.reshape(self._variable, self.shape)

    def assign(self, value: tf.Tensor, name: str | None = None) -> Any:
        """Assigns a value of this shape; called by `tf.assign`."""
        return tf.assign(self._variable, self._as_held(value), name=name)

    def assign_add(self, value: tf.Tensor, name: str | None = None) -> Any:
        """Adds a value of this shape; called by `tf.assign_add`."""
        return tf.assign_add(self._variable, self._as_held(value), name=name)

    def assign_sub(self, value: tf.Tensor, name: str | None = None) -> Any:
        """Subtracts a value of this shape; called by `tf.assign_sub`."""
        return tf.assign_sub(self._variable, self._as_held(value), name=name)

    def _as_held(self, value: tf.Tensor) -> tf.Tensor:
        return tf.reshape(value, self._variable.shape)


def _as_tensor(x: Reshaped, dtype: Any = None, name: Any = None, as_ref: bool = False) -> Any:
    del name, as_ref
    return x.value() if dtype in (None, x.dtype) else NotImplemented


tf.register_tensor_conversion_function(Reshaped, _as_tensor)


def give_value(variable: mtf.Variable, shape: mtf.Shape) -> mtf.Tensor:
    """Gives a variable, before its lowering, a value of another shape with equal size.

    Its master, which checkpoints hold, keeps its shape. `take_over` is to make the old value the
    output of another operation.
    """
    variable._outputs = [mtf.Tensor(variable, shape, variable.activation_dtype)]
    master = variable.get_master()
    if shape.to_integer_list != master.shape.as_list():
        # Autostack needs masters that can be assigned to.
        seen = Reshaped(master, shape.to_integer_list)
        variable.get_master = lambda: seen
        variable.assign_to_master = seen.assign
    return variable._outputs[0]


def master_of(variable: mtf.Variable) -> tf.Variable:
    """Returns the tf variable that is a variable's master, in the shape of checkpoints."""
    return variable._master


def give_copy_to_slices(laid_out_variable: Any, copy: tf.Operation) -> None:
    """Sets the operation that copies a laid-out variable's master to its slices."""
    laid_out_variable._copy_master_to_slices = copy


def keep_unstacked(variable: mtf.Variable, dtype: mtf.VariableDType) -> None:
    """Gives a variable, before its lowering, a dtype that autostack leaves alone."""
    variable._dtype = dtype


def take_over(operation: mtf.Operation, tensors: list[mtf.Tensor]) -> None:
    """Makes tensors outputs of a new operation, as Mesh-TF's autostack does."""
    for tensor in tensors:
        tensor._operation = operation
    give_outputs(operation, tensors)


def reassign(
    operation: mtf.Assign, variables: list[mtf.Variable], values: list[mtf.Tensor]
) -> None:
    """Changes an assignment to other variables and values, as Mesh-TF's autostack does."""
    operation._variables, operation._inputs = list(variables), list(values)


def give_assign_fn(operation: mtf.Assign, assign_fn: Any) -> None:
    """Makes an assignment write by another function, such as `mtf.assign_slice`."""
    operation._assign_fn = assign_fn


def dims_known_by_name(optimizer: Any) -> tuple[str, ...]:
    """Returns dimensions' names that an optimizer treats differently, as Adafactor can."""
    return tuple(getattr(optimizer, "_stacked_dim_names", ()))


def patterns_of(optimizer: Any) -> dict[str, str | tuple[str, ...]]:
    """Returns the regular expressions by which an optimizer picks variables, by argument.

    A string in place of a list is returned unchanged; Mesh-TF 0.1.21 takes each of its letters.
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
    """Returns the number or tf scalar in an addition or a multiplication of all elements."""
    return operation._scalar


def reduction(operation: mtf.ReduceOperation) -> str:
    """Returns how a reduction combines elements: "SUM", "MAX" or "MIN"."""
    return operation._reduction_fn_string


def output_gradients(operation: mtf.GenericGradOperation) -> list[mtf.Tensor]:
    """Returns an operation's gradient inputs, one for each output of the forward operation.

    They are the operation's last inputs.
    """
    return operation._grad_ys


def custom_gradient_results(operation: mtf.CustomGradientOperation) -> list[mtf.Tensor]:
    """Returns the tensors that an operation with a custom gradient passes on as outputs."""
    return operation._fn_outputs


class LoopPart(NamedTuple):
    """The condition or the body of an `mtf.while_loop`.

    Attributes:
      inputs: the tensors that stand for the loop's variables in it.
      operations: the loop's own list of its operations, which stand in no graph's list.
      outputs: the returned tensors. Those past the inputs are accumulators, which are summed over
        the iterations.
    """

    inputs: list[mtf.Tensor]
    operations: list[mtf.Operation]
    outputs: list[mtf.Tensor]


def loop_condition(operation: mtf.WhileLoopOperation) -> LoopPart:
    """Returns the condition of a loop, whose only output is whether to go on."""
    return LoopPart(operation._cond_inputs, operation._cond_ops, [operation._cond_output])


def loop_body(operation: mtf.WhileLoopOperation) -> LoopPart:
    """Returns the body of a loop."""
    return LoopPart(operation._body_inputs, operation._body_ops, list(operation._body_outputs))


def computed_from(tensor: mtf.Tensor) -> list[mtf.Tensor]:
    """Returns the tensors that a tensor is computed from: for a loop's, the body's output."""
    operation = tensor.operation
    if isinstance(operation, mtf.WhileLoopOperation) and tensor in operation.outputs:
        return [loop_body(operation).outputs[operation.outputs.index(tensor)]]
    return operation.inputs


# A tf graph's collection of its meshes. Collections whose keys are no text are not exported.
MESHES = ("mtf_gradsync meshes",)


def mesh_impls_made() -> list[mtf.MeshImpl]:
    """Returns the meshes that were made in TensorFlow's default graph."""
    return list(tf.get_collection(MESHES))


def meshes_made() -> list[tuple[mtf.Shape, mtf.LayoutRules]]:
    """Returns the different meshes made in TensorFlow's default graph, as shapes and layouts."""
    # Layout rules have no comparison of their own; their pairs are a set.
    different = {
        mesh_key(impl.shape, impl.layout_rules): (impl.shape, impl.layout_rules)
        for impl in mesh_impls_made()
    }
    return list(different.values())


def forget_mesh(graph: tf.Graph, mesh_impl: mtf.MeshImpl) -> None:
    """Removes a mesh from the record of a graph."""
    made = graph.get_collection_ref(MESHES)
    made[:] = [mesh for mesh in made if mesh is not mesh_impl]


def mesh_key(shape: mtf.Shape, layout: mtf.LayoutRules) -> tuple[str, frozenset]:
    """Returns a key that is equal for meshes of one shape and layout."""
    return shape.to_string, frozenset(layout._pairs)


def lowered_on(lowering: mtf.Lowering, x: mtf.Tensor, mesh: mtf.Mesh) -> Any:
    """Returns a tensor's `LaidOutTensor` on another mesh; its own mesh must not split it."""
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
    """The gradient of a loss by itself, with which `mtf.gradients` begins: ones.

    Attributes:
      scale: the factor that multiplies the ones: None, a number or an mtf scalar.
      rounded: rounds a scale to a number that every other loss's dtype can hold.
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
    """A call of `mtf.gradients` that began with ones.

    Attributes:
      losses: the differentiated tensors.
      seeds: one for each loss.
      outputs: the gradients that are not None.
      inputs: for each gradient the tensor that it is the gradient by.
    """

    losses: list[mtf.Tensor]
    seeds: list[Seed]
    outputs: list[mtf.Tensor]
    inputs: list[mtf.Tensor]


# The attribute of an mtf graph for its `GradientsCall`s.
CALLS = "mtf_gradsync_gradients"


def gradients_calls(graph: mtf.Graph) -> list[GradientsCall]:
    """Returns the calls of `mtf.gradients` in a graph and its loops, in order."""
    return list(vars(graph).get(CALLS, ()))
