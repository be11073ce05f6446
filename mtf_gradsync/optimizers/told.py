"""Wrappers that skip something, and what tells of it."""

from __future__ import annotations

from typing import Union

from mtf_gradsync.optimizers.pairs import OfStep
from mtf_gradsync.optimizers.pipeline import StepBuilder
from mtf_gradsync.step import Watched, WatchHook


class TellsSkips:
    """Mixed into wrappers that skip something: it is told by the step, or by a session hook."""

    step: OfStep[StepBuilder | None]
    _told = OfStep[Union[Watched, None]](None)

    @property
    def told(self) -> Watched | None:
        """What tells of what was skipped; None before gradients were applied."""
        return self._told

    def make_session_run_hook(self) -> WatchHook:
        """Makes a hook that logs what was skipped in a step, and for what.

        On placement meshes the step itself prints that, and the hook does nothing.

        Returns:
          A `tf.train.SessionRunHook`. Its `begin` raises ValueError if gradients were not applied
          before.
        """

        def told() -> Watched | None:
            if self.step is None:
                raise ValueError(
                    f"{type(self).__name__}.apply_gradients (or apply_grads) has to be called "
                    "before its hook is used."
                )
            return self._told

        return WatchHook(told)
