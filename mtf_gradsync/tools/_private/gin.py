"""Access to gin's configuration beyond gin's public functions."""

from __future__ import annotations

import contextlib
import inspect
import re
from typing import Any, Iterable, Iterator, NamedTuple

import gin

from mtf_gradsync.extension import load_configurables


class Binding(NamedTuple):
    """A parameter to which gin binds a value; as text it is "scope/name.parameter".

    `scope` is "" for a binding without a scope. `selector` is the configurable's full name.
    """

    scope: str
    selector: str
    parameter: str

    @property
    def name(self) -> str:
        """The configurable's name without its modules."""
        return self.selector.split(".")[-1]

    def __str__(self) -> str:
        return f"{self.scope}/{short_name(self.selector)}.{self.parameter}".lstrip("/")


def bindings() -> dict[Binding, Any]:
    """Returns all values that gin has bound.

    Values are as gin keeps them: the function of a reference such as ``@f()`` is not called.
    """
    return _by_binding(gin.config._CONFIG)


def _by_binding(config: dict[tuple[str, str], dict[str, Any]]) -> dict[Binding, Any]:
    return {
        Binding(scope, selector, parameter): value
        for (scope, selector), values in config.items()
        for parameter, value in values.items()
    }


def bindings_that_call(name: str) -> list[str]:
    """Returns which bindings call the configurable `name`, such as ["CrossShardOptimizer.opt"].

    A binding calls a configurable if its value contains the reference ``@name()``, with
    parentheses. `name` is the configurable's name without its module. In the result a binding with
    a scope begins with the scope and a slash.
    """
    return [
        str(key)
        for key, value in bindings().items()
        for one in gin.config.iterate_references(value)
        if one.evaluate and one.selector.split(".")[-1] == name
    ]


def pop_bindings(selector: str) -> dict[str, Any]:
    """Removes the bindings of a configurable that have no scope, and returns them.

    `selector` is the configurable's full name. The result has the removed values by the names of
    their parameters.
    """
    return gin.config._CONFIG.pop(("", selector), {})


@contextlib.contextmanager
def bound(lines: Iterable[str]) -> Iterator[None]:
    """Binds parameters inside a ``with`` block; after it, all bindings are as they were before.

    `lines` are lines of a gin file, such as "train.run.batch_size = 8".
    """
    before = {key: dict(values) for key, values in gin.config._CONFIG.items()}
    try:
        with gin.unlock_config():
            gin.parse_config(list(lines))
        yield
    finally:
        gin.config._CONFIG.clear()
        gin.config._CONFIG.update(before)


def short_name(selector: str) -> str:
    """Returns the shortest name that a gin file may use for a configurable.

    `selector` is the configurable's full name, with all modules.
    """
    return gin.config._REGISTRY.minimal_selector(selector)


def macros() -> list[str]:
    """Returns the names of the macros that have a value."""
    return [key.scope for key in bindings() if key.selector == _MACRO]


def unused_macros() -> list[str]:
    """Returns the names of the macros that no binding refers to."""
    macro = gin.get_configurable("gin.macro")
    references = gin.config.iterate_references(gin.config._CONFIG, to=macro)
    used = {scope for scope, _ in (one.config_key for one in references)}
    return [scope for scope in macros() if scope not in used]


# What `note_user_bindings` was told, and the parameters that were bound then.
_written: tuple[set[Binding], set[tuple[str, str]]] = (set(), set())


def note_user_bindings(texts: Iterable[str]) -> None:
    """Stores which bindings the user has written, for a later call of `unread_bindings`.

    `texts` are the contents of the gin files that the user named, and the bindings that the user
    gave as flags. The contents of files that these gin files include are not in `texts`.
    """
    global _written
    keys = [key for text in texts for key in _KEY.findall(text)]
    _written = set(bindings()), {(selector.split(".")[-1], name) for selector, name in keys}


def unread_bindings() -> list[str]:
    """Returns the bindings, except macros, that no call has read yet, as "scope/name.parameter".

    If `note_user_bindings` was called for gin's present configuration, a binding of an optimizer is
    left out unless the user has written this binding. A binding that the user has not written comes
    from an included file, and is unread because the user has chosen another optimizer.
    """
    there, written = _written
    is_noted = set(bindings()) == there
    read = _by_binding(gin.config._OPERATIVE_CONFIG)

    def is_read(key: Binding) -> bool:
        return any(
            (key.selector, key.parameter) == (one, name)
            and (not key.scope or where == key.scope or where.startswith(key.scope + "/"))
            for where, one, name in read
        )

    return [
        str(key)
        for key in bindings()
        if key.selector != _MACRO and not is_read(key)
        if not is_noted
        or not key.name.endswith("Optimizer")
        or (key.name, key.parameter) in written
    ]


_MACRO = "gin.macro"
# A configurable and its parameter, to which a line of a gin file gives a value.
_KEY = re.compile(r"^\s*(?:[\w/]+/)?([\w.]+)\.(\w+)\s*=", re.MULTILINE)


def bindings_in(text: str) -> dict[str, str]:
    """Returns the bindings in a text that `gin.operative_config_str` has written.

    The result is a dictionary from "scope/name.parameter" to the bound value, as text in one line.
    """
    # A long value begins with a backslash, in the next line.
    return {name: " ".join(value.lstrip("\\").split()) for name, value in _BINDING.findall(text)}


# A value goes on in lines that are indented, or that close a bracket.
_BINDING = re.compile(r"^([^\s#=]+) = (.*(?:\n[ \])}].*)*)", re.MULTILINE)


def registered() -> dict[str, list[str]]:
    """Returns the names of each configurable's parameters, by the configurable's full name.

    Before the names are read, all configurables of this package are loaded. The list of names is
    empty for a function written in C whose parameters are not known.
    """
    load_configurables()
    found = {}
    for name, entry in gin.config._REGISTRY.items():
        try:
            found[name] = list(inspect.signature(entry.wrapped).parameters)
        except (TypeError, ValueError):  # of C
            found[name] = []
    return found
