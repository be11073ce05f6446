"""configs/lm_sharded_sums.gin, with the model made small."""

import numpy as np
import pytest

from tests.sessions import saved_variables
from tests.tools.train.config import small_lm
from tests.tools.train.conftest import REPORTS

# The included config has it once, for the run and for the wrapper.
MESH = "mesh_shape = 'batch:2;model:1'"
WHOLE = (
    'GradientAccumulationOptimizer.accumulate = "synced"',
    "GradientAccumulationOptimizer.opt = @AdamWOptimizer",
)


@pytest.mark.slow
def test_trains_as_with_synced_sums_and_whole_updates(tmp_path):
    runs = {}
    for name, bindings in (("parts", ()), ("whole", WHOLE)):
        small_lm.train(
            "lm_sharded_sums.gin", tmp_path / name, "batch:2;model:1", 8, REPORTS, MESH, *bindings
        )
        runs[name] = small_lm.losses(tmp_path / name)
        found = saved_variables(tmp_path / name)
        assert found["GradientAccumulationOptimizer/update_step"] == 2
    assert len(runs["parts"]) == 8
    # Sums over two shards have the same bits; losses of 5, after two updates.
    np.testing.assert_allclose(runs["parts"], runs["whole"], rtol=1e-6)
