"""Calls an input_fn as Estimator does."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable

from mtf_gradsync._private.libraries import tf


def call_with_known(fn: Callable[..., Any], **known: Any) -> Any:
    """Calls a function with those of the known arguments that it takes by name.

    What a `functools.partial` holds already it keeps.
    """
    held = set(fn.keywords) if isinstance(fn, functools.partial) else set()
    parameters = inspect.signature(fn).parameters.values()
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters} - held
    return fn(
        **{
            name: value
            for name, value in known.items()
            if (takes_any and name not in held) or name in names
        }
    )


def features_and_labels(
    input_fn: Callable[..., Any], mode: str, params: Any, config: Any
) -> tuple[Any, Any]:
    """The tensors of a step, in the default graph.

    Args:
      input_fn: takes none, some or all of mode, params and config. Returns a `tf.data.Dataset` of
        features, or of (features, labels), or such tensors.
      mode: "train", "eval" or "infer".
      params: handed on.
      config: handed on.

    Returns:
      Features and labels; None for labels that there are not.

    Raises:
      TypeError: it returns something else.
    """
    result = call_with_known(input_fn, mode=mode, params=params, config=config)
    if isinstance(result, (tf.data.Dataset, tf.compat.v2.data.Dataset)):
        iterator = tf.data.make_initializable_iterator(result)
        # Every way to begin a session runs the initializers of tables.
        tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
        result = iterator.get_next()
    if isinstance(result, (list, tuple)):
        if len(result) != 2:
            raise TypeError(
                "input_fn must give features, or a pair of features and labels, got "
                f"{len(result)} elements."
            )
        return result[0], result[1]
    if result is None:
        raise TypeError("input_fn must return a Dataset or tensors, got None.")
    return result, None
