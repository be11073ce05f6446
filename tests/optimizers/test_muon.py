"""MuonOptimizer against Keller Jordan's reference, written in numpy in float64."""

import math

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.optimizers import muon
from mtf_gradsync.optimizers.muon import Matrix
from tests import harness, models, reference, wrappers

SHAPE, LAYOUT = "rows:2;cols:2", "batch:rows;hidden:cols"
AXES = {"mesh_shape": SHAPE, "layout": LAYOUT}
STEPS = 3
# Split along the second, the first and no dimension; split and short, so that it stays split; with
# several outputs; with several inputs; experts, of which each is a matrix.
VARIABLES = {
    "wide": [("inputs", 6), ("hidden", 8)],
    "tall": [("hidden", 8), ("outputs", 4)],
    "whole": [("a", 5), ("b", 3)],
    "long": [("few", 2), ("hidden", 64)],
    "heads": [("model", 6), ("heads", 2), ("hidden", 4)],
    "o": [("hidden", 4), ("size", 3), ("model", 6)],
    "experts": [("expert", 2), ("model", 6), ("hidden", 8)],
}
# How many dimensions number matrices, and how many after them are inputs.
SIDES = {name: (0, 1) for name in VARIABLES} | {"o": (0, 2), "experts": (1, 1)}


def orthogonal(x):
    """zeropower_via_newtonschulz5, whose shorter side are rows."""
    transposed = x.shape[0] > x.shape[1]
    x = x.T if transposed else x
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        s = x @ x.T
        x = 3.4445 * x + (-4.7750 * s + 2.0315 * s @ s) @ x
    return x.T if transposed else x


def expected(values, gradients, rate, decay, nesterov=True):
    """The reference for matrices of inputs by outputs, after each step."""
    means = {k: np.zeros_like(v) for k, v in values.items()}
    for grads in gradients:
        for k, g in grads.items():
            means[k] = 0.95 * means[k] + 0.05 * g
            update = 0.95 * means[k] + 0.05 * g if nesterov else means[k]
            copies, inputs = SIDES[k]
            sides = math.prod(g.shape[copies : copies + inputs]), -1
            each = [x.reshape(sides) for x in (update if copies else [update])]
            update = np.stack([orthogonal(x) for x in each]).reshape(update.shape)
            update = update * max(1, each[0].shape[1] / each[0].shape[0]) ** 0.5
            values[k] = values[k] * (1 - rate * decay) - rate * update
        yield dict(values), dict(means)


def sizes(dims):
    return [n for _, n in dims]


def random(seed, size=1.0):
    rng = np.random.RandomState(seed)
    return {k: (rng.randn(*sizes(dims)) * size).astype("f") for k, dims in VARIABLES.items()}


def use(variable, copies, inputs):
    """Multiplies a variable by activations, which says what its inputs are."""
    dims, rows = variable.shape.dims, mtf.Dimension("examples", 2)
    given, outputs = dims[: copies + inputs], dims[copies + inputs :]
    x = mtf.ones(variable.mesh, mtf.Shape([*given, rows]))
    mtf.einsum([x, variable.value], [*dims[:copies], rows, *outputs])


def applied(make, names=tuple(VARIABLES)):
    def build(mesh, inputs):
        variables, grads = [], []
        for name in names:
            dims = VARIABLES[name]
            shape = mtf.Shape([mtf.Dimension(*d) for d in dims])
            variables.append(models.variable(mesh, name, shape, random(0)[name]).operation)
            grads.append(mtf.import_tf_tensor(mesh, inputs[f"gradient_of_{name}"], shape))
            use(variables[-1], *SIDES[name])
        return make().apply_grads(grads, variables), {}

    return build


@pytest.mark.parametrize(("size", "nesterov"), [(1.0, True), (1e-18, False), (1e18, True)])
@pytest.mark.mostly_slow
def test_three_updates_are_the_references(mesh_kind, size, nesterov):
    gradients = [random(seed, size) for seed in range(1, STEPS + 1)]
    feeds = [{f"gradient_of_{k}": v for k, v in grads.items()} for grads in gradients]

    def make():
        opt = gs.MuonOptimizer(0.02, nesterov=nesterov, weight_decay_rate=0.1)
        return gs.CrossShardOptimizer(opt, **AXES)

    program = harness.built(mesh_kind, SHAPE, LAYOUT, applied(make), feeds[0])
    values = {k: v.astype(np.float64) for k, v in random(0).items()}
    wide = [{k: v.astype(np.float64) / size for k, v in grads.items()} for grads in gradients]
    after = zip(program.after_each(feeds), expected(values, wide, 0.02, 0.1, nesterov))
    for number, (found, (value, mean)) in enumerate(after, 1):
        for k in VARIABLES:
            # Five steps raise an error of float32 in the smallest singular values by 3.4445^5.
            bound = number * 0.02 * 500 * 2**-22
            np.testing.assert_allclose(found[k], value[k], rtol=0, atol=bound, err_msg=k)
            found_mean = found[f"{k}/muon_m"].astype(np.float64) / size
            np.testing.assert_allclose(found_mean, mean[k], rtol=0, atol=2e-6, err_msg=k)


def test_which_matrices_stay_split():
    split, other = [mtf.Dimension("hidden", 64)], [mtf.Dimension("few", 2)]
    with tf.Graph().as_default():
        assert not muon._stays_split(other, split, 5)  # the mesh is not known
        harness.placement(SHAPE, LAYOUT)
        assert muon._stays_split(other, split, 5)  # 128 numbers, or 5 products of 4
        assert muon._stays_split([mtf.Dimension("few", 12)], split, 5)  # 768, or 5 of 144
        assert not muon._stays_split([mtf.Dimension("few", 13)], split, 5)  # 832, or 5 of 169
        assert not muon._stays_split(split, other, 5)
        assert muon._stays_split(other, [mtf.Dimension("b", 3)], 5)  # nothing to gather


def sent(size):
    """The bytes that a core of a SIMD program sends for the update of a split matrix."""

    def build(mesh, inputs):
        shape = mtf.Shape([mtf.Dimension("few", size), mtf.Dimension("hidden", 64)])
        w = mtf.get_variable(mesh, "w", shape, initializer=tf.ones_initializer()).operation
        grad = mtf.import_tf_tensor(mesh, inputs["gradient"], shape)
        return gs.MuonOptimizer(0.02).apply_grads([grad], [w]), {}

    feed = {"gradient": np.ones([size, 64], "f")}
    made = harness.built("simd", SHAPE, LAYOUT, build, feed)
    rows = made.collectives().rows
    assert {row.operation for row in rows} == {"CrossReplicaSum"}
    return sum(row.bytes_per_core for row in rows)


@pytest.mark.parametrize(("size", "stays_split"), [(12, True), (13, False)])
def test_of_both_ways_the_one_with_fewer_bytes_is_taken(size, stays_split, monkeypatch):
    """By the program's collectives: one sum of the matrix, or one for each product and norm."""
    chosen, both = sent(size), {}
    for stays in (True, False):
        monkeypatch.setattr(muon, "_stays_split", lambda *_, stays=stays: stays)
        both[stays] = sent(size)
    assert both == {True: 4 * (5 * size**2 + 2), False: 4 * size * 64}
    assert chosen == both[stays_split] == min(both.values())


def test_zeros_stay_zeros_and_others_are_nearly_orthogonal():
    def build(mesh, inputs):
        shape = mtf.Shape([mtf.Dimension("a", 12), mtf.Dimension("b", 7)])
        given = {k: mtf.import_tf_tensor(mesh, x, shape) for k, x in inputs.items()}
        return [], {k: muon.orthogonal(x, 5, Matrix((0,), (1,))) for k, x in given.items()}

    random = np.random.RandomState(0).randn(12, 7).astype("f")
    feed = {"zeros": np.zeros((12, 7), "f"), "matrix": random}
    (made,) = harness.run("placement", *harness.ONE, build, [feed]).fetched
    assert not made["zeros"].any()
    found = np.linalg.svd(made["matrix"], compute_uv=False)
    assert found.min() > 0.6
    assert found.max() < 1.3


@pytest.mark.parametrize(
    ("kind", "wrapper"), harness.pairs(["simd", "placement", "xla"], wrappers.ALIKE)
)
@pytest.mark.mostly_slow(keep="simd-one island")
def test_in_every_wrapper(kind, wrapper):
    passes, batch = wrappers.passes(wrapper), mtf.Dimension("batch", 4)
    rng, names = np.random.RandomState(7), ("tall", "o", "experts")
    feeds = [
        {f"x_{k}": rng.randn(4, *sizes(VARIABLES[k])).astype("f") for k in names}
        for _ in range(2 * passes)
    ]

    def build(mesh, inputs):
        """Losses whose gradients are the means of what is fed."""
        losses = []
        for name in names:
            shape = mtf.Shape([mtf.Dimension(*d) for d in VARIABLES[name]])
            variable = models.variable(mesh, name, shape, random(0)[name])
            use(variable.operation, *SIDES[name])
            x = mtf.import_tf_tensor(mesh, inputs[f"x_{name}"], mtf.Shape([batch, *shape.dims]))
            each = mtf.reduce_sum(x * variable, output_shape=mtf.Shape([batch]))
            losses.append(mtf.reduce_mean(each))
        grads, variables = models.gradients(mtf.add_n(losses))
        opt = gs.MuonOptimizer(0.02, weight_decay_rate=0.1)
        return wrappers.wrap(wrapper, opt, AXES).apply_grads(grads, variables), {}

    found = harness.run(kind, SHAPE, LAYOUT, build, feeds).variables
    gradients = [
        {k: np.mean([feed[f"x_{k}"] for feed in some], (0, 1), float) for k in names}
        for some in (feeds[:passes], feeds[passes:])
    ]
    values = {k: v.astype(np.float64) for k, v in random(0).items() if k in names}
    *_, (value, _) = expected(values, gradients, 0.02, 0.1)
    reference.assert_close(found, value, atol=2 * 0.02 * 500 * 2**-22)


@pytest.mark.mostly_slow
def test_islands_update_by_their_own_gradients(mesh_kind):
    """Each row of the mesh is an island, whose matrices are split over its two processors."""
    inner_steps = 2
    dims = [mtf.Dimension("model", 6), mtf.Dimension("hidden", 8)]
    rng = np.random.RandomState(0)
    first = rng.randn(6, 8).astype("f")
    feeds = [{"x": rng.randn(4, 6, 8).astype("f")} for _ in range(4)]

    def build(mesh, inputs):
        w = mtf.get_variable(mesh, "w", dims, initializer=tf.constant_initializer(first)).operation
        batch = mtf.Dimension("batch", 4)
        x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([batch, *dims]))
        each = mtf.reduce_sum(x * w.value, output_shape=[batch])
        opt = gs.OuterOptimizer(
            gs.MuonOptimizer(0.02),
            inner_steps,
            outer_learning_rate=1.0,
            outer_momentum=0.0,
            **AXES,
        )
        return opt.minimize(mtf.reduce_mean(each)), {}

    found = harness.built(mesh_kind, SHAPE, LAYOUT, build, feeds[0]).after_each(feeds)
    of_islands = [first.astype(np.float64)] * 2
    means = [np.zeros((6, 8))] * 2
    for step, feed in enumerate(feeds):
        for island in range(2):
            g = feed["x"][2 * island : 2 * island + 2].mean(0, np.float64)
            means[island] = 0.95 * means[island] + 0.05 * g
            update = orthogonal(0.95 * means[island] + 0.05 * g) * (8 / 6) ** 0.5
            of_islands[island] = of_islands[island] - 0.02 * update
        if (step + 1) % inner_steps == 0:
            of_islands = [np.mean(of_islands, 0)] * 2
            bound = (step + 1) * 0.02 * 500 * 2**-22
            np.testing.assert_allclose(found[step]["w"], of_islands[0], rtol=0, atol=bound)
    assert {"w/muon_m/island", "w/muon_m"} & set(found[-1])


def test_a_vector_is_refused_before_anything_is_built():
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        b = mtf.get_variable(mesh, "b", mtf.Shape([mtf.Dimension("a", 3)])).operation
        before = len(mesh.graph.operations)
        with pytest.raises(ValueError, match=r"'b' of shape .* gs.ByVariable"):
            gs.MuonOptimizer(0.02).apply_grads([b.value * 1.0], [b])
        with pytest.raises(ValueError, match=r"'b' of shape .* gs.ByVariable"):
            gs.MuonOptimizer(0.02).apply_grad(b.value, b)
        assert len(mesh.graph.operations) == before + 1  # the product above


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"momentum": 1.0}, ValueError),
        ({"steps": 0}, ValueError),
        ({"nesterov": "False"}, TypeError),
        ({"weight_decay_rate": -1.0}, ValueError),
        ({"learning_rate": "0.1"}, TypeError),
    ],
)
def test_bad_arguments(arguments, error):
    with pytest.raises(error, match=next(iter(arguments))):
        gs.MuonOptimizer(**{"learning_rate": 0.02, **arguments})
