"""Arguments that are tensors or variables: what is taken, and checked in each step."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness

MESH, LAYOUT, _ = harness.MESHES["2"]
AXES = gs.ReplicaAxes(MESH, LAYOUT)
D = 2
XLA = pytest.param("xla", marks=pytest.mark.xla)
KINDS = ["placement", "simd", XLA]


def sgd():
    return mtf.optimize.SgdOptimizer(1.0)


def accumulated(opt, passes=2, **kwargs):
    return gs.GradientAccumulationOptimizer(opt, passes, axes=AXES, **kwargs)


def in_pieces(step):
    return tf.where(tf.equal(step, 0), 1, tf.where(tf.equal(step, 1), -3, 2))


# For each an optimizer of a program's scalar `a`, values of `a` of which the last is wrong, and the
# error. Where an update takes two steps, the wrong one has none.
CHECKED = {
    "clip_norm": (
        lambda a: gs.ClipByGlobalNormOptimizer(sgd(), a),
        [np.inf, 0.0, 1.0, -1.0],
        r"ClipByGlobalNormOptimizer: clip_norm must be 0 or more, got\]? \[?-1",
    ),
    "clip_norm of sums": (
        lambda a: accumulated(gs.ClipByGlobalNormOptimizer(sgd(), a, name="clip")),
        [1.0, 1.0, np.nan],
        r"clip: clip_norm must be 0 or more, got\]? \[?nan",
    ),
    "decay": (
        lambda a: accumulated(gs.AverageOptimizer(sgd(), a)),
        [0.0, 0.5, 1.0],
        r"AverageOptimizer: the decay of averages must be from 0 up to 1 .* got\]? \[?1",
    ),
    "num_updates": (
        lambda a: gs.AverageOptimizer(sgd(), 0.5, num_updates=a),
        [0.0, 1.0, -1.0],
        r"AverageOptimizer: num_updates must be finite and 0 or more, got\]? \[?-1",
    ),
    "learning_rate": (
        lambda a: accumulated(gs.AdamWOptimizer(a)),
        [0.0, 1.0, np.inf],
        r"AdamWOptimizer: learning_rate must be finite and 0 or more, got\]? \[?inf",
    ),
    "K, tf": (
        lambda a: accumulated(sgd(), in_pieces),
        [1.0, 1.0],
        r"GradientAccumulationOptimizer: backward_passes_per_step must be 1 or more, .*-3",
    ),
    "K, mtf": (
        lambda a: accumulated(sgd(), lambda step: 1 - step, should_skip_update_fn=None),
        [1.0, 1.0],
        r"GradientAccumulationOptimizer: backward_passes_per_step must be 1 or more, got\]? \[?0",
    ),
}


def program(kind, make):
    def build(mesh, inputs):
        batch, d = mtf.Dimension("batch", 2), mtf.Dimension("d", D)
        ones = tf.ones_initializer()
        variables = [
            mtf.get_variable(mesh, name, mtf.Shape([d]), initializer=ones).operation
            for name in ("v", "w")
        ]
        x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([batch, d]))
        loss = mtf.reduce_mean(x * mtf.add_n([v.value for v in variables]))
        grads = mtf.gradients([loss], [v.value for v in variables])
        return make(inputs["a"]).apply_grads(grads, variables), {"loss": loss}

    feed = {"x": np.ones((2, D), "f"), "a": np.float32(0)}
    return harness.built(kind, MESH, LAYOUT, build, feed), feed


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *harness.on_both(zip(sorted(CHECKED)), [("clip_norm of sums",), ("decay",), ("K, mtf",)]),
        pytest.param("xla", "K, tf", marks=XLA.marks),
    ],
)
@pytest.mark.mostly_slow(every=4)
def test_a_step_checks_what_a_number_is_checked_for(kind, name):
    make, values, match = CHECKED[name]
    made, feed = program(kind, make)
    feeds = [{**feed, "a": np.float32(a)} for a in values]
    made.run(feeds[:-1])
    error = tf.errors.InvalidArgumentError if kind == "placement" else ValueError
    with pytest.raises(error, match=match):
        made.run(feeds)


def test_a_scalar_is_checked_once_for_all_variables(mesh_kind):
    made, _ = program(mesh_kind, lambda a: gs.CrossShardOptimizer(gs.AdamWOptimizer(a)))
    names = [op.name for op in made.lowering.graph.operations]
    assert sum(name.startswith("checked_argument") for name in names) == 1


def test_in_a_loop_a_wrong_value_is_no_wrong_gradient(mesh_kind):
    """A loop of a SIMD program tells nothing; its gradients are NaN."""

    def build(mesh, inputs):
        d = mtf.Dimension("d", D)
        x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([d]))

        def body(step, y):
            (y,), _ = gs.clip_by_global_norm([y], inputs["a"])
            return step + 1, y

        _, y = mtf.while_loop(
            lambda step, _: mtf.less(step, 2), body, [mtf.constant(mesh, 0, dtype=tf.int32), x]
        )
        return [], {"y": y}

    feed = {"x": np.ones(D, "f"), "a": np.float32(-1)}
    made = harness.built(mesh_kind, MESH, LAYOUT, build, feed)
    if mesh_kind == "placement":
        with pytest.raises(tf.errors.InvalidArgumentError, match="clip_norm must be 0 or more"):
            made.run([feed])
    else:
        assert np.isnan(made.run([feed]).fetched[0]["y"]).all()


def variable(value, dtype):
    return tf.get_variable(
        "given", np.shape(value), dtype, tf.constant_initializer(value), trainable=False
    )


# For each what is trained with a number, and with a variable.
TAKEN = {
    "learning_rate": (gs.AdamWOptimizer, 0.25, tf.float32),
    "clip_norm": (lambda x: gs.ClipByGlobalNormOptimizer(sgd(), x), 0.25, tf.float32),
    "decay": (lambda x: gs.AverageOptimizer(sgd(), x), 0.25, tf.float32),
    "flush": (lambda x: accumulated(sgd(), 3, flush=x), True, tf.bool),
    "contributes": (
        lambda x: gs.SyncReplicasOptimizer(sgd(), 1, contributes=x, axes=AXES),
        [True, False],
        tf.bool,
    ),
    "local_steps": (
        lambda x: gs.SyncReplicasOptimizer(sgd(), 1, local_steps=x, axes=AXES),
        [0, -1],
        tf.int32,
    ),
}


# Only placement meshes have ref variables.
@pytest.mark.parametrize(
    ("kind", "is_resource", "name"),
    [
        *(("simd", True, name) for name in sorted(TAKEN)),
        *(("placement", False, name) for name in sorted(TAKEN)),
        *(("placement", True, name) for name in ("decay", "flush")),
        pytest.param(*XLA.values, True, "local_steps", marks=XLA.marks),
    ],
)
@pytest.mark.mostly_slow(every=5)
def test_variables_are_taken_where_numbers_are(kind, is_resource, name):
    make, value, dtype = TAKEN[name]

    def given(_):
        with tf.variable_scope("", use_resource=is_resource):
            return make(variable(value, dtype))

    results = []
    for one in (given, lambda _: make(value)):
        made, feed = program(kind, one)
        feed["x"][0] = 3.0
        results.append(made.run([feed] * 2).variables)
    for key in ("v", "w"):
        np.testing.assert_array_equal(results[0][key], results[1][key])
        assert (results[0][key] != 1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_as_a_variable(kind):
    def build(mesh, inputs):
        batch, d = mtf.Dimension("batch", 2), mtf.Dimension("d", D)
        w = mtf.get_variable(mesh, "w", mtf.Shape([d]), initializer=tf.ones_initializer())
        x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([batch, d]))
        opt = accumulated(sgd(), 2, average_aggregated_gradients=True)
        weights = variable(3.0, tf.float32)
        return opt.minimize(mtf.reduce_mean(x * w), weights=weights), {}

    feeds = [{"x": np.full((2, D), value, "f")} for value in (1.0, 2.0)]
    w = harness.run(kind, MESH, LAYOUT, build, feeds).variables["w"]
    np.testing.assert_allclose(w, 1 - 1.5 / D, rtol=1e-6)


@pytest.mark.parametrize("average", [True, False], ids=["mean", "sum"])
def test_weights_of_any_size_with_narrow_sums(average, mesh_kind, caplog):
    """Only their ratios count, also where float16 holds neither weight nor product."""

    def build(mesh, inputs):
        batch, d = mtf.Dimension("batch", 2), mtf.Dimension("d", D)
        w = mtf.get_variable(mesh, "w", mtf.Shape([d]), initializer=tf.zeros_initializer())
        x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([batch, d]))
        weights = mtf.import_tf_tensor(mesh, inputs["weights"], mtf.Shape([]))
        opt = accumulated(
            sgd(), 2, average_aggregated_gradients=average, accumulator_dtype=tf.float16
        )
        return opt.minimize(mtf.reduce_mean(x * w), weights=weights), {}

    feeds = [
        {"x": np.full((2, D), x, "f"), "weights": np.float32(weight)}
        for x, weight in ((1.0, 1e5), (2.0, 3e5))
    ]
    with caplog.at_level("WARNING", "mtf_gradsync"):
        w = harness.run(mesh_kind, MESH, LAYOUT, build, feeds).variables["w"]
    mean = (1.0 * 1e5 + 2.0 * 3e5) / 4e5 / D
    np.testing.assert_allclose(w, -mean * (1 if average else 2), rtol=1e-6)
    assert [x.message for x in caplog.records if "65504" in x.message]
