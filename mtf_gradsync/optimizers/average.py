"""AverageOptimizer: exponential moving averages of variables, kept on the mesh."""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import Any, Iterator, Sequence

import gin

from mtf_gradsync._common import is_number
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.tensorflow import moving_average_settings
from mtf_gradsync.compat_v1 import NOT_GIVEN, MeshOptimizerLike
from mtf_gradsync.gradients.stage import check_variables
from mtf_gradsync.mesh.axes import LayoutLike, MeshShapeLike, ReplicaAxes
from mtf_gradsync.optimizers.pipeline import Stage, StepBuilder, Traits
from mtf_gradsync.optimizers.restoring import note_state, write_changed
from mtf_gradsync.optimizers.slots import SlotBook, SlotOwners, unstacked
from mtf_gradsync.optimizers.wrapper import CommonArguments, Wrapper
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.session import root_scope
from mtf_gradsync.step import WriteInPlace

# The last part of an average's name, as TensorFlow has it.
AVERAGE = "ExponentialMovingAverage"


class NoAveragesError(ValueError):
    """A graph or checkpoint has no moving averages of its variables."""


def check_averages_kept() -> None:
    """Raises NoAveragesError if the default graph, with the step of training, has no averages."""
    variables = tf.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
    if not any(variable.op.name.endswith(f"/{AVERAGE}") for variable in variables):
        raise NoAveragesError(
            "evaluate_with_averages needs an optimizer that keeps moving averages, and none does: "
            "wrap it in mtf_gradsync.AverageOptimizer, or give SyncReplicasOptimizer "
            "variable_averages and variables_to_average."
        )


@contextlib.contextmanager
def averaged_checkpoint(path: str, variables: Sequence[Any]) -> Iterator[str]:
    """Gives the path of a copy of a checkpoint with moving averages in place of tf variables.

    The copy has only these variables; those without an average keep their own values. It has the
    file name of `path`, and is deleted when the block ends.

    Raises:
      NoAveragesError: the checkpoint has no average of any of the variables.
    """
    reader = tf.train.load_checkpoint(path)
    shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    names = [variable.op.name for variable in variables if variable.op.name in shapes]
    averages = {name: f"{name}/{AVERAGE}" for name in names if f"{name}/{AVERAGE}" in shapes}
    if not averages:
        raise NoAveragesError(
            f"evaluate_with_averages: the checkpoint {path} has no moving averages of the model's "
            f"variables (<variable>/{AVERAGE}). mtf_gradsync.AverageOptimizer keeps them in "
            "training."
        )
    values = {
        # Averages are wider than narrow variables.
        name: reader.get_tensor(average).astype(dtypes[name].as_numpy_dtype)
        for name, average in averages.items()
    }
    with tempfile.TemporaryDirectory() as directory:
        target = os.path.join(directory, os.path.basename(path))
        write_changed(path, target, values, only=names)
        yield target


def check_averages(
    variable_averages: Any, variables_to_average: Sequence[mtf.Variable] | None
) -> tuple[float, list[mtf.Variable]]:
    """Returns the decay and the variables to average, checked; 0 and none without averages."""
    if (variable_averages is None) != (variables_to_average is None):
        raise ValueError(
            "variable_averages and variables_to_average must be given together, got "
            f"{variable_averages!r} and {variables_to_average!r}."
        )
    if variable_averages is None:
        return 0.0, []
    decay = decay_of("variable_averages", variable_averages)
    return decay, check_variables(variables_to_average or ())


def decay_of(argument: str, average: Any) -> float:
    """Returns the decay that `average`, a number or a `tf.train.ExponentialMovingAverage`, gives.

    `argument` is its name in the ValueError about another decay or setting.
    """
    decay = average
    if isinstance(average, tf.train.ExponentialMovingAverage):
        decay, num_updates, zero_debias = moving_average_settings(average)
        if num_updates is not None or zero_debias:
            raise ValueError(
                f"{argument} has num_updates or zero_debias, which averages on a mesh do not have: "
                f"got {average!r}. Give tf.train.ExponentialMovingAverage(decay)."
            )
    if not is_number(decay) or not 0 <= decay < 1:
        raise ValueError(
            f"{argument} must be a decay from 0 up to 1 (not included), or a "
            f"tf.train.ExponentialMovingAverage, got {average!r}."
        )
    return float(decay)


def moving_average(variable: mtf.Variable) -> mtf.Variable:
    """Finds or makes the average of a variable, `<variable>/ExponentialMovingAverage`.

    It is for programs that evaluate in a graph without an optimizer, and restore the average from a
    checkpoint of training. Only `AverageOptimizer` and `SyncReplicasOptimizer` update it.

    Args:
      variable: a mesh variable, or its value.

    Returns:
      An `mtf.Variable` of the same shape, not trainable. Its value has the dtype of the variable's
      value and can replace it; it is stored as float32 or wider, as small changes would be lost.

    Raises:
      TypeError: variable is not a mesh variable.
    """
    (variable,) = check_variables([variable])
    kept = variable.slice_dtype if variable.slice_dtype.size >= 4 else tf.float32
    # With its full name, so that it is the same in any scope.
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


class MoveAverages(Stage):
    """After each update, makes `average -= (1 - decay) * (average - variable)`."""

    reads_shown = True

    def __init__(self, decay: float, variables: Sequence[mtf.Variable] | None, slots: SlotBook):
        """Takes the variables to average, or None for all that get a gradient."""
        self._decay, self._variables, self._slots = decay, variables, slots

    def after_update(
        self, updates: Sequence[mtf.Operation], step: StepBuilder
    ) -> list[mtf.Operation]:
        """See `Stage.after_update`."""
        variables = step.received[0].owners if self._variables is None else self._variables
        if not variables:
            return []
        averages = [moving_average(variable) for variable in variables]
        self._slots.record(averages, variables)
        cure = "Keep its average in one of them: a variable has one, in any scope"
        step.plan.part(SlotOwners).check(self._slots, averages, variables, cure)

        def move(average: Any, value: tf.Tensor) -> tf.Operation:
            # New values exist only after the gate; this reads the average of the last step.
            with tf.control_dependencies([value]):
                now = tf.convert_to_tensor(average)
            return tf.assign(average, now - (now - tf.cast(value, now.dtype)) * (1 - self._decay))

        values = step.value_after(variables, updates)
        return [WriteInPlace(averages, values, move, "moving_averages")]


class KeepsAverages(Wrapper):
    """A wrapper with a stage `MoveAverages`."""

    def average(self, var: mtf.Variable) -> mtf.Variable | None:
        """Returns the moving average of a variable, if there is one.

        Args:
          var: a mesh variable, or its value.

        Returns:
          An `mtf.Variable`; None if the variable is not averaged, or before gradients were applied.
          `mtf_gradsync.moving_average` makes one in a graph that only evaluates.
        """
        (variable,) = check_variables([var])
        return self._slots.get(variable, AVERAGE)


@gin.configurable(module="mtf_gradsync")
class AverageOptimizer(KeepsAverages):
    """Applies another optimizer, and keeps moving averages of the variables.

    Averages change after each update, with the new values, and not on steps without an update, in
    any order with `GradientAccumulationOptimizer`, `SyncReplicasOptimizer` and
    `LossScaleOptimizer`. Inside or around `OuterOptimizer` they are of the outer values, and move
    towards them after each update of the islands.

    State, by name: `<variable>/ExponentialMovingAverage`, as TensorFlow has it.

    References:
      `tf.compat.v1.train.ExponentialMovingAverage`
    """

    traits = Traits(reduces=False, takes_parts=True, averages=True)

    def __init__(
        self,
        opt: MeshOptimizerLike,
        decay: Any = 0.999,
        variables_to_average: Sequence[mtf.Variable] | None = None,
        name: str = "AverageOptimizer",
        learning_rate: Any = NOT_GIVEN,
        axes: ReplicaAxes | None = None,
        mesh_shape: MeshShapeLike | None = None,
        layout: LayoutLike | None = None,
        batch_dims: str | Sequence[str] = ("batch",),
        reducer: Strategy | None = None,
    ):
        """Wraps an optimizer.

        Args:
          opt: a Mesh-TF optimizer, or a class or factory of one.
          decay: the decay of the averages, from 0 up to 1 (not included), or a
            `tf.train.ExponentialMovingAverage`.
          variables_to_average: mesh variables; None for all that get a gradient.
          name: name of the wrapper.
          learning_rate: the learning rate for opt; only if opt is a class or factory.
          axes: the replica axes (`ReplicaAxes`); or give mesh_shape and layout.
          mesh_shape: Mesh-TF's mesh shape.
          layout: Mesh-TF's layout rules.
          batch_dims: names of the tensor dimensions that the batch is split along.
          reducer: the reduction strategy; None for `FusedAllReduce()`.

        Raises:
          ValueError: decay is out of range, or arguments contradict each other.
          TypeError: an argument has the wrong type.
        """
        self._decay = decay_of("decay", decay)
        given = variables_to_average
        self._averaged = None if given is None else check_variables(given)
        common = CommonArguments(name, axes, mesh_shape, layout, batch_dims, reducer, learning_rate)
        self._wrap(opt, common)
        self._check_order()

    def stages(self) -> list[Stage]:
        """See `Wrapper.stages`."""
        return [MoveAverages(self._decay, self._averaged, self._slots)]
