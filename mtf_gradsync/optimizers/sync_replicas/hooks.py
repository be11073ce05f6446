"""Hooks and queue runners of SyncReplicasOptimizer, which here have no workers to wait for."""

from __future__ import annotations

from typing import Any

from mtf_gradsync._names import counted
from mtf_gradsync._numbers import is_whole_number
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.optimizers.skips import ReportsSkips
from mtf_gradsync.step import WatchHook


class NothingToQueue(tf.train.QueueRunner):
    """A queue runner without threads: the update is part of the training step of a mesh."""

    def __init__(self) -> None:
        # The parent's constructor is not called, as it needs a queue.
        self._exceptions_raised: list[Exception] = []

    @property
    def name(self) -> str:
        """The name of a queue."""
        return "sync_token_q"

    def create_threads(
        self, sess: Any, coord: Any = None, daemon: bool = False, start: bool = False
    ) -> list[Any]:
        """Returns no threads; see `tf.train.QueueRunner.create_threads`."""
        del sess, coord, daemon, start
        return []


class SyncReplicasHook(WatchHook):
    """Checks that a session can train, and on TPUs that it makes updates."""

    def __init__(self, optimizer: SessionInterface, is_chief: bool, num_tokens: int):
        """Takes the arguments of `SessionInterface.make_session_run_hook`."""
        super().__init__(lambda: optimizer.steps_without_update)
        self._optimizer, self._is_chief, self._num_tokens = optimizer, is_chief, num_tokens
        self._not_ready: Any = None

    def begin(self) -> None:
        """Raises ValueError if gradients were not applied before, or num_tokens are too few."""
        self._optimizer._check_applied("its hook is used")
        if self._is_chief:
            self._optimizer.get_init_tokens_op(self._num_tokens)
        with tf.control_dependencies(None):
            self._not_ready = tf.report_uninitialized_variables(tf.global_variables())
        super().begin()

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Raises RuntimeError if variables are not initialized."""
        missing = [name.decode() for name in session.run(self._not_ready)]
        if missing:
            raise RuntimeError(
                "The model is not ready for SyncReplicasOptimizer, as variables are not "
                f"initialized: {counted(missing, 'variable')}. Run their initializers first."
            )
        super().after_create_session(session, coord)


class SessionInterface(ReportsSkips):
    """A wrapper with the methods of `tf.compat.v1.train.SyncReplicasOptimizer` for sessions."""

    axes: ReplicaAxes
    _to_aggregate: int

    def make_session_run_hook(  # type: ignore[override]  # the arguments are TensorFlow's
        self, is_chief: bool, num_tokens: int = -1
    ) -> SyncReplicasHook:
        """Makes a hook for the session.

        Once the session exists, it checks that variables are initialized. On TPUs it raises
        `NoUpdateError` after more than max_steps_without_update steps without an update; elsewhere
        the step or the session does.

        Args:
          is_chief: whether num_tokens is checked.
          num_tokens: as for `get_init_tokens_op`.

        Returns:
          A `tf.train.SessionRunHook`. Its `begin` raises ValueError if gradients were not applied
          before, or num_tokens are too few.
        """
        return SyncReplicasHook(self, is_chief, num_tokens)

    def get_init_tokens_op(self, num_tokens: int = -1) -> tf.Operation:
        """Returns an operation that does nothing, as replicas in lock step need no tokens.

        A token lets a replica of TensorFlow's optimizer begin its next step. On a mesh all
        replicas take every step together.

        Args:
          num_tokens: tokens to begin with; -1 for replicas_to_aggregate. It is checked as by
            TensorFlow's optimizer.

        Returns:
          A tf operation.

        Raises:
          ValueError: gradients were not applied before, or num_tokens is less than
            replicas_to_aggregate - total_num_replicas.
        """
        self._check_applied("get_init_tokens_op")
        needed = self._to_aggregate - self.axes.num_shards
        if not is_whole_number(num_tokens, -1):
            raise ValueError(f"num_tokens must be a whole number, or -1, got {num_tokens!r}.")
        if num_tokens != -1 and num_tokens < needed:
            raise ValueError(
                f"Too few tokens to finish the first step: num_tokens={num_tokens}, and "
                f"replicas_to_aggregate - total_num_replicas is {needed}."
            )
        return tf.no_op(name="init_tokens")

    def get_chief_queue_runner(self) -> tf.train.QueueRunner:
        """Returns a queue runner without threads, as the update is part of the training step.

        Raises:
          ValueError: gradients were not applied before.
        """
        self._check_applied("get_chief_queue_runner")
        return NothingToQueue()
