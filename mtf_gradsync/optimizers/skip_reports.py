"""Wrappers that skip steps or islands, and report them."""

from __future__ import annotations

from typing import Union

from mtf_gradsync.optimizers.pairs import OfStep
from mtf_gradsync.optimizers.wrapper import Wrapper
from mtf_gradsync.step import Watched, WatchHook


class ReportsSkips(Wrapper):
    """A wrapper that skips something: the step reports it, or a session hook."""

    _skip_report = OfStep[Union[Watched, None]](None)

    @property
    def skip_report(self) -> Watched | None:
        """The operation that reports what was skipped; None before gradients were applied."""
        return self._skip_report

    def make_session_run_hook(self) -> WatchHook:
        """Makes a hook that logs what a step skipped, and why.

        On placement meshes the step itself prints that, and the hook does nothing. Its `begin`
        raises ValueError if gradients were not applied before.
        """

        def skip_report() -> Watched | None:
            self._check_applied("its hook is used")
            return self._skip_report

        return WatchHook(skip_report)
