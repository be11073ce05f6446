"""What gin does not say by its public functions."""

from __future__ import annotations

from typing import Any

import gin


def bindings() -> dict[tuple[str, str, str], Any]:
    """What gin's configuration binds: (scope, configurable, parameter) -> value, not evaluated."""
    return {
        (scope, selector, parameter): value
        for (scope, selector), values in gin.config._CONFIG.items()
        for parameter, value in values.items()
    }
