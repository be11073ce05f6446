"""ShardedUpdateOptimizer trains as its inner optimizer does, with a part of the slots a core."""

import collections

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync import simd
from mtf_gradsync._private.libraries import mtf, tf
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
# Means over parts are rounded otherwise, by a few float32 ulp of values around 1 a step.
TOLERANCE = STEPS * 16 * EPS
MAKE = {**OPTIMIZERS, "adam_by_name": lambda: AdamByName(0.01)}


def both(kind, mesh, optimizer, **kwargs):
    """Variables after some steps with parts, and without."""
    make, feeds = MAKE[optimizer], batches(STEPS)
    parts = run(kind, mesh, lambda: sharded(make(), mesh), feeds, **kwargs)
    whole = run(kind, mesh, lambda: gs.CrossShardOptimizer(make()), feeds, **kwargs)
    return parts.variables, whole.variables


@pytest.mark.parametrize(
    ("kind", "mesh", "optimizer"),
    [
        ("own memories", "2x2", "adam"),
        ("own memories", "4", "mesh_adam"),
        ("simd", "2x2", "adam"),
        ("simd", "2x2", "sgd"),
    ],
)
def test_bits_are_those_of_the_inner_optimizer(kind, mesh, optimizer):
    """Where sums are made in one order; nothing in these optimizers mixes elements.

    Two numbers have one sum in any order. The emulator's sum of four takes the order of memory.
    """
    assert_same_bits(*both(kind, mesh, optimizer))


@pytest.mark.xla
def test_another_program_of_xla_rounds_otherwise():
    """By ulp: it fuses multiplications and additions as it likes.

    Values are below 2. A step rounds a variable once, and its gradient, of sums of at most 8
    products, a few times, which an update of at most 0.02 makes small.
    """
    assert_close(*both("xla", "2x2", "adam"), STEPS * 2 * EPS)


@pytest.mark.parametrize(
    ("kind", "mesh", "optimizer", "kwargs"),
    [
        ("placement", "2x2", "adafactor", {}),
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
        pytest.param("xla", "2x2x2", "sgd", {}, marks=pytest.mark.xla),
    ],
)
def test_trains_as_one_processor_does(kind, mesh, optimizer, kwargs):
    make, feeds = MAKE[optimizer], batches(STEPS)
    parts = run(kind, mesh, lambda: sharded(make(), mesh), feeds, **kwargs).variables
    assert_close(parts, small_model.on_one(optimizer).run(feeds).variables, TOLERANCE)


WHOLE, ACTIVATIONS, NARROW = tf.float32, (tf.float32, tf.float32, tf.bfloat16), (tf.bfloat16,) * 3


@pytest.mark.parametrize(
    ("kind", "optimizer", "dtypes", "autostack"),
    [
        ("own memories", "sgd", WHOLE, True),
        ("simd", "adam_by_name", ACTIVATIONS, False),
        ("simd", "adam_by_name", NARROW, True),
    ],
)
def test_experts_that_are_split_over_the_replicas(kind, optimizer, dtypes, autostack):
    """Each replica has its own experts, which it updates whole; everything else is in parts."""
    dtype = dtypes if dtypes is WHOLE else mtf.VariableDType(*dtypes)
    parts, whole = both(kind, "experts", optimizer, dtype=dtype, autostack=autostack)
    start = small_model.initial_values({**small_model.SHAPES, **small_model.EXPERTS})
    assert np.abs(whole["experts"] - start["experts"]).max() > 1e-4
    assert_same_bits(parts, whole)


def program(mesh, make, **kwargs):
    return small_model.built("simd", mesh, make, batches(1)[0], **kwargs)


def test_sums_are_scattered_and_new_values_gathered_once():
    made = program("4x2", lambda: sharded(OPTIMIZERS["adafactor"](), "4x2"))
    rows = simd.list_collectives(made.program, lowering=made.lowering).rows
    (scatter,) = [row for row in rows if row.operation == "XlaReduceScatter"]
    gathers = [row for row in rows if row.operation == "AllToAll"]
    # w1, w2, b2 and gain; what a core holds of them.
    size = 4 * (8 * 32 + 32 * 64 + 64 + 64)
    assert scatter.bytes_per_core == size
    # The new values, and before the update the statistics of w1's and w2's columns.
    assert sorted(row.bytes_per_core for row in gathers) == [2 * 4 * 32, size]
    # Those of statistics over the model's axis alone are one as well; the other one is of the
    # forward pass.
    over_model = collections.Counter()
    for row in rows:
        if row.group == "cols":
            over_model[row.together or row.name] += row.bytes_per_core
    assert sorted(over_model.values()) == [4 * 20, 4 * 128]


def test_each_core_holds_its_share_of_the_slots():
    """Of Adafactor's: those of a variable's shape, and those that lack the split dimension."""
    held = []
    for wrap in (lambda opt: sharded(opt, "4x2"), gs.CrossShardOptimizer):
        made = program("4x2", lambda wrap=wrap: wrap(OPTIMIZERS["adafactor"]()), autostack=False)
        (mesh_impl,) = made.lowering.mesh_to_impl.values()
        slots = [v for v in made.lowering.graph.all_variables if not v.trainable]
        # The others cannot be split.
        of_cut = [v for v in slots if v.name.startswith(("w1", "w2", "b2", "gain"))]
        held.append(sum(mesh_impl.slice_size(v.shape) for v in of_cut))
    parts, whole = held
    assert 4 * parts == whole


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
