"""The training loop: makes steps and checkpoints, and stops between two steps."""

from __future__ import annotations

import collections
import math
import time
from concurrent.futures import Future
from typing import Any, Callable, NamedTuple, Sequence

from mtf_gradsync.extension import NoUpdateError, tf
from mtf_gradsync.runtimes._common import ConfigError, TrainingError, first_line
from mtf_gradsync.runtimes._signals import StopSignal
from mtf_gradsync.runtimes.copy_checks import CopiesError
from mtf_gradsync.runtimes.step_means import Measured, StepMeans
from mtf_gradsync.tools.timelines import Timeline, TimelineError
from mtf_gradsync.tools.train.config import RunConfig
from mtf_gradsync.tools.train.data.batches import DataError
from mtf_gradsync.tools.train.metrics import MetricsRecorder, Progress
from mtf_gradsync.tools.train.runner import Runner, skips_islands, stack_skips_not_finite
from mtf_gradsync.tools.train.train_graph import TrainGraph

# Errors that a step may raise: TensorFlow's, jax's, and a hook's.
_OF_A_STEP = (
    tf.errors.OpError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
# The first steps fill caches.
_STEPS_BEFORE_TIMELINE = 5


class LoopResult(NamedTuple):
    """The result of a training loop: what it has made, and why it has ended.

    `step` is the number of the last step that the loop has made, and `steps_made` is how many steps
    the loop has made. `stopped_by` is the number of the signal that ended the loop early, or None
    if no signal did. `seconds` is the time that the steps took.
    """

    step: int
    stopped_by: int | None
    seconds: float
    steps_made: int


class TrainingLoop:
    """A loop that makes training steps and checkpoints from the newest checkpoint on."""

    _step: int
    _progress: Progress

    def __init__(
        self,
        runner: Runner,
        graph: TrainGraph,
        config: RunConfig,
        tokens_per_step: int,
        recorder: MetricsRecorder,
        on_checkpoint: Callable[[str, int, Progress], bool],
        on_first_step: Callable[[], None],
        on_timeline: Callable[[Timeline, int, int], None],
    ):
        """Makes a loop, which `run` runs once.

        Args:
          runner: makes steps and checkpoints; the loop enters it, as a context manager.
          graph: the training graph whose steps the runner makes.
          config: how long to train, and how often to save and log. A checkpoint is written while
            the next steps run. But if the run evaluates its checkpoints, the next step waits until
            the checkpoint is written and evaluated.
          tokens_per_step: the number of targets in a global batch, padding included.
          recorder: the recorder that gets measurements every log_steps steps.
          on_checkpoint: a function that is called after each save, with the checkpoint's path, its
            step and the `Progress`. It returns whether the run ends at this checkpoint.
          on_first_step: a function that is called after the user has seen the first step, for work
            that can wait until then.
          on_timeline: a function that is called once if the config asks for a timeline. It gets the
            timeline and the numbers of the first and the last step in it.
        """
        self._runner, self._config, self._recorder = runner, config, recorder
        self._on_checkpoint, self._on_timeline = on_checkpoint, on_timeline
        self._on_first_step: Callable[[], None] | None = on_first_step
        self._patience, self._parameters = Patience(graph.optimizers), graph.num_parameters
        self._tokens_per_step = tokens_per_step
        self._pending: collections.deque[Callable[[], dict[str, Any]]] = collections.deque()
        self._saving: Future[str] | None = None
        # Updates made by the end of each step, where the optimizers count them.
        self._updates: list[int] = []
        self._seconds = 0.0
        self._is_at_end = False
        self._means = StepMeans(graph.loss_denominator)
        if recorder.saved_means is not None:
            self._means.restore(recorder.saved_means)

    def run(self) -> LoopResult:
        """Makes steps up to train_steps, or until a signal or a checkpoint ends the loop.

        Raises:
          TrainingError: the loss is not finite for too long (see `Patience`); the learning rate is
            negative or not finite; too many steps make no update; or a step or a hook raises an
            exception. In these cases no checkpoint is saved.
          DataError: if there is no batch for a step. A checkpoint of the steps before is saved.
        """
        runner, last = self._runner, self._config.train_steps
        with StopSignal() as stop, runner:
            self._step = self._saved_at = self._begun_at = runner.first_step
            self._progress = Progress(self._step, last, self._tokens_per_step)
            try:
                begin = runner.first_step + _STEPS_BEFORE_TIMELINE
                end = begin + self._config.timeline_steps
                stopped_by = None
                if begin < end and last < end:
                    self._progress.message(
                        f"no timeline: it would be of steps {begin + 1} to {end}, and the run ends "
                        f"at step {last}"
                    )
                elif begin < end:
                    stopped_by = self._train_to(begin, stop)
                    if stopped_by is None:
                        stopped_by = self._record_to(end, stop)
                if stopped_by is None:
                    stopped_by = self._train_to(last, stop)
                self._save()
                self._wait_for_checkpoint()
                self._tell_unapplied_steps()
            except (TrainingError, ConfigError):
                raise
            except _OF_A_STEP as error:
                raise self._as_training_error(error) from error
            finally:
                self._progress.close()
        made = self._step - runner.first_step
        return LoopResult(self._step, stopped_by or stop.received, self._seconds, made)

    def _train_to(self, last: int, stop: StopSignal) -> int | None:
        """Makes steps up to `last`; returns the signal that stopped all processes, or None."""
        while self._step < last and not self._is_at_end and not self._runner.should_stop():
            stopped_by = self._runner.agreed_stop(stop.received)
            if stopped_by is not None:
                return stopped_by
            self._make_step()
        return None

    def _make_step(self) -> None:
        """Begins the next step, and reads results of steps that were begun before.

        A comparison of variables' copies, an island's exchange of values and a checkpoint follow,
        each if it is due after this step.
        """
        began = time.monotonic()
        try:
            self._pending.append(self._runner.dispatch())
        except DataError as error:
            # The steps before are good. (Other processes may be in the middle of this one.)
            if self._runner.is_alone:
                self._save()
                self._wait_for_checkpoint()
            raise DataError(f"{error} {self._newest_checkpoint()}") from error
        before, self._step = self._step, self._step + 1
        # The user wants to see the first step at once.
        ahead = self._runner.steps_ahead if self._on_first_step is None else 0
        while len(self._pending) > ahead:
            self._look_at_oldest()
        self._seconds += time.monotonic() - began
        if self._saving and self._saving.done():
            self._wait_for_checkpoint()
        every = self._config.watch_copies_steps
        if every and self._step % every == 0:
            self._runner.check_copies()
        self._step = self._runner.exchange(self._step, self._config.train_steps)
        every = self._config.save_checkpoints_steps
        if self._step // every > before // every:
            self._save()

    def _record_to(self, last: int, stop: StopSignal) -> int | None:
        """Makes steps up to `last` as `_train_to` does, and records a timeline of them.

        If recording fails, the user gets a message, and the run goes on.
        """
        self._look_at_all()
        timeline = self._runner.timeline()
        stopped_by = None
        first, before = self._step + 1, len(self._updates)
        try:
            with timeline:
                stopped_by = self._train_to(last, stop)
                self._look_at_all()
            timeline.mark_updates(self._updates[before - 1 :] if before else ())
            self._on_timeline(timeline, first, self._step)
        except TimelineError as error:
            self._progress.message(f"no timeline: {error}")
        return stopped_by

    def _look_at_all(self) -> None:
        while self._pending:
            self._look_at_oldest()

    def _newest_checkpoint(self) -> str:
        """Returns a sentence that names the step of the newest checkpoint, for error messages."""
        if self._saving and not self._saving.exception():
            self._saved_at = self._begun_at
        if self._saved_at:
            return f"The newest checkpoint is of step {self._saved_at}."
        return "There is no checkpoint yet."

    def _as_training_error(self, error: BaseException) -> TrainingError:
        """Returns the TrainingError to raise for `error`, an exception that a step has raised.

        The text of the TrainingError also names the newest checkpoint.
        """
        if isinstance(error, NoUpdateError):
            return self._no_update(error)
        if isinstance(error, CopiesError):
            return TrainingError(f"{error} {self._newest_checkpoint()}")
        if isinstance(error, tf.errors.InvalidArgumentError):
            self._check_updates_made()
        return TrainingError(
            f"A step after step {self._step} failed: {type(error).__name__}: {first_line(error)}. "
            f"{self._newest_checkpoint()}"
        )

    def _save(self) -> None:
        """Begins to save a checkpoint of the last step, unless that step has one already.

        The checkpoint is written while the next steps run. If the run evaluates its checkpoints,
        the checkpoint is written before the next step begins.
        """
        began = time.monotonic()
        self._look_at_all()
        self._seconds += time.monotonic() - began
        if self._step == self._begun_at:
            return
        self._wait_for_checkpoint()
        self._check_updates_made()
        if self._config.watch_copies_steps:
            self._runner.check_copies()
        self._recorder.save_means(self._step, self._means)
        self._saving, self._begun_at = self._runner.begin_save(self._step), self._step
        if self._config.eval_dataset_fn is not None:  # it is scored before the next step
            self._wait_for_checkpoint()
        self._progress.pause()

    def _wait_for_checkpoint(self) -> None:
        """Waits until the checkpoint that is being written is complete, and calls `on_checkpoint`.

        If no checkpoint is being written, nothing happens.
        """
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        path = saving.result()
        self._saved_at = self._begun_at
        self._is_at_end = self._on_checkpoint(path, self._saved_at, self._progress)

    def _tell_unapplied_steps(self) -> None:
        """Tells the user after the run's last step how many microbatch steps wait for an update.

        The gradients of these steps are accumulated for a later update, which this run does not
        make. If there are no such steps, nothing is printed.
        """
        left = self._means.steps_in_no_update
        if left and self._step >= self._config.train_steps:
            steps = "last step is" if left == 1 else f"last {left} steps are"
            self._progress.message(
                f"the {steps} in the accumulated gradients and in no update: "
                "GradientAccumulationOptimizer.flush = @is_last_step would make an update from "
                "these gradients, and a longer run goes on from them"
            )

    def _look_at_oldest(self) -> None:
        values = self._pending.popleft()()
        step, loss = int(values["step"]), float(values["loss"])
        learning_rate = values["reported"].get("learning_rate")
        if learning_rate is not None and not 0 <= learning_rate < math.inf:
            raise TrainingError(
                f"The learning rate of step {step} is {float(learning_rate):g}, by "
                "train.run.learning_rate_schedule; it must be a finite number, not negative. "
                f"{self._newest_checkpoint()}"
            )
        update_step = int(values["update_step"]) if "update_step" in values else None
        if not self._patience.add(loss, update_step):
            raise TrainingError(
                f"The loss of step {step} is {loss}{self._patience.steps_before()}. "
                f"{self._newest_checkpoint()} Lower train.run.learning_rate_schedule, or look at "
                "the data."
            )
        if self._config.timeline_steps and update_step is not None:
            self._updates.append(update_step)
        learning_rate = None if learning_rate is None else float(learning_rate)
        measured = Measured(loss, values["tokens"], learning_rate)
        self._means.add(measured, int(values["in_sums"]) if "in_sums" in values else None)
        means = self._means.values()
        self._progress.update(step, means.get("nats_per_token", loss), values["fields"])
        if step % self._config.log_steps == 0 or step == self._config.train_steps:
            # XLA drops the assertion with which a step on a placement mesh ends.
            self._check_updates_made()
            rate = self._progress.tokens_per_second()
            speed = {"tokens_per_second": round(rate, 1)}
            if self._runner.peak_flops:
                # 6 operations for each parameter and token: Chowdhery et al. 2022 (PaLM), appendix
                # B, without attention.
                speed["mfu"] = 6 * self._parameters * rate / self._runner.peak_flops
            self._recorder.write(step, {**speed, **values["reported"], **means})
            self._means.end_line()
        if self._on_first_step is not None:
            call, self._on_first_step = self._on_first_step, None
            began = time.monotonic()
            call()
            self._progress.pause()
            self._seconds -= time.monotonic() - began  # `_seconds` is of steps

    def _check_updates_made(self) -> None:
        """Raises TrainingError if there were too many steps without an update."""
        error = self._runner.no_update_error()
        if error:
            raise self._no_update(error) from error

    def _no_update(self, error: Exception) -> TrainingError:
        return TrainingError(
            f"{error} {self._newest_checkpoint()} Look at the data of these shards, or lower "
            "SyncReplicasOptimizer.replicas_to_aggregate, so that an update needs fewer of them."
        )


_BAD_LOSSES = 100


def most_bad_losses(optimizers: Sequence[Any]) -> int:
    """Returns how many losses in a row may be not finite before a run ends.

    Only losses since the newest update count. `optimizers` are the optimizers of a stack. The
    result is 0 if no optimizer of the stack skips gradients that are not finite: the first loss
    that is not finite then ends the run.
    """
    if not stack_skips_not_finite(optimizers):
        return 0
    # An island's losses may be not finite until its outer step, which skips the island.
    rounds = [opt.inner_steps for opt in optimizers if skips_islands(opt)]
    return max([_BAD_LOSSES, *(2 * steps for steps in rounds)])


class Patience:
    """The rule of whether training goes on after a loss that is not finite.

    By default training ends after the first loss that is not finite. If an optimizer of the stack
    skips gradients that are not finite, training goes on. In this case training ends only after too
    many losses in a row that are not finite, without an update between them. `most_bad_losses` says
    how many.
    """

    def __init__(self, optimizers: Sequence[Any]):
        self._most = most_bad_losses(optimizers)
        self._bad = 0
        self._update_step: int | None = None

    def add(self, loss: float, update_step: int | None) -> bool:
        """Adds the loss of the next step; returns whether training may go on after it.

        `loss` is the loss of the step. `update_step` is the number of updates made by the end of
        the step; None if the optimizers do not count updates.
        """
        if math.isfinite(loss) or update_step != self._update_step:
            self._bad = 0
        self._update_step = update_step
        if not math.isfinite(loss):
            self._bad += 1
        return self._bad <= self._most

    def steps_before(self) -> str:
        """Returns the part of an error's text about the steps before a loss that is not finite.

        An example is ", as in the 100 steps before, without an update". The result is "" if the
        first loss that is not finite ends the training.
        """
        return f", as in the {self._most} steps before, without an update" if self._most else ""
