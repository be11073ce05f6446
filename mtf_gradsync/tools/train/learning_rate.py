"""The learning rate of a step, and the counter that schedules follow."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from typing import Any, Callable, Iterator, Sequence

import numpy as np

from mtf_gradsync.extension import (
    GradientAccumulationOptimizer,
    is_number,
    mtf,
    rate_at,
    tf,
    updates_before,
)
from mtf_gradsync.runtimes._common import ConfigError, first_line
from mtf_gradsync.tools.train.config import LearningRate, learning_rate_schedules


def resolve_learning_rate(
    learning_rate_schedule: LearningRate | list[Any], total_steps: int
) -> LearningRate:
    """Returns a run's learning rate, checked: None, a number, or a function called with ``step=``.

    `learning_rate_schedule` is the setting of this name in `RunConfig`. If it is a list, the result
    is a function that multiplies the factors in the list. Schedules get `total_steps` as the length
    of the run. Raises ConfigError if the setting can be no learning rate.
    """
    factors = learning_rate_schedule
    for one in factors if isinstance(factors, (list, tuple)) else [factors]:
        if is_number(one) and not 0 <= one < math.inf:
            raise ConfigError(
                "Numbers in train.run.learning_rate_schedule must be finite and not negative; got "
                f"{learning_rate_schedule!r}"
            )
        elif callable(one):
            _check_schedule(one, by_name=one is factors)
    if factors == [] or factors == ():
        raise ConfigError(
            f"train.run.learning_rate_schedule needs factors to multiply, or None for the "
            f"optimizer's own learning rate; got {factors!r}"
        )
    if isinstance(factors, (list, tuple)) and all(callable(f) or is_number(f) for f in factors):
        return functools.partial(
            learning_rate_schedules().product_learning_rate,
            total_train_steps=total_steps,
            factors=list(factors),
        )
    if callable(factors):
        return functools.partial(factors, total_train_steps=total_steps)
    if factors is None or is_number(factors):
        return factors
    raise ConfigError(
        "train.run.learning_rate_schedule must be a number, a function such as "
        "@learning_rate_schedules.learning_rate_schedule_noam, a list of both to multiply, or "
        f"None; got {learning_rate_schedule!r}"
    )


def rate_on_mesh(
    schedule: LearningRate,
    step: tf.Tensor,
    schedule_step: Callable[[Any], Any] | None,
    mesh: mtf.Mesh,
    stack: Sequence[Any],
) -> Any:
    """Returns the learning rate of a step: None, a number, or a scalar of tf or mtf.

    If `schedule` is None or a number, the result is `schedule`. If `schedule` is a function, the
    result is the scalar that the function returns: an mtf scalar if `schedule_step` is not None.

    Args:
      schedule: a result of `resolve_learning_rate`: None, a number, or a function of the step and
        of the number of steps in the run.
      step: the global step. The function is called with it if `schedule_step` is None.
      schedule_step: a function that takes `mesh` and returns an mtf scalar. `schedule` is then
        called with this scalar as the step, and with the number of updates in the run in place of
        the number of steps. None to use `step`.
      mesh: the mesh of the program.
      stack: the optimizers from which the number of updates in the run is computed. They are not
        read before the graph is lowered, so the caller may still add optimizers to this list.
    """
    if schedule_step is None or not isinstance(schedule, functools.partial):
        return rate_of_step(schedule, step)
    total = schedule.keywords["total_train_steps"]
    return rate_at(
        lambda step, **length: rate_of_step(functools.partial(schedule, **length), step),
        schedule_step(mesh),
        lambda: _updates_in(total, stack),
    )


def rate_of_step(learning_rate: LearningRate, step: tf.Tensor) -> Any:
    """Returns the learning rate of a step: None, a number, or the scalar that a schedule gives.

    `learning_rate` is a result of `resolve_learning_rate`. Raises ConfigError if `learning_rate` is
    a schedule that raises an exception for `step`, or that returns no scalar.
    """
    if not callable(learning_rate):
        return learning_rate
    try:
        rate = learning_rate(step=step)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"train.run.learning_rate_schedule cannot be called: {first_line(error)}"
        ) from error
    if isinstance(rate, mtf.Tensor):
        dims = rate.shape.to_integer_list
    else:
        shape = tf.TensorShape(rate.shape if hasattr(rate, "shape") else np.shape(rate))
        dims = shape.as_list() if shape.rank else []
    if dims:
        raise ConfigError(
            f"train.run.learning_rate_schedule gives {rate!r}, of the shape {dims}; it must "
            "give one number, a scalar"
        )
    return rate


def _check_schedule(function: Callable[..., Any], by_name: bool) -> None:
    """Raises ConfigError for a function that does not accept a step and a number of steps.

    If `by_name` is True, the function has to accept the keywords ``step`` and
    ``total_train_steps``. If not, it has to accept the two numbers by position.
    """
    try:
        signature = inspect.signature(function)
        if by_name:
            signature.bind_partial(step=0, total_train_steps=1)
        else:
            signature.bind_partial(0, 1)
    except TypeError as error:
        raise ConfigError(
            "train.run.learning_rate_schedule: a schedule takes the arguments step and "
            f"total_train_steps; {getattr(function, '__name__', 'it')}{signature}: {error}"
        ) from error
    except ValueError:  # a function of C does not say what it takes
        return


@contextlib.contextmanager
def adafactor_follows_schedule(
    schedule_step: Callable[[Any], Any] | None, mesh: mtf.Mesh
) -> Iterator[None]:
    """Makes Adafactor's default decay rate follow the step that learning rate schedules get.

    Only Adafactor optimizers that are made inside the ``with`` block change. `schedule_step` is a
    function that is called with `mesh` and returns the step. If `schedule_step` is None, the decay
    rate follows the global step, as it does outside the block.
    """
    if schedule_step is None:
        yield
        return
    count = schedule_step

    def decay(step: tf.Tensor, **length: Any) -> tf.Tensor:
        del length
        with _replaced(tf.train, "get_or_create_global_step", lambda: step):
            return mtf.optimize.adafactor_decay_rate_pow()

    def default(self: Any) -> mtf.Tensor:
        del self
        return rate_at(decay, count(mesh), lambda: None)

    with _replaced(mtf.optimize.AdafactorOptimizer, "_decay_rate_default", default):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _updates_in(steps: int, stack: Sequence[Any]) -> int:
    """Returns how many updates the optimizers `stack` make in `steps` steps if none is skipped."""
    for one in stack:
        if isinstance(one, GradientAccumulationOptimizer):
            steps, _ = updates_before([steps, None], one.backward_passes_per_step, steps)
    return steps
