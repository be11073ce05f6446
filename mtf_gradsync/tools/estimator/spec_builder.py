"""SpecBuilder: the steps that every model_fn on a mesh needs."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

import tensorflow as tf2

from mtf_gradsync.extension import (
    AppliesGradients,
    LayoutLike,
    MeshShapeLike,
    as_layout,
    as_mesh_shape,
    check_flag,
    in_sums_now,
    is_advanced,
    late_configurable,
    mean_loss,
    mtf,
    placement_mesh_impl,
    reported,
    split_by_shard,
    tf,
    weight_now,
)
from mtf_gradsync.runtimes.simd.collectives import list_step
from mtf_gradsync.tools.estimator.hooks import MeanLossHook, add_saver, saving_period

_Modes = tf.estimator.ModeKeys
# Bytes that the first host keeps free for each core's programs.
_PROGRAM_BYTES = 300_000_000
# The metadata of `tf.summary.scalar`, which needs TensorBoard; TensorFlow 2.21 does not install it.
_SCALAR = tf.SummaryMetadata(
    plugin_data=tf.SummaryMetadata.PluginData(plugin_name="scalars"), data_class=1
)


@late_configurable(module="mtf_gradsync.estimator", denylist=["mode", "params", "config"])
class SpecBuilder:
    """A builder of the EstimatorSpecs that a model_fn returns, for a model on a mesh.

        def model_fn(features, labels, mode, params, config):
            build = estimator.SpecBuilder(
                mode, params, config, mesh_shape="rows:4;cols:2", layout="batch:rows;hidden:cols"
            )
            logits = network(build.mesh, features)
            if mode == tf.estimator.ModeKeys.PREDICT:
                return build.predict({"digit": mtf.argmax(logits, digit_dim)})
            loss = cross_entropy(logits, labels)
            if mode == tf.estimator.ModeKeys.EVAL:
                return build.evaluate(loss, metrics, {"labels": labels, "logits": logits})
            optimizer = gs.CrossShardOptimizer(mtf.optimize.AdafactorOptimizer())
            updates = optimizer.minimize(loss, tf.train.get_global_step())
            return build.train(loss, updates, optimizer)

    A model_fn that uses a `SpecBuilder` works under Estimator, under TPUEstimator with use_tpu True
    and False, and under `mtf_gradsync.estimator.Estimator`. If params has a "context", the model is
    lowered into the TPU program that is being built. If params has no "context", the model is
    lowered onto devices.

    Attributes:
      graph: the `mtf.Graph` to build in.
      mesh: the `mtf.Mesh` of the model.
      mesh_impl: the mesh implementation to lower on.
      mode: "train", "eval" or "infer".
    """

    def __init__(
        self,
        mode: str,
        params: Any = None,
        config: Any = None,
        *,
        mesh_shape: MeshShapeLike,
        layout: LayoutLike,
        devices: Sequence[str] | None = None,
        autostack: bool = False,
    ):
        """Makes the mesh on which the model_fn then builds its model, the attribute `mesh`.

        Args:
          mode: the model_fn's mode.
          params: the model_fn's params; read for "context" only.
          config: the model_fn's config: where and how often checkpoints are written.
          mesh_shape: Mesh-TF's mesh shape, such as "rows:4;cols:2".
          layout: Mesh-TF's layout rules, such as "batch:rows;hidden:cols".
          devices: a device string for each processor, for a model that is not lowered into a TPU
            program. If None, training and evaluation use virtual CPU devices, which the session has
            to have (see `run_config`). Predictions then use the session's default device, so that
            an exported model can be loaded on any machine.
          autostack: whether Mesh-TF joins variables of the same shape and dtype into larger ones.

        Raises:
          ValueError: mode is not "train", "eval" or "infer", or the mesh does not fit the devices.
        """
        modes = (_Modes.TRAIN, _Modes.EVAL, _Modes.PREDICT)
        if mode not in modes:
            raise ValueError(f"mode must be one of {list(modes)}, got {mode!r}.")
        shape, layout = as_mesh_shape(mesh_shape), as_layout(layout)
        autostack = check_flag("autostack", autostack)
        context = params.get("context") if hasattr(params, "get") else None
        self._is_simd = context is not None
        variable_placer = None
        if self._is_simd:
            self.mesh_impl, variable_placer = _mesh_over_cores(shape, layout, context)
        else:
            # An exported model loads anywhere.
            is_anywhere = mode == _Modes.PREDICT
            default = ["" if is_anywhere else f"/device:CPU:{n}" for n in range(shape.size)]
            self.mesh_impl = placement_mesh_impl(
                shape, layout, default if devices is None else devices
            )
        self.mode = mode
        self.graph = mtf.Graph()
        self.mesh = mtf.Mesh(self.graph, "mesh", variable_placer)
        self._config = config
        self._autostack = autostack

    def train(
        self,
        loss: mtf.Tensor,
        updates: Sequence[mtf.Operation],
        optimizer: AppliesGradients | None = None,
        summaries: Mapping[str, Any] | None = None,
    ) -> Any:
        """Returns the spec of a training step.

        Checkpoints are written as often as config says. The training can also begin from a
        checkpoint of a run without wrappers around the optimizer, or of a run on another mesh (see
        `ReshardingSaver`). If the checkpoint is of another model, an error names the differences
        between the models.

        Args:
          loss: an mtf tensor. If it has several elements, their mean is taken, by the weights that
            `compute_gradients` or `minimize` was given for the loss.
          updates: the operations that `apply_grads`, `apply_gradients` or `minimize` returned. The
            global step is advanced after these updates, unless they advance it themselves.
          optimizer: the optimizer. The values that it reports (see `reported`), such as gradient
            norms, become summaries. So does the traffic of a step, if it is known.
          summaries: values for more summaries: mtf or tf tensors by name, each of them a scalar or
            one number for each shard.

        Returns:
          A TPUEstimatorSpec in a TPU program, otherwise an EstimatorSpec.

        Raises:
          TypeError: loss is no mtf tensor.
        """
        _check_tensor("loss", loss)
        shown = dict(summaries or {})
        facts: dict[str, Any] = {}
        if optimizer is not None:
            shown.update(reported(optimizer))
            facts = {"in_sums": in_sums_now(optimizer), "weight": weight_now(optimizer)}
        lowering, tf_loss = self._lower(loss)
        done = [lowering.lowered_operation(op) for op in updates]
        if not is_advanced(updates):
            with tf.control_dependencies(done):
                step = tf.train.get_or_create_global_step()
                done.append(tf.assign_add(step, tf.constant(1, step.dtype.base_dtype)).op)
        train_op = tf.group(*done)
        # A value with one number for each shard becomes that many scalars.
        scalars = dict(tf.get_collection(mtf.utils.SCALAR_SUMMARIES_COLLECTION_KEY))
        scalars.update(split_by_shard(_exported(lowering, shown)))
        scalars = {name: tf.cast(tf.reshape(x, []), tf.float32) for name, x in scalars.items()}
        config = self._config
        model_dir = getattr(config, "model_dir", None)
        with _outside_programs():
            # If the spec has no saving hook, Estimator makes one, which knows of no slices.
            saver = add_saver(config, lowering)
            restore = mtf.MtfRestoreHook(lowering)
            period = saving_period(config) if model_dir else {}
            saving = []
            if period:
                saving.append(tf.train.CheckpointSaverHook(model_dir, saver=saver, **period))

        def scaffold() -> tf.train.Scaffold:
            # If there is no saving hook, Estimator makes one, which writes a checkpoint of the
            # beginning before any other hook begins.
            begin = None if saving else _local_init_op(lowering)
            return tf.train.Scaffold(saver=saver, local_init_op=begin)

        if self._is_simd:
            host_call = _write_on_host({"loss": tf_loss, **scalars}, model_dir)
            # The program's summaries are not the host's.
            mtf.utils.remove_summaries()
            return self._spec(
                scaffold,
                loss=tf_loss,
                train_op=train_op,
                host_call=host_call,
                training_hooks=[restore, *saving],
            )
        logging = []
        if optimizer is not None:
            report = list_step(self.mesh_impl, [tf_loss, train_op], [optimizer])
            every = getattr(config, "log_step_count_steps", None)
            facts = _exported(lowering, {k: x for k, x in facts.items() if x is not None})
            if every and "in_sums" in facts:
                logging.append(MeanLossHook(tf_loss, every, **facts))
            traffic = report.scalars() if report else {}
            scalars.update((name, tf.constant(float(x))) for name, x in traffic.items())
        for name, value in scalars.items():
            tf.summary.scalar(name, value)  # for a `tf.train.SummarySaverHook`
        return self._spec(
            scaffold,
            loss=tf_loss,
            train_op=train_op,
            # In one list, since a checkpoint of the beginning is written as soon as there are
            # slices, and Estimator's other hooks begin later.
            training_chief_hooks=[restore, *saving, *logging],
        )

    def evaluate(
        self,
        loss: mtf.Tensor,
        metrics: Callable[..., Mapping[str, Any]] | None = None,
        tensors: Mapping[str, Any] | None = None,
    ) -> Any:
        """Returns the spec of an evaluation.

        Args:
          loss: an mtf tensor. If it has several elements, their mean is taken.
          metrics: a function that gets `tensors` as keyword arguments, all of them as tf tensors.
            It returns a dict of metrics by name. A metric is a pair of a value and an update
            operation, as `tf.metrics` makes it.
          tensors: mtf or tf tensors by name; their first dimension is the batch.

        Returns:
          A TPUEstimatorSpec in a TPU program, otherwise an EstimatorSpec.

        Raises:
          TypeError: loss is no mtf tensor.
        """
        _check_tensor("loss", loss)
        given = _unsplit(tensors)
        lowering, tf_loss = self._lower(loss)
        values = _exported(lowering, given)
        with _outside_programs():
            restore = mtf.MtfRestoreHook(lowering)
        measured: dict[str, Any] = {}
        if metrics is not None and self._is_simd:
            measured["eval_metrics"] = (metrics, values)
        elif metrics is not None:
            measured["eval_metric_ops"] = metrics(**values)
        return self._spec(loss=tf_loss, evaluation_hooks=[restore], **measured)

    def predict(self, predictions: Mapping[str, Any]) -> Any:
        """Returns the spec of predictions, and of an exported model.

        Args:
          predictions: mtf or tf tensors by name; their first dimension is the batch.

        Returns:
          A TPUEstimatorSpec in a TPU program, otherwise an EstimatorSpec.
        """
        given = _unsplit(predictions)
        lowering = mtf.Lowering(self.graph, {self.mesh: self.mesh_impl}, autostack=self._autostack)
        values = _exported(lowering, given)
        with _outside_programs():
            restore = mtf.MtfRestoreHook(lowering)

        def scaffold() -> tf.train.Scaffold:
            # A server that loads an exported model runs its local_init_op, and no hooks.
            return tf.train.Scaffold(local_init_op=_local_init_op(lowering))

        exported = {"serving_default": tf.estimator.export.PredictOutput(values)}
        return self._spec(
            scaffold, predictions=values, export_outputs=exported, prediction_hooks=[restore]
        )

    def _spec(self, scaffold: Callable[[], tf.train.Scaffold] | None = None, **spec: Any) -> Any:
        if self._is_simd:
            return tf.estimator.tpu.TPUEstimatorSpec(self.mode, scaffold_fn=scaffold, **spec)
        return tf.estimator.EstimatorSpec(self.mode, scaffold=scaffold and scaffold(), **spec)

    def _lower(self, loss: mtf.Tensor) -> tuple[mtf.Lowering, tf.Tensor]:
        mean = mtf.cast(mean_loss(loss), tf.float32)
        lowering = mtf.Lowering(self.graph, {self.mesh: self.mesh_impl}, autostack=self._autostack)
        return lowering, tf.cast(lowering.export_to_tf_tensor(mean), tf.float32)


def _mesh_over_cores(shape: mtf.Shape, layout: mtf.LayoutRules, context: Any) -> tuple[Any, Any]:
    """Makes the SIMD mesh of a TPU program, and the object that chooses a host for each master.

    Args:
      shape: the mesh shape; it must have as many processors as the program has cores.
      layout: the layout rules.
      context: what TPUEstimator, or a program of `mtf_gradsync.simd`, puts into
        ``params["context"]``.

    Returns:
      The mesh implementation, a ``SimdMeshImpl``; and Mesh-TensorFlow's ``BalancedVariablePlacer``,
      which spreads the masters over the memory of the hosts of the TPU.

    Raises:
      ValueError: the number of the mesh's processors is not the number of the program's cores.
    """
    if shape.size != context.num_replicas:
        raise ValueError(
            f"The mesh {shape.to_string} has {shape.size} processors, and the program runs on "
            f"{context.num_replicas} cores: give mesh_shape as many processors as there are cores."
        )
    hosts = [
        context.tpu_host_placement_function(host_id=number) for number in range(context.num_hosts)
    ]
    in_use = [_PROGRAM_BYTES * context.num_replicas] + [0] * (len(hosts) - 1)
    physical = [int(size) for size in context.device_assignment.topology.mesh_shape]
    if len(physical) == 4:
        physical = mtf.simd_mesh_impl.physical_shape_3d_from_topology_proto_4d(physical)
    order = mtf.simd_mesh_impl.auto_logical_to_physical_tpu(
        shape.to_integer_list, physical, device_assignment=context.device_assignment
    )
    mesh_impl = mtf.simd_mesh_impl.SimdMeshImpl(
        shape, layout, [""] * shape.size, context.device_assignment, logical_to_physical=order
    )
    return mesh_impl, mtf.utils.BalancedVariablePlacer(hosts, in_use)


def _outside_programs() -> Any:
    """Returns a context manager; operations made in it are outside the TPU program being built."""
    return tf.control_dependencies(None)


def _local_init_op(lowering: mtf.Lowering) -> tf.Operation:
    """Returns an operation that initializes local variables, and slices from their masters.

    The masters have to be initialized before the returned operation runs. `lowering` is the model's
    lowering.
    """
    return tf.group(tf.train.Scaffold.default_local_init_op(), lowering.copy_masters_to_slices())


def _check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, mtf.Tensor):
        raise TypeError(f"{name} must be an mtf.Tensor, got {value!r}.")


def _unsplit(tensors: Mapping[str, Any] | None) -> dict[str, Any]:
    """Replaces mtf tensors by copies whose dimensions are not split over the mesh.

    Every processor holds all elements of each copy. `tensors` is a dictionary from names to mtf or
    tf tensors; None counts as {}. The result is a dictionary with the same names, in which tf
    tensors are not changed.
    """
    return {
        name: mtf.anonymize(x) if isinstance(x, mtf.Tensor) else x
        for name, x in (tensors or {}).items()
    }


def _exported(lowering: mtf.Lowering, tensors: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    return {
        name: lowering.export_to_tf_tensor(x) if isinstance(x, mtf.Tensor) else x
        for name, x in tensors.items()
    }


def _write_on_host(
    scalars: Mapping[str, tf.Tensor], model_dir: str | None
) -> tuple[Callable[..., Any], list[tf.Tensor]] | None:
    """Returns a host_call that writes scalars of a TPU program as summaries into model_dir.

    The host_call is a pair of a function and its tensors, as a TPUEstimatorSpec takes it. `scalars`
    are float32 tf scalars by name. If `model_dir` is None, the result is None: TPUEstimator would
    wait for a host_call even if it wrote nothing.
    """
    if not model_dir:
        return None
    names = list(scalars)

    def write(step: tf.Tensor, *values: tf.Tensor) -> Any:
        # A host gets the values of all its cores in a row; they are the same.
        with tf2.summary.create_file_writer(model_dir).as_default():
            for name, value in zip(names, values):
                tf2.summary.write(name, value[0], tf.cast(step[0], tf.int64), _SCALAR)
            return tf.summary.all_v2_summary_ops()

    # TPUs have no int64 outfeed.
    step = tf.reshape(tf.cast(tf.train.get_global_step(), tf.int32), [1])
    return write, [step] + [tf.reshape(scalars[name], [1]) for name in names]
