"""Builds a transformer of mesh_tensorflow.transformer on a mesh, with the layers that gin says."""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.train.config.bindings import ModelType
from mtf_gradsync.train.config.mesh import MeshSettings
from mtf_gradsync.train.errors import ConfigError
from mtf_gradsync.train.transformer import transformer_models, transformer_utils

MODEL_TYPES = get_args(ModelType)


class ModelSettings(NamedTuple):
    """The settings that a run's graphs, for training and for scoring, are built from.

    They are those of `RunConfig`, resolved: `batch_size` counts the sequences of a global batch,
    and an `outer_batch_size` of 0 is none.
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
        """Returns the length of a feature's vectors."""
        # "targets_position" is as long as "targets".
        feature = name.split("_")[0]
        if feature not in self.sequence_length:
            raise ConfigError(
                f"The data set has {name!r}, but train.run.sequence_length = "
                f"{self.sequence_length} gives no length for {feature!r}"
            )
        return self.sequence_length[feature]

    def reads(self, name: str) -> bool:
        """Returns whether the model reads a feature of the data."""
        return self.model_type != "lm" or not name.startswith("inputs")


class MeshModel:
    """A model in an mtf graph of its own; calling it adds operations there."""

    def __init__(self, settings: ModelSettings, mesh_impl: Any = None):
        """Begins an mtf graph; mesh_impl of None lowers on the placement mesh of the settings."""
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
        self._mesh_impl = settings.mesh.placement_mesh() if mesh_impl is None else mesh_impl
        self.settings = settings
        self.graph = mtf.Graph()
        self.mesh = mtf.Mesh(self.graph, "mesh")

    def import_features(self, features: dict[str, tf.Tensor]) -> dict[str, Any]:
        """Imports int tensors ``[batch_size, length]``, by feature name, into the mtf graph.

        Returns int32 mtf tensors ``[batch, length]`` or ``[outer_batch, batch, length]`` of those
        that the model reads.
        """
        settings = self.settings
        needed = ["targets"] if settings.model_type == "lm" else ["inputs", "targets"]
        missing = [name for name in needed if name not in features]
        if missing:
            raise ConfigError(
                f"The data set has the features {sorted(features)}; train.run.model_type = "
                f'"{settings.model_type}" also needs {missing}'
            )
        batch_dims = [mtf.Dimension("batch", settings.batch_size)]
        if settings.outer_batch_size:
            outer = settings.outer_batch_size
            batch_dims = [
                mtf.Dimension("outer_batch", outer),
                mtf.Dimension("batch", settings.batch_size // outer),
            ]
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
            shape = mtf.Shape([*batch_dims, mtf.Dimension("length", length)])
            x = tf.reshape(tf.cast(x, tf.int32), shape.to_integer_list)
            imported[name] = mtf.import_fully_replicated(self.mesh, x, shape, name=name)
        return imported

    def __call__(self, features: dict[str, Any], mode: str, num_microbatches: int = 1) -> Any:
        """Adds the model in the mode "train" or "eval", and returns its logits and loss.

        Logits are ``[batch..., length, vocab]``; the loss is a scalar.
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
