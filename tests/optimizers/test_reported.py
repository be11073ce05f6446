"""What a stack of wrappers reports, against numpy in float64."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.optimizers import split_by_shard
from tests import harness, models, reference

STEPS, K, CLIP = 4, 2, 0.2
# Float32 in sums over a few hundred products, and gradients of variables that have moved.
TOLERANCE = STEPS * 16 * np.finfo(np.float32).eps
KINDS = ["placement", "simd", "xla"]


def step_with(make, axes=None):
    """The model's training step, with all that its optimizer reports fetched."""

    def build(mesh, inputs):
        operations, fetches = models.train(lambda: made.append(make()) or made[-1])(mesh, inputs)
        return operations, {**fetches, **gs.reported(made[-1], axes)}

    made = []
    return build


def run(kind, mesh, make, feeds, **kwargs):
    shape, layout, _ = harness.MESHES[mesh]
    return harness.run(kind, shape, layout, step_with(make, **kwargs), feeds)


def axes_of(mesh):
    return gs.ReplicaAxes(*harness.MESHES[mesh])


def shard_norms(values, feed, num_shards):
    """Of each shard's term of the gradient of the mean over the batch."""
    parts = zip(*(np.split(feed[k], num_shards) for k in ("x", "y")))
    return [reference.norm(reference.mlp_grads(values, *part)) / num_shards for part in parts]


def start():
    return {k: v.astype(float) for k, v in models.mlp_values().items()}


def sgd():
    return mtf.optimize.SgdOptimizer(0.1)


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_norms_of_an_update_and_of_its_shards(kind):
    feeds = models.mlp_batches(STEPS)
    make = lambda: gs.CrossShardOptimizer(gs.ClipByGlobalNormOptimizer(sgd(), CLIP))  # noqa: E731
    steps = run(kind, "2", make, feeds, axes=axes_of("2")).fetched
    values = start()
    for feed, found in zip(feeds, steps):
        grads = reference.mlp_grads(values, feed["x"], feed["y"])
        close(found["gradient_norm/before_clipping"], reference.norm(grads))
        close(found["gradient_norm/applied"], min(CLIP, reference.norm(grads)))
        close(found["gradient_norm/of_shards"], shard_norms(values, feed, 2))
        values = reference.Sgd()(values, reference.clipped(grads, CLIP))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.mostly_slow
def test_steps_without_an_update_keep_the_norms_of_the_newest(kind):
    feeds = models.mlp_batches(STEPS)

    def make():
        clipped = gs.ClipByGlobalNormOptimizer(sgd(), CLIP)
        return gs.GradientAccumulationOptimizer(
            clipped, K, average_aggregated_gradients=True, axes=axes_of("2")
        )

    steps = run(kind, "2", make, feeds).fetched
    values, newest = start(), np.nan
    for number, (feed, found) in enumerate(zip(feeds, steps)):
        close(found["gradient_norm/of_shards"], shard_norms(values, feed, 2))
        updates = number % K == K - 1
        if updates:
            both = [
                reference.mlp_grads(values, f["x"], f["y"]) for f in feeds[number - 1 : number + 1]
            ]
            mean = {k: (both[0][k] + both[1][k]) / K for k in values}
            newest = reference.norm(mean)
            values = reference.Sgd()(values, reference.clipped(mean, CLIP))
        close(found["gradient_norm/before_clipping"], newest)
        close(found["gradient_norm/applied"], np.minimum(CLIP, newest))
        assert found["accumulation/micro_step"] == (number + 1) % K
        assert found["update_step"] == (number + 1) // K


@pytest.mark.parametrize("kind", KINDS)
def test_clipping_by_shard(kind):
    (feed,) = models.mlp_batches(1)
    axes = axes_of("2")
    own = np.array(shard_norms(start(), feed, 2))
    clip = np.median(own)

    class Clipping(gs.CrossShardOptimizer):
        def apply_grads(self, grads, variables):
            return super().apply_grads(gs.clip_by_shard_norm(grads, clip, axes)[0], variables)

    (found,) = run(kind, "2", lambda: Clipping(sgd()), [feed], axes=axes).fetched
    close(found["gradient_norm/of_shards"], own)
    close(found["gradient_norm/of_shards_clipped"], np.minimum(own, clip))


@pytest.mark.mostly_slow
def test_contributions(mesh_kind):
    feeds = models.mlp_batches(3)
    mask = [True, True, False, True]

    def make():
        return gs.SyncReplicasOptimizer(sgd(), 3, contributes=mask, axes=axes_of("4"))

    steps = run(mesh_kind, "4", make, feeds).fetched
    close(steps[0]["gradient_norm/of_shards"], shard_norms(start(), feeds[0], 4))
    assert [s["update_step"] for s in steps] == [1, 2, 3]
    assert steps[-1]["sync_replicas/contributions"].tolist() == [3, 3, 0, 3]
    assert steps[-1]["sync_replicas/dropped"].tolist() == [0, 0, 3, 0]
    shards = split_by_shard({"a": steps[-1]["sync_replicas/dropped"], "b": 1})
    assert shards == {"a/shard_0": 0, "a/shard_1": 0, "a/shard_2": 3, "a/shard_3": 0, "b": 1}


def test_a_model_that_is_split_too(mesh_kind):
    (feed,) = models.mlp_batches(1)
    make = lambda: gs.CrossShardOptimizer(sgd())  # noqa: E731
    (found,) = run(mesh_kind, "2x2", make, [feed], axes=axes_of("2x2")).fetched
    close(found["gradient_norm/applied"], reference.norm(reference.mlp_grads(start(), **feed)))
    close(found["gradient_norm/of_shards"], shard_norms(start(), feed, 2))


@pytest.mark.parametrize(("split", "expected"), [("", True), (";hidden:cols", False)])
def test_shards_that_take_sums_of_the_size_of_gradients_are_not_reported(split, expected):
    """The gradient of a factor of what is split over `cols` is a sum over `cols`, too."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    batch, hidden = mtf.Dimension("batch", 4), mtf.Dimension("hidden", 4)
    factor = mtf.get_variable(mesh, "factor", mtf.Shape([]))
    loss = mtf.reduce_mean(mtf.square(mtf.ones(mesh, mtf.Shape([batch, hidden])) * factor))
    axes = gs.ReplicaAxes("rows:2;cols:2", f"batch:rows{split}")
    optimizer = gs.CrossShardOptimizer(sgd(), axes=axes)
    optimizer.minimize(loss)
    assert ("gradient_norm/of_shards" in gs.reported(optimizer)) == expected


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.mostly_slow
def test_training_has_the_same_bits_and_sends_a_few_numbers_more(passes):
    feeds = models.mlp_batches(3)
    shape, layout, _ = harness.MESHES["4"]

    def make():
        return gs.GradientAccumulationOptimizer(
            gs.ClipByGlobalNormOptimizer(sgd(), CLIP), passes, axes=axes_of("4")
        )

    silent = harness.built("simd", shape, layout, models.train(make), feeds[0])
    telling = harness.built("simd", shape, layout, step_with(make), feeds[0])
    before, after = (b.collectives().update_step for b in (silent, telling))
    assert after.operations == before.operations + 1
    assert after.bytes_per_core - before.bytes_per_core == 4 * 4
    expected, result = silent.run(feeds).variables, telling.run(feeds).variables
    reference.assert_equal(result, expected)


def test_bare_optimizers_report_nothing():
    assert gs.reported(sgd()) == {}
    assert gs.reported(gs.CrossShardOptimizer(sgd())) == {}


def test_scalars_keep_their_names():
    with tf.Graph().as_default():
        scalars = {"tensor": tf.constant(1.0), "array": np.float32(2.0), "number": 3.0}
        assert split_by_shard(scalars) == scalars
        split = split_by_shard({"of_shards": tf.constant([1.0, 2.0])})
        assert list(split) == ["of_shards/shard_0", "of_shards/shard_1"]
        assert all(x.shape.rank == 0 for x in split.values())
