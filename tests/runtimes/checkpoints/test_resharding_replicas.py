"""Checkpoints of SyncReplicasOptimizer, restored on another number of shards."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models, reference

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


class Program:
    """The model with synchronous replicas on a mesh, in a graph of its own."""

    def __init__(self, mesh, clips=False):
        shape, layout, batch_dims = MESHES[mesh]
        self.size = mtf.convert_to_shape(shape).size
        with tf.Graph().as_default() as self.graph:
            feed = self.feed(models.mlp_batches(1)[0], np.ones(self.size, bool))
            self.inputs = {
                k: tf.placeholder(tf.as_dtype(v.dtype), v.shape) for k, v in feed.items()
            }
            graph = mtf.Graph()
            mesh = mtf.Mesh(graph, "mesh")
            loss = models.mlp_loss(mesh, self.inputs, batch_dims)
            opt = gs.SyncReplicasOptimizer(
                models.OPTIMIZERS["sgd"](),
                TO_AGGREGATE,
                mesh_shape=shape,
                layout=layout,
                batch_dims=batch_dims,
                contributes=self.inputs["contributes"],
                accept_summed=clips,
            )
            grads, variables = zip(*opt.compute_gradients(loss))
            if clips:
                grads, _ = gs.clip_by_global_norm(grads, CLIP_NORM)
            step = tf.train.get_or_create_global_step()
            operations = opt.apply_gradients(list(zip(grads, variables)), step)
            lowering = mtf.Lowering(graph, {mesh: harness.placement(shape, layout)})
            self.step = [lowering.lowered_operation(op) for op in operations]
            self.to_slices = lowering.copy_masters_to_slices()
            self.to_masters = lowering.copy_slices_to_masters()
            self.init = tf.global_variables_initializer()
            self.masters = {v.op.name: v for v in tf.global_variables()}
            self.saver = gs.ReshardingSaver()

    @staticmethod
    def feed(batch, mask):
        return {**batch, "contributes": mask}

    def run(self, feeds, restore=None, save=None):
        """Makes steps, perhaps from a checkpoint and to one; returns the variables at the end."""
        config = harness.placement_config(self.size)
        with tf.Session(graph=self.graph, config=config) as session:
            if restore:
                self.saver.restore(session, restore)
            else:
                session.run(self.init)
            session.run(self.to_slices)
            for feed in feeds:
                session.run(self.step, {self.inputs[k]: v for k, v in feed.items()})
            session.run(self.to_masters)
            if save:
                self.saver.save(session, save)
            return session.run(self.masters)


def feeds_of_four():
    """An update of 10 contributions of 4 shards, then 3 that wait for more."""
    masks = np.ones([4, 4], bool)
    masks[1, 1:3] = False
    masks[3, 3:] = False
    return [Program.feed(b, m) for b, m in zip(models.mlp_batches(4), masks)]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    feeds, path = feeds_of_four(), str(tmp_path_factory.mktemp("written") / "model.ckpt")
    return path, feeds, Program("4").run(feeds, save=path)


@pytest.fixture(scope="module")
def written_clipped(tmp_path_factory):
    feeds, path = feeds_of_four(), str(tmp_path_factory.mktemp("clipped") / "model.ckpt")
    return path, feeds, Program("4", clips=True).run(feeds, save=path)


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
    norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
    assert norm > CLIP_NORM
    count = feed["contributes"].sum()
    return {k: count * g * CLIP_NORM / norm for k, g in grads.items()}, count


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
    program = Program(mesh)
    # Enough for one more update on any of the meshes, and then one step.
    steps = -(-7 // program.size) + 1
    more = [Program.feed(b, np.ones(program.size, bool)) for b in models.mlp_batches(steps, seed=5)]
    restored = program.run([], restore=path)
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
    actual = program.run(more, restore=path)
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
    program = Program(mesh, clips=True)
    more = [
        Program.feed(b, np.ones(program.size, bool))
        for b in models.mlp_batches(-(-7 // program.size), seed=5)
    ]
    restored = program.run([], restore=path)
    accumulators = [name for name in before if name.endswith("/gradient_accumulator")]
    assert accumulators
    for name in accumulators:
        shards = [1] if mesh == "1" else []
        assert list(restored[name].shape) == [*shards, *before[name].shape]
    actual = program.run(more, restore=path)
    values, _ = expected([*feeds, *more], clipped)
    assert actual["global_step"] == 2
    for name, value in values.items():
        # Two SGD steps of 0.1 on sums of at most 13 gradients of norm 0.25, in float32.
        np.testing.assert_allclose(actual[name], value, atol=1e-6, err_msg=name)
