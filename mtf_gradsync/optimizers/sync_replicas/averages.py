"""Exponential moving averages of variables, kept on the mesh."""

from __future__ import annotations

from typing import Any, Sequence

from mtf_gradsync._numbers import is_number
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.tensorflow import moving_average_settings
from mtf_gradsync._scopes import root_scope
from mtf_gradsync.optimizers.checks import check_variables
from mtf_gradsync.optimizers.state.restoring import note_state
from mtf_gradsync.optimizers.state.variables import unstacked

AVERAGE = "ExponentialMovingAverage"


def check_averages(
    average: Any, variables: Sequence[mtf.Variable] | None
) -> tuple[float | None, list[mtf.Variable]]:
    """Checks what is to be averaged, and how; creates nothing.

    Args:
      average: the argument variable_averages of SyncReplicasOptimizer.
      variables: its argument variables_to_average.

    Returns:
      The decay, None for no averages, and the variables.

    Raises:
      ValueError: the decay is not between 0 and 1, or changes with the number of updates; or there
        is one without variables, or the reverse.
      TypeError: something in variables is no mesh variable.
    """
    decay = _decay(average)
    if (decay is None) != (variables is None):
        raise ValueError(
            "variable_averages and variables_to_average go together, got "
            f"{average!r} and {variables!r}."
        )
    return decay, check_variables(variables or ())


def _decay(average: Any) -> float | None:
    if average is None:
        return None
    decay = average
    if isinstance(average, tf.train.ExponentialMovingAverage):
        decay, num_updates, zero_debias = moving_average_settings(average)
        if num_updates is not None or zero_debias:
            raise ValueError(
                "variable_averages with num_updates or zero_debias is not kept on a mesh; give "
                "tf.train.ExponentialMovingAverage(decay) alone."
            )
    if not is_number(decay) or not 0 <= decay < 1:
        raise ValueError(
            "variable_averages must be a decay from 0 up to 1 (not included), or a "
            f"tf.train.ExponentialMovingAverage, got {average!r}."
        )
    return float(decay)


def moving_average(variable: mtf.Variable) -> mtf.Variable:
    """Finds or makes the average of a variable, `<variable>/ExponentialMovingAverage`.

    For a program that evaluates in a graph in which no gradients are applied: a checkpoint of
    training restores the variable that this makes. It starts at the variable's initial value, and
    only `SyncReplicasOptimizer` moves it.

    Args:
      variable: a mesh variable, or its value.

    Returns:
      An `mtf.Variable` of its shape, not trainable. Its value has the dtype of the variable's, and
      can stand in for it; what it holds is at least float32, as small changes would be lost.

    Raises:
      TypeError: variable is no mesh variable.
    """
    (variable,) = check_variables([variable])
    kept = variable.slice_dtype if variable.slice_dtype.size >= 4 else tf.float32
    # By its whole name, so that it is the same in any scope.
    with root_scope():
        average = mtf.get_variable(
            variable.mesh,
            f"{variable.name}/{AVERAGE}",
            variable.shape,
            unstacked(kept, variable.activation_dtype),
            initializer=lambda shape, dtype=None, **_: tf.cast(
                variable.get_master().initial_value, dtype
            ),
            trainable=False,
        ).operation
    note_state(average, start=variable.name)
    return average


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
