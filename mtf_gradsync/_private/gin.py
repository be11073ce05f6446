"""What gin does not say by its public functions."""

from __future__ import annotations

import inspect
from typing import Any

import gin


def bindings() -> dict[tuple[str, str, str], Any]:
    """What gin's configuration binds: (scope, configurable, parameter) -> value, not evaluated."""
    return {
        (scope, selector, parameter): value
        for (scope, selector), values in gin.config._CONFIG.items()
        for parameter, value in values.items()
    }


def registered() -> dict[str, list[str]]:
    """The parameters of all configurables that gin knows, by full name."""
    found = {}
    for name, entry in gin.config._REGISTRY.items():
        try:
            found[name] = list(inspect.signature(entry.wrapped).parameters)
        except (TypeError, ValueError):  # of C
            found[name] = []
    return found
