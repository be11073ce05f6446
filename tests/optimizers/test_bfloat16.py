"""Variables and slots in bfloat16: each optimizer's own arithmetic, rounded where it says so.

A variable's slices, which updates change, may be in bfloat16, and so may its master in checkpoints
and its value in the model. Expected values are numpy's, in float32 and rounded to bfloat16 at the
same places.
"""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models
from tests.wrappers import KINDS, passes, wrap

SHAPE, LAYOUT = "all:2", "batch:all"
AXES = {"mesh_shape": SHAPE, "layout": LAYOUT}
STEPS = 4


def bfloat16(x):
    """Rounds to the nearest number that bfloat16 has."""
    return np.asarray(x, np.float32).astype(tf.bfloat16.as_numpy_dtype).astype(np.float32)


def float32(x):
    return np.asarray(x, np.float32)


START = bfloat16(np.random.RandomState(0).randn(8) * 0.5)
GRADS = [bfloat16(np.random.RandomState(i + 1).randn(8)) for i in range(STEPS)]
# Master, slices, value in the model; and what slices and master are rounded to.
DTYPES = {
    "all": (mtf.VariableDType(tf.bfloat16, tf.bfloat16, tf.bfloat16), bfloat16, bfloat16),
    "slices": (mtf.VariableDType(tf.float32, tf.bfloat16, tf.bfloat16), bfloat16, float32),
    "master": (mtf.VariableDType(tf.bfloat16, tf.float32, tf.bfloat16), float32, bfloat16),
}


def sgd(rounded, wide, saved):
    """Multiplies in the dtype of the gradient, which a loss scale makes float32."""
    by = float32(0.1) if wide else bfloat16(0.1)
    product = float32 if wide else bfloat16
    return lambda w, g: rounded(w - rounded(product(g * by)))


def momentum(rounded, wide, saved):
    """Mesh-TF's: gradients, velocity and products in the dtype of the value in the model."""
    velocity = [np.zeros(8, np.float32)]
    rate, decay = bfloat16(0.1), bfloat16(0.9)

    def update(w, g):
        (v,) = velocity
        new = bfloat16(bfloat16(g * rate) + bfloat16(bfloat16(v) * decay))
        velocity[0] = rounded(new)
        return rounded(w - rounded(bfloat16(v)))

    return update


def adafactor(rounded, wide, saved):
    squares = [np.zeros(8, np.float32)]

    def update(w, g):
        squares[0] = squares[0] * float32(0.8) + (g**2 + float32(1e-30)) * float32(0.2)
        x = g / np.sqrt(squares[0])
        x = x / max(float32(1), np.sqrt(np.mean(x**2)))
        scale = max(np.sqrt(np.mean(bfloat16(w) ** 2)), float32(1e-3)) * float32(0.05)
        return rounded(w - rounded(x * scale))

    return update


def adamw(rounded, wide, saved):
    slots, count = [np.zeros(8, np.float32)] * 2, [0]

    def update(w, g):
        m, v = slots
        count[0] += 1
        slots[:] = [m * float32(0.9) + g * float32(0.1), v * float32(0.999) + g**2 * float32(1e-3)]
        mean, square = slots[0] / (1 - 0.9 ** count[0]), slots[1] / (1 - 0.999 ** count[0])
        move = mean / (np.sqrt(square) + 1e-8) + bfloat16(w) * 0.1
        return rounded(w - rounded(float32(0.01 * move)))

    return update


def of_tensorflow(rounded, wide, saved):
    """TensorFlow's momentum in float32; its slot has the dtype of the variable's master."""
    velocity = [np.zeros(8, np.float32)]

    def update(w, g):
        new = velocity[0] * float32(0.9) + g
        velocity[0] = saved(new)
        return rounded(w - rounded(new * float32(0.1)))

    return update


OPTIMIZERS = {
    "sgd": (lambda: mtf.optimize.SgdOptimizer(0.1), sgd),
    "momentum": (lambda: mtf.optimize.MomentumOptimizer(0.1, 0.9), momentum),
    "adafactor": (
        lambda: mtf.optimize.AdafactorOptimizer(learning_rate=0.05, decay_rate=0.8),
        adafactor,
    ),
    "adamw": (lambda: gs.AdamWOptimizer(0.01, 0.1), adamw),
    "of_tensorflow": (
        lambda: gs.MeshOptimizer(tf.train.MomentumOptimizer(0.1, 0.9)),
        of_tensorflow,
    ),
}


def run(kind, dtypes, make, feeds=GRADS):
    """Trains a variable of each of some dtypes, which is called as these are."""

    def build(mesh, inputs):
        dim = mtf.Dimension("dim", 8)
        variables = [
            models.variable(mesh, name, [dim], START, dtype=DTYPES[name][0]) for name in dtypes
        ]
        grad = mtf.import_tf_tensor(mesh, inputs["grad"], mtf.Shape([dim]))
        loss = mtf.reduce_sum(mtf.cast(grad, tf.bfloat16) * mtf.add_n(variables))
        grads = mtf.gradients([loss], variables)
        return make().apply_grads(grads, [w.operation for w in variables]), {}

    feeds = [{"grad": g} for g in feeds]
    return harness.built(kind, SHAPE, LAYOUT, build, feeds[0]).run(feeds).variables


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.mostly_slow(every=5)
def test_updates_are_rounded_as_the_optimizer_rounds(mesh_kind, name):
    opt, reference = OPTIMIZERS[name]
    for wrapper in ("cross_shard", "loss_scale"):
        found = run(mesh_kind, DTYPES, lambda name=wrapper: wrap(name, opt()))
        for dtype, (_, rounded, saved) in DTYPES.items():
            update, w = reference(rounded, wrapper == "loss_scale", saved), START
            for g in GRADS:
                w = update(w, g)
            np.testing.assert_allclose(
                found[dtype].astype("f"),
                saved(w),
                rtol=2e-7,
                atol=1e-7,
                err_msg=f"{wrapper} {dtype}",
            )


# With these arguments each step is an update, and no outer step is made.
ALIKE = {"backward_passes_per_step": lambda step: 1, "inner_steps": 64, "min_size": 2}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.slow
def test_wrappers_round_no_more_than_the_optimizer_inside(name):
    opt, _ = OPTIMIZERS[name]
    bare = run("simd", DTYPES, opt)
    # Of replicas and clipping it is the optimizer's sum that is rounded, and a mean or a product.
    # Of the others each optimizer has every second, and its neighbours the rest.
    others = sorted({*KINDS} - {"clip", "replicas", "islands"})
    for wrapper in others[list(OPTIMIZERS).index(name) % 2 :: 2]:
        found = run("simd", DTYPES, lambda name=wrapper: wrap(name, opt(), AXES, **ALIKE))
        if name == "sgd" and (wrapper == "loss_scale" or passes(wrapper) > 1):
            continue  # their gradients are float32: the test above
        for key, value in bare.items():
            held = found[f"{key}/island" if f"{key}/island" in found else key]
            np.testing.assert_array_equal(held, value, err_msg=f"{wrapper} {key}")


def test_outer_values_are_rounded_once_an_outer_step(mesh_kind):
    """Differences, momentum and step are float32; each value is rounded where it is kept."""

    def make():
        return gs.OuterOptimizer(mtf.optimize.SgdOptimizer(0.1), 2, 0.7, 0.5, outer_dims=())

    found = run(mesh_kind, ["all"], make)
    update, w, outer = sgd(bfloat16, False, None), START, START
    velocity = np.zeros(8, np.float32)
    for number, g in enumerate(GRADS, 1):
        w = update(w, g)
        if number % 2 == 0:
            difference = outer - w
            velocity = velocity * float32(0.5) + difference
            w = outer = bfloat16(outer - (difference + velocity * float32(0.5)) * float32(0.7))
    np.testing.assert_array_equal(found["all"].astype("f"), outer)
    np.testing.assert_allclose(found["all/outer_momentum"], velocity, rtol=1e-6, atol=1e-7)


def test_averages_and_accumulators_are_float32(mesh_kind):
    def make():
        opt = gs.AverageOptimizer(mtf.optimize.SgdOptimizer(0.1), 0.5)
        return gs.GradientAccumulationOptimizer(opt, 2, True, accumulate="synced")

    found = run(mesh_kind, ["all"], make, GRADS[:3])
    # The mean of two is given to the optimizer in float32, as the sum is.
    w = bfloat16(START - bfloat16((GRADS[0] + GRADS[1]) / 2 * float32(0.1)))
    np.testing.assert_array_equal(found["all"].astype("f"), w)
    np.testing.assert_array_equal(found["all/gradient_accumulator"], GRADS[2])
    average = found["all/ExponentialMovingAverage"]
    assert average.dtype == np.float32
    np.testing.assert_allclose(average, (START + w) / 2, rtol=1e-6)


def test_narrow_slots_of_tensorflows_optimizers_are_told(caplog):
    """In bfloat16 a mean of squares with a decay of 0.999 cannot shrink: 0.999 x is x."""
    run("simd", ["master"], lambda: gs.MeshOptimizer(tf.train.AdamOptimizer(0.01)), GRADS[:1])
    (line,) = [x.getMessage() for x in caplog.records if "slots" in x.getMessage()]
    assert line.startswith("MeshOptimizer(AdamOptimizer): the slots of master are bfloat16, the ")
    caplog.clear()
    run("simd", ["slices"], lambda: gs.MeshOptimizer(tf.train.AdamOptimizer(0.01)), GRADS[:1])
    assert not [x for x in caplog.records if "slots" in x.getMessage()]


WIDE = mtf.VariableDType(tf.float32, tf.float32, tf.bfloat16)


@pytest.mark.parametrize("dtype", [*(dtype for dtype, _, _ in DTYPES.values()), WIDE])
@pytest.mark.parametrize("wrap", [lambda opt: opt, gs.CrossShardOptimizer], ids=["bare", "wrapped"])
def test_variables_in_few_bits_are_told_at_the_first_update(wrap, dtype, caplog):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    shape = mtf.Shape([mtf.Dimension("d", 8)])
    w = mtf.get_variable(mesh, "w", shape, dtype).operation
    mtf.get_variable(mesh, "v", shape, WIDE)
    for _ in range(2):
        grads = [mtf.ones(mesh, shape, v.activation_dtype) for v in mesh.graph.trainable_variables]
        opt = wrap(mtf.optimize.SgdOptimizer(0.1))
        opt.apply_grads(grads, mesh.graph.trainable_variables)
    told = [line for line in caplog.messages if line.startswith("Stored in bfloat16")]
    assert len(told) == (w.slice_dtype == tf.bfloat16)
    assert all("1/512 of a value are lost: variable w." in line for line in told)


def test_what_the_line_says_of_bfloat16_is_so():
    """An update of 1/1024 is lost for ever, and one of 1/64 is not."""
    values = {}
    for rate in (2.0**-10, 2.0**-6):

        def build(mesh, inputs, rate=rate):
            w = models.variable(mesh, "w", [], 1, dtype=DTYPES["all"][0])
            opt = gs.CrossShardOptimizer(mtf.optimize.SgdOptimizer(rate))
            grad = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([]))
            return opt.apply_grads([mtf.cast(grad, tf.bfloat16)], [w.operation]), {}

        found = harness.run("simd", SHAPE, LAYOUT, build, [{"x": np.float32(1)}] * 16)
        values[rate] = float(np.float32(found.variables["w"]))
    assert values == {2.0**-10: 1.0, 2.0**-6: 1.0 - 16 * 2.0**-6}


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_decay_by_mesh_tensorflows_adam_is_refused_before_anything_is_built(dtype):
    """It adds what is in the dtype of activations to an update in float32."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    decay = {"learning_rate": 0.1, "weight_decay_rate": 0.01}
    adam = mtf.optimize.AdamWeightDecayOptimizer
    with tf.Graph().as_default():
        w = mtf.get_variable(mesh, "w", mtf.Shape([mtf.Dimension("d", 8)]), DTYPES[dtype][0])
        grads = mtf.gradients([mtf.reduce_sum(mtf.square(w))], [w])
        words = r"bfloat16: variable w\. Use gs\.AdamWOptimizer"
        with harness.unchanged(mesh.graph), pytest.raises(ValueError, match=words):
            gs.LossScaleOptimizer(adam(**decay)).apply_grads(grads, [w.operation])
        for inner in (gs.AdamWOptimizer(**decay), adam(exclude_from_weight_decay=["w"], **decay)):
            with tf.variable_scope(type(inner).__name__):
                gs.CrossShardOptimizer(inner).apply_grads(grads, [w.operation])
