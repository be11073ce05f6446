"""Checkpoints in mid-accumulation that go on in another stack, on another mesh, with other islands.

The model is linear and every inner step is followed by an outer one that takes the mean over the
islands, so that one float64 trajectory is right for all: momentum SGD on the whole batch.
"""

import functools
import itertools

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness
from tests.sessions import session_of, train

K, D, EXAMPLES = 3, 3, 8
RATE, MOMENTUM = 0.25, 0.5
DIMS = ("outer", "batch")
# Of each mesh its shape, the sizes of the batch's two dimensions, and the one that makes 2 islands.
MESHES = {
    "same": ("a:2;b:4", (2, 4), "outer"),
    "half": ("a:2;b:2", (2, 4), "outer"),
    "other axis": ("a:4;b:2", (4, 2), "batch"),
    "one": ("a:1;b:1", (2, 4), "outer"),
}
LAYOUT = "outer:a;batch:b"
# How many islands there are; None without outer steps. "around" has accumulation around one.
ISLANDS = (None, "around", 1, 2, 8)
PLACES = ("local", "synced")
# One for each number of islands on each mesh; any two of the three are together in one of them.
STACKS = [
    (islands, PLACES[(i + m) % 2], mesh)
    for (i, islands), (m, mesh) in itertools.product(
        enumerate(ISLANDS), enumerate(list(MESHES)[:3])
    )
]
# In the middle of the second update, and where the first has been made.
CUTS = (K + 1, K)
STEPS = 3 * K
# Values stay below 2; a step rounds sums of at most 8 examples and K microbatches.
TOLERANCE = {"rtol": 0, "atol": STEPS * 64 * 2.0**-24}


def batches(steps):
    random = np.random.RandomState(0)
    return [
        {
            "x": random.uniform(-1, 1, [EXAMPLES, D]).astype("f"),
            "y": random.uniform(-1, 1, [EXAMPLES]).astype("f"),
            "tokens": random.randint(1, 9, [EXAMPLES]).astype("f"),
        }
        for _ in range(steps)
    ]


def gradient(w, feed, tokens):
    x, y = feed["x"].astype(float), feed["y"].astype(float)
    return (tokens * (x @ w - y)) @ x / tokens.sum()


def expected(feeds):
    """Returns the variable after momentum SGD in float64."""
    w, velocity = np.ones(D), np.zeros(D)
    for update in zip(*[iter(feeds)] * K):
        mean = np.mean([gradient(w, feed, np.ones(EXAMPLES)) for feed in update], 0)
        # Mesh-TF's momentum moves by the velocity of the update before.
        w, velocity = w - velocity, MOMENTUM * velocity + RATE * mean
    return w


def expected_of_weights(feeds, average, cut, first, plain=1.0):
    """Returns the variable after SGD in float64, with weights up to a cut, or from there on.

    Where the sums had weights they go on with their mean, as the sum of so many steps; where they
    get weights, a step before counts as one with a weight of `plain`.
    """
    w = np.ones(D)
    for number in range(0, len(feeds), K):
        total, weight = np.zeros(D), 0.0
        for step, feed in enumerate(feeds[number : number + K], number):
            if step == cut and first and step > number:
                total, weight = total / weight * (step - number) * plain, (step - number) * plain
            tokens = feed["tokens"].astype(float) if (step < cut) == first else np.ones(EXAMPLES)
            of_step = tokens.sum() if (step < cut) == first else plain
            total, weight = total + of_step * gradient(w, feed, tokens), weight + of_step
        w = w - RATE * total / weight * (1 if average else K)
    return w


def optimizer(islands, place, mesh, average=True, opt=None):
    shape, _, of_two = MESHES[mesh]
    where = {"mesh_shape": shape, "layout": LAYOUT, "batch_dims": DIMS}
    inner = opt or mtf.optimize.MomentumOptimizer(RATE, MOMENTUM)

    def accumulating(opt):
        if place == "replicas":
            enough = K * mtf.convert_to_shape(shape).size
            return gs.SyncReplicasOptimizer(opt, enough, **where)
        return gs.GradientAccumulationOptimizer(opt, K, average, accumulate=place, **where)

    def outer(opt):
        names = {"around": (), 1: (), 2: (of_two,), 8: DIMS}[islands]
        return gs.OuterOptimizer(
            opt, 1, outer_learning_rate=1.0, outer_momentum=0.0, outer_dims=names, **where
        )

    if islands is None:
        return accumulating(inner)
    return accumulating(outer(inner)) if islands == "around" else outer(accumulating(inner))


def program(kind, make, mesh, is_weighted=False):
    shape, sizes, _ = MESHES[mesh]

    def build(mesh, inputs):
        dims = [mtf.Dimension(*pair) for pair in zip(DIMS, sizes)]
        d = mtf.Dimension("d", D)
        x, y, tokens = (
            mtf.import_tf_tensor(mesh, tf.reshape(inputs[k], [*sizes, *more]), [*dims, *more_dims])
            for k, more, more_dims in (("x", [D], [d]), ("y", [], []), ("tokens", [], []))
        )
        w = mtf.get_variable(mesh, "w", [d], initializer=tf.ones_initializer())
        error = mtf.einsum([x, w], dims) - y
        losses, opt = mtf.square(error) * 0.5, make()
        if is_weighted:
            loss = mtf.reduce_sum(losses * tokens) / mtf.reduce_sum(tokens)
            pairs = opt.compute_gradients(loss, weights=tokens)
        else:
            pairs = opt.compute_gradients(mtf.reduce_mean(losses))
        return opt.apply_grads(*zip(*pairs)), {}

    return harness.built(kind, shape, LAYOUT, build, batches(1)[0])


@functools.lru_cache(maxsize=None)
def built(kind, islands, place, mesh):
    return program(kind, lambda: optimizer(islands, place, mesh), mesh)


def write(made, directory, feeds, cuts):
    """Trains from the start, and returns the checkpoints after some of the steps."""
    paths, done = [], 0
    with session_of(made) as session:
        for cut in sorted(cuts):
            train(made, session, feeds[done:cut])
            paths.append(session.save(f"{directory}/{cut}"))
            done = cut
    return dict(zip(sorted(cuts), paths))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The checkpoints of a stack, by cut."""
    feeds = batches(STEPS)

    @functools.lru_cache(maxsize=None)
    def of_stack(*stack):
        return write(built("simd", *stack), tmp_path_factory.mktemp("stack"), feeds, CUTS)

    return of_stack


def assert_goes_on(kind, stack, checkpoints):
    """`checkpoints` are paths, by the stack that they are of and the step after which it ended."""
    feeds, made = batches(STEPS), built(kind, *stack)
    right = expected(feeds)
    with session_of(made) as session:
        for (other, cut), path in checkpoints.items():
            session.restore(path)
            train(made, session, feeds[cut:])
            found = session.variables()
            message = f"from {other} to {stack}: cut after {cut}"
            np.testing.assert_allclose(found["w"], right, **TOLERANCE, err_msg=message)


def go_together(stack, other):
    """Whether a pair is among those that are tried: a fifth, which has each two of what it is of.

    With each number of islands after each other number it has each mesh, too.
    """
    (i, m), (j, n) = (
        (ISLANDS.index(islands), list(MESHES).index(mesh)) for islands, _, mesh in (stack, other)
    )
    return (i + j + m + 2 * n) % 5 == 0


@pytest.mark.slow
def test_every_stack_goes_on_with_the_sums_of_every_other(written):
    """It is one test because each stack is then built once, and not in each process of tests."""
    for first, stack in enumerate(STACKS):
        others = [other for other in STACKS if go_together(stack, other)]
        # Empty sums, which take as long, in half of the pairs, and of each pair of islands.
        checkpoints = {
            (other, cut): written(*other)[cut]
            for number, other in enumerate(others, first)
            for cut in CUTS[: 1 + number % 2]
        }
        assert_goes_on("simd", stack, checkpoints)


@pytest.mark.parametrize("kind", ["simd", "placement", pytest.param("xla", marks=pytest.mark.xla)])
@pytest.mark.slow
def test_several_islands_go_on_as_one_and_as_none_and_back(written, kind):
    eight, one = (8, "local", "same"), (1, "local", "half")
    for then, first in [(one, eight), (eight, one), ((None, "synced", "half"), eight)]:
        checkpoints = {(first, cut): path for cut, path in written(*first).items()}
        assert_goes_on(kind, then, checkpoints)


@functools.lru_cache(maxsize=None)
def with_sgd(kind, islands, place, mesh, average, is_weighted):
    def make():
        return optimizer(islands, place, mesh, average, mtf.optimize.SgdOptimizer(RATE))

    return program(kind, make, mesh, is_weighted)


# Of four things that are two each, any three are together in one.
CASES_OF_WEIGHTS = [
    *(
        (None, place, mesh, average, (place == "local") ^ (mesh == "half") ^ average)
        for place, mesh, average in itertools.product(PLACES, ["half", "one"], [True, False])
    ),
    *(
        (islands, "replicas", mesh, True, (islands is None) ^ (mesh == "half"))
        for islands, mesh in itertools.product([None, 1], ["half", "one"])
    ),
    (2, "local", "half", True, False),
]


@pytest.mark.parametrize(("islands", "place", "mesh", "average", "first"), CASES_OF_WEIGHTS)
@pytest.mark.mostly_slow
def test_weights_that_begin_or_end_in_mid_accumulation(
    islands, place, mesh, average, first, tmp_path
):
    feeds, cut = batches(2 * K), K + 2
    before, after = (with_sgd("simd", islands, place, mesh, average, x) for x in (first, not first))
    (path,) = write(before, tmp_path, feeds, [cut]).values()
    with session_of(after) as session:
        session.restore(path)
        train(after, session, feeds[cut:])
        found = session.variables()["w"]
    with after.graph.as_default(), tf.Session() as session:
        with pytest.raises((ValueError, tf.errors.NotFoundError), match=r"gs\.ReshardingSaver"):
            tf.train.Saver().restore(session, path)
    # Of synchronous replicas each contribution counts.
    plain = mtf.convert_to_shape(MESHES[mesh][0]).size if place == "replicas" else 1.0
    right = expected_of_weights(feeds, average, cut, first, plain)
    np.testing.assert_allclose(found, right, **TOLERANCE)


@pytest.mark.slow
def test_weights_that_begin_or_end_with_other_islands(tmp_path):
    feeds, cut = batches(2 * K), K + 2
    checkpoints = {}
    for islands, first in itertools.product([None, 1, 2, 8], [True, False]):
        before = with_sgd("simd", islands, "local", "half", True, first)
        directory = tmp_path / f"{islands} {first}"
        (checkpoints[islands, first],) = write(before, directory, feeds, [cut]).values()
    # On one mesh they end, on the other they begin.
    stacks = itertools.product([None, 1, 2, 8], [("half", True), ("other axis", False)])
    for other, (mesh, then) in stacks:
        made = with_sgd("simd", other, "local", mesh, True, then)
        with session_of(made) as session:
            for (islands, first), path in checkpoints.items():
                session.restore(path)
                train(made, session, feeds[cut:])
                end = cut if then != first else len(feeds)
                right = expected_of_weights(feeds, True, end, first)
                message = f"from {islands} to {other} on {mesh}, {then}"
                found = session.variables()["w"]
                np.testing.assert_allclose(found, right, **TOLERANCE, err_msg=message)


@pytest.mark.parametrize("kind", ["simd", "placement", pytest.param("xla", marks=pytest.mark.xla)])
@pytest.mark.slow
def test_a_round_with_weights_goes_on_with_other_islands(kind, tmp_path):
    """They begin with the islands' mean by weights, and with equal parts of the weights."""
    feeds, rate = batches(3), 0.5

    def in_rounds(islands):
        shape, _, of_two = MESHES["same"]
        return program(
            kind,
            lambda: gs.OuterOptimizer(
                mtf.optimize.SgdOptimizer(RATE), 3, rate, 0.0, mesh_shape=shape, layout=LAYOUT,
                batch_dims=DIMS, outer_dims={1: (), 2: (of_two,), 8: DIMS}[islands],
            ),
            "same",
            is_weighted=True,
        )  # fmt: skip

    (path,) = write(in_rounds(8), tmp_path, feeds, [2]).values()
    saved = {n: tf.train.load_variable(path, n) for n in ("w/island", "OuterOptimizer/weight")}
    weight = saved["OuterOptimizer/weight"].reshape(EXAMPLES).astype(float)
    np.testing.assert_array_equal(weight, sum(feed["tokens"] for feed in feeds[:2]))
    mean = weight @ saved["w/island"].reshape(EXAMPLES, D).astype(float) / weight.sum()
    for islands in (1, 2):
        made = in_rounds(islands)
        with session_of(made) as session:
            session.restore(path)
            begun = session.variables()
            train(made, session, feeds[2:])
            found = session.variables()["w"]
        for value in begun["w/island"].reshape(islands, D):
            np.testing.assert_allclose(value, mean, rtol=2**-22)
        if islands > 1:
            parts = np.full([islands, 1], weight.sum() / islands)
            np.testing.assert_array_equal(begun["OuterOptimizer/weight"], parts)
        moved, total = np.zeros(D), 0.0
        for part in np.split(np.arange(EXAMPLES), islands):
            feed = {name: x[part] for name, x in feeds[2].items()}
            tokens = feed["tokens"].astype(float)
            own = weight.sum() / islands + tokens.sum()
            moved += own * (1.0 - (mean - RATE * gradient(mean, feed, tokens)))
            total += own
        np.testing.assert_allclose(found, 1.0 - rate * moved / total, **TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("stack", [*itertools.product([None, 1], ["half", "other axis", "one"])])
def test_contributions_go_on_inside_outer_steps_and_without(stack, tmp_path):
    """The replicas make K steps for an update; of another number, the rest of the contributions."""
    feeds, cut = batches(2 * K), K + 1
    before = with_sgd("simd", stack[0], "replicas", stack[1], True, False)
    (path,) = write(before, tmp_path, feeds, [cut]).values()
    for islands in (None, 1):
        made = with_sgd("simd", islands, "replicas", stack[1], True, False)
        with session_of(made) as session:
            session.restore(path)
            train(made, session, feeds[cut:])
            found = session.variables()["w"]
        right = expected_of_weights(feeds, True, 0, True)
        np.testing.assert_allclose(found, right, **TOLERANCE)


def test_a_plain_saver_refuses_sums_that_look_as_if_they_fitted(tmp_path):
    """Sums of 4 islands have the shape of those of one island with 4 shards."""
    feeds = batches(K + 1)
    (path,) = write(built("simd", 8, "local", "half"), tmp_path, feeds, [K + 1]).values()
    with session_of(built("placement", 1, "local", "half")) as session:
        session = session._session
        with pytest.raises(ValueError, match=r"w/gradient_accumulator/island of other islands"):
            tf.train.Saver().restore(session, path)
        trained = [v for v in tf.global_variables() if v.op.name == "w"]
        tf.train.Saver(trained).restore(session, path)  # which has no sums to restore
        np.testing.assert_allclose(session.run(trained)[0], expected(feeds[:K]), **TOLERANCE)
