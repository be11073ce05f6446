from pathlib import Path

import gin
import pytest

from mtf_gradsync.session import enable_mesh_defaults
from mtf_gradsync.train import gin_files
from mtf_gradsync.train.run import run

TINY = str(Path(__file__).with_name("tiny.gin"))


@pytest.fixture(autouse=True)
def mesh_defaults():
    enable_mesh_defaults()
    yield
    gin.clear_config()


@pytest.fixture
def train(tmp_path):
    """Runs tiny.gin with more bindings; returns the result, the directory and what was said."""

    def call(*bindings, model_dir="run"):
        gin_files.load([TINY], list(bindings))
        said = []
        directory = tmp_path / model_dir
        result = run(gin_files.run_config(), str(directory), say=said.append)
        return result, directory, said

    return call
