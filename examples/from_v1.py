"""Moves a model from tf.compat.v1 to a mesh in the middle of its training, and back.

The first part is a model as one writes it for TPUEstimator, with CrossShardOptimizer around
AdamOptimizer. The second is the same model in Mesh-TensorFlow, on a mesh of eight CPU devices, with
the same optimizer in a MeshOptimizer. Each takes the other's checkpoint, Adam's slots included: the
weights end up as those of a model that never moved.

    python examples/from_v1.py
"""

import argparse
import os
import tempfile

import handwriting
import numpy as np

import mtf_gradsync as gs

# isort: split
# After mtf_gradsync, which makes it importable on TensorFlow 2.13 and later.
import mesh_tensorflow as mtf
import tensorflow.compat.v1 as tf

BATCH = 64
HELD_OUT = 360  # images
MESH_SHAPE = "batch:4;model:2"
LAYOUT = "batch:batch;hidden:model"


def v1_model(x, y):
    """The model before: its loss, its training step, and two operations that it does not need."""
    w1 = tf.get_variable("w1", [64, 128], initializer=tf.random_normal_initializer(0, 0.1, 1))
    w2 = tf.get_variable("w2", [128, 10], initializer=tf.random_normal_initializer(0, 0.1, 2))
    logits = tf.matmul(tf.nn.relu(tf.matmul(x, w1)), w2)
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
    # On a TPU this wrapper is tf.tpu.CrossShardOptimizer, on other devices the wrapped optimizer.
    optimizer = gs.CrossShardOptimizer(tf.train.AdamOptimizer(0.01))
    step = tf.train.get_or_create_global_step()
    return loss, optimizer.minimize(loss, step), tf.no_op(), tf.no_op()


def mesh_model(x, y):
    """The model on a mesh: the same names, shapes and optimizer."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    batch, pixel = mtf.Dimension("batch", BATCH), mtf.Dimension("pixel", 64)
    hidden, digit = mtf.Dimension("hidden", 128), mtf.Dimension("digit", 10)
    images = mtf.import_tf_tensor(mesh, x, [batch, pixel])
    labels = mtf.import_tf_tensor(mesh, y, [batch])
    w1 = mtf.get_variable(mesh, "w1", [pixel, hidden], initializer=tf.zeros_initializer())
    w2 = mtf.get_variable(mesh, "w2", [hidden, digit], initializer=tf.zeros_initializer())
    logits = mtf.einsum([mtf.relu(mtf.einsum([images, w1], [batch, hidden])), w2], [batch, digit])
    loss = mtf.reduce_mean(
        mtf.layers.softmax_cross_entropy_with_logits(logits, mtf.one_hot(labels, digit), digit)
    )
    optimizer = gs.CrossShardOptimizer(gs.MeshOptimizer(tf.train.AdamOptimizer(0.01)))
    updates = optimizer.minimize(loss, tf.train.get_or_create_global_step())
    devices = [f"/device:CPU:{i}" for i in range(8)]
    mesh_impl = mtf.placement_mesh_impl.PlacementMeshImpl(
        mtf.convert_to_shape(MESH_SHAPE), mtf.convert_to_layout_rules(LAYOUT), devices
    )
    lowering = mtf.Lowering(graph, {mesh: mesh_impl})
    update = tf.group([lowering.lowered_operation(op) for op in updates])
    # Steps update the slices on the mesh; savers read and write the masters.
    after_restore, before_save = (
        lowering.copy_masters_to_slices(),
        lowering.copy_slices_to_masters(),
    )
    return lowering.export_to_tf_tensor(loss), update, after_restore, before_save


def train(model, images, digits, steps, restore=None, save=None):
    """Trains some steps; returns the last loss and all variables."""
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [BATCH, 64])
        y = tf.placeholder(tf.int32, [BATCH])
        loss, update, after_restore, before_save = model(x, y)
        saver = tf.train.Saver()
        masters = {v.op.name: v for v in tf.global_variables()}
        with tf.Session(config=gs.session_config(num_cpu_devices=8)) as session:
            session.run(tf.global_variables_initializer())
            if restore:
                saver.restore(session, restore)
            session.run(after_restore)
            for step in steps:
                rows = np.random.RandomState(step).randint(0, len(images), BATCH)
                feed = {x: images[rows], y: digits[rows]}
                value, _ = session.run([loss, update], feed)
            session.run(before_save)
            if save:
                saver.save(session, save, write_meta_graph=False)
            return value, session.run(masters)


def main(steps):
    """Trains without a mesh, then on a mesh, then without; returns the variables of both ways."""
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.disable_v2_behavior()
    tf.enable_resource_variables()  # ref variables race on a mesh
    (images, digits), _ = handwriting.load(HELD_OUT)
    third = steps // 3
    with tempfile.TemporaryDirectory() as directory:
        one, two = (os.path.join(directory, name) for name in ("one", "two"))
        loss, _ = train(v1_model, images, digits, range(third), save=one)
        print(f"loss without a mesh: {loss:.3f}")
        loss, _ = train(mesh_model, images, digits, range(third, 2 * third), one, two)
        print(f"loss on the mesh: {loss:.3f}")
        loss, moved = train(v1_model, images, digits, range(2 * third, steps), two)
        print(f"loss without a mesh again: {loss:.3f}")
    _, stayed = train(v1_model, images, digits, range(steps))
    difference = max(np.abs(moved[name] - stayed[name]).max() for name in stayed)
    print(f"largest difference from a model that never moved: {difference:.1e}")
    return moved, stayed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    main(parser.parse_args().steps)
