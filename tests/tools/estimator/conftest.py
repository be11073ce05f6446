"""A trained model that the tests here have in common."""

import shutil
from typing import NamedTuple

import pytest

from mtf_gradsync import estimator
from tests.tools.estimator import digits


class Trained(NamedTuple):
    """A run of `digits.STEPS` steps on a placement mesh; tests only read it.

    Attributes:
      directory: with checkpoints of the steps 0, 3 and 6.
      losses: of its steps.
    """

    directory: object
    losses: list


@pytest.fixture(scope="package")
def trained(tmp_path_factory):
    """The run."""
    place, losses = tmp_path_factory.mktemp("trained"), []
    runs = estimator.Estimator(
        digits.with_loss_seen, str(place), digits.config(), {"optimizer": "cross_shard"},
        runtime="placement_mesh", num_cores=digits.CORES,
    )  # fmt: skip
    runs.train(digits.input_fn, hooks=[digits.seen(losses)], steps=digits.STEPS)
    return Trained(place, losses)


@pytest.fixture
def copied(trained, tmp_path):
    """A copy of the run's directory."""
    return shutil.copytree(trained.directory, tmp_path / "copied")
