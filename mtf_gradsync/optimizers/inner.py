"""InnerOptimizer: an optimizer of this package that wrappers, and programs, use as Mesh-TF's."""

from __future__ import annotations

import functools
from typing import Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients.arguments import check_grads_and_variables
from mtf_gradsync.optimizers.state.slots import check_bare_update
from mtf_gradsync.step import gated_update


class InnerOptimizer(mtf.optimize.Optimizer):
    """Updates each variable by itself; a subclass has `_update`, and `_check` where it needs one.

    Updates wait until all gradients exist and all variables are read, without a wrapper, too.
    """

    def apply_grads(
        self, grads: Sequence[mtf.Tensor | None], variables: Sequence[mtf.Variable]
    ) -> list[mtf.Operation]:
        """Makes the updates of variables, which wait until all of them are read.

        Args:
          grads: their gradients, None for no update.
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
        """Raises ValueError for a variable that the optimizer does not update."""

    def _update(self, grad: mtf.Tensor, var: mtf.Variable) -> list[mtf.Operation]:
        """Makes the assignments of a variable and its slots."""
        raise NotImplementedError


def wide_dtype(var: mtf.Variable) -> tf.DType:
    """Returns the dtype of a variable's update and slots: float32 at least."""
    return var.slice_dtype if var.slice_dtype.size > 4 else tf.float32


def slot(var: mtf.Variable, name: str, dtype: tf.DType) -> mtf.Tensor:
    """Makes a slot of zeros with the shape of its variable."""
    name, zeros = f"{var.name}/{name}", tf.zeros_initializer()
    return mtf.get_variable(var.mesh, name, var.shape, dtype, initializer=zeros, trainable=False)
