"""The list of what cores exchange."""

import json

import pytest

import mtf_gradsync as gs
from mtf_gradsync import simd
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.runtimes.simd.collectives import list_step
from tests import harness
from tests.runtimes.simd.programs import BATCH, HIDDEN, INPUTS, MESHES, SGD, Regression


def report_of(mesh, with_lowering=True, **kwargs):
    model = Regression(lambda: SGD(0.5), **kwargs)
    model.placeholders()
    with simd.tpu_program(*MESHES[mesh]) as program:
        lowering, _, _ = model.build(program.mesh_impl)
    return simd.list_collectives(program, lowering=lowering if with_lowering else None)


@pytest.mark.parametrize(
    ("mesh", "group", "rows_on_a_core", "columns_on_a_core"),
    [
        ("8", "all", INPUTS, HIDDEN),
        ("4x2", "rows", INPUTS, HIDDEN // 2),
        ("4x2 shuffled", "rows", INPUTS, HIDDEN // 2),
        ("2x2x2", "a", INPUTS // 2, HIDDEN // 2),
    ],
)
def test_gradient_sum(mesh, group, rows_on_a_core, columns_on_a_core):
    rows = [r for r in report_of(mesh).rows if r.variables]
    assert len(rows) == 1
    (row,) = rows
    assert row.operation == "CrossReplicaSum"
    assert row.dtype == "float32"
    assert row.shape == (rows_on_a_core, columns_on_a_core)
    assert row.bytes_per_core == 4 * rows_on_a_core * columns_on_a_core
    assert row.group == group
    assert row.variables == ("w",)
    assert (row.loops, row.turns, row.branches) == ((), 1, ())


def test_loss_and_activations_reach_no_variable():
    report = report_of("2x2x2")
    others = [(r.group, r.shape) for r in report.rows if r.variables == ()]
    # x @ w over "inputs", and the loss over "batch" and "hidden".
    assert others == [("c", (BATCH // 2, HIDDEN // 2)), ("a+b", ())]


def test_variables_are_known_without_the_lowering_too():
    assert ("w",) in [r.variables for r in report_of("8", with_lowering=False).rows]


def test_microbatches_sum_inside_the_loop_and_reduce_behind_it():
    report = report_of("2x2x2", microbatches=4)
    inside = [r for r in report.rows if r.loops]
    assert [(r.group, r.turns, r.shape) for r in inside] == [("c", 4, (2, HIDDEN // 2))]
    assert [r.turns for r in report.rows if r.variables == ("w",)] == [1]
    loop_bytes = 4 * 4 * 2 * HIDDEN // 2
    assert report.every_step.bytes_per_core == loop_bytes + 4 * INPUTS * HIDDEN // 4 + 4
    assert report.every_step.runs == len(report.rows) + 3
    assert report.every_step.is_exact


def conditional_report():
    take = tf.placeholder(tf.bool, [])
    with simd.tpu_program("rows:2;cols:2", "") as program:
        x = program.mesh_impl.LaidOutTensor([tf.zeros([3])])
        every = program.mesh_impl.allreduce(x, [0, 1], "SUM").one_slice
        tf.cond(
            take,
            lambda: program.mesh_impl.allreduce(x, [1], "SUM").one_slice,
            lambda: every,
            name="due",
        )
    return program


def test_conditionals_are_counted_separately():
    report = simd.list_collectives(conditional_report())
    always, sometimes = report.rows
    assert always.branches == ()
    assert sometimes.branches == (("due/pred_id", True),)
    assert (always.group, sometimes.group) == ("rows+cols", "cols")
    for total, count in ((report.every_step, 1), (report.conditional, 1), (report.update_step, 2)):
        assert (total.operations, total.bytes_per_core) == (count, 12 * count)
    assert {g: t.bytes_per_core for g, t in report.by_group().items()} == {
        "rows+cols": 12,
        "cols": 12,
    }


def test_unknown_loop_counts_are_reported_as_unknown():
    turns = tf.placeholder(tf.int32, [])
    with simd.tpu_program("all:2", "") as program:
        tf.while_loop(
            lambda i, _: i < turns,
            lambda i, x: (i + 1, tf.tpu.cross_replica_sum(x, [[0, 1]])),
            [0, 1.0],
        )
    report = simd.list_collectives(program)
    assert report.rows[0].turns is None
    assert not report.every_step.is_exact
    assert "x?" in str(report)
    assert "at least 4 bytes" in str(report)


def test_other_groups_are_spelled_as_core_numbers():
    with simd.tpu_program("rows:2;cols:2", "") as program:
        tf.tpu.cross_replica_sum(1.0, [[0, 3], [1, 2]])
    assert simd.list_collectives(program).rows[0].group == "[0,3],[1,2]"
    assert simd.list_collectives(program.graph).mesh == ""


def test_stacked_variables_are_named_one_by_one():
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    batch, dim = mtf.Dimension("batch", 4), mtf.Dimension("x", 4)
    with simd.tpu_program("all:2", "batch:all") as program:
        for name in "ab":
            mtf.get_variable(mesh, name, [dim])
        variables = list(graph.trainable_variables)
        x = mtf.import_tf_tensor(mesh, tf.ones([4, 4]), [batch, dim])
        loss = mtf.reduce_sum(x * variables[0].value * variables[1].value)
        grads = mtf.gradients([loss], [v.value for v in variables])
        graph.combine_assignments(SGD(1.0).apply_grads(grads, variables))
        lowering = mtf.Lowering(graph, {mesh: program.mesh_impl})
    report = simd.list_collectives(program, lowering=lowering)
    assert {r.variables for r in report.rows if r.variables} == {("a", "b")}


def test_table_json_and_picture(tmp_path):
    report = simd.list_collectives(conditional_report())
    lines = str(report).splitlines()
    assert lines[0] == "mesh rows:2;cols:2"
    assert lines[1].startswith("all: operation CrossReplicaSum, dtype float32")
    assert "if due/pred_id" in lines[5]
    assert lines[-1].startswith("update step")
    content = json.loads(report.to_json())
    assert content["totals"]["update_step"]["bytes_per_core"] == 24
    assert content["rows"][1]["branches"] == [["due/pred_id", True]]
    report.plot(str(tmp_path / "report.png"))
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_program_in_which_nothing_is_sent_has_an_empty_table():
    with simd.tpu_program("all:2", "") as program:
        tf.ones([])
    lines = str(simd.list_collectives(program)).splitlines()
    assert lines[0] == "mesh all:2"
    assert lines[1] == "none"
    assert lines[-1] == "every step      0 operations in 0 groups, 0 bytes per core"


def test_no_program():
    with pytest.raises(simd.UnsupportedProgramError, match="list_transfers"):
        simd.list_collectives(tf.get_default_graph())


def test_collective_in_a_function_is_refused():
    @tf.function
    def total(x):
        return tf.tpu.cross_replica_sum(x, [[0, 1]])

    with simd.tpu_program("all:2", "") as program:
        total(tf.constant(1.0))
    with pytest.raises(simd.UnsupportedProgramError, match="holds the collective"):
        simd.list_collectives(program)


@pytest.mark.parametrize("cores", [2, 4])
def test_transfers_of_a_ring_all_reduce(cores):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    batch, dim = mtf.Dimension("batch", cores), mtf.Dimension("x", 8)
    impl = harness.placement(f"all:{cores}", "batch:all")
    x = mtf.ones(mesh, [batch, dim])
    total = mtf.reduce_sum(x, output_shape=[dim]) * 1.0
    lowering = mtf.Lowering(graph, {mesh: impl})
    report = simd.list_transfers(lowering.tensors[total].to_laid_out_tensor().tensor_list, impl)
    # Each of n cores passes on (n - 1) nths of the tensor twice: partial sums, then sums.
    assert report.every_step.bytes_per_core == 2 * (cores - 1) * 8 * 4 // cores
    assert {r.group for r in report.rows} == {"all"}
    assert {r.operation for r in report.rows} == {"transfer"}


def test_transfers_name_the_axis_and_count_only_what_is_fetched():
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    dims = [mtf.Dimension("batch", 2), mtf.Dimension("hidden", 4)]
    impl = harness.placement("rows:2;cols:2", "batch:rows;hidden:cols")
    x = mtf.ones(mesh, dims)
    over_batch = mtf.reduce_sum(x, reduced_dim=dims[0]) * 1.0
    mtf.reduce_sum(x, reduced_dim=dims[1]) * 1.0
    lowering = mtf.Lowering(graph, {mesh: impl})
    report = simd.list_transfers(lowering.tensors[over_batch].tensor_list, impl)
    assert {r.group for r in report.rows} == {"rows"}


def test_transfers_need_a_device_per_core():
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:2", "", ["", ""])
    with pytest.raises(ValueError, match="device of its own for each of the 2 cores"):
        simd.list_transfers([tf.constant(1.0)], impl)
    with pytest.raises(ValueError, match="got none"):
        simd.list_transfers([], impl)
    assert list_step(impl, [tf.constant(1.0)], []) is None


def test_a_step_whose_update_may_be_in_a_function_has_no_totals():
    opt = gs.GradientAccumulationOptimizer(mtf.optimize.SgdOptimizer(0.1), 2)
    impl = harness.placement("all:2", "")
    fetch = tf.constant(1.0)
    assert list_step(impl, [fetch], [opt]).scalars() == {"traffic/bytes_of_update_step": 0}
    tf.raw_ops.StatefulPartitionedCall(
        args=[], Tout=[tf.float32], f=tf.function(lambda: 1.0).get_concrete_function()
    )
    report = list_step(impl, [fetch], [opt])
    assert not report.is_complete
    assert report.scalars() == {}
    assert list_step(impl, [fetch], []).is_complete
