"""A model with a bit of everything that an exported step has to carry along, and ways to run it."""

import collections
import contextlib
import os
import subprocess
import sys

import numpy as np

import mtf_gradsync as gs
from mtf_gradsync import simd, xla
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.runtimes._private.jax import compiled_hlo
from mtf_gradsync.runtimes.xla.hlo_collectives import find_hlo_collectives
from tests import grappler
from tests.forked import TIME_LIMIT

STEPS, BATCH, WIDTH = 5, 8, 4
# Imports that fail, and a program to run after that as its own command line says.
_WITHOUT_TENSORFLOW = """
import runpy, sys
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tensorflow", "mesh_tensorflow", "mtf_gradsync"):
            raise ImportError(name + " is not here")
sys.meta_path.insert(0, Refused())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Model:
    """Two layers on a shuffled mesh of 2 x 2 cores, with accumulated gradients.

    One layer is kept in bfloat16; words are drawn from int64 numbers; noise is drawn on each core;
    the learning rate follows the step counter, which stands outside, and a factor of the host.
    """

    def __init__(self):
        tf.set_random_seed(1)
        counter = tf.train.get_or_create_global_step()
        before = tf.identity(counter.read_value(), "steps_before")
        self.x = tf.placeholder(tf.float32, [BATCH, WIDTH], "x")
        self.word = tf.placeholder(tf.int64, [BATCH], "word")
        self.factor = tf.placeholder(tf.float32, [], "factor")
        self.gains = [tf.placeholder(tf.float32, [], f"gain_{i}") for i in range(2)]
        with tf.variable_scope("", use_resource=True):
            # More than 32 bits hold.
            start = tf.constant_initializer(1 << 40)
            seen = tf.get_variable("seen", [], tf.int64, initializer=start, trainable=False)
        layout = "batch:rows;hidden:cols"
        with simd.tpu_program("rows:2;cols:2", layout, [2, 0, 3, 1]) as self.program:
            self.gain = self.program.per_replica([self.gains[0], self.gains[1]] * 2, "gain")
            rate = 0.01 * self.factor / (1.0 + tf.cast(before, tf.float32))
            loss, updates, graph, mesh = self._loss_and_updates(rate)
            self.lowering = mtf.Lowering(graph, {mesh: self.program.mesh_impl})
            self.updates = [self.lowering.lowered_operation(u) for u in updates]
            self.loss = self.lowering.export_to_tf_tensor(loss)
            self.noise = tf.random.uniform([3])
            self.narrow = tf.cast(self.loss, tf.bfloat16) * tf.cast(self.gain, tf.bfloat16)
            self.seen = seen.assign_add(tf.reduce_sum(self.word), read_value=True)
        with tf.control_dependencies([*self.updates, before]):
            self.step = counter.assign_add(1).op

    def _loss_and_updates(self, rate):
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        batch, width = mtf.Dimension("batch", BATCH), mtf.Dimension("width", WIDTH)
        hidden, vocabulary = mtf.Dimension("hidden", WIDTH), mtf.Dimension("vocabulary", 10)
        random = np.random.RandomState(0)

        def variable(name, shape, dtype):
            value = random.standard_normal([d.size for d in shape]).astype(np.float32)
            initializer = tf.constant_initializer(value)
            return mtf.get_variable(mesh, name, shape, dtype=dtype, initializer=initializer)

        wide = mtf.VariableDType(tf.float32, tf.float32, tf.float32)
        narrow = mtf.VariableDType(tf.float32, tf.bfloat16, tf.float32)
        table = variable("table", [vocabulary, width], narrow)
        first, second = (variable(n, [width, hidden], wide) for n in ("first", "second"))
        x = mtf.import_tf_tensor(mesh, self.x, [batch, width])
        word = mtf.import_tf_tensor(mesh, self.word, [batch])
        word = mtf.cast(word, tf.int32)
        x += mtf.gather(table, word, vocabulary) + mtf.random_uniform(mesh, x.shape, maxval=0.1)
        h = mtf.tanh(mtf.einsum([x, first], [batch, hidden]))
        h *= mtf.einsum([x, second], [batch, hidden])
        loss = mtf.reduce_mean(mtf.square(h))
        opt = gs.GradientAccumulationOptimizer(
            mtf.optimize.AdafactorOptimizer(learning_rate=rate),  # reads the step counter, too
            backward_passes_per_step=2,
            average_aggregated_gradients=True,
        )
        grads = mtf.gradients([loss], [v.outputs[0] for v in graph.trainable_variables])
        return loss, opt.apply_grads(grads, graph.trainable_variables), graph, mesh

    @property
    def fetches(self):
        return {"loss": self.loss, "noise": self.noise, "narrow": self.narrow, "seen": self.seen}

    @property
    def inputs(self):
        """Names for the inputs that are not called after their operation."""
        return {"words": self.word}

    def export(self, folder, **options):
        options = {"inputs": self.inputs, "keep": {self.factor: 0.5}, **options}
        xla.export(self.program, self.lowering, self.fetches, folder, **options)

    def run(self, session, steps):
        """Makes some of the steps that `batches` is for; returns what they fetch, by name."""
        found = []
        given = batches()
        for i in steps:
            feed = {self.x: given["x"][i], self.word: given["words"][i], self.factor: 0.5}
            feed.update(zip(self.gains, given["gain"][i]))
            found.append(session.run([self.fetches, self.step], feed)[0])
        return {name: np.stack([f[name] for f in found]) for name in self.fetches}


def collectives(program):
    """The collectives of a `LoadedProgram`, as its compiler made them, by kind."""
    found = find_hlo_collectives(compiled_hlo(program.executable))
    return collections.Counter(c.operation for c in found)


def batches():
    """Inputs of all steps, by the names that the exported step has for them."""
    random = np.random.RandomState(1)
    return {
        "x": random.standard_normal([STEPS, BATCH, WIDTH]).astype(np.float32),
        "words": random.randint(0, 10, [STEPS, BATCH]).astype(np.int64),
        "gain": random.uniform(size=[STEPS, 2]).astype(np.float32),
    }


@contextlib.contextmanager
def model():
    """A model in a graph of its own."""
    with tf.Graph().as_default():
        yield Model()


def assert_same_bits(found, expected):
    assert set(found) == set(expected)
    for name, value in expected.items():
        bits = np.ascontiguousarray(value)
        assert np.asarray(found[name]).tobytes() == bits.tobytes(), name
        assert np.shape(found[name]) == np.shape(value), name


def run_alone(folder, *args):
    """Runs a folder's own runner where neither TensorFlow nor this package can be imported."""
    return subprocess.run(
        command(folder, *args),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
    )


def command(folder, *args):
    """The command line of `run_alone`."""
    runner = str(os.path.join(folder, "run.py"))
    return [sys.executable, "-I", "-c", _WITHOUT_TENSORFLOW, runner, *map(str, args)]


def environment():
    """What `run_alone` runs in: of the tests' own settings only how sessions here compile."""
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": grappler.XLA_FLAG}
