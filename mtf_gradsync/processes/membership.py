"""How this process leaves its job: in good order, or with an error for the others."""

from __future__ import annotations

import atexit
import sys
from types import TracebackType
from typing import TypeVar

from mtf_gradsync.processes.watchdog import Watchdog

_LONGEST = 300
_Self = TypeVar("_Self", bound="Membership")


class Membership:
    """A context manager around all work that needs the other processes.

    An exception that leaves the context ends the other processes, too; so does the end of this
    process without `close`, unless the interpreter ends as it should.
    """

    def __init__(self, watchdog: Watchdog):
        self._watchdog = watchdog
        self._closed = False
        atexit.register(self._at_exit)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self._fail(error)

    def close(self) -> None:
        """Waits until all processes have called this, and leaves them."""
        if not self._closed:
            self._closed = True
            self._leave()

    def _leave(self) -> None:
        self._watchdog.leave()

    def _may_be_a_loss(self, error: BaseException) -> bool:
        """Returns whether an error may come of a process that is lost."""
        raise NotImplementedError

    def _fail(self, error: BaseException) -> None:
        if self._closed:
            return
        self._closed = True
        if self._may_be_a_loss(error):
            # Then this does not return.
            self._watchdog.wait_for_verdict()
        text = " ".join(f"{type(error).__name__}: {error}".split())
        self._watchdog.fail(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...")

    def _at_exit(self) -> None:
        uncaught = getattr(sys, "last_value", None)
        if uncaught is not None:
            self._fail(uncaught)
        self.close()
