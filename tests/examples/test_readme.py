"""The README's code runs as it stands."""

from __future__ import annotations

import gin
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf
from tests import documents
from tests.runtimes.cluster.processes import Processes

# Of the run's folder, which the program names by a relative path.
_IN = "import os, runpy, sys; os.chdir(sys.argv[1]); runpy.run_path('evaluate.py')"


@pytest.mark.slow
def test_quickstart_prints_its_numbers_and_goes_on_in_another_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    documents.run("README.md")
    _, train, evaluate = documents.blocks("README.md")
    # As a reader writes the second program: all but the session of the first.
    model, _, _ = train.code.partition("with tf.Session")
    (tmp_path / "evaluate.py").write_text(f"{model}{evaluate.code}", encoding="utf-8")
    with Processes() as processes:
        process = processes.fork("-c", _IN, tmp_path)
        assert processes.wait(process) == evaluate.printed


def test_readme_is_short():
    readme = (documents.ROOT / "README.md").read_text(encoding="utf-8")
    describe, quickstart, evaluate = documents.blocks("README.md")
    assert len(readme.splitlines()) <= 175
    assert len(describe.code.splitlines()) <= 6
    assert len(quickstart.code.splitlines()) <= 34
    assert len(evaluate.code.splitlines()) <= 10


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
