"""Trains a transformer that gin describes, then reports what it has learned."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import Any, Callable, ContextManager, Iterator, NamedTuple

from mtf_gradsync.extension import counted, some_of, tf
from mtf_gradsync.runtimes import starting
from mtf_gradsync.runtimes._common import (
    CONFIG_FILE,
    ConfigError,
    TrainingError,
    first_line,
    mesh_text,
)
from mtf_gradsync.runtimes.checkpoints import NoAveragesError, check_averages_kept
from mtf_gradsync.runtimes.saving import initialize_from
from mtf_gradsync.tools._private.gin import unread_bindings
from mtf_gradsync.tools.islands import ElasticIslands, Folder, IslandError, read_status
from mtf_gradsync.tools.islands.journal import Status
from mtf_gradsync.tools.timelines import Timeline
from mtf_gradsync.tools.train import run_files
from mtf_gradsync.tools.train.config import RunConfig, check_schedule
from mtf_gradsync.tools.train.data.batches import TrainingBatches
from mtf_gradsync.tools.train.errors import raised_as, writing_to
from mtf_gradsync.tools.train.evaluation import Score
from mtf_gradsync.tools.train.figures import check_drawing
from mtf_gradsync.tools.train.held_out import SPEED, HeldOut, Improvement
from mtf_gradsync.tools.train.loop import LoopResult, TrainingLoop
from mtf_gradsync.tools.train.metrics import MetricsRecorder, Progress, read_metrics
from mtf_gradsync.tools.train.model import TrainingJob
from mtf_gradsync.tools.train.page import Ended, check_pages_installed, write_page
from mtf_gradsync.tools.train.resuming import adapt_start, check_data, say_changes
from mtf_gradsync.tools.train.runner import prepare, training_graph
from mtf_gradsync.tools.train.traffic import list_traffic
from mtf_gradsync.tools.train.train_graph import EXAMPLES


class RunResult(NamedTuple):
    """The result of a run: the number of its last step, its score, and the baseline's score.

    `stopped_by` is the number of the signal that stopped the run early, or None if no signal did.
    `held_out` is the score of the run's model, and `unigram` the score of the unigram baseline.
    Both are None for a run that was stopped, and for a run without held-out data.
    """

    step: int
    stopped_by: int | None
    held_out: Score | None
    unigram: Score | None


class Accepted(NamedTuple):
    """The unusual checkpoints from which a run may go on, as the user has allowed by flags.

    If `differences` is true, the run may go on from a checkpoint of another configuration. If
    `damage` is true and the newest checkpoint is damaged, the run may go on from an older one.
    """

    differences: bool = False
    damage: bool = False


NOTHING = Accepted()


class RunRole(NamedTuple):
    """The role of this process in a run of several processes.

    Attributes:
      target: the address of the server of a cluster's chief, which builds and writes for all tasks;
        "" without a cluster.
      checkpoint_dir: the directory of checkpoints, if another process writes them; None for
        model_dir.
      choose_start: a function whose argument is a function that chooses a checkpoint. It calls this
        function and returns its result. If there are several processes, the process that writes the
        checkpoints chooses first. An error is raised if another process chooses a checkpoint of
        another step.
    """

    target: str = ""
    checkpoint_dir: str | None = None
    choose_start: Callable[[Callable[[], starting.Start]], starting.Start] = lambda choose: choose()


ALONE = RunRole()


def run(
    config: RunConfig,
    model_dir: str,
    say: Callable[[str], None] = print,
    accepted: Accepted = NOTHING,
    role: RunRole = ALONE,
) -> RunResult:
    """Trains a mesh_tensorflow.transformer model and evaluates it.

    A run goes on from the newest checkpoint in model_dir; a run that has made all its steps is only
    evaluated. The number of a step decides which examples it trains on. So a run that was stopped
    and goes on trains each step on the same examples as a run that was not stopped.

    Args:
      config: the settings of the run.
      model_dir: the run's directory, for checkpoints and all other files.
      say: called with each line about the run's progress.
      accepted: which unusual checkpoints the run may go on from.
      role: what this process does in a run of several processes.

    Raises:
      ConfigError: if a setting cannot work, another run writes to the directory, or its newest
        checkpoint is not accepted.
      TrainingError: if training cannot go on (see `TrainingLoop.run`), or nothing can be written.
    """
    with _log_lines(say):
        this = _Run(config, model_dir, say, accepted, role)
        with starting.lock_model_dir(model_dir), this.evaluation, writing_to(this.directory):
            return this.train_and_evaluate()


class _Lines(logging.Handler):
    """A handler of log records that calls `say` with each different message once."""

    def __init__(self, say: Callable[[str], None]):
        super().__init__()
        self._say, self._said = say, set[str]()

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if line not in self._said:
            self._said.add(line)
            self._say(line)


@contextlib.contextmanager
def _log_lines(say: Callable[[str], None]) -> Iterator[None]:
    logger, handler = logging.getLogger("mtf_gradsync.tools.train"), _Lines(say)
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


class _Run:
    """A run: its settings, the directory it writes to, and a method for each phase."""

    def __init__(
        self,
        config: RunConfig,
        model_dir: str,
        say: Callable[[str], None],
        accepted: Accepted,
        role: RunRole,
    ):
        """Checks as many settings as can be checked before anything is read or written.

        `config` has the settings of the run, and `model_dir` is its directory. `say` is called with
        each line for the user. `accepted` says which unusual checkpoints the run may go on from,
        and `role` what this process does in a run of several processes.
        """
        check_schedule(config)
        check_pages_installed()
        self._config, self._say, self._accepted, self._role = config, say, accepted, role
        self._runtime, self._job, self._session = prepare(config, role.target)
        self.directory = Path(model_dir)
        self._checkpoint_dir = role.checkpoint_dir or model_dir
        model = self._job.model
        if role.target:
            # Evaluation has a session of its own: on a server it would share variables with
            # training.
            model = model._replace(mesh=model.mesh.on_one_process())
        self.evaluation = HeldOut(model, config, self.directory, self._session, say)

    def train_and_evaluate(self) -> RunResult:
        """Trains from the newest checkpoint, evaluates, and writes the report."""
        starting.remove_leftovers(str(self.directory))
        start = self._role.choose_start(
            lambda: starting.choose_checkpoint(
                self._checkpoint_dir, self._accepted.damage, self._say
            )
        )
        if self._config.eval_dataset_fn is not None:
            self.evaluation.prepare()
        try:
            result = self._train(start)
        except (TrainingError, OSError) as error:
            # The report fails, too, where nothing can be written any more.
            with contextlib.suppress(OSError):
                self._write_report(None, f"ended by an error: {error}")
            raise
        newest = starting.latest_checkpoint(self._checkpoint_dir)
        if result.stopped_by is None:
            return self._evaluate(result, newest)
        self._write_report(result.step, "stopped early")
        if newest is None:
            said = "before the first step, without a checkpoint; the same command begins anew"
        else:
            said = (
                f"after step {result.step} of {self._config.train_steps}, with a checkpoint; the "
                "same command goes on from there"
            )
        self._say(f"stopped {said}")
        return RunResult(result.step, result.stopped_by, None, None)

    def _train(self, start: starting.Start) -> LoopResult:
        """Makes the steps that follow the checkpoint of `start`, on the run's data, checked.

        If the run has made all its steps already, no graph is built, and no step is made.
        """
        config, directory, say = self._config, self.directory, self._say
        accept, step = self._accepted.differences, start.step
        is_finished = step >= config.train_steps
        if is_finished:
            say(f"{directory} has all {config.train_steps} steps already (train.run.train_steps)")
        rows = [
            row for row in read_metrics(directory / run_files.METRICS_FILE) if row["step"] <= step
        ]
        improvement = Improvement(rows, config.max_steps_without_decrease)
        if not is_finished and improvement.has_ended:
            is_finished = True
            say(f"{improvement}: the run has ended (train.run.max_steps_without_decrease)")
        if not is_finished:
            say(f"steps run on {self._runtime}")
        with _errors_of_islands():
            part = ElasticIslands().part(directory.absolute().name)
        job = self._job._replace(examples_before=step * self._job.model.batch_size, data_part=part)
        with tf.Graph().as_default(), job.batches() as batches:
            if start.path:
                before = run_files.read_facts(directory)
                first = before.first_examples if before else ()
                check_data(directory, first, batches.first_examples(), accept, say)
            if is_finished:
                say_changes(directory, say)
                return LoopResult(step, None, 0.0, 0)
            return self._make_steps(start, job, batches, improvement)

    def _make_steps(
        self,
        start: starting.Start,
        job: TrainingJob,
        batches: TrainingBatches,
        improvement: Improvement,
    ) -> LoopResult:
        """Builds the training graph in the default graph, and makes the run's steps.

        Each checkpoint is scored on held-out data, and the best is kept. If the config asks for a
        timeline, it is written to files. `job` has the settings of the steps that follow `start`,
        and `batches` are the batches of these steps. `improvement` has the lowest held-out loss so
        far.
        """
        config, directory, say = self._config, self.directory, self._say
        began = time.monotonic()
        graph, program, make_runner = training_graph(job, batches, self._runtime, self._session)
        built_in = time.monotonic() - began
        _say_rounded_variables(graph.lowering, say)
        if config.evaluate_with_averages:
            with raised_as(ConfigError, NoAveragesError):
                check_averages_kept()
        with _errors_of_islands():
            island = ElasticIslands().island(graph.lowering, directory.absolute().name)
        if island:
            part = job.data_part
            of = f", and learns from part {part.part} of {part.parts} of the data"
            of = of if part.parts > 1 else ""
            say(f"this run is the island {island.name!r} of {island.folder.url}{of}")
        step = start.step
        if start.path:
            words = f"going on from {start.path},"
            start = adapt_start(start, self._accepted.differences, say, words)
        elif config.init_checkpoint:
            counters = ("global_step", EXAMPLES)
            variables = [v for v in tf.global_variables() if v.op.name not in counters]
            say(initialize_from(config.init_checkpoint, variables))
        mesh = mesh_text(job.model.mesh.shape)
        say(
            f"training {graph.num_parameters:,} parameters on the mesh {mesh}, from step "
            f"{step} to {config.train_steps} (graph built in {built_in:.0f} s)"
        )
        say_changes(directory, say)
        run_files.write_config(directory)
        facts = run_files.RunFacts(
            mesh=mesh,
            layout=str(config.layout_rules),
            runtime=str(self._runtime),
            optimizers=[type(opt).__name__ for opt in graph.optimizers],
            parameters=graph.num_parameters,
            tokens_per_step=job.tokens_per_step,
            versions=run_files.versions(),
            traffic=None,
            first_examples=batches.first_examples() if start.path else [],
        )
        run_files.write_facts(directory, facts)
        run_files.remove_later_recorded(directory, step)
        runner = make_runner(self._checkpoint_dir, start, config, island)

        def on_first_step() -> None:
            """Writes the run's facts, builds the evaluation, and checks that plots work.

            This is done after the first step, so that it does not delay the start.
            """
            traffic = list_traffic(graph, program) if config.reports else None
            first = batches.first_examples()
            run_files.write_facts(directory, facts._replace(traffic=traffic, first_examples=first))
            if config.reports:
                recorder.write_once(step + 1, traffic.scalars if traffic else {})
            self.evaluation.build()
            # Includes the parameters that evaluation alone takes from gin.
            run_files.write_config(directory)
            unread_bindings = _unread_bindings()
            if unread_bindings:
                say(unread_bindings)
            check_drawing()

        def on_checkpoint(saved: str, at: int, progress: Progress) -> bool:
            """Scores the checkpoint `saved` of the step `at`, and keeps it if it is the best.

            `progress` shows the score. Returns whether the run ends at this checkpoint, because the
            held-out loss has not fallen for train.run.max_steps_without_decrease steps.
            """
            score = self.evaluation.score_checkpoint(saved, at, recorder, progress)
            recorder.flush()
            if score is None:
                return False
            is_best = improvement.add(at, score.nats_per_token)
            if is_best and config.keep_best and Path(saved).parent == directory:
                run_files.keep_best(saved, directory)
            if improvement.has_ended:
                progress.message(f"{improvement}: the run ends here")
            return improvement.has_ended

        def on_timeline(timeline: Timeline, first: int, last: int) -> None:
            say(str(timeline.save(directory / run_files.TRACE_FILE)))
            run_files.write_recorded_steps(
                directory, run_files.RecordedSteps(first, last, mesh, timeline.table())
            )

        with MetricsRecorder(directory, run_files.METRICS_FILE, step) as recorder:
            return TrainingLoop(
                runner,
                graph,
                config,
                job.tokens_per_step,
                recorder,
                on_checkpoint,
                on_first_step,
                on_timeline,
            ).run()

    def _evaluate(self, result: LoopResult, newest: str | None) -> RunResult:
        """Evaluates the newest checkpoint, and writes the report.

        `result` is the result of the training loop. `newest` is the path of the newest checkpoint,
        None if the run has no checkpoint.
        """
        evaluation, step = self.evaluation, result.step
        speed = {}
        if result.steps_made:
            rate = result.steps_made * self._job.tokens_per_step / result.seconds
            speed = dict(zip(SPEED, (round(result.seconds, 1), round(rate, 1))))
            self._say(f"{result.steps_made} steps in {result.seconds:.0f} s, {rate:,.0f} tokens/s")
        # The results of the start that made the last step stay: this start may have other settings.
        is_there = (self.directory / run_files.REPORT_FILE).exists() and evaluation.is_complete(
            step
        )
        writes = bool(speed) or not is_there
        try:
            held_out = evaluation.finish(newest, writes, step=step, **speed)
        except (ConfigError, OSError):
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {first_line(error)}"
            self._write_report(step, f"finished, but not evaluated to the end: {what}")
            raise TrainingError(
                f"All {step} steps were made and saved, but the evaluation after them failed: "
                f"{what}. The same command evaluates again."
            ) from error
        if writes:
            is_whole = step >= self._config.train_steps
            how = "finished" if is_whole else "ended early, by the held-out loss or a hook"
            self._write_report(step, how)
        else:
            self._say(
                f"nothing was trained, and the results in {self.directory} stay as they are. A "
                "larger train.run.train_steps trains on, and another --model_dir begins a new run"
            )
        return RunResult(step, None, held_out, evaluation.unigram)

    def _write_report(self, step: int | None, how_it_ended: str) -> None:
        """Writes the page report.html, which says that the run ended at `step`.

        If `step` is None, it is the newest step that was logged. `how_it_ended` is a text such as
        "finished" or "stopped early".
        """
        directory, evaluation = self.directory, self.evaluation
        rows = read_metrics(directory / run_files.METRICS_FILE)
        if step is None:
            step = max((row["step"] for row in rows), default=0)
        operative = directory / CONFIG_FILE
        path = write_page(
            directory,
            rows,
            Ended(step, self._config.train_steps, how_it_ended, evaluation.result),
            run_files.read_facts(directory),
            unigram_nats=evaluation.unigram.nats_per_token if evaluation.unigram else None,
            samples=evaluation.samples,
            config=operative.read_text(encoding="utf-8") if operative.exists() else "",
            recorded=run_files.read_recorded_steps(directory),
            islands=_read_islands(),
        )
        self._say(f"report: {path}")


def _read_islands() -> Status | None:
    """Returns the status of the folder of islands; None if this run is no island.

    The result is also None if the folder cannot be read.
    """
    url = ElasticIslands().folder
    with contextlib.suppress(ImportError, OSError, ValueError):
        return read_status(Folder(url)) if url else None
    return None


def _say_rounded_variables(lowering: Any, say: Callable[[str], None]) -> None:
    """Tells the user which variables are rounded in checkpoints.

    Training steps use the slices of a variable, and checkpoints hold its master. A checkpoint
    rounds the variable if the master's dtype has fewer bits than the dtype of the slices. `say` is
    called with the names. `lowering` is the mtf.Lowering with the variables.
    """
    narrow: dict[str, list[str]] = {}
    for variable in lowering.variables:
        master, used = variable.master_dtype, variable.slice_dtype
        if master.is_floating and master.size < used.size:
            names = getattr(variable, "original_names", [variable.name])
            narrow.setdefault(f"{master.name}, and steps have {used.name}", []).extend(names)
    for dtypes, names in narrow.items():
        say(
            f"checkpoints keep {counted(names, 'variable')}, in {dtypes}: a run that resumes goes "
            "on from rounded values, so its bits differ from those of a run that was not stopped. "
            'For the same bits bind utils.get_variable_dtype.master_dtype = "float32"'
        )


def _errors_of_islands() -> ContextManager[None]:
    """Returns a context manager that turns exceptions from `ElasticIslands` into a ConfigError."""
    errors = (ImportError, OSError, ValueError, IslandError)
    return raised_as(ConfigError, *errors, before="ElasticIslands: ")


def _unread_bindings() -> str:
    """Returns a line for the user on gin bindings that no call has read; "" if all were read.

    The line does not name bindings of ``utils.run`` and macros, as the command has a message of its
    own for those that have no effect.
    """
    names = [name for name in unread_bindings() if not name.startswith("utils.run.")]
    return f"nothing of this run reads the bindings of {some_of(names, 12)}" if names else ""
