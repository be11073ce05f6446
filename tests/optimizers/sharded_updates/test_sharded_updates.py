"""ShardedUpdateOptimizer trains like its inner optimizer; each core holds a part of the slots."""

import collections

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync import simd
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.optimizers.pipeline.stack import Stage
from mtf_gradsync.optimizers.sharded_updates import log_savings
from tests import harness
from tests.optimizers.sharded_updates import small_model
from tests.optimizers.sharded_updates.adam_by_name import AdamByName
from tests.optimizers.sharded_updates.small_model import (
    OPTIMIZERS,
    assert_close,
    assert_same_bits,
    batches,
    run,
    sharded,
)

STEPS = 2
EPS = np.finfo(np.float32).eps
# Means over parts round differently: by a few float32 ulp of values around 1 in each step.
TOLERANCE = STEPS * 16 * EPS
MAKE = {**OPTIMIZERS, "adam_by_name": lambda: AdamByName(0.01)}


def both(kind, mesh, optimizer, **kwargs):
    """Returns variables after some steps with sharded updates, and after as many without."""
    make, feeds = MAKE[optimizer], batches(STEPS)
    parts = run(kind, mesh, lambda: sharded(make(), mesh), feeds, **kwargs)
    unsharded = run(kind, mesh, lambda: gs.CrossShardOptimizer(make()), feeds, **kwargs)
    return parts.variables, unsharded.variables


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mesh", "optimizer"),
    [
        ("own memories", "2x2", "adam"),
        ("own memories", "4", "mesh_adam"),
        ("simd", "2x2", "adam"),
    ],
)
def test_bits_are_those_of_the_inner_optimizer(kind, mesh, optimizer):
    """They do where sums add in the same order, because these optimizers work element by element.

    Two numbers have one sum in any order. The emulator adds four in the order of memory.
    """
    assert_same_bits(*both(kind, mesh, optimizer))


@pytest.mark.slow
@pytest.mark.xla
def test_another_program_of_xla_rounds_differently():
    """Values differ by ulp, because XLA fuses multiplications and additions as it likes.

    Values are below 2. A step rounds a variable once, and its gradient, of sums of at most 8
    products, a few times, which an update of at most 0.02 makes small.
    """
    assert_close(*both("xla", "2x2", "adam"), STEPS * 2 * EPS)


@pytest.mark.parametrize(
    ("kind", "mesh", "optimizer", "kwargs"),
    [
        ("placement", "2x2", "sgd", {}),
        ("own memories", "2x2", "adafactor", {}),
        # Sums over two axes go along one after the other.
        ("simd", "2x2x2", "adam", {}),
        (
            "simd",
            "4x2",
            "adafactor",
            dict(autostack=False, logical_to_physical=harness.SHUFFLED),
        ),
        pytest.param("xla", "2x2", "adafactor", {}, marks=pytest.mark.xla),
    ],
)
@pytest.mark.mostly_slow(keep="placement-2x2-sgd")
def test_trains_as_one_processor_does(kind, mesh, optimizer, kwargs, small_slots_in_parts):
    make, feeds = MAKE[optimizer], batches(STEPS)
    parts = run(kind, mesh, lambda: sharded(make(), mesh), feeds, **kwargs).variables
    assert_close(parts, small_model.on_one(optimizer).run(feeds).variables, TOLERANCE)


FLOAT32, ACTIVATIONS, NARROW = tf.float32, (tf.float32, tf.float32, tf.bfloat16), (tf.bfloat16,) * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "optimizer", "dtypes", "autostack"),
    [
        ("own memories", "sgd", FLOAT32, True),
        ("simd", "adam_by_name", ACTIVATIONS, False),
        ("simd", "adam_by_name", NARROW, True),
    ],
)
def test_experts_that_are_split_over_the_replicas(kind, optimizer, dtypes, autostack):
    """Each replica updates its own experts; all other updates are sharded."""
    dtype = dtypes if dtypes is FLOAT32 else mtf.VariableDType(*dtypes)
    parts, unsharded = both(kind, "experts", optimizer, dtype=dtype, autostack=autostack)
    start = small_model.initial_values({**small_model.SHAPES, **small_model.EXPERTS})
    assert np.abs(unsharded["experts"] - start["experts"]).max() > 1e-4
    assert_same_bits(parts, unsharded)


def program(mesh, make, **kwargs):
    return small_model.built("simd", mesh, make, batches(1)[0], **kwargs)


def groups_of(made, operation):
    """Bytes a core by shape sent, of the groups that collectives of a type are made in."""
    rows = made.collectives().rows
    groups = collections.defaultdict(list)
    for row in rows:
        if row.operation == operation:
            groups[row.together].append(row.bytes_per_core)
    assert "" not in groups
    return sorted(sorted(sizes) for sizes in groups.values())


# What a core holds of w1, w2, and b2 and gain together, which have one shape and fill no tile.
SIZES = sorted([4 * 8 * 32, 4 * 32 * 64, 4 * 2 * 64])


def test_sums_are_scattered_and_new_values_gathered_in_a_group():
    made = program("4x2", lambda: sharded(OPTIMIZERS["adafactor"](), "4x2"))
    assert groups_of(made, "XlaReduceScatter") == [SIZES]
    # The factored statistics are small, and are not gathered.
    assert groups_of(made, "AllToAll") == [SIZES]
    # The statistics that are summed over the model's axis alone are one group; the other sum over
    # this axis is that of the forward pass.
    rows = made.collectives().rows
    over_model = collections.Counter()
    for row in rows:
        if row.group == "cols" and row.operation == "CrossReplicaSum":
            over_model[row.together or row.name] += row.bytes_per_core
    assert sorted(over_model.values()) == [4 * 20, 4 * 128]


@pytest.mark.slow
def test_partitioned_statistics_are_gathered_in_a_group(small_slots_in_parts):
    made = program("4x2", lambda: sharded(OPTIMIZERS["adafactor"](), "4x2"))
    # The first are the statistics of w1's and w2's columns.
    assert groups_of(made, "AllToAll") == [[2 * 4 * 32], SIZES]


def slots_of_a_core(wrap):
    """Returns how many numbers of each slot of w1, w2, b2 and gain a core holds, by name."""
    shape, layout, batch_dims = small_model.MESHES["4x2"]
    train = small_model.train(lambda: wrap(OPTIMIZERS["adafactor"]()), batch_dims)
    with tf.Graph().as_default(), simd.tpu_program(shape, layout) as made:
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        train(mesh, {name: tf.constant(value) for name, value in batches(1)[0].items()})
    return {
        v.name: made.mesh_impl.slice_size(v.shape)
        for v in mesh.graph.all_variables
        # The others cannot be split.
        if not v.trainable and v.name.startswith(("w1", "w2", "b2", "gain"))
    }


def test_each_core_holds_its_share_of_the_slots(small_slots_in_parts):
    """It does so of slots with a variable's shape, and of those that lack the split dimension."""
    parts = slots_of_a_core(lambda opt: sharded(opt, "4x2"))
    assert {n: 4 * size for n, size in parts.items()} == slots_of_a_core(gs.CrossShardOptimizer)


def test_small_statistics_without_the_split_dimension_are_not_split():
    unsharded = slots_of_a_core(gs.CrossShardOptimizer)
    parts = slots_of_a_core(lambda opt: sharded(opt, "4x2"))
    unsplit = {name for name, size in parts.items() if size == unsharded[name]}
    assert unsplit == {"w1_slot_vc", "w2_slot_vc"}
    assert all(4 * size == unsharded[name] for name, size in parts.items() if name not in unsplit)


def test_changes_are_sent_where_a_variable_has_several():
    """Two updates in one graph add up: neither may write a new value over the other's."""

    def make():
        opt = sharded(mtf.optimize.SgdOptimizer(0.1), "2x2")
        apply = opt.apply_grads

        class Twice:
            def apply_grads(self, grads, variables):
                return [op for _ in range(2) for op in apply(grads, variables)]

        return Twice()

    feeds, few = batches(1), {"names": small_model.FEW}
    twice = run("simd", "2x2", make, feeds, **few).variables
    make_one = lambda: sharded(mtf.optimize.SgdOptimizer(0.2), "2x2")  # noqa: E731
    once = run("simd", "2x2", make_one, feeds, **few)
    assert_close(twice, once.variables, 4 * EPS)


def test_slots_are_found_by_the_full_variable():
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        shape = mtf.Shape([mtf.Dimension("d", 8)])
        w = mtf.get_variable(mesh, "w", shape, initializer=tf.ones_initializer()).operation
        opt = sharded(OPTIMIZERS["adam"](), "4x2")
        opt.apply_grads([mtf.ones(mesh, shape)], [w])
    assert opt.get_slot(w, "adam_m").name == "w/adam_m"
    assert opt.part_of(w).to_string == "Shape[batch=8]"
    assert [v.name for v in opt.variables()] == ["w/adam_m", "w/adam_v"]


def test_a_step_that_fails_is_not_remembered(small_slots_in_parts):
    class Fails(Stage):
        def apply(self, gradients, step):
            def fail(operations):
                raise RuntimeError("fails")

            step.at_end(fail)
            return gradients

    class Around(gs.AverageOptimizer):
        def stages(self, place):
            return [Fails()]

    opt = sharded(OPTIMIZERS["adafactor"](), "4x2")
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    w = mtf.get_variable(mesh, "w", mtf.Shape([mtf.Dimension("a", 8), mtf.Dimension("hidden", 64)]))
    grads, variables = [mtf.ones(mesh, w.shape)], [w.operation]
    with pytest.raises(RuntimeError, match="fails"):
        Around(opt).apply_grads(grads, variables)
    assert opt.variables() == []
    with tf.variable_scope("", reuse=True):
        opt.apply_grads(grads, variables)
    with pytest.raises(ValueError, match=r"once in a graph, .* variable w again"):
        opt.apply_grads(grads, variables)


@pytest.mark.parametrize(("name", "hardly"), [("adam", False), ("sgd", True)])
def test_the_log_says_what_is_saved(caplog, name, hardly):
    with tf.Graph().as_default(), caplog.at_level("INFO", logger="mtf_gradsync"):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        shape = mtf.Shape([mtf.Dimension("d", 8)])
        w = mtf.get_variable(mesh, "w", shape).operation
        opt = mtf.optimize.SgdOptimizer(0.1) if name == "sgd" else OPTIMIZERS[name]()
        sharded(opt, "4x2").apply_grads([mtf.ones(mesh, shape)], [w])
    # Two slots of 8 float32 numbers on 4 replicas.
    held, unsharded = (0, 0) if name == "sgd" else (16, 64)
    assert (
        f"splits the updates of 1 of 1 variables: a core holds {held} bytes of slots, "
        f"and {unsharded} without the wrapper."
    ) in caplog.text
    assert ("hardly memory" in caplog.text) is hardly
    assert "two replicas" not in caplog.text


def test_the_log_says_that_two_replicas_save_memory_only(caplog):
    with tf.Graph().as_default(), caplog.at_level("INFO", logger="mtf_gradsync"):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        shape = mtf.Shape([mtf.Dimension("d", 8)])
        w = mtf.get_variable(mesh, "w", shape).operation
        sharded(OPTIMIZERS["adam"](), "experts").apply_grads([mtf.ones(mesh, shape)], [w])
        assert "may not pay. It splits updates over two replicas" in caplog.text
        caplog.clear()
        log_savings("name", gs.ReplicaAxes(*small_model.MESHES["experts"]), [w], [], [w])
    assert "splits the updates of 0 of 1 variables" in caplog.text
    assert "two replicas" not in caplog.text
