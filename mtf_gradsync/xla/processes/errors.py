"""What goes wrong between processes."""

from __future__ import annotations

# EX_TEMPFAIL of sysexits.h: nothing is wrong with the program; started again, it goes on.
LOST_PROCESS_EXIT_CODE = 75


class ProcessesError(RuntimeError):
    """Processes cannot work together on one mesh."""


def is_from_xla(error: BaseException | None) -> bool:
    """Whether XLA raised an error, or the one that caused it, or one that was being handled."""
    while error is not None:
        if type(error).__name__ in ("XlaRuntimeError", "JaxRuntimeError"):
            return True
        error = error.__cause__ or error.__context__
    return False
