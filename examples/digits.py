"""Classifies handwritten digits on a mesh of eight virtual CPU devices.

The batch is split four ways and the hidden layer two ways. Each shard's gradients are clipped
by that shard's own norm, then all of them are reduced over the mesh together.

    python examples/digits.py
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
BATCH_SIZE = 64
HELD_OUT = 360  # images


def logits(images, mesh, axes):
    """A network with one hidden layer. The images' first dimension numbers the shards."""
    example = mtf.Dimension("example", images.shape[0].value // axes.num_shards)
    pixel, hidden = mtf.Dimension("pixel", 64), mtf.Dimension("hidden", 128)
    shape = mtf.Shape([*axes.shard_dims, example, pixel])
    x = mtf.import_tf_tensor(mesh, tf.reshape(images, shape.to_integer_list), shape)
    h = mtf.layers.dense(x, hidden, [pixel], activation=mtf.relu, name="hidden")
    return mtf.layers.dense(h, mtf.Dimension("digit", 10), [hidden], name="output")


def main(steps, clip_norm, learning_rate):
    """Trains, and returns the accuracy on held-out images."""
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.disable_v2_behavior()
    tf.enable_resource_variables()  # ref variables race on a mesh
    tf.set_random_seed(0)
    x = tf.placeholder(tf.float32, [BATCH_SIZE, 64])
    y = tf.placeholder(tf.int32, [BATCH_SIZE])
    x_held_out = tf.placeholder(tf.float32, [HELD_OUT, 64])

    axes = gs.ReplicaAxes(MESH_SHAPE, LAYOUT)
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    outputs = logits(x, mesh, axes)
    digit = outputs.shape[-1]
    label_shape = mtf.Shape(outputs.shape[:-1])
    labels = mtf.import_tf_tensor(mesh, tf.reshape(y, label_shape.to_integer_list), label_shape)
    cross_entropy = mtf.layers.softmax_cross_entropy_with_logits(
        outputs, mtf.one_hot(labels, digit), digit
    )
    loss = mtf.reduce_mean(cross_entropy, output_shape=mtf.Shape(axes.shard_dims))  # per shard

    opt = gs.CrossShardOptimizer(
        mtf.optimize.AdamWeightDecayOptimizer(learning_rate, weight_decay_rate=0.01), axes=axes
    )
    grads, variables = zip(*opt.compute_gradients(loss))
    grads, norms = gs.clip_by_shard_norm(grads, clip_norm, axes)
    update_ops = opt.apply_gradients(list(zip(grads, variables)))
    mean_loss = mtf.reduce_mean(loss)
    predicted = mtf.argmax(logits(x_held_out, mesh, axes), digit)

    devices = [f"/device:CPU:{i}" for i in range(8)]
    mesh_impl = mtf.placement_mesh_impl.PlacementMeshImpl(
        mtf.convert_to_shape(MESH_SHAPE), mtf.convert_to_layout_rules(LAYOUT), devices
    )
    lowering = mtf.Lowering(graph, {mesh: mesh_impl})
    update = tf.group([lowering.lowered_operation(op) for op in update_ops])
    shown = [lowering.export_to_tf_tensor(t) for t in (mean_loss, norms)]
    predicted = tf.reshape(lowering.export_to_tf_tensor(predicted), [-1])

    (images, digits), held_out = handwriting.load(HELD_OUT)
    copy_masters = lowering.copy_masters_to_slices()
    with tf.Session(config=gs.session_config(num_cpu_devices=8)) as session:
        session.run(tf.global_variables_initializer())
        session.run(copy_masters)
        progress = trange(steps)
        for step in progress:
            rows = np.random.RandomState(step).randint(0, len(images), BATCH_SIZE)
            feed = {x: images[rows], y: digits[rows]}
            loss_now, norms_now, _ = session.run([*shown, update], feed)
            progress.set_postfix(loss=loss_now, norms=norms_now.round(2), refresh=False)
        found = session.run(predicted, {x_held_out: held_out[0]})
    return np.mean(found == held_out[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--clip_norm", type=float, default=0.5, help="of one shard's gradients")
    parser.add_argument("--learning_rate", type=float, default=0.003)
    print(f"held-out accuracy: {main(**vars(parser.parse_args())):.1%}")
