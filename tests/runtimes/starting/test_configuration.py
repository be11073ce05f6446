"""Checkpoints of another configuration: what differs is said by name, and accepted by a flag."""

import shutil

import numpy as np
import pytest

from mtf_gradsync.runtimes._common import ConfigError
from mtf_gradsync.tools.train import gin_files
from mtf_gradsync.tools.train.run import Accepted, run
from tests.sessions import saved_variables
from tests.tools.train.conftest import NO_EVAL, QUICK, TINY, accumulates, train_tiny

pytestmark = pytest.mark.slow

MORE = "train.run.train_steps = 13"
ADAM = "CrossShardOptimizer.opt = @AdamWeightDecayOptimizer"
SGD = "CrossShardOptimizer.opt = @SgdOptimizer"
ACCUMULATE = accumulates(
    2, accumulate="'local'", mesh_shape="'batch:2;model:1'", layout="'batch:batch'"
)
ON_MESH = "train.run.runtime = 'placement_mesh'"


@pytest.fixture(scope="module")
def adafactor(tmp_path_factory):
    """The directory of a run of 12 steps; tests only read it."""
    return train_tiny(tmp_path_factory.mktemp("adafactor"), NO_EVAL)[1]


def go_on(directory, *bindings, accepted):
    """Runs tiny.gin with more bindings in a directory; returns what was said."""
    gin_files.load([TINY], [*QUICK, NO_EVAL, MORE, *bindings])
    said = []
    run(gin_files.bound_run_config(), str(directory), said.append, Accepted(differences=accepted))
    return "\n".join(said)


@pytest.mark.parametrize(
    ("bindings", "only_there", "only_here"),
    [
        ([SGD], "embedding_slot_v", None),
        ([ADAM, ON_MESH], "embedding_slot_v", "embedding/adam_m"),
        (ACCUMULATE, None, "accum"),
    ],
    ids=["fewer", "others, on a placement mesh", "a wrapper"],
)
def test_what_differs_is_named_and_accepted_by_a_flag(
    adafactor, tmp_path, bindings, only_there, only_here
):
    directory = shutil.copytree(adafactor, tmp_path / "run")
    before = {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
    with pytest.raises(ConfigError) as raised:
        go_on(directory, *bindings, accepted=False)
    message = str(raised.value)
    assert "--accept_checkpoint_differences" in message
    assert ("this config does not have these of the checkpoint" in message) == (
        only_there is not None
    )
    for name in filter(None, [only_there, only_here]):
        assert name in message
    after = {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
    assert after == before

    said = go_on(directory, *bindings, accepted=True)
    assert "of another configuration:" in said
    old, new = saved_variables(adafactor), saved_variables(directory)
    assert new["global_step"] == 13
    assert (only_there is None) == any(name.endswith("_slot_v") for name in new)
    if only_here == "embedding/adam_m":
        # It began at zero and has had one step: what its first gradient adds.
        name = "transformer/embedding"
        assert np.any(new[f"{name}/adam_m"])
        # A step of Adam is at most the learning rate, of Adafactor's first values many times it.
        assert 0 < np.max(np.abs(new[name] - old[name])) < 0.1
    # Nothing that served to restore is left behind.
    assert not [path for path in directory.iterdir() if path.name.startswith(".")]
    if bindings == ACCUMULATE:
        # The next start finds its own configuration.
        assert "another configuration" not in go_on(directory, *bindings, accepted=False)


def test_what_does_not_fit_is_not_accepted(adafactor, tmp_path):
    directory = shutil.copytree(adafactor, tmp_path / "run")
    with pytest.raises(
        ConfigError, match=r"made by another model (.*\n)*.* has the shape \[\d+, 16"
    ):
        go_on(directory, "d_model = 32", accepted=True)


def test_a_variable_of_another_type_is_named(adafactor, tmp_path):
    directory = shutil.copytree(adafactor, tmp_path / "run")
    bfloat16 = ["utils.get_variable_dtype.master_dtype = 'bfloat16'"]
    with pytest.raises(
        ConfigError, match="has the type float32 in the checkpoint and bfloat16 in the graph"
    ):
        go_on(directory, *bfloat16, accepted=True)


def test_sums_in_islands_go_on_without_islands(tmp_path):
    """As they would have gone on: without an update all gradients are those of the same values."""
    passes = "GradientAccumulationOptimizer.backward_passes_per_step = 20"
    outer = [
        "train.run.optimizer = @OuterOptimizer",
        "OuterOptimizer.opt = @GradientAccumulationOptimizer",
        "OuterOptimizer.inner_steps = 1",
        "OuterOptimizer.mesh_shape = 'batch:2;model:1'",
        "OuterOptimizer.layout = 'batch:batch'",
    ]
    name = "transformer/embedding/gradient_accumulator"
    gin_files.load([TINY], [*QUICK, NO_EVAL, *ACCUMULATE, *outer, passes])
    run(gin_files.bound_run_config(), str(tmp_path / "plain"), [].append)
    directory = shutil.copytree(tmp_path / "plain", tmp_path / "islands")
    go_on(directory, *ACCUMULATE, *outer, passes, accepted=False)
    right = saved_variables(directory)[f"{name}/island"].mean(0, dtype=np.float64)
    said = go_on(tmp_path / "plain", *ACCUMULATE, passes, accepted=True)
    dropped = said.split("dropped, if accepted")[1]
    assert "OuterOptimizer/inner_step" in dropped
    assert f"{name}/island" not in dropped
    found = saved_variables(tmp_path / "plain")[name].sum(0, dtype=np.float64)
    assert np.abs(right).max() > 0
    # 13 gradients, each rounded by what sums of tokens in float32 round.
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-5 * np.abs(right).max())
