"""AverageOptimizer: exponential moving averages of variables, kept on the mesh."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple, Sequence

import gin

from mtf_gradsync._common import is_number, is_whole_number
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.tensorflow import moving_average_settings, root_scope
from mtf_gradsync.compat_v1 import NOT_GIVEN, MeshOptimizerLike
from mtf_gradsync.gradients.arguments import Bounds, check_variables, is_scalar, scalar_of_step
from mtf_gradsync.gradients.operations import on_mesh
from mtf_gradsync.mesh.axes import LayoutLike, MeshShapeLike, ReplicaAxes
from mtf_gradsync.optimizers.pipeline.builder import StepBuilder
from mtf_gradsync.optimizers.pipeline.forms import GradientSet
from mtf_gradsync.optimizers.pipeline.stack import Place, Stage
from mtf_gradsync.optimizers.pipeline.words import About, Line, setting_text
from mtf_gradsync.optimizers.slots import SlotBook, SlotOwners
from mtf_gradsync.optimizers.state import (
    derived_variable,
    note_state,
    update_counter,
    without_autostack,
)
from mtf_gradsync.optimizers.wrapper import CommonArguments, Wrapper
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.step.writes import WriteInPlace

# The last part of an average's name, as TensorFlow has it.
AVERAGE = "ExponentialMovingAverage"


class AverageRule(NamedTuple):
    """The settings of moving averages, named as the arguments of `AverageOptimizer` are.

    Attributes:
      decay: the weight of the old average in the new one: a number, or a scalar tensor or variable.
      num_updates: a count of updates, from which lower decays are computed for the first updates;
        True for the count that the optimizer keeps itself; None for no lower decays.
      zero_debias: whether the averages leave out the initial values of variables.
    """

    decay: Any
    num_updates: Any = None
    zero_debias: bool = False


_DECAYS, _COUNTS = Bounds(0.0, 1.0), Bounds(0.0, math.inf)


def check_averages(
    variable_averages: Any, variables_to_average: Sequence[mtf.Variable] | None
) -> tuple[AverageRule, list[mtf.Variable]]:
    """Checks two arguments of `SyncReplicasOptimizer`; returns settings and variables of averages.

    `variable_averages` is a decay or a `tf.train.ExponentialMovingAverage`. If `variable_averages`
    and `variables_to_average` are None, there are no variables to average. Raises ValueError if
    only one of the two is None, or if the decay is out of range.
    """
    if (variable_averages is None) != (variables_to_average is None):
        raise ValueError(
            "variable_averages and variables_to_average must be given together, got "
            f"{variable_averages!r} and {variables_to_average!r}."
        )
    if variable_averages is None:
        return AverageRule(0.0), []
    rule = rule_of("variable_averages", variable_averages)
    return rule, check_variables(variables_to_average or ())


def rule_of(
    argument: str, average: Any, num_updates: Any = None, zero_debias: Any = False
) -> AverageRule:
    """Checks a user's arguments for moving averages, and returns them as settings.

    Args:
      argument: the name of the user's argument `average`, for errors.
      average: a decay, or a `tf.train.ExponentialMovingAverage`, whose decay, num_updates and
        zero_debias are then taken.
      num_updates: a count of updates, from which lower decays are computed for the first updates.
        True for the count that the optimizer keeps itself; None or False for no lower decays.
      zero_debias: whether the averages leave out the initial values of variables.

    Raises:
      ValueError: the decay is out of range, or settings contradict each other.
      TypeError: a setting has the wrong type.
    """
    decay = average
    if isinstance(average, tf.train.ExponentialMovingAverage):
        decay, of_updates, debias = moving_average_settings(average)
        if num_updates is None and not zero_debias:
            num_updates, zero_debias = of_updates, debias
        elif of_updates is not None or debias:
            raise ValueError(f"Give num_updates and zero_debias once: {argument} has them already.")
    is_right = _DECAYS.contain(decay) if is_number(decay) else is_scalar(decay)
    if not is_right:
        raise ValueError(
            f"{argument} must be a decay {_DECAYS}, a number or a scalar tensor or variable, or a "
            f"tf.train.ExponentialMovingAverage, got {average!r}."
        )
    if not isinstance(zero_debias, bool):
        raise TypeError(f"zero_debias must be a boolean, got {zero_debias!r}.")
    counts = num_updates is not None and num_updates is not False
    is_count = num_updates is True or is_scalar(num_updates) or is_whole_number(num_updates, 0)
    if counts and not is_count:
        raise TypeError(
            "num_updates must be True for the updates that the optimizer counts itself, or a "
            f"scalar tensor or variable, got {num_updates!r}."
        )
    if zero_debias and (counts or not is_number(decay)):
        raise ValueError(
            f"zero_debias needs a decay that is a number, and no num_updates, got {average!r} and "
            f"num_updates={num_updates!r}. With num_updates the first decays are low, so that "
            "averages hardly depend on the initial values."
        )
    decay = float(decay) if is_number(decay) else decay
    return AverageRule(decay, num_updates if counts else None, zero_debias)


def moving_average(variable: mtf.Variable) -> mtf.Variable:
    """Returns the moving average of a variable, `<variable>/ExponentialMovingAverage`.

    The first call in a graph makes the average, so that a program that evaluates without an
    optimizer can restore the average from a checkpoint of training. Only `AverageOptimizer` and
    `SyncReplicasOptimizer` update an average.

    Args:
      variable: a mesh variable, or its value.

    Returns:
      An `mtf.Variable` of the same shape, not trainable. Its value can stand in for the variable's
      value, and has the same dtype. The average is stored as float32 or wider, because small
      changes would be lost in narrower dtypes.

    Raises:
      TypeError: variable is not a mesh variable.

    Examples:
      >>> mesh, size = mtf.Mesh(mtf.Graph(), "mesh"), mtf.Dimension("size", 2)
      >>> w = mtf.get_variable(mesh, "w", [size], initializer=tf.ones_initializer())
      >>> gs.moving_average(w).name
      'w/ExponentialMovingAverage'
    """
    (variable,) = check_variables([variable])
    kept = variable.slice_dtype if variable.slice_dtype.size >= 4 else tf.float32

    def make(initializer: Any) -> mtf.Variable:
        # With its full name, so that it is the same in any scope.
        with root_scope():
            return mtf.get_variable(
                variable.mesh,
                f"{variable.name}/{AVERAGE}",
                variable.shape,
                without_autostack(kept, variable.activation_dtype),
                initializer=initializer,
                trainable=False,
            ).operation

    average = derived_variable(variable, make)
    note_state(average, start=variable.name)
    return average


@dataclasses.dataclass(frozen=True)
class MoveAverages(Stage):
    """The stage that makes `average -= weight * (average - variable)` after each update.

    Attributes:
      rule: the settings: the decay, and how it changes from update to update. The weight is usually
        1 - decay.
      variables: the variables to average; None for all with a gradient.
      slots: the `SlotBook` in which the averages are recorded.
      name: the wrapper's name.
    """

    rule: AverageRule
    variables: Sequence[mtf.Variable] | None
    slots: SlotBook
    name: str
    takes_parts = True

    @property
    def _averages(self) -> bool:  # type: ignore[override]
        return self.variables is None or bool(self.variables)

    @property
    def _counts(self) -> bool:
        return self.rule.zero_debias or self.rule.num_updates is True

    def apply(self, gradients: GradientSet, step: StepBuilder) -> GradientSet:
        if self._counts:  # before the update, which advances the counter
            self.slots.record([update_counter(gradients.mesh, self.name)], [])
        step.after_update(functools.partial(self._move, step), is_shown=True)
        return gradients

    def describe(self, about: About) -> list[Line]:
        if not self._averages:
            return []
        decay, num_updates, zero_debias = self.rule
        what = f"averages, decay {setting_text(decay)}"
        what += " at most, less in the first updates" * (num_updates is not None)
        what += ", of the values after updates alone" * zero_debias
        return [Line(what, after=True)]

    def _move(self, step: StepBuilder, updates: Sequence[mtf.Operation]) -> list[mtf.Operation]:
        variables = step.received[0].owners if self.variables is None else self.variables
        if not variables:
            return []
        averages = [moving_average(variable) for variable in variables]
        self.slots.record(averages, variables)
        cure = "Average it in one of the two: a variable has one average, in any scope"
        step.plan.extension(SlotOwners).record_keeper(self.slots, averages, variables, cure)
        values = step.value_after(variables, updates)
        weight = self._weight(step.received[0].mesh)
        if not isinstance(weight, mtf.Tensor):
            move = functools.partial(_move, weight=weight)
            return [WriteInPlace(averages, values, move, "moving_averages")]
        writes: list[mtf.Operation] = []
        for mesh in dict.fromkeys(x.mesh for x in averages):
            some = [(a, v) for a, v in zip(averages, values) if a.mesh is mesh]
            own, new = [a for a, _ in some], [v for _, v in some]
            scalars = [on_mesh(weight, mesh)]
            writes.append(WriteInPlace(own, new, _move, "moving_averages", scalars))
        return writes

    def _weight(self, mesh: mtf.Mesh) -> float | mtf.Tensor:
        """Returns the weight that a variable's new value gets in its average, usually 1 - decay.

        The weight is a Python number if it is the same in all steps, and else a float32 scalar on
        `mesh`.
        """
        decay, num_updates, zero_debias = self.rule
        if not self._counts and num_updates is None and is_number(decay):
            return 1 - decay
        scalars: dict[str, mtf.Tensor] = {}
        if not is_number(decay):
            scalars["decay"] = scalar_of_step(
                decay, mesh, tf.float32, "the decay of averages", self.name, _DECAYS
            )
        if self._counts:
            count = update_counter(mesh, self.name).value + 1
            scalars["count"] = mtf.cast(on_mesh(count, mesh), tf.float32)
        elif num_updates is not None:
            given = tf.constant(num_updates) if is_number(num_updates) else num_updates
            scalars["count"] = scalar_of_step(
                given, mesh, tf.float32, "num_updates", self.name, _COUNTS
            )

        def weight(*given: tf.Tensor) -> tf.Tensor:
            by = {"decay": decay, **dict(zip(scalars, given))}
            if zero_debias:
                return _debiased_weight(decay, by["count"])
            if "count" in by:
                by["decay"] = tf.minimum(by["decay"], (1 + by["count"]) / (10 + by["count"]))
            return 1 - by["decay"]

        return mtf.cwise(weight, list(scalars.values()), tf.float32)


def _debiased_weight(decay: float, count: tf.Tensor) -> tf.Tensor:
    """Returns the weight of the newest value in a moving average that leaves out the initial value.

    `decay` is the decay of the average, and `count` is the number of values so far, the newest one
    included: a float32 tf scalar. The returned weight is a float32 tf scalar, too; for the first
    value it is 1.
    """
    if not decay:
        return tf.ones_like(count)
    # 1 - decay^count, without the rounding of a power near 1.
    together = -tf.math.expm1(count * math.log(decay))
    return tf.where_v2(count <= 1, tf.ones_like(count), (1 - decay) / together)


def _move(average: Any, value: tf.Tensor, weight: float | tf.Tensor) -> tf.Operation:
    # New values exist only after the gate; this reads the average of the last step.
    with tf.control_dependencies([value]):
        now = tf.convert_to_tensor(average)
    value = tf.cast(value, now.dtype)
    if not isinstance(weight, tf.Tensor):
        return tf.assign(average, now - (now - value) * weight)
    weight = tf.cast(weight, now.dtype)
    # The first of all values takes the place of what the average begins with.
    return tf.assign(average, tf.where_v2(weight >= 1, value, now - (now - value) * weight))


class KeepsAverages(Wrapper):
    """A wrapper that keeps moving averages of variables, by a stage `MoveAverages`."""

    def average(self, var: mtf.Variable) -> mtf.Variable | None:
        """Returns the moving average of a variable, or None.

        Args:
          var: a mesh variable, or its value.

        Returns:
          An `mtf.Variable`; None if the variable is not averaged, or before gradients were applied.
          In a graph that only evaluates, `mtf_gradsync.moving_average` makes the average.
        """
        (variable,) = check_variables([var])
        return self._slots.get(variable, AVERAGE)


@gin.configurable(module="mtf_gradsync")
class AverageOptimizer(KeepsAverages):
    """A wrapper that keeps moving averages of the variables that another optimizer updates.

    Averages move towards the new values of variables after each update, and do not change on steps
    without an update. This wrapper may be around or inside `GradientAccumulationOptimizer`,
    `SyncReplicasOptimizer` and `LossScaleOptimizer`. With `OuterOptimizer` around or inside it,
    averages are of the outer values, and move towards these after each update of the islands. An
    average begins with the value that its variable has when training begins.

    The averages are the variables `<variable>/ExponentialMovingAverage`, named as in TensorFlow.
    With num_updates=True or zero_debias there is also `<name>/update_step`, the counter that
    `get_update_step` returns.

    References:
      `tf.compat.v1.train.ExponentialMovingAverage`; `optax.ema` for zero_debias

    Examples:
      >>> print(gs.describe(gs.AverageOptimizer(mtf.optimize.SgdOptimizer(0.1), 0.999)))
      every step  reduce over the replica axes: fused  (AverageOptimizer)
                  update by Sgd
      after it    averages, decay 0.999                (AverageOptimizer)
    """

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
        num_updates: Any = None,
        zero_debias: bool = False,
    ):
        """Wraps an optimizer.

        Args:
          opt: a Mesh-TF optimizer, or a class or factory of one.
          decay: the decay of the averages, from 0 up to 1 (not included): a number, a scalar tensor
            or variable, which is checked in each step, or a `tf.train.ExponentialMovingAverage`,
            whose num_updates and zero_debias are taken, too.
          variables_to_average: mesh variables; None for all variables with a gradient.
          name: name of the wrapper.
          learning_rate: the learning rate for opt; only if opt is a class or factory.
          axes: the replica axes (`ReplicaAxes`); or give mesh_shape and layout.
          mesh_shape: Mesh-TF's mesh shape.
          layout: Mesh-TF's layout rules.
          batch_dims: names of the tensor dimensions that the batch is split along.
          reducer: the reduction strategy; None for `FusedAllReduce()`.
          num_updates: the number n of updates so far, a scalar tensor or variable, or True to let
            the wrapper count updates, with the one being made. The decay is then
            min(decay, (1 + n) / (10 + n)), so that averages forget the initial values even in a
            training that is short for the decay. None keeps the decay constant.
          zero_debias: whether averages leave out the initial values of variables, and begin with
            the values after the first update. Not together with num_updates.

        Raises:
          ValueError: decay is out of range, or arguments contradict each other.
          TypeError: an argument has the wrong type.
        """
        self._rule = rule_of("decay", decay, num_updates, zero_debias)
        given = variables_to_average
        self._averaged = None if given is None else check_variables(given)
        common = CommonArguments(name, axes, mesh_shape, layout, batch_dims, reducer, learning_rate)
        self._wrap(opt, common)
        self._check_order()

    def stages(self, place: Place) -> list[Stage]:
        del place
        return [MoveAverages(self._rule, self._averaged, self._slots, self.name)]
