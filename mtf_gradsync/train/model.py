"""Builds the graphs of a run: one that trains, one that scores and continues text."""

from __future__ import annotations

import contextlib
import re
from typing import Any, Callable, ContextManager, NamedTuple, Union

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.train.config.settings import LearningRate, MeshSettings
from mtf_gradsync.train.errors import ConfigError
from mtf_gradsync.train.transformer import transformer_models, transformer_utils

MODEL_TYPES = ("lm", "aligned", "bitransformer")

VariableFilter = Union[None, str, Callable[[Any], bool]]


class ModelSettings(NamedTuple):
    """What both graphs are built from.

    Attributes:
      model_type: one of `MODEL_TYPES`.
      vocabulary: a vocabulary or an (inputs, targets) pair.
      mesh: the mesh.
      batch_size: sequences in a global batch.
      outer_batch_size: size of the "outer_batch" dimension, 0 for none.
      sequence_length: length of every feature.
      autostack: whether Mesh-TensorFlow stacks variables of equal shape.
      seed: of the initial values.
    """

    model_type: str
    vocabulary: Any
    mesh: MeshSettings
    batch_size: int
    outer_batch_size: int
    sequence_length: dict[str, int]
    autostack: bool
    seed: int


class TrainGraph(NamedTuple):
    """A graph whose step trains.

    Attributes:
      lowering: the mtf.Lowering.
      loss: float32 scalar tensor, the training loss of the batch.
      updates: operations that assign the new values; the program's own, unlike `step`.
      step: int64 scalar tensor; fetching it makes a training step and returns the number of
        steps made.
      fields: scalar tensors by name, which the optimizer wants shown.
      num_parameters: trainable parameters.
      gradients: mtf tensors, as `mtf.gradients` returned them.
      optimizer: the optimizer that was made.
    """

    lowering: Any
    loss: tf.Tensor
    updates: list[tf.Operation]
    step: tf.Tensor
    fields: dict[str, tf.Tensor]
    num_parameters: int
    gradients: list[Any]
    optimizer: Any


class EvalGraph(NamedTuple):
    """A graph that reads batches and trains nothing.

    Attributes:
      lowering: the mtf.Lowering.
      features: placeholders by feature name.
      cross_entropy: float32 ``[batch..., length]``, nats of every target; 0 for padding.
      position: int32 scalar placeholder.
      next_logits: float32 ``[batch..., vocab]``, logits of the target at `position`.
    """

    lowering: Any
    features: dict[str, tf.Tensor]
    cross_entropy: tf.Tensor
    position: tf.Tensor
    next_logits: tf.Tensor


def build_train_graph(
    settings: ModelSettings,
    features: dict[str, tf.Tensor],
    optimizer: Callable[..., Any],
    learning_rate: LearningRate,
    variable_filter: VariableFilter = None,
    mesh_block: Callable[[], ContextManager[Any]] | None = None,
) -> TrainGraph:
    """Adds model, gradients and update to the default graph.

    Args:
      settings: the model.
      features: int tensors ``[batch_size, length]`` by feature name.
      optimizer: called with ``learning_rate=``; its result's ``apply_grads(grads, variables)``
        returns mtf operations. If it has ``progress_fields()``, that returns scalars (mtf or tf
        tensors) by name to be shown beside the loss.
      learning_rate: None, a number, or a function of ``step``.
      variable_filter: which variables train: all (None), those whose name a regular expression
        finds, or those for which a function of the mtf variable is true.
      mesh_block: makes a context manager that gives the mesh to lower on; the program is built
        inside it, the step counter outside, as a TPU program wants it. None lowers on the
        placement mesh of the settings.

    Returns:
      The graph's handles.

    Raises:
      ConfigError: if the optimizer has no apply_grads, or nothing is left to train.
    """
    global_step = tf.train.get_or_create_global_step()
    # One read, before anything is assigned: the schedule and the increment see the same step.
    step_now = tf.identity(global_step.read_value())
    with mesh_block() if mesh_block else contextlib.nullcontext() as mesh_impl:
        program = _build_program(
            settings, features, optimizer, learning_rate, variable_filter, step_now, mesh_impl
        )
    with tf.control_dependencies([*program.updates, step_now]):
        step = tf.identity(global_step.assign_add(1, read_value=True), name="train_step")
    return program._replace(step=step)


def _build_program(
    settings: ModelSettings,
    features: dict[str, tf.Tensor],
    optimizer: Callable[..., Any],
    learning_rate: LearningRate,
    variable_filter: VariableFilter,
    step_now: tf.Tensor,
    mesh_impl: Any,
) -> TrainGraph:
    """All of the training step but the step counter; its `step` is the step before it."""
    model, graph, mesh, mesh_impl = _begin(settings, mesh_impl)
    mtf_features = _import_features(settings, mesh, features)
    batch_dim = mtf_features["targets"].shape.dims[-2]
    num_microbatches = transformer_utils().serialize_num_microbatches(
        batch_dim, settings.sequence_length, settings.mesh.shape, settings.mesh.layout
    )
    if num_microbatches > 1:

        def microbatch(part: dict[str, Any]) -> dict[str, Any]:
            return {"loss": _call(model, settings, part, "train", num_microbatches)[1]}

        grads, outputs = mtf.serialize_training_step(
            mtf_features, microbatch, batch_dim, num_microbatches
        )
        loss = outputs["loss"]
    else:
        loss = _call(model, settings, mtf_features, "train")[1]
        grads = mtf.gradients([loss], [v.outputs[0] for v in graph.trainable_variables])

    chosen = _variable_chooser(variable_filter)
    pairs = [(g, v) for g, v in zip(grads, graph.trainable_variables) if chosen(v)]
    if not pairs:
        raise ConfigError(
            f"train.run.variable_filter = {variable_filter!r} leaves no variable to train; names "
            f"look like {graph.trainable_variables[0].name!r}"
        )
    rate = learning_rate(step=step_now) if callable(learning_rate) else learning_rate
    try:
        opt = optimizer(learning_rate=rate)
    except TypeError as error:
        raise ConfigError(
            f"train.run.optimizer = {optimizer!r} cannot be called with learning_rate=: {error}"
        ) from error
    if not hasattr(opt, "apply_grads"):
        raise ConfigError(
            f"train.run.optimizer makes a {type(opt).__name__}, which has no apply_grads; use a "
            "Mesh-TensorFlow optimizer such as @AdafactorOptimizer, or a wrapper around one"
        )
    update_ops = opt.apply_grads([g for g, _ in pairs], [v for _, v in pairs])
    # Asked for before lowering, because answering may add mtf operations.
    fields = opt.progress_fields() if hasattr(opt, "progress_fields") else {}

    lowering = mtf.Lowering(graph, {mesh: mesh_impl}, autostack=settings.autostack)
    updates = [lowering.lowered_operation(op) for op in update_ops]
    tf_loss = tf.cast(lowering.export_to_tf_tensor(loss), tf.float32)
    return TrainGraph(
        lowering=lowering,
        loss=tf_loss,
        updates=updates,
        step=step_now,
        fields={
            name: lowering.export_to_tf_tensor(x) if isinstance(x, mtf.Tensor) else x
            for name, x in fields.items()
        },
        num_parameters=sum(v.shape.size for _, v in pairs),
        gradients=[g for g, _ in pairs if g is not None],
        optimizer=opt,
    )


def build_eval_graph(settings: ModelSettings, feature_names: list[str]) -> EvalGraph:
    """Adds the model without dropout, auxiliary losses and update to the default graph.

    Args:
      settings: the model.
      feature_names: which features batches will have.

    Returns:
      The graph's handles.
    """
    features = {
        name: tf.placeholder(
            tf.int32, [settings.batch_size, feature_length(settings, name)], name=name
        )
        for name in feature_names
    }
    model, graph, mesh, mesh_impl = _begin(settings)
    mtf_features = _import_features(settings, mesh, features)
    targets = mtf_features["targets"]
    logits, _ = _call(model, settings, mtf_features, "eval")
    logits = mtf.cast(logits, tf.float32)
    vocab_dim = logits.shape.dims[-1]
    # Padding has id 0; negative ids mark targets without loss.
    cross_entropy = mtf.layers.softmax_cross_entropy_with_logits(
        logits, mtf.maximum(targets, 0), vocab_dim
    ) * mtf.cast(mtf.greater(targets, 0), tf.float32)
    position = tf.placeholder(tf.int32, [], name="position")
    next_logits = mtf.gather(
        logits,
        mtf.import_fully_replicated(mesh, position, mtf.Shape([]), name="position"),
        targets.shape.dims[-1],
    )
    cross_entropy = mtf.anonymize(cross_entropy)
    next_logits = mtf.anonymize(next_logits)
    lowering = mtf.Lowering(graph, {mesh: mesh_impl}, autostack=settings.autostack)
    return EvalGraph(
        lowering=lowering,
        features=features,
        cross_entropy=lowering.export_to_tf_tensor(cross_entropy),
        position=position,
        next_logits=lowering.export_to_tf_tensor(next_logits),
    )


def _begin(settings: ModelSettings, mesh_impl: Any = None) -> Any:
    if settings.model_type not in MODEL_TYPES:
        raise ConfigError(
            f"train.run.model_type must be one of {', '.join(MODEL_TYPES)}; "
            f"got {settings.model_type!r}"
        )
    tf.set_random_seed(settings.seed)
    utils = transformer_utils()
    model = utils.build_model(
        model_type=settings.model_type,
        input_vocab_size=utils.inputs_vocabulary(settings.vocabulary).vocab_size,
        output_vocab_size=utils.targets_vocabulary(settings.vocabulary).vocab_size,
        layout_rules=settings.mesh.layout,
        mesh_shape=settings.mesh.shape,
    )
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    if mesh_impl is None:
        mesh_impl = settings.mesh.placement_mesh()
    return model, graph, mesh, mesh_impl


def _import_features(
    settings: ModelSettings, mesh: Any, features: dict[str, tf.Tensor]
) -> dict[str, Any]:
    needed = ["targets"] if settings.model_type == "lm" else ["inputs", "targets"]
    missing = [name for name in needed if name not in features]
    if missing:
        raise ConfigError(
            f"the data set has the features {sorted(features)}; train.run.model_type = "
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
        if settings.model_type == "lm" and name.startswith("inputs"):
            continue
        length = feature_length(settings, name)
        if not x.shape.is_compatible_with([settings.batch_size, length]):
            raise ConfigError(
                f"the data set gives {name!r} the shape {x.shape} in batches; "
                f"train.run.sequence_length wants {[settings.batch_size, length]}"
            )
        shape = mtf.Shape([*batch_dims, mtf.Dimension("length", length)])
        x = tf.reshape(tf.cast(x, tf.int32), shape.to_integer_list)
        imported[name] = mtf.import_fully_replicated(mesh, x, shape, name=name)
    return imported


def feature_length(settings: ModelSettings, name: str) -> int:
    """The length of a feature's vectors."""
    # "targets_position" is as long as "targets".
    return settings.sequence_length[name.split("_")[0]]


def _call(
    model: Any,
    settings: ModelSettings,
    features: dict[str, Any],
    mode: str,
    num_microbatches: int = 1,
) -> Any:
    """Returns logits and loss."""
    targets = features["targets"]
    if settings.model_type == "lm":
        inputs = transformer_models().autoregressive_inputs(
            targets, sequence_id=features.get("targets_segmentation")
        )
    else:
        inputs = features["inputs"]
    if settings.model_type == "bitransformer":
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
    return model.call_simple(
        inputs=inputs,
        targets=targets,
        compute_loss=True,
        mode=mode,
        variable_dtype=transformer_utils().get_variable_dtype(),
        num_microbatches=num_microbatches,
        **packing,
    )


def _variable_chooser(variable_filter: VariableFilter) -> Callable[[Any], Any | None]:
    if variable_filter is None:
        return lambda variable: True
    if isinstance(variable_filter, str):
        try:
            pattern = re.compile(variable_filter)
        except re.error as error:
            raise ConfigError(
                f"train.run.variable_filter = {variable_filter!r} is not a regular expression: "
                f"{error}"
            ) from error
        return lambda variable: pattern.search(variable.name)
    if callable(variable_filter):
        return variable_filter
    raise ConfigError(
        "train.run.variable_filter must be None, a regular expression or a function of a "
        f"variable; got {variable_filter!r}"
    )
