"""Trains, evaluates and predicts with a model_fn, on every TensorFlow and every runtime."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import tempfile
from typing import Any, Callable, ContextManager, Iterator, Sequence

import numpy as np

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.estimator.exporting import new_directory, write_saved_model
from mtf_gradsync.estimator.host import HostCallHook, Metrics
from mtf_gradsync.estimator.inputs import call_with_known, features_and_labels, give
from mtf_gradsync.estimator.meshes import outside_programs
from mtf_gradsync.estimator.predictions import chosen, examples
from mtf_gradsync.estimator.runtimes import OnCores, OnDevices, Runtime, check_runtime
from mtf_gradsync.estimator.writing import listen, write_summary, writers
from mtf_gradsync.optimizers.state.averaged import averaged_checkpoint, check_averages_kept
from mtf_gradsync.optimizers.state.restoring import ReshardingSaver

_logger = logging.getLogger(__name__)
_Modes = tf.estimator.ModeKeys


class Estimator:
    """Runs a model_fn that was written for Estimator or TPUEstimator.

    It stands where one of them stood, with the same arguments, and needs neither: TensorFlow
    dropped both after 2.15. The model_fn's specs may have hooks, a scaffold or scaffold_fn,
    host_call, eval_metrics or eval_metric_ops; all of them are used as there. Sessions are
    TensorFlow's monitored sessions on every runtime.

        runs = estimator.Estimator(model_fn, "runs/mine", params=params)
        runs.train(input_fn, max_steps=1000)
        print(runs.evaluate(input_fn, steps=10))

    What differs: a TPU's cores each take a part of the batch from the host, here every core sees
    the whole batch, as Mesh-TensorFlow programs ask for by `InputPipelineConfig.BROADCAST`; and
    metrics and host_call see every value once, not once for each core.
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: str | None = None,
        config: Any = None,
        params: Any = None,
        *,
        use_tpu: bool = False,
        runtime: Runtime | None = None,
        num_cores: int | None = None,
        train_batch_size: int | None = None,
        eval_batch_size: int | None = None,
        predict_batch_size: int | None = None,
        eval_on_tpu: bool = True,
        export_to_tpu: bool = True,
        evaluate_with_averages: bool = False,
    ):
        """Takes a model_fn; nothing is built before `train`, `evaluate` or `predict`.

        Args:
          model_fn: takes features and, where it names them, labels, mode, params and config;
            returns an EstimatorSpec or a TPUEstimatorSpec.
          model_dir: where checkpoints and summaries are; None takes config's, or a temporary one.
          config: a RunConfig of Estimator or TPUEstimator; None for its defaults. Read are
            model_dir, session_config, tf_random_seed, save_checkpoints_steps and
            save_checkpoints_secs, save_summary_steps, log_step_count_steps, keep_checkpoint_max
            and tpu_config.num_shards.
          params: a dict, or anything whose attributes can be set; a copy is handed on. It gets
            "batch_size" where one is given, as for a TPU "use_tpu", and in a program "context".
          use_tpu: whether the model_fn builds a SIMD program, as for a TPU.
          runtime: "placement_mesh", "cpu_replicas" or "xla". None is "xla", the devices that jax
            has, with use_tpu, and "placement_mesh" without.
          num_cores: of a SIMD program; None takes config.tpu_config.num_shards.
          train_batch_size: what params["batch_size"] is in training; None leaves it alone.
          eval_batch_size: likewise in evaluation.
          predict_batch_size: likewise for predictions.
          eval_on_tpu: of TPUEstimator; evaluation runs where training does.
          export_to_tpu: of TPUEstimator; what is exported runs on a host.
          evaluate_with_averages: whether `evaluate`, `predict` and `export_saved_model` take the
            moving averages that the optimizer keeps (`mtf_gradsync.AverageOptimizer`) in place of
            the variables; those without one keep their values. Training goes on with the variables.

        Raises:
          TypeError: model_fn is no function.
          ValueError: there is no such runtime, or it does not run here; or model_dir is said twice.
        """
        del eval_on_tpu, export_to_tpu
        if not callable(model_fn):
            raise TypeError(f"model_fn must be a function, got {model_fn!r}.")
        self._model_fn = model_fn
        self.config = copy.copy(config) if config is not None else tf.estimator.RunConfig()
        configured = getattr(self.config, "model_dir", None)
        if model_dir and configured and os.fspath(model_dir) != os.fspath(configured):
            raise ValueError(
                f"model_dir is {model_dir!r} here and {configured!r} in config; give it once."
            )
        if not (model_dir or configured):
            model_dir = tempfile.mkdtemp()
            _logger.warning("There is no model_dir: checkpoints go to %s.", model_dir)
        directory: Any = model_dir or configured
        self.model_dir: str = os.fspath(directory)
        if configured != self.model_dir:
            self.config = _with_model_dir(self.config, self.model_dir)
        self.params = params
        self._with_averages = evaluate_with_averages
        tpu_config = getattr(self.config, "tpu_config", None)
        self._is_for_tpu = tpu_config is not None or use_tpu
        self._num_cores = num_cores or getattr(tpu_config, "num_shards", None)
        self.runtime = check_runtime(runtime, use_tpu, self._num_cores)
        self._batch_sizes = {
            _Modes.TRAIN: train_batch_size,
            _Modes.EVAL: eval_batch_size,
            _Modes.PREDICT: predict_batch_size,
        }

    def latest_checkpoint(self) -> str | None:
        """The newest checkpoint of model_dir, or None."""
        return tf.train.latest_checkpoint(self.model_dir)

    def train(
        self,
        input_fn: Callable[..., Any],
        hooks: Sequence[Any] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[Any] | None = None,
    ) -> Estimator:
        """Trains, from the newest checkpoint of model_dir where there is one.

        Args:
          input_fn: makes a Dataset, or tensors; see `features_and_labels`.
          hooks: more session hooks.
          steps: how many steps to make; None for all that the input has.
          max_steps: the global step to stop at; only one of the two.
          saving_listeners: listeners of the checkpoint saver.

        Returns:
          Itself.

        Raises:
          ValueError: both of steps and max_steps are given, or the spec has no way to save for
            saving_listeners, or no averages are kept to evaluate with.
        """
        _check_positive(steps=steps, max_steps=max_steps)
        if steps is not None and max_steps is not None:
            raise ValueError(f"Give steps or max_steps, not both: got {steps} and {max_steps}.")
        if max_steps is not None and self._step_saved() >= max_steps:
            _logger.info("The checkpoint has %d steps already.", max_steps)
            return self
        with self._graph():
            spec, scaffold, runs, input_hooks = self._build(input_fn, _Modes.TRAIN)
            if self._with_averages:
                check_averages_kept()
            step = tf.train.get_global_step()
            every = self._setting("log_step_count_steps")
            all_hooks = [*input_hooks, *(hooks or ()), tf.train.NanTensorHook(spec.loss)]
            if steps is not None or max_steps is not None:
                all_hooks.append(tf.train.StopAtStepHook(steps, max_steps))
            if every:
                shown = {"loss": spec.loss, "step": step}
                all_hooks.append(tf.train.LoggingTensorHook(shown, every_n_iter=every))
            all_hooks += [*spec.training_hooks, *getattr(spec, "training_chief_hooks", ())]
            if getattr(spec, "host_call", None):
                all_hooks.append(HostCallHook(spec.host_call))
            all_hooks += writers(self.config, all_hooks, scaffold, spec.loss, runs.is_program)
            listen(all_hooks, saving_listeners)
            if runs.is_program and self._setting("save_summary_steps"):
                write_summary(self.model_dir, runs.traffic(spec), self._step_saved())
            sessions = runs.sessions(
                spec, scaffold, lambda: contextlib.nullcontext(self.latest_checkpoint())
            )
            made_a_step = False
            with tf.train.MonitoredSession(sessions, all_hooks) as session:
                while not session.should_stop():
                    session.run([spec.train_op, spec.loss])
                    made_a_step = True
        if not made_a_step:
            _logger.warning(
                "Training made no step. Perhaps the input of %s has no batches: its data are "
                "missing, or they are fewer examples than a batch takes.",
                getattr(input_fn, "__qualname__", input_fn),
            )
        return self

    def evaluate(
        self,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        hooks: Sequence[Any] | None = None,
        checkpoint_path: str | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """Evaluates a checkpoint.

        Args:
          input_fn: as for `train`.
          steps: how many steps to make; None for all that the input has.
          hooks: more session hooks.
          checkpoint_path: the checkpoint; None takes the newest of model_dir.
          name: summaries go to "eval_<name>" in model_dir, "eval" without one.

        Returns:
          The mean loss as "loss", the metrics, and "global_step", by name.

        Raises:
          ValueError: there is no checkpoint, or it has no averages to evaluate with, or there is no
            input.
        """
        _check_positive(steps=steps)
        path = self._checkpoint(checkpoint_path)
        with self._graph():
            spec, scaffold, runs, input_hooks = self._build(input_fn, _Modes.EVAL)
            metric_ops = dict(getattr(spec, "eval_metric_ops", None) or {})
            if metric_ops and runs.is_program:
                raise ValueError(
                    "eval_metric_ops would be part of the program of a core; give eval_metrics, in "
                    "a TPUEstimatorSpec, which run on the host."
                )
            eval_metrics = getattr(spec, "eval_metrics", None)
            metrics = Metrics(eval_metrics) if eval_metrics else None
            fetches = {
                "loss": spec.loss,
                "tensors": metrics.tensors if metrics else (),
                "updates": [update for _, update in metric_ops.values()],
            }
            values = {name: value for name, (value, _) in metric_ops.items()}
            step = tf.train.get_global_step()
            all_hooks = [*input_hooks, *(hooks or ()), *spec.evaluation_hooks]
            if getattr(spec, "host_call", None):
                all_hooks.append(HostCallHook(spec.host_call))
            losses: list[Any] = []
            result: dict[str, Any] = {}
            sessions = runs.sessions(spec, scaffold, lambda: self._evaluated(path))
            with tf.train.MonitoredSession(sessions, all_hooks) as session:
                global_step = _without_hooks(session, step)
                try:
                    while not session.should_stop() and (steps is None or len(losses) < steps):
                        fetched = session.run(fetches)
                        losses.append(fetched["loss"])
                        if metrics:
                            metrics.add(fetched["tensors"])
                except (tf.errors.OutOfRangeError, StopIteration):
                    pass
                if values and losses:
                    result.update(_without_hooks(session, values))
            if not losses:
                raise ValueError("The input of the evaluation is empty.")
        result.update(metrics.result() if metrics else {})
        result.update(loss=np.float32(np.mean(losses)), global_step=int(global_step))
        directory = os.path.join(self.model_dir, f"eval_{name}" if name else "eval")
        write_summary(directory, result, result["global_step"])
        return result

    def predict(
        self,
        input_fn: Callable[..., Any],
        predict_keys: Sequence[str] | str | None = None,
        hooks: Sequence[Any] | None = None,
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """Predicts with a checkpoint.

        Args:
          input_fn: as for `train`; its labels are not used.
          predict_keys: which predictions; None for all.
          hooks: more session hooks.
          checkpoint_path: the checkpoint; None takes the newest of model_dir.
          yield_single_examples: whether to yield examples, or batches as they come.

        Yields:
          Predictions by name, or arrays where the model predicts a single tensor.

        Raises:
          ValueError: there is no checkpoint, or it has no averages, no such key, or predictions of
            a batch differ in length.
        """
        path = self._checkpoint(checkpoint_path)
        with self._graph():
            spec, scaffold, runs, input_hooks = self._build(input_fn, _Modes.PREDICT)
            predictions = chosen(spec.predictions, predict_keys)
            all_hooks = [*input_hooks, *(hooks or ()), *spec.prediction_hooks]
            sessions = runs.sessions(spec, scaffold, lambda: self._evaluated(path))
            monitored = tf.train.MonitoredSession(sessions, all_hooks)
        # Not within the graph: whoever takes the predictions may build one in between.
        with monitored as session:
            while not session.should_stop():
                try:
                    batch = session.run(predictions)
                except (tf.errors.OutOfRangeError, StopIteration):
                    break
                yield from examples(batch) if yield_single_examples else [batch]

    def export_saved_model(
        self,
        export_dir_base: str,
        serving_input_receiver_fn: Callable[[], Any],
        checkpoint_path: str | None = None,
    ) -> str:
        """Writes the model as a SavedModel, lowered onto devices whatever the runtime.

        Args:
          export_dir_base: where a directory is made, named by the time in seconds.
          serving_input_receiver_fn: returns a ServingInputReceiver: features, and what a server
            feeds.
          checkpoint_path: the checkpoint; None takes the newest of model_dir.

        Returns:
          The directory.

        Raises:
          ValueError: there is no checkpoint, or it has no averages.
        """
        path = self._checkpoint(checkpoint_path)
        with self._graph():
            received = serving_input_receiver_fn()
            spec, scaffold = self._spec(received.features, None, _Modes.PREDICT, self._params(None))
            inputs = received.receiver_tensors
            inputs = inputs if isinstance(inputs, dict) else {"input": inputs}
            directory = new_directory(export_dir_base)
            with self._evaluated(path) as restored:
                write_saved_model(directory, spec, scaffold, inputs, restored)
        return directory

    # What they have in common.

    def _graph(self) -> Any:
        """The default graph of one call, as a context manager."""
        graph = tf.Graph()
        seed = self._setting("tf_random_seed")
        if seed is not None:
            with graph.as_default():
                tf.set_random_seed(seed)
        return graph.as_default()

    def _build(self, input_fn: Callable[..., Any], mode: str) -> tuple[Any, Any, Any, list[Any]]:
        """Builds a step; returns the spec, its scaffold, where it runs, and its input's hooks."""
        runs: OnDevices | OnCores
        if self.runtime == "placement_mesh":
            runs = OnDevices(self._setting("session_config"))
        else:
            assert self._num_cores is not None  # check_runtime has asked for it
            runs = OnCores(self.runtime, self._num_cores)
        # A program cannot write a ref variable, as all are in a TensorFlow 1 program.
        scope = tf.get_variable_scope()
        with tf.variable_scope(scope, use_resource=runs.is_program or scope.use_resource):
            tf.train.get_or_create_global_step()
        params = self._params(mode, runs.is_program)
        features, labels, input_hooks = features_and_labels(input_fn, mode, params, self.config)
        with runs.building() as context:
            if context is not None:
                give(params, context=context)
            spec, scaffold = self._spec(features, labels, mode, params)
        has_saver = scaffold is not None and scaffold.saver is not None
        if mode == _Modes.TRAIN and not has_saver and not tf.get_collection(tf.GraphKeys.SAVERS):
            keep = self._setting("keep_checkpoint_max") or 0
            saver = ReshardingSaver(sharded=True, max_to_keep=keep, save_relative_paths=True)
            tf.add_to_collection(tf.GraphKeys.SAVERS, saver)
        return spec, scaffold, runs, input_hooks

    def _spec(self, features: Any, labels: Any, mode: str, params: Any) -> tuple[Any, Any]:
        """Calls the model_fn; returns its spec and the spec's scaffold."""
        tf.train.get_or_create_global_step()
        spec = call_with_known(
            self._model_fn,
            features=features,
            labels=labels,
            mode=mode,
            params=params,
            config=self.config,
        )
        if not hasattr(spec, "train_op"):
            raise TypeError(
                "model_fn must return an EstimatorSpec or a TPUEstimatorSpec, got "
                f"{type(spec).__name__}."
            )
        scaffold_fn = getattr(spec, "scaffold_fn", None)
        with outside_programs():
            scaffold = scaffold_fn() if scaffold_fn else getattr(spec, "scaffold", None)
        return spec, scaffold

    def _setting(self, name: str) -> Any:
        return getattr(self.config, name, None)

    def _params(self, mode: str | None, is_program: bool = False) -> Any:
        """The params of a call, with what TPUEstimator adds to them."""
        params = copy.deepcopy(self.params) if self.params is not None else {}
        batch_size = self._batch_sizes.get(mode)
        if batch_size is not None:
            give(params, batch_size=batch_size)
        # Estimator alone, without a TPU's config, adds nothing.
        if is_program or self._is_for_tpu:
            give(params, use_tpu=is_program)
        return params

    def _checkpoint(self, path: str | None) -> str:
        path = path or self.latest_checkpoint()
        if not path:
            raise ValueError(
                f"There is no checkpoint in model_dir {self.model_dir!r}: train first, or give "
                "checkpoint_path."
            )
        return path

    def _evaluated(self, path: str) -> ContextManager[str]:
        """What is restored of a checkpoint into the default graph."""
        if not self._with_averages:
            return contextlib.nullcontext(path)
        return averaged_checkpoint(path, tf.global_variables())

    def _step_saved(self) -> int:
        path = self.latest_checkpoint()
        return int(tf.train.load_variable(path, "global_step")) if path else 0


def _check_positive(**numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and number <= 0:
            raise ValueError(f"{name} must be more than 0, or None; got {number!r}.")


def _with_model_dir(config: Any, model_dir: str) -> Any:
    """A config for another directory."""
    if hasattr(config, "replace"):
        return config.replace(model_dir=model_dir)
    config.model_dir = model_dir
    return config


def _without_hooks(session: Any, fetches: Any) -> Any:
    # The argument's name is prescribed.
    return session.run_step_fn(lambda step_context: step_context.session.run(fetches))
