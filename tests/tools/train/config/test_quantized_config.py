"""configs/lm_quantized.gin, with the model made small."""

import numpy as np
import pytest

from tests.sessions import saved_variables
from tests.tools.train.config import small_lm
from tests.tools.train.conftest import REPORTS, metric

LOW_RANK = ["CrossShardOptimizer.reducer = @LowRankAllReduce()", "LowRankAllReduce.rank = 2"]


@pytest.mark.parametrize(("bindings", "most"), [([], 4), (LOW_RANK, 10)])
@pytest.mark.slow
def test_trains_with_less_and_shows_the_rate(bindings, most, tmp_path):
    small_lm.train("lm_quantized.gin", tmp_path, "batch:2;model:1", 4, REPORTS, *bindings)
    losses, rates = metric(tmp_path, "loss"), metric(tmp_path, "compression/rate")
    assert len(losses) == len(rates) == 4
    assert np.isfinite([*losses.values()]).all()
    assert all(2 < rate < most for rate in rates.values())
    variables = saved_variables(tmp_path / "model.ckpt-4")
    kind = "low_rank_error" if bindings else "quantization_error"
    errors = [value for name, value in variables.items() if name.endswith(f"/{kind}")]
    assert len(errors) > 3
    assert all(np.isfinite(error).all() for error in errors)
    assert sum(error.any() for error in errors) > 3
