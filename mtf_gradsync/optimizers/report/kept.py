"""Values that only some steps have, kept until the next step that has them."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._scopes import root_scope
from mtf_gradsync.gradients.stage import StageOperation, whole_values
from mtf_gradsync.optimizers.state.variables import state_variable
from mtf_gradsync.step import Branch


class _Keep(mtf.Operation):
    """Writes scalars, and a one that says so, into a variable; part of a branch."""

    def __init__(self, values: Sequence[mtf.Tensor], variable: mtf.Variable):
        super().__init__(list(values), name="keep_reported")
        self._variable = variable

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""

        def together(*values: tf.Tensor) -> tf.Tensor:
            return tf.stack([*(tf.cast(x, tf.float32) for x in values), tf.constant(1.0)])

        def write(variable: Any, slice_variable: Any, value: tf.Tensor) -> tf.Operation:
            return tf.assign(slice_variable, value)

        values = whole_values(lowering, self.inputs)
        value = lowering.mesh_impl(self).slicewise(together, *values).to_laid_out_tensor()
        variable = lowering.variables[self._variable]
        lowering.operations[self] = tf.group(variable.assign_to_slices(write, value.all_slices))


class _Kept(StageOperation):
    """What a variable holds once the branch has run, or was skipped."""

    def __init__(self, variable: mtf.Variable, keep: _Keep):
        count = len(keep.inputs)
        shapes, dtypes = [mtf.Shape([])] * count, [tf.float32] * count
        super().__init__([variable.value], shapes, "kept_reported", dtypes)
        self._variable = variable
        self._keep = keep

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""

        def read(variable: Any) -> tuple[tf.Tensor, ...]:
            value = tf.convert_to_tensor(variable)
            known = tf.where_v2(value[-1] > 0, value, tf.fill(value.shape, np.float32(np.nan)))
            return tuple(tf.unstack(known)[:-1])

        variable = lowering.variables[self._variable].laid_out_tensor
        # The operation of a branch is the whole conditional.
        with tf.control_dependencies([lowering.operations[self._keep]]):
            values = lowering.mesh_impl(self).slicewise(read, variable)
        self.set_outputs(lowering, list(values))


def kept(values: Sequence[mtf.Tensor], branch: Branch, name: str) -> list[mtf.Tensor]:
    """Scalars of a branch as they were when it last ran.

    They are kept in a small variable that is in no checkpoint.

    Args:
      values: scalars made in the branch, at least one, the same on all processors.
      branch: the branch; its graph is not lowered yet.
      name: name of the variable, whole.

    Returns:
      A float32 scalar for each, NaN before the branch has run in this session.
    """
    mesh = values[0].mesh
    shape = mtf.anonymous_shape(mtf.Shape([mtf.Dimension("reported", len(values) + 1)]))
    with root_scope():
        variable = state_variable(mesh, name, shape, tf.float32, checkpointed=False, stacked=False)
    branch.plan.write_in_place(variable)
    keep = None

    def write() -> list[mtf.Operation]:
        nonlocal keep
        keep = _Keep(values, variable)
        return [keep]

    branch.add(write)
    return list(_Kept(variable, keep).outputs)
