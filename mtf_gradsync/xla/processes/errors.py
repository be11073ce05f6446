"""Which errors may be those of a process that is lost."""

from __future__ import annotations


def is_from_xla(error: BaseException | None) -> bool:
    """Whether XLA raised an error, or the one that caused it, or one that was being handled."""
    while error is not None:
        if type(error).__name__ in ("XlaRuntimeError", "JaxRuntimeError"):
            return True
        error = error.__cause__ or error.__context__
    return False
