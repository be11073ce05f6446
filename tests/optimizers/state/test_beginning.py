"""New runs whose values come from elsewhere train as if these were their initial values."""

import contextlib

import numpy as np
import pytest

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.optimizers.state import is_marked
from mtf_gradsync.runtimes.checkpoints import averaged_checkpoint
from tests import harness
from tests.sessions import assert_same_bits
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
        zero = tf.zeros_initializer()
        step = mtf.get_variable(mesh, "step", [], tf.int32, initializer=zero, trainable=False)
        return opt.minimize(loss, step.operation), {"loss": loss}

    return harness.built(kind, shape, layout, build, feeds()[0])


def feeds():
    random = np.random.RandomState(1)
    return [{"x": random.standard_normal((4, 6)).astype("f")} for _ in range(STEPS)]


class Running:
    """A session of a program, before its first step."""

    def __init__(self, made, session):
        self.made, self.session = made, session
        self.is_replicas = made.program is not None
        self.masters = {v.op.name: v for v in tf.global_variables()}

    def variables(self):
        if self.is_replicas:
            return self.session.variables()
        self.session.run(self.made.collect)
        return self.session.run(self.masters)

    def assign(self, values):
        """As programs do it: to masters, from which slices are then copied."""
        if self.is_replicas:
            self.session.write(values)
            return
        for name, value in values.items():
            self.session.run(self.masters[name].assign(value))

    def steps(self, number=STEPS):
        for feed in feeds()[:number]:
            self.session.run(self.made.updates, {self.made.inputs[k]: v for k, v in feed.items()})
        return self.variables()


@contextlib.contextmanager
def running(made, prepare=lambda: None, assigned=None):
    """Opens a session of a program; `assigned` are values by name that masters get before."""
    with made.graph.as_default():
        prepare()
        init = [tf.global_variables_initializer(), tf.local_variables_initializer()]
        with made._session() as session:
            one = Running(made, session)
            if not one.is_replicas:
                session.run(init)
            if assigned:
                one.assign(assigned)
            if not one.is_replicas:
                session.run(made.restore)
            yield one


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
    with running(built(kind, mesh, stack, w=3.0)) as own:
        expected = own.steps()
    made = built(kind, mesh, stack)
    with running(made, assigned=VALUES) as assigned:
        assert_same_bits(assigned.steps(), expected)
    with running(made, lambda: initialize_all(pretrained)) as initialized:
        assert_same_bits(initialized.steps(), expected)


@pytest.mark.parametrize("kind", ["simd", "xla"])
@pytest.mark.slow
def test_values_are_written_again_and_again_before_the_first_step(kind, tmp_path):
    stack = "average(islands(local))"
    with running(built(kind, "2", stack, w=3.0)) as own:
        expected = own.steps()
    with running(built(kind, "2", stack)) as one:
        one.assign({"w": VALUES["w"]})
        assert np.all(one.session.read("w/island") == 3.0)
        assert np.all(one.session.read("v/ExponentialMovingAverage") == -1.0)
        one.session.save(str(tmp_path / "model.ckpt"))
        one.assign({"w": VALUES["v"], "v": VALUES["w"]})
        one.assign(VALUES)
        assert_same_bits(one.steps(), expected)
        # From the first step on they are values of their own.
        before = one.session.read("w/ExponentialMovingAverage")
        one.assign({"w": VALUES["w"] + 1.0})
        np.testing.assert_array_equal(one.session.read("w/ExponentialMovingAverage"), before)


@pytest.mark.parametrize("kind", ["placement", "simd"])
def test_variables_in_bfloat16_begin_their_averages_too(kind):
    made = built(kind, "2", "average", dtype=tf.bfloat16)
    values = {"w": np.full(6, 1.2345, "f")}
    with running(made, assigned=values) as one:
        average = one.variables()["w/ExponentialMovingAverage"]
        np.testing.assert_array_equal(average, values["w"])
        if one.is_replicas:  # the master of w has lost bits meanwhile
            one.assign({"w": values["w"] + 1.0})
            average = one.session.read("w/ExponentialMovingAverage")
            np.testing.assert_array_equal(average, values["w"] + 1.0)


@pytest.mark.parametrize("kind", ["placement", "simd"])
@pytest.mark.slow
def test_a_new_run_takes_no_sums_and_no_counts_of_another(kind, tmp_path, caplog):
    stack = "average(local)"
    with running(built(kind, "2", stack)) as first:
        first.steps(3)  # one update, and half of the next one
        path = str(tmp_path / "model.ckpt")
        if first.is_replicas:
            first.session.save(path)
        else:
            tf.train.Saver(list(first.masters.values())).save(first.session, path)
    there = tf.train.load_checkpoint(path)
    assert there.get_tensor("GradientAccumulationOptimizer/mini_step") == 1
    kept = {x: there.get_tensor(x) for x in ("w", "v", "w_momentum_v", "v_momentum_v", "step")}
    made = built(kind, "2", stack)
    assert kept.keys() <= {v.op.name for v in made.graph.get_collection("variables")}
    with running(made, assigned=kept) as own:
        expected = own.steps()
    doors = {
        "init_from_checkpoint": lambda: initialize_all(path),
        "warm_start": lambda: tf.train.warm_start(path, variables_in(path)),
    }
    for prepare in doors.values():
        with running(built(kind, "2", stack), prepare) as new:
            assert_same_bits(new.steps(), expected)
        (text,) = [r.getMessage() for r in caplog.records if "another run" in r.getMessage()]
        assert "mini_step" in text
        caplog.clear()


def test_a_checkpoint_from_before_training_is_one_of_the_values_that_it_begins_with(tmp_path):
    path = str(tmp_path / "model.ckpt")
    made = built("placement", "2", "average")
    with running(made) as one:
        expected = one.steps()
    with made.graph.as_default(), made._session() as session:
        session.run(made.init)
        saver = tf.train.Saver()
        saver.save(session, path)  # nothing was copied to the masters
        assert is_marked(tf.train.load_variable(path, "w/ExponentialMovingAverage"))
        saver.restore(session, path)
        session.run(made.restore)
        assert_same_bits(Running(made, session).steps(), expected)
        variables = tf.trainable_variables()
        with averaged_checkpoint(path, variables) as copy:
            np.testing.assert_array_equal(tf.train.load_variable(copy, "w"), np.ones(6, "f"))
