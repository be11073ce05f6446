"""accumulate="sharded": each replica adds up its part of the reduced gradients (ZeRO-2)."""

import functools
import re

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, sessions
from tests.optimizers.sharded_updates import small_model
from tests.optimizers.sharded_updates.small_model import OPTIMIZERS, assert_close, batches, run

K = 2
STEPS = 2 * K
EPS = np.finfo(np.float32).eps
# Values are around 1. A sum over four shards is added up in another order: some float32 ulp of each
# gradient, in each step.
TOLERANCE = STEPS * 16 * EPS
ACCUMULATOR = "/gradient_accumulator"
NAME = "GradientAccumulationOptimizer"


def axes_of(mesh):
    return gs.ReplicaAxes(*small_model.MESHES[mesh])


def accumulated(opt, mesh, accumulate="sharded", passes=K, average=True, **kwargs):
    return gs.GradientAccumulationOptimizer(
        opt, passes, average, accumulate=accumulate, axes=axes_of(mesh), **kwargs
    )


def stack(mesh, accumulate, optimizer="adam", is_sharded=True, **kwargs):
    opt = OPTIMIZERS[optimizer]()
    opt = small_model.sharded(opt, mesh) if is_sharded else opt
    return accumulated(opt, mesh, accumulate, **kwargs)


@functools.lru_cache(maxsize=None)
def synced(optimizer="adam", mesh="2", passes=K, names=tuple(small_model.SHAPES)):
    """Variables after some steps with synced sums."""
    make = functools.partial(stack, mesh, "synced", optimizer, False, passes=passes)
    return run("simd", mesh, make, batches(STEPS), names=names).variables


@pytest.mark.parametrize(
    ("kind", "mesh", "optimizer", "is_sharded"),
    [
        ("simd", "4", "adafactor", True),
        ("simd", "2x2x2", "adam", True),
        ("simd", "2x2", "momentum", False),
        ("simd", "experts", "adam", False),
        ("own memories", "2x2", "adafactor", False),
        ("placement", "2", "sgd", True),
        pytest.param("xla", "4", "adam", True, marks=pytest.mark.xla),
    ],
)
@pytest.mark.mostly_slow(keep="placement")
def test_trains_as_synced_sums_do(kind, mesh, optimizer, is_sharded):
    """Tied variables, a second axis, sizes that nothing divides, and experts are in the model."""
    found = run(kind, mesh, lambda: stack(mesh, "sharded", optimizer, is_sharded), batches(STEPS))
    expected = synced(optimizer, "experts" if mesh == "experts" else "2")
    assert_close(found.variables, expected, TOLERANCE)


def slices_of_sums(made):
    return {
        v.name[: -len(ACCUMULATOR)]: x.laid_out_tensor.slice_shape
        for v, x in made.lowering.variables.items()
        if v.name.endswith(ACCUMULATOR)
    }


@pytest.mark.parametrize("is_sharded", [True, False])
def test_a_core_holds_its_part_of_each_sum(is_sharded):
    made = small_model.built(
        "simd", "4x2", lambda: stack("4x2", "sharded", is_sharded=is_sharded), batches(1)[0],
        autostack=False,
    )  # fmt: skip
    # Four replicas; the layout splits "hidden" (64) in two. By default parts have to save tiles.
    whole = {"b1": [32], "scale": [], "odd": [7]}
    parts = {"w1": [2, 32], "w2": [32, 16], "b2": [16], "gain": [16]}
    if not is_sharded:
        del parts["b2"], parts["gain"]
        whole.update(b2=[64], gain=[64])
    assert slices_of_sums(made) == {**whole, **parts}


def sent(where, is_sharded, mesh="4"):
    """Bytes that a core sends for gradients: in each step, and in one with an update."""
    made = small_model.built(
        "simd", mesh, lambda: stack(mesh, where, is_sharded=is_sharded), batches(1)[0],
        names=("w1", "w2", "odd"),
    )  # fmt: skip
    report = made.collectives()
    shards = axes_of(mesh).num_shards
    # Around a ring an all-reduce sends 2 (s - 1) / s of its operand, and a reduce-scatter half of
    # that; so does an all-gather, which is an all-to-all of copies of the part.
    share = (shards - 1) / shards
    of = {"CrossReplicaSum": 2 * share, "XlaReduceScatter": share, "AllToAll": share}
    found = {True: 0.0, False: 0.0}
    for row in report.rows:
        if row.shape:  # the loss is a scalar
            found[row.is_conditional] += of[row.operation] * row.bytes_per_core
    return found[False], found[True]


@pytest.mark.slow
def test_half_as_many_bytes_are_sent_as_by_synced_sums():
    # Of "odd", which nothing divides, one number is sent: its gradient is that of a mean.
    w1, w2 = (4 * size * 64 * 3 / 4 for size in (8, 64))
    assert sent("synced", False) == (2 * (w1 + w2), 0)
    # The sums are gathered for an update. A part of w1 would save too few of a TPU's tiles.
    assert sent("sharded", False) == (2 * w1 + w2, w2)
    # With parts of all variables, nothing is gathered but new values.
    assert sent("synced", True) == (2 * (w1 + w2), w1 + w2)
    assert sent("sharded", True) == (w1 + w2, w1 + w2)


def with_a_nan(step):
    feeds = batches(STEPS + 1)
    feeds[step]["y"][0, 0] = np.nan  # of shard 0
    return feeds


SKIPS = {"should_skip_update_fn": gs.skip_not_finite}
BF16 = mtf.VariableDType(tf.bfloat16, tf.bfloat16, tf.bfloat16)
# What stands around, given where sums are and the mesh, and inside of it.
STACKS = {
    "averages, loss scale": lambda where, mesh: gs.AverageOptimizer(
        gs.LossScaleOptimizer(stack(mesh, where, **SKIPS)), 0.5
    ),
    "sent in bfloat16": lambda where, mesh: stack(
        mesh, where, is_sharded=False, reduce_dtype="bfloat16", **SKIPS
    ),
    "loss scale inside": lambda where, mesh: accumulated(
        gs.LossScaleOptimizer(small_model.sharded(OPTIMIZERS["adam"](), mesh)), mesh, where
    ),
    "clip around": lambda where, mesh: gs.ClipByGlobalNormOptimizer(
        stack(mesh, where, is_sharded=False, **SKIPS), 0.05
    ),
    "clip inside, a schedule": lambda where, mesh: accumulated(
        gs.ClipByGlobalNormOptimizer(small_model.sharded(OPTIMIZERS["sgd"](), mesh), 0.05),
        mesh, where, passes=lambda updates: mtf.minimum(3, updates + 1), **SKIPS,
    ),
    "spikes, not kept": lambda where, mesh: stack(
        mesh, where, should_skip_update_fn=gs.skip_spikes(), checkpoint_accumulators=False
    ),
    "of one step": lambda where, mesh: stack(mesh, where, passes=1, **SKIPS),
    "flushed, in two levels": lambda where, mesh: stack(
        mesh, where, passes=9, flush=True,
        reducer=gs.reduce.HierarchicalAllReduce(("add_n/add_n", 1)), **SKIPS,
    ),
    "low rank": lambda where, mesh: stack(
        mesh, where, is_sharded=False, reducer=gs.LowRankAllReduce(rank=2), **SKIPS
    ),
    "groups, 8 bits": lambda where, mesh: accumulated(
        gs.ByVariable(
            gs.AdamWOptimizer,
            [("b2|gain", {"weight_decay_rate": 0.0}), ("w1", None), ("w2", gs.MuonOptimizer)],
            learning_rate=0.01,
        ),
        mesh, where, reducer=gs.QuantizedAllReduce(), **SKIPS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.mostly_slow
def test_stacks_train_as_with_synced_sums(name):
    """A microbatch step with a NaN is skipped; over two shards, sums have the same bits."""
    feeds, names = with_a_nan(1), small_model.FEW
    found, expected = (
        run(
            "simd", "2x2", lambda where=where: STACKS[name](where, "2x2"), feeds, names=names
        ).variables
        for where in ("sharded", "synced")
    )
    assert np.isfinite(expected["w2"]).all()
    first = small_model.initial_values({name: small_model.SHAPES[name] for name in names})
    assert np.any(expected["w2"] != first["w2"])
    assert_close(found, expected, TOLERANCE)


@pytest.mark.parametrize("kind", ["own memories", "simd"])
@pytest.mark.slow
def test_other_strategies(kind):
    """Those that make complete sums; one on two levels."""
    for reducer in (
        gs.reduce.HierarchicalAllReduce(("add_n/add_n", 2)),
        gs.reduce.AllReduce(),
        gs.reduce.ReductionToOneDevice(),
    ):
        make = functools.partial(stack, "4", "sharded", "sgd", False, reducer=reducer)
        found = run(kind, "4", make, batches(STEPS), names=small_model.FEW)
        assert_close(found.variables, synced("sgd", names=small_model.FEW), TOLERANCE)


@pytest.mark.mostly_slow
def test_variables_in_bfloat16():
    """Sums are of float32, and parts of them are cast after they are divided."""
    found, expected = (
        run(
            "simd", "2", lambda where=where: stack("2", where, "sgd"), batches(K),
            BF16, names=small_model.FEW,
        )
        for where in ("sharded", "synced")
    )  # fmt: skip
    assert found.variables["w2" + ACCUMULATOR].dtype == np.float32
    assert_close(found.variables, expected.variables, 0.0)


@pytest.mark.parametrize(("outer_dims", "warns"), [(("outer",), False), (None, True)])
@pytest.mark.slow
def test_islands_add_up_parts_of_their_own_sums(outer_dims, warns, caplog):
    """An island of one replica has nothing to share."""
    mesh = "2x2x2" if outer_dims else "2x2"
    how = {} if outer_dims is None else {"outer_dims": outer_dims}

    def make(where):
        inner = stack(mesh, where, is_sharded=False, **SKIPS)
        return gs.OuterOptimizer(inner, STEPS, 1.0, 0.0, axes=axes_of(mesh), **how)

    feeds, names = with_a_nan(1)[: STEPS + 1], small_model.FEW
    found, expected = (
        run("simd", mesh, lambda where=where: make(where), feeds, names=names).variables
        for where in ("sharded", "synced")
    )
    assert ("there is one replica" in caplog.text) == warns
    assert_close(found, expected, TOLERANCE)


@pytest.mark.slow
def test_weights_of_steps():
    shape, layout, batch_dims = small_model.MESHES["4"]
    feeds = [{**f, "tokens": np.float32(n)} for f, n in zip(batches(STEPS), (3, 0, 1.5, 7))]

    def trained(where):
        def build(mesh, inputs):
            loss = small_model.loss_of(mesh, inputs, batch_dims, names=small_model.FEW)
            weight = mtf.import_tf_tensor(mesh, inputs["tokens"], mtf.Shape([]))
            opt = stack("4", where)
            return opt.minimize(loss, weights=weight), {"loss": loss}

        return harness.run("simd", shape, layout, build, feeds).variables

    assert_close(trained("sharded"), trained("synced"), TOLERANCE)


def apply_in_two(opt, pairs):
    return [op for some in (pairs[:4], pairs[4:]) for op in opt.apply_grads(*zip(*some))]


def apply_one_by_one(opt, pairs):
    return [op for pair in pairs for op in opt.apply_grad(*pair)]


@pytest.mark.parametrize(("apply", "is_sharded"), [(apply_in_two, False), (apply_one_by_one, True)])
@pytest.mark.mostly_slow
def test_gradients_applied_bit_by_bit(apply, is_sharded):
    shape, layout, batch_dims = small_model.MESHES["2"]

    def build(mesh, inputs):
        loss = small_model.loss_of(mesh, inputs, batch_dims)
        variables = sorted(mesh.graph.trainable_variables, key=lambda v: v.shape.size)
        grads = mtf.gradients([loss], [v.value for v in variables])
        opt = stack("2", "sharded", is_sharded=is_sharded)
        return apply(opt, list(zip(grads, variables))), {"loss": loss}

    found = harness.run("simd", shape, layout, build, batches(STEPS)).variables
    assert_close(found, synced(), TOLERANCE)


@functools.lru_cache(maxsize=None)
def of_three_steps(kind, mesh, where, is_sharded):
    """A program whose update takes three microbatch steps."""
    make = functools.partial(stack, mesh, where, is_sharded=is_sharded, passes=3)
    return small_model.built(kind, mesh, make, batches(1)[0], names=small_model.FEW)


@pytest.mark.parametrize(
    "runs",
    [
        [("simd", "4", "sharded", True), ("simd", "2", "sharded", False)],
        [("simd", "2", "sharded", False), ("simd", "4", "sharded", True)],
        [("simd", "2", "synced", False), ("own memories", "2", "sharded", True)],
        [("simd", "4", "sharded", True), ("simd", "2", "synced", False)],
        [("simd", "one", "synced", False), ("simd", "8", "sharded", True)],
        [("placement", "2", "local", False), ("simd", "2", "sharded", False)],
        [("own memories", "2", "sharded", True), ("placement", "2", "local", False)],
        pytest.param(
            [("xla", "4", "sharded", True), ("simd", "2", "sharded", False)], marks=pytest.mark.xla
        ),
    ],
    ids=lambda runs: " to ".join(" ".join(map(str, run)) for run in runs),
)
@pytest.mark.mostly_slow
def test_goes_on_with_other_replicas_and_in_other_places(runs, tmp_path):
    """Each run makes two microbatch steps of three, so that sums are in the checkpoints."""
    path, saved = None, {}
    feeds = batches(STEPS)
    for number, (kind, mesh, where, is_sharded) in enumerate(runs):
        made = of_three_steps(kind, mesh, where, is_sharded)
        with sessions.session_of(made) as session:
            if path:
                session.restore(path)
                now = session.variables()
                if "local" not in (where, runs[number - 1][2]):
                    small_model.assert_same_bits(now, saved)
            sessions.train(made, session, feeds[2 * number : 2 * number + 2])
            saved = session.variables()
            path = session.save(str(tmp_path / f"run_{number}"))
            if where == "sharded":  # as a checkpoint without parts has it
                assert saved["w1" + ACCUMULATOR].shape == saved["w1"].shape
    expected = synced(passes=3, names=small_model.FEW)
    sums = {n: x.sum(0) for n, x in saved.items() if x.shape != expected[n].shape}
    assert_close({**saved, **sums}, expected, TOLERANCE)


def test_what_is_skipped_is_told_by_variable_and_shard(capfd):
    run("placement", "2", lambda: stack("2", "sharded", is_sharded=False, **SKIPS), with_a_nan(0))
    assert "microbatch step skipped, gradients that are not finite: w1 (shard 0), " in (
        capfd.readouterr().err
    )


@pytest.mark.mostly_slow
def test_parts_of_sums_are_not_told_as_those_of_shards(caplog):
    """The NaN of one shard is in every replica's part of a sum."""
    opt = lambda: STACKS["loss scale inside"]("sharded", "2")  # noqa: E731
    run("simd", "2", opt, with_a_nan(0)[:K], names=("w1", "w2", "odd"))
    (line,) = [line for line in caplog.messages if "step skipped" in line]
    assert "w1 (shard unknown), w2 (shard unknown), odd (shard unknown)." in line


def test_describe_says_where_sums_are():
    lines = [(x.when, x.what) for x in gs.describe(stack("4", "sharded")).lines]
    assert lines[:4] == [
        ("every step", "reduce, each replica its part, over batch, 4 shards: fused"),
        ("", "add up each replica's part of the sums"),
        ("every 2nd", "divide by 2"),
        ("", "update each replica's part of the variables, gather the new values"),
    ]
    lines = [x.what for x in gs.describe(stack("4", "sharded", is_sharded=False)).lines]
    assert lines[2] == "divide by 2; gather the sums"


def test_one_replica_has_synced_sums_and_says_so(caplog):
    opt = gs.GradientAccumulationOptimizer(
        OPTIMIZERS["sgd"](), K, accumulate="sharded", mesh_shape="one:1", layout=""
    )
    run("placement", "one", lambda: opt, batches(1), names=small_model.FEW)
    assert "because there is one replica: no sum can be sharded" in caplog.text


def test_nothing_to_split_is_an_error_before_anything_is_built():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    shape = mtf.Shape([mtf.Dimension("odd", 7)])
    w = mtf.get_variable(mesh, "w", shape, initializer=tf.ones_initializer()).operation
    before = list(mesh.graph.operations)
    opt = stack("2", "sharded", is_sharded=False)
    why = r"accumulate='sharded' has nothing to split(.|\n)*'w'.*no unsplit.*(.|\n)*'synced'"
    with pytest.raises(ValueError, match=why):
        opt.apply_grads([w.value], [w])
    assert mesh.graph.operations == before


def test_needs_a_mesh_and_one_alone(fresh_graph):
    with pytest.raises(ValueError, match="the shards"):
        gs.GradientAccumulationOptimizer(OPTIMIZERS["sgd"](), K, accumulate="sharded")
    with pytest.raises(ValueError, match=re.escape("'local', 'synced', 'sharded' or None")):
        gs.GradientAccumulationOptimizer(OPTIMIZERS["sgd"](), K, accumulate="parts")
    graph = mtf.Graph()
    variables = [
        mtf.get_variable(mtf.Mesh(graph, name), name, mtf.Shape([mtf.Dimension("d", 4)])).operation
        for name in ("v", "w")
    ]
    with pytest.raises(ValueError, match=r"are on different meshes.*accumulate='synced'"):
        stack("2", "sharded", is_sharded=False).apply_grads([v.value for v in variables], variables)
