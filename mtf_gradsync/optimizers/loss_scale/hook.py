"""What a session logs for LossScaleOptimizer."""

from __future__ import annotations

import logging
from typing import Any

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.optimizers.loss_scale.not_finite import Told

_logger = logging.getLogger("mtf_gradsync")


class LossScaleHook(tf.train.SessionRunHook):
    """Logs which gradients of which shards a step was left out for, where it cannot print.

    Made by `LossScaleOptimizer.make_session_run_hook`.
    """

    def __init__(self, optimizer: Any):
        """Remembers the LossScaleOptimizer."""
        self._optimizer = optimizer
        self._told: Told | None = None

    def begin(self) -> None:
        """See `tf.train.SessionRunHook.begin`.

        Raises:
          ValueError: gradients were not applied before.
        """
        told = self._optimizer.told
        if told is None:
            raise ValueError(
                "LossScaleOptimizer.apply_gradients (or apply_grads) has to be called before its "
                "hook is used."
            )
        self._told = told.watch() if told.takes_a_hook else None

    def after_create_session(self, session: Any, coord: Any) -> None:
        """See `tf.train.SessionRunHook.after_create_session`."""
        del coord
        if self._told:
            self._told.message(session)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """See `tf.train.SessionRunHook.after_run`."""
        del run_values
        message = self._told.message(run_context.session) if self._told else None
        if message:
            _logger.warning("%s", message)
