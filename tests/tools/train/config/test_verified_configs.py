"""The configs, with the model made small, have the verdicts that they must have."""

import pytest

from mtf_gradsync.tools.train import gin_files
from mtf_gradsync.tools.train.verifying import verify_config
from tests.tools.train.config import small_lm

FEW = "OuterOptimizer.inner_steps = 2"
CASES = {
    "outer steps": ("lm_outer.gin", [FEW], "placement_mesh", "equal"),
    "sharded updates": ("lm_sharded_updates.gin", [], "cpu_replicas", "equal"),
    "8-bit numbers": ("lm_quantized.gin", [], "cpu_replicas", "NOT EQUAL"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_config_has_its_verdict(name):
    config, bindings, runtime, verdict = CASES[name]
    mesh = "train.run.mesh_shape = 'batch:2;model:2'"
    gin_files.load([str(small_lm.CONFIGS / config)], [*small_lm.SMALL, mesh, *bindings])
    found = verify_config(divisions=["wrappers"], runtime=runtime)
    first, *others = found.lines
    assert first.verdict == verdict, str(found)
    assert all(line.verdict == "equal" for line in others), str(found)
    # What is not equal is so because of the strategy, by no more than its rounding.
    assert ("QuantizedAllReduce" in first.cause) == (verdict == "NOT EQUAL"), str(found)
    assert first.error < 0.1
