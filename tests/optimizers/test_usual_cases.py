"""What trainings have now and then, by every wrapper, against numpy, all of it in each program:

a last batch with fewer examples, another K and another batch after a restart, a variable that is
frozen, one that is used in two places, one without a gradient on some steps, and a norm over
variables of which some are split and some are not.
"""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf
from tests import harness, models, wrappers
from tests.optimizers.pipeline.stack_reference import Islands, layers_of, specs_of
from tests.reference import AdamW
from tests.sessions import ran

SHAPE, LAYOUT, _ = harness.MESHES["2x2"]  # "hidden" is split over the second axis
AXES = {"mesh_shape": SHAPE, "layout": LAYOUT}
SHARDS, INPUTS, HIDDEN = 2, 4, 6
NORM, RATE, DECAY, EPSILON = 0.05, 0.01, 0.1, 1e-3
SHAPES = {"tied": (INPUTS, HIDDEN), "gain": (), "seldom": (INPUTS,), "frozen": (INPUTS,)}
TRAINED = ["tied", "gain", "seldom"]
# Examples of each step: the second and the last of them have fewer than there is room for.
BEFORE, AFTER = [8, 5, 8], [4, 4, 4, 4, 1]


def first_values():
    rng = np.random.RandomState(0)
    return {k: np.asarray(0.5 * rng.randn(*shape) + 0.2, "f") for k, shape in SHAPES.items()}


def batches(counts, room, seed):
    rng, feeds = np.random.RandomState(seed), []
    for number, count in enumerate(counts):
        x, y = (rng.randn(room, INPUTS).astype("f") for _ in "xy")
        mask = (np.arange(room) < count).astype("f")
        feeds.append({"x": x, "y": y, "mask": mask, "flag": np.float32(number % 2)})
    return feeds


FEEDS = batches(BEFORE, 8, 1), batches(AFTER, 4, 2)


def loss_of(mesh, inputs):
    """The mean over the examples that there are, and how many."""
    rows = mtf.Dimension("batch", inputs["x"].shape.as_list()[0])
    features, hidden = mtf.Dimension("in", INPUTS), mtf.Dimension("hidden", HIDDEN)
    out_dim = mtf.Dimension("out", INPUTS)

    def variable(name):
        dims = {"tied": [features, hidden], "gain": []}.get(name, [out_dim])
        return models.variable(mesh, name, dims, first_values()[name])

    values = {name: variable(name) for name in SHAPES}
    x, y = (
        mtf.import_tf_tensor(mesh, inputs[k], mtf.Shape([rows, dim]))
        for k, dim in (("x", features), ("y", out_dim))
    )
    mask = mtf.import_tf_tensor(mesh, inputs["mask"], mtf.Shape([rows]))
    flag = mtf.import_tf_tensor(mesh, inputs["flag"], mtf.Shape([]))
    h = mtf.einsum([x, values["tied"]], [rows, hidden])
    back = mtf.rename_dimension(values["tied"], "in", "out")
    out = mtf.einsum([h, back], [rows, out_dim]) * values["gain"] + values["frozen"]
    errors = mtf.square(out + values["seldom"] * flag - y)
    errors = mtf.reduce_mean(errors, reduced_dim=out_dim) * mask
    return mtf.reduce_sum(errors) / mtf.reduce_sum(mask), mask


def flat(values):
    return np.concatenate([np.ravel(values[k]) for k in TRAINED]).astype("d")


def apart(vector):
    ends = np.cumsum([int(np.prod(SHAPES[k])) for k in TRAINED])
    return {k: x.reshape(SHAPES[k]) for k, x in zip(TRAINED, np.split(vector, ends[:-1]))}


def parts_of(feed):
    """Returns a function from the variables to each shard's gradient and its examples."""

    def of_rows(w, rows):
        w, frozen = apart(w), first_values()["frozen"].astype("d")
        x, y, mask = (feed[k][rows].astype("d") for k in ("x", "y", "mask"))
        flag, count = float(feed["flag"]), mask.sum()
        decoded = x @ w["tied"] @ w["tied"].T
        out = decoded * w["gain"] + frozen + w["seldom"] * flag
        error = 2 * mask[:, None] * (out - y) / (INPUTS * max(count, 1))
        inside = error * w["gain"]
        grads = {
            "tied": x.T @ inside @ w["tied"] + inside.T @ x @ w["tied"],
            "gain": np.sum(error * decoded),
            "seldom": flag * error.sum(0),
        }
        return flat(grads), count

    size = len(feed["x"]) // SHARDS
    rows = [np.s_[size * i : size * (i + 1)] for i in range(SHARDS)]
    return lambda w: [of_rows(w, some) for some in rows]


def clip(opt):
    return gs.ClipByGlobalNormOptimizer(opt, NORM)


# What changes values of each; of the others nothing does.
CHANGES = {
    "local": ["GradientAccumulationOptimizer"],
    "synced": ["GradientAccumulationOptimizer"],
    "sharded sums": ["GradientAccumulationOptimizer"],
    "replicas": ["SyncReplicasOptimizer"],
    "one island": ["OuterOptimizer, one island"],
}
TWO_STEPS = "replicas of two steps"
STACKS = [*wrappers.KINDS, "sharded sums(sharded)", TWO_STEPS]


def contributions(name):
    """How many the replicas need for an update."""
    return SHARDS + 1 if name == TWO_STEPS else 1


def built(kind, name, passes, feed):
    given = {
        "backward_passes_per_step": passes,
        "replicas_to_aggregate": contributions(name),
        "min_size": 2,
        # As the reference has them.
        "inner_steps": 2,
        "outer_learning_rate": 0.7,
        "outer_momentum": 0.5,
    }

    def build(mesh, inputs):
        loss, weights = loss_of(mesh, inputs)
        adam = gs.AdamWOptimizer(RATE, DECAY, epsilon=EPSILON)
        stack = name.removesuffix(" of two steps")
        opt = wrappers.wrap(stack, clip(adam), AXES, **given)
        variables = [v for v in mesh.graph.trainable_variables if v.name in TRAINED]
        pairs = opt.compute_gradients(loss, variables, weights=weights)
        return opt.apply_grads(*zip(*pairs)), {"loss": loss}

    return harness.built(kind, SHAPE, LAYOUT, build, feed)


def expected(name):
    """The variables at the end, with two microbatch steps an update at first, and then three."""
    islands = {"islands": SHARDS, "one island": 1}.get(name, 0)
    does = CHANGES.get(wrappers.parts(name.removesuffix(" of two steps"))[0], [])
    specs = specs_of(
        [*does, "ClipByGlobalNormOptimizer"],
        average_aggregated_gradients=True,
        clip_norm=NORM,
        replicas_to_aggregate=contributions(name),
    )

    def layers():
        return layers_of(specs, AdamW(RATE, DECAY, epsilon=EPSILON), SHARDS // (islands or 1))

    def gradients(feed):
        of_shards = parts_of(feed)
        return lambda values: [({"all": g}, n) for g, n in of_shards(values["all"])]

    model = Islands(layers, islands, {"all": flat(first_values())})
    for passes, feeds in zip((2, 3), FEEDS):
        model.stacks[0][0].passes = passes
        for feed in feeds:
            model(gradients(feed))
    return apart(model.outer["all"])


@pytest.mark.parametrize(
    ("kind", "name"), harness.on_both(zip(STACKS), [(TWO_STEPS,), ("islands",)])
)
@pytest.mark.slow
def test_all_of_it(kind, name, tmp_path):
    first, then = (built(kind, name, k, feeds[0]) for k, feeds in zip((2, 3), FEEDS))
    ran(first, FEEDS[0], save=tmp_path / "model")
    found = ran(then, FEEDS[1], tmp_path / "model")
    for key, value in expected(name).items():
        # A gradient is rounded to some 2^-21 of a norm of 0.05, which Adam divides by 1e-3 or more.
        atol = 8 * RATE * NORM * 2.0**-18 / EPSILON
        np.testing.assert_allclose(found[key], value, rtol=0, atol=atol, err_msg=key)
        assert np.abs(value - first_values()[key]).max() > 100 * atol
    np.testing.assert_array_equal(found["frozen"], first_values()["frozen"])
    assert not any(k.startswith("frozen/") for k in found)
