"""SyncReplicasOptimizer and what surrounds a step: hooks, tokens, global steps, summaries."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.optimizers.state import scalar_state
from tests import harness, models
from tests.sessions import ran, session_of

MESH, LAYOUT, BATCH_DIMS = harness.MESHES["4"]
SHARDS = 4


def make(replicas_to_aggregate=SHARDS, optimizer="sgd", **kwargs):
    return gs.SyncReplicasOptimizer(
        models.OPTIMIZERS[optimizer](),
        replicas_to_aggregate,
        mesh_shape=MESH,
        layout=LAYOUT,
        batch_dims=BATCH_DIMS,
        **kwargs,
    )


def batches(steps, masks=None):
    """Inputs, with a mask of the replicas that contribute."""
    feeds = models.mlp_batches(steps)
    for number, feed in enumerate(feeds):
        feed["contributes"] = np.array([True] * SHARDS if masks is None else masks[number])
    return feeds


def minimize(make_optimizer, make_step=None):
    """A `harness.Build` of an optimizer that is made of the inputs, with a global step."""

    def build(mesh, inputs):
        loss = models.mlp_loss(mesh, inputs, BATCH_DIMS)
        opt = make_optimizer(inputs)
        step = make_step(mesh) if make_step else tf.train.get_or_create_global_step()
        return opt.minimize(loss, step), {"loss": loss}

    return build


def masked(inputs, **kwargs):
    return make(contributes=inputs["contributes"], **kwargs)


# Before an update.

EARLY = {
    "hook": lambda opt: opt.make_session_run_hook(True).begin(),
    "tokens": lambda opt: opt.get_init_tokens_op(),
    "queue runner": lambda opt: opt.get_chief_queue_runner(),
}


@pytest.mark.parametrize("name", sorted(EARLY))
def test_too_early_is_an_error(name):
    with tf.Graph().as_default() as graph:
        with pytest.raises(ValueError, match="apply_gradients"):
            EARLY[name](make())
        assert not graph.get_operations()


@pytest.fixture
def applied():
    """Makes an optimizer that gradients were applied with, in the default graph."""
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")

        def apply(**kwargs):
            inputs = {k: tf.placeholder(tf.float32, v.shape) for k, v in batches(1)[0].items()}
            opt = make(**kwargs)
            opt.minimize(models.mlp_loss(mesh, inputs), tf.train.get_or_create_global_step())
            return opt

        yield apply


@pytest.mark.parametrize(("to_aggregate", "tokens"), [(4, 0), (3, 0), (6, 2), (6, -1), (6, 7)])
def test_enough_tokens(applied, to_aggregate, tokens):
    opt = applied(replicas_to_aggregate=to_aggregate)
    assert opt.get_init_tokens_op(tokens).type == "NoOp"
    opt.make_session_run_hook(True, tokens).begin()


@pytest.mark.parametrize(("to_aggregate", "tokens"), [(6, 1), (6, 0), (9, 4)])
def test_too_few_tokens_are_an_error(applied, to_aggregate, tokens):
    opt = applied(replicas_to_aggregate=to_aggregate)
    for method in (opt.get_init_tokens_op, lambda n: opt.make_session_run_hook(True, n).begin()):
        with pytest.raises(ValueError, match=rf"Too few tokens.*{tokens}.*{to_aggregate - SHARDS}"):
            method(tokens)
    opt.make_session_run_hook(False, tokens).begin()  # not the chief: no tokens


@pytest.mark.parametrize("tokens", [-2, 1.5, True, None])
def test_tokens_that_are_no_number_are_an_error(applied, tokens):
    with pytest.raises(ValueError, match="num_tokens"):
        applied().get_init_tokens_op(tokens)


def test_queue_runner_starts_no_thread(applied):
    runner = applied().get_chief_queue_runner()
    tf.train.add_queue_runner(runner)
    with tf.Session() as session:
        assert tf.train.start_queue_runners(session, tf.train.Coordinator()) == []


def test_no_global_step_is_an_error(applied):
    opt = applied()
    before = len(tf.get_default_graph().get_operations())
    variable = opt.state.count
    with pytest.raises(ValueError, match="global step"):
        opt.apply_gradients([(None, variable)])
    with pytest.raises(ValueError, match="at least one variable"):
        opt.apply_gradients([], tf.train.get_global_step())
    assert len(tf.get_default_graph().get_operations()) == before


# Steps.


def mesh_step(mesh):
    return scalar_state(mesh, "global_step")


@pytest.mark.parametrize(
    ("mesh_kind", "make_step"), [("placement", None), ("simd", mesh_step)], indirect=["mesh_kind"]
)
@pytest.mark.mostly_slow
def test_global_step_advances_only_with_an_update(mesh_kind, make_step):
    masks = [[1, 1, 0, 1], [0, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    feeds = batches(5, np.array(masks, bool))
    build = minimize(lambda inputs: masked(inputs, replicas_to_aggregate=6), make_step)
    result = harness.run(mesh_kind, MESH, LAYOUT, build, feeds)
    # 3 + 3, and 0 + 1 + 4 are not enough for a second one.
    assert result.variables["global_step"] == 1
    assert result.variables["sync_replicas/update_step"] == 1
    assert result.variables["sync_replicas/count"] == 5
    assert result.variables["sync_replicas/waiting"] == 3


@pytest.mark.mostly_slow
def test_an_outer_wrapper_counts_its_updates(mesh_kind):
    def optimizer(inputs):
        inner = masked(inputs, replicas_to_aggregate=8, accept_summed=True)
        return gs.CrossShardOptimizer(inner)

    result = harness.run(mesh_kind, MESH, LAYOUT, minimize(optimizer), batches(5))
    assert result.variables["global_step"] == 2


@pytest.mark.mostly_slow
def test_all_contributing_is_cross_shard(mesh_kind):
    # The loss is of the whole batch: its gradient reaches the optimizer as if nobody had looked.
    kwargs = {"mesh_shape": MESH, "layout": LAYOUT, "batch_dims": BATCH_DIMS}
    results = [
        harness.run(mesh_kind, MESH, LAYOUT, minimize(optimizer), batches(4)).variables
        for optimizer in (
            lambda inputs: make(optimizer="momentum"),
            lambda inputs: gs.CrossShardOptimizer(models.OPTIMIZERS["momentum"](), **kwargs),
        )
    ]
    for name in models.mlp_values():
        # Four updates; the order of a sum of four is the reducer's, one rounding each.
        np.testing.assert_allclose(results[0][name], results[1][name], rtol=2e-6, err_msg=name)


def shard_losses(mesh, inputs):
    """One loss for each shard, and its shard dims."""
    shard = mtf.Dimension("batch", SHARDS)
    features = mtf.Dimension("features", models.INPUTS)
    x = tf.reshape(inputs["x"], [SHARDS, -1, models.INPUTS])
    rows = mtf.Dimension("rows", models.BATCH // SHARDS)
    x = mtf.import_tf_tensor(mesh, x, mtf.Shape([shard, rows, features]))
    w = mtf.get_variable(mesh, "w", mtf.Shape([features]), initializer=tf.ones_initializer())
    return mtf.reduce_mean(mtf.square(x * w), output_shape=[shard])


@pytest.mark.parametrize("how", ["one loss", "a loss for each shard", "a gradient for each shard"])
@pytest.mark.mostly_slow
def test_all_contributing_is_the_step_of_the_whole_batch(mesh_kind, how):
    """However the loss is given, SGD moves by the gradient of the mean."""

    def build(mesh, inputs):
        loss = shard_losses(mesh, inputs)
        opt = make(optimizer="sgd")
        pairs = opt.compute_gradients(
            loss if how == "a loss for each shard" else mtf.reduce_mean(loss)
        )
        if how == "a gradient for each shard":
            grads, variables = zip(*pairs)
            pairs = list(zip(gs.per_shard(grads, opt.axes), variables))
        return opt.apply_gradients(pairs, tf.train.get_or_create_global_step()), {}

    (feed,) = batches(1)
    result = harness.run(mesh_kind, MESH, LAYOUT, build, [feed])
    x = feed["x"].astype(float)
    expected = 1 - 0.1 * 2 * np.mean(np.square(x), axis=0) / models.INPUTS
    # A mean of 16 squares in float32.
    np.testing.assert_allclose(result.variables["w"], expected, rtol=1e-6)


@pytest.mark.slow
def test_a_penalty_on_weights_is_whole_whoever_contributes(mesh_kind):
    """What knows nothing of the batch is shared equally, and averaged like all the rest."""

    def build(mesh, inputs):
        twice = mtf.get_variable(mesh, "twice", mtf.Shape([]), initializer=tf.ones_initializer())
        loss = mtf.reduce_mean(shard_losses(mesh, inputs)) + mtf.square(twice)
        opt = masked(inputs, replicas_to_aggregate=3, optimizer="sgd")
        return opt.minimize(loss, tf.train.get_or_create_global_step()), {}

    feeds = batches(1, np.array([[1, 1, 0, 1]], bool))
    result = harness.run(mesh_kind, MESH, LAYOUT, build, feeds)
    assert np.isclose(result.variables["twice"], 0.8)


# Averages.


def averaged(mesh, **kwargs):
    """An optimizer that averages `w`, and the gradient of a loss of which `w` is all there is."""
    w = mtf.get_variable(mesh, "w", mtf.Shape([]), initializer=tf.ones_initializer())
    other = mtf.get_variable(mesh, "other", mtf.Shape([]), initializer=tf.ones_initializer())
    opt = make(optimizer="sgd", variable_averages=0.5, variables_to_average=[w], **kwargs)
    return opt, mtf.square(w + other), w, other


def test_an_average_is_there_once_gradients_were_applied():
    with tf.Graph().as_default() as graph:
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        opt, loss, w, other = averaged(mesh)
        before = list(mesh.graph.operations), len(graph.get_operations())
        assert opt.average(w) is None
        assert (list(mesh.graph.operations), len(graph.get_operations())) == before
        opt.minimize(loss, tf.train.get_or_create_global_step())
        before = list(mesh.graph.operations), len(graph.get_operations())
        average = opt.average(w)
        assert average.name == "w/ExponentialMovingAverage"
        # By variable and by value; as the average itself, and as a slot.
        assert opt.average(w.operation) is opt.get_slot(w.operation, average.name[2:]) is average
        assert opt.average(other) is None
        assert (list(mesh.graph.operations), len(graph.get_operations())) == before
        assert gs.moving_average(w) is average


def test_an_average_is_not_there_where_applying_gradients_failed():
    class Fails(mtf.optimize.SgdOptimizer):
        """Raises once it has made a variable."""

        def apply_grads(self, grads, variables):
            gs.moving_average(variables[0])
            raise RuntimeError("no update")

    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        w = mtf.get_variable(mesh, "w", mtf.Shape([]), initializer=tf.ones_initializer())
        axes = gs.ReplicaAxes(MESH, LAYOUT, BATCH_DIMS)
        opt = gs.SyncReplicasOptimizer(
            Fails(0.1), SHARDS, variable_averages=0.5, variables_to_average=[w], axes=axes
        )
        with pytest.raises(RuntimeError, match="no update"):
            opt.minimize(mtf.square(w), tf.train.get_or_create_global_step())
        assert opt.average(w) is None
        assert opt.state is None
        assert opt.variables() == []
        assert list(mesh.graph.all_variables) == [w.operation]


@pytest.mark.slow
def test_a_graph_that_only_evaluates_restores_the_average(tmp_path):
    def trains(mesh, inputs):
        opt, loss, *_ = averaged(mesh)
        return opt.minimize(loss, tf.train.get_or_create_global_step()), {}

    def evaluates(mesh, inputs):
        w = mtf.get_variable(mesh, "w", mtf.Shape([]))
        with tf.variable_scope("evaluation"):
            average = gs.moving_average(w)
        assert mesh.graph.all_variables == [w.operation, average]
        return [], {"doubled": average.value * 2.0}

    path = str(tmp_path / "model.ckpt")
    training, evaluating = (
        harness.built("placement", MESH, LAYOUT, build, {}) for build in (trains, evaluates)
    )
    ran(training, [{}], save=path, make_saver=tf.train.Saver)
    # w goes from 1 by 0.1 * 2 * (1 + 1), and its average half of the way.
    with session_of(evaluating, tf.train.Saver) as session:
        session.restore(path)
        assert np.isclose(session.run(evaluating.fetched["doubled"]), 2 * 0.8)


def test_moving_average_wants_a_mesh_variable():
    with pytest.raises(TypeError, match=r"mtf\.Variable.*'w'"):
        gs.moving_average("w")


# The limit.


def test_the_hook_wants_initialized_variables(applied):
    opt = applied()
    hook = opt.make_session_run_hook(True)
    hook.begin()
    with tf.Session() as session:
        with pytest.raises(RuntimeError, match=r"not initialized: .*w1"):
            hook.after_create_session(session, None)
        session.run(tf.global_variables_initializer())
        hook.after_create_session(session, None)


# What can be read.


@pytest.mark.mostly_slow
def test_counts_of_each_replica_go_to_summaries(mesh_kind):
    masks = np.array([[1, 1, 0, 1], [0, 1, 0, 1]], bool)
    with tf.Graph().as_default():
        result = harness.run(mesh_kind, MESH, LAYOUT, minimize(masked), batches(2, masks))
    summaries = dict(result.graph.get_collection(mtf.utils.SCALAR_SUMMARIES_COLLECTION_KEY))
    names = [
        f"summary/sync_replicas/{kind}/replica_{k}"
        for kind in ("made", "dropped")
        for k in range(4)
    ]
    assert set(names) <= set(summaries)
    np.testing.assert_array_equal(result.variables["sync_replicas/made"].ravel(), [1, 2, 0, 2])
    np.testing.assert_array_equal(result.variables["sync_replicas/dropped"].ravel(), [1, 0, 2, 0])
    np.testing.assert_array_equal(result.variables["sync_replicas/missed"].ravel(), [1, 0, 2, 0])


@pytest.mark.slow
def test_summaries_and_progress_hold_the_step_they_are_fetched_with():
    fetched = {}

    def build(mesh, inputs):
        loss = models.mlp_loss(mesh, inputs, BATCH_DIMS)
        opt = masked(inputs)
        operations = opt.minimize(loss, tf.train.get_or_create_global_step())
        fetched.update(opt.progress_fields())
        return operations, fetched

    masks = np.array([[1, 1, 0, 1], [0, 1, 1, 1]], bool)
    result = harness.run("placement", MESH, LAYOUT, build, batches(2, masks))
    steps = result.fetched
    assert [int(step["update step"]) for step in steps] == [0, 1]
    np.testing.assert_array_equal([step["made"] for step in steps], [[1, 1, 0, 1], [1, 2, 1, 2]])
    np.testing.assert_array_equal([step["dropped"] for step in steps], [[0, 0, 1, 0], [1, 0, 1, 0]])
