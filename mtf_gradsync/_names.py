"""Names in messages: how many there are, and the first of them."""

from __future__ import annotations

from typing import Sequence


def some_of(names: Sequence[str], most: int = 3) -> str:
    """Text such as "a, b, c and 31 more": the first names of many, and how many more there are."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def some_lines(lines: Sequence[str], most: int = 3) -> str:
    """The first lines of many, each with its line break in front, and how many more there are."""
    more = [f"\n  and {len(lines) - most} more"] if len(lines) > most else []
    return "".join([*lines[:most], *more])


def counted(names: Sequence[str], noun: str) -> str:
    """Text such as "34 variables: a, b, c and 31 more", or "variable a"; `noun` is singular."""
    if len(names) == 1:
        return f"{noun} {names[0]}"
    return f"{len(names)} {noun}s: {some_of(names)}"
