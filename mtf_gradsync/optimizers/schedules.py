"""Learning rates that count updates in place of microbatch steps, and what counts updates."""

from __future__ import annotations

from typing import Any, Callable, Collection, Sequence, Union

import gin

from mtf_gradsync._common import check_number, check_whole_number, is_number, some_of
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients.stage import on_mesh
from mtf_gradsync.optimizers.passes import Passes, check_passes, updates_before
from mtf_gradsync.optimizers.state.variables import scalar_state
from mtf_gradsync.step import PartLowering, PlanPart, StepPlan

_CONSTANT = "Where it changes, base the schedule on get_update_step."
Schedule = Callable[..., Any]
Factor = Union[float, Schedule]


@gin.configurable(module="mtf_gradsync")
def per_update(
    schedule: Factor | Sequence[Factor] = gin.REQUIRED,
    backward_passes_per_step: Passes = gin.REQUIRED,
) -> Schedule:
    """Turns a learning-rate schedule into one that counts updates instead of microbatch steps.

    In `GradientAccumulationOptimizer` with a constant K and nothing skipped, microbatch step `step`
    belongs to update `step // K`. For a K that changes, its function is evaluated for all updates
    of the run when the graph is built. If microbatch steps are skipped, base the schedule on
    `get_update_step` instead (in `train`: `train.run.schedule_step = @get_update_step`).

    In gin, with parentheses:

        train.run.learning_rate_schedule = @per_update()
        per_update.schedule = [0.02, @learning_rate_schedules.linear_warmup]
        per_update.backward_passes_per_step = 4

    Args:
      schedule: a function of `step` and `total_train_steps` as in
        `mesh_tensorflow.transformer.learning_rate_schedules`, a number, or a list of both to be
        multiplied. Its own lengths (warm-up steps and the like) count updates.
      backward_passes_per_step: K, microbatch steps for each update: what
        `GradientAccumulationOptimizer` is given, a number or a function of the update step.

    Returns:
      A function of `step` and `total_train_steps`, which both count microbatch steps. If K is a
      function, it needs `total_train_steps`; later steps have the last K.

    Raises:
      TypeError: schedule is neither a function, a number nor a list of them.
      ValueError: backward_passes_per_step is neither a whole number of 1 or more nor a function.
    """
    passes = check_passes(backward_passes_per_step)
    factors: list[Any] = list(schedule) if isinstance(schedule, (list, tuple)) else [schedule]
    for factor in factors:
        if not (callable(factor) or is_number(factor)):
            raise TypeError(
                "schedule must be a function of step and total_train_steps, a number, or a list "
                f"of both, got {schedule!r}."
            )

    def learning_rate(step: Any, total_train_steps: Any = None) -> Any:
        update_step, updates = updates_before([step, total_train_steps], passes, total_train_steps)
        rate: Any = 1.0
        for factor in factors:
            rate = rate * (factor(update_step, updates) if callable(factor) else factor)
        return rate

    return learning_rate


@gin.configurable(module="mtf_gradsync")
def adafactor_decay_rate_per_update(
    backward_passes_per_step: int = gin.REQUIRED, exponent: float = 0.8, offset: int = 0
) -> tf.Tensor:
    """Returns Adafactor's decay rate, by the number of updates instead of microbatch steps.

    Mesh-TF's default, `adafactor_decay_rate_pow`, is a function of the global step: with K
    microbatch steps for each update the memory of second moments would be K times as long.

    In gin, with parentheses:

        AdafactorOptimizer.decay_rate = @adafactor_decay_rate_per_update()
        adafactor_decay_rate_per_update.backward_passes_per_step = 4

    Args:
      backward_passes_per_step: K, microbatch steps for each update.
      exponent: the memory grows as (number of updates)^exponent.
      offset: the number of updates before the count starts. For fine-tuning, give the number of
        updates that the restored checkpoint has had, so that the memory grows from the beginning.

    Returns:
      A float32 tf scalar, 1 - (t + 1)^-exponent, where t is the number of updates made so far, less
      offset.

    Raises:
      ValueError: backward_passes_per_step is not a whole number of 1 or more, offset not one of 0
        or more, or exponent not a number of 0 or more.

    References:
      Shazeer and Stern, "Adafactor", 2018, section 7.2
    """
    passes = check_whole_number("backward_passes_per_step", backward_passes_per_step, 1, _CONSTANT)
    offset = check_whole_number("offset", offset, 0)
    exponent = check_number("exponent", exponent, "a number of 0 or more")
    update_step = tf.train.get_or_create_global_step() // passes - offset
    return 1.0 - tf.pow(tf.cast(update_step, tf.float32) + 1.0, -exponent)


@gin.configurable(module="mtf_gradsync", denylist=["mesh"])
def get_update_step(mesh: mtf.Mesh, name: str = "GradientAccumulationOptimizer") -> mtf.Tensor:
    """Returns the number of updates made so far, for schedules of the inner optimizer.

    It is the counter of the wrapper of that name, also before the wrapper exists, and in any
    variable scope. Where no wrapper has that counter, the first step of the graph that a wrapper of
    this package builds advances it. Every update of the innermost optimizer counts, and no step
    without one: neither those that only accumulate nor those that are skipped.

    In gin, for all schedules of `train`: `train.run.schedule_step = @get_update_step`.

    Call it before `apply_grads`. If nothing advances the counter in a graph that trains, lowering
    the graph raises ValueError.

    Args:
      mesh: the mesh that is trained on.
      name: name of the wrapper, a prefix of the counter's.

    Returns:
      An int32 mtf scalar.

    Raises:
      TypeError: mesh is no mesh.
      ValueError: name cannot be a wrapper's, or the graph has another variable of that name.
    """
    return on_mesh(update_counter(mesh, name).value, mesh)


def update_counter(mesh: mtf.Mesh, name: str) -> mtf.Variable:
    """Finds or makes the counter of `get_update_step`; a graph may have it on another mesh."""
    # In a run without the wrapper every step was an update.
    counter = scalar_state(mesh, f"{name}/update_step", start="global_step")
    plan = StepPlan.of(mesh.graph)
    counters = plan.part(UpdateCounters)
    if counter not in counters.wanted:
        counters.wanted += (counter,)
    plan.adopt()  # so that the counter is checked in a graph without wrappers, too
    return counter


class UpdateCounters(PlanPart):
    """The counters of updates in a graph.

    Attributes:
      wanted: the counters that a program or a wrapper has asked for.
    """

    wanted: tuple[mtf.Variable, ...] = ()

    def advances(self, graph: mtf.Graph, meshes: Collection[mtf.Mesh]) -> list[mtf.Operation]:
        """Makes assignments that advance the counters of meshes that nothing advances yet."""
        written = _written(graph)
        free = [v for v in self.wanted if v.name not in written and v.mesh in meshes]
        return [mtf.assign(v, v.value + 1) for v in free]

    def begin(self, lowering: mtf.Lowering) -> PartLowering:
        """Raises ValueError for a counter that nothing advances in a graph that trains."""
        written = _written(lowering.graph)
        stay = [v.name for v in self.wanted if v.name not in written]
        if stay and any(v.trainable for v in written.values()):
            raise ValueError(
                f"{some_of(stay)} of get_update_step would stay as it is, since nothing advances "
                "it: call get_update_step before gradients are applied, by an optimizer of this "
                "package, such as gs.CrossShardOptimizer(opt), or advance it by mtf.assign."
            )
        return PartLowering()


def _written(graph: mtf.Graph) -> dict[str, mtf.Variable]:
    """Returns the variables that a graph assigns, by name; those of a stack all by its names."""
    variables = {v for op in graph.operations if isinstance(op, mtf.Assign) for v in op.variables}
    return {name: v for v in variables for name in getattr(v, "original_names", [v.name])}


def rate_at(schedule: Schedule, update_step: mtf.Tensor, updates: Callable[[], Any]) -> mtf.Tensor:
    """Returns the learning rate of an update, a float32 mtf scalar.

    Args:
      schedule: a function of `step` and `total_train_steps` that returns a number or tf scalar.
      update_step: the number of updates so far, an mtf scalar.
      updates: returns how many updates the run makes; called when the graph is lowered.
    """

    def evaluate(step: tf.Tensor) -> tf.Tensor:
        rate = schedule(step=step, total_train_steps=updates())
        return tf.reshape(tf.cast(rate, tf.float32), [])

    return mtf.cwise(evaluate, [update_step], tf.float32, name="learning_rate")
