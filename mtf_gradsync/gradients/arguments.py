"""Scalar arguments that a program gives as tensors or variables, checked in every step."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from mtf_gradsync._private.libraries import TF_VALUES, mtf, tf
from mtf_gradsync._private.mesh_tensorflow import give_outputs
from mtf_gradsync._private.tensorflow import in_loop_or_branch
from mtf_gradsync.gradients.stage import on_mesh
from mtf_gradsync.mesh.axes import is_simd
from mtf_gradsync.step import PlanPart, StepPlan, Watched


def is_tensor(value: Any) -> bool:
    """Returns whether a value is a tensor or variable, Mesh-TF's or TensorFlow's."""
    return isinstance(value, (mtf.Tensor, mtf.Variable, *TF_VALUES))


def is_scalar(value: Any) -> bool:
    """Returns whether a value is a tensor or variable without dimensions."""
    return is_tensor(value) and value.shape.ndims == 0


class Bounds(NamedTuple):
    """What an argument has to be.

    Attributes:
      least: its least value.
      below: what it is less than; None if it may be infinite.
    """

    least: float
    below: float | None = None

    def __str__(self) -> str:
        if self.below is None:
            return f"{self.least:g} or more"
        if self.below == np.inf:
            return f"finite and {self.least:g} or more"
        return f"from {self.least:g} up to {self.below:g} (not included)"

    def hold(self, x: Any) -> Any:
        """Whether a number, an array or a tf tensor is within them; a NaN is not."""
        is_right = x >= self.least
        return is_right if self.below is None else is_right & (x < self.below)


def within(value: Any, dtype: tf.DType) -> tf.Tensor:
    """Casts a tensor; a whole number that another integer dtype does not hold is its largest."""
    value = tf.convert_to_tensor(value)
    both = value.dtype.is_integer and dtype.is_integer
    return tf.saturate_cast(value, dtype) if both else tf.cast(value, dtype)


def scalar_of_step(
    value: Any, mesh: mtf.Mesh, dtype: tf.DType, argument: str, owner: str, bounds: Bounds
) -> mtf.Tensor:
    """Returns a scalar tensor or variable on a mesh, which is checked in every step.

    A value that is out of bounds is an error of the step, which names owner, argument and value.
    Where nobody looks at what a program tells (TensorFlow's own TPU runtime; the body of a loop),
    the value counts as NaN, or as the least one if it is a whole number.
    """
    plan = StepPlan.of(mesh.graph)
    scalars, key = plan.part(_CheckedScalars), (id(value), mesh, dtype, argument, owner)
    _, known = scalars.made.get(key, (None, None))
    if known is not None and known.operation in mesh.graph.operations:
        return known
    given, value = value, value.value if isinstance(value, mtf.Variable) else value
    with plan.outside_of_branches([value] if isinstance(value, mtf.Tensor) else ()):
        if not isinstance(value, mtf.Tensor):
            value = mtf.import_tf_tensor(mesh, within(value, dtype), mtf.Shape([]))
        if value.dtype != dtype:
            value = mtf.cwise(lambda x: within(x, dtype), [value], dtype)
        checked = _CheckedScalar(on_mesh(value, mesh), f"{owner}: {argument}", bounds).outputs[0]
        if not plan.is_in_branch:
            scalars.made = {**scalars.made, key: (given, checked)}
    return checked


class _CheckedScalars(PlanPart):
    """The checked scalars of a graph, each made once: by whose and which they are."""

    made: Mapping[Any, tuple[Any, mtf.Tensor]] = {}  # an object keeps its id as long as it lives


class _CheckedScalar(Watched):
    """A scalar that is the same on all processors, within bounds."""

    def __init__(self, value: mtf.Tensor, argument: str, bounds: Bounds):
        super().__init__([], [value], [], [], "checked_argument")
        self._bounds, self._text = bounds, f"{argument} must be {bounds}, got"
        give_outputs(self, [mtf.Tensor(self, value.shape, value.dtype)])

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        mesh_impl, dtype = lowering.mesh_impl(self), self.inputs[0].dtype
        value = lowering.tensors[self.inputs[0]].to_laid_out_tensor()
        if not is_simd(mesh_impl):
            first = value.all_slices[0]
            check = tf.raw_ops.Assert(condition=self._bounds.hold(first), data=[self._text, first])
            with tf.control_dependencies([check]):
                value = mesh_impl.slicewise(tf.identity, value)
        else:
            self.can_be_told = self.can_be_told and not in_loop_or_branch(tf.get_default_graph())
            self.note_lowering(lowering)
            other = self._bounds.least if dtype.is_integer else np.nan

            def checked(x: tf.Tensor) -> tf.Tensor:
                return tf.where_v2(self._bounds.hold(x), x, tf.cast(other, x.dtype))

            value = mesh_impl.slicewise(checked, value)
        lowering.set_tensor_lowering(self.outputs[0], value)

    def apart(self, told: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """See `Watched`."""
        return [], [told.view(np.float32)[0]]

    def is_due(self, before: Sequence[Any] | None, now: Sequence[Any]) -> bool:
        """See `Watched`."""
        return bool(now) and not self._bounds.hold(now[0])

    def find(
        self, before: Sequence[Any] | None, now: Sequence[Any], records: Sequence[Any]
    ) -> list[Any]:
        """See `Watched`."""
        return [ValueError(f"{self._text} {now[0]:g}.")]

    def _lowered(self, lowering: mtf.Lowering, tensors: Sequence[mtf.Tensor]) -> list[tf.Tensor]:
        return [tf.cast(x, tf.float32) for x in super()._lowered(lowering, tensors)]
