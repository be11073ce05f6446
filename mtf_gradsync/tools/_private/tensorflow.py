"""Private names of TensorFlow that tools use, one function for each."""

from __future__ import annotations

from typing import Any, Sequence

from mtf_gradsync.extension import tf


def singular_monitored_session(
    creator: tf.train.SessionCreator, hooks: Sequence[Any]
) -> tf.train.SingularMonitoredSession:
    """Returns a monitored session that does not restart itself after an exception.

    `creator` makes the plain session inside the monitored session. `hooks` are objects of
    `tf.train.SessionRunHook`.
    """

    class Singular(tf.train.SingularMonitoredSession):
        def __init__(self) -> None:
            super(tf.train.SingularMonitoredSession, self).__init__(
                creator, hooks, should_recover=False
            )

    return Singular()


def summary_writers(graph: tf.Graph) -> list[tf.Operation]:
    """Returns the operations of a graph that open its version 2 summary writers.

    The writer that an operation opens is the operation's input 0.
    """
    return graph.get_collection("_SUMMARY_WRITER_V2")


def add_saving_listeners(hook: tf.train.CheckpointSaverHook, listeners: Sequence[Any]) -> None:
    """Adds `listeners`, `tf.train.CheckpointSaverListener` objects, to a hook.

    `hook` saves checkpoints. From now on it calls the listeners before and after each save.
    """
    hook._listeners.extend(listeners)
