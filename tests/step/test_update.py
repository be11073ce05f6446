"""Updates wait for all gradients, variables are read once, steps are counted after the update."""

import logging

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync import step as update
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models


def lowered(make_optimizer, mesh_shape="all:8", layout="batch:all", autostack=True):
    """Builds the model's training step; returns graph, lowering and the lowered update."""
    inputs = {k: tf.constant(v) for k, v in models.mlp_batches(1)[0].items()}
    graph = mtf.Graph()
    operations, _ = models.train(make_optimizer)(mtf.Mesh(graph, "mesh"), inputs)
    mesh = graph.operations[0].mesh
    lowering = mtf.Lowering(graph, {mesh: harness.placement(mesh_shape, layout)}, autostack)
    return graph, lowering, [lowering.lowered_operation(op) for op in operations]


def ancestors(ops):
    """All operations that must have run before any of `ops` starts."""
    seen, todo = set(), list(ops)
    while todo:
        op = todo.pop()
        for before in [t.op for t in op.inputs] + list(op.control_inputs):
            if before not in seen:
                seen.add(before)
                todo.append(before)
    return seen


def of_type(graph, *kinds):
    return [op for op in graph.get_operations() if op.type in kinds]


@pytest.mark.parametrize("autostack", [True, False])
@pytest.mark.parametrize("optimizer", sorted(models.OPTIMIZERS))
def test_every_write_waits_for_every_gradient_and_read(optimizer, autostack, fresh_graph):
    make = models.OPTIMIZERS[optimizer]
    _, lowering, operations = lowered(lambda: gs.CrossShardOptimizer(make()), autostack=autostack)
    writes = {op for op in ancestors(operations) | set(operations) if op.type == "AssignVariableOp"}
    writes = {op for op in writes if "_slice_" in op.inputs[0].op.name}
    assert len(writes) == 8 * len(lowering.variables)
    sums = of_type(fresh_graph, "AddN")
    shared_reads = {
        op
        for op in of_type(fresh_graph, "ReadVariableOp")
        if "read_once" in op.name or "unstack" in op.name
    }
    for write in writes:
        before = ancestors([write])
        assert before.issuperset(sums)
        assert before.issuperset(shared_reads)


def test_without_the_gate_writes_do_not_wait(fresh_graph):
    _, _, operations = lowered(models.OPTIMIZERS["sgd"])
    writes = [op for op in ancestors(operations) if op.type == "AssignVariableOp"]
    reads = set(of_type(fresh_graph, "ReadVariableOp"))
    assert any(not ancestors([write]).issuperset(reads) for write in writes)


@pytest.mark.parametrize("autostack", [True, False])
def test_each_variable_is_read_once_besides_its_own_assignment(autostack, fresh_graph):
    lowered(lambda: gs.CrossShardOptimizer(models.OPTIMIZERS["momentum"]()), autostack=autostack)
    reads = {}
    for op in of_type(fresh_graph, "ReadVariableOp"):
        handle = op.inputs[0].op.name
        # assign_sub reads what it subtracts from; initializers and copies read outside the step.
        outside = ("Read/ReadVariableOp", "Initializer", "assign", "Cast")
        if "_slice_" in handle and not any(part in op.name for part in outside):
            reads.setdefault(handle, []).append(op.name)
    assert reads
    copies = {}
    for handle, names in reads.items():
        copies[handle] = [n for n in names if "read_once" in n or "unstack" in n]
        assert len(copies[handle]) == 1, (handle, names)


def test_read_once_is_added_once():
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    mtf.get_variable(mesh, "w", mtf.Shape([]), initializer=tf.zeros_initializer())
    update.read_variables_once(graph)
    update.read_variables_once(graph)
    assert sum(isinstance(op, update.ReadOnce) for op in graph.operations) == 1


def test_ref_variables_warn_once_and_name_the_cure(caplog):
    tf.disable_resource_variables()
    try:
        with caplog.at_level(logging.WARNING, "mtf_gradsync"):
            lowered(lambda: gs.CrossShardOptimizer(models.OPTIMIZERS["sgd"]()))
            with tf.Graph().as_default():
                lowered(lambda: gs.CrossShardOptimizer(models.OPTIMIZERS["sgd"]()))
    finally:
        tf.enable_resource_variables()
    messages = [r.getMessage() for r in caplog.records if "ref variable" in r.getMessage()]
    assert len(messages) == 1
    assert "enable_resource_variables()" in messages[0]


def test_resource_variables_do_not_warn(caplog):
    with caplog.at_level(logging.WARNING, "mtf_gradsync"):
        lowered(lambda: gs.CrossShardOptimizer(models.OPTIMIZERS["sgd"]()))
    assert not [r for r in caplog.records if "ref variable" in r.getMessage()]


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


@pytest.mark.parametrize("kind_of_step", ["mtf", "tf"])
def test_global_step_counts_once_a_step(mesh_kind, kind_of_step):
    def build(mesh, inputs):
        if kind_of_step == "tf":
            step = tf.train.get_or_create_global_step()
        else:
            step = mtf.get_variable(
                mesh, "global_step", mtf.Shape([]), tf.int32, trainable=False,
                initializer=tf.zeros_initializer(),
            )  # fmt: skip
        optimizer = gs.CrossShardOptimizer(models.OPTIMIZERS["sgd"]())
        return optimizer.minimize(models.mlp_loss(mesh, inputs), step), {}

    result = harness.run(mesh_kind, "all:8", "batch:all", build, models.mlp_batches(3))
    assert result.variables["global_step"] == 3


def test_other_operations_are_gated_too():
    """An optimizer may return any operation that the lowering knows."""

    class Logged(mtf.optimize.SgdOptimizer):
        def apply_grads(self, grads, variables):
            operations = super().apply_grads(grads, variables)
            counter = tf.get_variable("counter", [], tf.int64, tf.zeros_initializer(), False)
            mesh = variables[0].mesh
            return [*operations, update.AdvanceStep(mesh, counter, operations, "count")]

    _, _lowering, operations = lowered(lambda: gs.CrossShardOptimizer(Logged(0.1)))
    assert len(operations) == 2
    sums = {op for op in ancestors(operations) if op.type == "AddN"}
    assert sums
    assert ancestors([operations[-1]]).issuperset(sums)


def test_momentum_uses_the_velocity_of_the_step_before(mesh_kind):
    feeds = models.mlp_batches(1)
    result = harness.run(
        mesh_kind,
        "all:8",
        "batch:all",
        models.train(lambda: gs.CrossShardOptimizer(models.OPTIMIZERS["momentum"]())),
        feeds,
    )
    for name, value in models.mlp_values().items():
        np.testing.assert_array_equal(result.variables[name], value)  # the first one is 0
        assert np.any(result.variables[name + "_momentum_v"] != 0)
