"""Builds the graph that scores batches and continues text."""

from __future__ import annotations

from typing import Any, NamedTuple

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.train.model import MeshModel, ModelSettings


class EvalGraph(NamedTuple):
    """The tensors by which a session scores batches and predicts single targets.

    A session feeds int32 ``[batch_size, length]`` to the placeholders `features`, by feature name,
    and for `next_logits` an int32 scalar to `position`. `cross_entropy` is float32
    ``[batch..., length]``, nats of every target, 0 for padding; `next_logits` is float32
    ``[batch..., vocab]``, the prediction of the target at `position`.
    """

    lowering: Any
    features: dict[str, tf.Tensor]
    cross_entropy: tf.Tensor
    position: tf.Tensor
    next_logits: tf.Tensor


def build_eval_graph(settings: ModelSettings, feature_names: list[str]) -> EvalGraph:
    """Adds the model without dropout, auxiliary losses and update to the default graph.

    `feature_names` are those of the batches that will be fed.
    """
    features = {
        name: tf.placeholder(
            tf.int32, [settings.batch_size, settings.feature_length(name)], name=name
        )
        for name in feature_names
    }
    model = MeshModel(settings)
    mtf_features = model.import_features(features)
    targets = mtf_features["targets"]
    logits, _ = model(mtf_features, "eval")
    logits = mtf.cast(logits, tf.float32)
    vocab_dim = logits.shape.dims[-1]
    # Padding has id 0; negative ids mark targets without loss.
    cross_entropy = mtf.layers.softmax_cross_entropy_with_logits(
        logits, mtf.maximum(targets, 0), vocab_dim
    ) * mtf.cast(mtf.greater(targets, 0), tf.float32)
    position = tf.placeholder(tf.int32, [], name="position")
    next_logits = mtf.gather(
        logits,
        mtf.import_fully_replicated(model.mesh, position, mtf.Shape([]), name="position"),
        targets.shape.dims[-1],
    )
    cross_entropy = mtf.anonymize(cross_entropy)
    next_logits = mtf.anonymize(next_logits)
    lowering = model.lower()
    return EvalGraph(
        lowering=lowering,
        features=features,
        cross_entropy=lowering.export_to_tf_tensor(cross_entropy),
        position=position,
        next_logits=lowering.export_to_tf_tensor(next_logits),
    )
