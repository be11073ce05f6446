"""What SyncReplicasOptimizer takes and refuses, and the averages that it keeps."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models

MESH, LAYOUT, BATCH_DIMS = harness.MESHES["4x2"]
SHARDS = 4


def make(to_aggregate=SHARDS, inner=None, **kwargs):
    return gs.SyncReplicasOptimizer(
        inner or mtf.optimize.SgdOptimizer(0.1),
        to_aggregate,
        mesh_shape=MESH,
        layout=LAYOUT,
        batch_dims=BATCH_DIMS,
        **kwargs,
    )


def model(name="mesh"):
    mesh = mtf.Mesh(mtf.Graph(), name)
    feed = models.mlp_batches(1)[0]
    inputs = {k: tf.placeholder(tf.float32, v.shape) for k, v in feed.items()}
    return mesh, models.mlp_loss(mesh, inputs, BATCH_DIMS)


def mtf_mask(mesh, size=SHARDS, name="batch", dtype=tf.bool):
    ones = mtf.constant(mesh, 1, mtf.Shape([mtf.Dimension(name, size)]), tf.int32)
    return mtf.greater(ones, 0) if dtype == tf.bool else ones


# Numbers.


def test_whole_numbers_of_numpy_are_taken():
    _, loss = model()
    opt = make(np.int64(6))
    opt.minimize(loss, tf.train.get_or_create_global_step())
    opt.get_init_tokens_op(np.int32(2))
    with pytest.raises(ValueError, match="Too few tokens"):
        opt.get_init_tokens_op(np.int32(1))


# Masks.

REFUSED = {
    "too short": (lambda mesh: [True, False, True], ValueError, r"4 replicas.*\(3,\)"),
    "one for all": (lambda mesh: True, ValueError, "4 replicas.*True"),
    "other tf shape": (lambda mesh: tf.constant([True] * 5), ValueError, r"4 replicas.*\(5,\)"),
    "fractions": (lambda mesh: np.array([0.5, 0, 1, 1]), TypeError, "boolean.*float64"),
    "tf strings": (lambda mesh: tf.constant(["yes"] * 4), TypeError, "boolean.*string"),
    "no numbers": (lambda mesh: [None] * 4, TypeError, "boolean.*None"),
    "a list of tensors": (lambda mesh: [tf.constant(True)] * 4, TypeError, "boolean"),
    "mtf integers": (lambda mesh: mtf_mask(mesh, dtype=tf.int32), TypeError, "boolean.*int32"),
    "other mtf size": (lambda mesh: mtf_mask(mesh, 8), ValueError, "batch=4.*batch=8"),
    "other mtf dim": (lambda mesh: mtf_mask(mesh, 4, "x"), ValueError, "batch=4.*x=4"),
    "other mesh": (lambda mesh: mtf_mask(mtf.Mesh(mesh.graph, "o")), ValueError, "another mesh"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_masks_that_do_not_fit_are_refused_before_anything_is_made(name):
    given, error, words = REFUSED[name]
    mesh, loss = model()
    contributes = given(mesh)
    pairs = list(
        zip(
            mtf.gradients([loss], [v.value for v in mesh.graph.trainable_variables]),
            mesh.graph.trainable_variables,
        )
    )
    step = tf.train.get_or_create_global_step()
    before = list(mesh.graph.operations), len(tf.get_default_graph().get_operations())
    with pytest.raises(error, match=words):
        make(contributes=contributes).apply_gradients(pairs, step)
    assert (list(mesh.graph.operations), len(tf.get_default_graph().get_operations())) == before


@pytest.mark.parametrize("given", ["list", "array", "integers", "mtf", "tf of any shape"])
def test_masks_come_in_many_forms(given):
    mask = [True, False, True, True]

    def build(mesh, inputs):
        if given == "mtf":
            dim = mtf.Dimension("batch", SHARDS)
            contributes = mtf.not_equal(mtf.range(mesh, dim, tf.int32), 1)
        else:
            contributes = {
                "list": mask,
                "array": np.array(mask),
                "integers": [int(x) for x in mask],
                "tf of any shape": tf.placeholder_with_default(mask, None),
            }[given]
        loss = models.mlp_loss(mesh, inputs, BATCH_DIMS)
        opt = make(3, contributes=contributes)
        return opt.minimize(loss, tf.train.get_or_create_global_step()), {}

    result = harness.run("placement", MESH, LAYOUT, build, models.mlp_batches(1))
    np.testing.assert_array_equal(result.variables["sync_replicas/made"].ravel(), mask)


# Gradients and variables.


def test_global_step_stands_still_where_every_gradient_is_none():
    mesh, _ = model()
    step = tf.train.get_or_create_global_step()
    assert make().apply_gradients([(None, v) for v in mesh.graph.trainable_variables], step) == []


def test_a_copy_for_each_replica_may_stand_by_without_a_gradient():
    mesh, loss = model()
    shape = mtf.Shape([mtf.Dimension("batch", SHARDS)])
    own = mtf.get_variable(mesh, "own", shape, initializer=tf.zeros_initializer())
    assert make().minimize(loss, tf.train.get_or_create_global_step())
    with pytest.raises(ValueError, match=r"'own'.*copy for each replica"):
        make(name="other").apply_grads([own + 1.0], [own.operation])


# Wrappers inside.


@pytest.mark.parametrize(
    "inner",
    [
        lambda: gs.GradientAccumulationOptimizer(mtf.optimize.SgdOptimizer(0.1), 2),
        lambda: gs.GradientAccumulationOptimizer(
            mtf.optimize.SgdOptimizer(0.1), 2, mesh_shape=MESH, layout=LAYOUT
        ),
        lambda: gs.CrossShardOptimizer(make()),
    ],
    ids=["synced accumulation", "local accumulation", "itself"],
)
def test_what_skips_updates_does_not_stand_inside(inner):
    with pytest.raises(ValueError, match=r"replicas_to_aggregate=K \* num_shards"):
        make(inner=inner())


def test_accumulation_around_it_is_an_error_that_says_what_would_do():
    _, loss = model()
    opt = gs.GradientAccumulationOptimizer(make(), 2)
    with pytest.raises(ValueError, match=r"replicas_to_aggregate=K \* num_shards"):
        opt.minimize(loss)


# Averages.


def test_averages_and_counts_have_their_names_in_any_scope():
    mesh, loss = model()
    variables = list(mesh.graph.trainable_variables)
    opt = make(variable_averages=0.9, variables_to_average=variables)
    grads = mtf.gradients([loss], [v.value for v in variables])
    with tf.variable_scope("training"):
        opt.apply_grads(grads, variables)
    assert opt.average(variables[0]).name == "w1/ExponentialMovingAverage"
    assert opt.average(variables[0]) in opt.variables()
    assert [v.name for v in opt.state] == [f"sync_replicas/{f}" for f in opt.state._fields]


def test_averages_of_another_graph_are_refused():
    mesh, _ = model()
    opt = make(variable_averages=0.9, variables_to_average=mesh.graph.trainable_variables)
    with tf.variable_scope("second"):
        other, loss = model()
    pairs = opt.compute_gradients(loss)
    before = list(other.graph.operations)
    with pytest.raises(ValueError, match=r"variables_to_average \['w1'.*another graph"):
        opt.apply_gradients(pairs, tf.train.get_or_create_global_step())
    assert list(other.graph.operations) == before


@pytest.mark.parametrize(("autostack", "optimizer"), [(True, "adafactor"), (False, "momentum")])
def test_averages_follow_all_bits_of_what_activations_round(mesh_kind, autostack, optimizer):
    """Slices are float32 and activations bfloat16, of two variables that autostack joins."""
    steps, decay = 3, 0.999
    dtype = mtf.VariableDType(tf.float32, tf.float32, tf.bfloat16)
    start = {"w": 1.2345678, "u": 0.7654321, "still": 1.0101}

    def run(steps):
        def build(mesh, inputs):
            batch, d = mtf.Dimension("batch", 16), mtf.Dimension("features", models.INPUTS)
            x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([batch, d]))
            w, u, still = (
                mtf.get_variable(
                    mesh, name, mtf.Shape([d]), dtype, initializer=tf.constant_initializer(value)
                ).operation
                for name, value in start.items()
            )
            out = mtf.cast(mtf.cast(x, tf.bfloat16) * w.value * u.value, tf.float32)
            opt = make(
                inner=models.OPTIMIZERS[optimizer](),
                variable_averages=decay,
                variables_to_average=[w, still, u],
            )
            assert opt.average(w).value.dtype == tf.bfloat16
            grads = mtf.gradients([mtf.reduce_mean(mtf.square(out))], [w.value, u.value])
            return opt.apply_grads(grads, [w, u]), {}

        feeds = models.mlp_batches(steps)
        return harness.run(mesh_kind, MESH, LAYOUT, build, feeds, autostack).variables

    expected = {name: np.full(models.INPUTS, np.float32(x), float) for name, x in start.items()}
    for step in range(steps):
        found = run(step + 1)
        for name in start:
            average = found[f"{name}/ExponentialMovingAverage"]
            expected[name] -= (1 - decay) * (expected[name] - found[name])
            # Three float32 roundings a step of numbers of about 1; bfloat16 rounds by 4e-3.
            np.testing.assert_allclose(average, expected[name], rtol=5e-7, err_msg=name)
    assert np.all(np.abs(found["w"] - start["w"]) > 1e-3)
    np.testing.assert_array_equal(found["still"], np.full(models.INPUTS, np.float32(1.0101)))
