"""Steps are counted after the update."""

import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models
from tests.step.steps import ancestors
from tests.wrappers import wrap


@pytest.mark.parametrize("kind_of_step", ["mtf", "tf"])
def test_global_step_advances_after_the_update(kind_of_step, fresh_graph):
    inputs = {k: tf.constant(v) for k, v in models.mlp_batches(1)[0].items()}
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    loss = models.mlp_loss(mesh, inputs)
    if kind_of_step == "mtf":
        step = mtf.get_variable(
            mesh, "step", mtf.Shape([]), tf.int32, initializer=tf.zeros_initializer(),
            trainable=False,
        ).operation  # fmt: skip
    else:
        step = tf.train.get_or_create_global_step()
    optimizer = gs.CrossShardOptimizer(models.OPTIMIZERS["sgd"]())
    operations = optimizer.minimize(loss, step)
    lowering = mtf.Lowering(graph, {mesh: harness.placement("all:2", "batch:all")})
    update_ops = [lowering.lowered_operation(op) for op in operations[:-1]]
    count = lowering.lowered_operation(operations[-1])
    assert ancestors([count]).issuperset(update_ops)
    with tf.Session(config=gs.session_config(num_cpu_devices=2)) as session:
        session.run(tf.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
        for _ in range(3):
            session.run([count, *update_ops])
        session.run(lowering.copy_slices_to_masters())
        value = session.run(step.get_master() if kind_of_step == "mtf" else step)
    assert value == 3


# Of accumulation each step counts, and not each update.
@pytest.mark.parametrize("wrapper", ["cross_shard", "local"])
@pytest.mark.parametrize("kind_of_step", ["mtf", "tf"])
def test_global_step_counts_once_a_step(mesh_kind, kind_of_step, wrapper):
    def build(mesh, inputs):
        if kind_of_step == "tf":
            step = tf.train.get_or_create_global_step()
        else:
            step = mtf.get_variable(
                mesh, "global_step", mtf.Shape([]), tf.int32, trainable=False,
                initializer=tf.zeros_initializer(),
            )  # fmt: skip
        optimizer = wrap(wrapper, models.OPTIMIZERS["sgd"](), axes)
        return optimizer.minimize(models.mlp_loss(mesh, inputs), step), {}

    axes = {"mesh_shape": "all:2", "layout": "batch:all"}
    result = harness.run(mesh_kind, *axes.values(), build, models.mlp_batches(3))
    assert result.variables["global_step"] == 3
