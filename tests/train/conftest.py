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


# What surrounds the steps has nothing to do with a model axis, which makes graphs twice as large.
TWO_PROCESSORS = "train.run.mesh_shape = 'batch:2;model:1'"


def train_tiny(directory, *bindings):
    """Runs tiny.gin with more bindings; returns the result, the directory and what was said."""
    gin_files.load([TINY], [TWO_PROCESSORS, *bindings])
    said = []
    result = run(gin_files.run_config(), str(directory), say=said.append)
    return result, directory, said


@pytest.fixture
def train(tmp_path):
    """`train_tiny` in directories of the test."""
    return lambda *bindings, model_dir="run": train_tiny(tmp_path / model_dir, *bindings)
