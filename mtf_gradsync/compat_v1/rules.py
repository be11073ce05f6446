"""Checks of arguments of the TensorFlow 1 adapter, and the update rules that it knows."""

from __future__ import annotations

from typing import (
    Any,
    Callable,
    Iterable,
    Literal,
    Mapping,
    NamedTuple,
    NoReturn,
    Protocol,
    Sequence,
    Union,
)

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.tensorflow import hyperparameters, optimizers_inside


class AppliesGradients(Protocol):
    """An optimizer that updates mesh variables, such as one of `mtf.optimize`."""

    def apply_grads(self, grads: Any, variables: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Updates variables by a gradient for each; returns a list of mtf operations."""


class V1Optimizer(Protocol):
    """The methods of an optimizer of `tf.compat.v1.train` that wrappers call."""

    def compute_gradients(self, loss: Any, /) -> Any:
        """Returns gradients of a loss, with their variables."""

    def apply_gradients(self, grads_and_vars: Any, /) -> Any:
        """Updates variables; returns a tf operation."""


#: What a user gives a wrapper: an optimizer, or a class or factory of one.
MeshOptimizerLike = Union[AppliesGradients, Callable[..., AppliesGradients]]
V1OptimizerLike = Union[V1Optimizer, Callable[..., V1Optimizer]]
OptimizerLike = Union[MeshOptimizerLike, V1OptimizerLike]
#: Gets the sums of gradients and their variables; returns what takes the place of the sums.
AllReduceFn = Callable[["list[tf.Tensor]", "list[Any]"], "Sequence[tf.Tensor]"]
#: `tf.compat.v1.losses.Reduction.SUM` and `.MEAN`.
Reduction = Literal["weighted_sum", "weighted_mean"]
# The default of learning_rate arguments: None is a learning rate that pipelines pass on.
NOT_GIVEN = object()
# Where the class of tf.compat.v1.train has another name than Keras's with "Optimizer" behind.
_V1_NAMES = {"SGD": "MomentumOptimizer", "RMSprop": "RMSPropOptimizer"}


def is_v1(optimizer: Any) -> bool:
    """Returns whether an object is an optimizer of ``tf.compat.v1.train`` or of a subclass."""
    return isinstance(optimizer, tf.train.Optimizer)


def given_optimizer(opt: Any, learning_rate: Any, wrapper: str) -> Any:
    """Returns the optimizer that a user gave, made from a class or factory where opt is one.

    Args:
      opt: an optimizer with ``apply_grads``, one of ``tf.compat.v1.train``, or a class or factory
        of either.
      learning_rate: the learning rate that a class or factory is called with, or `NOT_GIVEN`.
      wrapper: name of the wrapper, for errors.

    Returns:
      The optimizer.

    Raises:
      TypeError: opt is, or makes, a Keras optimizer.
      ValueError: opt is none of these; it is a class or factory but learning_rate is not given; or
        it is an optimizer, which has its learning rate already, but learning_rate is given.
    """
    _refuse_keras(opt, wrapper)
    if not isinstance(opt, type) and _is_optimizer(opt):
        if learning_rate is not NOT_GIVEN and learning_rate is not None:
            raise ValueError(
                f"{wrapper} got the optimizer {opt!r}, which has its learning rate already, and "
                f"learning_rate={learning_rate!r}. Give a class (in gin: "
                f"`{wrapper}.opt = @AdafactorOptimizer`, without parentheses), or give no "
                "learning_rate."
            )
        return opt
    if not callable(opt) or (isinstance(opt, type) and not _is_optimizer(opt)):
        raise ValueError(
            f"opt must be an optimizer with apply_grads(grads, variables), such as one of "
            f"mtf.optimize, or a class or factory of one, got {opt!r}."
        )
    if learning_rate is NOT_GIVEN:
        raise ValueError(
            f"{wrapper} got the class or factory {opt!r} as opt: give learning_rate too, which "
            "it is called with, or give an optimizer instead."
        )
    made = opt(learning_rate=learning_rate)
    _refuse_keras(made, wrapper)
    if isinstance(made, type) or not _is_optimizer(made):
        raise ValueError(
            f"opt={opt!r} must make an optimizer with apply_grads(grads, variables), but made "
            f"{made!r}."
        )
    return made


def refuse_with_v1(opt: Any, **arguments: Any) -> None:
    """Raises ValueError if any of these arguments, for mesh optimizers only, is not None."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(
                f"{name} goes with mesh optimizers; got it with the TensorFlow optimizer {opt!r}."
            )


def _is_optimizer(opt: Any) -> bool:
    cls = opt if isinstance(opt, type) else type(opt)
    return callable(getattr(opt, "apply_grads", None)) or issubclass(cls, tf.train.Optimizer)


def _refuse_keras(opt: Any, wrapper: str) -> None:
    cls = opt if isinstance(opt, type) else type(opt)
    # Keras is not imported for this check: its classes are known by where they were defined.
    is_keras = any(
        base.__name__ in ("Optimizer", "OptimizerV2", "BaseOptimizer", "LossScaleOptimizer")
        and "keras" in base.__module__
        for base in cls.__mro__
    )
    if not is_keras:
        return
    name = _V1_NAMES.get(cls.__name__, f"{cls.__name__}Optimizer")
    name = name if hasattr(tf.train, name) else "AdamOptimizer"
    raise TypeError(
        f"{wrapper} does not work with Keras optimizers (OptimizerV2), got {opt!r}. Use a "
        "Mesh-TensorFlow optimizer, for example mtf.optimize.AdafactorOptimizer or "
        f"mtf.optimize.AdamWeightDecayOptimizer, or gs.MeshOptimizer(tf.compat.v1.train.{name}"
        f"(...)); without a mesh, tf.compat.v1.train.{name}."
    )


class OffMesh:
    """Makes an optimizer of tf.compat.v1 refuse mesh tensors and mesh variables, with a TypeError.

    Subclasses name it before TensorFlow's class, so that its methods check arguments and then call
    those of TensorFlow's class.
    """

    def compute_gradients(self, loss: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """Returns gradients by the inner optimizer; see `tf.compat.v1.train.Optimizer`."""
        self._refuse_mesh(loss, args, kwargs)
        return super().compute_gradients(loss, *args, **kwargs)  # type: ignore[misc] # TensorFlow's

    def apply_gradients(
        self, grads_and_vars: Iterable[Any], *args: Any, **kwargs: Any
    ) -> tf.Operation:
        """Applies gradients; see `tf.compat.v1.train.Optimizer`."""
        pairs = list(grads_and_vars)
        self._refuse_mesh(pairs, args, kwargs)
        return super().apply_gradients(pairs, *args, **kwargs)  # type: ignore[misc] # TensorFlow's

    @property
    def apply_grads(self) -> NoReturn:
        """Raises an AttributeError that says what to use: only mesh optimizers have this method."""
        raise AttributeError(f"{self._kind()} has no apply_grads. {self._instead()}")

    def _refuse_mesh(self, *given: Any) -> None:
        for one in tf.nest.flatten(given):
            if isinstance(one, (mtf.Tensor, mtf.Variable)):
                raise TypeError(f"{self._kind()} cannot take {one!r}. {self._instead()}")

    def _kind(self) -> str:
        return f"{type(self).__name__} around an optimizer of tf.compat.v1.train"

    def _instead(self) -> str:
        inner = type(optimizers_inside(self)[-1]).__name__
        return (
            "It updates variables of TensorFlow. To update those of a mesh, give "
            f"gs.{type(self).__name__} a mesh optimizer in place of {inner}: "
            f"gs.MeshOptimizer({inner}(...)), or one of mtf.optimize."
        )


# Hyperparameters and the like by name.
Scalars = Mapping[str, Any]
Step = Callable[[tf.Tensor, Any, Sequence[tf.Tensor], Scalars], "tuple[tf.Tensor, list[tf.Tensor]]"]


class Slot(NamedTuple):
    """A variable that an optimizer keeps beside each one that it updates.

    Attributes:
      key: its name in ``get_slot``.
      name: end of its variable's name, unless that is taken.
      initial: the number that it begins with.
    """

    key: str
    name: str
    initial: Any = 0.0


class Rule(NamedTuple):
    """The update rule of an optimizer.

    Attributes:
      step: computes an update element by element. It is called as `step(gradient, variable, slots,
        scalars)` with tf tensors of one shape, a core's slices: the variable is None if not
        `reads_variable`, and slots are in the order of `slots`. It returns the change, which the
        caller subtracts from the variable, and a list of new slots.
      slots: the slots of each variable, in the order in which TensorFlow makes them.
      scalars: the hyperparameters of the step, numbers or scalar tensors by name.
      powers: pairs (name, base) of scalar variables that are multiplied by base in each update:
        Adam's powers of beta1 and beta2.
      with_powers: if there are powers, a function of `scalars` and of the powers before the update,
        float32 mtf scalars by name, that returns the scalars for the step.
      reads_variable: whether the step is called with the variable.
      replaces: whether the step returns the variable's new value in place of the change.
    """

    step: Step
    slots: tuple[Slot, ...]
    scalars: dict[str, Any]
    powers: tuple[tuple[str, Any], ...] = ()
    with_powers: Callable[[Scalars, Scalars], Scalars] | None = None
    reads_variable: bool = False
    replaces: bool = False


def rule_of(optimizer: tf.train.Optimizer, call: bool = True) -> Rule:
    """Returns the update rule of an optimizer of a class in `RULES`.

    With `call`, functions among the hyperparameters are called for it.
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
