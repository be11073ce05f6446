"""Sessions, optimizers and TPU programs of TensorFlow."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Callable, Iterator, NamedTuple, Sequence

from mtf_gradsync._private.libraries import tf


def variables_of_saver(saver: tf.train.Saver) -> set[str] | None:
    """Returns the names of a saver's variables; None if none were given, or by a SaverDef."""
    given = saver._var_list
    if given is None:
        return None
    variables = given.values() if isinstance(given, dict) else given
    return {v.op.name for v in variables if hasattr(v, "op")}


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


def initializer_of(variable: tf.Variable) -> tuple[Any, Any]:
    """Returns the operation that initializes a variable, and its initial value."""
    return variable.initializer, variable._initial_value


def give_initializer(variable: tf.Variable, initializer: tuple[Any, Any]) -> None:
    """Gives a variable what `initializer_of` has returned, as `init_from_checkpoint` does."""
    variable._initializer_op, variable._initial_value = initializer


def checkpoint_initializers() -> list[Any]:
    """Returns the modules of which programs and `tf.train.warm_start` take init_from_checkpoint."""
    return [tf.train, sys.modules[tf.train.init_from_checkpoint.__module__]]


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


#: The attribute that says which TPU program an operation belongs to. TensorFlow 2.12 to 2.21.
TPU_PROGRAM_ATTR = "_tpu_replicate"
#: The attribute that names the group of sums that an operation is one of.
TOGETHER_ATTR = "_mtf_gradsync_together"


@contextlib.contextmanager
def summed_together() -> Iterator[None]:
    """Marks the sums over cores that are made inside as one group, under a name of its own."""
    graph = tf.get_default_graph()
    name = graph.unique_name("summed_together").encode()
    with graph._attr_scope({TOGETHER_ATTR: tf.AttrValue(s=name)}):
        yield
