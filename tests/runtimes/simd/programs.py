"""Small programs that the tests of the emulator run."""

import numpy as np

from mtf_gradsync import simd
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness

# name -> mesh shape, layout, logical_to_physical
MESHES = {
    "8": ("all:8", "batch:all", None),
    "4x2": ("rows:4;cols:2", "batch:rows;hidden:cols", None),
    "4x2 shuffled": ("rows:4;cols:2", "batch:rows;hidden:cols", [3, 1, 4, 0, 5, 7, 2, 6]),
    "2x2x2": ("a:2;b:2;c:2", "batch:a;hidden:b;inputs:c", None),
}

BATCH, INPUTS, HIDDEN = 16, 8, 4
EPS = np.finfo(np.float32).eps


def small_integers(shape, seed, limit=1):
    """Integers that float32 adds and multiplies without rounding."""
    return np.random.RandomState(seed).randint(-limit, limit + 1, shape).astype(np.float32)


class SGD(mtf.optimize.Optimizer):
    """The simplest optimizer; with a power of two as learning rate it rounds nothing."""

    def __init__(self, learning_rate):
        self._learning_rate = learning_rate

    def apply_grad(self, grad, var):
        return [mtf.assign_sub(var, grad * self._learning_rate)]


class Regression:
    """Linear regression through two summed outputs: the loss is exact in float32 on integers."""

    def __init__(self, make_optimizer, steps=3, microbatches=1, dtype=tf.float32):
        self.make_optimizer, self.microbatches, self.dtype = make_optimizer, microbatches, dtype
        self.steps = steps
        self.x = small_integers([steps, BATCH, INPUTS], seed=1)
        self.w = small_integers([INPUTS, HIDDEN], seed=2)
        self.y = small_integers([steps, BATCH, HIDDEN], seed=3)

    def placeholders(self):
        self.feeds = [
            tf.placeholder(tf.float32, [BATCH, INPUTS]),
            tf.placeholder(tf.float32, [BATCH, HIDDEN]),
        ]

    def build(self, impl):
        """Returns the lowering, the loss and the updates."""
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        batch, inputs, hidden = (
            mtf.Dimension("batch", BATCH),
            mtf.Dimension("inputs", INPUTS),
            mtf.Dimension("hidden", HIDDEN),
        )
        x = mtf.import_tf_tensor(mesh, tf.cast(self.feeds[0], self.dtype), [batch, inputs])
        y = mtf.import_tf_tensor(mesh, tf.cast(self.feeds[1], self.dtype), [batch, hidden])
        w = mtf.get_variable(
            mesh,
            "w",
            [inputs, hidden],
            dtype=mtf.VariableDType(tf.float32, tf.float32, self.dtype),
            initializer=tf.constant_initializer(self.w),
        )

        def model(features):
            error = mtf.einsum([features["x"], w], reduced_dims=[inputs]) - features["y"]
            return {"loss": mtf.reduce_sum(mtf.square(error))}

        features = {"x": x, "y": y}
        if self.microbatches > 1:
            grads, out = mtf.serialize_training_step(features, model, batch, self.microbatches)
            loss = out["loss"]
        else:
            loss = model(features)["loss"]
            grads = mtf.gradients([loss], [v.outputs[0] for v in graph.trainable_variables])
        updates = self.make_optimizer().apply_grads(grads, graph.trainable_variables)
        lowering = mtf.Lowering(graph, {mesh: impl})
        return (
            lowering,
            lowering.export_to_tf_tensor(loss),
            [lowering.lowered_operation(u) for u in updates],
        )

    def steps_in(self, session, fetches):
        return [
            session.run(fetches, {self.feeds[0]: x, self.feeds[1]: y})
            for x, y in zip(self.x, self.y)
        ]

    def on_simd(self, mesh_shape, layout, logical_to_physical=None):
        """Losses and final variables on emulated cores."""
        with tf.Graph().as_default():
            self.placeholders()
            with simd.tpu_program(mesh_shape, layout, logical_to_physical) as program:
                lowering, loss, updates = self.build(program.mesh_impl)
            with program.session(lowering) as session:
                losses = [out[0] for out in self.steps_in(session, [loss, updates])]
                return losses, session.variables()

    def on_one_processor(self):
        """Losses and final variables on a placement mesh of size 1."""
        with tf.Graph().as_default():
            self.placeholders()
            lowering, loss, updates = self.build(harness.placement(*harness.ONE))
            with tf.Session(config=simd.cpu_config()) as session:
                session.run(tf.global_variables_initializer())
                session.run(lowering.copy_masters_to_slices())
                losses = [out[0] for out in self.steps_in(session, [loss, updates])]
                session.run(lowering.copy_slices_to_masters())
                return losses, {v.op.name: session.run(v) for v in tf.global_variables()}

    def in_numpy(self, learning_rate):
        """Losses and the final w under SGD, in float64."""
        w, losses = self.w.astype(np.float64), []
        for x, y in zip(self.x.astype(np.float64), self.y.astype(np.float64)):
            error = x @ w - y
            losses.append(np.sum(error**2))
            w = w - learning_rate * 2 * x.T @ error
        return losses, w
