"""New runs whose values come from elsewhere train as if these were their initial values."""

import contextlib

import numpy as np
import pytest

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.optimizers.state import is_marked
from mtf_gradsync.runtimes.checkpoints import averaged_checkpoint
from tests import harness, models
from tests.sessions import assert_same_bits, session_of, train
from tests.wrappers import wrap

STEPS = 5


STACKS = ["average(islands(local))", "islands(average)", "replicas"]


def built(kind, mesh, stack, w=1.0, dtype=tf.float32):
    """A program that trains w and v, which begin with `w` and with -w."""
    shape, layout = harness.ONE if mesh == "1" else harness.MESHES[mesh][:2]

    def build(mesh, inputs):
        batch, d = mtf.Dimension("batch", 4), mtf.Dimension("d", 6)
        x = mtf.import_tf_tensor(mesh, inputs["x"], [batch, d])

        def variable(name, value):
            initializer = tf.constant_initializer(value)
            kind = mtf.VariableDType(tf.float32, dtype, tf.float32)
            return mtf.get_variable(mesh, name, [d], kind, initializer=initializer)

        made = [variable("w", w), variable("v", -w)]
        loss = mtf.reduce_mean(mtf.square(x * made[0] - x * made[1] - 1.0))
        opt = wrap(
            stack,
            mtf.optimize.MomentumOptimizer(0.1, 0.5),
            mesh_shape=shape,
            layout=layout,
            decay=0.75,
            outer_learning_rate=0.5,
            average_aggregated_gradients=False,
            replicas_to_aggregate=2,
            variable_averages=0.5,
            **({"variables_to_average": made} if stack == "replicas" else {}),
        )
        step = models.variable(mesh, "step", [], dtype=tf.int32, trainable=False)
        return opt.minimize(loss, step.operation), {"loss": loss}

    return harness.built(kind, shape, layout, build, feeds()[0])


def feeds():
    random = np.random.RandomState(1)
    return [{"x": random.standard_normal((4, 6)).astype("f")} for _ in range(STEPS)]


def steps(made, session, number=STEPS):
    """The variables after some steps."""
    train(made, session, feeds()[:number])
    return session.variables()


@contextlib.contextmanager
def running(made, prepare=lambda: None, assigned=None):
    """Opens a session of a program; `assigned` are values by name that masters get before."""
    with made.graph.as_default():
        prepare()
        made = made._replace(init=[tf.global_variables_initializer(), *made.init[1:]])
    with session_of(made, tf.train.Saver, assigned) as session:
        yield session


VALUES = {"w": np.full(6, 3.0, "f"), "v": np.full(6, -3.0, "f")}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A checkpoint of the variables alone, w = 3 and v = -3."""
    with tf.Graph().as_default(), tf.Session() as session:
        made = [tf.get_variable(name, initializer=x) for name, x in VALUES.items()]
        session.run(tf.global_variables_initializer())
        path = str(tmp_path_factory.mktemp("pretrained") / "model.ckpt")
        return tf.train.Saver(made).save(session, path)


def variables_in(path):
    """The variables of the graph that a checkpoint has, as Mesh-TF's pipelines choose them."""
    there = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    return [v for v in tf.global_variables() if v.op.name in there]


def initialize_all(path):
    names = [v.op.name for v in variables_in(path)]
    tf.train.init_from_checkpoint(path, {name: name for name in names})


CASES = [
    *((kind, "2", stack) for stack in STACKS for kind in ("placement", "simd")),
    # Sessions of XLA devices begin as those of CPU replicas do.
    ("xla", "2", "average(islands(local))"),
    ("shared", "2x2", "average(islands(local))"),
    ("placement", "1", "average"),  # the master is the slice
]


@pytest.mark.mostly_slow(keep="simd")
@pytest.mark.parametrize(("kind", "mesh", "stack"), CASES)
def test_values_from_elsewhere_are_those_that_training_begins_with(kind, mesh, stack, pretrained):
    made = built(kind, mesh, stack, w=3.0)
    with running(made) as own:
        expected = steps(made, own)
    made = built(kind, mesh, stack)
    with running(made, assigned=VALUES) as assigned:
        assert_same_bits(steps(made, assigned), expected)
    with running(made, lambda: initialize_all(pretrained)) as initialized:
        assert_same_bits(steps(made, initialized), expected)


@pytest.mark.parametrize("kind", ["simd", "xla"])
@pytest.mark.slow
def test_values_are_written_again_and_again_before_the_first_step(kind, tmp_path):
    stack = "average(islands(local))"
    made = built(kind, "2", stack, w=3.0)
    with running(made) as own:
        expected = steps(made, own)
    made = built(kind, "2", stack)
    with running(made) as one:
        one.write({"w": VALUES["w"]})
        assert np.all(one.read("w/island") == 3.0)
        assert np.all(one.read("v/ExponentialMovingAverage") == -1.0)
        one.save(str(tmp_path / "model.ckpt"))
        one.write({"w": VALUES["v"], "v": VALUES["w"]})
        one.write(VALUES)
        assert_same_bits(steps(made, one), expected)
        # From the first step on they are values of their own.
        before = one.read("w/ExponentialMovingAverage")
        one.write({"w": VALUES["w"] + 1.0})
        np.testing.assert_array_equal(one.read("w/ExponentialMovingAverage"), before)


@pytest.mark.parametrize("kind", ["placement", "simd"])
def test_variables_in_bfloat16_begin_their_averages_too(kind):
    made = built(kind, "2", "average", dtype=tf.bfloat16)
    values = {"w": np.full(6, 1.2345, "f")}
    with running(made, assigned=values) as one:
        average = one.variables()["w/ExponentialMovingAverage"]
        np.testing.assert_array_equal(average, values["w"])
        if kind == "simd":  # the master of w has lost bits meanwhile
            one.write({"w": values["w"] + 1.0})
            average = one.read("w/ExponentialMovingAverage")
            np.testing.assert_array_equal(average, values["w"] + 1.0)


@pytest.mark.parametrize("kind", ["placement", "simd"])
@pytest.mark.slow
def test_a_new_run_takes_no_sums_and_no_counts_of_another(kind, tmp_path, caplog):
    stack = "average(local)"
    made, path = built(kind, "2", stack), str(tmp_path / "model.ckpt")
    with running(made) as first:
        steps(made, first, 3)  # one update, and half of the next one
        first.save(path)
    there = tf.train.load_checkpoint(path)
    assert there.get_tensor("GradientAccumulationOptimizer/mini_step") == 1
    kept = {x: there.get_tensor(x) for x in ("w", "v", "w_momentum_v", "v_momentum_v", "step")}
    made = built(kind, "2", stack)
    assert kept.keys() <= {v.op.name for v in made.graph.get_collection("variables")}
    with running(made, assigned=kept) as own:
        expected = steps(made, own)
    doors = {
        "init_from_checkpoint": lambda: initialize_all(path),
        "warm_start": lambda: tf.train.warm_start(path, variables_in(path)),
    }
    for prepare in doors.values():
        made = built(kind, "2", stack)
        with running(made, prepare) as new:
            assert_same_bits(steps(made, new), expected)
        (text,) = [r.getMessage() for r in caplog.records if "another run" in r.getMessage()]
        assert "mini_step" in text
        caplog.clear()


def test_a_checkpoint_from_before_training_is_one_of_the_values_that_it_begins_with(tmp_path):
    path = str(tmp_path / "model.ckpt")
    made = built("placement", "2", "average")
    with running(made) as one:
        expected = steps(made, one)
    with made.graph.as_default(), made._session() as session:
        session.run(made.init)
        tf.train.Saver().save(session, path)  # nothing was copied to the masters
        assert is_marked(tf.train.load_variable(path, "w/ExponentialMovingAverage"))
    with running(made) as one:
        one.restore(path)
        assert_same_bits(steps(made, one), expected)
        with averaged_checkpoint(path, tf.trainable_variables()) as copy:
            np.testing.assert_array_equal(tf.train.load_variable(copy, "w"), np.ones(6, "f"))
