"""Gradients in which shards are not recoverable are an error, or accepted by who says so."""

import types

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, reference
from tests.properties.models import small_models, training, uses

MESH, LAYOUT, BATCH_DIMS = harness.MESHES["2x2"]
AXES = gs.ReplicaAxes(MESH, LAYOUT)
MODEL = small_models.regression(
    lambda m, v: v["weights"] * v["gain"] - v["offset"],
    variables={"weights": uses.W, "gain": [], "offset": uses.W},
)
NAMES = list(MODEL.variables)
RATE = 0.1


# What of Mesh-TF the changes below take, for arrays.
NUMPY = types.SimpleNamespace(
    add_n=sum,
    maximum=np.maximum,
    minimum=np.minimum,
    reciprocal=np.reciprocal,
    reduce_sum=np.sum,
    relu=lambda x: np.maximum(x, 0),
    sqrt=np.sqrt,
    square=np.square,
)


def by_norm(m, grads, norm_of):
    """Clipped by a norm, as programs do themselves."""
    norm = m.sqrt(m.add_n([m.reduce_sum(m.square(g)) for g in norm_of]))
    return [g * m.reciprocal(m.maximum(norm, 0.01)) * 0.01 for g in grads]


def of_package(m, grads):
    return gs.clip_by_global_norm(grads, 0.01)[0] if m is mtf else by_norm(m, grads, grads)


def first(change):
    """A change of the first gradient alone, which then no longer tells shards apart."""
    return lambda m, grads: [change(m, *grads), *grads[1:]], NAMES[:1]


# What is done with gradients of the weights, the gain and the offset before they are applied, by
# `mtf` or `NUMPY`, and which of the three no longer tell shards apart.
MIXED = {
    "square": first(lambda m, w, s, b: m.square(w)),
    "product": first(lambda m, w, s, b: w * b),
    "product with a scalar": first(lambda m, w, s, b: w * s),
    "quotient": first(lambda m, w, s, b: w * m.reciprocal(s)),
    "minimum": first(lambda m, w, s, b: m.minimum(w, 0.05)),
    "square behind linear operations": first(lambda m, w, s, b: -(m.square(2.0 * w) + b)),
    "relu": first(lambda m, w, s, b: m.relu(w)),
    "clipped by the norm of all": (lambda m, grads: by_norm(m, grads, grads), NAMES),
    "clipped by the norm of another": (
        lambda m, grads: [*by_norm(m, grads[:1], grads[1:]), *grads[1:]],
        NAMES[:1],
    ),
    "gs.clip_by_global_norm": (of_package, NAMES),
}


def changed(mesh, inputs, change):
    """Changed gradients, their variables, and the operations that changed them."""
    grads, variables = training.gradients_on(MODEL, mesh, inputs, BATCH_DIMS)
    before = len(mesh.graph.operations)
    grads = change(mtf, grads)
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
    change, mixed = MIXED[what]
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
    change, mixed = MIXED[what]
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
            made = STAGES[stage](MIXED[what][0](mtf, grads), accept_summed=True)
            for variable, total in zip(variables, gs.sum_shards(made, AXES)):
                fetches[what, variable.name] = total
        return [], fetches

    (found,) = harness.run(kind, MESH, LAYOUT, build, [feed]).fetched
    whole = whole_gradients(feed)
    for what in names:
        for name, expected in zip(NAMES, MIXED[what][0](NUMPY, whole)):
            np.testing.assert_allclose(
                found[what, name], expected, atol=rounding_of(expected), err_msg=f"{what}, {name}"
            )


@pytest.mark.parametrize(
    ("kind", "what"),
    [("simd", "product"), ("simd", "clipped by the norm of all"), ("placement", "quotient")],
)
@pytest.mark.mostly_slow
def test_what_is_accepted_makes_the_update(kind, what):
    change = MIXED[what][0]
    (feed,) = small_models.batches(1)

    def build(mesh, inputs):
        grads, variables, _ = changed(mesh, inputs, change)
        return sync_replicas(accept_summed=True).apply_grads(grads, variables), {}

    found = harness.run(kind, MESH, LAYOUT, build, [feed]).variables
    for name, expected in zip(NAMES, change(NUMPY, whole_gradients(feed))):
        updated = MODEL.values()[name] - RATE * expected
        np.testing.assert_allclose(found[name], updated, atol=rounding_of(expected), err_msg=name)
    assert list(found["sync_replicas/made"]) == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["simd", "placement"])
def test_reduced_gradients_are_added_up_as_they_are(kind):
    """Each counts as often as replicas contribute, also where they wait for a second step."""
    change = MIXED["clipped by the norm of all"][0]
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
        return dict(zip(NAMES, change(NUMPY, [grads[name] for name in NAMES])))

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
    "unscaled by a variable": lambda m, grads, v: [g * m.reciprocal(v["gain"]) for g in grads],
    "decayed": lambda m, grads, v: [g + 0.1 * v[k] for k, g in zip(NAMES, grads)],
    "scaled by the weights' norm": lambda m, grads, v: [
        g * m.sqrt(m.reduce_sum(m.square(v["weights"]))) for g in grads
    ],
    "mixed with each other": lambda m, grads, v: [
        grads[0] - grads[2] + grads[1],
        grads[1],
        -grads[2],
    ],
    "with a constant": lambda m, grads, v: [g * 0.5 + 1.0 for g in grads],
}


def one_replica(inputs):
    """Synchronous replicas that wait for one."""
    sgd = mtf.optimize.SgdOptimizer(RATE)
    return gs.SyncReplicasOptimizer(sgd, 1, axes=AXES, contributes=inputs["contributes"])


def one_batch(*contributes):
    (feed,) = small_models.batches(1)
    return {**feed, "contributes": np.array(contributes)}


def check_contributors(result, feed, grads_of=lambda grads: grads):
    """Compares variables with an update by the mean of what contributors made of gradients."""
    values = MODEL.values()
    shards = training.shard_gradients(MODEL, values, feed, (2,))
    made = [grads_of(grads) for grads, c in zip(shards, feed["contributes"]) if c]
    means = {name: np.mean([grads[name] for grads in made], 0) for name in NAMES}
    expected = {name: values[name] - RATE * mean for name, mean in means.items()}
    reference.assert_close(result.variables, expected, atol=32 * small_models.FLOAT32)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        *(("simd", what) for what in APART),
        ("placement", "mixed with each other"),
    ],
)
@pytest.mark.mostly_slow
def test_linear_changes_leave_the_mask_its_meaning(kind, what):
    feed = one_batch(False, True)

    def build(mesh, inputs):
        grads, variables = training.gradients_on(MODEL, mesh, inputs, BATCH_DIMS)
        grads = APART[what](mtf, grads, {v.name: v.value for v in variables})
        return one_replica(inputs).apply_grads(grads, variables), {}

    result = harness.run(kind, MESH, LAYOUT, build, [feed])

    def in_numpy(grads):
        return dict(zip(NAMES, APART[what](NUMPY, [grads[k] for k in NAMES], MODEL.values())))

    check_contributors(result, feed, in_numpy)


@pytest.mark.mostly_slow
def test_gradients_that_are_read_whole_too(mesh_kind):
    """A norm in a summary changes nothing."""
    feed = one_batch(True, False)

    def build(mesh, inputs):
        grads, variables = training.gradients_on(MODEL, mesh, inputs, BATCH_DIMS)
        before = mtf.reduce_sum(mtf.square(grads[0]))
        updates = one_replica(inputs).apply_grads(grads, variables)
        after = mtf.reduce_sum(mtf.square(grads[0]))
        return updates, {"before": before, "after": after, "gain": grads[1] * grads[1]}

    result = harness.run(mesh_kind, MESH, LAYOUT, build, [feed])
    whole = training.numpy_gradients(MODEL, MODEL.values(), feed)
    size = np.sum(whole["weights"] ** 2)
    for when in ("before", "after"):
        np.testing.assert_allclose(result.fetched[0][when], size, rtol=32 * small_models.FLOAT32)
    np.testing.assert_allclose(result.fetched[0]["gain"], whole["gain"] ** 2, rtol=1e-5)
    check_contributors(result, feed)


@pytest.mark.mostly_slow
def test_a_function_of_the_mean_loss_is_no_mixture(mesh_kind):
    """The root of the mean: what it multiplies by is a number that all shards share."""

    def loss(m, v, d):
        return m.sqrt(MODEL.loss(m, v, d))

    model = MODEL._replace(loss=loss)
    feed = one_batch(True, False)

    def apply(grads, variables, inputs):
        return one_replica(inputs).apply_grads(grads, variables)

    build = training.step(model, BATCH_DIMS, apply)
    result = harness.run(mesh_kind, MESH, LAYOUT, build, [feed])
    root = np.sqrt(training.numpy_loss(MODEL, MODEL.values(), feed))
    check_contributors(result, feed, lambda grads: {k: g / (2 * root) for k, g in grads.items()})
