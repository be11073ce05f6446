"""Islands in Estimator: a hook in the spec of a model_fn, on every runtime."""

import numpy as np
import pytest

from mtf_gradsync import estimator
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.islands import Island, IslandHook
from mtf_gradsync.tools.islands.folder import Folder
from mtf_gradsync.tools.islands.journal import read_status
from tests.sessions import saved_variables
from tests.tools.estimator import digits
from tests.tools.estimator.conftest import trained  # noqa: F401
from tests.tools.estimator.runs import RUNTIMES, TOLERANCE, VARIABLES
from tests.tools.islands.conftest import merging
from tests.tools.islands.toy import PLAIN


def as_island(features, labels, mode, params, config):
    """The model function of the digits, as a user makes it an island."""
    spec = digits.model_fn(features, labels, mode, params, config)
    if mode != tf.estimator.ModeKeys.TRAIN:
        return spec
    island = Island(params["folder"], "one", 2, lowering=spec, poll_seconds=0.01)
    hooks = [*spec.training_hooks, IslandHook(island, tokens=7.0)]
    return spec._replace(training_hooks=hooks)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_one_island_alone_trains_as_without(runtime, folder, tmp_path, trained):  # noqa: F811
    params = {"optimizer": "cross_shard", "folder": str(folder)}
    runs = estimator.Estimator(
        as_island, str(tmp_path / "run"), digits.config(), params,
        runtime=runtime, num_cores=digits.CORES,
    )  # fmt: skip
    # With rate 1 and without momentum a version has the values of its only island.
    with merging(folder, PLAIN):
        runs.train(digits.input_fn, steps=digits.STEPS)
    status = read_status(Folder(str(folder)))
    merged = [(c.steps, c.weight) for d in status.decisions[1:] for c in d.contributions]
    assert merged == [(2, 14.0)] * 3
    assert [row.state for row in status.rows] == ["left"]
    found, expected = saved_variables(tmp_path / "run"), saved_variables(trained.directory)
    for name in VARIABLES:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=TOLERANCE)
