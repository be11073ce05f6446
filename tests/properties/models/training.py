"""Small models in training: the step on a mesh, and every shard's gradients in numpy."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf
from tests import models
from tests.properties.models import small_models, tape
from tests.properties.sync_replicas_schedules import parts
from tests.reference import Values


def gradients_on(
    model: small_models.Model,
    mesh: mtf.Mesh,
    inputs: dict[str, tf.Tensor],
    batch_dims: Sequence[str],
) -> tuple[list[mtf.Tensor], list[mtf.Variable]]:
    """Makes the model's variables and loss; returns its gradients and variables."""
    values = model.values()
    tensors = {
        name: models.variable(mesh, name, dims, values[name], dtype=model.dtype)
        for name, dims in model.variables.items()
    }
    variables = [t.operation for t in tensors.values()]
    batch = small_models.on_mesh(mesh, inputs, batch_dims)
    if model.microbatches == 1:
        loss = model.loss(mtf, tensors, batch)
        return mtf.gradients([loss], list(tensors.values())), variables

    def part(features: small_models.Tensors) -> dict[str, mtf.Tensor]:
        return {"loss": model.loss(mtf, tensors, features) / model.microbatches}

    batch_dim = batch["x"].shape.get_dim_by_name(batch_dims[-1])
    grads, _ = mtf.serialize_training_step(batch, part, batch_dim, model.microbatches)
    return grads, variables


def step(
    model: small_models.Model, batch_dims: Sequence[str], apply: Callable[..., Any]
) -> Callable[[mtf.Mesh, dict[str, tf.Tensor]], tuple[list[Any], dict[str, mtf.Tensor]]]:
    """A `harness.Build`: a training step, fetching the variables as they are before it.

    Args:
      model: what is trained.
      batch_dims: names of the batch dimensions.
      apply: from gradients, variables and inputs to mtf operations.
    """

    def build(
        mesh: mtf.Mesh, inputs: dict[str, tf.Tensor]
    ) -> tuple[list[Any], dict[str, mtf.Tensor]]:
        grads, variables = gradients_on(model, mesh, inputs, batch_dims)
        fetches = {v.name: v.value for v in variables}
        return apply(grads, variables, inputs), fetches

    return build


def _on_tape(
    model: small_models.Model, values: Values, feed: dict[str, np.ndarray]
) -> tuple[tape.Tensor, dict[str, tape.Tensor]]:
    leaves = {k: tape.Tensor(v, list(model.variables[k])) for k, v in values.items()}
    return model.loss(tape, leaves, small_models.in_numpy(feed)), leaves


def numpy_loss(model: small_models.Model, values: Values, feed: dict[str, np.ndarray]) -> float:
    """The model's loss on a batch."""
    return float(_on_tape(model, values, feed)[0].value)


def numpy_gradients(
    model: small_models.Model, values: Values, feed: dict[str, np.ndarray]
) -> Values:
    """The gradients of the model's loss on a batch."""
    loss, leaves = _on_tape(model, values, feed)
    return dict(zip(leaves, tape.gradients(loss, list(leaves.values()))))


def by_shard(feed: dict[str, np.ndarray], shard_sizes: Sequence[int]) -> list[Any]:
    """Every shard's part of a batch."""
    cut = {k: parts(feed[k], shard_sizes) for k in ("x", "y", "t")}
    return [dict(zip(cut, part)) for part in zip(*cut.values())]


def shard_gradients(
    model: small_models.Model,
    values: Values,
    feed: dict[str, np.ndarray],
    shard_sizes: Sequence[int],
) -> list[Values]:
    """For each shard the gradients of the model's loss on its part of the batch."""
    with np.errstate(invalid="ignore"):
        return [numpy_gradients(model, values, part) for part in by_shard(feed, shard_sizes)]
