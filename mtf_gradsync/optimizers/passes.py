"""How many micro steps make an update: a number, or a schedule over update steps."""

from __future__ import annotations

from typing import Any, Callable, Union

import numpy as np

from mtf_gradsync._tf_compat import mtf, tf
from mtf_gradsync.gradients import StageOperation

Passes = Union[int, Callable[[Any], Any]]


def check_passes(passes: Any) -> None:
    """Raises ValueError if passes is neither a whole number of at least 1 nor a function."""
    if callable(passes) and not isinstance(passes, type):
        return
    if isinstance(passes, bool) or not isinstance(passes, (int, np.integer)) or passes < 1:
        raise ValueError(
            "backward_passes_per_step must be a whole number of 1 or more, or a function from "
            f"the update step to one, got {passes!r}."
        )


class _Schedule(StageOperation):
    """Evaluates a function of TensorFlow scalars on every processor."""

    def __init__(self, step: mtf.Tensor, fn: Callable[[tf.Tensor], Any]):
        self._fn = fn
        super().__init__([step], [step.shape], "passes_schedule", [tf.int32])

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        mesh_impl = lowering.mesh_impl(self)
        value = lowering.tensors[self.inputs[0]]

        def evaluate(step: tf.Tensor) -> tf.Tensor:
            return tf.reshape(tf.cast(self._fn(step), tf.int32), [])

        self.set_outputs(lowering, [mesh_impl.slicewise(evaluate, value)])


def passes_at(passes: Passes, update_step: mtf.Tensor) -> Any:
    """The number of micro steps of the update that comes after update_step updates.

    Args:
      passes: a number, or a function. A function is called with the update step as an mtf int32
        scalar; if it is written in TensorFlow's operations and cannot take that, it gets tf
        scalars instead. It returns an int, an mtf scalar or a tf scalar.
      update_step: int32 mtf scalar.

    Returns:
      An int or an int32 mtf scalar.

    Raises:
      ValueError: the function returns something else, or an int below 1.
    """
    if not callable(passes):
        return int(passes)
    graph = update_step.graph
    before = list(graph.operations)
    try:
        result = passes(update_step)
    except (TypeError, ValueError, AttributeError):
        result = None
        graph.operations[:] = before
    if isinstance(result, mtf.Tensor):
        if result.shape.ndims:
            raise ValueError(
                f"backward_passes_per_step must return a scalar, got shape {result.shape}."
            )
        return mtf.cast(result, tf.int32)
    if isinstance(result, (int, np.integer)) and not isinstance(result, bool):
        check_passes(int(result))
        return int(result)
    return _Schedule(update_step, passes).outputs[0]
