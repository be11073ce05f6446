"""Which errors may be those of a process that is lost."""

from __future__ import annotations

from mtf_gradsync.processes.errors import ProcessesError


class ExchangeError(ProcessesError):
    """The processes could not exchange values of the host; perhaps one of them is lost."""


def is_from_xla(error: BaseException | None) -> bool:
    """Whether XLA raised an error, or the one that caused it, or one that was being handled."""
    while error is not None:
        name = type(error).__name__
        if isinstance(error, ExchangeError) or name in ("XlaRuntimeError", "JaxRuntimeError"):
            return True
        error = error.__cause__ or error.__context__
    return False
