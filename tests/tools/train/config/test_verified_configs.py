"""The configs, with the model made small, have the verdicts that they must have."""

import pytest

from mtf_gradsync.tools.train import gin_files
from mtf_gradsync.tools.train.cli import main as cli
from mtf_gradsync.tools.train.verifying import verify_config
from tests.tools.train.config import small_lm

FEW = "OuterOptimizer.inner_steps = 2"
# Parts of other configs: `unitransformer.gin` of all of these, `t5_gradsync.gin` of T5's.
PARTS = {"unitransformer.gin", "t5_gradsync.gin"}
# Two processors are built in half of the time of four, of which one config splits the model, too.
TWO, FOUR = "batch:2;model:1", "batch:2;model:2"
CASES = {
    "the README's": ("lm_cpu_mesh.gin", FOUR, [], "equal"),
    "accumulation": ("lm_accumulate.gin", TWO, [], "equal"),
    "float16": ("lm_float16.gin", TWO, [], "equal"),
    "noise scale": ("lm_noise_scale.gin", TWO, [], "equal"),
    "replicas": ("lm_sync_replicas.gin", "batch:4;model:1", [], "equal"),
    "outer steps": ("lm_outer.gin", TWO, [FEW], "equal"),
    "sharded updates": ("lm_sharded_updates.gin", TWO, [], "equal"),
    "sums in parts": ("lm_sharded_sums.gin", TWO, [], "equal"),
    # The run is shorter than the first step of a long one, and AdamW refuses a rate below 0.
    "a schedule that ends": (
        "lm_cpu_mesh.gin",
        TWO,
        ["CrossShardOptimizer.opt = @AdamWOptimizer", "train.run.train_steps = 100"],
        "equal",
    ),
    "8-bit numbers": ("lm_quantized.gin", TWO, [], "NOT EQUAL"),
}  # fmt: skip


def bindings(config, mesh_shape, more):
    """The mesh is named once, for the run and for wrappers that ask for it, or only here."""
    text = (small_lm.CONFIGS / config).read_text(encoding="utf-8")
    name = "mesh_shape" if "%mesh_shape" in text else "train.run.mesh_shape"
    return [*small_lm.SMALL, f"{name} = '{mesh_shape}'", *more]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_config_has_its_verdict(name):
    config, mesh_shape, more, verdict = CASES[name]
    gin_files.load([str(small_lm.CONFIGS / config)], bindings(config, mesh_shape, more))
    found = verify_config(divisions=["wrappers"], runtime="cpu_replicas")
    first, *others = found.lines
    assert first.verdict == verdict, str(found)
    assert all(line.verdict == "equal" for line in others), str(found)
    # What is not equal is so because of the strategy, by no more than its rounding.
    assert ("QuantizedAllReduce" in first.cause) == (verdict == "NOT EQUAL"), str(found)
    assert first.error < 0.1


def test_each_config_is_verified():
    verified = {config for config, *_ in CASES.values()}
    assert verified | PARTS == {path.name for path in small_lm.CONFIGS.glob("*.gin")}


@pytest.mark.slow
def test_a_report_of_outer_steps_on_a_placement_mesh(capsys):
    """Where no mesh is bound, the wrapper has the run's."""
    given = bindings("lm_outer.gin", TWO, [FEW])
    given.append("train.run.runtime = 'placement_mesh'")
    config = f"--gin_file={small_lm.CONFIGS / 'lm_outer.gin'}"
    assert cli.main(["report", config, *(f"--gin_param={x}" for x in given)]) == 0
    assert "OuterOptimizer > AdafactorOptimizer" in capsys.readouterr().out
