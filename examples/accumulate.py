"""Trains on big batches that are made of four microbatches, on a mesh of eight CPU devices.

Each of four shards adds up its own gradients. On every fourth microbatch step they are reduced over
the mesh, and the weights change. The learning rate follows the updates, not the steps. For
comparison the same network trains on the big batches themselves: the weights end up the same.

    python examples/accumulate.py
"""

import argparse

import handwriting
import numpy as np
from tqdm import trange

import mtf_gradsync as gs

# isort: split
# After mtf_gradsync, which makes it importable on TensorFlow 2.13 and later.
import mesh_tensorflow as mtf
import tensorflow.compat.v1 as tf

MESH_SHAPE = "batch:4;model:2"
LAYOUT = "batch:batch;hidden:model"
MICRO_STEPS = 4  # for each update
MICRO_BATCH = 32
HELD_OUT = 360  # images


class Trainer:
    """A network, its optimizer and a session, for batches of one size."""

    def __init__(self, batch_size, micro_steps):
        self.graph = tf.Graph()
        with self.graph.as_default():
            self._build(batch_size, micro_steps)

    def _build(self, batch_size, micro_steps):
        self.x = tf.placeholder(tf.float32, [batch_size, 64])
        self.y = tf.placeholder(tf.int32, [batch_size])
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        batch, pixel = mtf.Dimension("batch", batch_size), mtf.Dimension("pixel", 64)
        hidden, digit = mtf.Dimension("hidden", 128), mtf.Dimension("digit", 10)
        images = mtf.import_tf_tensor(mesh, self.x, [batch, pixel])
        labels = mtf.import_tf_tensor(mesh, self.y, [batch])
        init = [tf.random_normal_initializer(stddev=0.1, seed=seed) for seed in (1, 2)]
        w1 = mtf.get_variable(mesh, "w1", [pixel, hidden], initializer=init[0])
        w2 = mtf.get_variable(mesh, "w2", [hidden, digit], initializer=init[1])
        h = mtf.relu(mtf.einsum([images, w1], [batch, hidden]))
        logits = mtf.einsum([h, w2], [batch, digit])
        loss = mtf.reduce_mean(
            mtf.layers.softmax_cross_entropy_with_logits(logits, mtf.one_hot(labels, digit), digit)
        )

        # Updates made so far: an mtf scalar, for schedules.
        updates = mtf.cast(gs.get_update_step(mesh), tf.float32)
        rate = 0.02 * mtf.rsqrt(1.0 + 0.1 * updates)
        opt = gs.GradientAccumulationOptimizer(
            mtf.optimize.AdamWeightDecayOptimizer(rate),
            backward_passes_per_step=micro_steps,
            average_aggregated_gradients=True,  # the gradient of one big batch
            should_skip_update_fn=gs.skip_not_finite,  # a NaN skips one step
            mesh_shape=MESH_SHAPE,
            layout=LAYOUT,
        )
        update_ops = opt.minimize(loss)
        fields = {**opt.progress_fields(), "learning rate": rate, "loss": loss}

        devices = [f"/device:CPU:{i}" for i in range(8)]
        mesh_impl = mtf.placement_mesh_impl.PlacementMeshImpl(
            mtf.convert_to_shape(MESH_SHAPE), mtf.convert_to_layout_rules(LAYOUT), devices
        )
        lowering = mtf.Lowering(graph, {mesh: mesh_impl})
        self.update = [lowering.lowered_operation(op) for op in update_ops]
        self.fields = {name: lowering.export_to_tf_tensor(t) for name, t in fields.items()}
        self.weights = [lowering.export_to_tf_tensor(w) for w in (w1, w2)]
        start = [tf.global_variables_initializer(), lowering.copy_masters_to_slices()]
        self.session = tf.Session(config=gs.session_config(num_cpu_devices=8))
        for op in start:
            self.session.run(op)

    def step(self, x, y):
        """Trains on a batch; returns progress, learning rate and loss."""
        return self.session.run([self.fields, self.update], {self.x: x, self.y: y})[0]


def main(updates):
    """Trains with and without accumulation; returns held-out accuracy and how weights differ."""
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.disable_v2_behavior()
    tf.enable_resource_variables()  # ref variables race on a mesh
    (images, digits), held_out = handwriting.load(HELD_OUT)
    accumulating, big = Trainer(MICRO_BATCH, MICRO_STEPS), Trainer(MICRO_BATCH * MICRO_STEPS, 1)
    progress = trange(updates)
    for update in progress:
        random = np.random.RandomState(update)
        rows = random.randint(0, len(images), [MICRO_STEPS, MICRO_BATCH])
        for part in rows:
            progress.set_postfix(accumulating.step(images[part], digits[part]), refresh=False)
        big.step(images[rows.ravel()], digits[rows.ravel()])
    (w1, w2), others = (t.session.run(t.weights) for t in (accumulating, big))
    found = np.argmax(np.maximum(held_out[0] @ w1, 0) @ w2, axis=1)
    difference = max(np.abs(a - b).max() for a, b in zip((w1, w2), others))
    return np.mean(found == held_out[1]), difference


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=60)
    accuracy, difference = main(**vars(parser.parse_args()))
    print(f"held-out accuracy: {accuracy:.1%}")
    print(f"largest difference from training on the big batches: {difference:.1e}")
