"""Private state of tf.compat.v1 optimizers and moving averages, and the shards of TPU programs."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

from mtf_gradsync._private.libraries import tf


class MovingAverageSettings(NamedTuple):
    """The arguments of a `tf.train.ExponentialMovingAverage`, numbers or tensors."""

    decay: Any
    num_updates: Any
    zero_debias: bool


def moving_average_settings(
    average: tf.train.ExponentialMovingAverage,
) -> MovingAverageSettings:
    """Returns the arguments of a moving average."""
    return MovingAverageSettings(average._decay, average._num_updates, average._zero_debias)


# The constructor's arguments of each, by the attributes that hold them.
_HYPERPARAMETERS = {
    "GradientDescentOptimizer": {"learning_rate": "_learning_rate"},
    "MomentumOptimizer": {
        "learning_rate": "_learning_rate",
        "momentum": "_momentum",
        "use_nesterov": "_use_nesterov",
    },
    "AdagradOptimizer": {
        "learning_rate": "_learning_rate",
        "initial_accumulator_value": "_initial_accumulator_value",
    },
    "AdamOptimizer": {
        "learning_rate": "_lr",
        "beta1": "_beta1",
        "beta2": "_beta2",
        "epsilon": "_epsilon",
    },
    "RMSPropOptimizer": {
        "learning_rate": "_learning_rate",
        "decay": "_decay",
        "momentum": "_momentum",
        "epsilon": "_epsilon",
        "centered": "_centered",
    },
    "AdadeltaOptimizer": {"learning_rate": "_lr", "rho": "_rho", "epsilon": "_epsilon"},
    "FtrlOptimizer": {
        "learning_rate": "_learning_rate",
        "learning_rate_power": "_learning_rate_power",
        "initial_accumulator_value": "_initial_accumulator_value",
        "l1": "_l1_regularization_strength",
        "l2": "_l2_regularization_strength",
        "l2_shrinkage": "_l2_shrinkage_regularization_strength",
        "beta": "_beta",
        "accum_name": "_accum_name",
        "linear_name": "_linear_name",
    },
}


def hyperparameters(optimizer: tf.train.Optimizer, call: bool = True) -> dict[str, Any]:
    """Returns the constructor's arguments, by name, of an optimizer of `tf.compat.v1.train`.

    It is of one of the seven classes, not of a user's subclass. With `call`, arguments that are
    functions are called.
    """
    attributes = _HYPERPARAMETERS[type(optimizer).__name__]
    found = {name: getattr(optimizer, attribute) for name, attribute in attributes.items()}
    return {name: value() if call and callable(value) else value for name, value in found.items()}


# No stack of optimizers has as many; an object that makes up its attributes has no end.
_MOST_INSIDE = 100


def each_inside(optimizer: Any, inside: Callable[[Any], Any]) -> list[Any]:
    """Returns an optimizer and those inside it, outermost first.

    `inside` gives the optimizer directly inside one, or None. Raises a ValueError if that has no
    end, because an optimizer contains itself.
    """
    found: list[Any] = []
    while optimizer is not None:
        again = next((i for i, one in enumerate(found) if one is optimizer), None)
        found.append(optimizer)
        if again is not None or len(found) > _MOST_INSIDE:
            shown = found[-3:] if again is None else found[again:]
            stack = " > ".join(type(one).__name__ for one in shown)
            raise ValueError(
                f"An optimizer contains itself: {stack} (each is around the next one). A stack has "
                "to end with an optimizer that has no other one inside."
            )
        optimizer = inside(optimizer)
    return found


def optimizers_inside(optimizer: Any) -> list[Any]:
    """Returns an optimizer of ``tf.compat.v1`` and all those inside it, outermost first."""
    return each_inside(
        optimizer, lambda o: getattr(o, "_opt", None) or getattr(o, "_optimizer", None)
    )


def create_slots(optimizer: tf.train.Optimizer, variables: Sequence[Any]) -> None:
    """Makes the slots of an optimizer, which otherwise come with its first update."""
    for inside in optimizers_inside(optimizer):
        with tf.init_scope():
            inside._create_slots(variables)


def number_of_tpu_shards() -> int | None:
    """Returns how many shards the TPU program has that is being built; None outside of any."""
    from tensorflow.python.tpu import tpu_function

    return tpu_function.get_tpu_context().number_of_shards
