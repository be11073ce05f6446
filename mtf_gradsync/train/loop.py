"""The training loop: a session, steps, checkpoints, and a stop between two steps."""

from __future__ import annotations

import math
import signal
import threading
import time
from typing import Any, Callable, NamedTuple, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.optimizers import SyncReplicasOptimizer
from mtf_gradsync.train.checkpoint import Checkpointer, check_fits, latest_checkpoint
from mtf_gradsync.train.errors import TrainingError
from mtf_gradsync.train.progress import MetricsFile, Progress
from mtf_gradsync.train.train_graph import TrainGraph

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Terminals and process managers deliver one Ctrl-C more than once.
_SAME_KEYSTROKE_SECONDS = 1.0


class StopSignal:
    """Turns SIGINT and SIGTERM into a wish to stop, as long as it is entered.

    A second signal, more than a moment later, is a KeyboardInterrupt: who presses Ctrl-C
    twice does not want to wait for a checkpoint.

    Attributes:
      received: the number of the signal that came, or None.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._received_at = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        # Python only lets the main thread set handlers; elsewhere nobody can press Ctrl-C.
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *unused_exception: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _handle(self, number: int, unused_frame: Any) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._received_at = number, now
        elif now - self._received_at > _SAME_KEYSTROKE_SECONDS:
            raise KeyboardInterrupt


class LoopSettings(NamedTuple):
    """How long to train, and what to leave behind on the way.

    Attributes:
      model_dir: directory of the checkpoints.
      train_steps: stop after this step.
      save_checkpoints_steps: a checkpoint every this many steps, and at the end.
      keep_checkpoint_max: older checkpoints are deleted; None keeps all.
      log_steps: a line in the metrics file every this many steps.
      tokens_per_step: tokens in a global batch.
    """

    model_dir: str
    train_steps: int
    save_checkpoints_steps: int
    keep_checkpoint_max: int | None
    log_steps: int
    tokens_per_step: int


class LoopResult(NamedTuple):
    """How the loop ended.

    Attributes:
      step: steps made, in all.
      stopped_by: the number of the signal that ended it early, or None.
      seconds: time spent in training steps.
      steps_made: steps made by this call.
    """

    step: int
    stopped_by: int | None
    seconds: float
    steps_made: int


def train_loop(
    graph: TrainGraph,
    settings: LoopSettings,
    config: tf.ConfigProto,
    metrics: MetricsFile,
    on_checkpoint: Callable[[str, int, Progress], None],
    hooks: Sequence[Any] = (),
) -> LoopResult:
    """Trains the default graph from its newest checkpoint to train_steps, or to a signal.

    Args:
      graph: from `build_train_graph`, in the default graph, which is finalized here.
      settings: how long, and what to leave behind.
      config: of the session.
      metrics: takes a line every log_steps.
      on_checkpoint: called with path, step and the progress after each save.
      hooks: more tf.train.SessionRunHooks.

    Returns:
      How it ended.

    Raises:
      ConfigError: if the newest checkpoint in model_dir does not fit the graph.
      TrainingError: if SyncReplicasOptimizer has not made an update for too long, or the loss is
        no longer a finite number; where the optimizer leaves out gradients that are not finite,
        only if no update comes any more. Nothing is saved then.
    """
    # The hook adds the copy from masters to slices and runs it after every restore.
    masters_to_slices = mtf.MtfRestoreHook(graph.lowering)
    checkpoints = Checkpointer(settings.model_dir, graph.lowering, settings.keep_checkpoint_max)
    path = latest_checkpoint(settings.model_dir)
    if path:
        check_fits(path, tf.global_variables(), settings.model_dir)
    creator = tf.train.ChiefSessionCreator(
        scaffold=tf.train.Scaffold(saver=checkpoints.saver),
        config=config,
        checkpoint_dir=settings.model_dir,
    )
    global_step = tf.train.get_global_step()
    fetches = {"step": graph.step, "loss": graph.loss, "fields": graph.fields}
    if graph.update_step is not None:
        fetches["update_step"] = graph.update_step
    patience = Patience(graph.optimizers)
    waits = _Waits(graph.optimizers)
    seconds = 0.0
    with StopSignal() as stop, tf.train.MonitoredSession(
        creator, hooks=[masters_to_slices, *hooks]
    ) as session:  # fmt: skip

        def save(step: int) -> None:
            saved = session.run_step_fn(
                # The argument's name is prescribed.
                lambda step_context: checkpoints.save(step_context.session, step)
            )
            on_checkpoint(saved, step, progress)
            progress.pause()

        first = step = saved_at = int(session.run(global_step))
        progress = Progress(step, settings.train_steps, settings.tokens_per_step)
        try:
            while step < settings.train_steps and stop.received is None:
                if session.should_stop():
                    break
                began = time.monotonic()
                try:
                    values = session.run(fetches)
                except tf.errors.InvalidArgumentError:
                    waits.check(session, saved_at)
                    raise
                seconds += time.monotonic() - began
                step, loss = int(values["step"]), float(values["loss"])
                if not patience.goes_on(loss, values.get("update_step")):
                    raise TrainingError(
                        f"the loss of step {step} is {loss}{patience.since()}; the newest "
                        f"checkpoint is of step {saved_at}. Lower "
                        "train.run.learning_rate_schedule, or look at the data."
                    )
                progress.update(step, loss, values["fields"])
                if step % settings.log_steps == 0 or step == settings.train_steps:
                    metrics.write(
                        step, loss=loss, tokens_per_second=round(progress.tokens_per_second(), 1)
                    )
                if step % settings.save_checkpoints_steps == 0 or step == settings.train_steps:
                    save(step)
                    saved_at = step
            if step != saved_at:
                save(step)
        finally:
            progress.close()
    return LoopResult(step, stop.received, seconds, step - first)


class Patience:
    """How long a loss may be no finite number.

    Not at all, as a rule. Where an optimizer of the stack leaves out gradients that are not
    finite, updates go on without them, and training is over only when none comes any more.
    """

    _STEPS = 100

    def __init__(self, optimizers: Sequence[Any]):
        """Begins a run.

        Args:
          optimizers: the optimizer and those inside it.
        """
        leaves_out = any(getattr(opt, "leaves_out_not_finite", False) for opt in optimizers)
        self._most = self._STEPS if leaves_out else 0
        self._bad = 0
        self._update_step: int | None = None

    def goes_on(self, loss: float, update_step: int | None) -> bool:
        """Whether to go on after a step.

        Args:
          loss: of the step.
          update_step: updates made with it; None where the optimizers do not count.
        """
        if math.isfinite(loss) or update_step != self._update_step:
            self._bad = 0
        self._update_step = update_step
        if not math.isfinite(loss):
            self._bad += 1
        return self._bad <= self._most

    def since(self) -> str:
        """What an error says of the steps before."""
        return f", as in the {self._most} steps before, without an update" if self._most else ""


class _Waits:
    """Knows when a step failed because an optimizer waits too long for its replicas."""

    def __init__(self, optimizers: Sequence[Any]):
        waiting = [opt for opt in optimizers if isinstance(opt, SyncReplicasOptimizer)]
        steps = [opt.steps_without_update for opt in waiting]
        self._watches = [one.watch() for one in steps if one]

    def check(self, session: Any, saved_at: int) -> None:
        """Raises TrainingError if that is why the step failed."""

        # The argument's name is prescribed.
        def find(step_context: Any) -> Any:
            errors = (watch.error(step_context.session) for watch in self._watches)
            return next((error for error in errors if error), None)

        error = session.run_step_fn(find)
        if error:
            raise TrainingError(
                f"{error} The newest checkpoint is of step {saved_at}. Look at the data of these "
                "replicas, or lower SyncReplicasOptimizer.replicas_to_aggregate."
            ) from error
