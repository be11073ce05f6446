"""Steps are counted after the update."""

import pytest

from mtf_gradsync._private.libraries import tf
from tests import harness, models
from tests.step.steps import ancestors
from tests.wrappers import wrap


# Of accumulation each step counts, and not each update.
@pytest.mark.parametrize("wrapper", ["cross_shard", "local"])
@pytest.mark.parametrize("kind_of_step", ["mtf", "tf"])
def test_global_step_counts_once_a_step_after_the_update(mesh_kind, kind_of_step, wrapper):
    def build(mesh, inputs):
        if kind_of_step == "tf":
            step = tf.train.get_or_create_global_step()
        else:
            step = models.variable(mesh, "global_step", [], dtype=tf.int32, trainable=False)
        optimizer = wrap(wrapper, models.OPTIMIZERS["sgd"](), axes)
        return optimizer.minimize(models.mlp_loss(mesh, inputs), step), {}

    axes = {"mesh_shape": "all:2", "layout": "batch:all"}
    feeds = models.mlp_batches(3)
    made = harness.built(mesh_kind, *axes.values(), build, feeds[0])
    if mesh_kind == "placement":
        *updates, count = made.updates
        assert ancestors([count]).issuperset(updates)
    assert made.run(feeds).variables["global_step"] == 3
