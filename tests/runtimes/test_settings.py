import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.runtimes.settings import session_config
from tests import harness, models


def test_has_as_many_strictly_placed_cpu_devices_as_asked_for():
    config = session_config(num_cpu_devices=3)
    with tf.Graph().as_default(), tf.Session(config=config) as session:
        names = [device.name[-5:] for device in session.list_devices()]
        assert names[:3] == ["CPU:0", "CPU:1", "CPU:2"]
        with tf.device("cpu:3"):
            beyond = tf.constant(1.0) + 1.0
        with pytest.raises(tf.errors.InvalidArgumentError, match="CPU:3"):
            session.run(beyond)


def test_what_regroups_sums_and_products_is_off_unless_asked_for():
    rewrites = session_config().graph_options.rewrite_options
    off, default = type(rewrites).OFF, type(rewrites).DEFAULT
    assert (rewrites.arithmetic_optimization, rewrites.constant_folding) == (off, off)
    rewrites = session_config(repeatable=False).graph_options.rewrite_options
    assert (rewrites.arithmetic_optimization, rewrites.constant_folding) == (default, default)


@pytest.mark.slow
@pytest.mark.grappler
def test_equal_graphs_give_the_same_bits():
    """With constant folding 10 of 24 graphs gave other bits than the rest."""
    shape, layout, batch_dims = harness.MESHES["4x2"]

    def build(mesh, inputs):
        inner = gs.LossScaleOptimizer(mtf.optimize.AdamWeightDecayOptimizer(0.01))
        opt = gs.GradientAccumulationOptimizer(inner, 2, mesh_shape=shape, layout=layout)
        return opt.minimize(models.mlp_loss(mesh, inputs, batch_dims)), {}

    feeds = models.mlp_batches(6)
    first, *others = (
        harness.run("placement", shape, layout, build, feeds, grappler=True).variables
        for _ in range(4)
    )
    for other in others:
        assert [name for name in first if not np.array_equal(first[name], other[name])] == []


def test_refuses_no_devices():
    with pytest.raises(
        ValueError, match=r"num_cpu_devices must be a whole number of 1 or more, got 0"
    ):
        session_config(num_cpu_devices=0)


def test_collective_group_leader_is_named_as_servers_name_themselves():
    config = session_config(collective_group_leader="/job:worker/task:0")
    assert config.experimental.collective_group_leader == "/job:worker/replica:0/task:0"
    assert not session_config().experimental.collective_group_leader


@pytest.mark.parametrize("leader", ["worker", "/job:worker", "127.0.0.1:80", 0])
def test_refuses_leaders_that_are_no_task(leader):
    with pytest.raises(ValueError, match=r"collective_group_leader must be a task"):
        session_config(collective_group_leader=leader)
