"""What the graph of an accumulating program says: what runs only with an update."""

import copy
import logging

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.optimizers.pipeline.stack import stages_of
from tests import harness, models, reference
from tests.optimizers.accumulation.accumulation_runs import (
    LAYOUT,
    MESH,
    NoUpdate,
    built,
    gradient_rows,
    report_without_update,
    simd_report,
)

K = 4


def local(inner, **kwargs):
    return gs.GradientAccumulationOptimizer(inner, K, mesh_shape=MESH, layout=LAYOUT, **kwargs)


@pytest.mark.parametrize("optimizer", sorted(models.OPTIMIZERS))
def test_every_gradient_collective_stands_in_the_branch(optimizer):
    make = models.OPTIMIZERS[optimizer]
    report = simd_report(lambda: local(make()))
    rows = gradient_rows(report)
    assert rows
    assert all(row.is_conditional for row in rows)
    # What is left on every step is what the forward and backward passes alone exchange: the
    # update's own collectives (Adafactor's norms over the model axis) are in the branch too.
    bare = report_without_update()
    assert report.every_step.bytes_per_core == bare.every_step.bytes_per_core
    assert report.every_step.operations == bare.every_step.operations


ON_ITS_OWN = "c:2;r:2", "batch:c"
TOLD = "each shard adds up its own gradients, which are reduced once an update"


def on_its_own(around=lambda opt: opt):
    return around(gs.GradientAccumulationOptimizer(mtf.optimize.SgdOptimizer(0.1), 2))


def test_on_the_one_mesh_of_the_program_gradients_are_reduced_with_an_update_alone(caplog):
    with caplog.at_level(logging.INFO, "mtf_gradsync"):
        report = simd_report(on_its_own, *ON_ITS_OWN)
        again = simd_report(on_its_own, *ON_ITS_OWN)
    bare = simd_report(NoUpdate, *ON_ITS_OWN)
    for found in (report, again):
        rows = [r for r in found.rows if "reduce_mean/" not in r.name]
        assert rows
        assert all(row.is_conditional for row in rows)
        assert found.every_step.bytes_per_core == bare.every_step.bytes_per_core
    assert [r.levelname for r in caplog.records if TOLD in r.getMessage()] == ["INFO"]


@pytest.mark.mostly_slow
def test_on_the_one_mesh_of_the_program_training_is_that_of_one_device(mesh_kind):
    feeds = models.mlp_batches(4)
    result = harness.run(mesh_kind, *ON_ITS_OWN, models.train(on_its_own), feeds)
    expected = reference.train(reference.Accumulation(reference.Sgd(), 2), feeds)
    reference.assert_close(result.variables, expected, 2.0**-18)
    sums = result.variables["w1/gradient_accumulator"]
    assert sums.shape == (2, *expected["w1"].shape), "one for each shard"


def test_where_a_copy_accumulates_is_decided_anew():
    made = []
    simd_report(lambda: made.append(on_its_own()) or made[0], *ON_ITS_OWN)
    copied, given = copy.copy(made[0]), copy.deepcopy(local(mtf.optimize.SgdOptimizer(0.1)))
    assert (made[0].accumulate, made[0].axes.num_shards) == ("local", 2)
    assert (copied.accumulate, copied.axes) == (None, None)
    (stage,), (other,) = stages_of(copied), stages_of(on_its_own())
    assert (stage.where, stage.axes, stage.takes) == (other.where, other.axes, other.takes)
    assert (given.accumulate, given.axes.num_shards) == ("local", 2)


WHY_SYNCED = {
    "around": (lambda: on_its_own(gs.CrossShardOptimizer), 1, "CrossShardOptimizer around it"),
    "no mesh": (on_its_own, 0, "the program has made no mesh yet: give mesh_shape and layout"),
    "two": (on_its_own, 2, "the program has made several meshes: give mesh_shape and layout"),
}


@pytest.mark.parametrize("why", list(WHY_SYNCED))
def test_what_reduces_on_every_step_says_so_once(why, caplog):
    make, count, text = WHY_SYNCED[why]
    for _ in range(2):
        with tf.Graph().as_default():
            for mesh in (ON_ITS_OWN, (MESH, LAYOUT))[:count]:
                harness.placement(*mesh)
            mesh = mtf.Mesh(mtf.Graph(), "mesh")
            inputs = {k: tf.constant(v) for k, v in models.mlp_batches(1)[0].items()}
            optimizer = make()
            models.train(lambda: optimizer)(mesh, inputs)  # noqa: B023
            assert optimizer._wrappers()[-1].accumulate == "synced"
    (record,) = [r for r in caplog.records if "reduced on every microbatch step" in r.getMessage()]
    assert record.levelname == "WARNING"
    assert text in record.getMessage()


def test_gradient_bytes_an_update_are_a_kth_of_the_bare_optimizers():
    bare = gradient_rows(simd_report(models.OPTIMIZERS["sgd"]))
    wrapped = gradient_rows(simd_report(lambda: local(models.OPTIMIZERS["sgd"]())))
    # An update of the bare optimizer on K microbatch steps communicates K times.
    per_update_bare = K * sum(row.bytes_per_step for row in bare)
    per_update = sum(row.bytes_per_step for row in wrapped)
    assert per_update * K == per_update_bare
    assert len({row.together for row in wrapped}) == 1


def test_a_skip_function_exchanges_scalars_only():
    plain = simd_report(lambda: local(models.OPTIMIZERS["sgd"]())).every_step
    report = simd_report(
        lambda: local(models.OPTIMIZERS["sgd"](), should_skip_update_fn=gs.skip_not_finite)
    ).every_step
    assert 0 < report.bytes_per_core - plain.bytes_per_core <= 4 * 4


def operations_of_every_step(make):
    """Names of operations without a conditional context, by type; the lowered update."""
    made, found = built("placement", "2x2", make), {}
    for op in made.graph.get_operations():
        if op._get_control_flow_context() is None and "Initializer" not in op.name:
            found.setdefault(op.type, []).append(op.name)
    return found, made.updates


@pytest.fixture(scope="module")
def floor():
    """What forward and backward passes alone have."""
    found, lowered = operations_of_every_step(NoUpdate)
    assert lowered == []
    return found


@pytest.mark.parametrize("optimizer", ["adafactor", "adam"])
@pytest.mark.mostly_slow
def test_placement_update_stands_in_the_branch(optimizer, floor):
    """Assignments, sums over devices and the update's arithmetic have a conditional context."""
    make = models.OPTIMIZERS[optimizer]
    wrapped, _ = operations_of_every_step(lambda: local(make()))
    # Outside of the branch there are, beyond forward and backward: one addition an accumulator
    # and device, the counters' integer arithmetic, and no product, root or division.
    for kind in ("Mul", "Square", "Sqrt", "Rsqrt", "RealDiv", "Sum", "AddN"):
        assert len(wrapped.get(kind, [])) - len(floor.get(kind, [])) <= 8, kind


@pytest.mark.slow
def test_microbatch_steps_write_accumulators_and_counters_only():
    make = models.OPTIMIZERS["adam"]
    made = built("placement", "2x2", lambda: local(make()), autostack=False)
    every_step, with_an_update = writes(made.graph)
    assert all("/gradient_accumulator_slice_" in n for n in every_step["AssignAddVariableOp"])
    assert any("adam_m" in name for name in with_an_update)
    assert every_step["AssignAddVariableOp"] < with_an_update
    # The rest of the writes outside copy masters to slices at the start of a session.
    counters = {n for n in every_step["AssignVariableOp"] if "GradientAccumulationOptimizer" in n}
    assert all(n.startswith(("GradientAccumulationOptimizer/", "stacked/Grad")) for n in counters)
    step_writes = {n for n in every_step["AssignVariableOp"] if "_slice_" in n} - counters
    assert {n.split("_slice_")[0] for n in step_writes} <= {
        v.name for v in made.lowering.graph.all_variables
    }


def writes(graph):
    """Names of variables that are written: outside by kind of write, and in the branch."""
    outside, inside = {}, set()
    for op in graph.get_operations():
        if op.type.startswith("Assign"):
            variable = op.inputs[0].op
            while variable.type in ("Switch", "Identity"):
                variable = variable.inputs[0].op
            if op._get_control_flow_context() is None:
                outside.setdefault(op.type, set()).add(variable.name)
            else:
                inside.add(variable.name)
    # Where TensorFlow can call a function over several devices the branch is one.
    for function in graph.as_graph_def().library.function:
        handles = {n.name: n for n in function.node_def if n.op == "VarHandleOp"}
        for node in function.node_def:
            if node.op.startswith("Assign"):
                handle = handles[node.input[0].split(":")[0]]
                inside.add(handle.attr["shared_name"].s.decode())
    return outside, inside


def test_skipping_the_update_skips_one_call():
    """Nothing that belongs to an update passes through the executor, dead or alive."""
    graph = built("placement", "2x2", lambda: local(models.OPTIMIZERS["adafactor"]())).graph
    calls = [op for op in graph.get_operations() if op.type == "StatefulPartitionedCall"]
    if tf.__version__.startswith("2.12"):
        pytest.skip("TensorFlow 2.12 inlines every function")
    (call,) = calls
    in_branch = [op for op in graph.get_operations() if op._get_control_flow_context()]
    # Values that are handed in: the count and what Adafactor makes of scalars while it is built.
    assert len(call.inputs) <= 2 * len(models.mlp_values()) + 1
    assert len(in_branch) <= len(call.inputs) + 8
    (function,) = graph.as_graph_def().library.function
    assert function.attr["_noinline"].b
    assert len(function.node_def) > 250


def test_unchecked_state_has_no_host_master():
    make = lambda: local(  # noqa: E731
        models.OPTIMIZERS["sgd"](), checkpoint_accumulators=False
    )
    made = built("placement", "2x2", make)
    with made.graph.as_default():
        assert not tf.local_variables()
    # The second time as a restart of the session's state would.
    for values in made.runs(models.mlp_batches(1) * (K + 1), 2):
        saved = values.variables
        assert not any("accumulator" in name or "mini_step" in name for name in saved)
        assert np.any(saved["w1"] != models.mlp_values()["w1"])
        assert saved["GradientAccumulationOptimizer/update_step"] == 1


@pytest.mark.parametrize("size", ["one:1", "all:2"])
@pytest.mark.mostly_slow
def test_unchecked_state_on_small_meshes(mesh_kind, size):
    feeds = models.mlp_batches(K)
    layout = "batch:all"
    results = [
        harness.run(
            mesh_kind,
            size,
            layout,
            models.train(
                lambda: gs.GradientAccumulationOptimizer(
                    models.OPTIMIZERS["sgd"](),
                    K,
                    axes=gs.ReplicaAxes(size, layout),
                    checkpoint_accumulators=checkpointed,  # noqa: B023
                )
            ),
            feeds,
        )
        for checkpointed in (True, False)
    ]
    for name in models.mlp_values():
        np.testing.assert_array_equal(results[0].variables[name], results[1].variables[name])
