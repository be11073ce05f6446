"""Docstrings: every public method has its own, or overrides a method of a base class."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import mtf_gradsync


def modules() -> Iterator[object]:
    """Imports and yields all modules of the package."""
    for found in pkgutil.walk_packages(mtf_gradsync.__path__, "mtf_gradsync."):
        if not found.name.endswith("__main__"):
            yield importlib.import_module(found.name)


def is_documented(cls: type, name: str) -> bool:
    """Returns whether a member has a docstring, or a base class has a member of this name."""
    return bool(vars(cls)[name].__doc__) or any(name in vars(base) for base in cls.__mro__[1:])


def test_public_methods_are_documented_where_they_are_new():
    members = [
        (cls, name)
        for module in modules()
        for cls in vars(module).values()
        if inspect.isclass(cls) and cls.__module__ == module.__name__
        for name, member in vars(cls).items()
        if not cls.__name__.startswith("_") and not name.startswith("_")
        if inspect.isfunction(member) or isinstance(member, (property, classmethod, staticmethod))
    ]
    assert len(members) > 500
    assert [f"{c.__module__}.{c.__name__}.{n}" for c, n in members if not is_documented(c, n)] == []
