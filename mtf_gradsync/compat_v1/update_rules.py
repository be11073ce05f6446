"""The update rules of optimizers of `tf.compat.v1.train`, as functions of single elements."""

from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple, Sequence

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.tensorflow import hyperparameters

# Hyperparameters and the like by name.
Scalars = Mapping[str, Any]
Step = Callable[[tf.Tensor, Any, Sequence[tf.Tensor], Scalars], "tuple[tf.Tensor, list[tf.Tensor]]"]


class Slot(NamedTuple):
    """A variable that an optimizer keeps for each variable that it updates.

    Attributes:
      key: the slot's name in ``get_slot``.
      name: the end of the name of the slot's variable, unless that name is taken.
      initial: the number that the slot begins with.
    """

    key: str
    name: str
    initial: Any = 0.0


class Rule(NamedTuple):
    """The update rule of an optimizer.

    Attributes:
      step: a function that computes an update element by element. It is called as `step(gradient,
        variable, slots, scalars)`. The first three are tf tensors of one shape, a core's slices.
        The variable is None if `reads_variable` is false, and slots are in the order of `slots`. It
        returns the change, which the caller subtracts from the variable, and a list of new slots.
      slots: the slots of each variable, in the order in which TensorFlow makes them.
      scalars: the hyperparameters that `step` is called with, numbers or scalar tensors by name.
      powers: pairs (name, base) of scalar variables that each update multiplies by base: Adam's
        powers of beta1 and beta2.
      with_powers: if there are powers, a function that returns the scalars for `step`. It is called
        with `scalars` and with the powers before the update, float32 mtf scalars by name.
      reads_variable: whether `step` needs the variable.
      replaces: whether `step` returns the new value of the variable in place of the change.
    """

    step: Step
    slots: tuple[Slot, ...]
    scalars: dict[str, Any]
    powers: tuple[tuple[str, Any], ...] = ()
    with_powers: Callable[[Scalars, Scalars], Scalars] | None = None
    reads_variable: bool = False
    replaces: bool = False


def rule_of(optimizer: tf.train.Optimizer, call: bool = True) -> Rule:
    """Returns the update rule of an optimizer whose class is in `RULES`.

    `call` says whether hyperparameters that are functions are called, so that the rule has their
    values.
    """
    # TensorFlow makes float32 of them before it computes, 1 - beta for example.
    given = {
        k: float(np.float32(v)) if isinstance(v, (float, np.floating)) else v
        for k, v in hyperparameters(optimizer, call).items()
    }
    return RULES[type(optimizer)](given, optimizer.get_name())


def _gradient_descent(given: dict[str, Any], name: str) -> Rule:
    del name

    def step(grad: Any, variable: Any, slots: Any, by: Scalars) -> Any:
        return grad * by["learning_rate"], []

    return Rule(step, (), given)


def _momentum(given: dict[str, Any], name: str) -> Rule:
    use_nesterov = given.pop("use_nesterov")

    def step(grad: Any, variable: Any, slots: Any, by: Scalars) -> Any:
        velocity = slots[0] * by["momentum"] + grad
        rate = by["learning_rate"]
        if use_nesterov:
            return grad * rate + velocity * by["momentum"] * rate, [velocity]
        return velocity * rate, [velocity]

    return Rule(step, (Slot("momentum", name),), given)


def _adagrad(given: dict[str, Any], name: str) -> Rule:
    initial = given.pop("initial_accumulator_value")

    def step(grad: Any, variable: Any, slots: Any, by: Scalars) -> Any:
        squares = slots[0] + tf.square(grad)
        return grad * by["learning_rate"] * tf.math.rsqrt(squares), [squares]

    return Rule(step, (Slot("accumulator", name, initial),), given)


def _adam(given: dict[str, Any], name: str) -> Rule:
    def rate(by: Scalars, powers: Scalars) -> Scalars:
        unbiased = mtf.sqrt(1.0 - powers["beta2_power"]) / (1.0 - powers["beta1_power"])
        return {**by, "learning_rate": unbiased * by["learning_rate"]}

    def step(grad: Any, variable: Any, slots: Any, by: Scalars) -> Any:
        mean = slots[0] + (grad - slots[0]) * (1.0 - by["beta1"])
        squares = slots[1] + (tf.square(grad) - slots[1]) * (1.0 - by["beta2"])
        return mean * by["learning_rate"] / (tf.sqrt(squares) + by["epsilon"]), [mean, squares]

    powers = (("beta1_power", given["beta1"]), ("beta2_power", given["beta2"]))
    return Rule(step, (Slot("m", name), Slot("v", name)), given, powers, rate)


def _rms_prop(given: dict[str, Any], name: str) -> Rule:
    centered = given.pop("centered")

    def step(grad: Any, variable: Any, slots: Any, by: Scalars) -> Any:
        *means, velocity = slots
        means[0] += (tf.square(grad) - means[0]) * (1.0 - by["decay"])
        variance = means[0]
        if centered:
            means[1] += (grad - means[1]) * (1.0 - by["decay"])
            variance -= tf.square(means[1])
        scaled = grad * by["learning_rate"] * tf.math.rsqrt(variance + by["epsilon"])
        velocity = velocity * by["momentum"] + scaled
        return velocity, [*means, velocity]

    mean = (Slot("mg", name),) if centered else ()
    return Rule(step, (Slot("rms", name, 1.0), *mean, Slot("momentum", name)), given)


def _adadelta(given: dict[str, Any], name: str) -> Rule:
    def step(grad: Any, variable: Any, slots: Any, by: Scalars) -> Any:
        rho, epsilon = by["rho"], by["epsilon"]
        squares = slots[0] * rho + tf.square(grad) * (1.0 - rho)
        update = tf.sqrt(slots[1] + epsilon) * tf.math.rsqrt(squares + epsilon) * grad
        updates = slots[1] * rho + tf.square(update) * (1.0 - rho)
        return update * by["learning_rate"], [squares, updates]

    return Rule(step, (Slot("accum", name), Slot("accum_update", name)), given)


def _ftrl(given: dict[str, Any], name: str) -> Rule:
    initial = given.pop("initial_accumulator_value")
    slots = (
        Slot("accum", given.pop("accum_name") or name, initial),
        Slot("linear", given.pop("linear_name") or name),
    )

    def step(grad: Any, variable: Any, slots: Any, by: Scalars) -> Any:
        rate, power, l1 = by["learning_rate"], -by["learning_rate_power"], by["l1"]
        squares = slots[0] + tf.square(grad)
        learned = tf.pow(squares, power) - tf.pow(slots[0], power)
        shrunk = grad + 2.0 * by["l2_shrinkage"] * variable
        linear = slots[1] + shrunk - learned / rate * variable
        l2 = by["l2"] + by["beta"] / (2.0 * rate)
        quadratic = tf.pow(squares, power) / rate + 2.0 * l2
        value = (tf.sign(linear) * l1 - linear) / quadratic
        return tf.where(tf.abs(linear) > l1, value, tf.zeros_like(value)), [squares, linear]

    return Rule(step, slots, given, reads_variable=True, replaces=True)


RULES: dict[type, Callable[[dict[str, Any], str], Rule]] = {
    tf.train.GradientDescentOptimizer: _gradient_descent,
    tf.train.MomentumOptimizer: _momentum,
    tf.train.AdagradOptimizer: _adagrad,
    tf.train.AdamOptimizer: _adam,
    tf.train.RMSPropOptimizer: _rms_prop,
    tf.train.AdadeltaOptimizer: _adadelta,
    tf.train.FtrlOptimizer: _ftrl,
}
