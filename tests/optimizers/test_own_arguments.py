"""An optimizer whose apply_grads takes more than gradients and variables gets what was given."""

import itertools

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models, reference, wrappers

SHAPE, LAYOUT, BATCH_DIMS = harness.MESHES["2"]
AXES = {"mesh_shape": SHAPE, "layout": LAYOUT}
SCALE, NORM = 128.0, 0.2
FACTORS = (1.0, 2.0, 1.0, 4.0)
# As for CrossShardOptimizer's trajectories.
TOLERANCE = len(FACTORS) * 16 * np.finfo(np.float32).eps


class Divides:
    """An optimizer of no class of Mesh-TF's, that divides gradients by a scale."""

    def apply_grads(self, grads, variables, grad_scale, rate=0.01):
        return [
            mtf.assign(variable, variable.value - grad / grad_scale * rate)
            for grad, variable in zip(grads, variables)
            if grad is not None
        ]


# How the scale is given, by turns. Islands would each have a scale of their own.
WRAPPERS = dict(
    zip(
        sorted({*wrappers.KINDS} - {"islands"}),
        itertools.cycle(["pending", "tf tensor", "mesh tensor"]),
    )
)


def wrap(name, opt):
    """Makes a wrapper whose update is of the sum of its steps, or of replicas the mean."""
    return wrappers.wrap(
        name,
        opt,
        AXES,
        clip_norm=NORM * SCALE,
        loss_scale=64.0,
        average_aggregated_gradients=False,
        replicas_to_aggregate=4,
    )


def given(form, mesh, weights):
    """The scale of a step: SCALE times the sum of weights of the examples."""
    if form == "tf tensor":
        return tf.reduce_sum(weights) * SCALE
    batch = models.batch_shape(BATCH_DIMS)
    factor = mtf.reduce_sum(mtf.import_tf_tensor(mesh, weights, mtf.Shape(batch)))
    # Divided, the sum over the batch is made; only multiplied, it is pending.
    return SCALE / (1.0 / factor) if form == "mesh tensor" else factor * SCALE


def expected(every, average, clips):
    values = {k: np.asarray(v, np.float64) for k, v in models.mlp_values().items()}
    step = reference.Accumulation(None, every, average)
    for feed, factor in zip(models.mlp_batches(len(FACTORS)), FACTORS):
        update = reference.Sgd(0.01 / factor)
        step.update = reference.Clipped(update, NORM) if clips else update
        grads = reference.mlp_grads(values, *(feed[k].astype(np.float64) for k in "xy"))
        values = step(values, grads)
    return values


CASES = [(kind, name) for kind in ("placement", "simd") for name in sorted(WRAPPERS)]
CASES.append(pytest.param("xla", "loss_scale", marks=pytest.mark.xla))


@pytest.mark.parametrize(("kind", "name"), CASES)
@pytest.mark.mostly_slow(every=5)
def test_an_update_uses_the_argument_of_its_step(kind, name):
    every = 2 if name == "replicas" else wrappers.passes(name)

    def build(mesh, inputs):
        loss = models.mlp_loss(mesh, inputs, BATCH_DIMS) * SCALE
        grad_scale = given(WRAPPERS[name], mesh, inputs["weights"])
        return wrap(name, Divides()).minimize(
            loss, tf.train.get_or_create_global_step(), grad_scale=grad_scale
        ), {}

    feeds = [
        {**feed, "weights": np.full(models.BATCH, factor / models.BATCH, "f")}
        for feed, factor in zip(models.mlp_batches(len(FACTORS)), FACTORS)
    ]
    made = harness.built(kind, SHAPE, LAYOUT, build, feeds[0])
    assert kind != "placement" or not made.races()
    found = made.run(feeds).variables
    reference.assert_close(found, expected(every, name == "replicas", name == "clip"), TOLERANCE)


def parts():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    features = mtf.Dimension("d", 8)
    w = mtf.get_variable(mesh, "w", mtf.Shape([features])).operation
    loss = mtf.reduce_sum(mtf.square(w.value))
    return mesh, mtf.gradients([loss], [w.value]), [w]


class Keeps:
    """Keeps what it is called with."""

    def apply_grads(self, grads, variables, grad_scale=1.0, *, rate=0.1):
        self.got = grad_scale, rate
        return [mtf.assign(v, v.value - g) for g, v in zip(grads, variables)]


@pytest.mark.parametrize("name", sorted(WRAPPERS))
def test_arguments_by_position_and_by_name_in_every_call(name):
    inner = Keeps()
    with tf.Graph().as_default():
        _, grads, variables = parts()
        wrap(name, inner).apply_grads(grads, variables, 2.0, rate=3.0)
    assert inner.got == (2.0, 3.0)
    with tf.Graph().as_default():
        _, grads, variables = parts()
        optimizer = wrap(name, inner)
        optimizer.apply_grad(grads[0], variables[0], 4.0)
        assert optimizer.step is not None  # what the pairs so far come to
    assert inner.got == (4.0, 0.1)
    with tf.Graph().as_default():
        mesh, grads, variables = parts()
        count = mtf.get_variable(mesh, "count", mtf.Shape([]), dtype=tf.int32, trainable=False)
        wrap(name, inner).apply_gradients(list(zip(grads, variables)), count, rate=5.0)
    assert inner.got == (1.0, 5.0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda o, g, v: o(Keeps()).apply_grads(g, v, scale=2.0), "Keeps.*scale=2.0.*'scale'"),
        (lambda o, g, v: o(Keeps()).apply_grads(g, v, 1.0, 2.0), "too many positional"),
        (lambda o, g, v: o(Keeps()).apply_grads(g, v, 1.0, grad_scale=2.0), "grad_scale"),
        (lambda o, g, v: o(Divides()).apply_grads(g, v), r"'grad_scale'.*grad_scale, rate=0\.01\)"),
        (lambda o, g, v: o(Divides()).apply_grads([None], v), "'grad_scale'"),
        (lambda o, g, v: o(Divides()).minimize(mtf.reduce_sum(v[0].value)), "'grad_scale'"),
        (
            lambda o, g, v: o(mtf.optimize.SgdOptimizer(0.1)).apply_grads(g, v, grad_scale=2.0),
            r"SgdOptimizer.*grad_scale=2\.0",
        ),
        (
            lambda o, g, v: o(gs.MeshOptimizer(tf.train.AdamOptimizer())).apply_grads(g, v, 2.0),
            "MeshOptimizer",
        ),
    ],
)
def test_what_the_optimizer_does_not_take_is_an_error(call, words):
    mesh, grads, variables = parts()
    before = list(mesh.graph.all_variables)
    with pytest.raises(TypeError, match=words):
        call(
            lambda opt: gs.ClipByGlobalNormOptimizer(gs.CrossShardOptimizer(opt), 1.0),
            grads,
            variables,
        )
    assert mesh.graph.all_variables == before


def test_a_tensor_of_a_split_dimension_is_refused_by_sharded_updates():
    _, grads, variables = parts()
    opt = wrap("sharded", Keeps())
    with pytest.raises(ValueError, match=r"argument grad_scale of shape Shape\[d=8\]"):
        opt.apply_grads(grads, variables, grad_scale={"w": grads[0]})
    assert not hasattr(opt.opt, "got")


def test_the_wrapper_s_own_loss_scale_is_refused_as_an_argument():
    _, _, variables = parts()
    opt = gs.LossScaleOptimizer(Keeps())
    pairs = opt.compute_gradients(mtf.reduce_sum(mtf.square(variables[0].value)))
    with pytest.raises(
        ValueError, match=r"grad_scale .* is computed from the scale of LossScaleOptimizer"
    ):
        opt.apply_gradients(pairs, grad_scale=1.0 / opt.scale.value)
    # A norm of gradients is theirs, though the scale was in them.
    opt.apply_gradients(pairs, grad_scale=mtf.reduce_sum(mtf.square(pairs[0][0])))
    assert opt.opt.got
