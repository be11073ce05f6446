"""Trains, evaluates and predicts with a model_fn, on every TensorFlow and runtime."""

from __future__ import annotations

import copy
import logging
import os
import tempfile
from typing import Any, Callable, Iterator, Mapping, Sequence

from mtf_gradsync.extension import (
    ESTIMATOR_AVAILABLE,
    MeshShapeLike,
    as_mesh_shape,
    check_whole_number,
    tf,
)
from mtf_gradsync.runtimes.checkpoints import check_averages_kept
from mtf_gradsync.runtimes.sessions import (
    OnCores,
    OnDevices,
    RuntimeName,
    choose_runtime,
    runtime_for,
)
from mtf_gradsync.runtimes.settings import session_config
from mtf_gradsync.runtimes.simd.collectives import list_step
from mtf_gradsync.runtimes.starting import Start, choose_checkpoint, start_from_newest
from mtf_gradsync.tools.estimator import specs
from mtf_gradsync.tools.estimator.hooks import (
    Evaluation,
    HostCallHook,
    training_hooks,
    write_summary,
)

_logger = logging.getLogger(__name__)
_Modes = tf.estimator.ModeKeys
# train_and_evaluate and hooks that stop early ask for one of this class. Nothing of it is used.
_TensorFlows: Any = tf.estimator.Estimator if ESTIMATOR_AVAILABLE else object
# Settings of RunConfig that say where to run, which the mesh and the runtime do here.
_NOT_READ = ("train_distribute", "eval_distribute", "device_fn")


class Estimator(_TensorFlows):
    """A trainer of a model_fn that was written for Estimator or TPUEstimator.

    This class takes the place of TensorFlow's classes Estimator and TPUEstimator. Its arguments are
    theirs, except for a few, which ``docs/api/estimator.md`` lists at its end. TensorFlow dropped
    both classes after 2.15, and this class does not need them. The specs that the model_fn returns
    may have hooks, a scaffold or scaffold_fn, host_call, eval_metrics or eval_metric_ops; all of
    them are used as Estimator and TPUEstimator use them. Steps run in TensorFlow's monitored
    sessions on every runtime.

        runs = estimator.Estimator(model_fn, "runs/mine", params=params)
        runs.train(input_fn, max_steps=1000)
        print(runs.evaluate(input_fn, steps=10))

    This class differs from TPUEstimator in two ways. First, every core gets the whole batch, not a
    part of the batch; under TPUEstimator, Mesh-TensorFlow programs ask for the whole batch by
    `InputPipelineConfig.BROADCAST`. Second, metrics and host_call get every value once, and not
    once for each core.
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: str | None = None,
        config: Any = None,
        params: Any = None,
        warm_start_from: Any = None,
        *,
        use_tpu: bool = False,
        runtime: RuntimeName | None = None,
        num_cores: int | None = None,
        train_batch_size: int | None = None,
        eval_batch_size: int | None = None,
        predict_batch_size: int | None = None,
        eval_on_tpu: bool = True,
        export_to_tpu: bool = True,
        export_to_cpu: bool = True,
        evaluate_with_averages: bool = False,
        skip_damaged_checkpoint: bool = False,
    ):
        """Takes a model_fn; builds nothing before `train`, `evaluate` or `predict`.

        Args:
          model_fn: a function of features and of any of labels, mode, params and config, which it
            takes by name. It returns an EstimatorSpec or a TPUEstimatorSpec.
          model_dir: directory of checkpoints and summaries; None takes the model_dir of config, or
            a temporary directory if config has none.
          config: a RunConfig of Estimator or TPUEstimator; None for the defaults of a RunConfig.
            The settings that are used are model_dir, session_config, tf_random_seed,
            save_checkpoints_steps and save_checkpoints_secs, save_summary_steps,
            log_step_count_steps, keep_checkpoint_max, keep_checkpoint_every_n_hours and
            tpu_config.num_shards.
          params: a dict, or anything whose attributes can be set. The model_fn gets a copy. The
            copy has "batch_size" if a batch size is given. It has "use_tpu" if the model_fn was
            written for TPUEstimator, that is, if use_tpu is set or config has a tpu_config. In a
            SIMD program it has "use_tpu" and "context".
          warm_start_from: the source of values while model_dir has no checkpoint. It may be the
            path of a checkpoint, of a checkpoint's directory or of a SavedModel: all trained
            variables then get values from there. Or it may be tf.estimator.WarmStartSettings, which
            choose the variables. Slots and counters begin as in a new run.
          use_tpu: whether the model_fn builds a SIMD program, as for a TPU.
          runtime: "placement_mesh", "cpu_replicas" or "xla". None takes "xla" (the devices that
            jax has) if use_tpu is set, and "placement_mesh" otherwise.
          num_cores: the number of cores of a SIMD program; None takes config.tpu_config.num_shards.
          train_batch_size: params["batch_size"] in training; None does not set it.
          eval_batch_size: params["batch_size"] in evaluations; None does not set it.
          predict_batch_size: params["batch_size"] in predictions; None does not set it.
          eval_on_tpu: ignored; evaluation runs where training does.
          export_to_tpu: ignored; exported models run on a host.
          export_to_cpu: ignored; exported models run on a host.
          evaluate_with_averages: whether `evaluate`, `predict` and `export_saved_model` take the
            moving averages that the optimizer keeps (`mtf_gradsync.AverageOptimizer`) in place of
            the variables; variables without an average keep their values. Training never takes the
            averages.
          skip_damaged_checkpoint: what training does if the newest checkpoint is damaged. If True,
            training moves the files of the checkpoint to "damaged" in model_dir and goes on from an
            older checkpoint. If False, training raises a ValueError.

        Raises:
          TypeError: model_fn is no function, or warm_start_from neither a path nor settings.
          ValueError: there is no runtime of that name; the runtime does not run on this machine, or
            needs num_cores; or config has another model_dir.
        """
        del eval_on_tpu, export_to_tpu, export_to_cpu
        if not callable(model_fn):
            raise TypeError(f"model_fn must be a function, got {model_fn!r}.")
        self._config = copy.copy(config) if config is not None else tf.estimator.RunConfig()
        configured = getattr(self._config, "model_dir", None)
        if model_dir and configured and os.fspath(model_dir) != os.fspath(configured):
            raise ValueError(
                f"model_dir is {model_dir!r} here and {configured!r} in config; give it once."
            )
        if not (model_dir or configured):
            model_dir = tempfile.mkdtemp()
            _logger.warning("There is no model_dir: checkpoints go to %s.", model_dir)
        directory: Any = model_dir or configured
        self._model_dir: str = os.fspath(directory)
        if configured != self._model_dir:
            if hasattr(self._config, "replace"):
                self._config = self._config.replace(model_dir=self._model_dir)
            else:
                self._config.model_dir = self._model_dir
        not_read = [name for name in _NOT_READ if self._setting(name) is not None]
        if not_read:
            _logger.warning(
                "These settings of config have no effect: %s. The mesh and the argument runtime= "
                "say where steps run.",
                ", ".join(not_read),
            )
        self._warm_start = specs.warm_start_settings(warm_start_from)
        self._with_averages = evaluate_with_averages
        self._skip_damaged = skip_damaged_checkpoint
        tpu_config = getattr(self.config, "tpu_config", None)
        self._num_cores = num_cores or getattr(tpu_config, "num_shards", None)
        self.runtime = _runtime_name(runtime, use_tpu, self._num_cores)
        batch_sizes = {
            _Modes.TRAIN: train_batch_size,
            _Modes.EVAL: eval_batch_size,
            _Modes.PREDICT: predict_batch_size,
        }
        is_for_tpu = tpu_config is not None or use_tpu
        self._model = specs.ModelFn(model_fn, params, self.config, is_for_tpu, batch_sizes)

    @property
    def model_dir(self) -> str:
        """The directory of checkpoints and summaries."""
        return self._model_dir

    @property
    def config(self) -> Any:
        """The RunConfig, in which model_dir is set."""
        return self._config

    @property
    def params(self) -> Any:
        """The params as the caller gave them, without additions for the model_fn."""
        return self._model.params

    @property
    def model_fn(self) -> Callable[..., Any]:
        """The model_fn as a function of features, labels, mode and config.

        The returned function fills in the params, builds the model on devices and returns the spec
        of the model_fn.
        """

        def call(features: Any, labels: Any, mode: str, config: Any) -> Any:
            return self._model._replace(config=config).build_on_devices(features, labels, mode)

        return call

    def eval_dir(self, name: str | None = None) -> str:
        """Returns the directory of the summaries that `evaluate` writes if it gets `name`."""
        return os.path.join(self.model_dir, f"eval_{name}" if name else "eval")

    def latest_checkpoint(self) -> str | None:
        """Returns the path of the newest checkpoint in model_dir, or None."""
        return start_from_newest(self.model_dir).path

    def get_variable_names(self) -> list[str]:
        """Returns the variables' names in the newest checkpoint; raises ValueError without one."""
        return [name for name, _ in tf.train.list_variables(self._checkpoint())]

    def get_variable_value(self, name: str) -> Any:
        """Returns the value of a variable in the newest checkpoint, as a numpy array.

        `name` is the variable's name. Raises ValueError if there is no checkpoint.
        """
        return tf.train.load_variable(self._checkpoint(), name)

    def train(
        self,
        input_fn: Callable[..., Any],
        hooks: Sequence[Any] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[Any] | None = None,
    ) -> Estimator:
        """Trains, from the newest checkpoint of model_dir if there is one.

        Args:
          input_fn: takes any of mode, params and config by name; returns a Dataset of features or
            of (features, labels), or returns features or (features, labels) as tensors.
          hooks: session hooks to use besides those of the spec.
          steps: how many steps to make; None makes steps until the input ends.
          max_steps: the global step to stop at. If the newest checkpoint has reached it, nothing is
            done.
          saving_listeners: listeners to add to the hook that saves checkpoints.

        Returns:
          This Estimator.

        Raises:
          ValueError: both of steps and max_steps are given, or one is not positive; nothing saves
            checkpoints for saving_listeners; evaluate_with_averages is set and no optimizer keeps
            averages; the newest checkpoint is damaged, or of another model or inner optimizer;
            there is no checkpoint to warm start from; or the size of a batch is not the one that
            the model takes.
        """
        _check_positive(steps=steps, max_steps=max_steps)
        if steps is not None and max_steps is not None:
            raise ValueError(f"Give steps or max_steps, not both: got {steps} and {max_steps}.")
        saved_step = self._saved_step()
        if max_steps is not None and saved_step >= max_steps:
            _logger.info("The checkpoint has %d steps already.", max_steps)
            return self
        with self._graph():
            start = start_from_newest(self.model_dir)
            place, spec, scaffold, input_hooks = self._build(input_fn, _Modes.TRAIN, start)
            if self._with_averages:
                check_averages_kept()
            program = place.program
            all_hooks = [*input_hooks, *(hooks or ())]
            if steps is not None or max_steps is not None:
                all_hooks.append(tf.train.StopAtStepHook(steps, max_steps))
            all_hooks += training_hooks(
                self.config, all_hooks, spec, scaffold, program is not None, saving_listeners
            )
            if program is not None and self._setting("save_summary_steps"):
                report = list_step(program, [], [], lowering=spec)
                write_summary(self.model_dir, report.scalars() if report else {}, saved_step)
            # Called again after a worker was lost: by then there may be a newer checkpoint.
            sessions = place.sessions(spec, scaffold, lambda: start_from_newest(self.model_dir))
            made_a_step = False
            with specs.naming_uneven_batches(input_fn), tf.train.MonitoredSession(
                sessions, all_hooks
            ) as session:
                while not session.should_stop():
                    session.run([spec.train_op, spec.loss])
                    made_a_step = True
        if not made_a_step:
            _logger.warning(
                "Training made no step. Perhaps the input of %s has no batches: its data are "
                "missing, or there are fewer examples than a batch takes.",
                specs.name_of(input_fn),
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
          input_fn: a function that returns the batches to evaluate, in any form that `train` takes.
          steps: how many steps to make; None makes steps until the input ends.
          hooks: session hooks to use besides those of the spec.
          checkpoint_path: the checkpoint; None takes the newest of model_dir. If model_dir has no
            checkpoint, the values of warm_start_from are evaluated.
          name: summaries go to "eval_<name>" in model_dir, or to "eval" without a name.

        Returns:
          A dictionary with the mean loss as "loss", the metrics by name, and "global_step".

        Raises:
          ValueError: there is no checkpoint; the checkpoint has no averages to evaluate with; the
            input has no batch; steps is not positive; or a SIMD program's spec has eval_metric_ops.
        """
        _check_positive(steps=steps)
        start = self._start(checkpoint_path)
        with self._graph():
            place, spec, scaffold, input_hooks = self._build(input_fn, _Modes.EVAL, start)
            evaluation = Evaluation(spec, place.program is not None)
            all_hooks = [*input_hooks, *(hooks or ()), *spec.evaluation_hooks]
            if getattr(spec, "host_call", None):
                all_hooks.append(HostCallHook(spec.host_call))
            sessions = place.sessions(spec, scaffold, lambda: start)
            with specs.naming_uneven_batches(input_fn), tf.train.MonitoredSession(
                sessions, all_hooks
            ) as session:
                result = evaluation.run(session, steps)
        write_summary(self.eval_dir(name), result, result["global_step"])
        return result

    def predict(
        self,
        input_fn: Callable[..., Any],
        predict_keys: Sequence[str] | str | None = None,
        hooks: Sequence[Any] | None = None,
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """Yields predictions by a checkpoint; builds and checks nothing before the first `next`.

        Args:
          input_fn: a function that returns the batches to predict for, in any form that `train`
            takes. Labels in the batches are not used.
          predict_keys: names of the predictions to return; None returns all.
          hooks: session hooks to use besides those of the spec.
          checkpoint_path: the checkpoint; None takes the newest of model_dir. If model_dir has no
            checkpoint, the values of warm_start_from are taken.
          yield_single_examples: whether to yield the examples one by one. If not, whole batches are
            yielded.

        Yields:
          A dictionary of predictions by name, or an array if the model predicts a single tensor.

        Raises:
          ValueError: there is no checkpoint; the checkpoint has no averages to predict with; the
            model does not predict one of predict_keys; or predictions of a batch differ in length.
        """
        start = self._start(checkpoint_path)
        with self._graph():
            place, spec, scaffold, input_hooks = self._build(input_fn, _Modes.PREDICT, start)
            predictions = specs.select_predictions(spec.predictions, predict_keys)
            all_hooks = [*input_hooks, *(hooks or ()), *spec.prediction_hooks]
            sessions = place.sessions(spec, scaffold, lambda: start)
            monitored = tf.train.MonitoredSession(sessions, all_hooks)
        # Not within the graph: whoever takes the predictions may build one in between.
        with monitored as session:
            while not session.should_stop():
                try:
                    with specs.naming_uneven_batches(input_fn):
                        batch = session.run(predictions)
                except (tf.errors.OutOfRangeError, StopIteration):
                    break
                yield from specs.examples(batch) if yield_single_examples else [batch]

    def export_saved_model(
        self,
        export_dir_base: str,
        serving_input_receiver_fn: Callable[[], Any],
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
        checkpoint_path: str | None = None,
    ) -> str:
        """Writes the model as a SavedModel; on every runtime the model is lowered onto devices.

        Args:
          export_dir_base: parent of the new directory, whose name is the time in seconds.
          serving_input_receiver_fn: a function that returns a ServingInputReceiver: the features,
            and the tensors that a server feeds.
          assets_extra: files to copy into the directory "assets.extra", as a dict from the name
            that a copy gets to the path of the file.
          as_text: whether to write the graph as text.
          checkpoint_path: the checkpoint; None takes the newest of model_dir. If model_dir has no
            checkpoint, the checkpoint of warm_start_from is taken.

        Returns:
          The path of the new directory.

        Raises:
          ValueError: there is no checkpoint, or evaluate_with_averages is set and the checkpoint
            has no averages.
        """
        path = checkpoint_path or self.latest_checkpoint()
        if not path and self._warm_start:
            path = specs.checkpoint_to_warm_start(self._warm_start[0])
        start = Start(self._checkpoint(path), with_averages=self._with_averages)
        with self._graph():
            received = serving_input_receiver_fn()
            spec, scaffold = self._model.build_to_export(received.features)
            inputs = received.receiver_tensors
            inputs = inputs if isinstance(inputs, dict) else {"input": inputs}
            with start.restorable() as restored:
                assert restored is not None  # as a checkpoint is there
                return specs.write_saved_model(
                    export_dir_base, spec, scaffold, inputs, restored, assets_extra, as_text
                )

    def export_savedmodel(self, *args: Any, strip_default_attrs: bool = True, **kwargs: Any) -> str:
        """Calls `export_saved_model`, of which this is the old name, and returns its result.

        `strip_default_attrs` is ignored: default attributes are always left out.
        """
        del strip_default_attrs
        return self.export_saved_model(*args, **kwargs)

    def experimental_export_all_saved_models(self, *args: Any, **kwargs: Any) -> Any:
        """Raises NotImplementedError: only a model that predicts can be written as a SavedModel."""
        raise NotImplementedError(
            "Only a model that predicts is written as a SavedModel, by export_saved_model. A model "
            "that trains or evaluates is not."
        )

    # Shared by these methods.

    def _graph(self) -> Any:
        """Returns a context manager that makes a new graph the default graph.

        The new graph has the random seed that config has.
        """
        graph = tf.Graph()
        seed = self._setting("tf_random_seed")
        if seed is not None:
            with graph.as_default():
                tf.set_random_seed(seed)
        return graph.as_default()

    def _build(
        self, input_fn: Callable[..., Any], mode: str, start: Start
    ) -> tuple[OnDevices | OnCores, Any, Any, list[Any]]:
        """Builds a step of training, evaluation or prediction in the default graph.

        Args:
          input_fn: a function that returns the batches, in any form that `train` takes.
          mode: "train", "eval" or "infer".
          start: the checkpoint that will be restored when a session begins. If `start` names no
            checkpoint, and warm_start_from was given, variables begin with values from there.

        Returns:
          Four values: the place where the step runs (devices, or the cores of a SIMD program); the
          spec that the model_fn returned; the spec's scaffold, or None; and the session hooks that
          the input needs.
        """
        settings = None if start.path else self._warm_start
        if settings:
            specs.checkpoint_to_warm_start(settings[0])
        mesh_shape = f"all:{self._num_cores}"
        place = runtime_for(self.runtime, mesh_shape, config=self._setting("session_config"))
        built = self._model.build(input_fn, mode, place)
        if settings:
            specs.warm_start(settings)
        return (place, *built)

    def _setting(self, name: str) -> Any:
        return getattr(self.config, name, None)

    def _start(self, path: str | None) -> Start:
        """Chooses the checkpoint from which an evaluation or prediction gets its values.

        The chosen checkpoint is the one at `path`; if `path` is None, it is the newest of
        model_dir. If `path` is None and model_dir has no checkpoint, the returned `Start` names no
        checkpoint, and the values come from warm_start_from. If warm_start_from is not given,
        either, ValueError is raised.
        """
        path = path or self.latest_checkpoint()
        if not path and self._warm_start:
            return Start()
        return Start(self._checkpoint(path), with_averages=self._with_averages)

    def _checkpoint(self, path: str | None = None) -> str:
        """Returns `path`, or the newest checkpoint's path; raises ValueError if there is none."""
        path = path or self.latest_checkpoint()
        if not path:
            raise ValueError(
                f"There is no checkpoint in model_dir {self.model_dir!r}: train first, or give "
                "checkpoint_path."
            )
        return path

    def _saved_step(self) -> int:
        """Checks the newest checkpoint for damage; returns its global step, or 0 if there is none.

        If files of the checkpoint are damaged, the method raises ValueError, or, with
        skip_damaged_checkpoint, moves the files away and takes an older checkpoint. A checkpoint
        outside model_dir, or in a remote directory, is not checked.
        """
        start = start_from_newest(self.model_dir)
        if "://" in self.model_dir or (start.path and not start.kept):
            return int(tf.train.load_variable(start.path, "global_step")) if start.path else 0
        setting = "Estimator(skip_damaged_checkpoint=True)"
        return choose_checkpoint(self.model_dir, self._skip_damaged, _logger.warning, setting).step


def _check_positive(**numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None:
            check_whole_number(name, number, 1, "Or give None.", most=None)


def _runtime_name(runtime: RuntimeName | None, use_tpu: bool, num_cores: int | None) -> RuntimeName:
    """Returns the name of the runtime that an Estimator's arguments ask for.

    If `runtime` is None, the result is "xla" if `use_tpu` is set, and "placement_mesh" otherwise.
    Raises ValueError if there is no runtime of the name `runtime`, if the runtime cannot run on
    this machine, or if the runtime needs `num_cores` and `num_cores` is None.
    """
    chosen = runtime or ("xla" if use_tpu else "placement_mesh")
    if chosen in ("cpu_replicas", "xla") and not num_cores:
        raise ValueError(
            f"On {chosen!r} the model_fn is one program for all cores, and the number of these "
            "cores is not known: give num_cores, or a TPUConfig with num_shards in config."
        )
    return choose_runtime(chosen).name


def run_config(
    model_dir: str | None = None,
    mesh_shape: MeshShapeLike | None = None,
    tpu_config: Any = None,
    **settings: Any,
) -> Any:
    """Returns a RunConfig whose sessions have a virtual CPU device for each processor of a mesh.

    Estimator's default sessions use soft placement: an operation whose device does not exist runs
    on another device, without a warning. So without this RunConfig, all operations of a mesh of
    eight virtual CPU devices would run on one CPU device.

    Args:
      model_dir: directory of checkpoints and summaries.
      mesh_shape: Mesh-TF's mesh shape, of a mesh of virtual CPU devices; None for other devices.
      tpu_config: a TPUConfig, for TPUEstimator; None makes Estimator's RunConfig.
      **settings: more settings of RunConfig, such as save_checkpoints_steps. If session_config is
        one of them, the RunConfig takes it unchanged, and `mesh_shape` has no effect.

    Returns:
      Estimator's RunConfig, or TPUEstimator's if tpu_config is given.
    """
    size = None if mesh_shape is None else as_mesh_shape(mesh_shape).size
    settings.setdefault("session_config", session_config(num_cpu_devices=size))
    if tpu_config is None:
        return tf.estimator.RunConfig(model_dir=model_dir, **settings)
    return tf.estimator.tpu.RunConfig(model_dir=model_dir, tpu_config=tpu_config, **settings)
