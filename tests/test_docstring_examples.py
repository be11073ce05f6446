"""The examples in docstrings (lines with >>>) print what they say."""

import ast
import doctest
import functools
import importlib
from collections.abc import Iterator

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests.documents import ROOT

# Besides the names of its own module, an example may use these.
NAMES = {"functools": functools, "gs": gs, "mtf": mtf, "np": np, "tf": tf}
_SAME = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_KINDS = (ast.Module, ast.ClassDef, ast.FunctionDef)


def examples() -> Iterator[tuple[str, str, str]]:
    """Yields module, name and docstring of all examples."""
    for path in sorted((ROOT / "mtf_gradsync").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if ">>> " not in source:
            continue
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(source)):
            text = ast.get_docstring(node) if isinstance(node, _KINDS) else None
            if text and ">>> " in text:
                yield module, getattr(node, "name", module), text


def test_there_are_examples():
    assert len(list(examples())) >= 20


@pytest.mark.parametrize(
    ("module", "name", "text"),
    [pytest.param(*found, id=found[1]) for found in examples()],
)
def test_example(module, name, text):
    names = {**vars(importlib.import_module(module)), **NAMES}
    test = doctest.DocTestParser().get_doctest(text, names, name, module, None)
    printed: list[str] = []
    runner = doctest.DocTestRunner(optionflags=_SAME)
    with tf.Graph().as_default():
        failed = runner.run(test, out=printed.append).failed
    assert not failed, "".join(printed)
