"""The tests themselves: what they share is in helper modules."""

import ast
import pathlib

TESTS = pathlib.Path(__file__).parent


def imported(path):
    """Names of modules that a file imports, and of what it imports from them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_nothing_is_imported_from_test_modules():
    """What is imported is tested with whatever imports it, and is found where helpers are."""
    modules = {
        f"tests.{'.'.join(path.relative_to(TESTS).with_suffix('').parts)}"
        for path in TESTS.rglob("test_*.py")
    }
    found = {str(path): modules.intersection(imported(path)) for path in TESTS.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {}
