"""No array that a caller gave or got is the memory of a variable, on any runtime."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync import xla
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.tools.islands.session_values import Values
from tests import harness

MESH = ("all:4", "batch:all", ("batch",))
SIZE = 64  # of an accumulator's slice: it begins where TensorFlow and XLA take memory over
XLA = pytest.param("xla", marks=pytest.mark.xla)


def aligned(value):
    """A copy at an address that TensorFlow and XLA take over without a copy of their own."""
    value = np.asarray(value)
    memory = np.empty(value.nbytes + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    made = memory[begin : begin + value.nbytes].view(value.dtype).reshape(value.shape)
    made[...] = value
    return made


def bits(values):
    return {name: np.asarray(value).tobytes() for name, value in values.items()}


def overwrite(values):
    """What the owner of arrays may do with them."""
    for value in values.values():
        if value.flags.writeable:
            value[...] = 99


def build(mesh, inputs):
    """Accumulators of each shard, to which steps add in place."""
    batch, size = mtf.Dimension("batch", 4), mtf.Dimension("size", SIZE)
    w = mtf.get_variable(mesh, "w", mtf.Shape([size]), initializer=tf.ones_initializer())
    x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([batch, size]))
    loss = mtf.reduce_mean(mtf.square(x * w))
    optimizer = gs.GradientAccumulationOptimizer(
        mtf.optimize.MomentumOptimizer(0.1, 0.9), 3, mesh_shape=MESH[0], layout=MESH[1]
    )
    return optimizer.apply_grads(mtf.gradients([loss], [w]), [w.operation]), {"loss": loss}


FEED = {"x": np.linspace(-1, 1, 4 * SIZE, dtype=np.float32).reshape(4, SIZE)}
NAMES = ["w", "w/gradient_accumulator"]


class Running:
    """A session of the program, with the doors that a runtime has."""

    def __init__(self, kind, made, session):
        self.made, self.session = made, session
        if kind in ("simd", "xla"):
            self.write, self.variables = session.write, session.variables
        else:
            values = Values(made.lowering, NAMES)
            session.run(made.init)
            session.run(made.restore)
            self.write = lambda given: values.write(session, given)
            self.variables = lambda: values.read(session)

    def step(self, feed=FEED):
        feeds = {self.made.inputs[name]: value for name, value in feed.items()}
        return self.session.run([self.made.fetched, self.made.updates], feeds)[0]

    def read(self):
        return {name: value for name, value in self.variables().items() if name in NAMES}


@pytest.fixture(scope="module", params=["placement", "shared", "simd", XLA])
def running(request):
    made = harness.built(request.param, *MESH[:2], build, FEED)
    with made.graph.as_default():
        running = Running(request.param, made, made._session())
    yield running
    running.session.close()


def test_training_leaves_written_arrays_alone(running):
    first = running.read()
    given = {name: aligned(value + 1) for name, value in first.items()}
    before = bits(given)
    running.write(given)
    # Slices are cut from masters; once these have moved, a slice has the memory for itself.
    for _ in range(4):
        running.read()
        running.step()
    assert bits(given) == before
    assert bits(running.read()) != before
    running.write(first)


def test_their_owner_may_overwrite_written_arrays(running):
    first = running.read()
    given = {name: aligned(value + 1) for name, value in first.items()}
    before = bits(given)
    running.write(given)
    overwrite(given)
    assert bits(running.read()) == before
    running.write(first)


def test_what_was_read_is_a_copy(running):
    first = running.read()
    running.write(first)
    got, before = running.read(), bits(first)
    running.step()
    running.read()
    running.step()
    assert bits(got) == before
    running.write(first)
    again = running.read()
    overwrite(again)
    if hasattr(running.session, "read"):
        overwrite({name: running.session.read(name) for name in NAMES})
    assert bits(running.read()) == before


def test_fed_and_fetched_arrays_are_no_steps_memory(running):
    """A step that is under way, on XLA devices, reads what was fed, not what came after."""
    first = running.read()
    running.step()
    expected = bits(running.read())
    running.write(first)
    fed = {"x": aligned(FEED["x"])}
    feeds = {running.made.inputs["x"]: fed["x"]}
    fetches = [running.made.fetched, running.made.inputs["x"], running.made.updates]
    if hasattr(running.session, "dispatch"):
        step = running.session.dispatch(fetches, feeds)
        overwrite(fed)
        fetched, x, _ = step.result()
    else:
        fetched, x, _ = running.session.run(fetches, feeds)
        overwrite(fed)
    overwrite({"x": x, **{k: np.asarray(v) for k, v in fetched.items()}})
    assert bits(running.read()) == expected
    running.write(first)


@pytest.mark.parametrize("kind", ["simd", XLA])
def test_variables_that_a_program_sets_to_what_is_fed(kind):
    rows = aligned(np.ones((2, SIZE), np.float32))
    with tf.Graph().as_default() as graph:
        inputs = {"x": tf.placeholder(tf.float32, [4, SIZE])}
        with gs.simd.tpu_program(*MESH[:2]) as program:
            mesh = mtf.Mesh(mtf.Graph(), "mesh")
            updates, _ = build(mesh, inputs)
            lowering = mtf.Lowering(mesh.graph, {mesh: program.mesh_impl})
            updates = [lowering.lowered_operation(op) for op in updates]
        # A row is a view, to which TensorFlow adds in place.
        fed = tf.placeholder(tf.float32, rows.shape)
        held = tf.get_variable("held", [SIZE], use_resource=True, trainable=False)
        hold, add = held.assign(fed[1]).op, held.assign_add(tf.ones([SIZE])).op
    session = xla.session(program, lowering) if kind == "xla" else program.session(lowering)
    with graph.as_default(), session:
        session.run(hold, {fed: rows})
        session.run(add)
        session.run(add)
        np.testing.assert_array_equal(rows, 1)
        rows[...] = 99
        np.testing.assert_array_equal(session.read("held"), 3)


@pytest.mark.xla
def test_a_constant_of_the_program_that_was_fetched():
    """It stays on the devices, in the memory that it had on the host."""
    with tf.Graph().as_default():
        constant = tf.zeros([SIZE]) + 1.0
        with gs.simd.tpu_program("all:2", "") as program:
            doubled = constant * 2.0
        with xla.session(program, cache_dir=None) as session:
            for _ in range(3):
                found, got = session.run([doubled, constant])
                np.testing.assert_array_equal(found, 2)
                got[...] = 99
