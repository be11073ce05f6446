"""TrainingJob: the checked settings of a training step, which can be built on any kind of mesh."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.train.config.bindings import RunConfig, VariableFilter
from mtf_gradsync.train.config.checks import check_callable, check_count, check_vocabulary
from mtf_gradsync.train.config.mesh import resolve_mesh
from mtf_gradsync.train.config.settings import (
    LearningRate,
    resolve_batch_size,
    resolve_learning_rate,
    resolve_sequence_length,
)
from mtf_gradsync.train.data.batches import TrainingBatches
from mtf_gradsync.train.model import ModelSettings
from mtf_gradsync.train.transformer import transformer_utils


class TrainingJob(NamedTuple):
    """The settings of a run that define its training step.

    Attributes:
      model: the model, its mesh and its batch.
      train_dataset_fn: see `RunConfig`.
      optimizer: called with ``learning_rate=``; its result's ``apply_grads(grads, variables)``
        returns mtf operations. It, and each optimizer inside a wrapper, may have
        ``progress_fields()``, which returns tensors (mtf or tf) by name to be shown beside the
        loss, and ``update_step_now``, such a scalar that counts updates.
      learning_rate: None, a number, or a function of ``step``.
      variable_filter: see `RunConfig`.
      reports: whether the step returns what its optimizers report.
      noise_scale: whether it estimates the gradient noise scale, in sequences.
    """

    model: ModelSettings
    train_dataset_fn: Callable[..., Any]
    optimizer: Callable[..., Any]
    learning_rate: LearningRate
    variable_filter: VariableFilter
    reports: bool = False
    noise_scale: bool = False

    @property
    def tokens_per_step(self) -> int:
        """Targets in a global batch, padding included."""
        return self.model.batch_size * self.model.sequence_length["targets"]

    def batches(self) -> TrainingBatches:
        """Returns the training batches, in a graph of their own."""
        utils, vocabulary = transformer_utils(), self.model.vocabulary

        def dataset() -> tf.data.Dataset:
            return self.train_dataset_fn(
                sequence_length=self.model.sequence_length,
                vocabulary=vocabulary,
                dataset_split="train",
            )

        return TrainingBatches(
            dataset,
            self.model.batch_size,
            self.model.feature_length,
            {
                "inputs": utils.inputs_vocabulary(vocabulary).vocab_size,
                "targets": utils.targets_vocabulary(vocabulary).vocab_size,
            },
            self.model.reads,
        )


def resolve_job(config: RunConfig) -> TrainingJob:
    """Checks the settings of a config that define the training step, and returns them as a job."""
    check_count("train_steps", config.train_steps)
    check_count("outer_batch_size", config.outer_batch_size, optional=True)
    check_count("total_run_steps", config.total_run_steps, optional=True)
    check_callable("optimizer", config.optimizer, "@CrossShardOptimizer")
    check_callable("train_dataset_fn", config.train_dataset_fn, "@python_topics")
    check_vocabulary(config.vocabulary)
    lengths = resolve_sequence_length(config.sequence_length)
    mesh = resolve_mesh(
        config.mesh_shape, config.layout_rules, config.mesh_devices, config.mesh_impl
    )
    outer = config.outer_batch_size or 0
    model = ModelSettings(
        model_type=config.model_type,
        vocabulary=config.vocabulary,
        mesh=mesh,
        batch_size=resolve_batch_size(config.batch_size, lengths, mesh, outer),
        outer_batch_size=outer,
        sequence_length=lengths,
        autostack=config.autostack,
        seed=config.seed,
    )
    return TrainingJob(
        model=model,
        train_dataset_fn=config.train_dataset_fn,
        optimizer=config.optimizer,
        learning_rate=resolve_learning_rate(
            config.learning_rate_schedule, config.total_run_steps or config.train_steps
        ),
        variable_filter=config.variable_filter,
    )


def placeholders(job: TrainingJob) -> dict[str, tf.Tensor]:
    """Returns placeholders ``[batch_size, length]`` for the training data, by feature name.

    The data set is made for its shapes alone, in a graph of its own; nothing is read.
    """
    with job.batches() as batches:
        return batches.placeholders()
