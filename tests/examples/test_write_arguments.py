"""The arguments of each wrapper stand on its page, as its docstring has them."""

from __future__ import annotations

import importlib.util

import pytest

from tests import wrappers
from tests.documents import ROOT

SPEC = importlib.util.spec_from_file_location("arguments", ROOT / "docs/write_arguments.py")
arguments = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(arguments)
PAGES = arguments.pages()


def test_every_wrapper_and_optimizer_has_its_arguments_on_a_page():
    assert set(PAGES) == {
        *wrappers.REGISTRY,
        "AdamWOptimizer",
        "ByVariable",
        "MeshOptimizer",
        "MuonOptimizer",
    }


@pytest.mark.parametrize("page", sorted({page.name for page in PAGES.values()}))
def test_a_page_is_what_docstrings_say(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert text == arguments.written(text), "run python docs/write_arguments.py"


def test_an_argument_without_a_description_is_refused(monkeypatch):
    class Undescribed:
        def __init__(self, opt: object, size: int = 1):
            """Makes one.

            Args:
              opt: the optimizer.
            """

    monkeypatch.setattr(arguments.gs, "Undescribed", Undescribed, raising=False)
    with pytest.raises(ValueError, match="'size'"):
        arguments.table("Undescribed")
