"""Docstrings: who has one, and how its first line begins."""

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator

import mtf_gradsync
from tests.documents import ROOT

_VERB = re.compile(r"[A-Z][a-z-]*s\b")
# They end like verbs.
_NO_VERBS = {
    "As",
    "Always",
    "Bytes",
    "Gradients",
    "Its",
    "Names",
    "Operations",
    "Seconds",
    "This",
    "Values",
}
_QUESTIONS = ("How ", "See ", "What ", "Where ", "Whether ", "Which ", "Why ")


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


def first_lines() -> Iterator[tuple[str, ast.AST, str]]:
    """Yields place, node and first line of all docstrings."""
    for path in sorted((ROOT / "mtf_gradsync").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node)
                if text:
                    place = f"{path.relative_to(ROOT)}, {getattr(node, 'name', 'module')}"
                    yield place, node, text.splitlines()[0]


def begins_well(node: ast.AST, line: str) -> bool:
    """Returns whether a first line has a function's verb, or a class's or module's noun."""
    if not isinstance(node, ast.FunctionDef):
        return not line.startswith(_QUESTIONS)
    if any("property" in ast.unparse(one) for one in node.decorator_list):
        return not line.startswith("See ")
    return bool(_VERB.match(line)) and line.split()[0].strip(",:;.") not in _NO_VERBS


def test_first_lines_say_what_the_caller_gets():
    lines = list(first_lines())
    assert len(lines) > 3000
    assert [(place, line) for place, node, line in lines if not begins_well(node, line)] == []
