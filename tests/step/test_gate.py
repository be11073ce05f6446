"""An update writes only after all gradients exist and all variables are read."""

import logging

import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.step.writes import advance_step
from tests import harness, models
from tests.step.steps import ancestors, lowered, of_type


@pytest.mark.parametrize(
    ("autostack", "optimizer"), harness.pairs([True, False], sorted(models.OPTIMIZERS))
)
def test_every_write_waits_for_every_gradient_and_read(optimizer, autostack, fresh_graph):
    make = models.OPTIMIZERS[optimizer]
    _, lowering, operations = lowered(lambda: gs.CrossShardOptimizer(make()), autostack=autostack)
    writes = {op for op in ancestors(operations) | set(operations) if op.type == "AssignVariableOp"}
    writes = {op for op in writes if "_slice_" in op.inputs[0].op.name}
    assert len(writes) == 2 * len(lowering.variables)
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


def test_other_operations_are_gated_too():
    """An optimizer may return any operation that the lowering knows."""

    class Logged(mtf.optimize.SgdOptimizer):
        def apply_grads(self, grads, variables):
            operations = super().apply_grads(grads, variables)
            counter = tf.get_variable("counter", [], tf.int64, tf.zeros_initializer(), False)
            mesh = variables[0].mesh
            return [*operations, advance_step(mesh, counter, operations, "count")]

    _, _lowering, operations = lowered(lambda: gs.CrossShardOptimizer(Logged(0.1)))
    assert len(operations) == 2
    sums = {op for op in ancestors(operations) if op.type == "AddN"}
    assert sums
    assert ancestors([operations[-1]]).issuperset(sums)
