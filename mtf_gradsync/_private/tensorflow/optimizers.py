"""Optimizers of tf.compat.v1, moving averages, and the shards that they know of."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

from mtf_gradsync._private.libraries import tf


class MovingAverageSettings(NamedTuple):
    """How a `tf.train.ExponentialMovingAverage` was made.

    Attributes:
      decay: a number, or a tensor.
      num_updates: what the decay is bounded by, None for nothing.
      zero_debias: whether averages start at zero and are corrected for that.
    """

    decay: Any
    num_updates: Any
    zero_debias: bool


def moving_average_settings(
    average: tf.train.ExponentialMovingAverage,
) -> MovingAverageSettings:
    """Returns the arguments of a moving average.

    Read on TensorFlow 2.12 to 2.21.
    """
    return MovingAverageSettings(average._decay, average._num_updates, average._zero_debias)


# What each of them was made with, by the attribute that holds it.
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
    """What an optimizer of ``tf.compat.v1.train`` was made with.

    Read on TensorFlow 2.12 to 2.21.

    Args:
      optimizer: of one of the seven classes itself, not of a class of a user's.
      call: whether functions are called; else they are in the result.

    Returns:
      Values (numbers, tensors, names or None) by the names of arguments.
    """
    attributes = _HYPERPARAMETERS[type(optimizer).__name__]
    found = {name: getattr(optimizer, attribute) for name, attribute in attributes.items()}
    return {name: value() if call and callable(value) else value for name, value in found.items()}


def optimizers_inside(optimizer: Any) -> list[Any]:
    """An optimizer of ``tf.compat.v1`` and those that it hands gradients on to, outermost first.

    Read on TensorFlow 2.12 to 2.21: wrappers keep the one inside as ``_opt`` or ``_optimizer``.
    """
    found: list[Any] = []
    while optimizer is not None and optimizer not in found:
        found.append(optimizer)
        optimizer = getattr(optimizer, "_opt", None) or getattr(optimizer, "_optimizer", None)
    return found


def create_slots(optimizer: tf.train.Optimizer, variables: Sequence[Any]) -> None:
    """Makes the slots of an optimizer, which it makes else when gradients are applied first.

    Read on TensorFlow 2.12 to 2.21.

    Args:
      optimizer: of ``tf.compat.v1.train``; one that hands gradients on to another has no own.
      variables: what it is going to update.
    """
    for inside in optimizers_inside(optimizer):
        with tf.init_scope():
            inside._create_slots(variables)


def number_of_tpu_shards() -> int | None:
    """Returns how many shards the TPU program has that is being built; None outside of any.

    Read on TensorFlow 2.12 to 2.21.
    """
    from tensorflow.python.tpu import tpu_function

    return tpu_function.get_tpu_context().number_of_shards
