"""The notebook of first steps: its cells run in order, and show what its text says."""

from __future__ import annotations

import json
import re

import pytest

from tests import documents

PATH = "examples/first_steps.ipynb"


def test_it_is_a_notebook_without_outputs():
    notebook = json.loads((documents.ROOT / PATH).read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["language"]) == (4, "python")
    for cell in notebook["cells"]:
        assert {"cell_type", "metadata", "source"} <= set(cell)
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
        else:
            assert cell["cell_type"] == "markdown"


@pytest.mark.slow
def test_its_cells_run(capsys):
    names: dict[str, object] = {}
    for cell in documents.cells(PATH):
        exec(compile(cell.code, cell.place, "exec"), names)
    first, second, third, accumulated, *report = capsys.readouterr().out.splitlines()
    losses = [float(line.split(": loss ")[1]) for line in (first, second, third)]
    assert losses[0] > losses[1] > losses[2]
    # A loss for each of twelve steps: it changes with each update, on every fourth.
    accumulated = [float(loss) for loss in accumulated.split()]
    assert len(accumulated) == 12
    assert accumulated == [loss for loss in accumulated[::4] for _ in range(4)]
    assert accumulated[0] > accumulated[4] > accumulated[8]
    # The gradients of two weights and two biases are one group of sums, in the branch.
    sums = [line for line in report if re.search(r"  rows  +summed_together +if ", line)]
    assert len(sums) == 4
