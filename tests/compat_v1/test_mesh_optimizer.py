"""Mesh variables move as TensorFlow's optimizers move its own, and so do all slots."""

import functools

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.compat_v1.mesh_optimizer import RULES
from tests import harness, models
from tests.compat_v1 import optimizers
from tests.compat_v1.optimizers import OPTIMIZERS
from tests.sessions import ran

WRAPPERS = {
    "bare": lambda opt: opt,
    "cross shard": gs.CrossShardOptimizer,
    "clipped": lambda opt: gs.ClipByGlobalNormOptimizer(opt, 1e6),
}


ONE_OF_EACH_CLASS = ["sgd", "nesterov", "adagrad", "adam", "centered", "adadelta", "ftrl"]


@functools.lru_cache(maxsize=None)
def original(name):
    """What TensorFlow's own optimizer makes of the variables."""
    return optimizers.plain_training(OPTIMIZERS[name], optimizers.batches())


def build(name, wrapper="cross shard"):
    def model(mesh, inputs):
        loss, variables = optimizers.mesh_model(mesh, inputs)
        optimizer = WRAPPERS[wrapper](gs.MeshOptimizer(OPTIMIZERS[name]()))
        if wrapper == "bare":
            grads = mtf.gradients([loss], [v.value for v in variables])
            return optimizer.apply_grads(grads, variables), {"loss": loss}
        step = tf.train.get_or_create_global_step()
        return optimizer.minimize(loss, step, variables), {"loss": loss}

    return model


@pytest.mark.parametrize(
    ("kind", "name", "wrapper"),
    [
        # A compilation takes several times as long as the run of the same program on CPU replicas.
        *(("xla", name, "cross shard") for name in ("adam", "centered", "ftrl", "tensors")),
        *(("simd", name, "clipped") for name in OPTIMIZERS),
        *(("placement", name, "bare") for name in ONE_OF_EACH_CLASS),
        *(("placement", name, "cross shard") for name in ("tensors", "decayed")),
    ],
)
@pytest.mark.mostly_slow(every=7)
def test_variables_and_every_slot_move_like_the_original(kind, name, wrapper):
    mesh_shape, layout, _ = harness.MESHES["2x2" if kind == "xla" else "2"]
    result = harness.run(kind, mesh_shape, layout, build(name, wrapper), optimizers.batches())
    expected = dict(original(name))
    if wrapper == "bare":
        del expected["global_step"]
    optimizers.assert_close(result.variables, expected)


ACCUMULATING = {
    "accumulated": lambda opt, axes: gs.GradientAccumulationOptimizer(
        opt, 2, average_aggregated_gradients=True, axes=axes
    ),
    "accumulated whole": lambda opt, axes: gs.GradientAccumulationOptimizer(
        opt, 2, average_aggregated_gradients=True
    ),
    "two steps for an update": lambda opt, axes: gs.SyncReplicasOptimizer(
        opt, 2 * axes.num_shards, axes=axes
    ),
    "with clipping": lambda opt, axes: gs.GradientAccumulationOptimizer(
        gs.ClipByGlobalNormOptimizer(opt, 1e6), 2, average_aggregated_gradients=True, axes=axes
    ),
}


@pytest.mark.parametrize(
    ("kind", "wrapper", "name"),
    [
        ("xla", "with clipping", "ftrl"),
        *(("simd", *case) for case in harness.pairs(ACCUMULATING, ["tensors", "centered"])),
        ("placement", "accumulated", "adadelta"),
        ("placement", "two steps for an update", "tensors"),
    ],
)
@pytest.mark.mostly_slow
def test_inside_a_wrapper_that_waits_two_steps_make_the_update_of_both_batches(kind, wrapper, name):
    feeds = optimizers.batches(20)
    doubled = [
        {key: np.concatenate([first[key], second[key]]) for key in first}
        for first, second in zip(feeds[::2], feeds[1::2])
    ]
    mesh_shape, layout, batch_dims = harness.MESHES["2"]
    axes = gs.ReplicaAxes(mesh_shape, layout, batch_dims)

    def model(mesh, inputs):
        loss, variables = optimizers.mesh_model(mesh, inputs)
        optimizer = ACCUMULATING[wrapper](gs.MeshOptimizer(OPTIMIZERS[name]()), axes)
        grads = mtf.gradients([loss], [v.value for v in variables])
        slots = optimizer.apply_grads(grads, variables)
        assert optimizer.get_slot(variables[0], "nothing") is None
        first = gs.MeshOptimizer(OPTIMIZERS[name]()).get_slot_names()[0]
        assert optimizer.get_slot(variables[0], first).shape == variables[0].shape
        return slots, {"loss": loss}

    result = harness.run(kind, mesh_shape, layout, model, feeds)
    expected = optimizers.plain_training(OPTIMIZERS[name], doubled)
    del expected["global_step"]
    own = {key: result.variables[key] for key in expected}
    optimizers.assert_close(own, expected)


def mesh_variable(mesh, name, dtype=tf.float32):
    shape = mtf.Shape([mtf.Dimension("features", 4)])
    return models.variable(mesh, name, shape, 1, dtype=dtype).operation


def test_a_second_optimizer_takes_the_next_free_names_as_in_tensorflow():
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    variables = [mesh_variable(mesh, name) for name in ("a", "b")]
    grads = [v.value * 2.0 for v in variables]
    first, second = (gs.MeshOptimizer(tf.train.AdamOptimizer(0.1)) for _ in range(2))
    first.apply_grads(grads, variables)
    second.apply_grads(grads[:1], variables[:1])
    with tf.variable_scope("anywhere"):
        first.apply_grads(grads, variables)
    names = ["a", "b", "beta1_power", "beta2_power", "a/Adam", "a/Adam_1", "b/Adam", "b/Adam_1"]
    with tf.Graph().as_default():
        a, b = (tf.get_variable(n, [4], use_resource=True) for n in ("a", "b"))
        for used in ([a, b], [a]):
            tf.train.AdamOptimizer(0.1).apply_gradients([(v * 2.0, v) for v in used])
        originals = {v.op.name for v in tf.global_variables()}
    assert {v.name for v in graph.all_variables} == originals > set(names)
    assert [v.name for v in second.variables()] == ["a/Adam_2", "a/Adam_3", *(
        f"beta{i}_power_1" for i in (1, 2)
    )]  # fmt: skip
    assert first.get_slot(variables[1], "v").name == "b/Adam_1"
    assert second.get_slot(variables[1], "v") is None
    assert first.get_slot_names() == ["m", "v"]
    wrapper = gs.CrossShardOptimizer(second)
    assert wrapper.get_slot(variables[0], "m").name == "a/Adam_2"
    assert wrapper.get_slot_names() == ["m", "v"]


def test_names_follow_scopes_as_tensorflows_do():
    def scoped(apply):
        with tf.variable_scope("model"), tf.name_scope("inner"):
            apply()
        with tf.name_scope("train"):
            apply()

    with tf.Graph().as_default():
        w = tf.get_variable("w", [4], use_resource=True)
        scoped(lambda: tf.train.AdamOptimizer(0.1).apply_gradients([(w * 2.0, w)]))
        expected = {v.op.name for v in tf.global_variables()}
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        w = mesh_variable(mesh, "w")
        adam = tf.train.AdamOptimizer(0.1)
        scoped(lambda: gs.MeshOptimizer(adam).apply_grads([w.value * 2.0], [w]))
        assert {v.op.name for v in tf.global_variables()} == expected
    assert {"model/w/Adam", "w/Adam", "model/inner/beta1_power", "train/beta1_power"} < expected


def test_powers_take_names_that_are_free_in_tensorflows_graph():
    with tf.Graph().as_default():
        plain = tf.get_variable("plain", [4], use_resource=True)
        tf.train.AdamOptimizer(0.1).apply_gradients([(plain * 2.0, plain)])
        names = []
        for name in ("a", "b"):
            mesh = mtf.Mesh(mtf.Graph(), "mesh")
            variable = mesh_variable(mesh, name)
            optimizer = gs.MeshOptimizer(tf.train.AdamOptimizer(0.1))
            optimizer.apply_grads([variable.value], [variable])
            names += [v.name for v in optimizer.variables()][2:]
        assert names == [f"beta{i}_power_{n}" for n in (1, 2) for i in (1, 2)]


class Broken(mtf.optimize.Optimizer):
    """Makes the slots of an optimizer, and then fails."""

    def __init__(self, inner):
        self.inner = inner

    def apply_grads(self, grads, variables):
        self.inner.apply_grads(grads, variables)
        raise RuntimeError("no luck")


def test_an_error_leaves_no_slots_behind():
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    a, b = (mesh_variable(mesh, name) for name in ("a", "b"))
    optimizer = gs.MeshOptimizer(tf.train.MomentumOptimizer(0.1, 0.9))
    optimizer.apply_grads([a.value], [a])
    with harness.unchanged(graph, tensorflow=False), pytest.raises(RuntimeError, match="no luck"):
        gs.CrossShardOptimizer(Broken(optimizer)).apply_grads([b.value], [b])
    with tf.variable_scope("", reuse=tf.AUTO_REUSE):
        operations = optimizer.apply_grads([b.value], [b])
    lowering = mtf.Lowering(graph, {mesh: harness.placement("all:2", "features:all")})
    assert [lowering.lowered_operation(op) for op in operations]
    assert [v.name for v in optimizer.variables()] == ["a/Momentum", "b/Momentum"]


@pytest.mark.parametrize(
    "rate",
    [
        lambda mesh: tf.constant(0.5, tf.float64),
        lambda mesh: tf.constant(1, tf.int32),
        lambda mesh: tf.get_variable("rate", initializer=np.float64(0.5), use_resource=True),
        lambda mesh: np.float32(0.5),
        lambda mesh: mtf.constant(mesh, 0.5, dtype=tf.bfloat16),
        lambda mesh: mtf.constant(mesh, 1, dtype=tf.int32),
        lambda mesh: mtf.constant(mesh, 0.5, dtype=tf.float64),
    ],
)
@pytest.mark.parametrize(
    "make",
    [
        lambda rate: tf.train.AdamOptimizer(rate, epsilon=1e-8),
        lambda rate: tf.train.AdamOptimizer(rate, tf.constant(0.9, tf.float64)),
        lambda rate: tf.train.MomentumOptimizer(rate, 0.9),
    ],
)
def test_scalars_of_every_dtype(rate, make):
    given = []

    def build(mesh, inputs):
        variable = mesh_variable(mesh, "a")
        given.append(rate(mesh))
        optimizer = gs.MeshOptimizer(make(given[0]))
        return optimizer.apply_grads([mtf.ones(mesh, variable.shape)], [variable]), {}

    values = harness.run("placement", "all:2", "features:all", build, [{}]).variables
    # The first step of either is the learning rate, for a gradient of ones.
    left = 1.0 - (1.0 if given[0].dtype == tf.int32 else 0.5)
    np.testing.assert_allclose(values["a"], np.full(4, left), atol=1e-5)


def test_what_a_variable_begins_with_is_no_mtf_tensor():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    variable = mesh_variable(mesh, "a")
    beta = mtf.constant(mesh, 0.9, dtype=tf.float32)
    optimizer = gs.MeshOptimizer(tf.train.AdamOptimizer(0.1, beta))
    with pytest.raises(ValueError, match="'beta1_power' of Adam begins with"):
        optimizer.apply_grads([variable.value], [variable])
    assert len(mesh.graph.all_variables) == 1


def test_hyperparameters_that_are_functions_are_called_once_a_step():
    def rate():
        return tf.get_variable("rate", initializer=0.1)  # a second call would fail

    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    some = [mesh_variable(mesh, name) for name in "ab"]
    opt = gs.LossScaleOptimizer(gs.MeshOptimizer(tf.train.AdamOptimizer(rate)))
    assert opt.minimize(mtf.add_n([mtf.reduce_sum(v.value) for v in some]))


def test_names_of_slots_call_no_function():
    def fails():
        raise AssertionError

    assert gs.MeshOptimizer(tf.train.RMSPropOptimizer(fails)).get_slot_names() == [
        "momentum",
        "rms",
    ]


def test_none_gradients_make_no_slots():
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    variables = [mesh_variable(mesh, name) for name in ("a", "b")]
    optimizer = gs.MeshOptimizer(tf.train.MomentumOptimizer(0.1, 0.9))
    assert optimizer.apply_grads([None, None], variables) == []
    assert optimizer.variables() == []
    optimizer.apply_grads([None, variables[1].value], variables)
    assert [v.name for v in optimizer.variables()] == ["b/Momentum"]
    assert len(optimizer.apply_grad(variables[0].value, variables[0])) == 2


@pytest.mark.parametrize("dtype", [tf.float64, tf.bfloat16])
def test_slots_have_the_dtype_of_the_master(dtype):
    def build(mesh, inputs):
        kind = mtf.VariableDType(dtype, dtype, tf.float32)
        variable = mesh_variable(mesh, "a", kind)
        optimizer = gs.MeshOptimizer(tf.train.AdamOptimizer(0.5))
        return optimizer.apply_grads([variable.value * 3.0], [variable]), {}

    values = harness.run("placement", "all:2", "features:all", build, [{}]).variables
    assert {v.dtype for n, v in values.items() if "power" not in n} == {
        np.dtype(dtype.as_numpy_dtype)
    }
    # Adam's first step is the learning rate.
    np.testing.assert_allclose(values["a"].astype(np.float64), np.full(4, 0.5), rtol=1e-2)
    np.testing.assert_allclose(values["a/Adam"].astype(np.float64), np.full(4, 0.3), rtol=1e-2)


class MyAdam(tf.train.AdamOptimizer):
    """A class of a user's may update otherwise."""


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ([MyAdam(0.1)], TypeError, "AdagradOptimizer, AdamOptimizer.*MyAdam"),
        ([tf.train.ProximalAdagradOptimizer(0.1)], TypeError, "RMSPropOptimizer.*ProximalAdagrad"),
        ([mtf.optimize.SgdOptimizer(0.1)], TypeError, "SgdOptimizer"),
        ([tf.train.AdamOptimizer], ValueError, "give learning_rate"),
        ([tf.train.AdamOptimizer(0.1), 0.1], ValueError, "has its learning rate"),
        ([3], ValueError, "got 3"),
    ],
)
def test_what_it_does_not_know_is_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        gs.MeshOptimizer(*arguments)


def test_classes_and_factories_get_the_learning_rate():
    assert gs.MeshOptimizer(tf.train.AdamOptimizer, 0.1).opt.get_name() == "Adam"
    made = gs.MeshOptimizer(
        lambda learning_rate: tf.train.MomentumOptimizer(learning_rate, 0.9), learning_rate=0.1
    )
    assert type(made.opt) in RULES


def test_gradients_that_do_not_fit_are_refused():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    variable = mesh_variable(mesh, "a")
    optimizer = gs.MeshOptimizer(tf.train.AdamOptimizer(0.1))
    with pytest.raises(ValueError, match="same length"):
        optimizer.apply_grads([], [variable])
    with pytest.raises(ValueError, match="'a' has shape"):
        optimizer.apply_grads([mtf.reduce_sum(variable.value)], [variable])
    assert len(mesh.graph.all_variables) == 1


CHECKPOINTED = ["adam", "centered", "ftrl named", "momentum"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *harness.pairs(["placement", "simd", "xla"], CHECKPOINTED),
        ("xla", "adam"),
        ("placement", "adam"),
    ],
)
@pytest.mark.mostly_slow
def test_checkpoints_go_on_with_a_mesh_and_without(tmp_path, kind, name):
    feeds = optimizers.batches(30)
    plain, meshed = str(tmp_path / "plain"), str(tmp_path / "meshed")
    optimizers.plain_training(OPTIMIZERS[name], feeds[:10], checkpoint=plain)
    mesh_shape, layout, _ = harness.MESHES["2x2"]
    made = harness.built(kind, mesh_shape, layout, build(name), feeds[0])
    ran(made, feeds[10:20], plain, meshed, tf.train.Saver)
    got = optimizers.plain_training(OPTIMIZERS[name], feeds[20:], restore=meshed)
    assert got["global_step"] == 30
    optimizers.assert_close(got, optimizers.plain_training(OPTIMIZERS[name], feeds))
