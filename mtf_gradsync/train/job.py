"""What a config asks to be trained: checked, and ready to be built on any kind of mesh."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, ContextManager, Iterator, NamedTuple, Sequence

from mtf_gradsync import simd
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.train.config import settings
from mtf_gradsync.train.data import datasets as data
from mtf_gradsync.train.model import (
    ModelSettings,
    TrainGraph,
    VariableFilter,
    build_train_graph,
    feature_length,
)


class TrainingJob(NamedTuple):
    """The part of a run's settings that says what a training step is.

    Attributes:
      model: the model, its mesh and its batch.
      train_dataset_fn: makes the training data.
      optimizer: called with ``learning_rate=``.
      learning_rate: None, a number, or a function of ``step``.
      variable_filter: which variables train.
    """

    model: ModelSettings
    train_dataset_fn: Callable[..., Any]
    optimizer: Callable[..., Any]
    learning_rate: settings.LearningRate
    variable_filter: VariableFilter

    def dataset(self) -> tf.data.Dataset:
        """The training examples."""
        return self.train_dataset_fn(
            sequence_length=self.model.sequence_length,
            vocabulary=self.model.vocabulary,
            dataset_split="train",
        )

    def build(
        self,
        features: dict[str, tf.Tensor],
        mesh_block: Callable[[], ContextManager[Any]] | None = None,
    ) -> TrainGraph:
        """Adds the training step to the default graph; see `build_train_graph`."""
        return build_train_graph(
            self.model,
            features,
            self.optimizer,
            self.learning_rate,
            self.variable_filter,
            mesh_block,
        )


def resolve_job(
    model_type: str,
    vocabulary: Any,
    train_dataset_fn: Callable[..., Any],
    autostack: bool,
    batch_size: int | tuple[str, int],
    outer_batch_size: int | None,
    train_steps: int,
    total_run_steps: int | None,
    sequence_length: settings.SequenceLength,
    mesh_shape: Any,
    mesh_devices: Sequence[str] | None,
    mesh_impl: Callable[..., Any] | None,
    layout_rules: Any,
    learning_rate_schedule: settings.LearningRate | list[Any],
    optimizer: Callable[..., Any],
    variable_filter: VariableFilter,
    seed: int,
) -> TrainingJob:
    """Checks the arguments that `mtf_gradsync.train.run.run` has under the same names.

    Returns:
      The job.

    Raises:
      ConfigError: if a setting cannot work.
    """
    settings.check_count("train_steps", train_steps)
    settings.check_count("outer_batch_size", outer_batch_size, optional=True)
    settings.check_count("total_run_steps", total_run_steps, optional=True)
    settings.check_callable("optimizer", optimizer, "@CrossShardOptimizer")
    settings.check_callable("train_dataset_fn", train_dataset_fn, "@python_topics")
    settings.check_vocabulary(vocabulary)
    lengths = settings.resolve_sequence_length(sequence_length)
    mesh = settings.resolve_mesh(mesh_shape, layout_rules, mesh_devices, mesh_impl)
    model = ModelSettings(
        model_type=model_type,
        vocabulary=vocabulary,
        mesh=mesh,
        batch_size=settings.resolve_batch_size(batch_size, lengths, mesh, outer_batch_size or 0),
        outer_batch_size=outer_batch_size or 0,
        sequence_length=lengths,
        autostack=autostack,
        seed=seed,
    )
    learning_rate = settings.resolve_learning_rate(
        learning_rate_schedule, total_run_steps or train_steps
    )
    return TrainingJob(model, train_dataset_fn, optimizer, learning_rate, variable_filter)


def build_simd(job: TrainingJob) -> tuple[TrainGraph, simd.Program]:
    """Adds a job's training step to the default graph as a SIMD program on the job's mesh.

    The inputs are placeholders, and the step counter stands outside the program.

    Args:
      job: what to build.

    Returns:
      The graph's handles and the program.
    """
    programs = []

    @contextlib.contextmanager
    def block() -> Iterator[Any]:
        with simd.tpu_program(job.model.mesh.shape, job.model.mesh.layout) as program:
            programs.append(program)
            yield program.mesh_impl

    graph = job.build(placeholders(job), block)
    return graph, programs[0]


def placeholders(job: TrainingJob) -> dict[str, tf.Tensor]:
    """Adds a placeholder for each feature of the training data to the default graph.

    Args:
      job: its data set is made in a graph of its own, for its shapes alone; nothing is read.

    Returns:
      Placeholders ``[batch_size, length]`` by feature name.
    """
    with tf.Graph().as_default():
        dataset = job.dataset()
        shapes, dtypes = tf.data.get_output_shapes(dataset), tf.data.get_output_types(dataset)
    made = {}
    for name in data.MODEL_FEATURES:
        if name not in shapes:
            continue
        # A data set made of a Python generator knows no shapes; then the config's counts.
        known = shapes[name] if shapes[name].is_fully_defined() else None
        shape = [feature_length(job.model, name)] if known is None else known.as_list()
        made[name] = tf.placeholder(dtypes[name], [job.model.batch_size, *shape], name=name)
    return made
