"""How many microbatch steps make an update: a number, or a function of the updates made so far."""

from __future__ import annotations

import functools
from typing import Any, Callable, Sequence, Union

import numpy as np

from mtf_gradsync._common import check_whole_number
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients.arguments import Bounds, scalar_of_step, within
from mtf_gradsync.step import StepPlan

Passes = Union[int, Callable[[Any], Any]]
_OR_A_FUNCTION = "Or give a function from the update step to one."


def check_passes(passes: Any) -> Passes:
    """Returns passes; raises ValueError if it is neither a whole number nor a function."""
    if isinstance(passes, type) or not callable(passes):
        return check_whole_number("backward_passes_per_step", passes, more=_OR_A_FUNCTION)
    return passes


def passes_at(passes: Passes, update_step: mtf.Tensor, owner: str) -> Any:
    """Returns the number of microbatch steps of the next update, an int or an int32 mtf scalar.

    A function gets the update step, an int32 mtf scalar, or tf scalars if it fails with that. It
    returns an int, an mtf scalar or a tf scalar. The step checks that a tensor is 1 or more; its
    error names `owner`, a wrapper.
    """
    if not callable(passes):
        return passes
    result = _of_mtf(passes, update_step)
    if isinstance(result, int):
        return result
    if result is None:
        evaluate = functools.partial(_of_tf, passes)
        result = mtf.cwise(evaluate, [update_step], tf.int32, name="passes_schedule")
    else:
        _check_whole(passes, result)
    what = "backward_passes_per_step"
    return scalar_of_step(result, result.mesh, tf.int32, what, owner, Bounds(1))


def updates_before(steps: Sequence[Any], passes: Passes, total: int | None) -> list[Any]:
    """Returns how many updates are made in the microbatch steps before each of some steps.

    No step is skipped. A step is a number, an integer tf tensor, or None, which stays None. If
    `passes` is a function, `total` is the number of microbatch steps of the run.
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
    """Evaluates a function of the update step for all updates that `total` steps begin."""
    found: list[np.ndarray] = []
    count = min(total + 1, 4096)
    with tf.Graph().as_default():
        first = tf.placeholder(tf.int32, [])
        updates = first + tf.range(count)
        mesh, dim = mtf.Mesh(mtf.Graph(), "updates"), mtf.Dimension("update", count)
        result = _of_mtf(passes, mtf.import_tf_tensor(mesh, updates, mtf.Shape([dim])))
        if isinstance(result, int):
            values = tf.fill([count], result)
        elif result is None:
            each = functools.partial(_of_tf, passes)
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


class _Probe:
    """An update step that raises an error if Python code branches on it."""

    def _refuse(self, *_: Any) -> Any:
        raise TypeError

    __eq__ = __ne__ = __bool__ = __hash__ = __index__ = __int__ = _refuse


def _of_mtf(passes: Callable[[Any], Any], update_step: mtf.Tensor) -> int | mtf.Tensor | None:
    """Calls a function with mtf update steps; returns None if it is one of tf scalars.

    Raises ValueError for a number that the function computed by comparing the tensor object.
    """
    try:
        with StepPlan.of(update_step.graph).undone_on_error():
            result = passes(update_step)
    except (TypeError, ValueError, AttributeError):
        return None
    if isinstance(result, (int, float, np.number)):
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
    result = result.value if isinstance(result, mtf.Variable) else result
    return result if isinstance(result, mtf.Tensor) else None


def _of_tf(passes: Callable[[Any], Any], step: tf.Tensor) -> tf.Tensor:
    """Calls a function with a tf update step, on every processor."""
    try:
        result = tf.convert_to_tensor(passes(step))
    except Exception as error:
        raise ValueError(
            f"backward_passes_per_step {passes!r} failed with the update step as an mtf scalar "
            f"and as a tf scalar: {error}. Make it a function of one of these."
        ) from error
    _check_whole(passes, result)
    return tf.reshape(within(result, tf.int32), [])


def _check_whole(passes: Callable[[Any], Any], result: mtf.Tensor | tf.Tensor) -> None:
    if result.shape.ndims or not result.dtype.is_integer:
        raise ValueError(
            f"backward_passes_per_step {passes!r} must return a whole number, got {result!r}."
        )
