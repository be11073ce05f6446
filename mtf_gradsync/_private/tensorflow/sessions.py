"""Sessions, summaries and savers of TensorFlow."""

from __future__ import annotations

from typing import Any, Sequence

from mtf_gradsync._private.libraries import tf


def session_interface() -> type:
    """Returns the class by which savers and hooks recognise sessions.

    Read on TensorFlow 2.12 to 2.21.
    """
    from tensorflow.python.client import session

    return session.SessionInterface


def singular_monitored_session(
    creator: tf.train.SessionCreator, hooks: Sequence[Any]
) -> tf.train.SingularMonitoredSession:
    """Returns a monitored session of a creator's session that does not restart itself.

    Read on TensorFlow 2.12 to 2.21: its own constructor takes what its creator is made of.
    """

    class Singular(tf.train.SingularMonitoredSession):
        def __init__(self) -> None:
            super(tf.train.SingularMonitoredSession, self).__init__(
                creator, hooks, should_recover=False
            )

    return Singular()


def summary_writers(graph: tf.Graph) -> list[tf.Operation]:
    """Returns the operations that open a graph's writers of version 2 summaries.

    Input 0 of each is the writer. Read on TensorFlow 2.12 to 2.21: ``summary_ops_v2`` keeps them
    in a collection.
    """
    return graph.get_collection("_SUMMARY_WRITER_V2")


def add_saving_listeners(hook: tf.train.CheckpointSaverHook, listeners: Sequence[Any]) -> None:
    """Adds listeners to a hook that saves checkpoints.

    Read on TensorFlow 2.12 to 2.21; Estimator adds them in the same way.
    """
    hook._listeners.extend(listeners)
