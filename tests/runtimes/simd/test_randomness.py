"""Random operations differ by core and step, follow the seeds, and have the right distributions."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync import simd, xla
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness

CORES, SIZE = 4, 4000


@pytest.fixture(params=["cpu_replicas", pytest.param("xla", marks=pytest.mark.xla)])
def session(request):
    """Makes a session of a program, on each of the runtimes of SIMD programs."""
    if request.param == "xla":
        return lambda program: xla.session(program, cache_dir=None)
    return lambda program: program.session()


DRAWS = {
    "uniform": lambda seed: tf.random.uniform([SIZE], seed=seed),
    "normal": lambda seed: tf.random.normal([SIZE], seed=seed),
    "truncated": lambda seed: tf.random.truncated_normal([SIZE], seed=seed),
    "integers": lambda seed: tf.random.uniform([SIZE], 3, 9, tf.int32, seed=seed),
    "classes": lambda seed: tf.random.categorical(
        tf.math.log([[0.2, 0.3, 0.5]]), SIZE, seed=seed, dtype=tf.int32
    )[0],
    "shuffled": lambda seed: tf.random.shuffle(tf.range(SIZE), seed=seed),
}


@pytest.fixture
def drawn(session):
    """Values ``[run, core, size]`` of a program of its own."""

    def run(make, seed, runs=1, graph_seed=None):
        return values_of(session, make, seed, runs, graph_seed)

    return run


def values_of(session, make, seed, runs, graph_seed):
    with tf.Graph().as_default():
        tf.set_random_seed(graph_seed)
        with simd.tpu_program(f"all:{CORES}", "") as program:
            x = make(seed)
        with session(program) as opened:
            return np.array([opened.run(x, per_replica=True) for _ in range(runs)])


@pytest.mark.parametrize("kind", list(DRAWS))
def test_numbers_differ_by_core_and_step_and_follow_the_seed(kind, drawn):
    values = drawn(DRAWS[kind], seed=7, runs=3).reshape(3 * CORES, SIZE)
    for i in range(len(values)):
        for j in range(i):
            # By chance, two classes or small integers are often equal; not so half of the others.
            assert np.mean(values[i] == values[j]) < 0.5
    np.testing.assert_array_equal(
        values, drawn(DRAWS[kind], seed=7, runs=3).reshape(3 * CORES, SIZE)
    )
    assert np.mean(values == drawn(DRAWS[kind], seed=8, runs=3).reshape(values.shape)) < 0.5


def test_the_graphs_seed_counts_and_no_seed_means_other_numbers_every_time(drawn):
    draw = DRAWS["uniform"]
    np.testing.assert_array_equal(drawn(draw, None, graph_seed=1), drawn(draw, None, graph_seed=1))
    assert not np.any(drawn(draw, None, graph_seed=1) == drawn(draw, None, graph_seed=2))
    assert np.mean(drawn(draw, None) == drawn(draw, None)) < 0.01


def test_distributions(drawn):
    """Moments, within five standard errors."""
    count = CORES * SIZE
    error = 5 / np.sqrt(count)
    uniform = drawn(DRAWS["uniform"], 1)
    assert 0 <= uniform.min() < uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < error * np.sqrt(1 / 12)
    normal = drawn(DRAWS["normal"], 1)
    assert abs(normal.mean()) < error
    assert abs(normal.var() - 1) < error * np.sqrt(2)
    truncated = drawn(DRAWS["truncated"], 1)
    assert np.abs(truncated).max() <= 2
    assert abs(truncated.mean()) < error
    integers = drawn(DRAWS["integers"], 1)
    assert set(np.unique(integers)) == set(range(3, 9))
    classes = drawn(DRAWS["classes"], 1)
    for number, share in enumerate([0.2, 0.3, 0.5]):
        assert abs(np.mean(classes == number) - share) < error * np.sqrt(share * (1 - share))
    shuffled = drawn(DRAWS["shuffled"], 1)[0]
    np.testing.assert_array_equal(np.sort(shuffled, axis=1), [np.arange(SIZE)] * CORES)


def turns(seed):
    """What each of three turns of a loop draws."""

    def turn(i, found):
        return i + 1, tf.concat([found[1:], tf.random.uniform([1, SIZE], seed=seed)], 0)

    return tf.while_loop(lambda i, _: i < 3, turn, [0, tf.zeros([3, SIZE])])[1]


def test_two_operations_and_turns_of_a_loop_draw_other_numbers(drawn):
    def make(seed):
        found = turns(seed)
        twice = tf.random.uniform([1, SIZE], seed=seed + 2)
        return tf.concat([found, twice, tf.random.uniform([1, SIZE], seed=seed + 1)], 0)

    values = drawn(make, seed=5)[0, 0]
    for i in range(5):
        for j in range(i):
            assert np.mean(values[i] == values[j]) < 0.01


def test_narrow_floats(drawn):
    values = drawn(lambda seed: tf.random.uniform([SIZE], dtype=tf.bfloat16, seed=seed), 1)
    assert values.dtype == tf.bfloat16.as_numpy_dtype
    assert abs(values.astype(np.float32).mean() - 0.5) < 0.02


def test_a_restored_session_goes_on_with_the_numbers_of_its_step(session, tmp_path):
    tf.set_random_seed(3)
    counter = tf.train.get_or_create_global_step()
    with simd.tpu_program("all:2", "") as program:
        x = [make(None) for name, make in DRAWS.items() if name != "shuffled"]
        x.append(turns(None))
        with tf.control_dependencies(x):
            step = counter.assign_add(1)
    fetches = [x, step]
    with session(program) as opened:
        values = [opened.run(fetches)[0] for _ in range(2)]
        path = opened.save(str(tmp_path / "model"))
        values += [opened.run(fetches)[0] for _ in range(2)]
    with session(program) as opened:
        opened.restore(path)
        again = [opened.run(fetches)[0] for _ in range(2)]
    for found, expected in zip(again, values[2:]):
        for one, other in zip(found, expected):
            np.testing.assert_array_equal(one, other)


def test_steps_at_which_the_global_step_stands_still(session):
    tf.set_random_seed(3)
    counter = tf.train.get_or_create_global_step()
    with simd.tpu_program("all:2", "") as program:
        x = tf.random.uniform([SIZE])
    advance = counter.assign_add(1).op
    values = []
    with session(program) as opened:
        for advances in (0, 0, 1, 0, 1):
            values.append(opened.run(x))
            if advances:
                opened.run(advance)
    for i in range(len(values)):
        for j in range(i):
            assert np.mean(values[i] == values[j]) < 0.01


@pytest.mark.parametrize(
    "kind", ["placement", "shared", "simd", pytest.param("xla", marks=pytest.mark.xla)]
)
@pytest.mark.mostly_slow(keep="simd")
def test_a_run_with_dropout_goes_on_in_the_same_bits(kind, tmp_path):
    """Stopped in the middle of an accumulation, whose counter is the user's, in no order."""
    batch, size = mtf.Dimension("batch", 8), mtf.Dimension("size", 32)
    mesh_shape, layout = "rows:2;cols:2", "batch:rows"

    def build(mesh, inputs):
        tf.train.get_or_create_global_step()
        w = mtf.get_variable(mesh, "w", mtf.Shape([size]), initializer=tf.ones_initializer())
        x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([batch, size]))
        kept = mtf.dropout(x, True, rate=0.5)
        loss = mtf.reduce_mean(mtf.square(mtf.einsum([kept, w], [batch]) - 1.0))
        optimizer = gs.GradientAccumulationOptimizer(
            mtf.optimize.MomentumOptimizer(0.01, 0.9), 2, mesh_shape=mesh_shape, layout=layout
        )
        updates = optimizer.apply_grads(mtf.gradients([loss], [w]), [w.operation])
        return updates, {"loss": loss, "kept": kept}

    def run(first, last, restored=None):
        """Makes some steps, in a graph and session of their own, as a process of its own does."""
        made = harness.built(kind, mesh_shape, layout, build, feed)
        with made.graph.as_default():
            counter = tf.train.get_global_step()
            advance = counter.assign_add(1).op
            if made.program is None:
                saver = tf.train.Saver()
            with made._session() as session:
                if made.program is None:
                    session.run(made.init)
                    if restored:
                        saver.restore(session, restored)
                    session.run(made.restore)
                elif restored:
                    session.restore(restored)
                inputs = {made.inputs["x"]: feed["x"]}
                fetches = [made.fetched, made.updates, advance]
                found = [session.run(fetches, inputs)[0] for _ in range(first, last)]
                path = str(tmp_path / f"model-{first}-{last}")
                if made.program is not None:
                    return found, session.save(path), session.variables()
                session.run(made.collect)
                names = {v.op.name: v for v in tf.global_variables()}
                return found, saver.save(session, path), session.run(names)

    feed = {"x": np.ones([8, 32], np.float32)}
    whole, _, variables = run(0, 6)
    before, path, _ = run(0, 3)
    after, _, resumed = run(3, 6, path)
    for found, expected in zip([*before, *after], whole):
        assert found["loss"].tobytes() == expected["loss"].tobytes()
        np.testing.assert_array_equal(found["kept"], expected["kept"])
    assert {k: v.tobytes() for k, v in resumed.items()} == {
        k: v.tobytes() for k, v in variables.items()
    }
    masks = [step["kept"] > 0 for step in whole]
    for i, mask in enumerate(masks):
        # Of the two rows of processors each has examples, and masks, of its own.
        assert np.mean(mask[:4] == mask[4:]) < 0.9
        assert abs(np.mean(mask) - 0.5) < 5 * 0.5 / 16
        assert all(np.mean(mask == other) < 0.9 for other in masks[:i])
