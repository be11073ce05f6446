"""Lets TensorFlow's monitored sessions and their hooks run on every runtime."""

from __future__ import annotations

from typing import Any, Callable, ContextManager

from mtf_gradsync import simd
from mtf_gradsync._private.libraries import tf
from mtf_gradsync._private.tensorflow import session_interface
from mtf_gradsync.optimizers.state.restoring import ReshardingSaver

_SessionInterface: Any = session_interface()


class ProgramSession(_SessionInterface):
    """A session on the cores of a SIMD program, with the interface of a ``tf.Session``."""

    def __init__(self, graph: tf.Graph, session: simd.CpuReplicaSession):
        """Takes the graph of the program, and a session on CPU replicas or XLA devices."""
        self._graph = graph
        self._session = session

    @property
    def graph(self) -> tf.Graph:
        """The program's graph, as it was built."""
        return self._graph

    @property
    def sess_str(self) -> str:
        """Where TensorFlow's part runs: in this process."""
        return ""

    def run(
        self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
    ) -> Any:
        """See ``tf.Session.run``. Options and metadata have no meaning here."""
        del options, run_metadata
        flat: list[Any] = []
        rebuild = _taken_apart(fetches, flat)
        return rebuild(iter(self._session.run(flat, feed_dict)))

    def close(self) -> None:
        """Frees the session."""
        self._session.close()


def _taken_apart(fetches: Any, flat: list[Any]) -> Callable[[Any], Any]:
    """Appends single fetches to a list; returns what makes the structure of their values.

    Hooks' fetches are by hook, which nothing can sort, as `tf.nest` would.
    """
    if fetches is None:
        return lambda values: None
    if isinstance(fetches, dict):
        parts = {key: _taken_apart(value, flat) for key, value in fetches.items()}
        return lambda values: {key: part(values) for key, part in parts.items()}
    if isinstance(fetches, (list, tuple)):
        each = [_taken_apart(value, flat) for value in fetches]
        kind = type(fetches)
        if hasattr(fetches, "_fields"):
            return lambda values: kind(*(part(values) for part in each))
        return lambda values: kind(part(values) for part in each)
    flat.append(fetches)
    return next


class DeviceSessionCreator(tf.train.SessionCreator):
    """Makes sessions on devices, from a checkpoint where there is one.

    A monitored session makes another session where the first one lost a worker. TensorFlow's own
    `ChiefSessionCreator` would begin that one, too, with the checkpoint that the first began with.
    """

    def __init__(
        self,
        graph: tf.Graph,
        config: tf.ConfigProto,
        scaffold: tf.train.Scaffold | None,
        checkpoint: Callable[[], ContextManager[str | None]],
    ):
        """Takes what a session is made of.

        Args:
          graph: the graph.
          config: of the sessions.
          scaffold: the spec's, or None.
          checkpoint: gives the path to begin with, None for initial values; asked for each
            session, and entered while that begins.
        """
        self._graph = graph
        self._config = config
        self._scaffold = scaffold or tf.train.Scaffold()
        self._checkpoint = checkpoint

    def create_session(self) -> tf.Session:
        """Makes a session."""
        with self._checkpoint() as path:
            chief = tf.train.ChiefSessionCreator(
                self._scaffold, config=self._config, checkpoint_filename_with_path=path
            )
            with self._graph.as_default():
                session = chief.create_session()
        _recover_older(self._scaffold.saver, path)
        return session


class ProgramSessionCreator(tf.train.SessionCreator):
    """Makes sessions on a SIMD program, from a checkpoint where there is one."""

    def __init__(
        self,
        graph: tf.Graph,
        make: Callable[[], Any],
        scaffold: tf.train.Scaffold | None,
        checkpoint: Callable[[], ContextManager[str | None]],
    ):
        """Takes what a session is made of.

        Args:
          graph: the program's graph.
          make: makes a session of `mtf_gradsync.simd` or `mtf_gradsync.xla`, variables initialized.
          scaffold: the spec's, or None.
          checkpoint: as for `DeviceSessionCreator`.
        """
        self._graph = graph
        self._make = make
        self._scaffold = scaffold or tf.train.Scaffold()
        self._checkpoint = checkpoint

    def create_session(self) -> ProgramSession:
        """Makes a session; hooks copy the masters to the slices after it."""
        scaffold = self._scaffold
        savers = self._graph.get_collection(tf.GraphKeys.SAVERS)
        with self._graph.as_default():
            saver = scaffold.saver or (savers[0] if savers else ReshardingSaver(allow_empty=True))
            saver.build()
            begin = scaffold.local_init_op
            if begin is None:
                begin = tf.train.Scaffold.default_local_init_op()
        session = ProgramSession(self._graph, self._make())
        try:
            with self._checkpoint() as path:
                if path:
                    saver.restore(session, path)
            if path:
                _recover_older(saver, path)
            elif scaffold.init_fn:
                scaffold.init_fn(session)
            session.run(begin)
        except BaseException:
            session.close()
            raise
        return session


def _recover_older(saver: tf.train.Saver, path: str | None) -> None:
    """Lets a saver know of the checkpoints beside one, which it deletes when they are too many."""
    known = tf.train.get_checkpoint_state(path.rpartition("/")[0]) if path else None
    if known:
        saver.recover_last_checkpoints(known.all_model_checkpoint_paths)
