"""AdamWOptimizer, and the base class of optimizers that update variables themselves."""

from __future__ import annotations

import functools
import math
import re
from typing import Any, Sequence

from mtf_gradsync._common import check_number, elements
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.patches import late_configurable
from mtf_gradsync.gradients.arguments import check_grads_and_variables, check_rate, rate_of_step
from mtf_gradsync.gradients.rounding import (
    NEAREST,
    STOCHASTIC,
    assign,
    check_not_float16,
    check_rounding,
    subtract,
    warn_if_nothing_is_rounded,
)
from mtf_gradsync.optimizers.slots import record_bare_update
from mtf_gradsync.optimizers.state import named_state
from mtf_gradsync.step.writes import gated_update


class InnerOptimizer(mtf.optimize.Optimizer):
    """The base class of optimizers that update each variable by itself.

    A subclass defines the method `_update`, and can extend the method `check_variable`. Updates
    wait until all gradients are computed and all variables are read, also if there is no wrapper.

    Attributes:
      rounding: how new values of bfloat16 variables and slots are rounded, "nearest" or
        "stochastic".
      slot_dtype: the dtype of slots; None for float32, or the variable's dtype if that is wider.
    """

    rounding: str = NEAREST
    slot_dtype: tf.DType | None = None

    def _set_rounding(self, rounding: Any, slot_dtype: Any) -> None:
        """Sets the attributes `rounding` and `slot_dtype`, for the constructor of a subclass.

        Raises ValueError for wrong values: `rounding` must be "nearest" or "stochastic", and
        `slot_dtype` None, tf.float32 or tf.bfloat16. The slot dtype tf.bfloat16 needs the rounding
        "stochastic".
        """
        self.rounding = check_rounding(rounding)
        self.slot_dtype = _checked_slot_dtype(slot_dtype)
        if self.slot_dtype == tf.bfloat16 and self.rounding != STOCHASTIC:
            raise ValueError(
                f"slot_dtype=bfloat16 needs rounding={STOCHASTIC!r}, got {self.rounding!r}: a "
                "mean that decays slowly, rounded to the nearest bfloat16 number, does not change "
                "(0.999 x is rounded to x)."
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
                self.check_variable(variable)
        if self.rounding == STOCHASTIC and variables:
            dtypes = {self.slot_dtype, *(v.slice_dtype for v in variables)}
            warn_if_nothing_is_rounded(type(self).__name__, dtypes)
        updates = gated_update(functools.partial(super().apply_grads, grads, variables), grads)
        record_bare_update(self, updates, variables)
        return updates

    def apply_grad(self, grad: mtf.Tensor | None, var: mtf.Variable) -> list[mtf.Operation]:
        """Makes the update of the variable `var` by its reduced gradient `grad`.

        Returns the mtf operations of the update; an empty list if the gradient is None.
        """
        if grad is None:
            return []
        self.check_variable(var)
        return gated_update(functools.partial(self._update, grad, var), [grad])

    def check_variable(self, var: mtf.Variable) -> None:
        """Raises ValueError for a variable that the optimizer cannot update.

        This base class raises the error if `rounding` is "stochastic" and the variable `var` is
        stored or read in float16. Subclasses can add checks.
        """
        if self.rounding == STOCHASTIC:
            check_not_float16(type(self).__name__, var)

    def _update(self, grad: mtf.Tensor, var: mtf.Variable) -> list[mtf.Operation]:
        """Returns the operations that assign new values to a variable and its slots.

        A subclass defines this method. `grad` is the reduced gradient, of the variable's shape.
        `apply_grads` makes the returned operations wait until all variables are read.
        """
        raise NotImplementedError

    def _make_slot(self, var: mtf.Variable, name: str) -> mtf.Variable:
        """Makes the slot `<var>/<name>`, which begins with zeros and has the variable's shape."""
        name, dtype = f"{var.name}/{name}", self.slot_dtype or wide_dtype(var)
        zeros = tf.zeros_initializer()
        return mtf.get_variable(
            var.mesh, name, var.shape, dtype, initializer=zeros, trainable=False
        ).operation

    def _write(
        self,
        var: mtf.Variable,
        change: mtf.Tensor,
        slots: dict[mtf.Variable, mtf.Tensor],
        count: mtf.Tensor | None,
    ) -> list[mtf.Operation]:
        """Makes the operations that subtract a change from a variable and assign its slots.

        Args:
          var: the variable.
          change: what is subtracted from it, a tensor of the variable's shape.
          slots: the new value of each slot.
          count: the number of the update, an integer scalar, from which the random numbers for
            stochastic rounding are made. None rounds to nearest.
        """
        if count is None or self.rounding == NEAREST:
            return [mtf.assign_sub(var, change), *(mtf.assign(s, x) for s, x in slots.items())]
        return [subtract(var, change, count), *(assign(s, x, count) for s, x in slots.items())]


@late_configurable(module="mtf_gradsync")
class AdamWOptimizer(InnerOptimizer):
    """Adam with bias correction and decoupled weight decay, on mesh variables.

    Update number t of a variable, counted from 1, computes:

        m = beta_1 * m + (1 - beta_1) * gradient
        v = beta_2 * v + (1 - beta_2) * gradient^2
        step = (m / (1 - beta_1^t)) / (sqrt(v / (1 - beta_2^t)) + epsilon)
        variable -= learning_rate * (step + weight_decay_rate * variable)

    Arguments are named as those of `mtf.optimize.AdamWeightDecayOptimizer`, which has no bias
    correction: the first steps of that optimizer are (1 - beta_1) / sqrt(1 - beta_2) times as large
    as those of `AdamWOptimizer` (3.2 times with the default betas). `AdamWOptimizer` works inside
    every wrapper, and without a wrapper.

    The slots of a variable are `<variable>/adam_m`, `<variable>/adam_v` and `<variable>/adam_t`.
    adam_m and adam_v are laid out like the variable, and are at least float32 (or as `slot_dtype`
    says). adam_t is the int32 number of updates of the variable. adam_m and adam_v have the names
    and values of `AdamWeightDecayOptimizer`, so that checkpoints of that optimizer can be restored:
    t is then the number of updates that the checkpoint counts. If the checkpoint has no count of
    updates, there is no bias correction.

    Examples:
      >>> print(gs.describe(gs.ClipByGlobalNormOptimizer(gs.AdamWOptimizer(0.001), 1.0)))
      every step  reduce over the replica axes: fused  (ClipByGlobalNormOptimizer)
                  clip to a global norm of 1           (ClipByGlobalNormOptimizer)
                  update by AdamW

    References:
      Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2;
      `optax.adamw`
    """

    def __init__(
        self,
        learning_rate: Any,
        weight_decay_rate: float = 0.01,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        exclude_from_weight_decay: str | Sequence[str] | None = None,
        rounding: str = NEAREST,
        slot_dtype: tf.DType | None = None,
    ):
        """Sets the learning rate, the weight decay and Adam's constants.

        Args:
          learning_rate: a number of 0 or more, or a scalar tf or mtf tensor or variable, such as a
            schedule of `get_update_step`, which is checked in each step.
          weight_decay_rate: the weight decay, 0 or more: in an update a variable loses this part
            of its value, times the learning rate. 0 is Adam.
          beta_1: decay of the mean of gradients, from 0 up to 1 (not included).
          beta_2: decay of the mean of squares of gradients, from 0 up to 1 (not included).
          epsilon: a number added to the square root, 0 or more.
          exclude_from_weight_decay: regular expressions; variables whose name matches one
            (`re.search`) do not decay. None excludes no variable.
          rounding: how new values of variables and slots in bfloat16 are rounded: to "nearest", or
            "stochastic". Stochastic rounding goes up or down by chance and does not change the
            mean, so that small changes are not lost.
          slot_dtype: dtype of the slots. None takes float32, or the variable's dtype if that is
            wider; tf.bfloat16 needs rounding="stochastic".

        Raises:
          TypeError: learning_rate is no number and no scalar tensor, or an expression no string.
          ValueError: an argument is out of range, or no valid regular expression.
        """
        self.learning_rate = check_rate(learning_rate)
        what, beta = "a number from 0", "a number from 0 up to 1 (not included)"
        self.weight_decay_rate = check_number("weight_decay_rate", weight_decay_rate, what)
        self.beta_1 = check_number("beta_1", beta_1, beta, below=1.0)
        self.beta_2 = check_number("beta_2", beta_2, beta, below=1.0)
        self.epsilon = check_number("epsilon", epsilon, what)
        self._set_rounding(rounding, slot_dtype)
        self.exclude_from_weight_decay = _checked_patterns(exclude_from_weight_decay)

    def _update(self, grad: mtf.Tensor, var: mtf.Variable) -> list[mtf.Operation]:
        wide = wide_dtype(var)
        m, v = self._make_slot(var, "adam_m"), self._make_slot(var, "adam_v")
        # One counter for each variable, which may be trained later than others, or apart from them.
        t = named_state(
            var.mesh,
            f"{var.name}/adam_t",
            start="global_step",
            in_scope=True,
            follows=m.name,
        )
        t.restarts_with_slots = True
        count = t.value + 1
        grad = mtf.cast(grad, wide)
        new_m = mtf.cast(m.value, wide) * self.beta_1 + grad * (1.0 - self.beta_1)
        new_v = mtf.cast(v.value, wide) * self.beta_2 + mtf.square(grad) * (1.0 - self.beta_2)
        mean = new_m / _bias_correction(self.beta_1, count, wide)
        square = new_v / _bias_correction(self.beta_2, count, wide)
        update = mean / (mtf.sqrt(square) + self.epsilon)
        if self._decays(var.name):
            update += mtf.cast(var.value, wide) * self.weight_decay_rate
        rate = rate_of_step(self.learning_rate, var.mesh, wide, type(self).__name__)
        written = self._write(var, update * rate, {m: new_m, v: new_v}, count)
        return [*written, mtf.assign(t, count)]

    def _decays(self, name: str) -> bool:
        excluded = any(re.search(x, name) for x in self.exclude_from_weight_decay)
        return self.weight_decay_rate != 0 and not excluded


def _bias_correction(beta: float, count: mtf.Tensor, dtype: tf.DType) -> mtf.Tensor:
    """Returns 1 - beta^count, by which a moving average that began with zeros is divided.

    `count` is the number of values in the moving average, an integer mtf scalar, and `beta` is the
    decay of the average. The result is an mtf scalar of `dtype`.
    """
    log_beta = math.log(beta) if beta else -math.inf
    # Not 1 - beta^count, which for a beta near 1 has few correct digits.
    return mtf.cwise(lambda t: -tf.math.expm1(tf.cast(t, dtype) * log_beta), [count], dtype)


def _checked_patterns(patterns: Any) -> tuple[str, ...]:
    given = (
        [patterns] if isinstance(patterns, str) else elements(() if patterns is None else patterns)
    )
    found = [None] if given is None else given
    for pattern in found:
        if not isinstance(pattern, str):
            raise TypeError(
                f"exclude_from_weight_decay must be regular expressions, strings, got {patterns!r}."
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"exclude_from_weight_decay has {pattern!r}, which is no regular expression: "
                f"{error}."
            ) from error
    return tuple(found)


def wide_dtype(var: mtf.Variable) -> tf.DType:
    """Returns the dtype for a variable's update and slots: the variable's, but at least float32."""
    return var.slice_dtype if var.slice_dtype.size > 4 else tf.float32


def _checked_slot_dtype(dtype: Any) -> tf.DType | None:
    if dtype is None or dtype in (tf.float32, tf.bfloat16, "float32", "bfloat16"):
        return None if dtype is None else tf.as_dtype(dtype)
    raise ValueError(f"slot_dtype must be None, tf.float32 or tf.bfloat16, got {dtype!r}.")
