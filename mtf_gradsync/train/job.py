"""TrainingJob: the checked settings of a training step, which can be built on any kind of mesh."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, ContextManager, Iterator, NamedTuple

from mtf_gradsync import simd
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes.places import OnCores, OnDevices
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
from mtf_gradsync.train.train_graph import TrainGraph, build_train_graph
from mtf_gradsync.train.transformer import transformer_utils


class TrainingJob(NamedTuple):
    """The settings of a run that define its training step; see `build_train_graph`."""

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

    def build(
        self,
        features: dict[str, tf.Tensor],
        mesh_block: Callable[[], ContextManager[Any]] = contextlib.nullcontext,
    ) -> TrainGraph:
        """Adds the training step to the default graph; see `build_train_graph`."""
        return build_train_graph(
            self.model,
            features,
            self.optimizer,
            self.learning_rate,
            self.variable_filter,
            mesh_block,
            self.reports,
            self.noise_scale,
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


def build_on(
    place: OnDevices | OnCores, job: TrainingJob, features: dict[str, tf.Tensor] | None = None
) -> TrainGraph:
    """Adds a job's training step to the default graph, for a runtime.

    `features` are int tensors ``[batch_size, length]`` by feature name; None for placeholders.
    """

    @contextlib.contextmanager
    def block() -> Iterator[Any]:
        with place.building() as program:
            yield None if program is None else program.mesh_impl

    return job.build(features or placeholders(job), block)


def build_simd(job: TrainingJob) -> tuple[TrainGraph, simd.Program]:
    """Adds a job's training step, with placeholders, as a SIMD program to the default graph."""
    place = OnCores("cpu_replicas", job.model.mesh.shape, job.model.mesh.layout)
    graph = build_on(place, job)
    assert place.program is not None  # just built
    return graph, place.program


def placeholders(job: TrainingJob) -> dict[str, tf.Tensor]:
    """Returns placeholders ``[batch_size, length]`` for the training data, by feature name.

    The data set is made for its shapes alone, in a graph of its own; nothing is read.
    """
    with job.batches() as batches:
        return batches.placeholders()
