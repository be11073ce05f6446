"""configs/lm_sharded_updates.gin, with the model made small."""

import numpy as np
import pytest

from tests.tools.train.config import small_lm
from tests.tools.train.conftest import REPORTS


@pytest.mark.slow
def test_trains_as_without_parts(tmp_path):
    runs = {}
    for config in ("lm_sharded_updates.gin", "lm_cpu_mesh.gin"):
        directory = tmp_path / config
        small_lm.train(config, directory, "batch:2;model:1", 4, REPORTS)
        runs[config] = small_lm.losses(directory)
    parts, whole = runs.values()
    assert len(parts) == 4
    # Adafactor's means are rounded otherwise; a loss of 5 after 4 steps.
    np.testing.assert_allclose(parts, whole, rtol=1e-5)
