"""Calls an input_fn as Estimator does, and returns a step's features and labels."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable

from mtf_gradsync._private.libraries import tf


def call_with_named(fn: Callable[..., Any], **known: Any) -> Any:
    """Calls a function with those of the arguments that its signature names, as Estimator does."""
    # Arguments that a partial function has already are not replaced.
    held = set(fn.keywords) if isinstance(fn, functools.partial) else set()
    names = set(inspect.signature(fn).parameters) - held
    return fn(**{name: value for name, value in known.items() if name in names})


def set_items(params: Any, **items: Any) -> Any:
    """Adds items to params, which are a dict or something with attributes."""
    for name, value in items.items():
        try:
            if hasattr(params, "__setitem__"):
                params[name] = value
            else:
                setattr(params, name, value)
        except (AttributeError, TypeError) as error:
            raise TypeError(
                f"params must be a dict, or an object whose attributes can be set, so that it can "
                f"be given {name!r}; got {params!r}."
            ) from error
    return params


class InitializeIterator(tf.train.SessionRunHook):
    """Initializes an iterator in every new session."""

    def __init__(self, initializer: tf.Operation):
        self._initializer = initializer

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Runs the initializer."""
        del coord
        session.run(self._initializer)


def features_and_labels(
    input_fn: Callable[..., Any], mode: str, params: Any, config: Any
) -> tuple[Any, Any, list[tf.train.SessionRunHook]]:
    """Returns a step's features, labels (or None), and hooks that the input needs.

    input_fn takes none, some or all of mode, params and config. It returns a `tf.data.Dataset` of
    features, or of (features, labels), or such tensors.
    """
    result = call_with_named(input_fn, mode=mode, params=params, config=config)
    hooks: list[tf.train.SessionRunHook] = []
    if isinstance(result, (tf.data.Dataset, tf.compat.v2.data.Dataset)):
        iterator = tf.data.make_initializable_iterator(result)
        hooks.append(InitializeIterator(iterator.initializer))
        result = iterator.get_next()
    if isinstance(result, (list, tuple)):
        if len(result) != 2:
            raise TypeError(
                "input_fn must give features, or a pair of features and labels, got "
                f"{len(result)} elements."
            )
        return result[0], result[1], hooks
    if result is None:
        raise TypeError("input_fn must return a Dataset or tensors, got None.")
    return result, None, hooks
