"""Access to gin's configuration beyond gin's public functions."""

from __future__ import annotations

import contextlib
import inspect
import re
from typing import Any, Iterable, Iterator

import gin

from mtf_gradsync.extension import load_configurables


def bindings() -> dict[tuple[str, str, str], Any]:
    """Returns the values that gin has bound, not evaluated, by (scope, configurable, parameter)."""
    return {
        (scope, selector, parameter): value
        for (scope, selector), values in gin.config._CONFIG.items()
        for parameter, value in values.items()
    }


def called_in(name: str) -> list[str]:
    """Returns the keys of the bindings that call a configurable.

    Their values contain the reference ``@name()``, with parentheses.
    """
    return [
        f"{scope}/{gin.config._REGISTRY.minimal_selector(selector)}.{parameter}".lstrip("/")
        for (scope, selector, parameter), value in bindings().items()
        for one in gin.config.iterate_references(value)
        if one.evaluate and one.selector.split(".")[-1] == name
    ]


def take(selector: str) -> dict[str, Any]:
    """Unbinds the parameters of a configurable that are bound without a scope; returns them."""
    return gin.config._CONFIG.pop(("", selector), {})


@contextlib.contextmanager
def bound(lines: Iterable[str]) -> Iterator[None]:
    """Binds these lines of a gin file inside the block; afterwards the old bindings return."""
    before = {key: dict(values) for key, values in gin.config._CONFIG.items()}
    try:
        with gin.unlock_config():
            gin.parse_config(list(lines))
        yield
    finally:
        gin.config._CONFIG.clear()
        gin.config._CONFIG.update(before)


def short_name(selector: str) -> str:
    """Returns the shortest name by which a gin file may call a configurable."""
    return gin.config._REGISTRY.minimal_selector(selector)


def unused_macros() -> list[str]:
    """Returns the names of the macros that no binding refers to."""
    macro = gin.get_configurable("gin.macro")
    used = {
        scope
        for one in gin.config.iterate_references(gin.config._CONFIG, to=macro)
        for scope, _ in [one.config_key]
    }
    return [scope for scope, selector, _ in bindings() if selector == _MACRO and scope not in used]


# What `note_written` was told, and the parameters that were bound then.
_written: tuple[set[tuple[str, str, str]], set[tuple[str, str]]] = (set(), set())


def note_written(texts: Iterable[str]) -> None:
    """Stores which bindings the user wrote or named, for a later call of `unread`."""
    global _written
    keys = [key for text in texts for key in _KEY.findall(text)]
    _written = set(bindings()), {(selector.split(".")[-1], name) for selector, name in keys}


def unread() -> list[str]:
    """Returns the names of the bindings, except macros, that no call has read yet.

    If `note_written` was called for this configuration, it leaves out bindings of optimizers that
    the texts given to `note_written` do not have: they come from an included file, and the texts
    choose another optimizer.
    """
    there, written = _written
    is_noted = set(bindings()) == there
    read = {
        (scope, selector, parameter)
        for (scope, selector), values in gin.config._OPERATIVE_CONFIG.items()
        for parameter in values
    }

    def is_read(scope: str, selector: str, parameter: str) -> bool:
        return any(
            (selector, parameter) == (one, name)
            and (not scope or where == scope or where.startswith(scope + "/"))
            for where, one, name in read
        )

    return [
        f"{scope}/{gin.config._REGISTRY.minimal_selector(selector)}.{parameter}".lstrip("/")
        for scope, selector, parameter in bindings()
        if selector != _MACRO and not is_read(scope, selector, parameter)
        if not is_noted
        or not selector.endswith("Optimizer")
        or (selector.split(".")[-1], parameter) in written
    ]


_MACRO = "gin.macro"
# A configurable and its parameter, to which a line of a gin file gives a value.
_KEY = re.compile(r"^\s*(?:[\w/]+/)?([\w.]+)\.(\w+)\s*=", re.MULTILINE)


def bindings_in(text: str) -> dict[str, str]:
    """Returns the bindings in a text of `gin.operative_config_str`: one-line values by name."""
    # A long value begins with a backslash, in the next line.
    return {name: " ".join(value.lstrip("\\").split()) for name, value in _BINDING.findall(text)}


# A value goes on in lines that are indented, or that close a bracket.
_BINDING = re.compile(r"^([^\s#=]+) = (.*(?:\n[ \])}].*)*)", re.MULTILINE)


def registered() -> dict[str, list[str]]:
    """Returns the parameters of each configurable that gin knows, by its full name."""
    load_configurables()
    found = {}
    for name, entry in gin.config._REGISTRY.items():
        try:
            found[name] = list(inspect.signature(entry.wrapped).parameters)
        except (TypeError, ValueError):  # of C
            found[name] = []
    return found
