"""SpecBuilder: does what every model_fn on a mesh repeats."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

import gin

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.compat_v1 import AppliesGradients
from mtf_gradsync.estimator import summaries as summaries_lib
from mtf_gradsync.estimator.meshes import model_mesh, outside_programs
from mtf_gradsync.mesh.axes import LayoutLike, MeshShapeLike
from mtf_gradsync.optimizers import reported
from mtf_gradsync.runtimes.saving import RunSaver
from mtf_gradsync.step import is_advanced

_Modes = tf.estimator.ModeKeys


@gin.configurable(module="mtf_gradsync.estimator", denylist=["mode", "params", "config"])
class SpecBuilder:
    """Builds the specs that a model_fn returns, for a model on a mesh.

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

    The model_fn works under Estimator, under TPUEstimator with use_tpu True and False, and under
    `mtf_gradsync.estimator.Estimator`. Where params has a "context", the model is lowered into the
    TPU program that is being built, otherwise onto devices.

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
        """Makes the mesh.

        Args:
          mode: the model_fn's mode.
          params: the model_fn's params; read for "context" only.
          config: the model_fn's config: where and how often checkpoints are written.
          mesh_shape: Mesh-TF's mesh shape, such as "rows:4;cols:2".
          layout: Mesh-TF's layout rules, such as "batch:rows;hidden:cols".
          devices: without a TPU, a device string for each processor. None is for training and
            evaluation virtual CPU devices, which the session has to have (`run_config`), and for
            predictions the session's default device, so that an exported model loads anywhere.
          autostack: whether Mesh-TF puts variables of one shape into one.

        Raises:
          ValueError: mode is none of the three, or mesh and devices do not fit.
        """
        modes = (_Modes.TRAIN, _Modes.EVAL, _Modes.PREDICT)
        if mode not in modes:
            raise ValueError(f"mode must be one of {list(modes)}, got {mode!r}.")
        context = params.get("context") if hasattr(params, "get") else None
        if devices is None and context is None and mode == _Modes.PREDICT:
            devices = [""] * mtf.convert_to_shape(mesh_shape).size
        made = model_mesh(mesh_shape, layout, context, devices)
        self.mode = mode
        self.mesh_impl = made.impl
        self.graph = mtf.Graph()
        self.mesh = mtf.Mesh(self.graph, "mesh", made.variable_placer)
        self._is_simd = made.is_simd
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

        Checkpoints are written as config says. Those of a run without the wrapper, or of another
        mesh, are read too (`ReshardingSaver`); one of another model is an error that names what
        differs.

        Args:
          loss: an mtf tensor; the mean is taken of one with several elements.
          updates: what `apply_grads`, `apply_gradients` or `minimize` returned. The global step is
            advanced after them, unless they do so themselves.
          optimizer: what it reports becomes summaries, such as gradient norms (`reported`), and so
            does the traffic of a step, where that is known here.
          summaries: more mtf or tf tensors by name, scalars or one value for each shard.

        Returns:
          A TPUEstimatorSpec in a TPU program, otherwise an EstimatorSpec.

        Raises:
          TypeError: loss is no mtf tensor.
        """
        _check_tensor("loss", loss)
        shown = dict(summaries or {})
        if optimizer is not None:
            shown.update(reported(optimizer))
        lowering, tf_loss = self._lower(loss)
        done = [lowering.lowered_operation(op) for op in updates]
        if not is_advanced(updates):
            with tf.control_dependencies(done):
                step = tf.train.get_or_create_global_step()
                done.append(tf.assign_add(step, tf.constant(1, step.dtype.base_dtype)).op)
        train_op = tf.group(*done)
        scalars = summaries_lib.scalars_to_write(lowering, shown)
        config = self._config
        model_dir = getattr(config, "model_dir", None)
        with outside_programs():
            saver = self._make_saver(lowering)
            restore = mtf.MtfRestoreHook(lowering)
            saving = []
            steps = getattr(config, "save_checkpoints_steps", None)
            seconds = getattr(config, "save_checkpoints_secs", None)
            if model_dir and (steps or seconds):
                saving.append(
                    tf.train.CheckpointSaverHook(
                        model_dir,
                        save_steps=steps,
                        save_secs=None if steps else seconds,
                        saver=saver,
                    )
                )

        def scaffold() -> tf.train.Scaffold:
            # The saving hook that Estimator makes where there is none writes a checkpoint of the
            # beginning before any other hook begins.
            begin = None if saving else _local_init_op(lowering)
            return tf.train.Scaffold(saver=saver, local_init_op=begin)

        if self._is_simd:
            host_call = summaries_lib.write_on_host({"loss": tf_loss, **scalars}, model_dir)
            # The program's summaries are not the host's.
            mtf.utils.remove_summaries()
            return self._spec(
                scaffold,
                loss=tf_loss,
                train_op=train_op,
                host_call=host_call,
                training_hooks=[restore, *saving],
            )
        if optimizer is not None:
            step = [tf_loss, train_op]
            traffic = summaries_lib.traffic_of_devices(step, self.mesh_impl, optimizer)
            scalars.update((name, tf.constant(float(x))) for name, x in traffic.items())
        summaries_lib.write_in_graph(scalars)
        return self._spec(
            scaffold,
            loss=tf_loss,
            train_op=train_op,
            # In one list, since a checkpoint of the beginning is written as soon as there are
            # slices, and Estimator's other hooks begin later.
            training_chief_hooks=[restore, *saving],
        )

    def evaluate(
        self,
        loss: mtf.Tensor,
        metrics: Callable[..., Mapping[str, Any]] | None = None,
        tensors: Mapping[str, Any] | None = None,
    ) -> Any:
        """Returns the spec of an evaluation.

        Args:
          loss: an mtf tensor; the mean is taken of one with several elements.
          metrics: called with tensors by name, as tf tensors on the host; returns by name pairs of
            a value and an update operation, as `tf.metrics` makes them.
          tensors: mtf or tf tensors by name, the batch their first dimension.

        Returns:
          A TPUEstimatorSpec in a TPU program, otherwise an EstimatorSpec.

        Raises:
          TypeError: loss is no mtf tensor.
        """
        _check_tensor("loss", loss)
        given = _anonymous(tensors)
        lowering, tf_loss = self._lower(loss)
        values = _exported(lowering, given)
        with outside_programs():
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
          predictions: mtf or tf tensors by name, the batch their first dimension.

        Returns:
          A TPUEstimatorSpec in a TPU program, otherwise an EstimatorSpec.
        """
        given = _anonymous(predictions)
        lowering = mtf.Lowering(self.graph, {self.mesh: self.mesh_impl}, autostack=self._autostack)
        values = _exported(lowering, given)
        with outside_programs():
            restore = mtf.MtfRestoreHook(lowering)

        def scaffold() -> tf.train.Scaffold:
            # Who loads an exported model runs its local_init_op, and no hooks.
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
        mean = mtf.cast(mtf.reduce_mean(loss), tf.float32)
        lowering = mtf.Lowering(self.graph, {self.mesh: self.mesh_impl}, autostack=self._autostack)
        return lowering, tf.cast(lowering.export_to_tf_tensor(mean), tf.float32)

    def _make_saver(self, lowering: mtf.Lowering) -> tf.train.Saver:
        config = self._config
        # Estimator makes a saving hook of its own where the spec has none, and that knows of no
        # slices.
        saver = RunSaver(
            lowering,
            sharded=True,
            max_to_keep=getattr(config, "keep_checkpoint_max", None) or 0,
            keep_checkpoint_every_n_hours=getattr(config, "keep_checkpoint_every_n_hours", 10000),
        )
        tf.add_to_collection(tf.GraphKeys.SAVERS, saver)
        return saver


def _local_init_op(lowering: mtf.Lowering) -> tf.Operation:
    """Returns the operation that copies masters to slices once masters have their values."""
    return tf.group(tf.train.Scaffold.default_local_init_op(), lowering.copy_masters_to_slices())


def _check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, mtf.Tensor):
        raise TypeError(f"{name} must be an mtf.Tensor, got {value!r}.")


def _anonymous(tensors: Mapping[str, Any] | None) -> dict[str, Any]:
    """Replicates mtf tensors, so that each processor has all elements; keeps tf tensors."""
    return {
        name: mtf.anonymize(x) if isinstance(x, mtf.Tensor) else x
        for name, x in (tensors or {}).items()
    }


def _exported(lowering: mtf.Lowering, tensors: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    return {
        name: lowering.export_to_tf_tensor(x) if isinstance(x, mtf.Tensor) else x
        for name, x in tensors.items()
    }
