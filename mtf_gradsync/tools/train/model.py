"""A run's model on a mesh, with the layers that gin binds, and the job of training it."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, Callable, Collection, NamedTuple, get_args

from mtf_gradsync.extension import is_whole_number, mtf, tf
from mtf_gradsync.runtimes._common import ConfigError
from mtf_gradsync.tools.islands.elastic import ALL_DATA, DataPart
from mtf_gradsync.tools.train.config import (
    BatchSize,
    LearningRate,
    ModelType,
    RunConfig,
    SequenceLength,
    VariableFilter,
    check_callable,
    check_flags_and_seed,
    check_positive,
    check_vocabulary,
    transformer_models,
    transformer_utils,
)
from mtf_gradsync.tools.train.data.batches import TrainingBatches
from mtf_gradsync.tools.train.learning_rate import resolve_learning_rate
from mtf_gradsync.tools.train.mesh_settings import MeshSettings, resolve_mesh

MODEL_TYPES = get_args(ModelType)


class ModelSettings(NamedTuple):
    """The settings that a run's graphs, for training and for scoring, are built from.

    The attributes are settings of `RunConfig`, which are checked and converted so that each has one
    type: `batch_size` is the number of sequences in a global batch, and `sequence_length` has a
    length for each feature. If `outer_batch_size` is 0, tensors have no dimension "outer_batch".
    """

    model_type: ModelType
    vocabulary: Any
    mesh: MeshSettings
    batch_size: int
    outer_batch_size: int
    sequence_length: dict[str, int]
    autostack: bool
    seed: int

    def feature_length(self, name: str) -> int:
        """Returns the length of the sequences of the feature `name`, such as "targets_position".

        Raises ConfigError if the settings give no length for the feature.
        """
        # "targets_position" is as long as "targets".
        feature = name.split("_")[0]
        if feature not in self.sequence_length:
            raise ConfigError(
                f"The data set has {name!r}, but train.run.sequence_length = "
                f"{self.sequence_length} gives no length for {feature!r}"
            )
        return self.sequence_length[feature]

    def reads(self, name: str) -> bool:
        """Returns whether the model reads the feature `name` of the data."""
        return self.model_type != "lm" or not name.startswith("inputs")

    @property
    def vocab_sizes(self) -> dict[str, int]:
        """The number of ids in the vocabulary of "inputs" and of "targets", by these names."""
        utils = transformer_utils()
        return {
            "inputs": utils.inputs_vocabulary(self.vocabulary).vocab_size,
            "targets": utils.targets_vocabulary(self.vocabulary).vocab_size,
        }

    def check_features(self, features: Collection[str], of: str) -> None:
        """Raises ConfigError if the model reads a feature that a data set does not have.

        `features` are the names of the data set's features. `of` is the name of the setting that
        gives the data set; the error's text begins with it.
        """
        needed = ["targets"] if self.model_type == "lm" else ["inputs", "targets"]
        missing = [name for name in needed if name not in features]
        if missing:
            raise ConfigError(
                f"{of} has the features {sorted(features)}; train.run.model_type = "
                f'"{self.model_type}" also needs {missing}'
            )


class MeshModel:
    """A model in an mtf graph of its own; calling it adds the model's operations to that graph."""

    def __init__(self, settings: ModelSettings, mesh_impl: Any = None):
        """Makes the model's layers, and an mtf graph without operations.

        `mesh_impl` is the mesh implementation on which the graph will be lowered; None stands for
        the placement mesh that `settings` describe.
        """
        if settings.model_type not in MODEL_TYPES:
            raise ConfigError(
                f"train.run.model_type must be one of {', '.join(MODEL_TYPES)}; "
                f"got {settings.model_type!r}"
            )
        tf.set_random_seed(settings.seed)
        utils = transformer_utils()
        self._model = utils.build_model(
            model_type=settings.model_type,
            input_vocab_size=utils.inputs_vocabulary(settings.vocabulary).vocab_size,
            output_vocab_size=utils.targets_vocabulary(settings.vocabulary).vocab_size,
            layout_rules=settings.mesh.layout,
            mesh_shape=settings.mesh.shape,
        )
        self._check_positions(settings)
        self._mesh_impl = settings.mesh.placement_mesh() if mesh_impl is None else mesh_impl
        self.settings = settings
        self.graph = mtf.Graph()
        self.mesh = mtf.Mesh(self.graph, "mesh")
        sizes = {"outer_batch": settings.outer_batch_size, "batch": settings.batch_size}
        if settings.outer_batch_size:
            sizes["batch"] //= settings.outer_batch_size
        self._batch_dims = [mtf.Dimension(name, size) for name, size in sizes.items() if size]

    def _check_positions(self, settings: ModelSettings) -> None:
        """Raises ConfigError if `settings` have longer sequences than the model has positions."""
        parts = {"inputs": "encoder", "targets": "decoder"}
        for feature, name in parts.items():
            part = getattr(self._model, name, self._model if feature == "targets" else None)
            table = getattr(part, "max_length_dim", None)
            length = settings.sequence_length.get(feature, 0)
            if table and getattr(part, "positional_embedding", False) and table.size < length:
                raise ConfigError(
                    f"Unitransformer.max_length = {table.size} is less than {length}, the length "
                    f'of "{feature}" in train.run.sequence_length: the model has a position for '
                    "each token. Raise max_length or lower sequence_length."
                )

    @property
    def input_dims(self) -> list[str]:
        """The names of the dimensions that the model's input features have."""
        return [*(dim.name for dim in self._batch_dims), "length"]

    @property
    def loss_denominator(self) -> float:
        """The divisor of a batch's loss in nats: usually the number of its positions."""
        shape = [
            *self._batch_dims,
            mtf.Dimension("length", self.settings.feature_length("targets")),
        ]
        # Mesh-TensorFlow asks a tensor for its shape, and nothing else.
        return self._model.loss_denominator(SimpleNamespace(shape=mtf.Shape(shape)), 1)

    def import_features(self, features: dict[str, tf.Tensor]) -> dict[str, Any]:
        """Imports a batch of features, as TensorFlow tensors, into the mtf graph.

        `features` has an int tensor ``[batch_size, length]`` for each feature name. Features that
        the model does not read are left out of the result.

        Returns, by feature name, an int32 mtf tensor ``[batch, length]``. If the setting
        `outer_batch_size` is not 0, the tensor is ``[outer_batch, batch, length]`` instead: the
        sequences of the batch in `outer_batch_size` groups of equal size.
        """
        settings = self.settings
        settings.check_features(features, "The data set")
        imported = {}
        for name, x in sorted(features.items()):
            if not settings.reads(name):
                continue
            length = settings.feature_length(name)
            if not x.shape.is_compatible_with([settings.batch_size, length]):
                raise ConfigError(
                    f"The data set gives {name!r} the shape {x.shape} in batches; "
                    f"train.run.sequence_length wants {[settings.batch_size, length]}"
                )
            shape = mtf.Shape([*self._batch_dims, mtf.Dimension("length", length)])
            x = tf.reshape(tf.cast(x, tf.int32), shape.to_integer_list)
            imported[name] = mtf.import_fully_replicated(self.mesh, x, shape, name=name)
        return imported

    def __call__(self, features: dict[str, Any], mode: str, num_microbatches: int = 1) -> Any:
        """Adds the model to the graph in a `mode`, "train" or "eval"; returns its logits and loss.

        `features` is a result of `import_features`. `num_microbatches` is the number of
        microbatches that the batch is divided into; `features` have the examples of one microbatch.
        The logits are an mtf tensor ``[batch..., length, vocab]``, and the loss is an mtf scalar.
        """
        targets = features["targets"]
        if self.settings.model_type == "lm":
            inputs = transformer_models().autoregressive_inputs(
                targets, sequence_id=features.get("targets_segmentation")
            )
        else:
            inputs = features["inputs"]
        if self.settings.model_type == "bitransformer":
            packing = {
                "encoder_sequence_id": features.get("inputs_segmentation"),
                "decoder_sequence_id": features.get("targets_segmentation"),
                "decoder_subsequence_id": features.get("targets_subsegmentation"),
                "encoder_position": features.get("inputs_position"),
                "decoder_position": features.get("targets_position"),
            }
        else:
            packing = {
                "sequence_id": features.get("targets_segmentation"),
                "position": features.get("targets_position"),
            }
        return self._model.call_simple(
            inputs=inputs,
            targets=targets,
            compute_loss=True,
            mode=mode,
            variable_dtype=transformer_utils().get_variable_dtype(),
            num_microbatches=num_microbatches,
            **packing,
        )

    def lower(self) -> mtf.Lowering:
        """Lowers the mtf graph into the default graph."""
        meshes = {self.mesh: self._mesh_impl}
        return mtf.Lowering(self.graph, meshes, autostack=self.settings.autostack)


class TrainingJob(NamedTuple):
    """The settings of a run that define its training step.

    Attributes:
      model: the model, its mesh and its batch.
      train_dataset_fn: the function that returns the training data, as in `RunConfig`.
      optimizer: a function that is called with ``learning_rate=``. It returns an optimizer whose
        ``apply_grads(grads, variables)`` returns mtf operations. The returned optimizer, and each
        optimizer inside it, may have three more attributes. ``progress_fields()`` returns tensors
        (mtf or tf) by name, to be shown beside the loss. ``update_step_now`` is a scalar that
        counts updates. ``in_sums_now`` is a scalar that is 0 if no gradients wait for an update.
      learning_rate: None, a number, or a function called with ``step=``: a `functools.partial` that
        already has ``total_train_steps``.
      schedule_step: a function that returns what learning rate schedules get as the step; None for
        the global step.
      variable_filter: which variables train: a regular expression or a function of an mtf variable;
        None for all.
      train_steps: how many steps the whole run makes.
      reports: whether the step returns what its optimizers report.
      noise_scale: whether the step estimates the gradient noise scale, in sequences.
      examples_before: how many examples earlier steps of the run have used. If the run goes on from
        a checkpoint that has this number, the checkpoint's number is used.
      data_part: the part of the data that this run learns from, if it is an island (DiLoCo).
    """

    model: ModelSettings
    train_dataset_fn: Callable[..., Any]
    optimizer: Callable[..., Any]
    learning_rate: LearningRate
    variable_filter: VariableFilter
    train_steps: int
    reports: bool = False
    noise_scale: bool = False
    examples_before: int = 0
    schedule_step: Callable[[Any], Any] | None = None
    data_part: DataPart = ALL_DATA

    @property
    def tokens_per_step(self) -> int:
        """Targets in a global batch, padding included."""
        return self.model.batch_size * self.model.sequence_length["targets"]

    def batches(self) -> TrainingBatches:
        """Returns the training batches, to be used as a context manager.

        The data set of the batches is made in a graph of its own.
        """
        dataset = functools.partial(
            self.train_dataset_fn,
            sequence_length=self.model.sequence_length,
            vocabulary=self.model.vocabulary,
            dataset_split="train",
        )
        return TrainingBatches(
            dataset,
            self.model.batch_size,
            self.model.feature_length,
            self.model.vocab_sizes,
            self.model.reads,
            self.model.seed,
            self.data_part,
        )


def resolve_job(config: RunConfig) -> TrainingJob:
    """Returns the training job of a config, after checking the settings that define its step.

    Raises ConfigError for a setting that cannot work.
    """
    check_flags_and_seed(config)
    check_positive("train_steps", config.train_steps)
    check_positive("outer_batch_size", config.outer_batch_size, optional=True)
    check_positive("total_run_steps", config.total_run_steps, optional=True)
    check_callable("optimizer", config.optimizer, "@CrossShardOptimizer")
    check_callable("schedule_step", config.schedule_step, "@get_update_step", optional=True)
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
        train_steps=config.train_steps,
        schedule_step=config.schedule_step,
    )


def resolve_sequence_length(sequence_length: SequenceLength) -> dict[str, int]:
    """Returns the length of every feature, by its name.

    If `sequence_length` is a number, it is the length of both "inputs" and "targets". Raises
    ConfigError if `sequence_length` is neither a positive integer nor a dict from features to
    positive integers that has the key "targets".
    """
    if is_whole_number(sequence_length):
        return {"inputs": sequence_length, "targets": sequence_length}
    if (
        isinstance(sequence_length, dict)
        and "targets" in sequence_length
        and all(map(is_whole_number, sequence_length.values()))
    ):
        return dict(sequence_length)
    raise ConfigError(
        "train.run.sequence_length must be a positive integer or a dict such as "
        f'{{"inputs": 64, "targets": 64}}; got {sequence_length!r}'
    )


def resolve_batch_size(
    batch_size: BatchSize,
    sequence_length: dict[str, int],
    mesh: MeshSettings,
    outer_batch_size: int,
) -> int:
    """Returns the number of sequences in a global batch.

    `batch_size` is the number of sequences itself, or a (method, value) pair with the meaning that
    it has for ``mesh_tensorflow.transformer.utils.compute_batch_size``. `sequence_length` has the
    length of each feature, and `mesh` is the mesh that splits the batch. If `outer_batch_size` is
    0, there is no dimension "outer_batch". Raises ConfigError if the mesh cannot split the batch
    evenly.
    """
    given = batch_size
    if is_whole_number(given):
        size = given
    else:
        try:
            size = transformer_utils().compute_batch_size(
                sequence_length, mesh.shape, mesh.layout, batch_size
            )
        except (ValueError, TypeError) as error:
            raise ConfigError(
                "train.run.batch_size must be a positive integer or a pair such as "
                f'("tokens_per_replica", 2048); got {given!r} ({error})'
            ) from error
    parts = mesh.num_parts("batch")
    inner = size // max(1, outer_batch_size)
    if inner * max(1, outer_batch_size) != size or inner < 1 or inner % parts:
        outer = f" in {outer_batch_size} outer batches" if outer_batch_size else ""
        raise ConfigError(
            f"train.run.batch_size = {given!r} gives batches of {size} sequences{outer}, "
            f"which the mesh cannot split evenly: train.run.layout_rules and "
            f'train.run.mesh_shape split "batch" into {parts} parts. Use a multiple of '
            f"{parts * max(1, outer_batch_size)}."
        )
    return size


def placeholders(job: TrainingJob) -> dict[str, tf.Tensor]:
    """Returns placeholders ``[batch_size, length]`` for the training data, by feature name.

    To learn the shapes of the placeholders, the data set is built in a graph of its own; no data is
    read.
    """
    with job.batches() as batches:
        return batches.placeholders()
