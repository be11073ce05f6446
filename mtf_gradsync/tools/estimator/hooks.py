"""The host's work beside the steps of a spec: hooks, savers, metrics, host_call, summaries.

The metrics and the host_call of a TPUEstimatorSpec run on the host. Each of them has a TensorFlow
graph of its own, apart from the graph of the steps.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Callable, Mapping, Sequence, Union

import numpy as np

from mtf_gradsync.extension import mtf, tf
from mtf_gradsync.runtimes._private.mesh_tensorflow import restored_lowering
from mtf_gradsync.runtimes.saving import RunSaver
from mtf_gradsync.runtimes.step_means import Measured, StepMeans
from mtf_gradsync.tools._private.tensorflow import add_saving_listeners, summary_writers

_logger = logging.getLogger(__name__)

Tensors = Union[Sequence[tf.Tensor], Mapping[str, tf.Tensor]]


def add_saver(config: Any, *lowering: mtf.Lowering, **variables: Any) -> tf.train.Saver:
    """Makes a saver, adds it to the default graph's collection of savers, and returns it.

    The saver keeps as many checkpoints as the RunConfig `config` says. By default it saves all
    global variables. `lowering` is the lowering whose slices are copied to the masters before a
    checkpoint is written. `variables` are keyword arguments of `RunSaver` that choose other
    variables, such as var_list.
    """
    saver = RunSaver(
        *lowering,
        **variables,
        sharded=True,
        max_to_keep=getattr(config, "keep_checkpoint_max", None) or 0,
        keep_checkpoint_every_n_hours=getattr(config, "keep_checkpoint_every_n_hours", 0) or 10000,
    )
    tf.add_to_collection(tf.GraphKeys.SAVERS, saver)
    return saver


def saving_period(config: Any) -> dict[str, Any]:
    """Returns how often a RunConfig asks for checkpoints, as arguments of a CheckpointSaverHook.

    The result is {} if `config`, the RunConfig, asks for no checkpoints.
    """
    steps = getattr(config, "save_checkpoints_steps", None)
    seconds = None if steps else getattr(config, "save_checkpoints_secs", None)
    return {"save_steps": steps, "save_secs": seconds} if steps or seconds else {}


def training_hooks(
    config: Any,
    given: Sequence[Any],
    spec: Any,
    scaffold: tf.train.Scaffold | None,
    is_program: bool,
    listeners: Sequence[Any] | None,
) -> list[Any]:
    """Returns the session hooks of a training, other than those that the user gave.

    The returned hooks are the spec's hooks, hooks that check and log the loss, and hooks that write
    checkpoints and summaries.

    Args:
      config: the RunConfig, which says how often to log, and to write checkpoints and summaries.
      given: the user's hooks. If one of them saves checkpoints, no further hook is made to save
        them.
      spec: the model's spec.
      scaffold: the spec's scaffold, whose saver is used; None if there is none.
      is_program: whether the model is a SIMD program.
      listeners: listeners to add to the hook that saves checkpoints; None for none.

    Raises:
      ValueError: when there are listeners, and no hook saves checkpoints.
    """
    made: list[Any] = [tf.train.NanTensorHook(spec.loss)]
    every = getattr(config, "log_step_count_steps", None)
    of_spec = [*spec.training_hooks, *getattr(spec, "training_chief_hooks", ())]
    if every and not any(isinstance(hook, MeanLossHook) for hook in of_spec):
        made.append(MeanLossHook(spec.loss, every))
    made += of_spec
    if getattr(spec, "host_call", None):
        made.append(HostCallHook(spec.host_call))
    savers = [h for h in (*given, *made) if isinstance(h, tf.train.CheckpointSaverHook)]
    period = saving_period(config)
    if not savers and period:
        restores = [hook for hook in (*given, *made) if isinstance(hook, mtf.MtfRestoreHook)]
        copying = [mtf.MtfCheckpointSaverListener(restored_lowering(hook)) for hook in restores]
        saver = (scaffold and scaffold.saver) or tf.get_collection(tf.GraphKeys.SAVERS)[0]
        savers = [
            tf.train.CheckpointSaverHook(config.model_dir, saver=saver, listeners=copying, **period)
        ]
        made += savers
    if every:
        made.append(tf.train.StepCounterHook(every, output_dir=config.model_dir))
    every = getattr(config, "save_summary_steps", None)
    # A program's summaries are part of it; host_call has those that leave it.
    if every and not is_program:
        if all(x.op.name != "loss" for x in tf.get_collection(tf.GraphKeys.SUMMARIES)):
            tf.summary.scalar("loss", spec.loss)
        summaries = tf.summary.merge_all()
        made.append(
            tf.train.SummarySaverHook(every, output_dir=config.model_dir, summary_op=summaries)
        )
    if listeners and not savers:
        raise ValueError(
            f"saving_listeners {list(listeners)} need checkpoints: give config a model_dir and "
            "save_checkpoints_steps or save_checkpoints_secs, or the spec a CheckpointSaverHook."
        )
    if listeners:
        add_saving_listeners(savers[0], listeners)
    return made


class MeanLossHook(tf.train.SessionRunHook):
    """A hook that logs the global step, and the mean loss since the line that it logged before.

    If gradients are accumulated, a loss in the log is the mean over all microbatch steps that the
    current update has had so far. In the lines that TensorFlow's Estimator logs, the loss is that
    of the last microbatch step alone.
    """

    def __init__(
        self,
        loss: tf.Tensor,
        every_n_iter: int,
        in_sums: tf.Tensor | None = None,
        weight: tf.Tensor | None = None,
    ):
        """Makes a hook that logs a line after the first step, then one every `every_n_iter` steps.

        Args:
          loss: a tf scalar, the loss of a step.
          every_n_iter: the number of steps from one line to the next.
          in_sums: a tf scalar: at the end of a step, how many microbatch steps are accumulated and
            not applied yet. None if every step is an update.
          weight: a tf scalar, the weight of the loss in the mean; None for losses of equal weight.
        """
        given = {"loss": loss, "in_sums": in_sums, "weight": weight}
        self._fetches = {name: x for name, x in given.items() if x is not None}
        self._every, self._means = every_n_iter, StepMeans()
        self._steps = 0
        self._began = time.monotonic()

    def begin(self) -> None:
        """Finds the global step in the graph."""
        self._fetches["step"] = tf.train.get_global_step()

    def before_run(self, run_context: Any) -> tf.train.SessionRunArgs:
        """Returns the fetches to add to a step: the loss, the global step and the given tensors.

        The session calls `before_run` before each step. `run_context` is not used.
        """
        del run_context
        return tf.train.SessionRunArgs(self._fetches)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Adds a step's loss to the mean; logs a line after `every_n_iter` steps.

        The session calls `after_run` after each step. `run_values` has the values of the fetches
        that `before_run` returned. `run_context` is not used.
        """
        del run_context
        values = run_values.results
        measured = Measured(float(values["loss"]), weight=float(values.get("weight", 1.0)))
        self._means.add(measured, int(values.get("in_sums", 0)))
        if self._steps % self._every == 0:
            now = time.monotonic()
            loss, step = self._means.values()["loss"], int(values["step"])
            # Where Estimator's own lines go.
            tf.logging.info("loss = %.7g, step = %d (%.3f sec)", loss, step, now - self._began)
            self._means.end_line()
            self._began = now
        self._steps += 1


def write_summary(directory: str, scalars: dict[str, Any], step: int) -> None:
    """Writes scalars of a step to an event file in `directory`, for TensorBoard.

    `scalars` has numbers by name, and `step` is the global step. If `scalars` has arrays, or an
    entry "global_step", these are left out.
    """
    values = [
        tf.Summary.Value(tag=name, simple_value=float(value))
        for name, value in sorted(scalars.items())
        if name != "global_step" and np.ndim(value) == 0
    ]
    # The writer that hooks have too: another one of the same second would have the same file.
    writer = tf.summary.FileWriterCache.get(directory)
    writer.add_summary(tf.Summary(value=values), step)
    writer.flush()


class HostFunction:
    """A function of tf tensors that runs on the host, in a graph and a session of its own.

    The steps of a program run in another session. In each step, that session computes the values of
    the attribute `tensors`, and these values are the arguments of the function.
    """

    def __init__(self, call: Sequence[Any]):
        """Builds the function's graph.

        `call` is a pair of the function and its tensors, as the eval_metrics and the host_call of a
        TPUEstimatorSpec are. The tensors are in a list, or in a dict by the names of the function's
        arguments.
        """
        if not isinstance(call, (list, tuple)) or len(call) != 2 or not callable(call[0]):
            raise ValueError(
                f"eval_metrics and host_call are pairs of a function and its tensors, got {call!r}."
            )
        function, self.tensors = call
        graph = tf.Graph()
        with graph.as_default():
            inputs = tf.nest.map_structure(
                lambda tensor: tf.placeholder(tensor.dtype, tensor.shape), self.tensors
            )
            self._inputs = tf.nest.flatten(inputs)
            is_named = isinstance(inputs, Mapping)
            self.result = function(**inputs) if is_named else function(*inputs)
            writers = summary_writers(graph)
            initialize = [
                tf.global_variables_initializer(),
                tf.local_variables_initializer(),
                tf.tables_initializer(),
                *writers,
            ]
            self._flush = [tf.raw_ops.FlushSummaryWriter(writer=op.inputs[0]) for op in writers]
        self._session = tf.Session(graph=graph)
        self._session.run(initialize)

    def run(self, fetches: Any, values: Any = ()) -> Any:
        """Runs operations of the function's graph, and returns the values of `fetches`.

        `fetches` are operations or tensors of the function's graph. `values` are the values that
        the attribute `tensors` had in a step; they are fed to the function's graph. If `values` is
        empty, nothing is fed.
        """
        return self._session.run(fetches, dict(zip(self._inputs, tf.nest.flatten(values))))

    def close(self) -> None:
        """Writes all summaries that are not written yet, and frees the graph."""
        self._session.run(self._flush)
        self._session.close()


class HostCallHook(tf.train.SessionRunHook):
    """A hook that runs a spec's host_call after every step."""

    def __init__(self, host_call: tuple[Callable[..., Any], Tensors]):
        self._call = host_call
        self._host: HostFunction | None = None

    def begin(self) -> None:
        """Builds the graph of the host_call; the session calls this before it starts.

        If the host_call needs TensorBoard, and this is not installed, a warning is logged, and the
        host_call never runs.
        """
        try:
            self._host = HostFunction(self._call)
        except Exception as error:
            if getattr(error.__cause__, "name", None) != "tensorboard":
                raise
            _logger.warning(
                "host_call is skipped: it writes summaries by tf.summary, which needs TensorBoard "
                "(pip install tensorboard)."
            )

    def before_run(self, run_context: Any) -> tf.train.SessionRunArgs | None:
        """Returns the host_call's tensors, to add to a step's fetches; None if it never runs.

        The session calls `before_run` before each step. `run_context` is not used. The host_call
        never runs if TensorBoard is missing that it needs.
        """
        del run_context
        return self._host and tf.train.SessionRunArgs(self._host.tensors)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Runs the host_call on the values that its tensors had in the step, from `run_values`."""
        del run_context
        if self._host:
            self._host.run(self._host.result, run_values.results)

    def end(self, session: Any) -> None:
        """Writes the summaries that are left, and frees the graph; `session` is not used."""
        del session
        if self._host:
            self._host.close()


class Evaluation:
    """A runner of an evaluation: it makes the steps, and averages the spec's loss and metrics."""

    def __init__(self, spec: Any, is_program: bool):
        """Builds the metrics of `spec` that run on the host; others are built with the step.

        `is_program` says whether the spec is of a SIMD program. Raises ValueError if the spec is of
        a SIMD program and has eval_metric_ops.
        """
        metric_ops = dict(getattr(spec, "eval_metric_ops", None) or {})
        if metric_ops and is_program:
            raise ValueError(
                f"eval_metric_ops {sorted(metric_ops)} would be part of a core's program; give "
                "eval_metrics in a TPUEstimatorSpec instead, which run on the host."
            )
        eval_metrics = getattr(spec, "eval_metrics", None)
        self._host = HostFunction(eval_metrics) if eval_metrics else None
        self._on_host = dict(self._host.result) if self._host else {}
        self._fetches = {
            "loss": spec.loss,
            "tensors": self._host.tensors if self._host else (),
            "updates": [update for _, update in metric_ops.values()],
        }
        self._values = {name: value for name, (value, _) in metric_ops.items()}
        self._step = tf.train.get_global_step()

    def run(self, session: tf.train.MonitoredSession, steps: int | None) -> dict[str, Any]:
        """Runs steps; returns the mean "loss", the metrics, and "global_step", by name.

        The steps run in `session`. If `steps` is None, steps run until the input ends. Raises
        ValueError if the input has no batch.
        """

        def without_hooks(fetches: Any) -> Any:
            # The argument's name is prescribed.
            return session.run_step_fn(lambda step_context: step_context.session.run(fetches))

        global_step = without_hooks(self._step)
        updates = [update for _, update in self._on_host.values()]
        losses: list[Any] = []
        try:
            while not session.should_stop() and (steps is None or len(losses) < steps):
                fetched = session.run(self._fetches)
                losses.append(fetched["loss"])
                if self._host:
                    self._host.run(updates, fetched["tensors"])
        except (tf.errors.OutOfRangeError, StopIteration):
            pass
        if not losses:
            raise ValueError(
                "The input_fn of the evaluation gave no batch: its data are missing, or there are "
                "fewer examples than a batch takes."
            )
        result = without_hooks(self._values) if self._values else {}
        if self._host:
            result.update(self._host.run({name: x for name, (x, _) in self._on_host.items()}))
            self._host.close()
        result.update(loss=np.float32(np.mean(losses)), global_step=int(global_step))
        return result
