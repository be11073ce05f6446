"""Exponential moving averages of variables, kept on the mesh."""

from __future__ import annotations

import numbers
from typing import Any, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.optimizers.state.variables import root_scope, unstacked


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
      An `mtf.Variable` of its shape, not trainable. Its value has the dtype of the variable's, and
      can stand in for it; what it holds is at least float32, as small changes would be lost.
    """
    kept = variable.slice_dtype if variable.slice_dtype.size >= 4 else tf.float32
    # By its whole name, so that it is the same in any scope.
    with root_scope():
        return mtf.get_variable(
            variable.mesh,
            f"{variable.name}/ExponentialMovingAverage",
            variable.shape,
            unstacked(kept, variable.activation_dtype),
            initializer=lambda shape, dtype=None, **_: tf.cast(
                variable.get_master().initial_value, dtype
            ),
            trainable=False,
        ).operation


class MovingAverages(mtf.Operation):
    """Moves averages towards what variables hold after an update, to all of its bits."""

    def __init__(
        self,
        decay: float,
        variables: Sequence[mtf.Variable],
        averages: Sequence[mtf.Variable],
        updates: Sequence[mtf.Operation],
    ):
        """Adds `average -= (1 - decay) * (average - variable)`.

        Args:
          decay: of the averages.
          variables: what is averaged, at least one.
          averages: their averages.
          updates: operations of the update, lowered before this one, which it waits for.

        References:
          tf.train.ExponentialMovingAverage
        """
        super().__init__([], mesh=variables[0].mesh, name="moving_averages")
        self._decay = decay
        self._pairs = list(zip(averages, variables))
        self._updates = list(updates)

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""

        def move(variable: Any, average: Any, value: tf.Tensor) -> tf.Operation:
            now = tf.convert_to_tensor(average)
            return tf.assign(average, now - (now - tf.cast(value, now.dtype)) * (1 - self._decay))

        with tf.control_dependencies([lowering.operations[op] for op in self._updates]):
            moved = [
                lowering.variables[average].assign_to_slices(move, _held(variable, lowering))
                for average, variable in self._pairs
            ]
        lowering.operations[self] = tf.group(*moved)


def _held(variable: mtf.Variable, lowering: mtf.Lowering) -> list[tf.Tensor]:
    """What the slices of a variable hold, in their own dtype; autostack may have stacked them."""
    number = None
    holder = variable
    if variable not in lowering.variables:
        holder = next(
            v
            for v in lowering.variables
            if isinstance(v, mtf.StackedVariable)
            and v.mesh is variable.mesh
            and variable.name in v.original_names
        )
        number = holder.original_names.index(variable.name)

    def read(x: Any) -> tf.Tensor:
        return tf.convert_to_tensor(x) if number is None else tf.convert_to_tensor(x)[number]

    slices = lowering.variables[holder].laid_out_tensor
    return lowering.mesh_impl(variable).slicewise(read, slices).to_laid_out_tensor().all_slices
