"""A model_fn for pictures of digits, as a user writes it with `SpecBuilder`."""

from __future__ import annotations

import numpy as np

import mtf_gradsync as gs
from mtf_gradsync import estimator
from mtf_gradsync._private.libraries import mtf, tf

CORES, LAYOUT = 4, "batch:rows;hidden:cols"
MESHES = {4: "rows:2;cols:2", 8: "rows:4;cols:2"}
MESH = MESHES[CORES]
BATCH, STEPS = 16, 6


def config(**settings):
    """The run's configuration: a checkpoint after every third step."""
    defaults = {"tf_random_seed": 1, "save_checkpoints_steps": 3, "save_summary_steps": 1}
    return estimator.run_config(mesh_shape=MESH, **{**defaults, **settings})


def adam():
    return mtf.optimize.AdamWeightDecayOptimizer(0.01)


# name -> what makes it for the variables that are trained.
OPTIMIZERS = {
    "bare": lambda _: adam(),
    "cross_shard": lambda _: gs.CrossShardOptimizer(adam()),
    "local": lambda _: gs.GradientAccumulationOptimizer(
        gs.ClipByGlobalNormOptimizer(adam(), 1.0), 2, accumulate="local"
    ),
    "synced": lambda _: gs.GradientAccumulationOptimizer(adam(), 2, accumulate="synced"),
    "sync_replicas": lambda _: gs.SyncReplicasOptimizer(adam(), 3),
    "averaged": lambda variables: gs.SyncReplicasOptimizer(
        adam(), 2, variable_averages=0.9, variables_to_average=variables
    ),
    "outer": lambda _: gs.OuterOptimizer(adam(), 2),
    "quantized": lambda _: gs.CrossShardOptimizer(
        adam(), reducer=gs.QuantizedAllReduce(block_size=32)
    ),
    "low_rank": lambda _: gs.CrossShardOptimizer(adam(), reducer=gs.LowRankAllReduce(rank=1)),
    "average": lambda _: gs.AverageOptimizer(gs.CrossShardOptimizer(adam()), 0.5),
    "momentum": lambda _: gs.CrossShardOptimizer(mtf.optimize.MomentumOptimizer(0.1, 0.9)),
}


def network(images):
    """A hidden layer; returns the logits."""
    pixel = images.shape[-1]
    hidden, digit = mtf.Dimension("hidden", 8), mtf.Dimension("digit", 10)
    h = mtf.layers.dense(images, hidden, [pixel], activation=mtf.relu, name="hidden")
    return mtf.layers.dense(h, digit, [hidden], name="logits")


def metrics(labels, logits):
    found = tf.argmax(logits, -1, output_type=tf.int32)
    return {"accuracy": tf.metrics.accuracy(labels, found)}


def model_fn(features, labels, mode, params, config):
    mesh = MESHES[params.get("cores", CORES)]
    build = estimator.SpecBuilder(mode, params, config, mesh_shape=mesh, layout=LAYOUT)
    batch = mtf.Dimension("batch", BATCH)
    images = mtf.import_tf_tensor(
        build.mesh, features["image"], mtf.Shape([batch, mtf.Dimension("pixel", 64)])
    )
    logits = network(images)
    digit = logits.shape[-1]
    if mode == tf.estimator.ModeKeys.PREDICT:
        return build.predict({"digit": mtf.argmax(logits, digit), "logits": logits})
    labels = mtf.import_tf_tensor(build.mesh, labels, mtf.Shape([batch]))
    losses = mtf.layers.softmax_cross_entropy_with_logits(logits, mtf.one_hot(labels, digit), digit)
    loss = mtf.reduce_mean(losses)
    if mode == tf.estimator.ModeKeys.EVAL:
        return build.evaluate(loss, metrics, {"labels": labels, "logits": logits})
    variables = build.graph.trainable_variables
    optimizer = OPTIMIZERS[params["optimizer"]](variables)
    grads = mtf.gradients([loss], [v.value for v in variables])
    shown = optimizer if isinstance(optimizer, gs.CrossShardOptimizer) else None
    return build.train(loss, optimizer.apply_grads(grads, variables), shown)


def input_fn(mode):
    """The same batches in the same order: a noisy picture for each of ten digits."""
    random = np.random.RandomState(0)
    digits = random.randint(0, 10, BATCH * 2 * STEPS).astype(np.int32)
    images = random.rand(10, 64)[digits] + 0.1 * random.randn(len(digits), 64)
    images = images.astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices(({"image": images}, digits))
    data = data.batch(BATCH, drop_remainder=True)
    return data if mode == tf.estimator.ModeKeys.TRAIN else data.take(2)


def skipping(batches):
    """An input_fn that begins some batches later, as a restarted program's does."""
    return lambda mode: input_fn(mode).skip(batches)


def seen(losses):
    """A hook that appends the loss of every step, under whatever name it has in the graph."""

    class Loss(tf.train.SessionRunHook):
        def begin(self):
            (self.loss,) = tf.get_collection("loss to see")

        def before_run(self, run_context):
            return tf.train.SessionRunArgs(self.loss)

        def after_run(self, run_context, run_values):
            losses.append(run_values.results)

    return Loss()


def with_loss_seen(features, labels, mode, params, config):
    spec = model_fn(features, labels, mode, params, config)
    tf.add_to_collection("loss to see", spec.loss)
    return spec
