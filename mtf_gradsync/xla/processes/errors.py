"""Errors that another process of the job may have caused."""

from __future__ import annotations

from mtf_gradsync.processes.errors import ProcessesError


class ExchangeError(ProcessesError):
    """The processes could not exchange values of the host; perhaps one of them is lost."""


class OtherProcessError(ProcessesError):
    """Another process has raised an error, which it also reports itself."""


def may_be_from_another_process(error: BaseException | None) -> bool:
    """Returns whether XLA or another process raised an error, its cause or its context."""
    while error is not None:
        if isinstance(error, (ExchangeError, OtherProcessError)):
            return True
        # Perhaps a collective without one of its processes.
        if type(error).__name__ in ("XlaRuntimeError", "JaxRuntimeError"):
            return True
        error = error.__cause__ or error.__context__
    return False
