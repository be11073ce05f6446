"""gs.describe: the table of a step, and that it is what the step does."""

import json

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.optimizers import DescribedLine
from tests import harness, models
from tests.wrappers import TABLE, order_table

SHAPE, LAYOUT, BATCH_DIMS = harness.MESHES["4x2"]
MESH = {"mesh_shape": SHAPE, "layout": LAYOUT, "batch_dims": BATCH_DIMS}


def four(**mesh):
    clipped = gs.ClipByGlobalNormOptimizer(gs.AdamWOptimizer(0.1), 1.0)
    scaled = gs.LossScaleOptimizer(clipped, name="loss_scale")
    return gs.AverageOptimizer(
        gs.GradientAccumulationOptimizer(scaled, 4, True, name="accumulation", **mesh),
        name="average",
    )


def some_variables():
    """Three of 512 x 1024 numbers, of which the layout splits one along the model axis."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    rows, columns = mtf.Dimension("in", 512), mtf.Dimension("out", 1024)
    hidden = mtf.Dimension("hidden", 1024)
    shapes = [[rows, columns], [rows, columns], [rows, hidden]]
    return [
        mtf.get_variable(mesh, f"w{i}", mtf.Shape(dims)).operation for i, dims in enumerate(shapes)
    ]


def test_a_stack_is_a_table():
    # A core has two of 2 MiB, and half of one.
    lines = [line[:2] for line in gs.describe(four(**MESH), variables=some_variables()).lines]
    assert lines == [
        ("every step", "divide by the loss scale, dynamic, at first 32,768"),
        ("", "add up gradients on each shard, float32"),
        ("every 4th", "reduce over batch, 4 shards: fused, 5.24 MB in 1 group; divide by 4"),
        ("", "skip steps that are not finite"),
        ("", "clip to a global norm of 1"),
        ("", "update 3 variables by AdamW"),
        ("after it", "averages, decay 0.999"),
    ]


def test_wrappers_of_tensorflow_optimizers_are_described():
    opt = gs.GradientAccumulationOptimizer(
        tf.train.AdamOptimizer(0.1), 4, True, name="accumulation"
    )
    table = str(gs.describe(gs.CrossShardOptimizer(opt, name="cross_shard")))
    assert table.splitlines() == [
        "every step  sum over the shards of a TPU program, if this is one  (cross_shard)",
        "            add up gradients on this worker                       (accumulation)",
        "every 4th   divide by 4                                           (accumulation)",
        "            update by Adam",
    ]
    # Inside accumulation all is done on steps that update.
    inside = gs.CrossShardOptimizer(tf.train.AdamOptimizer(0.1))
    twice = gs.GradientAccumulationOptimizer(gs.GradientAccumulationOptimizer(inside, 2), 3)
    assert [line[:2] for line in gs.describe(twice).lines] == [
        ("every step", "add up gradients on this worker"),
        ("every 3rd", "take the sums"),
        ("", "add up gradients on this worker"),
        ("every 6th", "take the sums"),
        ("", "sum over the shards of a TPU program, if this is one"),
        ("", "update by Adam"),
    ]


def test_columns_of_the_table_are_aligned():
    found = gs.describe(four(**MESH))
    table = str(found).splitlines()
    starts = [row.index(line.what) for row, line in zip(table, found.lines)]
    assert set(starts) == {len("every step  ")}
    ends = {row.index(f"({x.wrapper})") for row, x in zip(table, found.lines) if x.wrapper}
    assert len(ends) == 1
    assert not any(row.endswith(" ") for row in table)
    narrow = found.as_text(70).splitlines()
    assert max(map(len, narrow)) <= 70 < max(map(len, table))
    words = " ".join(narrow).split()
    assert sorted(words) == sorted(" ".join(table).split())


def test_json_says_on_each_line_when():
    found = gs.describe(four())
    rows = json.loads(found.to_json())
    assert [row["what"] for row in rows] == [line.what for line in found.lines]
    assert [row["wrapper"] for row in rows] == [line.wrapper for line in found.lines]
    # Without a mesh reduced gradients add up.
    whens = ["every step"] * 3 + ["every 4th"] * 4 + ["after it"]
    assert [row["when"] for row in rows] == whens
    assert rows[1]["what"] == "reduce over the replica axes: fused"


@pytest.mark.parametrize(
    "wrap",
    [
        lambda opt: gs.CrossShardOptimizer(opt, **MESH),
        lambda opt: gs.GradientAccumulationOptimizer(opt, 2, **MESH),
        lambda opt: gs.CrossShardOptimizer(
            opt, reducer=gs.reduce.CompressedAllReduce(wire_dtype="bfloat16"), **MESH
        ),
        lambda opt: gs.CrossShardOptimizer(opt, reducer=gs.reduce.FusedAllReduce(100), **MESH),
    ],
)
def test_bytes_and_groups_are_those_of_the_program(wrap):
    """The reference is the list of the collectives of the SIMD program."""
    opt = wrap(mtf.optimize.SgdOptimizer(0.1))
    before = []

    def build(mesh, inputs):
        loss = models.mlp_loss(mesh, inputs, BATCH_DIMS)
        pairs = opt.compute_gradients(loss)
        before.append(gs.describe(opt, variables=[v for _, v in pairs]))
        return opt.apply_gradients(pairs), {"loss": loss}

    built = harness.built("simd", SHAPE, LAYOUT, build, models.mlp_batches(1)[0])
    rows = built.collectives().rows
    sums = [r for r in rows if r.variables and r.operation == "CrossReplicaSum"]
    sums = [r for r in sums if "rows" in r.group.split("+")]  # not those of the model
    (line,) = (x for x in gs.describe(opt).lines if x.what.startswith("reduce over"))
    size = sum(r.bytes_per_core for r in sums)
    groups = len({r.together or r.name for r in sums})
    assert (
        f"batch, 4 shards: fused{', sent in bfloat16' if 'sent' in line.what else ''}" in line.what
    )
    assert f", {size} bytes in {groups} group" in line.what
    # What was described before is what was built.
    assert before == [gs.describe(opt)]
    assert opt.step.stack.stages


def test_describing_changes_nothing_and_every_order_that_works_has_a_description():
    make = order_table.WRAPPERS
    for (outer, inner), why in TABLE.items():
        if why is None:
            stack = [make[outer](make[inner](order_table.plain()))]
            stack.append(stack[0].opt)
            held = [dict(vars(opt)) for opt in stack]
            found = gs.describe(stack[0], "rows:2;cols:2", "outer:rows;batch:cols")
            assert [dict(vars(opt)) for opt in stack] == held
            assert sum(line.what.startswith("update by Sgd") for line in found.lines) == 1
            # Each of both has a line of its own, but for who only reduces what is reduced.
            names = {line.wrapper for line in found.lines}
            missing = {x.name for x in stack if isinstance(x, gs.optimizers.Wrapper)} - names
            assert missing <= {"CrossShardOptimizer"}, str(found)


def test_a_stack_in_an_optimizer_of_another_library_is_described_to_its_end():
    class Another:
        def __init__(self, opt):
            self.opt = opt

        def apply_grads(self, grads, variables):
            return self.opt.apply_grads(grads, variables)

    inside = gs.CrossShardOptimizer(mtf.optimize.SgdOptimizer(0.1))
    found = gs.describe(gs.AverageOptimizer(Another(inside), 0.5))
    assert found.lines == (
        DescribedLine("every step", "hand gradients to Another", ""),
        DescribedLine("", "reduce over the replica axes: fused", "CrossShardOptimizer"),
        DescribedLine("", "update by Sgd", ""),
        DescribedLine("after it", "averages, decay 0.5", "AverageOptimizer"),
    )
    assert gs.describe(gs.MeshOptimizer(tf.train.AdamOptimizer(0.1))).lines == (
        DescribedLine("every step", "update by Adam", ""),
    )


def test_an_order_that_is_refused_shows_what_both_do():
    inner = gs.GradientAccumulationOptimizer(mtf.optimize.SgdOptimizer(0.1), 4, **MESH)
    with pytest.raises(ValueError, match="turn them round") as raised:
        gs.ClipByGlobalNormOptimizer(inner, 2.5, name="clip")
    _, *lines = str(raised.value).splitlines()
    assert lines[:2] == [
        "  clip: reduce over the replica axes: fused; clip to a global norm of 2.5",
        "  GradientAccumulationOptimizer (every 4th): add up gradients on each shard; "
        "reduce over batch, 4 shards: fused",
    ]


def test_arguments_are_checked():
    opt = four()
    with pytest.raises(ValueError, match="mesh_shape and layout go together"):
        gs.describe(opt, mesh_shape="all:4")
    with pytest.raises(ValueError, match="mesh_shape must be a mesh shape"):
        gs.describe(opt, mesh_shape="all", layout="batch:all")
    with pytest.raises(TypeError, match=r"variables must hold mtf\.Variable"):
        gs.describe(opt, variables=[np.ones(3)])


def test_where_gradients_accumulate_is_said_of_a_mesh_that_is_not_made_yet():
    opt = gs.GradientAccumulationOptimizer(mtf.optimize.SgdOptimizer(0.1), 4)
    with tf.Graph().as_default():
        unknown = str(gs.describe(opt))
        assert "add up the sums, because the program has made no mesh yet: give mesh" in unknown
        known = str(gs.describe(opt, "batch:8", "batch:batch"))
        assert known.startswith("every step  add up gradients on each shard ")


@pytest.mark.parametrize(
    ("reducer", "shape", "told"),
    [
        (gs.reduce.FusedAllReduce(2**20), SHAPE, "fused, 5.24 MB in 3 groups"),
        (gs.reduce.FusedAllReduce(packed_bytes=2**20), SHAPE, "fused, 5.24 MB in 3 groups"),
        (gs.reduce.AllReduce(num_packs=4), SHAPE, "by AllReduce, 5.24 MB in 4 groups"),
        (gs.reduce.RingAllReduce(), SHAPE, "by RingAllReduce, 5.24 MB in 1 group"),
        # These send other numbers than each core's gradients once.
        (gs.reduce.HierarchicalAllReduce(), SHAPE, "by HierarchicalAllReduce, of 5.24 MB"),
        (gs.reduce.LowRankAllReduce(2), SHAPE, "low rank, 2, of 5.24 MB"),
        (gs.reduce.QuantizedAllReduce(), SHAPE, "quantized to 8 bits, of 5.24 MB"),
        (None, "rows:1;cols:2", "fused, nothing to send"),
    ],
)
def test_bytes_are_said_of_what_a_strategy_sends(reducer, shape, told):
    mesh = {**MESH, "mesh_shape": shape}
    opt = gs.CrossShardOptimizer(mtf.optimize.SgdOptimizer(0.1), reducer=reducer, **mesh)
    reduces, _ = gs.describe(opt, variables=some_variables()).lines
    assert reduces.what.endswith(f": {told}")


def test_parts_are_sent_in_no_number_of_groups():
    """Sums of variables that are split are apart from those of others."""
    opt = gs.ShardedUpdateOptimizer(mtf.optimize.SgdOptimizer(0.1), **MESH)
    reduces = gs.describe(opt, variables=some_variables()).lines[0]
    assert reduces.what == "reduce, each replica its part, over batch, 4 shards: fused, of 5.24 MB"


def test_gradients_of_two_meshes_are_in_two_groups():
    some = some_variables()
    mesh, dims = mtf.Mesh(some[0].graph, "another"), mtf.Shape([mtf.Dimension("in", 8)])
    both = [*some, mtf.get_variable(mesh, "v", dims).operation]
    opt = gs.CrossShardOptimizer(mtf.optimize.SgdOptimizer(0.1), **MESH)
    (reduces, _) = gs.describe(opt, variables=both).lines
    assert reduces.what.endswith("fused, 5.24 MB in 2 groups")


def test_what_is_reduced_is_not_said_to_be_reduced_again():
    inside = gs.SyncReplicasOptimizer(mtf.optimize.SgdOptimizer(0.1), 2, accept_summed=True, **MESH)
    assert [line[:2] for line in gs.describe(gs.ClipByGlobalNormOptimizer(inside, 1.0)).lines] == [
        ("every step", "reduce over batch, 4 shards: fused"),
        ("", "clip to a global norm of 1"),
        ("", "add up gradients of replicas, if finite and not stale"),
        ("once 2 contributed", "average the contributions"),
        ("", "update by Sgd"),
    ]


def test_an_early_update_is_said():
    sgd = mtf.optimize.SgdOptimizer(0.1)
    opt = gs.GradientAccumulationOptimizer(sgd, 4, accumulate="synced", flush=True)
    assert gs.describe(opt).lines[1].what == "add up the sums; update early where flush is true"


def step_of(apply, on="simd", **more):
    """The description of a step, its program, and the variables of the model."""
    said, program = [], []

    def build(mesh, inputs):
        loss = models.mlp_loss(mesh, inputs, BATCH_DIMS)
        opt, updates = apply(loss)
        said.append(gs.describe(opt))
        program.append(opt)
        return updates, {"loss": loss}

    built = harness.built(on, SHAPE, LAYOUT, build, models.mlp_batches(1)[0])
    # The same of the step, wherever it is read.
    assert gs.describe(program[0]) == said[0]
    return [line[:2] for line in said[0].lines], built


def test_gradients_that_the_program_has_mixed_are_said_to_be_reduced_on_each_step():
    def apply(loss):
        opt = gs.GradientAccumulationOptimizer(mtf.optimize.SgdOptimizer(0.1), 4, True)
        pairs = opt.compute_gradients(loss)
        some = [(g, v) for g, v in pairs if v.name != "b1"]
        clipped, _ = gs.clip_by_global_norm([g for g, _ in some], 1.0)
        mixed = list(zip(clipped, [v for _, v in some]))
        return opt, opt.apply_gradients([*mixed, *(pair for pair in pairs if pair not in some)])

    lines, built = step_of(apply)
    assert lines == [
        (
            "every step",
            "reduce the gradients of 2 variables, in which the program has mixed shards",
        ),
        ("", "add up gradients on each shard, float32"),
        ("every 4th", "reduce over batch, 4 shards: fused, 16 bytes in 1 group; divide by 4"),
        ("", "update 3 variables by Sgd"),
    ]
    sums = [row for row in built.collectives().rows if row.is_conditional]
    assert [row.bytes_per_core for row in sums] == [16]


def test_the_gradient_of_a_penalty_is_not_said_to_mix_shards():
    """Each shard's share of it is known, also if the layout splits the variable by shard."""
    mesh, sizes = mtf.Mesh(mtf.Graph(), "mesh"), mtf.Shape([mtf.Dimension("split", 4)])
    x = mtf.import_tf_tensor(mesh, tf.ones([4]), mtf.Shape([mtf.Dimension("batch", 4)]))
    w, v = mtf.get_variable(mesh, "w", mtf.Shape([])), mtf.get_variable(mesh, "v", sizes)
    sgd = mtf.optimize.SgdOptimizer(0.1)
    opt = gs.SyncReplicasOptimizer(sgd, 2, mesh_shape="all:2", layout="batch:all;split:all")
    loss = mtf.reduce_mean(x * w) + mtf.reduce_sum(mtf.square(v))
    opt.minimize(loss, tf.train.get_or_create_global_step())
    assert gs.describe(opt).lines[0].what == "add up gradients of replicas, if finite and not stale"


def test_weights_are_said():
    def apply(loss):
        opt = gs.GradientAccumulationOptimizer(mtf.optimize.SgdOptimizer(0.1), 4, True)
        return opt, opt.minimize(loss, weights=8.0)

    lines, _ = step_of(apply)
    assert lines[1:] == [
        (
            "every 4th",
            "reduce over batch, 4 shards: fused, 116 bytes in 1 group; divide by their weights",
        ),
        ("", "skip where weights are 0"),
        ("", "update 3 variables by Sgd"),
    ]


def test_sums_on_a_placement_mesh_are_in_buckets():
    def apply(loss):
        fused = gs.reduce.FusedAllReduce(packed_bytes=50)
        opt = gs.CrossShardOptimizer(mtf.optimize.SgdOptimizer(0.1), reducer=fused)
        return opt, opt.minimize(loss)

    lines, _ = step_of(apply, "placement")
    assert lines[0][1] == "reduce over batch, 4 shards: fused, 116 bytes in 2 groups"


def test_copies_of_shards_are_said_to_be_summed():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    dims = mtf.Shape([mtf.Dimension("batch", 8), mtf.Dimension("in", 4)])
    copy = mtf.get_variable(mesh, "copy", dims).operation
    opt = gs.CrossShardOptimizer(mtf.optimize.SgdOptimizer(0.1), **MESH)
    assert [line.what for line in gs.describe(opt, variables=[copy]).lines] == [
        "sum gradients of the shards' own copies over all shards",
        "reduce over batch, 4 shards: fused, nothing to send",
        "update 1 variable by Sgd",
    ]
