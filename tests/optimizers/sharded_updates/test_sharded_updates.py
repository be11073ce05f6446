"""ShardedUpdateOptimizer trains as its inner optimizer does, with a part of the slots a core."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync import simd
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness
from tests.optimizers.sharded_updates import small_model
from tests.optimizers.sharded_updates.small_model import OPTIMIZERS, batches, run, sharded

STEPS = 3
# Means over parts are rounded otherwise, by a few float32 ulp of values around 1 a step.
TOLERANCE = STEPS * 16 * np.finfo(np.float32).eps


def assert_close(actual, expected, tolerance=TOLERANCE):
    assert sorted(actual) == sorted(expected)
    for name in expected:
        assert actual[name].shape == expected[name].shape, name
        np.testing.assert_allclose(
            actual[name], expected[name], rtol=tolerance, atol=tolerance, err_msg=name
        )


def both(kind, mesh, optimizer, **kwargs):
    """Variables after some steps with parts, and without."""
    make, feeds = OPTIMIZERS[optimizer], batches(STEPS)
    parts = run(kind, mesh, lambda: sharded(make(), mesh), feeds, **kwargs)
    whole = run(kind, mesh, lambda: gs.CrossShardOptimizer(make()), feeds, **kwargs)
    return parts.variables, whole.variables


@pytest.mark.parametrize(
    ("mesh", "optimizer"), [("4x2", "adam"), ("2x2x2", "momentum"), ("4", "mesh_adam")]
)
def test_bits_are_those_of_the_inner_optimizer(mesh, optimizer):
    """Where sums are made in one order; nothing in these optimizers mixes elements."""
    parts, whole = both("placement", mesh, optimizer)
    assert sorted(parts) == sorted(whole)
    for name, value in whole.items():
        assert parts[name].tobytes() == value.tobytes(), name


@pytest.mark.parametrize(
    ("kind", "mesh", "optimizer"),
    [
        ("placement", "4x2", "adafactor"),
        ("simd", "4x2", "adafactor"),
        ("simd", "2x2x2", "adam"),
        pytest.param("xla", "4x2", "adafactor", marks=pytest.mark.xla),
        pytest.param("xla", "2x2x2", "sgd", marks=pytest.mark.xla),
    ],
)
def test_trains_as_the_inner_optimizer(kind, mesh, optimizer):
    assert_close(*both(kind, mesh, optimizer))


def test_shuffled_cores_and_no_stacking():
    kwargs = dict(autostack=False, logical_to_physical=harness.SHUFFLED)
    assert_close(*both("simd", "4x2", "adafactor", **kwargs))


def test_bfloat16_activations_and_slices():
    dtype = mtf.VariableDType(tf.float32, tf.bfloat16, tf.bfloat16)
    parts, whole = both("simd", "4x2", "momentum", dtype=dtype)
    # The emulator's sums of bfloat16 may differ in their last bit.
    assert_close(parts, whole, STEPS * 2.0**-8)


WRAPPED = {
    "accumulation": lambda opt, axes: gs.GradientAccumulationOptimizer(
        opt, 2, average_aggregated_gradients=True, axes=axes
    ),
    "sync_replicas": lambda opt, axes: gs.SyncReplicasOptimizer(opt, 4, axes=axes),
    "cross_shard": lambda opt, axes: gs.CrossShardOptimizer(opt, axes=axes),
}


@pytest.mark.parametrize(
    ("kind", "outer"),
    [
        ("simd", "accumulation"),
        ("simd", "sync_replicas"),
        ("simd", "cross_shard"),
        pytest.param("xla", "accumulation", marks=pytest.mark.xla),
    ],
)
def test_inside_other_wrappers(kind, outer):
    axes, wrap = gs.ReplicaAxes(*harness.MESHES["4x2"]), WRAPPED[outer]

    def clipped():
        return gs.ClipByGlobalNormOptimizer(OPTIMIZERS["adam"](), 0.1)

    feeds = batches(4)
    parts = run(kind, "4x2", lambda: wrap(sharded(clipped(), "4x2"), axes), feeds)
    whole = run(kind, "4x2", lambda: wrap(clipped(), axes), feeds)
    assert_close(parts.variables, whole.variables)


def program(mesh, make, **kwargs):
    shape, layout, batch_dims = harness.MESHES[mesh]
    build = small_model.train(make, batch_dims)
    return harness.built("simd", shape, layout, build, batches(1)[0], **kwargs)


def test_sums_are_scattered_and_new_values_gathered_once():
    made = program("4x2", lambda: sharded(OPTIMIZERS["adafactor"](), "4x2"))
    rows = simd.list_collectives(made.program, lowering=made.lowering).rows
    (scatter,) = [row for row in rows if row.operation == "XlaReduceScatter"]
    gathers = [row for row in rows if row.operation == "AllToAll"]
    # w1, w2, b2 and gain; what a core holds of them.
    size = 4 * (8 * 16 // 2 + 16 // 2 * 12 + 12 + 12)
    assert scatter.bytes_per_core == size
    # The new values, and before the update the statistics of w1's and w2's columns.
    assert sorted(row.bytes_per_core for row in gathers) == [2 * 4 * 8, size]


@pytest.mark.parametrize("optimizer", ["adam", "adafactor"])
def test_each_core_holds_its_share_of_the_slots(optimizer):
    held = []
    for wrap in (lambda opt: sharded(opt, "4x2"), gs.CrossShardOptimizer):
        made = program("4x2", lambda wrap=wrap: wrap(OPTIMIZERS[optimizer]()), autostack=False)
        (mesh_impl,) = made.lowering.mesh_to_impl.values()
        slots = [v for v in made.lowering.graph.all_variables if not v.trainable]
        # The others cannot be split.
        of_cut = [v for v in slots if v.name.startswith(("w1", "w2", "b2", "gain"))]
        held.append(sum(mesh_impl.slice_size(v.shape) for v in of_cut))
    parts, whole = held
    assert 4 * parts == whole


def test_checkpoints_continue_on_other_meshes_with_parts_and_without(tmp_path):
    """Exactly what was saved is restored, and training goes on alike."""
    make, feeds = OPTIMIZERS["adafactor"], batches(4)

    def whole(mesh):
        return program(mesh, lambda: gs.CrossShardOptimizer(make()))

    def in_parts(mesh):
        return program(mesh, lambda: sharded(make(), mesh))

    path, saved = None, None
    for number, made in enumerate((in_parts("4x2"), whole("8"), in_parts("2x2"), whole("2x2"))):
        with made.graph.as_default(), made._session() as session:
            if path:
                session.restore(path)
                restored = session.variables()
                assert sorted(restored) == sorted(saved)
                for name, value in saved.items():
                    assert restored[name].tobytes() == value.tobytes(), name
            feed = {made.inputs[name]: value for name, value in feeds[number].items()}
            session.run(made.updates, feed)
            saved = session.variables()
            path = session.save(str(tmp_path / f"step_{number}"))
    expected = run("placement", "one", lambda: gs.CrossShardOptimizer(make()), feeds)
    assert_close(saved, expected.variables, 4 / 3 * TOLERANCE)


def test_slots_are_found_by_the_whole_variable():
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        shape = mtf.Shape([mtf.Dimension("d", 8)])
        w = mtf.get_variable(mesh, "w", shape, initializer=tf.ones_initializer()).operation
        opt = sharded(OPTIMIZERS["adam"](), "4x2")
        opt.apply_grads([mtf.ones(mesh, shape)], [w])
    assert opt.get_slot(w, "adam_m").name == "w/adam_m"
    assert opt.part_of(w).to_string == "Shape[batch=8]"
    assert [v.name for v in opt.variables()] == ["w/adam_m", "w/adam_v"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda opt: gs.ShardedUpdateOptimizer(opt, mesh_shape="all:1", layout=""), "one replica"),
        (lambda opt: gs.ShardedUpdateOptimizer(opt), "there is no mesh yet"),
        (lambda opt: sharded(opt, "4x2", min_size=-1), "min_size must be"),
        (lambda opt: sharded(gs.CrossShardOptimizer(opt), "4x2"), "turn them round"),
        (
            lambda opt: gs.ClipByGlobalNormOptimizer(sharded(opt, "4x2"), 1.0),
            "turn them round",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make(OPTIMIZERS["sgd"]())


def test_nothing_to_split_is_an_error_before_anything_is_built():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    shape = mtf.Shape([mtf.Dimension("odd", 7)])
    w = mtf.get_variable(mesh, "w", shape, initializer=tf.ones_initializer()).operation
    grad = mtf.ones(mesh, shape)
    before = list(mesh.graph.operations)
    alone = sharded(OPTIMIZERS["adam"](), "4x2")
    for opt in (alone, gs.GradientAccumulationOptimizer(alone, 2, accumulate="synced")):
        with pytest.raises(ValueError, match=r"nothing to split(.|\n)*'w'.*no dimension left"):
            opt.apply_grads([grad], [w])
        assert mesh.graph.operations == before


def test_norms_that_are_reported_are_those_of_whole_updates():
    def reported(wrap):
        made = []

        def build(mesh, inputs):
            operations, fetches = small_model.train(lambda: made.append(wrap()) or made[-1])(
                mesh, inputs
            )
            return operations, {**fetches, **gs.reported(made[-1])}

        shape, layout, _ = harness.MESHES["4x2"]
        return harness.run("simd", shape, layout, build, batches(1)).fetched[0]

    def clipped():
        return gs.ClipByGlobalNormOptimizer(OPTIMIZERS["adam"](), 0.1)

    parts, whole = reported(lambda: sharded(clipped(), "4x2")), reported(clipped)
    assert len([name for name in whole if name.startswith("gradient_norm")]) == 3
    assert_close(parts, whole)
