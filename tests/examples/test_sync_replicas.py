"""examples/sync_replicas.py, and the code in docs/sync_replicas.md."""

import math
import re

import gin
import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.tools.train import gin_files
from tests import documents
from tests.examples.commands import run
from tests.runtimes.cluster.processes import ROOT

GUIDE = (ROOT / "docs" / "sync_replicas.md").read_text(encoding="utf-8")

STEPS, WITHOUT_DATA = 60, 12


@pytest.mark.slow
def test_training_goes_on_without_a_replica(tmp_path):
    png = tmp_path / "made" / "picture.png"
    output = run("sync_replicas.py", f"--steps={STEPS}", f"--png={png}")
    rows = re.findall(r"^(all healthy|one dead, \w+) +(\S+) +(\S+) +(\S+)%$", output, re.M)
    first, last = ({row[0]: float(row[i]) for row in rows} for i in (1, 2))
    assert set(last) == {"all healthy", "one dead, SyncReplicas", "one dead, CrossShard"}, output

    # Until the data break off all three have seen the same.
    assert len(set(first.values())) == 1
    healthy, sync = last["all healthy"], last["one dead, SyncReplicas"]
    # Ten digits at random: ln 10. What is learned in 60 steps is far below.
    assert sync < 0.3 < 2 < first["one dead, SyncReplicas"]
    # A fifth of the steps had three quarters of the data: the noise of a batch, not another course.
    assert abs(sync - healthy) < 0.2 * healthy
    # The averages of three replicas are not those of four: that it is as good is no accident.
    assert sync != healthy
    assert math.isnan(last["one dead, CrossShard"])

    # Three replicas are enough for an update in every step.
    assert f"no data in {WITHOUT_DATA} steps, {STEPS} updates made" in output
    counts = re.findall(r"^ +(\d) +(\d+) +(\d+)$", output, re.M)
    assert [[int(n) for n in row] for row in counts] == [
        [0, STEPS, 0],
        [1, STEPS, 0],
        [2, STEPS - WITHOUT_DATA, WITHOUT_DATA],
        [3, STEPS, 0],
    ]
    assert png.read_bytes().startswith(b"\x89PNG")


def test_code_of_the_guide_runs():
    names = documents.run("docs/sync_replicas.md")
    # Each update takes 0.1 of the mean's gradient, 2 w / 3; float32 rounds each of nine products.
    np.testing.assert_allclose(names["weights_now"], (1 - 0.1 * 2 / 3) ** 9, rtol=9 * 2**-23)
    assert names["average"].name == "w/ExponentialMovingAverage"


def test_the_guide_names_all_state():
    opt = gs.SyncReplicasOptimizer(
        mtf.optimize.SgdOptimizer(0.1), 3, mesh_shape="a:4", layout="batch:a"
    )
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    w = mtf.get_variable(mesh, "w", [mtf.Dimension("feature", 3)])
    opt.apply_grads([w * 2.0], [w.operation])
    for variable in opt.variables():
        name = variable.name.replace("sync_replicas/", "<name>/").replace("w/", "<variable>/")
        assert f"| `{name}` |" in GUIDE


def test_gin_of_the_guide_makes_the_config_s_optimizer():
    (block,) = documents.blocks("docs/sync_replicas.md", "gin")
    config = str(ROOT / "configs" / "lm_sync_replicas.gin")
    made = []
    for load in (lambda: gin.parse_config(block.code), lambda: gin_files.load([config], [])):
        gin.clear_config()
        with gin.unlock_config():
            load()
        optimizer = gin.query_parameter("train.run.optimizer").scoped_configurable_fn
        opt = optimizer(learning_rate=0.01)
        assert isinstance(opt, gs.SyncReplicasOptimizer)
        assert isinstance(opt.opt, mtf.optimize.AdafactorOptimizer)
        names = ("replicas_to_aggregate", "max_steps_without_update")
        numbers = [gin.query_parameter(f"SyncReplicasOptimizer.{name}") for name in names]
        made.append((repr(opt.axes), *numbers))
    gin.clear_config()
    assert made[0] == made[1]
