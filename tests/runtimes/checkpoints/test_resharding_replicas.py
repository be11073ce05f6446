"""Checkpoints of SyncReplicasOptimizer, restored on another number of shards."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models, reference
from tests.sessions import ran

MESHES = {
    "4": ("all:4", "batch:all", ("batch",)),
    "1x2": ("a:1;b:2", "outer:a;batch:b", ("outer", "batch")),
    "2x2": ("a:2;b:2", "outer:a;batch:b", ("outer", "batch")),
    "2": ("all:2", "batch:all", ("batch",)),
    "8": ("all:8", "batch:all", ("batch",)),
    "1": ("all:1", "batch:all", ("batch",)),
}
TO_AGGREGATE = 10
CLIP_NORM = 0.25


def built(mesh, clips=False):
    """The model with synchronous replicas on a mesh."""
    shape, layout, batch_dims = MESHES[mesh]

    def build(mesh, inputs):
        loss = models.mlp_loss(mesh, inputs, batch_dims)
        opt = gs.SyncReplicasOptimizer(
            models.OPTIMIZERS["sgd"](), TO_AGGREGATE, mesh_shape=shape, layout=layout,
            batch_dims=batch_dims, contributes=inputs["contributes"], accept_summed=clips,
        )  # fmt: skip
        grads, variables = zip(*opt.compute_gradients(loss))
        if clips:
            grads, _ = gs.clip_by_global_norm(grads, CLIP_NORM)
        step = tf.train.get_or_create_global_step()
        return opt.apply_gradients(list(zip(grads, variables)), step), {}

    (feed,) = feeds_of(1, size_of(mesh))
    return harness.built("placement", shape, layout, build, feed)


def size_of(mesh):
    return mtf.convert_to_shape(MESHES[mesh][0]).size


def feeds_of(steps, size, seed=1):
    """Batches, to which all of some replicas contribute."""
    batches = models.mlp_batches(steps, seed=seed)
    return [{**batch, "contributes": np.ones(size, bool)} for batch in batches]


def feeds_of_four():
    """An update of 10 contributions of 4 shards, then 3 that wait for more."""
    masks = np.ones([4, 4], bool)
    masks[1, 1:3] = False
    masks[3, 3:] = False
    return [{**feed, "contributes": m} for feed, m in zip(models.mlp_batches(4), masks)]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    feeds, path = feeds_of_four(), str(tmp_path_factory.mktemp("written") / "model.ckpt")
    return path, feeds, ran(built("4"), feeds, save=path)


@pytest.fixture(scope="module")
def written_clipped(tmp_path_factory):
    feeds, path = feeds_of_four(), str(tmp_path_factory.mktemp("clipped") / "model.ckpt")
    return path, feeds, ran(built("4", clips=True), feeds, save=path)


def contributions(values, feed):
    """The sum of the gradients of the replicas that contribute, and how many do."""
    mask = feed["contributes"]
    parts = zip(np.split(feed["x"], len(mask)), np.split(feed["y"], len(mask)))
    grads = [
        reference.mlp_grads(values, x.astype(float), y.astype(float))
        for came, (x, y) in zip(mask, parts)
        if came
    ]
    return {k: sum(g[k] for g in grads) for k in values}, len(grads)


def clipped(values, feed):
    """The clipped gradient of the batch times the number of contributions, and that number."""
    grads = reference.mlp_grads(values, feed["x"].astype(float), feed["y"].astype(float))
    assert reference.norm(grads) > CLIP_NORM
    count = feed["contributes"].sum()
    return {k: count * g for k, g in reference.clipped(grads, CLIP_NORM).items()}, count


def expected(feeds, contributions=contributions):
    """The variables in float64, whatever the number of replicas of each step."""
    values = {k: np.asarray(v, float) for k, v in models.mlp_values().items()}
    sums, count = dict.fromkeys(values, 0.0), 0
    for feed in feeds:
        more, came = contributions(values, feed)
        sums, count = {k: sums[k] + more[k] for k in sums}, count + came
        if count >= TO_AGGREGATE:
            values = {k: values[k] - 0.1 * sums[k] / count for k in values}
            sums, count = dict.fromkeys(values, 0.0), 0
    return values, count


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1x2", "2x2", "2", "8"])
def test_contributions_count_as_much_on_another_mesh(written, mesh):
    path, feeds, before = written
    program, size = built(mesh), size_of(mesh)
    # Enough for one more update on any of the meshes, and then one step.
    more = feeds_of(-(-7 // size) + 1, size, seed=5)
    restored = ran(program, [], restore=path)
    shape = [d.size for d in mtf.convert_to_shape(MESHES[mesh][0]).dims]
    # Every replica begins with the step of the last update.
    assert before["sync_replicas/update_step"] == 1
    np.testing.assert_array_equal(restored["sync_replicas/local_step"], np.ones(shape))
    np.testing.assert_array_equal(restored["sync_replicas/missed"], np.zeros(shape))
    for name in ("made", "dropped"):
        # Counts are moved or added up; none is lost.
        assert restored[f"sync_replicas/{name}"].sum() == before[f"sync_replicas/{name}"].sum()
    for name in ("count", "waiting", "update_step"):
        assert restored[f"sync_replicas/{name}"] == before[f"sync_replicas/{name}"]
    assert restored["sync_replicas/count"] == 3
    actual = ran(program, more, restore=path)
    values, count = expected([*feeds, *more])
    assert actual["sync_replicas/count"] == count
    assert actual["sync_replicas/update_step"] == actual["global_step"] == 2
    for name, value in values.items():
        # Two SGD steps of 0.1 on sums of at most 13 gradients below 2, in float32.
        np.testing.assert_allclose(actual[name], value, atol=5e-6, err_msg=name)


@pytest.mark.parametrize("mesh", ["2", "1"])
@pytest.mark.slow
def test_gradients_that_were_reduced_before_count_as_much_on_another_mesh(written_clipped, mesh):
    """Where there is one shard they are not reduced, so that accumulators get its dimension."""
    path, feeds, before = written_clipped
    program, size = built(mesh, clips=True), size_of(mesh)
    more = feeds_of(-(-7 // size), size, seed=5)
    restored = ran(program, [], restore=path)
    accumulators = [name for name in before if name.endswith("/gradient_accumulator")]
    assert accumulators
    for name in accumulators:
        shards = [1] if mesh == "1" else []
        assert list(restored[name].shape) == [*shards, *before[name].shape]
    actual = ran(program, more, restore=path)
    values, _ = expected([*feeds, *more], clipped)
    assert actual["global_step"] == 2
    for name, value in values.items():
        # Two SGD steps of 0.1 on sums of at most 13 gradients of norm 0.25, in float32.
        np.testing.assert_allclose(actual[name], value, atol=1e-6, err_msg=name)
