"""What a session does for SyncReplicasOptimizer: less than the original's, which waits for workers.

References:
  https://www.tensorflow.org/api_docs/python/tf/compat/v1/train/SyncReplicasOptimizer
"""

from __future__ import annotations

from typing import Any

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.optimizers.sync_replicas.no_update import Watch


class NothingToQueue(tf.train.QueueRunner):
    """A queue runner without threads: the update is part of the training step of a mesh."""

    def __init__(self) -> None:
        # The parent's constructor wants a queue; nothing here has one.
        self._exceptions_raised: list[Exception] = []

    @property
    def name(self) -> str:
        """What the queue would be called."""
        return "sync_token_q"

    @property
    def exceptions_raised(self) -> list[Exception]:
        """None, ever."""
        return self._exceptions_raised

    def create_threads(
        self, sess: Any, coord: Any = None, daemon: bool = False, start: bool = False
    ) -> list[Any]:
        """No threads; see `tf.train.QueueRunner.create_threads`."""
        del sess, coord, daemon, start
        return []


class SyncReplicasHook(tf.train.SessionRunHook):
    """Checks that a session can train, and on SIMD meshes that updates do come.

    Made by `SyncReplicasOptimizer.make_session_run_hook`.
    """

    def __init__(self, optimizer: Any, is_chief: bool, num_tokens: int):
        """Remembers what to check.

        Args:
          optimizer: the SyncReplicasOptimizer.
          is_chief: whether to check the tokens.
          num_tokens: as for `get_init_tokens_op`.
        """
        self._optimizer = optimizer
        self._is_chief = is_chief
        self._num_tokens = num_tokens
        self._watch: Watch | None = None
        self._not_ready: Any = None

    def begin(self) -> None:
        """See `tf.train.SessionRunHook.begin`.

        Raises:
          ValueError: gradients were not applied before, or num_tokens are too few.
        """
        if self._optimizer.state is None:
            raise ValueError(
                "SyncReplicasOptimizer.apply_gradients (or apply_grads) has to be called before "
                "its hook is used."
            )
        if self._is_chief:
            self._optimizer.get_init_tokens_op(self._num_tokens)
        with tf.control_dependencies(None):
            self._not_ready = tf.report_uninitialized_variables(tf.global_variables())
            steps = self._optimizer.steps_without_update
            self._watch = steps.watch() if steps and steps.takes_a_hook else None

    def after_create_session(self, session: Any, coord: Any) -> None:
        """See `tf.train.SessionRunHook.after_create_session`.

        Raises:
          RuntimeError: variables are not initialized.
        """
        del coord
        missing = [name.decode() for name in session.run(self._not_ready)]
        if missing:
            raise RuntimeError(
                "The model is not ready for SyncReplicasOptimizer: these variables are not "
                f"initialized: {', '.join(missing)}."
            )

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """See `tf.train.SessionRunHook.after_run`.

        Raises:
          NoUpdateError: too many steps went by without an update.
        """
        del run_values
        error = self._watch.error(run_context.session) if self._watch else None
        if error:
            raise error
