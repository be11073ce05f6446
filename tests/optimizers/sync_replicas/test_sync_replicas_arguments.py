"""What SyncReplicasOptimizer takes and refuses, and the averages that it keeps."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models, sessions

MESH, LAYOUT, BATCH_DIMS = harness.MESHES["4"]
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


def mtf_ones(mesh, size=SHARDS, name="batch", dtype=tf.bool):
    ones = mtf.constant(mesh, 1, mtf.Shape([mtf.Dimension(name, size)]), tf.int32)
    return mtf.greater(ones, 0) if dtype == tf.bool else mtf.cast(ones, dtype)


# Numbers.


def test_whole_numbers_of_numpy_are_taken():
    _, loss = model()
    opt = make(np.int64(6))
    opt.minimize(loss, tf.train.get_or_create_global_step())
    opt.get_init_tokens_op(np.int32(2))
    with pytest.raises(ValueError, match="Too few tokens"):
        opt.get_init_tokens_op(np.int32(1))


# What is given for each replica.

REFUSED = {
    "too short": (lambda mesh: [1, 0, 1], ValueError, r"4 replicas.* \[4\]; .*\(3,\)"),
    "one for all": (lambda mesh: 1, ValueError, r"4 replicas.*\(\) of 1"),
    "other tf shape": (lambda mesh: tf.constant([1] * 5), ValueError, r"4 replicas.*\(5,\)"),
    "fractions": (lambda mesh: np.array([0.5, 0, 1, 1]), TypeError, "{}.*float64"),
    "tf strings": (lambda mesh: tf.constant(["yes"] * 4), TypeError, "{}.*string"),
    "no numbers": (lambda mesh: [None] * 4, TypeError, "{}.*None"),
    "a list of tensors": (lambda mesh: [tf.constant(1)] * 4, TypeError, "{}"),
    "mtf fractions": (lambda mesh: mtf_ones(mesh, dtype=tf.float32), TypeError, "{}.*float32"),
    "other mtf size": (
        lambda mesh: mtf_ones(mesh, 8, dtype=tf.int32),
        ValueError,
        "batch=4.*batch=8",
    ),
    "other mtf dim": (
        lambda mesh: mtf_ones(mesh, 4, "x", tf.int32),
        ValueError,
        "batch=4.*x=4",
    ),
    "other mesh": (
        lambda mesh: mtf_ones(mtf.Mesh(mesh.graph, "o"), dtype=tf.int32),
        ValueError,
        "another mesh",
    ),
}
KINDS = {"contributes": "boolean", "local_steps": "whole number"}


def refuses(argument, given, error, words):
    mesh, loss = model()
    value = given(mesh)
    pairs = list(
        zip(
            mtf.gradients([loss], [v.value for v in mesh.graph.trainable_variables]),
            mesh.graph.trainable_variables,
        )
    )
    step = tf.train.get_or_create_global_step()
    words = f"{argument}.*{words.format(KINDS[argument])}"
    with harness.unchanged(mesh.graph), pytest.raises(error, match=words):
        make(**{argument: value}).apply_gradients(pairs, step)


@pytest.mark.parametrize("argument", sorted(KINDS))
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_does_not_fit_the_replicas_is_refused_before_anything_is_made(argument, name):
    refuses(argument, *REFUSED[name])


@pytest.mark.parametrize(
    "given",
    [lambda mesh: [True] * 4, lambda mesh: tf.constant([True] * 4), mtf_ones],
    ids=["list", "tf", "mtf"],
)
def test_booleans_are_no_local_steps(given):
    refuses("local_steps", given, TypeError, "whole number.*bool")


def test_shapes_that_would_do_are_named():
    axes = gs.ReplicaAxes(*harness.MESHES["2x2x2"])
    with pytest.raises(ValueError, match=r"shape \[4\] or \[2, 2\]; got the shape \(2, 1\)"):
        gs.SyncReplicasOptimizer(
            mtf.optimize.SgdOptimizer(0.1), 4, local_steps=[[1], [1]], axes=axes
        )


FORMS = ["list", "array", "mtf", "tf of any shape", "rows", "mtf, turned round"]


def in_form(form, mesh, axes, value):
    """[num_shards] numbers or booleans as something that arguments take."""
    if form.startswith("mtf"):
        dims = list(axes.shard_dims)
        row_major = mtf.import_tf_tensor(mesh, np.reshape(value, [d.size for d in dims]), dims)
        turned = form == "mtf, turned round" and len(dims) > 1
        return mtf.transpose(row_major, mtf.Shape(dims[::-1])) if turned else row_major
    return {
        "list": list(value),
        "array": np.array(value),
        "tf of any shape": tf.placeholder_with_default(value, None),
        "rows": np.reshape(value, [d.size for d in axes.shard_dims]),
    }[form]


BOOLEANS, WHOLE_NUMBERS = [True, False, True, True], [2, 0, 1, -1]
# The update step is 0: what is for a later one is not stale.
LOCAL_STEPS = [0, 0, -1, 7]
# Of contributes its value and form, and the form of local_steps: each has every form.
GIVEN = [
    *zip([BOOLEANS] * 5, FORMS, reversed(FORMS)),
    *zip([WHOLE_NUMBERS] * 3, ("list", "mtf", "mtf, turned round"), FORMS),
]
# Every form on both kinds of mesh.
ON_PLACEMENT = [
    (BOOLEANS, "list", "rows"),
    (BOOLEANS, "tf of any shape", "mtf, turned round"),
    (WHOLE_NUMBERS, "mtf", "array"),
]


@pytest.mark.parametrize(
    ("kind", "contributes", "form", "form_of_steps"), harness.on_both(GIVEN, ON_PLACEMENT)
)
@pytest.mark.mostly_slow
def test_what_replicas_are_given_comes_in_many_forms(kind, contributes, form, form_of_steps):
    mesh_shape, layout, batch_dims = "a:2;b:2", "outer:a;batch:b", ("outer", "batch")
    axes = gs.ReplicaAxes(mesh_shape, layout, batch_dims)

    def build(mesh, inputs):
        batch = models.batch_shape(batch_dims)
        x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape(batch))
        w = mtf.get_variable(mesh, "w", mtf.Shape([]), initializer=tf.ones_initializer())
        loss = mtf.reduce_mean(mtf.square(x * w))
        given = {
            "contributes": in_form(form, mesh, axes, contributes),
            "local_steps": in_form(form_of_steps, mesh, axes, LOCAL_STEPS),
        }
        opt = gs.SyncReplicasOptimizer(mtf.optimize.SgdOptimizer(0.1), 4, axes=axes, **given)
        return opt.minimize(loss, tf.train.get_or_create_global_step()), {}

    feeds = [{"x": np.ones([4, 4], "f")}]
    result = harness.run(kind, mesh_shape, layout, build, feeds)
    found = {k: result.variables[f"sync_replicas/{k}"].ravel() for k in ("made", "local_step")}
    # One does not contribute, and what another one has is stale.
    np.testing.assert_array_equal(found["made"], [1, 0, 0, 1])
    # No update was made, so that steps stay what they are.
    np.testing.assert_array_equal(found["local_step"], LOCAL_STEPS)


# Stale gradients.


@pytest.mark.slow
def test_local_steps_that_are_not_given_are_the_variables(mesh_kind):
    """A replica that was behind when a checkpoint was written is behind until the next update."""
    feed = {**models.mlp_batches(1)[0], "contributes": np.array([True, True, False, True])}

    def build(mesh, inputs):
        opt = make(SHARDS, contributes=inputs["contributes"])
        loss = models.mlp_loss(mesh, inputs, BATCH_DIMS)
        return opt.minimize(loss, tf.train.get_or_create_global_step()), {}

    program = harness.built(mesh_kind, MESH, LAYOUT, build, feed)
    with sessions.session_of(program) as session:
        local_steps = np.array([5, 4, 5, 5], np.int32)
        session.write({
            "sync_replicas/local_step": local_steps, "sync_replicas/update_step": np.int32(5)
        })  # fmt: skip
        seen = [sessions.step(program, session, feed) for _ in range(3)]
    made = [values["sync_replicas/made"].tolist() for values in seen]
    assert made == [[1, 0, 0, 1], [2, 0, 0, 2], [3, 1, 0, 3]]
    steps = [values["sync_replicas/local_step"].tolist() for values in seen]
    assert steps == [[5, 4, 5, 5], [6] * 4, [6] * 4]


@pytest.mark.slow
def test_a_stale_gradient_is_dropped_though_its_replica_has_a_new_token(mesh_kind):
    """An input pipeline that hands replica 1 what it had prepared for the update before."""
    (feed,) = models.mlp_batches(1)
    feed["local_steps"] = np.zeros(SHARDS, np.int64)

    def build(mesh, inputs):
        opt = make(3, local_steps=inputs["local_steps"])
        loss = models.mlp_loss(mesh, inputs, BATCH_DIMS)
        return opt.minimize(loss, tf.train.get_or_create_global_step()), {}

    steps = [[update, max(update - 1, 0), update, update] for update in range(3)]
    program = harness.built(mesh_kind, MESH, LAYOUT, build, feed)
    after = program.after_each([{**feed, "local_steps": np.array(step)} for step in steps])
    local_steps = [found["sync_replicas/local_step"].tolist() for found in after]
    assert local_steps == [[1] * SHARDS, [2] * SHARDS, [3] * SHARDS]
    found = after[-1]
    assert found["sync_replicas/made"].tolist() == [3, 1, 3, 3]
    assert found["sync_replicas/dropped"].tolist() == [0, 2, 0, 0]


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
    words = r"variables_to_average has 3 variables: w1.*another mesh or graph"
    step = tf.train.get_or_create_global_step()
    with harness.unchanged(other.graph), pytest.raises(ValueError, match=words):
        opt.apply_gradients(pairs, step)


@pytest.mark.parametrize(("autostack", "optimizer"), [(True, "adafactor"), (False, "momentum")])
@pytest.mark.slow
def test_averages_follow_all_bits_of_what_activations_round(mesh_kind, autostack, optimizer):
    """Slices are float32 and activations bfloat16, of two variables that autostack joins."""
    steps, decay = 3, 0.999
    dtype = mtf.VariableDType(tf.float32, tf.float32, tf.bfloat16)
    start = {"w": 1.2345678, "u": 0.7654321, "still": 1.0101}

    def build(mesh, inputs):
        batch, d = mtf.Dimension("batch", 16), mtf.Dimension("features", models.INPUTS)
        x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([batch, d]))
        w, u, still = (
            models.variable(mesh, name, [d], value, dtype=dtype).operation
            for name, value in start.items()
        )
        out = mtf.cast(mtf.cast(x, tf.bfloat16) * w.value * u.value, tf.float32)
        opt = make(
            inner=models.OPTIMIZERS[optimizer](),
            variable_averages=decay,
            variables_to_average=[w, still, u],
        )
        grads = mtf.gradients([mtf.reduce_mean(mtf.square(out))], [w.value, u.value])
        operations = opt.apply_grads(grads, [w, u])
        assert opt.average(w).value.dtype == tf.bfloat16
        return operations, {}

    feeds = models.mlp_batches(steps)
    program = harness.built(mesh_kind, MESH, LAYOUT, build, feeds[0], autostack)
    expected = {name: np.full(models.INPUTS, np.float32(x), float) for name, x in start.items()}
    for found in program.after_each(feeds):
        for name in start:
            average = found[f"{name}/ExponentialMovingAverage"]
            expected[name] -= (1 - decay) * (expected[name] - found[name])
            # Three float32 roundings a step of numbers of about 1; bfloat16 rounds by 4e-3.
            np.testing.assert_allclose(average, expected[name], rtol=5e-7, err_msg=name)
    assert np.all(np.abs(found["w"] - start["w"]) > 1e-3)
    np.testing.assert_array_equal(found["still"], np.full(models.INPUTS, np.float32(1.0101)))
