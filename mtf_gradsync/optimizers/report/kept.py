"""Values that only some steps have, kept until the next step that has them."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._scopes import root_scope
from mtf_gradsync.gradients.stage import whole_values
from mtf_gradsync.optimizers.state.variables import state_variable
from mtf_gradsync.step import Branch, values_after


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
    (held,) = values_after([variable], [keep])
    *known, has_run = mtf.unstack(held, shape.dims[0])
    return [mtf.cwise(_or_nan, [value, has_run]) for value in known]


def _or_nan(value: tf.Tensor, has_run: tf.Tensor) -> tf.Tensor:
    return tf.where_v2(has_run > 0, value, np.float32(np.nan))
