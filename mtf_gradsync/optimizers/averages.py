"""Exponential moving averages of variables, kept on the mesh."""

from __future__ import annotations

import numbers
from typing import Any, Sequence

from mtf_gradsync._tf_compat import mtf, tf


def check_decay(average: Any) -> float | None:
    """Returns the decay of a moving average, given as a number or as TensorFlow's object.

    Raises:
      ValueError: it is not between 0 and 1, or changes with the number of updates.
    """
    if average is None:
        return None
    decay = average
    if isinstance(average, tf.train.ExponentialMovingAverage):
        # Read on TensorFlow 2.12 to 2.21, which offer no other way to it.
        decay = average._decay
        if average._num_updates is not None or getattr(average, "_zero_debias", False):
            raise ValueError(
                "variable_averages with num_updates or zero_debias is not kept on a mesh; give "
                "tf.train.ExponentialMovingAverage(decay) alone."
            )
    number = isinstance(decay, numbers.Real) and not isinstance(decay, bool)
    if not number or not 0 <= decay < 1:
        raise ValueError(
            "variable_averages must be a decay from 0 up to 1 (not included), or a "
            f"tf.train.ExponentialMovingAverage, got {average!r}."
        )
    return float(decay)


def moving_average(variable: mtf.Variable) -> mtf.Variable:
    """The average of a variable, `<variable>/ExponentialMovingAverage`, which starts at its value.

    Args:
      variable: a mesh variable.

    Returns:
      An `mtf.Variable` of its shape and dtype, not trainable.
    """
    return mtf.get_variable(
        variable.mesh,
        f"{variable.name}/ExponentialMovingAverage",
        variable.shape,
        variable.dtype,
        initializer=lambda shape, dtype=None, **_: tf.cast(
            variable.get_master().initial_value, dtype
        ),
        trainable=False,
    ).operation


def updated_averages(
    decay: float, variables: Sequence[mtf.Variable], updates: Sequence[mtf.Operation]
) -> list[mtf.Operation]:
    """Moves averages towards the values that an update assigns.

    Args:
      decay: of the averages.
      variables: what is averaged.
      updates: the operations of the update; what is not assigned keeps its value.

    Returns:
      Assignments, `average -= (1 - decay) * (average - value)`.

    References:
      tf.train.ExponentialMovingAverage
    """
    new = {}
    for op in updates:
        if isinstance(op, mtf.Assign):
            new.update({v: _assigned(v, x, op.assign_fn) for v, x in zip(op.variables, op.inputs)})
    assignments = []
    for variable in variables:
        average, value = moving_average(variable), new.get(variable, variable.value)
        moved = average.value - (average.value - value) * (1 - decay)
        assignments.append(mtf.assign(average, moved))
    return variables[0].graph.combine_assignments(assignments) if variables else []


def _assigned(variable: mtf.Variable, value: mtf.Tensor, assign_fn: Any) -> mtf.Tensor:
    """What a variable holds after an assignment."""
    if assign_fn is mtf.assign_slice:
        return value
    if assign_fn is mtf.assign_add_slice:
        return variable.value + value
    if assign_fn is mtf.assign_sub_slice:
        return variable.value - value
    raise ValueError(
        f"The average of {variable.name!r} cannot follow an update that assigns by {assign_fn!r}; "
        "Mesh-TensorFlow's assign, assign_add and assign_sub can be followed."
    )
