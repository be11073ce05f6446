"""Trains, evaluates, predicts and exports with a model_fn on a mesh of eight CPU devices.

It runs on every TensorFlow, under this package's Estimator. With --runtime=estimator the same
model_fn runs under TensorFlow's own, up to 2.15; with --runtime=xla as a TPU program on the devices
that jax has.

    python examples/model_fn.py
"""

import argparse
import os
import tempfile

import handwriting
import numpy as np

import mtf_gradsync as gs
from mtf_gradsync import estimator

# isort: split
# After mtf_gradsync, which makes it importable on TensorFlow 2.13 and later.
import mesh_tensorflow as mtf
import tensorflow.compat.v1 as tf

MESH_SHAPE = "rows:4;cols:2"
LAYOUT = "batch:rows;hidden:cols"
BATCH = 60
HELD_OUT = 360  # images


def accuracy(labels, found):
    """The metrics of an evaluation."""
    return {"accuracy": tf.metrics.accuracy(labels, found)}


def model_fn(features, labels, mode, params, config):
    """A network with one hidden layer."""
    build = estimator.SpecBuilder(mode, params, config, mesh_shape=MESH_SHAPE, layout=LAYOUT)
    batch, pixel = mtf.Dimension("batch", BATCH), mtf.Dimension("pixel", 64)
    hidden, digit = mtf.Dimension("hidden", 128), mtf.Dimension("digit", 10)
    images = mtf.import_tf_tensor(build.mesh, features["image"], mtf.Shape([batch, pixel]))
    h = mtf.layers.dense(images, hidden, [pixel], activation=mtf.relu, name="hidden")
    logits = mtf.layers.dense(h, digit, [hidden], name="output")
    found = mtf.argmax(logits, digit)
    if mode == tf.estimator.ModeKeys.PREDICT:
        return build.predict({"digit": found})
    labels = mtf.import_tf_tensor(build.mesh, labels, mtf.Shape([batch]))
    losses = mtf.layers.softmax_cross_entropy_with_logits(logits, mtf.one_hot(labels, digit), digit)
    loss = mtf.reduce_mean(losses)
    if mode == tf.estimator.ModeKeys.EVAL:
        return build.evaluate(loss, accuracy, {"labels": labels, "found": found})
    optimizer = gs.CrossShardOptimizer(mtf.optimize.AdamWeightDecayOptimizer(params["rate"]))
    variables = build.graph.trainable_variables
    grads = mtf.gradients([loss], [v.value for v in variables])
    return build.train(loss, optimizer.apply_grads(grads, variables), optimizer)


def main(model_dir, steps, runtime):
    """Trains, evaluates, predicts and exports.

    Returns:
      The accuracy on held-out images by `evaluate`, and by `predict`.
    """
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.disable_v2_behavior()
    tf.enable_resource_variables()  # ref variables race on a mesh
    seen, held_out = handwriting.load(HELD_OUT)

    def data(images, digits):
        pairs = ({"image": images.astype(np.float32)}, digits.astype(np.int32))
        return tf.data.Dataset.from_tensor_slices(pairs)

    def train_fn():
        return data(*seen).repeat().shuffle(2048, seed=0).batch(BATCH)

    def held_out_fn():
        return data(*held_out).batch(BATCH)

    config = estimator.run_config(model_dir, MESH_SHAPE, tf_random_seed=0)
    params = {"rate": 0.003}
    if runtime == "estimator":
        runs = tf.estimator.Estimator(model_fn, config=config, params=params)
    else:
        runs = estimator.Estimator(model_fn, None, config, params, runtime=runtime, num_cores=8)
    runs.train(train_fn, max_steps=steps)
    result = runs.evaluate(held_out_fn)
    predicted = np.array([one["digit"] for one in runs.predict(held_out_fn)])

    def serving():
        image = tf.placeholder(tf.float32, [BATCH, 64])
        return tf.estimator.export.ServingInputReceiver({"image": image}, {"image": image})

    path = runs.export_saved_model(os.path.join(model_dir, "exported"), serving)
    print(f"exported: {tf.compat.as_str(path)}")
    return result["accuracy"], np.mean(predicted == held_out[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model_dir", help="default: a temporary one")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--runtime",
        default="placement_mesh",
        choices=["placement_mesh", "cpu_replicas", "xla", "estimator"],
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        evaluated, predicted = main(args.model_dir or temporary, args.steps, args.runtime)
    print(f"held-out accuracy: {evaluated:.1%}, of predictions: {predicted:.1%}")
