"""What gradients are sent in is not what they are added up in."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness

MESH, LAYOUT, _ = harness.MESHES["4"]
AXES = gs.ReplicaAxes(MESH, LAYOUT)
BATCH, D = mtf.Dimension("batch", 4), mtf.Dimension("d", 64)
RATE = 0.5
# bfloat16's unit roundoff.
U = 2.0**-8
OPTIMIZERS = {
    "local": lambda **how: gs.GradientAccumulationOptimizer(sgd(), 2, axes=AXES, **how),
    "synced": lambda **how: gs.GradientAccumulationOptimizer(
        sgd(), 2, axes=AXES, accumulate="synced", **how
    ),
    "replicas": lambda **how: gs.SyncReplicasOptimizer(sgd(), 8, axes=AXES, **how),
}


def sgd():
    return mtf.optimize.SgdOptimizer(RATE)


def build_with(make, dtype=tf.float32):
    def build(mesh, inputs):
        x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([BATCH, D]))
        w = mtf.get_variable(mesh, "w", mtf.Shape([D]), initializer=tf.ones_initializer())
        loss = mtf.reduce_sum(x * w)
        grads = [mtf.cast(g, dtype) for g in mtf.gradients([loss], [w])]
        return make().apply_grads(grads, [w.operation]), {}

    return build


def sent(make, dtype):
    """The dtypes that gradients are sent in, and the bytes of it."""
    feed = {"x": np.ones([BATCH.size, D.size], "f")}
    rows = harness.built("simd", MESH, LAYOUT, build_with(make, dtype), feed).collectives().rows
    return [(row.dtype, row.bytes_per_core) for row in rows if row.shape == (D.size,)]


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
@pytest.mark.parametrize("what", list(OPTIMIZERS))
def test_as_many_bytes_are_sent_as_the_setting_says(what, dtype):
    narrow = sent(lambda: OPTIMIZERS[what](reduce_dtype="bfloat16"), dtype)
    assert narrow == [("bfloat16", 2 * D.size)]
    bare = sent(sgd, dtype)
    assert bare == [("float32", 4 * D.size)], "Mesh-TF casts after the sum"


@pytest.mark.parametrize("what", ["local", "replicas"])
@pytest.mark.mostly_slow
def test_accumulators_add_up_in_float32(what, mesh_kind):
    rng = np.random.RandomState(0)
    feeds = [{"x": rng.randn(BATCH.size, D.size).astype("f")} for _ in range(2)]
    make = lambda: OPTIMIZERS[what](reduce_dtype="bfloat16")  # noqa: E731
    result = harness.run(mesh_kind, MESH, LAYOUT, build_with(make), feeds)
    x = np.stack([feed["x"] for feed in feeds]).astype(float)
    # Replicas' contributions are averaged, in two steps of four.
    scale = 1.0 if what == "local" else 0.5
    updated = 1 - RATE * scale * x.sum((0, 1))
    # A rounding of each of four processors' sums, and one for each of as many sums.
    atol = RATE * scale * ((1 + U) ** 5 - 1) * np.abs(x.sum(0)).sum(0) + 1e-6
    off = np.abs(result.variables["w"] - updated)
    assert np.all(off <= atol)
    assert np.max(off) > 2.0**-20, "sent in bfloat16"


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="wire_dtype"):
        OPTIMIZERS["local"](reduce_dtype="int8")
