"""Every file and every name of the package that a page, a docstring or a comment gives exists."""

import ast
import functools
import importlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.documents import DOCUMENTS, ROOT

PACKAGE = ROOT / "mtf_gradsync"
# Rooms that examples use as names of variables, such as `gradients`, are left out.
_NAME = re.compile(
    r"(?<![\w./-])(?:gs|mtf_gradsync|(simd|xla|islands|compat_v1|reduce))((?:\.[A-Za-z_]\w*)+)"
)
_PATH = re.compile(
    r"(?<![\w./<-])(?:(?:[\w-]+/)+[\w-]+\.(?:py|gin|md)\b|mtf_gradsync/[\w/-]*\w(?![\w.*/-]))"
)
_COMMENT = re.compile(r"(?m)(?:^|\s)(#.*)$")
# `.X` stands for any name; the rest end names of files (mtf_gradsync.html).
_NOT_NAMES = {"X", "py", "gin", "md", "html", "json", "css", "whl", "png"}
# An installed package has the folder of configs inside; an exported step has its program.
_ELSEWHERE = {"mtf_gradsync/configs", "step/run.py"}


@functools.cache
def texts() -> list[tuple[Path, str]]:
    """Returns pages, and the docstrings and comments of all Python files."""
    return list(_texts())


def _texts() -> Iterator[tuple[Path, str]]:
    for page in DOCUMENTS:
        yield page, page.read_text(encoding="utf-8")
    for folder in ("mtf_gradsync", "tests", "examples", "benchmarks", "docs"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            # Not by tokens, which takes ten times as long; a string with a "#" does no harm.
            for comment in _COMMENT.findall(source):
                yield path, comment
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                    yield path, ast.get_docstring(node) or ""


def exists(name: Sequence[str]) -> bool:
    """Whether ``mtf_gradsync.<name>`` is an attribute or a module."""
    found, module = importlib.import_module("mtf_gradsync"), "mtf_gradsync"
    for part in name:
        if not hasattr(found, part):
            try:
                importlib.import_module(f"{module}.{part}")
            except ImportError:
                return False
        found, module = getattr(found, part), f"{module}.{part}"
    return True


def test_names_exist():
    named = {
        (str(path.relative_to(ROOT)), f"{match[1] or ''}{match[2]}")
        for path, text in texts()
        for match in _NAME.finditer(text)
        if match[2].rsplit(".", 1)[1] not in _NOT_NAMES
    }
    assert len(named) > 300
    assert [
        (path, name) for path, name in sorted(named) if not exists(name.strip(".").split("."))
    ] == []


def test_files_exist():
    # A path begins at the top of the checkout, or inside the package, as CONTRIBUTING's table does.
    tops = (ROOT, PACKAGE)
    folders = {path.name for top in tops for path in top.iterdir() if path.is_dir()} - {"runs"}
    named = {
        (str(path.relative_to(ROOT)), match[0])
        for path, text in texts()
        for match in _PATH.finditer(text)
        if match[0].split("/")[0] in folders and match[0] not in _ELSEWHERE
    }
    assert len(named) > 50
    lost = [pair for pair in sorted(named) if not any((top / pair[1]).exists() for top in tops)]
    assert not lost, lost
