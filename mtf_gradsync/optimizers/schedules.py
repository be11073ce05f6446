"""Functions of the number of updates: learning rates, and microbatch steps per update."""

from __future__ import annotations

import functools
import logging
from typing import Any, Callable, Sequence, Union

import gin
import numpy as np

from mtf_gradsync._common import check_number, check_whole_number, is_number, walk
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.compat_v1 import MeshOptimizer
from mtf_gradsync.gradients.arguments import Bounds, saturated_cast, scalar_of_step
from mtf_gradsync.optimizers.slots import optimizers_of
from mtf_gradsync.step.plan import StepPlan

_logger = logging.getLogger("mtf_gradsync")
_CONSTANT = "Where it changes, base the schedule on get_update_step."
Schedule = Callable[..., Any]
Factor = Union[float, Schedule]
Passes = Union[int, Callable[[Any], Any]]
_OR_A_FUNCTION = "Or give a function from the update step to one."


@gin.configurable(module="mtf_gradsync")
def per_update(
    schedule: Factor | Sequence[Factor] = gin.REQUIRED,
    backward_passes_per_step: Passes = gin.REQUIRED,
) -> Schedule:
    """Returns a learning-rate schedule that counts updates instead of microbatch steps.

    In `GradientAccumulationOptimizer`, with K microbatch steps for each update and none skipped,
    microbatch step `step` belongs to update `step // K`. If K is a function of the update step, the
    function is evaluated for all updates of the run when the graph is built. If microbatch steps
    are skipped, do not use `per_update`, but base the schedule on `get_update_step` (for `train`,
    write `train.run.schedule_step = @get_update_step` in the gin file).

    In a gin file, write the parentheses, too:

        train.run.learning_rate_schedule = @per_update()
        per_update.schedule = [0.02, @learning_rate_schedules.linear_warmup]
        per_update.backward_passes_per_step = 4

    Args:
      schedule: a function of `step` and `total_train_steps` as in
        `mesh_tensorflow.transformer.learning_rate_schedules`, or a number, or a list of functions
        and numbers, which are multiplied with each other. Lengths in the schedule (warm-up steps
        and the like) count updates.
      backward_passes_per_step: K, the number of microbatch steps for each update, as given to
        `GradientAccumulationOptimizer`: a number or a function of the update step.

    Returns:
      A function of `step` and `total_train_steps`, which both count microbatch steps. If K is a
      function, `total_train_steps` is required, and steps after it have the last K.

    Raises:
      TypeError: schedule is neither a function, a number nor a list of them.
      ValueError: backward_passes_per_step is neither a whole number of 1 or more nor a function.

    Examples:
      >>> rate = gs.per_update(lambda step, total_train_steps: 1.0 / (1 + step), 4)
      >>> [rate(step=step) for step in (0, 3, 4, 7)]
      [1.0, 1.0, 0.5, 0.5]
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
        length, rate = _length(updates), 1.0
        for factor in factors:
            rate = rate * (factor(update_step, length) if callable(factor) else factor)
        return rate

    return learning_rate


def _length(updates: Any) -> Any:
    """Returns the length of a run for schedules, which divide by it: `updates`, but not 0.

    A run that ends before its first update has a learning rate, too.
    """
    return max(updates, 1) if is_number(updates) else updates


@gin.configurable(module="mtf_gradsync")
def adafactor_decay_rate_per_update(
    backward_passes_per_step: int = gin.REQUIRED, exponent: float = 0.8, offset: int = 0
) -> tf.Tensor:
    """Returns a decay rate for Adafactor that counts updates instead of microbatch steps.

    Mesh-TF's default, `adafactor_decay_rate_pow`, is a function of the global step, which counts
    microbatch steps. If there are K microbatch steps for each update, second moments with that
    default are means over about K^exponent times as many updates as with this function.

    In a gin file, write the parentheses, too:

        AdafactorOptimizer.decay_rate = @adafactor_decay_rate_per_update()
        adafactor_decay_rate_per_update.backward_passes_per_step = 4

    Args:
      backward_passes_per_step: K, microbatch steps for each update.
      exponent: second moments are means over about (number of updates)^exponent updates.
      offset: the number of updates that are not counted. For fine-tuning, give the number of
        updates in the restored checkpoint, so that the count begins anew.

    Returns:
      A float32 tf scalar, 1 - (t + 1)^-exponent, where t is the number of updates made so far minus
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


def rate_at(schedule: Schedule, update_step: mtf.Tensor, updates: Callable[[], Any]) -> mtf.Tensor:
    """Returns the learning rate of an update, a float32 mtf scalar.

    Args:
      schedule: a function of `step` and `total_train_steps` that returns a number or tf scalar.
      update_step: the number of updates so far, an mtf scalar.
      updates: a function that returns how many updates the run makes. The schedule gets this number
        as `total_train_steps`. It is called when the graph is lowered.
    """

    def evaluate(step: tf.Tensor) -> tf.Tensor:
        rate = schedule(step=step, total_train_steps=_length(updates()))
        return tf.reshape(tf.cast(rate, tf.float32), [])

    return mtf.cwise(evaluate, [update_step], tf.float32, name="learning_rate")


def hint_if_micro_steps_are_counted(opt: Any, name: str) -> None:
    """Logs a hint if a setting of the innermost optimizer is computed from the TF global step.

    The training loop advances the global step on every microbatch step, not on every update.
    Learning-rate schedules, and Adafactor's default decay rate and learning rate, are functions of
    the global step. `opt` is the innermost optimizer, and `name` is the name of the wrapper that
    accumulates, for the log.
    """
    for owner, found in settings_by_global_step(opt).items():
        _logger.info(
            "%s: %s of %s follow the TF global step, which counts microbatch steps, not updates. "
            "Base them on the update step: see docs/accumulation.md, per_update and update_step.",
            name,
            " and ".join(found),
            owner,
        )


def settings_by_global_step(opt: Any, passes: int | None = None) -> dict[str, list[str]]:
    """Returns the settings of optimizers that are computed from the TF global step itself.

    A setting that is computed from the global step divided by K, as by `per_update`, counts updates
    and is left out.

    Args:
      opt: an innermost optimizer; if it is a `ByVariable`, the optimizers of its groups are meant.
      passes: K, the number of microbatch steps for each update; None for any whole number.

    Returns:
      A list of names of attributes, such as "learning_rate", by the class name of the optimizer.
    """
    global_steps = tf.get_collection(tf.GraphKeys.GLOBAL_STEP)
    if not global_steps:
        return {}
    handle = getattr(global_steps[0], "handle", global_steps[0])

    def inputs(op: tf.Operation) -> list[tf.Operation]:
        is_count = op.type == "FloorDiv" and passes in (None, tf.get_static_value(op.inputs[1]))
        return [] if is_count else [t.op for t in op.inputs]

    names = {}
    for one in optimizers_of(opt):
        one = one.opt if isinstance(one, MeshOptimizer) else one
        found = [
            key.lstrip("_")
            for key, value in sorted(getattr(one, "__dict__", {}).items())
            if isinstance(value, tf.Tensor) and handle.op in walk([value.op], inputs)
        ]
        if found:
            names[type(one).__name__] = found
    return names


def check_passes(passes: Any) -> Passes:
    """Checks the argument backward_passes_per_step, and returns it.

    `passes` is the argument. Raises ValueError unless it is a whole number of 1 or more, or a
    function.
    """
    if isinstance(passes, type) or not callable(passes):
        return check_whole_number("backward_passes_per_step", passes, more=_OR_A_FUNCTION)
    return passes


def check_schedule(passes: Callable[[Any], Any], graph: mtf.Graph) -> None:
    """Raises ValueError if backward_passes_per_step, a function, returns a number that is wrong.

    The function `passes` is called where it can make no operation of TensorFlow, so that nothing is
    left in the program's TensorFlow graph, nor in what the function keeps for its next call. If it
    makes one, or fails otherwise, nothing is checked. `graph` is the program's mtf graph.
    """
    step = mtf.constant(mtf.Mesh(mtf.Graph(), "schedule"), 0, mtf.Shape([]), tf.int32)
    nothing = tf.Graph()
    nothing.finalize()
    try:
        with nothing.as_default(), StepPlan.of(graph).undone_on_error():
            result = passes(step)
    except Exception:
        return  # It may need a tf scalar, or make variables.
    if isinstance(result, _NUMBERS):
        _checked_constant(passes, result)


def passes_at(passes: Callable[[Any], Any], update_step: mtf.Tensor, owner: str) -> Any:
    """Returns the number of microbatch steps of the next update, an int or an int32 mtf scalar.

    `passes` is backward_passes_per_step, a function. It is called with the update step as an int32
    mtf scalar or, if that fails, as a tf scalar on each processor. It may return an int, an mtf
    scalar or a tf scalar. If it returns a tensor, the training step checks that the tensor's value
    is 1 or more, and an error names `owner`, a wrapper.
    """
    result = _call_with_mtf_step(passes, update_step)
    if isinstance(result, int):
        return result
    if result is None:
        evaluate = functools.partial(_call_with_tf_step, passes)
        result = mtf.cwise(evaluate, [update_step], tf.int32, name="passes_schedule")
    else:
        _check_whole(passes, result)
    what = "backward_passes_per_step"
    return scalar_of_step(result, result.mesh, tf.int32, what, owner, Bounds(1))


def updates_before(steps: Sequence[Any], passes: Passes, total: int | None) -> list[Any]:
    """Returns the number of updates made before each of some microbatch steps.

    The count is right if no microbatch step is skipped. A step is a number, an integer tf tensor,
    or None; for None the result is None. `passes` is backward_passes_per_step; if it is a
    function, `total` must be the number of microbatch steps of the run.
    """
    if not callable(passes):
        return [None if step is None else step // passes for step in steps]
    if total is None:
        raise ValueError(
            "per_update with a function as backward_passes_per_step needs total_train_steps, the "
            "number of microbatch steps, for which it evaluates the function; got None."
        )
    # As many updates as have the same K in a row are one stretch.
    each = _passes_of_updates(passes, int(total))
    first = np.flatnonzero(np.diff(each, prepend=0))  # the first update of each stretch
    begins = np.concatenate([[0], np.cumsum(each)])[first]
    lengths = np.append(np.diff(first), np.iinfo(np.int64).max)

    def before(step: Any) -> Any:
        if step is None:
            return None
        if not isinstance(step, tf.Tensor):
            return int(np.sum(np.clip((step - begins) // each[first], 0, lengths)))
        inside = (tf.cast(step, tf.int64) - begins) // each[first]
        made = tf.reduce_sum(tf.minimum(tf.maximum(inside, np.int64(0)), lengths))
        return tf.cast(made, step.dtype)

    return [before(step) for step in steps]


def _passes_of_updates(passes: Callable[[Any], Any], total: int) -> np.ndarray:
    """Returns how many microbatch steps each update takes, for the updates of a run.

    `passes` is backward_passes_per_step, a function, and `total` is the number of microbatch steps
    of the run. The result is an int64 array with a number for each update from the first one on,
    until the numbers add up to more than `total`.
    """
    found: list[np.ndarray] = []
    count = min(total + 1, 4096)
    with tf.Graph().as_default():
        first = tf.placeholder(tf.int32, [])
        updates = first + tf.range(count)
        mesh, dim = mtf.Mesh(mtf.Graph(), "updates"), mtf.Dimension("update", count)
        result = _call_with_mtf_step(passes, mtf.import_tf_tensor(mesh, updates, mtf.Shape([dim])))
        if isinstance(result, int):
            values = tf.fill([count], result)
        elif result is None:
            each = functools.partial(_call_with_tf_step, passes)
            values = tf.map_fn(tf.autograph.experimental.do_not_convert(each), updates)
        else:
            result = mtf.broadcast(mtf.cast(result, tf.int32), mtf.Shape([dim]))
            alone = mtf.placement_mesh_impl.PlacementMeshImpl(mtf.Shape([]), "", [""])
            values = mtf.Lowering(mesh.graph, {mesh: alone}).export_to_tf_tensor(result)
        with tf.Session(config=tf.ConfigProto(device_count={"GPU": 0})) as session:
            while sum(int(x.sum()) for x in found) <= total:
                chunk = session.run(values, {first: len(found) * count})
                found.append(np.maximum(chunk, 1).astype(np.int64))
    return np.concatenate(found)


_NUMBERS = (int, float, np.number)


class _Probe:
    """A stand-in for the update step, which raises TypeError if Python code branches on it."""

    def _refuse(self, *_: Any) -> Any:
        raise TypeError

    __eq__ = __ne__ = __bool__ = __hash__ = __index__ = __int__ = _refuse


def _call_with_mtf_step(
    passes: Callable[[Any], Any], update_step: mtf.Tensor
) -> int | mtf.Tensor | None:
    """Calls `passes` with the update step as an mtf scalar; returns None if it needs a tf scalar.

    `passes` is backward_passes_per_step, a function. The result is an int or an mtf tensor. Raises
    ValueError if the function returns a number that it has chosen by an `if` on the update step:
    the value of the update step is not known when the graph is built.
    """
    try:
        with StepPlan.of(update_step.graph).undone_on_error():
            result = passes(update_step)
    except (TypeError, ValueError, AttributeError):
        return None
    if isinstance(result, _NUMBERS):
        return _checked_constant(passes, result)
    result = result.value if isinstance(result, mtf.Variable) else result
    return result if isinstance(result, mtf.Tensor) else None


def _checked_constant(passes: Callable[[Any], Any], result: Any) -> int:
    """Returns `result`, a number that backward_passes_per_step, a function, has returned.

    Raises ValueError if it is no whole number of 1 or more. Raises ValueError, too, if the function
    `passes` has chosen it by an `if` on the update step.
    """
    try:
        same = passes(_Probe()) == result
    except Exception:
        same = False
    if not same:
        raise ValueError(
            f"backward_passes_per_step {passes!r} branches in Python, when the graph is built "
            "and the value of the update step is not known; write it in mtf or tf operations, "
            "such as lambda step: tf.where(step < 100, 2, 8)."
        )
    return check_whole_number("backward_passes_per_step", result, more=_OR_A_FUNCTION)


def _call_with_tf_step(passes: Callable[[Any], Any], step: tf.Tensor) -> tf.Tensor:
    """Calls `passes` with the update step `step` as a tf scalar; returns an int32 tf scalar.

    `passes` is backward_passes_per_step, a function. Raises ValueError if `passes` fails, or its
    result is no whole number. `_call_with_tf_step` is called once for each processor.
    """
    try:
        result = tf.convert_to_tensor(passes(step))
    except Exception as error:
        raise ValueError(
            f"backward_passes_per_step {passes!r} failed with the update step as an mtf scalar "
            f"and as a tf scalar: {error}. Make it a function of one of these."
        ) from error
    _check_whole(passes, result)
    return tf.reshape(saturated_cast(result, tf.int32), [])


def _check_whole(passes: Callable[[Any], Any], result: mtf.Tensor | tf.Tensor) -> None:
    if result.shape.ndims or not result.dtype.is_integer:
        raise ValueError(
            f"backward_passes_per_step {passes!r} must return a whole number, got {result!r}."
        )
