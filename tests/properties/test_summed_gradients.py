"""Gradients in which shards are not recoverable are an error, or accepted by who says so."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness
from tests.properties.models import small_models, training, uses

MESH, LAYOUT, BATCH_DIMS = harness.MESHES["2x2"]
AXES = gs.ReplicaAxes(MESH, LAYOUT)
MODEL = small_models.regression(
    lambda m, v: v["weights"] * v["gain"] - v["offset"],
    variables={"weights": uses.W, "gain": [], "offset": uses.W},
)
NAMES = list(MODEL.variables)
RATE = 0.1


def by_norm(grads, norm_of):
    """Clipped by a norm, as programs do themselves."""
    norm = mtf.sqrt(mtf.add_n([mtf.reduce_sum(mtf.square(g)) for g in norm_of]))
    return [g * mtf.reciprocal(mtf.maximum(norm, 0.01)) * 0.01 for g in grads]


def in_numpy_by_norm(grads, norm_of):
    norm = np.sqrt(sum(np.sum(g**2) for g in norm_of))
    return [g / max(norm, 0.01) * 0.01 for g in grads]


def first(change):
    """A change of the first gradient alone."""
    return lambda grads: [change(*grads), *grads[1:]]


# What is done with gradients of the weights, the gain and the offset before they are applied: in
# Mesh-TF, in numpy, and which of the three no longer tell shards apart.
MIXED = {
    "square": (first(lambda w, s, b: mtf.square(w)), first(lambda w, s, b: w**2), NAMES[:1]),
    "product": (first(lambda w, s, b: w * b), first(lambda w, s, b: w * b), NAMES[:1]),
    "product with a scalar": (
        first(lambda w, s, b: w * s),
        first(lambda w, s, b: w * s),
        NAMES[:1],
    ),
    "quotient": (
        first(lambda w, s, b: w * mtf.reciprocal(s)),
        first(lambda w, s, b: w / s),
        NAMES[:1],
    ),
    "minimum": (
        first(lambda w, s, b: mtf.minimum(w, 0.05)),
        first(lambda w, s, b: np.minimum(w, 0.05)),
        NAMES[:1],
    ),
    "square behind linear operations": (
        first(lambda w, s, b: -(mtf.square(2.0 * w) + b)),
        first(lambda w, s, b: -((2 * w) ** 2 + b)),
        NAMES[:1],
    ),
    "relu": (
        first(lambda w, s, b: mtf.relu(w)),
        first(lambda w, s, b: np.maximum(w, 0)),
        NAMES[:1],
    ),
    "clipped by the norm of all": (
        lambda grads: by_norm(grads, grads),
        lambda grads: in_numpy_by_norm(grads, grads),
        NAMES,
    ),
    "clipped by the norm of another": (
        lambda grads: [*by_norm(grads[:1], grads[1:]), *grads[1:]],
        lambda grads: [*in_numpy_by_norm(grads[:1], grads[1:]), *grads[1:]],
        NAMES[:1],
    ),
    "gs.clip_by_global_norm": (
        lambda grads: gs.clip_by_global_norm(grads, 0.01)[0],
        lambda grads: in_numpy_by_norm(grads, grads),
        NAMES,
    ),
}


def changed(mesh, inputs, change):
    """Changed gradients, their variables, and the operations that changed them."""
    grads, variables = training.gradients_on(MODEL, mesh, inputs, BATCH_DIMS)
    before = len(mesh.graph.operations)
    grads = change(grads)
    return grads, variables, mesh.graph.operations[before:]


def sync_replicas(**kwargs):
    return gs.SyncReplicasOptimizer(mtf.optimize.SgdOptimizer(RATE), 2, axes=AXES, **kwargs)


def refused(change, take):
    """Expects an error of `take`, which is given gradients and variables.

    Returns:
      What it says, and the operations that changed the gradients.
    """
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    inputs = {k: tf.constant(v) for k, v in small_models.batches(1)[0].items()}
    grads, variables, operations = changed(mesh, inputs, change)
    words = "are not recoverable"
    with harness.unchanged(mesh.graph), pytest.raises(ValueError, match=words) as error:
        take(grads, variables)
    return str(error.value), operations


def names_operation(text, operations):
    return any(repr(op.name) in text or f" {op.name}" in text for op in operations)


@pytest.mark.parametrize("what", list(MIXED))
def test_synchronous_replicas_name_variables_and_operations(what):
    change, _, mixed = MIXED[what]
    text, operations = refused(change, lambda *given: sync_replicas().apply_grads(*given))
    for name in NAMES:
        assert (name in text) == (name in mixed), text
    assert names_operation(text, operations), text
    assert "accept_summed" in text


STAGES = {
    "per_shard": lambda grads, **kwargs: gs.per_shard(grads, AXES, **kwargs),
    "clip_by_shard_norm": lambda grads, **kwargs: gs.clip_by_shard_norm(grads, 1e6, AXES, **kwargs)[
        0
    ],
}


@pytest.mark.parametrize("stage", list(STAGES))
@pytest.mark.parametrize("what", list(MIXED))
def test_stages_name_gradients_and_operations(what, stage):
    change, _, mixed = MIXED[what]
    text, operations = refused(change, lambda grads, variables: STAGES[stage](grads))
    for number, name in enumerate(NAMES):
        assert (f"gradient {number}" in text) == (name in mixed), text
    assert names_operation(text, operations), text
    assert "accept_summed" in text


def whole_gradients(feed):
    grads = training.numpy_gradients(MODEL, MODEL.values(), feed)
    return [grads[name] for name in NAMES]


def rounding_of(expected):
    """A handful of float32 roundings; a quotient's are as large as it is."""
    return 32 * small_models.FLOAT32 * max(1.0, np.max(np.abs(expected)))


@pytest.mark.parametrize(
    ("kind", "names"), [("simd", list(MIXED)), ("placement", ["quotient", "product"])]
)
@pytest.mark.mostly_slow
def test_what_is_accepted_adds_up(kind, names):
    """Over all shards the gradients are what the program made of them."""
    (feed,) = small_models.batches(1)

    def build(mesh, inputs):
        grads, variables = training.gradients_on(MODEL, mesh, inputs, BATCH_DIMS)
        fetches = {}
        for what, stage in harness.pairs(names, STAGES):
            made = STAGES[stage](MIXED[what][0](grads), accept_summed=True)
            for variable, total in zip(variables, gs.sum_shards(made, AXES)):
                fetches[what, variable.name] = total
        return [], fetches

    (found,) = harness.run(kind, MESH, LAYOUT, build, [feed]).fetched
    whole = whole_gradients(feed)
    for what in names:
        for name, expected in zip(NAMES, MIXED[what][1](whole)):
            np.testing.assert_allclose(
                found[what, name], expected, atol=rounding_of(expected), err_msg=f"{what}, {name}"
            )


@pytest.mark.parametrize(
    ("kind", "what"),
    [("simd", "product"), ("simd", "clipped by the norm of all"), ("placement", "quotient")],
)
@pytest.mark.mostly_slow
def test_what_is_accepted_makes_the_update(kind, what):
    change, in_numpy, _ = MIXED[what]
    (feed,) = small_models.batches(1)

    def build(mesh, inputs):
        grads, variables, _ = changed(mesh, inputs, change)
        return sync_replicas(accept_summed=True).apply_grads(grads, variables), {}

    found = harness.run(kind, MESH, LAYOUT, build, [feed]).variables
    for name, expected in zip(NAMES, in_numpy(whole_gradients(feed))):
        updated = MODEL.values()[name] - RATE * expected
        np.testing.assert_allclose(found[name], updated, atol=rounding_of(expected), err_msg=name)
    assert list(found["sync_replicas/made"]) == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["simd", "placement"])
def test_reduced_gradients_are_added_up_as_they_are(kind):
    """Each counts as often as replicas contribute, also where they wait for a second step."""
    change, in_numpy, _ = MIXED["clipped by the norm of all"]
    feeds = small_models.batches(3)
    contribute = [[False, True], [True, True], [True, True]]
    for feed, mask in zip(feeds, contribute):
        feed["contributes"] = np.array(mask)

    def build(mesh, inputs):
        grads, variables, _ = changed(mesh, inputs, change)
        opt = sync_replicas(accept_summed=True, contributes=inputs["contributes"])
        return opt.apply_grads(grads, variables), {}

    def made(values, feed):
        grads = training.numpy_gradients(MODEL, values, feed)
        return dict(zip(NAMES, in_numpy([grads[name] for name in NAMES])))

    result = harness.run(kind, MESH, LAYOUT, build, feeds)
    values = MODEL.values()
    first, second = (made(values, feed) for feed in feeds[:2])
    values = {k: values[k] - RATE * (first[k] + 2 * second[k]) / 3 for k in NAMES}
    third = made(values, feeds[2])
    values = {k: values[k] - RATE * third[k] for k in NAMES}
    for name, expected in values.items():
        # Gradients of norm 0.01 take a handful of roundings of a value.
        atol = 8 * small_models.FLOAT32 * max(1.0, np.max(np.abs(expected)))
        np.testing.assert_allclose(result.variables[name], expected, rtol=0, atol=atol)
    assert list(result.variables["sync_replicas/made"]) == [2, 3]
    accumulators = {k: v for k, v in result.variables.items() if "accumulator" in k}
    for name in NAMES:
        assert accumulators[f"{name}/gradient_accumulator"].shape == values[name].shape


def test_nan_of_a_reduced_gradient_drops_all_replicas():
    (feed,) = small_models.batches(1)
    feed["x"][:] = np.nan
    change = MIXED["clipped by the norm of all"][0]

    def build(mesh, inputs):
        grads, variables, _ = changed(mesh, inputs, change)
        return sync_replicas(accept_summed=True).apply_grads(grads, variables), {}

    result = harness.run("simd", MESH, LAYOUT, build, [feed])
    for name in NAMES:
        np.testing.assert_array_equal(result.variables[name], MODEL.values()[name])
        assert not np.any(result.variables[f"{name}/gradient_accumulator"])
    assert list(result.variables["sync_replicas/dropped"]) == [1, 1]


def bytes_of_sums(change, make):
    """What a core puts into sums of more numbers than there are replicas, in a step."""

    def build(mesh, inputs):
        grads, variables, _ = changed(mesh, inputs, change)
        return make().apply_grads(grads, variables), {}

    made = harness.built("simd", MESH, LAYOUT, build, small_models.batches(1)[0])
    rows = made.collectives().rows
    return sum(row.bytes_per_core for row in rows if np.prod(row.shape) > AXES.num_shards)


@pytest.mark.parametrize("what", ["clipped by the norm of all", "gs.clip_by_global_norm"])
@pytest.mark.mostly_slow
def test_reduced_gradients_are_not_reduced_again(what):
    change = MIXED[what][0]
    accepting = bytes_of_sums(change, lambda: sync_replicas(accept_summed=True))
    once = bytes_of_sums(
        change, lambda: gs.CrossShardOptimizer(mtf.optimize.SgdOptimizer(RATE), axes=AXES)
    )
    assert accepting == once > 0


# What leaves the shards' parts apart, though it is more than a chain of linear operations.
APART = {
    "unscaled by a variable": (
        lambda grads, v: [g * mtf.reciprocal(v["gain"]) for g in grads],
        lambda grads, v: [g / v["gain"] for g in grads],
    ),
    "decayed": (
        lambda grads, v: [g + 0.1 * v[k] for k, g in zip(NAMES, grads)],
        lambda grads, v: [g + 0.1 * v[k] for k, g in zip(NAMES, grads)],
    ),
    "scaled by the weights' norm": (
        lambda grads, v: [g * mtf.sqrt(mtf.reduce_sum(mtf.square(v["weights"]))) for g in grads],
        lambda grads, v: [g * np.sqrt(np.sum(v["weights"] ** 2)) for g in grads],
    ),
    "mixed with each other": (
        lambda grads, v: [grads[0] - grads[2] + grads[1], grads[1], -grads[2]],
        lambda grads, v: [grads[0] - grads[2] + grads[1], grads[1], -grads[2]],
    ),
    "with a constant": (
        lambda grads, v: [g * 0.5 + 1.0 for g in grads],
        lambda grads, v: [g * 0.5 + 1.0 for g in grads],
    ),
}


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        *(("simd", what) for what in APART),
        ("placement", "mixed with each other"),
    ],
)
@pytest.mark.mostly_slow
def test_linear_changes_leave_the_mask_its_meaning(kind, what):
    on_mesh, in_numpy = APART[what]
    (feed,) = small_models.batches(1)
    feed["contributes"] = np.array([False, True])

    def build(mesh, inputs):
        grads, variables = training.gradients_on(MODEL, mesh, inputs, BATCH_DIMS)
        grads = on_mesh(grads, {v.name: v.value for v in variables})
        opt = gs.SyncReplicasOptimizer(
            mtf.optimize.SgdOptimizer(RATE), 1, axes=AXES, contributes=inputs["contributes"]
        )
        return opt.apply_grads(grads, variables), {}

    result = harness.run(kind, MESH, LAYOUT, build, [feed])
    values = MODEL.values()
    shards = training.shard_gradients(MODEL, values, feed, (2,))
    made = [in_numpy([g[k] for k in NAMES], values) for g in shards]
    for number, name in enumerate(NAMES):
        grad = np.mean([g[number] for g, c in zip(made, feed["contributes"]) if c], 0)
        np.testing.assert_allclose(
            result.variables[name],
            values[name] - RATE * grad,
            atol=32 * small_models.FLOAT32,
            err_msg=name,
        )


@pytest.mark.mostly_slow
def test_gradients_that_are_read_whole_too(mesh_kind):
    """A norm in a summary changes nothing."""
    (feed,) = small_models.batches(1)
    feed["contributes"] = np.array([True, False])

    def build(mesh, inputs):
        grads, variables = training.gradients_on(MODEL, mesh, inputs, BATCH_DIMS)
        opt = gs.SyncReplicasOptimizer(
            mtf.optimize.SgdOptimizer(RATE), 1, axes=AXES, contributes=inputs["contributes"]
        )
        before = mtf.reduce_sum(mtf.square(grads[0]))
        updates = opt.apply_grads(grads, variables)
        after = mtf.reduce_sum(mtf.square(grads[0]))
        return updates, {"before": before, "after": after, "gain": grads[1] * grads[1]}

    result = harness.run(mesh_kind, MESH, LAYOUT, build, [feed])
    values = MODEL.values()
    whole = training.numpy_gradients(MODEL, values, feed)
    size = np.sum(whole["weights"] ** 2)
    for when in ("before", "after"):
        np.testing.assert_allclose(result.fetched[0][when], size, rtol=32 * small_models.FLOAT32)
    np.testing.assert_allclose(result.fetched[0]["gain"], whole["gain"] ** 2, rtol=1e-5)
    shards = training.shard_gradients(MODEL, values, feed, (2,))
    for name in NAMES:
        grad = np.mean([g[name] for g, c in zip(shards, feed["contributes"]) if c], 0)
        np.testing.assert_allclose(
            result.variables[name],
            values[name] - RATE * grad,
            atol=32 * small_models.FLOAT32,
            err_msg=name,
        )


@pytest.mark.mostly_slow
def test_a_function_of_the_mean_loss_is_no_mixture(mesh_kind):
    """The root of the mean: what it multiplies by is a number that all shards share."""

    def loss(m, v, d):
        return m.sqrt(MODEL.loss(m, v, d))

    model = MODEL._replace(loss=loss)
    (feed,) = small_models.batches(1)
    feed["contributes"] = np.array([True, False])

    def apply(grads, variables, inputs):
        opt = gs.SyncReplicasOptimizer(
            mtf.optimize.SgdOptimizer(RATE), 1, axes=AXES, contributes=inputs["contributes"]
        )
        return opt.apply_grads(grads, variables)

    build = training.step(model, BATCH_DIMS, apply)
    result = harness.run(mesh_kind, MESH, LAYOUT, build, [feed])
    values = MODEL.values()
    shards = training.shard_gradients(MODEL, values, feed, (2,))
    root = np.sqrt(training.numpy_loss(MODEL, values, feed))
    for name in NAMES:
        grad = np.mean([g[name] for g, c in zip(shards, feed["contributes"]) if c], 0) / (2 * root)
        np.testing.assert_allclose(
            result.variables[name],
            values[name] - RATE * grad,
            atol=32 * small_models.FLOAT32,
            err_msg=name,
        )
