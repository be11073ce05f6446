"""Weighted means: shards, microbatch steps and islands with unequal numbers of tokens.

Everything is compared with one device in numpy float64, which takes the mean over all tokens. Their
numbers differ so much that a mean of means is off by several percent.
"""

import itertools

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.optimizers.pipeline.weights import mean_loss
from tests import harness, models, reference
from tests.optimizers.pipeline import stack_reference
from tests.optimizers.pipeline.stack_reference import Islands, weighted_mean
from tests.sessions import ran
from tests.wrappers import BATCH_DIMS, KINDS, LAYOUT, SHAPE, WORKS, order_table, parts, wrap

SHARDS, LENGTH, FEATURES, RATE = 4, 8, 4, 0.1  # the table's optimizer is plain descent at that rate
START = np.array([0.5, -1.0, 0.25, 2.0], np.float32)
CLIPS, ACCUMULATES = "ClipByGlobalNormOptimizer", "GradientAccumulationOptimizer"
ACCUMULATION = [name for name in order_table.WRAPPERS if name.startswith("GradientAcc")]
# Steps round numbers below 4 in sums of some 64 products.
CLOSE = 64 * 2.0**-22


def batches(counts, seed=1):
    """For each step the tokens of each shard, by their numbers; the others are padding."""
    rng, feeds = np.random.RandomState(seed), []
    for step in counts:
        x = rng.randn(SHARDS, LENGTH, FEATURES).astype("f")
        mask = (np.arange(LENGTH) < np.asarray(step)[:, None]).astype("f")
        feeds.append({"x": 0.5 * x, "mask": mask})
    return feeds


UNEQUAL = [[8, 1, 3, 2], [1, 1, 2, 1], [5, 8, 8, 7], [2, 6, 1, 4], [8, 8, 1, 1], [1, 3, 1, 8]]
WITH_EMPTY = [[8, 0, 3, 2], [0, 0, 0, 0], [0, 8, 0, 7], [2, 6, 1, 4], [0, 0, 0, 0], [0, 0, 0, 0]]


def step_from(w, feeds, contribute=range(SHARDS)):
    """The variable after a step by the mean over the tokens of some shards of some steps."""
    means = [means_of_shards(w, feed)[shard] for feed in feeds for shard in contribute]
    return w - RATE * weighted_mean(means)[0]


def means_of_shards(w, feed):
    """For each shard the mean of its tokens' gradients, and their number."""
    found = []
    for x, mask in zip(feed["x"].astype("d"), feed["mask"].astype("d")):
        total = mask.sum()
        found.append((2 * (mask * (x @ w - 1.0)) @ x / max(total, 1), total))
    return found


def train(stack, feeds, passes=2, average=False):
    """The variable at the end, and how many updates had no data."""
    islands = 2 if "OuterOptimizer" in stack else int(any(x.startswith("Outer") for x in stack))
    specs = stack_reference.specs_of(
        stack, backward_passes_per_step=passes, average_aggregated_gradients=average
    )

    def make():
        return stack_reference.layers_of(specs, reference.Sgd(RATE), SHARDS // (islands or 1))

    def parts_of(feed):
        return lambda values: [({"w": g}, n) for g, n in means_of_shards(values["w"], feed)]

    model = Islands(make, islands, {"w": START.astype("d")})
    for feed in feeds:
        model(parts_of(feed))
    return model.outer["w"], model.stacks[0][-1].without_data


def token_mean(mesh, inputs, how="shards", dims=BATCH_DIMS, sizes=(2, 2), unit=1.0):
    """The mean over the tokens of each shard, or of all, and weights, a shard's or a scalar."""
    batch = [mtf.Dimension(*x) for x in zip(dims, sizes)]
    token, features = mtf.Dimension("token", LENGTH), mtf.Dimension("in", FEATURES)
    given = [mtf.Shape([*batch, token, features]), mtf.Shape([*batch, token])]
    x, mask = (
        mtf.import_tf_tensor(mesh, tf.reshape(inputs[k], shape.to_integer_list), shape)
        for k, shape in zip(("x", "mask"), given)
    )
    w = models.variable(mesh, "w", [features], START)
    errors = mtf.square(mtf.einsum([x, w], given[1]) - 1.0) * mask
    counts = mtf.reduce_sum(mask, output_shape=mtf.Shape(batch))
    kept = mtf.Shape(batch if how == "shards" else [])
    loss = mtf.reduce_sum(errors, output_shape=kept)
    loss /= counts if how == "shards" else mtf.reduce_sum(counts)
    return loss, (mtf.reduce_sum(counts) if how == "scalar" else counts) * unit


def program(make, own=False, **how):
    """A step by gradients of `compute_gradients`, or of the program's own."""

    def build(mesh, inputs):
        loss, weights = token_mean(mesh, inputs, **how)
        opt = make()
        if own:
            grads, variables = models.gradients(loss)
            updates = opt.apply_grads(grads, variables, weights=weights)
        else:
            pairs = opt.compute_gradients(loss, weights=weights)
            updates = opt.apply_grads(*zip(*pairs))
        without_data = {k: v for k, v in gs.reported(opt).items() if "data" in k}
        return updates, {"loss": mean_loss(loss), **without_data}

    return build


def run(kind, make, feeds, shape=SHAPE, layout=LAYOUT, **how):
    return harness.run(kind, shape, layout, program(make, **how), feeds)


def assert_close(found, expected, steps=6):
    np.testing.assert_allclose(found.variables["w"], expected, rtol=0, atol=steps * CLOSE)


def made(*names):
    def make():
        opt = order_table.plain()
        if "ShardedUpdateOptimizer" not in names:  # of the others, some do not know the shards
            opt = gs.CrossShardOptimizer(opt, name="knows", batch_dims=BATCH_DIMS)
        for name in reversed(names):
            opt = order_table.WRAPPERS[name](opt)
        return opt

    return make


HOWS = ["shards", "shards of all", "scalar"]


@pytest.mark.parametrize(
    ("kind", "name", "how"),
    harness.on_both(
        harness.pairs(order_table.WRAPPERS, HOWS), harness.pairs(order_table.WRAPPERS, HOWS[::-1])
    ),
)
@pytest.mark.mostly_slow(every=12)
def test_every_wrapper(kind, name, how):
    if name == "OuterOptimizer" and how == "scalar":
        return  # a scalar says that islands have equally many
    feeds = batches(UNEQUAL)
    expected, _ = train([name], feeds)
    found = run(kind, made(name), feeds, how=how)
    assert_close(found, expected)
    # The loss that is shown is the mean over all tokens, too.
    x, mask = (feeds[0][key].astype("d") for key in ("x", "mask"))
    loss = np.sum(mask * (x @ START - 1.0) ** 2) / mask.sum()
    np.testing.assert_allclose(found.fetched[0]["loss"], loss, rtol=CLOSE)


# The others are trained with losses of shards: tests/optimizers/pipeline/test_shard_losses.py.
@pytest.mark.slow
@pytest.mark.parametrize(("outer", "inner"), WORKS[::2])
def test_every_second_pair(outer, inner):
    feeds = batches(UNEQUAL)
    expected, _ = train([outer, inner], feeds)
    assert_close(run("simd", made(outer, inner), feeds), expected)


def accumulation(where, passes=3, inner=order_table.plain, **more):
    def make():
        place = {"accumulate": where, **(order_table.MESH if where == "local" else {})}
        place["batch_dims"] = BATCH_DIMS
        return gs.GradientAccumulationOptimizer(inner(), passes, True, **{**place, **more})

    return make


@pytest.mark.parametrize("where", ["local", "synced"])
@pytest.mark.mostly_slow
def test_three_microbatches_of_four_shards(mesh_kind, where):
    """As one device with the whole batch, where a mean of means is off by several percent."""
    feeds = batches(UNEQUAL)
    expected, _ = train([ACCUMULATES], feeds, passes=3, average=True)
    w = START.astype("d")
    for whole in (feeds[:3], feeds[3:]):
        w = step_from(w, whole)
    np.testing.assert_allclose(w, expected, rtol=1e-12)
    assert_close(run(mesh_kind, accumulation(where), feeds), expected)
    means = [np.mean([g for g, _ in means_of_shards(w, f)], 0) for f in feeds[3:]]
    whole = weighted_mean([part for f in feeds[3:] for part in means_of_shards(w, f)])[0]
    assert np.linalg.norm(np.mean(means, 0) - whole) > 0.05 * np.linalg.norm(whole)


# Wrappers to whose stacks a step without data, and shards without, are no trouble.
EVERY_STEP = ["cross_shard", "loss_scale(average)", "clip", "sharded"]
SKIPPING = ["local, skipping", "loss_scale(synced)"]
EMPTY = [*EVERY_STEP, "local", "replicas", "islands", *SKIPPING]


def classes_of(stack):
    return [KINDS[part].name for part in parts(stack.partition(",")[0])]


@pytest.mark.parametrize(
    ("kind", "name"),
    harness.on_both(
        [(name,) for name in EMPTY], [("clip",), (SKIPPING[0],), ("replicas",), ("islands",)]
    ),
)
@pytest.mark.mostly_slow
def test_no_data_is_no_nan(kind, name):
    """The loss of a shard without tokens is 0 / 0 here, and so are its gradients."""
    feeds = batches(WITH_EMPTY)
    expected, without_data = train(classes_of(name), feeds, passes=2, average=True)
    skips = {"should_skip_update_fn": gs.skip_not_finite} if name in SKIPPING else {}

    def make():
        return wrap(
            name.partition(",")[0],
            order_table.plain(),
            **order_table.MESH,
            **skips,
            clip_norm=1.0,
            outer_dims=("outer",),
            leave_out_not_finite=True,
        )

    found = run(kind, make, feeds)
    assert np.isfinite(expected).all()
    assert_close(found, expected)
    if name in EVERY_STEP:
        assert [f["updates_without_data"] for f in found.fetched] == [0, 1, 1, 1, 2, 3]
    elif name != "islands":
        assert found.fetched[-1]["updates_without_data"] == without_data
    skipped = [v for k, v in found.variables.items() if k.endswith("/skipped")]
    assert not np.any(skipped)
    scales = [v for k, v in found.variables.items() if k.endswith("/scale")]
    assert all(scale == 2.0**15 for scale in scales)


LIMITED = {
    "loss scale": lambda most: gs.LossScaleOptimizer(
        order_table.plain(), max_steps_without_update=most, **order_table.MESH
    ),
    "local": lambda most: accumulation("local", 2, max_steps_without_update=most)(),
    "skipping": lambda most: accumulation(
        "synced", 2, max_steps_without_update=most, should_skip_update_fn=gs.skip_not_finite
    )(),
}


@pytest.mark.parametrize(("kind", "name"), harness.pairs(["simd", "placement"], LIMITED))
@pytest.mark.slow
def test_steps_without_data_for_ever_end_the_training(name, kind):
    data, none = [8, 1, 0, 2], [0, 0, 0, 0]
    feeds = batches([none, data, *[none] * 4])
    # Of accumulation the second, fourth and sixth would be updates: the sixth has nothing.
    most = 3 if name == "loss scale" else 2
    made = harness.built(kind, SHAPE, LAYOUT, program(lambda: LIMITED[name](most)), feeds[0])
    made.run(feeds[:-1] if name == "loss scale" else feeds[:4])
    with pytest.raises((gs.NoUpdateError, tf.errors.InvalidArgumentError)) as raised:
        made.run(feeds)
    assert f"no update for more than max_steps_without_update={most} steps" in str(raised.value)


@pytest.mark.slow
def test_a_loss_of_no_data_is_none_of_one_island():
    """The loss of all is 0 / 0 on steps without data, too."""

    def make():
        one = {"outer_dims": (), "leave_out_not_finite": True, **order_table.MESH}
        return gs.OuterOptimizer(gs.LossScaleOptimizer(order_table.plain()), 2, **one)

    feeds = batches(WITH_EMPTY)
    expected, _ = train(["Outer, one island"], feeds)
    found = run("simd", make, feeds, how="shards of all")
    assert_close(found, expected)
    assert not found.variables["OuterOptimizer/skipped"]


MESHES = {
    "second axis": ("rows:4;cols:2", "batch:rows;in:cols", ("batch",), (4,)),
    "two and a second": ("a:2;b:2;c:2", "outer:a;batch:b;in:c", BATCH_DIMS, (2, 2)),
    "two rows a shard": ("rows:2;cols:2", "batch:rows;in:cols", ("batch",), (4,)),
    "one processor": ("all:1", "", ("batch",), (4,)),
}


@pytest.mark.parametrize(
    ("kind", "where", "mesh"),
    [
        *(("simd", where, mesh) for where, mesh in itertools.product(["local", "synced"], MESHES)),
        ("placement", "local", "two rows a shard"),
        ("placement", "synced", "second axis"),
    ],
)
@pytest.mark.mostly_slow(keep="simd")
def test_any_mesh_and_schedule_of_k(kind, where, mesh):
    """One microbatch, then three; gradients of the program's own. Shards may hold several rows."""
    shape, layout, dims, sizes = MESHES[mesh]
    feeds = batches([UNEQUAL[0], *UNEQUAL[2:5]])

    def make():
        def passes(step):
            return 1 + 2 * mtf.minimum(step, 1)

        return gs.GradientAccumulationOptimizer(
            order_table.plain(), passes, True, accumulate=where, mesh_shape=shape, layout=layout,
            batch_dims=dims, name="acc",
        )  # fmt: skip

    w = START.astype("d")
    for whole in (feeds[:1], feeds[1:]):
        w = step_from(w, whole)
    given = {"shape": shape, "layout": layout, "dims": dims, "sizes": sizes}
    found = run(kind, make, feeds, how="shards of all", own=True, **given)
    assert_close(found, w)
    assert found.variables["acc/weight"] == 0
    found = run(kind, make, feeds[:3], how="scalar", own=True, **given)
    assert found.variables["acc/weight"] == sum(np.sum(x) for x in UNEQUAL[2:4])


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("shared", name) for name in ("clip", "loss_scale", "local", "replicas", "islands")),
        ("simd", "local"),
        ("simd", "islands"),
    ],
)
@pytest.mark.mostly_slow
def test_wrappers_on_a_second_axis(name, kind):
    """Where processors share copies, one of them writes the sums of weights, in every session."""
    shape, layout = "a:2;b:2", "batch:b"
    axes = {"mesh_shape": shape, "layout": layout}
    feeds = batches(UNEQUAL[:4])

    def make():
        more = {"clip_norm": 1.0, "average_aggregated_gradients": False}
        return wrap(name, order_table.plain(), **axes, **more)

    step = program(make, dims=("batch",), sizes=(SHARDS,))
    made = harness.built(kind, shape, layout, step, feeds[0])
    expected, _ = train(classes_of(name), feeds)
    assert not made.races()
    for result in made.runs(feeds, 3) if kind == "shared" else [made.run(feeds)]:
        assert_close(result, expected)


@pytest.mark.parametrize(("kind", "how"), [("placement", "shards"), ("simd", "shards of all")])
@pytest.mark.slow
def test_masked_replicas_leave_the_weighted_mean_of_the_others(kind, how):

    def make():
        masked = {"contributes": [True, False, True, True], **order_table.MESH}
        return gs.SyncReplicasOptimizer(order_table.plain(), 6, **masked)

    feeds = batches(UNEQUAL[:4])
    w = START.astype("d")
    for two in (feeds[:2], feeds[2:]):
        w = step_from(w, two, [0, 2, 3])
    assert_close(run(kind, make, feeds, how=how), w)


PENALTY = 0.25
WITH_PENALTY = {
    "cross_shard": (lambda opt: gs.CrossShardOptimizer(opt, **order_table.MESH), [0, 1, 2, 3]),
    "replicas": (
        lambda opt: gs.SyncReplicasOptimizer(
            opt, 1, contributes=[True, False, True, True], **order_table.MESH
        ),
        [0, 2, 3],
    ),
    "scaled": (
        lambda opt: gs.LossScaleOptimizer(gs.CrossShardOptimizer(opt), **order_table.MESH),
        [0, 1, 2, 3],
    ),
}


@pytest.mark.parametrize(("kind", "name"), harness.pairs(["placement", "simd"], WITH_PENALTY))
@pytest.mark.mostly_slow
def test_a_penalty_on_weights_is_whole_whatever_the_shards_have(name, kind):
    """That of the loss of all: equal shares of it are in each shard's term of the gradient."""
    wrap, contribute = WITH_PENALTY[name]

    def build(mesh, inputs):
        loss, weights = token_mean(mesh, inputs, "shards of all")
        w = mesh.graph.trainable_variables[0].value
        small = mtf.get_variable(mesh, "u", mtf.Shape([]), initializer=tf.ones_initializer())
        # A gradient that is all penalty, and penalties before and after the data's gradient.
        loss = mtf.reduce_sum(mtf.square(w)) * (PENALTY / 2) + loss + mtf.square(small)
        loss += mtf.reduce_sum(mtf.square(w)) * (PENALTY / 2)
        opt = wrap(order_table.plain())
        pairs = opt.compute_gradients(loss, weights=weights)
        return opt.apply_grads(*zip(*pairs)), {}

    feeds = batches([[8, 1, 3, 2], [8, 0, 3, 2]])
    w, u = START.astype("d"), 1.0
    for feed in feeds:
        w = step_from(w, [feed], contribute) - RATE * 2 * PENALTY * w
        u -= RATE * 2 * u
    found = harness.run(kind, SHAPE, LAYOUT, build, feeds)
    assert_close(found, w)
    np.testing.assert_allclose(found.variables["u"], u, rtol=8 * 2**-24)


@pytest.mark.mostly_slow
def test_gradients_in_which_replicas_are_mixed_count_by_the_weights_of_those_that_contribute(
    mesh_kind,
):
    """Those of a program that clips first, by a norm that is never reached here."""
    masked = [True, False, True, True]

    def build(mesh, inputs):
        loss, weights = token_mean(mesh, inputs, "shards of all")
        grads, variables = models.gradients(loss)
        grads, _ = gs.clip_by_global_norm(grads, 1e6)
        opt = gs.SyncReplicasOptimizer(
            order_table.plain(), 6, contributes=masked, accept_summed=True, **order_table.MESH
        )
        return opt.apply_grads(grads, variables, weights=weights), {}

    feeds = batches(UNEQUAL[:2])
    parts = []
    for feed in feeds:
        shards = means_of_shards(START.astype("d"), feed)
        contributed = sum(n for (_, n), is_in in zip(shards, masked) if is_in)
        parts.append((weighted_mean(shards)[0], contributed))
    found = harness.run(mesh_kind, SHAPE, LAYOUT, build, feeds)
    assert_close(found, START - RATE * weighted_mean(parts)[0])


@pytest.mark.slow
def test_fragments_have_weights_of_their_own_rounds(mesh_kind):
    """Two variables take turns; gradients of shards are given, and do not depend on them."""
    rng, steps = np.random.RandomState(0), 5
    feeds = [
        {
            "tokens": rng.randint(1, 9, [2, 2]).astype("f"),
            "of_u": rng.randn(2, 2, 3).astype("f"),
            "of_v": rng.randn(2, 2, 3).astype("f"),
        }
        for _ in range(steps)
    ]

    def build(mesh, inputs):
        batch, dim = [mtf.Dimension(name, 2) for name in BATCH_DIMS], mtf.Dimension("dim", 3)
        weights = mtf.import_tf_tensor(mesh, inputs["tokens"], mtf.Shape(batch))
        variables, grads = [], []
        for name in ("u", "v"):
            variables.append(mtf.get_variable(mesh, name, [dim]).operation)
            # What each shard adds to the gradient of the mean.
            of_shards = mtf.import_tf_tensor(mesh, inputs[f"of_{name}"], mtf.Shape([*batch, dim]))
            grads.append(of_shards * weights / mtf.reduce_sum(weights))
        opt = gs.OuterOptimizer(
            order_table.plain(), 2, 0.7, 0.5, fragments=2, outer_dims=("outer",),
            leave_out_not_finite=True, **order_table.MESH,
        )  # fmt: skip
        return opt.apply_grads(grads, variables, weights=weights), {}

    made = harness.built(mesh_kind, SHAPE, LAYOUT, build, feeds[0])
    after = made.after_each(feeds)
    for turn, name in enumerate(("u", "v")):
        # Its values after the first step, without their unknown beginning.
        outer, own, velocity, weights = 0.0, np.zeros((2, 3)), 0.0, np.zeros(2)
        moved = []
        for number, feed in enumerate(feeds, 1):
            tokens = feed["tokens"].astype("d")
            means = (feed[f"of_{name}"].astype("d") * tokens[..., None]).sum(1)
            own = own - RATE * means / tokens.sum(1)[:, None]
            weights = weights + tokens.sum(1)
            if number % 2 != turn:
                difference = (weights[:, None] * (outer - own)).sum(0) / weights.sum()
                velocity = 0.5 * velocity + difference
                outer = outer - 0.7 * (difference + 0.5 * velocity)
                own, weights = np.tile(outer, (2, 1)), np.zeros(2)
            moved.append(outer)
        for found, last, expected, before in zip(after[1:], after, moved[1:], moved):
            np.testing.assert_allclose(
                found[name] - last[name], expected - before, rtol=0, atol=CLOSE, err_msg=name
            )


@pytest.mark.xla
@pytest.mark.parametrize("name", ["GradientAccumulationOptimizer, local", "OuterOptimizer"])
@pytest.mark.slow
def test_on_xla_devices(name):
    feeds = batches(UNEQUAL[:4])
    expected, _ = train([name], feeds)
    assert_close(run("xla", made(name), feeds), expected)


@pytest.mark.parametrize("name", ["local", "replicas"])
@pytest.mark.slow
def test_a_checkpoint_between_goes_on_on_another_mesh(name, tmp_path):
    """The sum of weights goes with the sums of gradients."""
    feeds = batches(UNEQUAL[:3])

    def build(shards):
        axes = {"mesh_shape": f"all:{shards}", "layout": "batch:all"}
        # Three steps of accumulation; of contributions two steps of four, and one of two.
        passes = {"backward_passes_per_step": 3, "replicas_to_aggregate": 10}
        step = program(
            lambda: wrap(name, order_table.plain(), axes, name="opt", **passes),
            dims=("batch",),
            sizes=(4,),
        )
        return harness.built("simd", *axes.values(), step, feeds[0])

    then, path = build(2), tmp_path / name
    ran(build(4), feeds[:2], save=path)
    assert ran(then, [], path)["opt/weight"] == np.sum(UNEQUAL[:2])
    found = ran(then, feeds[2:], path)
    expected = step_from(START.astype("d"), feeds)
    np.testing.assert_allclose(found["w"], expected, rtol=0, atol=CLOSE)
    assert found["opt/weight"] == 0


@pytest.mark.slow
def test_sums_of_a_run_without_weights_count_one_for_each_step(tmp_path):
    """A run that begins to give weights keeps what it has."""
    feeds = batches(UNEQUAL[:3])

    def build(weighted):
        def step(mesh, inputs):
            loss, weights = token_mean(mesh, inputs, "scalar")
            opt = accumulation("local")()
            return opt.minimize(loss, weights=weights if weighted else None), {}

        return harness.built("simd", SHAPE, LAYOUT, step, feeds[0])

    ran(build(False), feeds[:2], save=tmp_path / "model")
    found = ran(build(True), feeds[2:], tmp_path / "model")["w"]
    means = [weighted_mean(means_of_shards(START.astype("d"), feed)) for feed in feeds]
    weights = np.array([1, 1, means[2][1]])
    grad = sum(w * g for w, (g, _) in zip(weights, means)) / weights.sum()
    np.testing.assert_allclose(found, START - RATE * grad, rtol=0, atol=CLOSE)


@pytest.mark.mostly_slow
def test_a_narrow_wire_gets_means_and_not_sums(mesh_kind):
    """Sums over a million of tokens do not fit into float16."""

    def make():
        opt = order_table.plain()
        how = {"reduce_dtype": "float16", **order_table.MESH}
        return gs.GradientAccumulationOptimizer(opt, 3, True, **how)

    feeds = batches(UNEQUAL[:3])
    expected = step_from(START.astype("d"), feeds)
    found = run(mesh_kind, make, feeds, unit=1e5)
    # Four terms of up to 8, with 11 bits.
    assert_close(found, expected, RATE * 4 * 8 * 2.0**-11 / CLOSE)


@pytest.mark.mostly_slow
def test_no_data_leaves_the_state_of_a_strategy(mesh_kind):
    """What was not sent before a step without weight is sent after it."""

    def build(mesh, inputs):
        loss, weights = token_mean(mesh, inputs, "scalar")
        opt = gs.GradientAccumulationOptimizer(
            order_table.plain(), 8, True, accumulate="synced", batch_dims=BATCH_DIMS,
            reducer=gs.QuantizedAllReduce(block_size=4),
        )  # fmt: skip
        # No weight for the step with 4 examples, whose gradients are finite.
        weights *= mtf.cast(mtf.not_equal(weights, 4.0), tf.float32)
        return opt.minimize(loss, weights=weights), {}

    feeds = batches([UNEQUAL[0], [1, 1, 1, 1], UNEQUAL[2]])
    made = harness.built(mesh_kind, SHAPE, LAYOUT, build, feeds[0])
    first, second, third = made.after_each(feeds)
    (name,) = [k for k in first if "quantization_error" in k]
    assert np.any(first[name])
    np.testing.assert_array_equal(second[name], first[name])
    assert np.any(third[name] != second[name])


@pytest.mark.mostly_slow
def test_sums_that_are_not_in_checkpoints_and_a_flush(mesh_kind):
    def build(mesh, inputs):
        loss, weights = token_mean(mesh, inputs)
        flush = tf.reduce_sum(inputs["mask"]) < 6.0  # on the second step
        opt = gs.GradientAccumulationOptimizer(
            order_table.plain(), 3, True, checkpoint_accumulators=False, flush=flush,
            **order_table.MESH,
        )  # fmt: skip
        return opt.minimize(loss, weights=weights), {}

    feeds = batches(UNEQUAL[:2])
    found = harness.run(mesh_kind, SHAPE, LAYOUT, build, feeds)
    assert_close(found, step_from(START.astype("d"), feeds))


@pytest.mark.mostly_slow
def test_gradients_keep_their_weights_when_they_are_changed(mesh_kind):
    """And a loss that is made of them has none."""

    def build(mesh, inputs):
        loss, weights = token_mean(mesh, inputs, "scalar")
        opt = accumulation("local")()
        ((grad, variable),) = opt.compute_gradients(loss, weights=weights)
        other = mtf.get_variable(mesh, "other", [], initializer=tf.ones_initializer())
        penalty = mtf.reduce_sum(mtf.square(grad)) * other
        (of_other,) = mtf.gradients([penalty], [other])
        plain = gs.CrossShardOptimizer(mtf.optimize.SgdOptimizer(0.0), name="plain")
        updates = plain.apply_grads([of_other], [other.operation])
        assert "updates_without_data" not in gs.reported(plain)
        return [*updates, *opt.apply_grads([mtf.cast(grad * 2.0, tf.float32)], [variable])], {}

    feeds = batches(UNEQUAL[:3])
    found = harness.run(mesh_kind, SHAPE, LAYOUT, build, feeds)
    assert_close(found, 2 * step_from(START.astype("d"), feeds) - START)


@pytest.mark.mostly_slow
def test_one_gradient_after_the_other(mesh_kind):
    def build(mesh, inputs):
        loss, weights = token_mean(mesh, inputs, "shards of all")
        opt = accumulation("local")()
        grads, variables = models.gradients(loss)
        pairs = zip(grads, variables)
        return [op for g, v in pairs for op in opt.apply_grad(g, v, weights=weights)], {}

    feeds = batches(UNEQUAL)
    expected, _ = train([ACCUMULATES], feeds, passes=3, average=True)
    assert_close(harness.run(mesh_kind, SHAPE, LAYOUT, build, feeds), expected)


@pytest.mark.parametrize("weights", [5, np.float32(2.5), "tf"])
@pytest.mark.mostly_slow
def test_weights_that_are_no_mesh_tensors(weights):
    def build(mesh, inputs):
        loss, _ = token_mean(mesh, inputs, "scalar")
        given = tf.reduce_sum(inputs["mask"]) if weights == "tf" else weights
        return accumulation("local")().minimize(loss, weights=given), {}

    feeds = batches(UNEQUAL[:3])
    means = [weighted_mean(means_of_shards(START.astype("d"), feed)) for feed in feeds]
    counts = [n if weights == "tf" else 1 for _, n in means]
    grad = sum(n * g for n, (g, _) in zip(counts, means)) / sum(counts)
    found = harness.run("simd", SHAPE, LAYOUT, build, feeds)
    assert_close(found, START - RATE * grad)


class OfAnotherLibrary(mtf.optimize.Optimizer):
    def __init__(self, opt):
        self.opt = opt

    def apply_grads(self, grads, variables):
        return self.opt.apply_grads(grads, variables)


def mesh_tensor(name, size):
    return lambda mesh: mtf.ones(mesh, mtf.Shape([mtf.Dimension(name, size)]))


@pytest.mark.parametrize(
    ("make", "weights", "error", "match"),
    [
        (accumulation("local"), "many", TypeError, "weights must be how much .*; got 'many'"),
        (accumulation("local"), -1, ValueError, "a number of 0 or more; got -1"),
        (accumulation("local"), float("nan"), ValueError, "0 or more; got nan"),
        (accumulation("local"), 1e39, ValueError, "a number that float32 holds, .* got 1e.39"),
        (accumulation("local"), 1e-46, ValueError, "a number that float32 holds, .* got 1e-46"),
        (accumulation("local"), lambda mesh: tf.constant([1.0, 2.0]), ValueError, "got the shape"),
        (accumulation("local"), lambda mesh: tf.constant(True), TypeError, "got the dtype bool"),
        (accumulation("local"), mesh_tensor("token", 8), ValueError, "name them in batch_dims"),
        (accumulation("local"), mesh_tensor("batch", 3), ValueError, "size 3 along 'batch'.* of 2"),
        (
            lambda: gs.CrossShardOptimizer(OfAnotherLibrary(accumulation("synced")())),
            1.0,
            ValueError,
            "do not reach GradientAccumulationOptimizer inside of an optimizer of another library",
        ),
        (
            lambda: gs.CrossShardOptimizer(
                order_table.plain(), group_assignment=[[0, 1], [2, 3]], batch_dims=BATCH_DIMS
            ),
            1.0,
            ValueError,
            "CrossShardOptimizer sums within groups, group_assignment",
        ),
    ],
)
def test_what_weights_cannot_be(make, weights, error, match):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    inputs = {k: tf.constant(v) for k, v in batches(UNEQUAL)[0].items()}
    loss, _ = token_mean(mesh, inputs, "scalar")
    grads, variables = models.gradients(loss)
    given, opt = weights(mesh) if callable(weights) else weights, make()
    with harness.unchanged(mesh.graph), pytest.raises(error, match=match):
        opt.apply_grads(grads, variables, weights=given)


class TwoLosses:
    """Losses of shards of one variable each, and weights of their shards."""

    def __init__(self):
        self.mesh = mtf.Mesh(mtf.Graph(), "mesh")
        batch = mtf.Shape([mtf.Dimension(*x) for x in zip(BATCH_DIMS, (2, 2))])
        self.variables = [mtf.get_variable(self.mesh, n, mtf.Shape([])).operation for n in "wv"]
        self.values = [v.outputs[0] for v in self.variables]
        self.weights = [mtf.ones(self.mesh, batch), mtf.ones(self.mesh, batch)]
        self.losses = [mtf.broadcast(value, batch) for value in self.values]
        self.opt = accumulation("local")()

    def pairs(self, number, weights=None):
        variable = self.variables[number]
        return self.opt.compute_gradients(self.losses[number], [variable], weights)

    def in_a_loop(self, weights):
        def body(turn):
            loss = mtf.broadcast(self.values[0] * 1.0, self.losses[0].shape)
            ((grad, _),) = self.opt.compute_gradients(loss, [self.variables[0]], weights)
            return [turn + 1, grad]

        start = mtf.constant(self.mesh, 0, dtype=tf.int32)
        is_left = lambda turn: mtf.less(turn, 2)  # noqa: E731
        return mtf.while_loop(is_left, body, [start], has_accumulators=True)[1]


def two_weights(two):
    pairs = two.pairs(0, two.weights[0]) + two.pairs(1, two.weights[1])
    return lambda: two.opt.apply_gradients(pairs)


def two_weights_in_one_gradient(two):
    (one, _), (other, _) = (two.pairs(0, weights)[0] for weights in two.weights)
    grad = one + other
    return lambda: two.opt.apply_grads([grad], two.variables[:1])


def weights_of_one(two):
    pairs = two.pairs(0, two.weights[0]) + two.pairs(1)
    return lambda: two.opt.apply_gradients(pairs)


def other_weights_later(two):
    pairs = two.pairs(0, two.weights[0])
    return lambda: two.opt.apply_gradients(pairs, weights=two.weights[1])


def weights_of_shards_later(two):
    pairs = two.pairs(0)
    return lambda: two.opt.apply_gradients(pairs, weights=two.weights[0])


def weights_in_a_loop(two):
    grad = two.in_a_loop(two.weights[0])
    return lambda: two.opt.apply_grads([grad], two.variables[:1])


def weights_of_shards_after_a_loop(two):
    grad = two.in_a_loop(None)
    return lambda: two.opt.apply_grads([grad], two.variables[:1], weights=two.weights[0])


@pytest.mark.parametrize(
    ("program", "match"),
    [
        (two_weights, "gradient of 'v' was computed with weights=.* of 'w'. Give each loss an opt"),
        (two_weights_in_one_gradient, "The gradients of a step have one weight"),
        (weights_of_one, "'v' was computed without weights, that of 'w' with weights="),
        (other_weights_later, "'w' was computed with weights="),
        (weights_of_shards_later, "'w' with equal weights, so that .* come too late"),
        (weights_in_a_loop, "'w' was computed with weights in the body of a loop"),
        (weights_of_shards_after_a_loop, "'w' with equal weights, so that .* come too late"),
    ],
)
def test_a_step_has_one_weight_for_all_its_gradients(program, match):
    two = TwoLosses()
    apply, graph = program(two), two.mesh.graph
    with harness.unchanged(graph), pytest.raises(ValueError, match=match):
        apply()


@pytest.mark.parametrize("weights", ["same", "scalar", "number"])
def test_weights_may_be_given_again_or_for_the_step_alone(weights):
    two = TwoLosses()
    given = {"same": two.weights[0], "scalar": mtf.reduce_sum(two.weights[0]), "number": 3}[weights]
    pairs = [p for i in range(2) for p in two.pairs(i, given if weights != "scalar" else None)]
    assert two.opt.apply_gradients(pairs, weights=given)


@pytest.mark.parametrize("name", ["SyncReplicasOptimizer", *ACCUMULATION, "OuterOptimizer"])
def test_the_sum_of_weights_is_a_variable_of_the_stack(name):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    inputs = {k: tf.constant(v) for k, v in batches(UNEQUAL)[0].items()}
    loss, weights = token_mean(mesh, inputs, "scalar")
    opt = order_table.WRAPPERS[name](order_table.plain())
    opt.apply_grads(*zip(*opt.compute_gradients(loss, weights=weights)))
    made = [v for v in mesh.graph.all_variables if v.name.endswith("/weight")]
    assert made
    assert [v for v in opt.variables() if v.name.endswith("/weight")] == made
