"""Trains without TensorFlow: a step is exported, runs with jax, and its values come back.

The step of a small network, on a mesh of eight cores, becomes a folder that runs with numpy and jax
alone. Here another process on this machine runs it; a machine with eight GPUs could as well. The
trained values become a TensorFlow checkpoint again.

    python examples/take_along.py
"""

import argparse
import pathlib
import subprocess
import sys

import handwriting
import numpy as np

import mtf_gradsync as gs

# isort: split
# After mtf_gradsync, which makes it importable on TensorFlow 2.13 and later.
import mesh_tensorflow as mtf
import tensorflow.compat.v1 as tf

from mtf_gradsync import simd, xla

MESH_SHAPE = "batch:4;model:2"
LAYOUT = "batch:batch;hidden:model"
BATCH_SIZE = 64
HELD_OUT = 360  # images


def export(folder, learning_rate):
    """Builds a training step and writes it to a folder."""
    x = tf.placeholder(tf.float32, [BATCH_SIZE, 64])
    y = tf.placeholder(tf.int32, [BATCH_SIZE])
    with simd.tpu_program(MESH_SHAPE, LAYOUT) as program:
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        batch, pixel = mtf.Dimension("batch", BATCH_SIZE), mtf.Dimension("pixel", 64)
        hidden, digit = mtf.Dimension("hidden", 128), mtf.Dimension("digit", 10)
        images = mtf.import_tf_tensor(mesh, x, [batch, pixel])
        labels = mtf.import_tf_tensor(mesh, y, [batch])
        h = mtf.layers.dense(images, hidden, [pixel], activation=mtf.relu, name="hidden")
        logits = mtf.layers.dense(h, digit, [hidden], name="output")
        cross_entropy = mtf.layers.softmax_cross_entropy_with_logits(
            logits, mtf.one_hot(labels, digit), digit
        )
        loss = mtf.reduce_mean(cross_entropy)
        opt = gs.CrossShardOptimizer(mtf.optimize.AdamWeightDecayOptimizer(learning_rate))
        grads = mtf.gradients([loss], [v.value for v in graph.trainable_variables])
        opt.apply_grads(grads, graph.trainable_variables)  # all updates are exported
        lowering = mtf.Lowering(graph, {mesh: program.mesh_impl})
        fetches = {"loss": lowering.export_to_tf_tensor(loss)}
    inputs = {"images": x, "digits": y}
    xla.export(program, lowering, fetches, folder / "step", inputs=inputs, replace=True)


def main(steps, learning_rate, folder):
    """Trains, and returns the accuracy on held-out images."""
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    tf.set_random_seed(0)
    export(folder, learning_rate)

    (images, digits), held_out = handwriting.load(HELD_OUT)
    rows = np.random.RandomState(0).randint(0, len(images), [steps, BATCH_SIZE])
    batches = folder / "batches.npz"
    np.savez(batches, images=images[rows].astype("float32"), digits=digits[rows].astype("int32"))

    # This command needs the folder, the batches, numpy and jax.
    run = [sys.executable, folder / "step" / "run.py", "--inputs", batches, "--time"]
    run += ["--save", folder / "trained", "--replace"]
    subprocess.run(list(map(str, run)), check=True)

    checkpoint = tf.train.load_checkpoint(xla.to_checkpoint(folder / "trained", folder / "model"))
    w1, b1, w2, b2 = (
        checkpoint.get_tensor(f"{layer}/{part}")
        for layer in ("hidden", "output")
        for part in ("kernel", "bias")
    )
    found = np.argmax(np.maximum(held_out[0] @ w1 + b1, 0) @ w2 + b2, axis=-1)
    return np.mean(found == held_out[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--learning_rate", type=float, default=0.003)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/take_along"))
    print(f"held-out accuracy: {main(**vars(parser.parse_args())):.1%}")
