"""Trains a transformer that gin describes, then reports what it has learned."""

from __future__ import annotations

import collections
import contextlib
import logging
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple, Sequence

from mtf_gradsync.extension import (
    CONFIG_FILE,
    SKIP_FLAG,
    ConfigError,
    NoAveragesError,
    TrainingError,
    check_averages_kept,
    counted,
    first_line,
    mesh_text,
    session_config,
    tf,
)
from mtf_gradsync.runtimes import simd
from mtf_gradsync.runtimes._signals import Interruption
from mtf_gradsync.runtimes.copies import watch_copies
from mtf_gradsync.runtimes.saving import check_configuration, differences_text, initialize_from
from mtf_gradsync.runtimes.sessions import OnCores, OnDevices
from mtf_gradsync.runtimes.starting import (
    Start,
    choose_checkpoint,
    latest_checkpoint,
    only_run_in,
    remove_leftovers,
)
from mtf_gradsync.tools._private.gin import unread
from mtf_gradsync.tools.islands import (
    ElasticIslands,
    Folder,
    Island,
    IslandError,
    read_status,
)
from mtf_gradsync.tools.islands.journal import Status
from mtf_gradsync.tools.timelines import Timeline, TimelineError
from mtf_gradsync.tools.train.config import RunConfig, check_callable, check_positive
from mtf_gradsync.tools.train.data.batches import TrainingBatches
from mtf_gradsync.tools.train.evaluation import Score
from mtf_gradsync.tools.train.figures import check_drawing, writing_to
from mtf_gradsync.tools.train.held_out import METRICS_FILE, SPEED, HeldOut, Improvement, keep_best
from mtf_gradsync.tools.train.loop import LoopResult, LoopSettings, train_loop
from mtf_gradsync.tools.train.made_with import (
    changed_model,
    check_data,
    say_changes,
    write_config,
)
from mtf_gradsync.tools.train.metrics import MetricsRecorder, Progress, read_metrics
from mtf_gradsync.tools.train.model import TrainingJob, resolve_job
from mtf_gradsync.tools.train.report import (
    REPORT_FILE,
    Ended,
    Facts,
    RecordedSteps,
    check_pages_installed,
    forget_recorded,
    read_facts,
    read_recorded,
    versions,
    write_facts,
    write_page,
    write_recorded,
)
from mtf_gradsync.tools.train.runner import (
    PlacementMeshRunner,
    Runner,
    Runtime,
    SimdProgramRunner,
    choose_runtime,
)
from mtf_gradsync.tools.train.train_graph import EXAMPLES, TrainGraph, build_on, list_traffic

TRACE_FILE = "timeline.trace.json.gz"


class RunResult(NamedTuple):
    """How far a run got, its score on held-out data, and the baseline's on the same data.

    `stopped_by` is the signal that stopped it early; there are no scores then.
    """

    step: int
    stopped_by: int | None
    held_out: Score | None
    unigram: Score | None


class Accepted(NamedTuple):
    """Which checkpoints a user lets a run go on from, besides its own undamaged newest.

    `differences` allows one of another configuration; `damage` an older one where the newest is
    damaged.
    """

    differences: bool = False
    damage: bool = False


NOTHING = Accepted()


class RunPart(NamedTuple):
    """This process's part of a run of several processes.

    Attributes:
      target: the server of a cluster's chief, which builds and writes for all; "" for none.
      checkpoint_dir: where checkpoints are, when another process writes them; None for model_dir.
      chosen: calls a function that chooses a checkpoint, on the process that writes, then on the
        others; all have to get the same step.
    """

    target: str = ""
    checkpoint_dir: str | None = None
    chosen: Callable[[Callable[[], Start]], Start] = lambda choose: choose()


ALONE = RunPart()


def run(
    config: RunConfig,
    model_dir: str,
    say: Callable[[str], None] = print,
    accepted: Accepted = NOTHING,
    part: RunPart = ALONE,
) -> RunResult:
    """Trains a mesh_tensorflow.transformer model and evaluates it.

    A run goes on from the newest checkpoint in model_dir; a finished one is only evaluated. Which
    data a step sees follows from the step, so a run that was stopped takes the same steps as one
    that was not. `say` is called with each line about the run's progress.

    Raises:
      ConfigError: if a setting cannot work, another run writes to the directory, or its newest
        checkpoint is not accepted.
      TrainingError: if training cannot go on, as `train_loop` says, or nothing can be written.
    """
    with _log_lines(say):
        checked = _check(config, model_dir, say, part)
        with only_run_in(model_dir), checked.evaluation, writing_to(checked.directory):
            return _run(checked, accepted, part)


class _Lines(logging.Handler):
    """Gives `say` what modules of this room log; each line once."""

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


def _run(checked: _CheckedRun, accepted: Accepted, part: RunPart) -> RunResult:
    config, evaluation, say = checked.config, checked.evaluation, checked.say
    remove_leftovers(str(checked.directory))
    start = part.chosen(lambda: choose_checkpoint(checked.checkpoint_dir, accepted.damage, say))
    if config.eval_dataset_fn is not None:
        evaluation.prepare(
            config.train_dataset_fn, config.eval_dataset_fn, config.perplexity_eval_steps
        )
    try:
        result = _train(checked, start, accepted.differences)
    except (TrainingError, OSError) as error:
        # The report fails, too, where nothing can be written any more.
        with contextlib.suppress(OSError):
            _write_report(checked, None, f"ended by an error: {error}")
        raise
    newest = latest_checkpoint(checked.checkpoint_dir)
    if result.stopped_by is not None:
        _write_report(checked, result.step, "stopped early")
        if newest is None:
            say("stopped before the first step, without a checkpoint; the same command begins anew")
        else:
            say(
                f"stopped after step {result.step} of {config.train_steps}, with a checkpoint; "
                "the same command goes on from there"
            )
        return RunResult(result.step, result.stopped_by, None, None)
    speed = {}
    if result.steps_made:
        rate = result.steps_made * checked.job.tokens_per_step / result.seconds
        speed = dict(zip(SPEED, (round(result.seconds, 1), round(rate, 1))))
        say(f"{result.steps_made} steps in {result.seconds:.0f} s, {rate:,.0f} tokens/s")
    # What a run has found when it made its last step stays: this start may have other settings.
    is_there = (checked.directory / REPORT_FILE).exists() and evaluation.is_complete(result.step)
    writes = bool(speed) or not is_there
    try:
        held_out = evaluation.finish(newest, writes, step=result.step, **speed)
    except (ConfigError, OSError):
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {first_line(error)}"
        _write_report(checked, result.step, f"finished, but not evaluated to the end: {what}")
        raise TrainingError(
            f"All {result.step} steps were made and saved; what comes after them failed: {what}. "
            "The same command evaluates again."
        ) from error
    if writes:
        is_whole = result.step >= config.train_steps
        how = "finished" if is_whole else "ended early, by the held-out loss or a hook"
        _write_report(checked, result.step, how)
    else:
        say(
            f"nothing was trained, and the results in {checked.directory} stay as they are; more "
            "train.run.train_steps train on, and another --model_dir begins anew"
        )
    return RunResult(result.step, None, held_out, evaluation.unigram)


def _check(
    config: RunConfig, model_dir: str, say: Callable[[str], None], part: RunPart
) -> _CheckedRun:
    """Checks what can be checked before anything is read or written."""
    check_schedule(config)
    check_pages_installed()
    runtime = choose_runtime(config, part.target)
    job = resolve_job(config)._replace(reports=config.reports, noise_scale=config.noise_scale)
    if not part.target:
        job.model.mesh.check_devices()
    session = session_config(num_cpu_devices=job.model.mesh.num_cpu_devices)
    # Evaluation has a session of its own: on a server it would share variables with training.
    here = job.model._replace(mesh=job.model.mesh.on_one_process()) if part.target else job.model
    directory = Path(model_dir)
    evaluation = HeldOut(here, directory, session, say, config.evaluate_with_averages)
    checkpoints = part.checkpoint_dir or model_dir
    return _CheckedRun(config, job, runtime, directory, checkpoints, session, evaluation, say)


class _CheckedRun(NamedTuple):
    """The checked settings of a run; this process writes to `directory`."""

    config: RunConfig
    job: TrainingJob
    runtime: Runtime
    directory: Path
    checkpoint_dir: str
    session: tf.ConfigProto
    evaluation: HeldOut
    say: Callable[[str], None]


def _write_report(checked: _CheckedRun, step: int | None, how: str) -> None:
    """Writes the page; step None takes the newest that was logged."""
    directory, evaluation = checked.directory, checked.evaluation
    rows = read_metrics(directory / METRICS_FILE)
    if step is None:
        step = max((row["step"] for row in rows), default=0)
    operative = directory / CONFIG_FILE
    path = write_page(
        directory,
        rows,
        Ended(step, checked.config.train_steps, how, evaluation.result),
        read_facts(directory),
        unigram_nats=evaluation.unigram.nats_per_token if evaluation.unigram else None,
        samples=evaluation.samples,
        config=operative.read_text(encoding="utf-8") if operative.exists() else "",
        recorded=read_recorded(directory),
        islands=_read_islands(),
    )
    checked.say(f"report: {path}")


def _read_islands() -> Status | None:
    """Returns the journal of the folder in which a run is an island; None where there is none."""
    url = ElasticIslands().folder
    with contextlib.suppress(ImportError, OSError, ValueError):
        return read_status(Folder(url)) if url else None
    return None


def check_schedule(config: RunConfig) -> None:
    """Raises a ConfigError if a setting that `resolve_job` does not check cannot work."""
    check_positive("save_checkpoints_steps", config.save_checkpoints_steps)
    check_positive("keep_checkpoint_max", config.keep_checkpoint_max, optional=True)
    check_positive("perplexity_eval_steps", config.perplexity_eval_steps)
    check_positive("log_steps", config.log_steps)
    check_positive("max_steps_without_decrease", config.max_steps_without_decrease, optional=True)
    check_positive("watch_copies_steps", config.watch_copies_steps, optional=True)
    for name in ("keep_best", "max_steps_without_decrease"):
        if getattr(config, name) and config.eval_dataset_fn is None:
            raise ConfigError(
                f"train.run.{name} = {getattr(config, name)!r} goes by the held-out loss: bind "
                "train.run.eval_dataset_fn"
            )
    steps = config.timeline_steps
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ConfigError(f"train.run.timeline_steps must be a whole number from 0; got {steps!r}")
    check_callable("eval_dataset_fn", config.eval_dataset_fn, "@python_topics", optional=True)
    for hook in config.hooks if isinstance(config.hooks, (list, tuple)) else [config.hooks]:
        check_callable("hooks", hook, "[@MyHook]")


def _check_averages_kept() -> None:
    try:
        check_averages_kept()
    except NoAveragesError as error:
        raise ConfigError(str(error)) from error


def _adapted(start: Start, accept: bool, say: Callable[[str], None], words: str) -> Start:
    """Returns a start from a checkpoint whose differences from the default graph are accepted."""
    assert start.path is not None  # the callers have asked
    variables, counts = tf.global_variables(), True
    if not tf.train.load_checkpoint(start.path).has_tensor(EXAMPLES):
        counts, variables = False, [v for v in variables if v.op.name != EXAMPLES]
        say(f"{start.path} does not say what its steps were made of: batches of today's size")
    changed = changed_model(Path(start.path).parent)
    found = check_configuration(start.path, variables, accept, changed)
    if any(found):
        say(f"{words} of another configuration:\n{differences_text(found)}")
    new = [name for name in found.new if name not in found.adapted]
    return start._replace(new=tuple(new if counts else [*new, EXAMPLES]))


def _say_what_checkpoints_round(lowering: Any, say: Callable[[str], None]) -> None:
    """Says which variables a checkpoint keeps with fewer bits than the steps have."""
    narrow: dict[str, list[str]] = {}
    for variable in lowering.variables:
        master, used = variable.master_dtype, variable.slice_dtype
        if master.is_floating and master.size < used.size:
            names = getattr(variable, "original_names", [variable.name])
            narrow.setdefault(f"{master.name}, and steps have {used.name}", []).extend(names)
    for dtypes, names in narrow.items():
        say(
            f"checkpoints keep {counted(names, 'variable')}, in {dtypes}: a run that resumes goes "
            "on from rounded values, and not in the bits of one that was not stopped. For the "
            'same bits bind utils.get_variable_dtype.master_dtype = "float32"'
        )


def _train(checked: _CheckedRun, start: Start, accept_differences: bool) -> LoopResult:
    """Makes the steps that follow those of a checkpoint, if there is one."""
    config, job, directory, say = checked.config, checked.job, checked.directory, checked.say
    step = start.step
    is_finished = step >= config.train_steps
    if is_finished:
        say(f"{directory} has all {config.train_steps} steps already (train.run.train_steps)")
    rows = [row for row in read_metrics(directory / METRICS_FILE) if row["step"] <= step]
    improvement = Improvement(rows, config.max_steps_without_decrease)
    if not is_finished and improvement.has_ended:
        is_finished = True
        say(f"{improvement}: the run has ended (train.run.max_steps_without_decrease)")
    if not is_finished:
        say(f"steps run on {checked.runtime}")
    part = _of_islands(lambda: ElasticIslands().part(directory.absolute().name))
    job = job._replace(examples_before=step * job.model.batch_size, part=part)
    began = time.monotonic()
    with tf.Graph().as_default(), job.batches() as batches:
        if start.path:
            before = read_facts(directory)
            first = before.first_examples if before else ()
            check_data(directory, first, batches.first_examples(), accept_differences, say)
        if is_finished:
            say_changes(directory, say)
            return LoopResult(step, None, 0.0, 0)
        graph, program, make_runner = training_graph(job, batches, checked.runtime)
        _say_what_checkpoints_round(graph.lowering, say)
        if config.evaluate_with_averages:
            _check_averages_kept()
        name = directory.absolute().name
        island = _of_islands(lambda: ElasticIslands().island(graph.lowering, name))
        if island:
            of = f", and learns from part {part.part} of {part.parts} of the data"
            of = of if part.parts > 1 else ""
            say(f"this run is the island {island.name!r} of {island.folder.url}{of}")
        if start.path:
            start = _adapted(start, accept_differences, say, f"going on from {start.path},")
        elif config.init_checkpoint:
            counters = ("global_step", EXAMPLES)
            variables = [v for v in tf.global_variables() if v.op.name not in counters]
            say(initialize_from(config.init_checkpoint, variables))
        say(
            f"training {graph.num_parameters:,} parameters on the mesh "
            f"{mesh_text(job.model.mesh.shape)}, from step {step} to {config.train_steps} (graph "
            f"built in {time.monotonic() - began:.0f} s)"
        )
        say_changes(directory, say)
        write_config(directory)
        facts = Facts(
            mesh=mesh_text(job.model.mesh.shape),
            layout=str(config.layout_rules),
            runtime=str(checked.runtime),
            optimizers=[type(opt).__name__ for opt in graph.optimizers],
            parameters=graph.num_parameters,
            tokens_per_step=job.tokens_per_step,
            versions=versions(),
            traffic=None,
            first_examples=batches.first_examples() if start.path else [],
        )
        write_facts(directory, facts)
        forget_recorded(directory, step)
        with MetricsRecorder(directory, METRICS_FILE, step) as recorder:

            def on_first_step() -> None:
                """Does work that a run needs later, and that should not delay its start."""
                traffic = list_traffic(graph, program) if config.reports else None
                first = batches.first_examples()
                write_facts(directory, facts._replace(traffic=traffic, first_examples=first))
                if config.reports:
                    recorder.write_once(step + 1, traffic.scalars if traffic else {})
                checked.evaluation.build()
                # Includes the parameters that evaluation alone takes from gin.
                write_config(directory)
                unread_bindings = _unread_bindings()
                if unread_bindings:
                    say(unread_bindings)
                check_drawing()

            def on_checkpoint(saved: str, at: int, progress: Progress) -> bool:
                """Scores a checkpoint, and keeps it if it is the best; returns whether to end."""
                score = checked.evaluation.point(saved, at, recorder, progress)
                recorder.flush()
                if score is None:
                    return False
                is_best = improvement.add(at, score.nats_per_token)
                if is_best and config.keep_best and Path(saved).parent == directory:
                    keep_best(saved, directory)
                if improvement.has_ended:
                    progress.message(f"{improvement}: the run ends here")
                return improvement.has_ended

            def on_timeline(timeline: Timeline, first: int, last: int) -> None:
                say(str(timeline.save(directory / TRACE_FILE)))
                recorded = RecordedSteps(first, last, facts.mesh, timeline.table())
                write_recorded(directory, recorded)

            return train_loop(
                make_runner(checked.checkpoint_dir, start, config, checked.session, island),
                graph.optimizers,
                LoopSettings(
                    train_steps=config.train_steps,
                    save_checkpoints_steps=config.save_checkpoints_steps,
                    log_steps=config.log_steps,
                    tokens_per_step=job.tokens_per_step,
                    loss_denominator=graph.loss_denominator,
                    parameters=graph.num_parameters,
                    # A checkpoint that is scored is read before the next step.
                    saves_beside_steps=config.eval_dataset_fn is None,
                    timeline_steps=config.timeline_steps,
                    watch_copies_steps=config.watch_copies_steps,
                ),
                recorder,
                on_checkpoint,
                on_first_step,
                on_timeline,
            )


def _of_islands(make: Callable[[], Any]) -> Any:
    """Returns what gin's settings for islands make of a run."""
    try:
        return make()
    except (ImportError, OSError, ValueError, IslandError) as error:
        raise ConfigError(f"ElasticIslands: {error}") from error


def training_graph(
    job: TrainingJob, batches: TrainingBatches, runtime: Runtime
) -> tuple[TrainGraph, simd.Program | None, Callable[..., Runner]]:
    """Builds the training step for a runtime; returns it, its program and a runner factory."""
    features = batches.placeholders()
    cores = None
    if runtime.name != "placement_mesh":
        cores = OnCores(runtime.name, job.model.mesh.shape, job.model.mesh.layout)
    graph = build_on(cores or OnDevices(), job, features)

    def runner(
        model_dir: str,
        start: Start,
        config: RunConfig,
        session: tf.ConfigProto,
        island: Island | None = None,
    ) -> Runner:
        given = graph, batches, model_dir, start, config.keep_checkpoint_max
        copies = None if config.watch_copies_steps is None else watch_copies()
        if cores is not None:
            return SimdProgramRunner(*given, cores, (), island, copies)
        hooks = [hook() for hook in config.hooks]
        place = OnDevices(session, runtime.target)
        return PlacementMeshRunner(*given, place, hooks, island, copies)

    return graph, None if cores is None else cores.program, runner


# It moves files of the run, which a timeline may not.
_SKIP_SETTING = f"`mtf-gradsync train {SKIP_FLAG}`"


class TimedRun:
    """Records some steps of a run, called as `run` is.

    It makes `warm_up` steps before, at least one: the first step compiles.
    """

    def __init__(self, steps: int, warm_up: int):
        self._steps, self._warm_up = steps, warm_up

    def __call__(
        self,
        config: RunConfig,
        model_dir: str | None = None,
        say: Callable[[str], None] = print,
        accepted: Accepted = NOTHING,
        part: RunPart = ALONE,
    ) -> Timeline:
        """Records steps after the newest checkpoint of model_dir; None begins with new values.

        Raises:
          ConfigError: if a setting cannot work, or the checkpoint is damaged or not accepted.
          TrainingError: if a step fails, or nothing can be recorded.
        """
        runtime = choose_runtime(config, part.target)
        job = resolve_job(config)._replace(reports=config.reports, noise_scale=config.noise_scale)
        if not part.target:
            job.model.mesh.check_devices()
        session = session_config(num_cpu_devices=job.model.mesh.num_cpu_devices)
        checkpoints = part.checkpoint_dir or model_dir
        start = Start()
        if checkpoints is not None:
            start = part.chosen(lambda: choose_checkpoint(checkpoints, False, say, _SKIP_SETTING))
        say(f"steps run on {runtime}")
        job = job._replace(examples_before=start.step * job.model.batch_size)
        with Interruption() as stop, tf.Graph().as_default(), job.batches() as batches:
            _, _, make_runner = training_graph(job, batches, runtime)
            if start.path:
                say(f"from {start.path}")
                start = _adapted(start, accepted.differences, say, "which is")
            with tempfile.TemporaryDirectory() as own:
                with make_runner(own, start, config, session) as runner:
                    try:
                        return self._recorded(runner, stop)
                    except (TimelineError, tf.errors.OpError) as error:
                        raise TrainingError(str(error)) from error

    def _recorded(self, runner: Runner, stop: Interruption) -> Timeline:
        before = _make(runner, self._warm_up, stop)
        timeline = runner.timeline()
        with timeline:
            made = _make(runner, self._steps, stop)
        timeline.mark_updates([*before[-1:], *made])
        return timeline


def _make(runner: Runner, count: int, stop: Interruption) -> Sequence[int]:
    """Makes steps as training does; returns the updates made by each, where they are counted."""
    updates: list[int] = []
    pending: collections.deque[Callable[[], dict[str, Any]]] = collections.deque()

    def look() -> None:
        values = pending.popleft()()
        if "update_step" in values:
            updates.append(int(values["update_step"]))

    for _ in range(count):
        stop.check()
        pending.append(runner.dispatch())
        while len(pending) > runner.steps_ahead:
            look()
    while pending:
        look()
    return updates


def _unread_bindings() -> str:
    """Returns a line about bindings that nothing has read up to now; "" if all were read.

    Those of ``utils.run`` and macros are not in it: the command names them.
    """
    most_names = 12
    names = [name for name in unread() if not name.startswith("utils.run.")]
    shown, more = ", ".join(names[:most_names]), len(names) - most_names
    also = f" and {more} more" if more > 0 else ""
    return f"nothing of this run reads the bindings of {shown}{also}" if names else ""
