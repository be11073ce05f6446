"""InnerOptimizer: the base class of this package's optimizers that update variables themselves."""

from __future__ import annotations

import functools
from typing import Any, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients.arguments import check_grads_and_variables
from mtf_gradsync.gradients.rounding import (
    NEAREST,
    STOCHASTIC,
    check_rounded,
    check_rounding,
    tell_if_nothing_is_rounded,
)
from mtf_gradsync.optimizers.state.slots import check_bare_update
from mtf_gradsync.step import gated_update


class InnerOptimizer(mtf.optimize.Optimizer):
    """The base class of optimizers that update each variable by itself.

    A subclass defines `_update`, and can extend `_check`. Updates wait until all gradients are
    computed and all variables are read, also without a wrapper.

    Attributes:
      rounding: how new values of bfloat16 variables and slots are rounded, "nearest" or
        "stochastic".
      slot_dtype: the dtype of slots; None for float32, or the variable's dtype if that is wider.
    """

    rounding: str = NEAREST
    slot_dtype: tf.DType | None = None

    def _round(self, rounding: Any, slot_dtype: Any) -> None:
        """Sets how values are rounded; raises ValueError for a wrong argument."""
        self.rounding = check_rounding(rounding)
        self.slot_dtype = _checked_slot_dtype(slot_dtype)
        if self.slot_dtype == tf.bfloat16 and self.rounding != STOCHASTIC:
            raise ValueError(
                f"slot_dtype=bfloat16 needs rounding={STOCHASTIC!r}, got {self.rounding!r}: in it, "
                "rounded to nearest, a mean that decays slowly stands still (0.999 x is x)."
            )

    def apply_grads(
        self, grads: Sequence[mtf.Tensor | None], variables: Sequence[mtf.Variable]
    ) -> list[mtf.Operation]:
        """Makes the updates of variables, which wait until all variables are read.

        Args:
          grads: the gradients of the variables, None for no update.
          variables: the mesh variables.

        Returns:
          A list of mtf operations.

        Raises:
          TypeError: a gradient or variable has the wrong type.
          ValueError: lengths differ, a gradient has another shape or mesh than its variable, or the
            optimizer does not update such a variable.
        """
        grads, variables = check_grads_and_variables(grads, variables, same_shapes=True)
        for grad, variable in zip(grads, variables):
            if grad is not None:
                self._check(variable)
        if self.rounding == STOCHASTIC and variables:
            dtypes = {self.slot_dtype, *(v.slice_dtype for v in variables)}
            tell_if_nothing_is_rounded(type(self).__name__, dtypes)
        updates = gated_update(functools.partial(super().apply_grads, grads, variables), grads)
        check_bare_update(self, updates, variables)
        return updates

    def apply_grad(self, grad: mtf.Tensor | None, var: mtf.Variable) -> list[mtf.Operation]:
        """Makes the update of one variable, as `apply_grads` does."""
        if grad is None:
            return []
        self._check(var)
        return gated_update(functools.partial(self._update, grad, var), [grad])

    def _check(self, var: mtf.Variable) -> None:
        """Raises ValueError for a variable that the optimizer cannot update."""
        if self.rounding == STOCHASTIC:
            check_rounded(type(self).__name__, var)

    def _update(self, grad: mtf.Tensor, var: mtf.Variable) -> list[mtf.Operation]:
        """Makes the assignments of a variable and its slots."""
        raise NotImplementedError

    def _slot(self, var: mtf.Variable, name: str) -> mtf.Variable:
        """Returns a new slot `<var>/<name>` of zeros, with the variable's shape."""
        name, dtype = f"{var.name}/{name}", self.slot_dtype or wide_dtype(var)
        zeros = tf.zeros_initializer()
        return mtf.get_variable(
            var.mesh, name, var.shape, dtype, initializer=zeros, trainable=False
        ).operation


def wide_dtype(var: mtf.Variable) -> tf.DType:
    """Returns the dtype for a variable's update and slots: the variable's, but at least float32."""
    return var.slice_dtype if var.slice_dtype.size > 4 else tf.float32


def _checked_slot_dtype(dtype: Any) -> tf.DType | None:
    if dtype is None or dtype in (tf.float32, tf.bfloat16, "float32", "bfloat16"):
        return None if dtype is None else tf.as_dtype(dtype)
    raise ValueError(f"slot_dtype must be None, tf.float32 or tf.bfloat16, got {dtype!r}.")
