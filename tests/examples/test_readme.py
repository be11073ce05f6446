"""The README's code runs as it stands."""

from __future__ import annotations

import gin
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf
from tests import documents


def test_quickstart_prints_a_loss_that_falls(capsys):
    (quickstart,) = documents.blocks("README.md")
    exec(compile(quickstart.code, quickstart.place, "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    steps, losses = zip(*(line.split(": loss ") for line in lines))
    assert list(steps) == [line.split(":")[0] for line in quickstart.printed.splitlines()]
    first, second, third = map(float, losses)
    assert first > second > third


def test_readme_is_short():
    readme = (documents.ROOT / "README.md").read_text(encoding="utf-8")
    (quickstart,) = documents.blocks("README.md")
    assert len(readme.splitlines()) <= 150
    assert len(quickstart.code.splitlines()) <= 30


def test_gin_block_binds_the_wrapper():
    pytest.importorskip("mesh_tensorflow.transformer.utils", reason="needs the extra 'train'")
    (block,) = documents.blocks("README.md", "gin")
    with gin.unlock_config():
        gin.clear_config()
        try:
            gin.parse_config(block.code)
            reference = gin.query_parameter("utils.run.optimizer")
            optimizer = reference.scoped_configurable_fn(learning_rate=0.01)
        finally:
            gin.clear_config()
    assert isinstance(optimizer, gs.CrossShardOptimizer)
    assert isinstance(optimizer.opt, mtf.optimize.AdafactorOptimizer)
