"""Builds the graph of a training step."""

from __future__ import annotations

import re
from typing import Any, Callable, NamedTuple, Sequence

import gin

from mtf_gradsync.extension import (
    GradientAccumulationOptimizer,
    OuterOptimizer,
    StepPlan,
    UpdateCounters,
    Wrapper,
    did_you_mean,
    gated_update,
    gradient_noise_scale,
    in_sums_now,
    mtf,
    reported,
    tf,
)
from mtf_gradsync.runtimes import simd
from mtf_gradsync.runtimes._common import ConfigError
from mtf_gradsync.runtimes.sessions import OnCores, OnDevices
from mtf_gradsync.tools.train.config import VariableFilter, transformer_utils
from mtf_gradsync.tools.train.errors import raised_as
from mtf_gradsync.tools.train.learning_rate import adafactor_follows_schedule, rate_on_mesh
from mtf_gradsync.tools.train.model import MeshModel, TrainingJob, placeholders

# The variable that counts the examples of all steps made, by which a run goes on with its data.
EXAMPLES = "train/examples"


class TrainGraph(NamedTuple):
    """The graph of a training step.

    Attributes:
      lowering: the mtf.Lowering.
      loss: float32 scalar.
      loss_denominator: the model's divisor of its loss in nats.
      step: int64 scalar; fetching it makes a training step and returns the number of steps made.
      examples: the variable `EXAMPLES`, an int64 scalar: how many examples the run has used.
      fields: tensors to show beside the loss, by name.
      reported: tensors for summaries, by name: the learning rate if the config has one, and the
        values that `mtf_gradsync.reported` returns for the optimizers.
      update_step: int scalar, the number of updates made by the end of the step; None if no
        optimizer counts updates.
      in_sums: int scalar, how many gradients are accumulated after the step and wait for an update;
        None if no optimizer accumulates.
      num_parameters: number of trainable parameters.
      gradients: mtf tensors, as `mtf.gradients` returned them.
      optimizers: the optimizer that was made and those inside it, outermost first.
    """

    lowering: Any
    loss: tf.Tensor
    loss_denominator: float
    step: tf.Tensor
    examples: tf.Variable
    fields: dict[str, tf.Tensor]
    reported: dict[str, tf.Tensor]
    update_step: tf.Tensor | None
    in_sums: tf.Tensor | None
    num_parameters: int
    gradients: list[Any]
    optimizers: tuple[Any, ...]


def build_train_graph(
    place: OnDevices | OnCores, job: TrainingJob, features: dict[str, tf.Tensor] | None = None
) -> TrainGraph:
    """Adds a job's model, gradients and update to the default graph.

    `job` has the settings of the training step. `place` is where the step runs: on devices, or as a
    SIMD program on cores. `features` are int tensors ``[batch_size, length]`` by feature name. If
    `features` is None, placeholders are made for them. The step counter is built outside of the
    SIMD program, as TPUs require.
    """
    features = features or placeholders(job)
    global_step = tf.train.get_or_create_global_step()
    # Read once, before anything is assigned: the schedule and the increment use the same step.
    step_now = tf.identity(global_step.read_value())
    tf.add_to_collection(_LAST_STEP, (step_now, job.train_steps))
    examples = tf.get_variable(
        EXAMPLES,
        dtype=tf.int64,
        initializer=tf.constant(job.examples_before, tf.int64),
        trainable=False,
        use_resource=True,
    )
    with place.building() as program:
        model = MeshModel(job.model, None if program is None else program.mesh_impl)
        loss, pairs, opt, rate = model_and_optimizer(job, model, features, step_now)
        update_ops = _update(opt, pairs, is_placement=program is None)
        stack = (opt, *opt.inner_stack()) if isinstance(opt, Wrapper) else (opt,)
        # Called before lowering, because it may add mtf operations.
        fields, update_step = _progress_values(stack)
        in_sums = in_sums_now(opt)
        reports_by_name = reported(opt) if job.reports or job.noise_scale else {}
        if job.noise_scale:
            value, more = _noise_scale(opt, job.model.batch_size)
            update_ops += more
            fields["noise scale"] = reports_by_name["gradient_noise_scale"] = value
            if "gradient_norm/of_shards" in reports_by_name:
                fields["norms of shards"] = reports_by_name["gradient_norm/of_shards"]

        lowering = model.lower()

        def exported(x: Any) -> tf.Tensor:
            return lowering.export_to_tf_tensor(x) if isinstance(x, mtf.Tensor) else x

        updates = [lowering.lowered_operation(op) for op in update_ops]
        tf_loss = tf.cast(lowering.export_to_tf_tensor(loss), tf.float32)
        tf_fields = {name: exported(x) for name, x in fields.items()}
        tf_reported = {name: exported(x) for name, x in reports_by_name.items()}
        if rate is not None:
            tf_reported["learning_rate"] = tf.cast(exported(rate), tf.float32)
        tf_update_step, tf_in_sums = exported(update_step), exported(in_sums)
    with tf.control_dependencies([*updates, step_now]):
        counted = examples.assign_add(job.model.batch_size, read_value=False)
    with tf.control_dependencies([counted]):
        step = tf.identity(global_step.assign_add(1, read_value=True), name="train_step")
    return TrainGraph(
        lowering=lowering,
        loss=tf_loss,
        loss_denominator=model.loss_denominator,
        step=step,
        examples=examples,
        fields=tf_fields,
        reported=tf_reported,
        update_step=tf_update_step,
        in_sums=tf_in_sums,
        num_parameters=sum(v.shape.size for _, v in pairs),
        gradients=[g for g, _ in pairs if g is not None],
        optimizers=stack,
    )


_LAST_STEP = "mtf_gradsync/last_step"


@gin.configurable(module="mtf_gradsync.train")
def is_last_step() -> tf.Tensor:
    """Returns whether the training step that is being built is the last one of its run.

    With ``GradientAccumulationOptimizer.flush = @is_last_step`` the last step of a run makes an
    update from all gradients accumulated so far. The gradients may be of fewer than K microbatch
    steps. If `train_steps` is raised later, the run goes on from this update.

    Returns:
      A boolean tf scalar: true on step `RunConfig.train_steps`.

    Raises:
      RuntimeError: no training step of ``mtf-gradsync train`` is being built.
    """
    known = tf.get_collection(_LAST_STEP)
    if not known:
        raise RuntimeError(
            "Only steps that mtf-gradsync train builds know whether they are the last: "
            "is_last_step is for their configs. In a program of your own, give flush a boolean "
            "tensor."
        )
    step, last = known[-1]
    return tf.greater_equal(step + 1, last)


def _update(
    opt: Any, pairs: Sequence[tuple[mtf.Tensor, mtf.Variable]], is_placement: bool
) -> list[mtf.Operation]:
    grads = [grad for grad, _ in pairs]
    is_bare = not isinstance(opt, Wrapper)

    def apply() -> list[mtf.Operation]:
        variables = [variable for _, variable in pairs]
        updates = list(opt.apply_grads(grads, variables))
        if is_bare:  # wrappers do so themselves
            graph, meshes = variables[0].graph, {v.mesh for v in variables}
            plan = StepPlan.of_graph(graph)
            updates += plan.extension(UpdateCounters).advances(graph, meshes) if plan else []
        return updates

    # On a placement mesh the updates of an optimizer without a wrapper race with reads.
    return gated_update(apply, grads) if is_bare and is_placement else apply()


def model_and_optimizer(
    job: TrainingJob, model: MeshModel, features: dict[str, tf.Tensor], step: tf.Tensor
) -> tuple[mtf.Tensor, list[tuple[mtf.Tensor, mtf.Variable]], Any, Any]:
    """Adds a job's model and gradients to the model's graph, and makes the optimizer.

    `model` has an mtf graph, to which the operations are added. `features` are int tf tensors
    ``[batch_size, length]`` by feature name, and `step` is the global step, an int64 tf scalar.
    Returns the loss, a list of pairs (gradient, variable) for the variables that are trained, the
    optimizer, and the learning rate of the step. The learning rate is None if the optimizer has a
    learning rate of its own.
    """
    loss, grads = _add_loss_and_gradients(model, features)
    job.model.mesh.check_splits(model.graph, model.input_dims)
    chosen = _variable_chooser(job.variable_filter)
    pairs = [(g, v) for g, v in zip(grads, model.graph.trainable_variables) if chosen(v)]
    if not pairs:
        names = [v.name for v in model.graph.trainable_variables]
        given = job.variable_filter
        hint = did_you_mean(given, names) if isinstance(given, str) else ""
        raise ConfigError(
            f"train.run.variable_filter = {job.variable_filter!r} leaves no variable to train; "
            f"names look like {names[0]!r}{hint}"
        )
    opt, rate = optimizer_and_rate(job, step, loss.mesh)
    return loss, pairs, opt, rate


def optimizer_and_rate(job: TrainingJob, step: tf.Tensor, mesh: mtf.Mesh) -> tuple[Any, Any]:
    """Makes a job's optimizer and the learning rate of the step, and returns both.

    `step` is the global step, an int64 tf scalar. The learning rate is a number or a scalar of tf
    or mtf, or None if the optimizer has a learning rate of its own.
    """
    stack: list[Any] = []  # filled once the optimizer exists, which is made with the rate
    rate = rate_on_mesh(job.learning_rate, step, job.schedule_step, mesh, stack)
    with adafactor_follows_schedule(job.schedule_step, mesh):
        opt = _make_optimizer(job.optimizer, rate)
    stack += (opt, *opt.inner_stack()) if isinstance(opt, Wrapper) else (opt,)
    return opt, rate


def build_simd(job: TrainingJob) -> tuple[TrainGraph, simd.Program]:
    """Adds a job's training step, with placeholders, as a SIMD program to the default graph.

    Returns the graph of the training step and the SIMD program.
    """
    place = OnCores("cpu_replicas", job.model.mesh.shape, job.model.mesh.layout)
    graph = build_train_graph(place, job)
    assert place.program is not None  # just built
    return graph, place.program


def forward_loss(job: TrainingJob) -> mtf.Tensor:
    """Adds a job's model without gradients to a new mtf graph, and returns its loss, a scalar.

    The whole batch is one microbatch. Placeholders for the batch are added to the default graph.
    """
    model = MeshModel(job.model)
    return model(model.import_features(placeholders(job)), "train")[1]


def steps_per_update(optimizers: Sequence[Any]) -> int:
    """Returns how many steps a stack makes for an update, or between two outer steps.

    `optimizers` are the optimizers of the stack. The result is 1 if each step makes an update, or
    if the number of steps changes during training. It is also 1 if the stack has both microbatch
    steps and outer steps (the steps in which islands of DiLoCo come together).
    """
    joining = [x for x in optimizers if isinstance(x, GradientAccumulationOptimizer)]
    periods = [one.backward_passes_per_step for one in joining]
    periods += [one.inner_steps for one in optimizers if isinstance(one, OuterOptimizer)]
    periods = [period for period in periods if period != 1]
    return periods[0] if len(periods) == 1 and not callable(periods[0]) else 1


def _noise_scale(opt: Any, batch_size: int) -> Any:
    stack = opt._wrappers() if isinstance(opt, Wrapper) else []
    for one in stack:
        if isinstance(one, GradientAccumulationOptimizer) and one.accumulate == "local":
            passes = one.backward_passes_per_step
            if callable(passes):
                raise ConfigError(
                    "train.run.noise_scale takes a fixed number of microbatch steps, but "
                    f"backward_passes_per_step is {passes!r}"
                )
            batch_size *= passes
    with raised_as(ConfigError, TypeError, ValueError, before="train.run.noise_scale = True: "):
        return gradient_noise_scale(opt, batch_size)


def _add_loss_and_gradients(
    model: MeshModel, features: dict[str, tf.Tensor]
) -> tuple[Any, list[Any]]:
    """Adds the model's operations and gradients to its mtf graph; returns loss and gradients.

    `features` are int tf tensors ``[batch_size, length]`` by feature name. The gradients are in the
    order of the graph's trainable variables. If gin binds a size of microbatches for
    Mesh-TensorFlow, the gradients are computed in microbatches, within one training step.
    """
    settings = model.settings
    mtf_features = model.import_features(features)
    batch_dim = mtf_features["targets"].shape.dims[-2]
    num_microbatches = transformer_utils().serialize_num_microbatches(
        batch_dim, settings.sequence_length, settings.mesh.shape, settings.mesh.layout
    )
    if num_microbatches == 1:
        _, loss = model(mtf_features, "train")
        return loss, mtf.gradients([loss], [v.value for v in model.graph.trainable_variables])

    def microbatch(part: dict[str, Any]) -> dict[str, Any]:
        return {"loss": model(part, "train", num_microbatches)[1]}

    grads, outputs = mtf.serialize_training_step(
        mtf_features, microbatch, batch_dim, num_microbatches
    )
    return outputs["loss"], grads


def _make_optimizer(optimizer: Callable[..., Any], rate: Any) -> Any:
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
    return opt


def _progress_values(stack: tuple[Any, ...]) -> tuple[dict[str, Any], Any]:
    """Returns the values that training shows beside the loss, and the number of updates.

    The values are tensors of tf or mtf that the optimizers in `stack` give, by name. The number of
    updates is a scalar, as of the end of the step; it is None if no optimizer counts updates.
    """
    fields: dict[str, Any] = {}
    update_step = None
    # An outer optimizer's fields replace those of the same name.
    for opt in reversed(stack):
        fields.update(opt.progress_fields() if hasattr(opt, "progress_fields") else {})
        counted = getattr(opt, "update_step_now", None)
        update_step = update_step if counted is None else counted
    return fields, update_step


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
