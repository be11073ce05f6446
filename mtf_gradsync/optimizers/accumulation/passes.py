"""The number of microbatch steps for each update: a constant, or a schedule."""

from __future__ import annotations

from typing import Any, Callable, Union

import numpy as np

from mtf_gradsync._numbers import check_whole_number
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.step import Plan

Passes = Union[int, Callable[[Any], Any]]


def check_passes(passes: Any) -> None:
    """Raises ValueError if passes is neither a whole number of 1 or more nor a function."""
    if isinstance(passes, type) or not callable(passes):
        more = "Or give a function from the update step to one."
        check_whole_number("backward_passes_per_step", passes, more=more)


def _check_whole(passes: Callable[[Any], Any], result: mtf.Tensor | tf.Tensor) -> None:
    if result.shape.ndims or not result.dtype.is_integer:
        raise ValueError(
            f"backward_passes_per_step {passes!r} must return a whole number, got {result!r}."
        )


def _evaluated(passes: Callable[[Any], Any], update_step: mtf.Tensor) -> mtf.Tensor:
    """Evaluates a function of TensorFlow scalars on every processor."""

    def evaluate(step: tf.Tensor) -> tf.Tensor:
        try:
            result = tf.convert_to_tensor(passes(step))
        except Exception as error:
            raise ValueError(
                f"backward_passes_per_step {passes!r} failed with the update step as an mtf scalar "
                f"and as a tf scalar: {error}. Make it a function of one of these."
            ) from error
        _check_whole(passes, result)
        return tf.reshape(tf.cast(result, tf.int32), [])

    return mtf.cwise(evaluate, [update_step], tf.int32, name="passes_schedule")


class _Probe:
    """An update step that raises an error if Python code branches on it."""

    def _refuse(self, *_: Any) -> Any:
        raise TypeError

    __eq__ = __ne__ = __bool__ = __hash__ = __index__ = __int__ = _refuse


def _check_constant(passes: Callable[[Any], Any], result: Any) -> None:
    """Raises ValueError if a function computed a number by comparing the tensor object."""
    try:
        same = passes(_Probe()) == result
    except Exception:
        same = False
    if not same:
        raise ValueError(
            f"backward_passes_per_step {passes!r} branches in Python, when the graph is built and "
            "the value of the update step is not known; write it in mtf or tf operations, such as "
            "lambda step: tf.where(step < 100, 2, 8)."
        )


def passes_at(passes: Passes, update_step: mtf.Tensor) -> Any:
    """Returns the number of microbatch steps of the next update, an int or an int32 mtf scalar.

    A function gets the update step, an int32 mtf scalar, or tf scalars if it fails with that. It
    returns an int, an mtf scalar or a tf scalar; a tensor below 1 counts as 1.
    """
    if not callable(passes):
        return int(passes)
    try:
        with Plan.of(update_step.graph).undone_on_error():
            result = passes(update_step)
    except (TypeError, ValueError, AttributeError):
        result = None
    if isinstance(result, mtf.Tensor):
        _check_whole(passes, result)
        return mtf.cast(result, tf.int32)
    if isinstance(result, (int, float, np.number)):
        _check_constant(passes, result)
        check_passes(result)
        return int(result)
    return _evaluated(passes, update_step)
