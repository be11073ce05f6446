"""Checks of numbers that users give. True and False are no numbers here, though Python says so."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import TypeGuard


def is_number(value: Any) -> TypeGuard[float]:
    """Returns whether a value is a real number, Python's or numpy's."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_whole_number(value: Any, least: int = 1) -> TypeGuard[int]:
    """Returns whether a value is a whole number, Python's or numpy's, of at least `least`."""
    return (
        isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least
    )


def check_whole_number(name: str, value: Any, least: int = 1, more: str = "") -> None:
    """Raises ValueError unless an argument is a whole number of at least `least`.

    `more` is a sentence for the end of the error.
    """
    if not is_whole_number(value, least):
        what = f"{name} must be a whole number of {least} or more, got {value!r}."
        raise ValueError(f"{what} {more}".rstrip())
