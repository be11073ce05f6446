"""Chooses the runtime of the training steps, and runs steps and saves checkpoints there."""

from __future__ import annotations

import abc
import contextlib
import os
from concurrent.futures import Future
from typing import Any, Callable, ClassVar, ContextManager, Iterator, Sequence, get_args

import numpy as np

from mtf_gradsync.extension import (
    OuterOptimizer,
    ReportsSkips,
    mtf,
    needs_not_finite,
    skips_not_finite,
    stages_of,
    tf,
)
from mtf_gradsync.runtimes import sessions, simd, xla
from mtf_gradsync.runtimes._common import ConfigError, TrainingError
from mtf_gradsync.runtimes.copy_checks import watch_copies
from mtf_gradsync.runtimes.saving import TrainingSaver
from mtf_gradsync.runtimes.sessions import OnCores, OnDevices, Runtime
from mtf_gradsync.runtimes.settings import session_config
from mtf_gradsync.runtimes.starting import Start
from mtf_gradsync.tools._private.tensorflow import singular_monitored_session
from mtf_gradsync.tools.islands import Island, IslandError
from mtf_gradsync.tools.timelines import Timeline, timeline
from mtf_gradsync.tools.train.config import RunConfig, RuntimeSetting
from mtf_gradsync.tools.train.data.batches import TrainingBatches
from mtf_gradsync.tools.train.errors import raised_as
from mtf_gradsync.tools.train.model import TrainingJob, resolve_job
from mtf_gradsync.tools.train.train_graph import TrainGraph, build_train_graph

# Bindings that have no effect except on a placement mesh.
_OF_PLACEMENT_MESHES = ("mesh_devices", "mesh_impl", "hooks")


def choose_runtime(config: RunConfig, target: str = "") -> Runtime:
    """Returns the runtime that a config names, or the fastest that this environment has.

    `config` has the settings of the run. If the mesh is over the tasks of a cluster, `target` is
    the address of the chief's server; otherwise `target` is "". Raises ConfigError if the config
    names a runtime that does not fit other settings of the config.
    """
    asked = config.runtime
    bound = [name for name in _OF_PLACEMENT_MESHES if getattr(config, name)]
    on_mesh = None  # the placement mesh that the run needs, if it needs one
    if target:
        on_mesh = Runtime("placement_mesh", "over the tasks of a cluster", target)
    elif bound:
        on_mesh = Runtime("placement_mesh", f"train.run.{bound[0]} is bound")
    with raised_as(ConfigError, ValueError):
        chosen = sessions.choose_runtime(
            asked, "train.run.runtime", get_args(RuntimeSetting), fastest=on_mesh
        )
    if on_mesh is None:
        return chosen
    if chosen.name == "placement_mesh":
        return on_mesh if target else chosen
    if target:
        raise ConfigError(
            f'train.run.runtime = "{asked}" does not run on a cluster of tf.train.Servers; '
            '"placement_mesh" does. For XLA devices of several processes give --coordinator, '
            "--num_processes and --process_id instead."
        )
    raise ConfigError(
        f"train.run.{bound[0]} is for placement meshes, and train.run.runtime is "
        f'"{asked}". Remove one of them.'
    )


def prepare(config: RunConfig, target: str) -> tuple[Runtime, TrainingJob, tf.ConfigProto]:
    """Checks a config; returns its runtime, its training job, and the settings of its sessions.

    If the mesh is over the tasks of a cluster, `target` is the address of the chief's server;
    otherwise it is "". Raises ConfigError for a setting that cannot work.
    """
    runtime = choose_runtime(config, target)
    job = resolve_job(config)._replace(reports=config.reports, noise_scale=config.noise_scale)
    if not target:
        job.model.mesh.check_devices()
    return runtime, job, session_config(num_cpu_devices=job.model.mesh.num_cpu_devices)


def training_graph(
    job: TrainingJob, batches: TrainingBatches, runtime: Runtime, session: tf.ConfigProto
) -> tuple[TrainGraph, simd.Program | None, Callable[..., Runner]]:
    """Adds a job's training step for a runtime to the default graph.

    `batches` are the batches that will be fed to the step. `runtime` runs the step, in sessions
    with the settings `session`. Returns the graph of the step, the step's SIMD program (None on a
    placement mesh), and a function that makes the runner. The function is called with a directory
    for checkpoints, a `Start`, the config, and, if the run is an island, the run's `Island`.
    """
    features = batches.placeholders()
    mesh = job.model.mesh
    place = sessions.runtime_for(runtime.name, mesh.shape, mesh.layout, session, runtime.target)
    graph = build_train_graph(place, job, features)

    def runner(
        model_dir: str, start: Start, config: RunConfig, island: Island | None = None
    ) -> Runner:
        kind = SimdProgramRunner if isinstance(place, OnCores) else PlacementMeshRunner
        return kind(graph, batches, model_dir, start, config, island, place)

    return graph, place.program, runner


def stack_skips_not_finite(optimizers: Sequence[Any]) -> bool:
    """Returns whether a stack of optimizers can handle gradients that are not finite.

    The result is true if one of `optimizers` skips steps or shards with gradients that are not
    finite, or leaves out islands of DiLoCo that are not finite. It is also true if one of
    `optimizers` needs to see gradients that are not finite, as LossScaleOptimizer does.
    """
    stacks = map(stages_of, optimizers)
    by_stages = any(skips_not_finite(some) or needs_not_finite(some) for some in stacks)
    return by_stages or any(map(skips_islands, optimizers))


def skips_islands(opt: Any) -> bool:
    """Returns whether the optimizer `opt` leaves out islands of DiLoCo that are not finite.

    An island counts as not finite if its loss, its values or its slots are not finite. Only an
    OuterOptimizer can leave out islands.
    """
    return isinstance(opt, OuterOptimizer) and opt.leave_out_not_finite


# Attributes of a `TrainGraph` whose values a step gives.
_FETCHED = ("step", "loss", "fields", "reported", "update_step", "in_sums")


class Runner(ContextManager["Runner"]):
    """A context manager that makes training steps and checkpoints in a session of a runtime.

    When it is entered, the variables get the values of the runner's `Start`.

    Attributes:
      first_step: how many steps the run had made before; known once the runner is entered.
      is_alone: whether this process works without other processes.
      steps_ahead: how many more steps may be dispatched before the result of a step is asked for.
      peak_flops: bfloat16 operations a second of all chips together; None if it is not known.
      copies_slices: whether slices have to be copied to the masters before a checkpoint is saved.
    """

    first_step: int = 0
    is_alone: bool = True
    peak_flops: float | None = None
    copies_slices: ClassVar[bool]

    def __init__(
        self,
        graph: TrainGraph,
        batches: TrainingBatches,
        model_dir: str,
        start: Start,
        config: RunConfig,
        island: Island | None,
        place: OnDevices | OnCores,
    ):
        """Prepares sessions and a saver for the step `graph`, which is in the default graph.

        Operations of the saver are added to the default graph. If `config` sets watch_copies_steps,
        operations that compare copies of variables are added, too. Checkpoints are written to
        `model_dir`. `batches` are the batches of the steps. `island` exchanges values with other
        islands after steps; it is None if this run is no island. `place` makes the sessions, which
        begin with the values of `start`.
        """
        # Only sessions of a placement mesh have hooks; see `choose_runtime`.
        self._hooks = [hook() for hook in config.hooks]
        self._prefix = os.path.join(model_dir, "model.ckpt")
        self._saver = TrainingSaver(
            stack_skips_not_finite(graph.optimizers),
            graph.lowering if self.copies_slices else None,
            # The Saver's own word for "all" is 0.
            max_to_keep=config.keep_checkpoint_max or 0,
        )
        self._saver.recover_last_checkpoints(list(start.kept))
        skips = [x.steps_without_update for x in graph.optimizers if isinstance(x, ReportsSkips)]
        self._watches = [one.watch() for one in skips if one]
        values = {name: getattr(graph, name) for name in _FETCHED}
        self._fetches = {name: x for name, x in values.items() if x is not None}
        self._batches = batches
        self._made = [tf.train.get_global_step(), graph.examples]
        self._session: Any = None
        self._lowering = graph.lowering
        self._place, self._island = place, island
        self._start = start
        self._copies = None if config.watch_copies_steps is None else watch_copies()
        if self._copies:
            self._copies.begin()
        self.steps_ahead = place.steps_ahead
        self._sessions: Any = place.sessions(graph.lowering, self._scaffold(), lambda: start)

    @abc.abstractmethod
    def _scaffold(self) -> tf.train.Scaffold:
        """Returns the tf.train.Scaffold for the sessions, with their saver or initial operation."""

    @abc.abstractmethod
    def _with_session(self, use: Callable[[Any], Any]) -> Any:
        """Calls `use` with the session, and returns what `use` returns.

        The session's hooks do not run.
        """

    @abc.abstractmethod
    def _dispatch_batch(self, batch: dict[tf.Tensor, np.ndarray]) -> Callable[[], dict[str, Any]]:
        """Begins a step on the feed dict `batch`; returns a function that waits for its values.

        The returned function returns the same values as the function that `dispatch` returns, but
        without "tokens".
        """

    def dispatch(self) -> Callable[[], dict[str, Any]]:
        """Begins a step on the next batch; returns a function that waits for the step's values.

        The returned function returns a dictionary. The keys "step", "loss", "fields", "reported",
        "update_step" and "in_sums" have the values of the `TrainGraph`'s attributes with these
        names; "update_step" and "in_sums" are missing if the attribute is None. The key "tokens"
        has the number of targets in the batch that are not padding.
        """
        batch = self._batches.next()
        tokens = self._batches.targets
        result = self._dispatch_batch(batch)
        return lambda: {**result(), "tokens": tokens}

    @abc.abstractmethod
    def begin_save(self, step: int) -> Future[str]:
        """Begins to save a checkpoint of `step`, which is written while the next steps run.

        Reads the values of all variables, and returns a future of the checkpoint's path. Call
        `begin_save` only after the results of all steps have been read, and after the previous
        checkpoint is complete.
        """

    def timeline(self) -> Timeline:
        """Returns a context manager that records the steps that begin and end inside it."""
        return timeline(self._session, lowering=self._lowering)

    def no_update_error(self) -> Exception | None:
        """Returns an exception if too many steps in a row made no update; None otherwise."""
        found = self._with_session(
            lambda session: [watch.read_report(session) for watch in self._watches]
        )
        return next((one for one in found if isinstance(one, Exception)), None)

    def agreed_stop(self, received: int | None) -> int | None:
        """Returns the signal for which all processes stop before the next step, or None to go on.

        `received` is the signal that this process has received, or None. All processes of the run
        call `agreed_stop` before each step.
        """
        return received

    def should_stop(self) -> bool:
        """Returns whether something besides the loop, such as a hook, wants to stop."""
        return False

    def check_copies(self) -> None:
        """Raises CopiesError unless all copies of each variable, one on each core, are equal.

        Before copies are compared, the steps that were dispatched are waited for.
        """
        if self._copies:
            self._with_session(self._copies.check)

    def exchange(self, step: int, last: int) -> int:
        """Lets an island of DiLoCo exchange values with other islands after the step `step`.

        `last` is the last step of the run. Returns the step that the run has reached: if the island
        has taken newer values from other islands, the step of these values, otherwise `step`. A run
        that is no island exchanges nothing.
        """
        if self._island is None:
            return step
        island, tokens = self._island, float(self._batches.targets)

        def after_step(session: Any) -> None:
            island.after_step(session, tokens)
            if island.step >= last:
                island.finish(session)

        with raised_as(TrainingError, IslandError):
            self._with_session(after_step)
        return island.step

    def _begin_session(self) -> None:
        """Reads the step from the new session, sets `first_step`, and begins the batches there.

        If the run is an island, the island joins the others, and may take a later step from them.
        """
        self.first_step, examples = map(int, self._session.run(self._made))
        self._batches.begin(self.first_step, examples)
        if self._island:
            island, step = self._island, self.first_step
            if not self.is_alone:
                raise ConfigError(
                    f"The island {island.name!r} must be one process; the run has several"
                )
            with raised_as(TrainingError, IslandError):
                self._with_session(lambda session: island.begin(session, step, self._start.path))
            self.first_step = island.step

    def _save_island(self, step: int) -> None:
        if self._island:
            self._island.save(f"{self._prefix}-{step}")

    def _end_island(self, error: Any) -> None:
        """Lets an island contribute what it has learned, when its run ends without an exception.

        `error` is the type of the exception that ended the run, or None. If there was an exception,
        the island leaves the folder of islands without a contribution. If the run is no island,
        nothing happens.
        """
        island = self._island
        if island is None:
            return
        if error is None:
            self._with_session(lambda session: island.finish(session, waits=False))
        else:
            island.close()


class PlacementMeshRunner(Runner):
    """A runner of steps on a placement mesh, in a `tf.train.SingularMonitoredSession`."""

    copies_slices = True

    def __enter__(self) -> PlacementMeshRunner:
        # Copies masters to slices after every restore.
        hooks = [mtf.MtfRestoreHook(self._lowering), *self._hooks]
        # Not a session that restarts itself when a device is lost: the loop counts steps.
        self._session = singular_monitored_session(self._sessions, hooks).__enter__()
        self._begin_session()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._end_island(exception[0])
        self._session.__exit__(*exception)

    def _dispatch_batch(self, batch: dict[tf.Tensor, np.ndarray]) -> Callable[[], dict[str, Any]]:
        values = self._session.run(self._fetches, batch)
        return lambda: values

    def begin_save(self, step: int) -> Future[str]:
        self._save_island(step)
        return self._with_session(
            lambda session: self._saver.begin_save(session, self._prefix, step)
        )

    def should_stop(self) -> bool:
        return self._session.should_stop()

    def _scaffold(self) -> tf.train.Scaffold:
        return tf.train.Scaffold(saver=self._saver)

    def _with_session(self, use: Callable[[tf.Session], Any]) -> Any:
        # The argument's name is prescribed.
        return self._session.run_step_fn(lambda step_context: use(step_context.session))


# Every this many steps several processes exchange whether one has received a signal to stop.
_AGREE_STEPS = 10


class SimdProgramRunner(Runner):
    """A runner of steps of a SIMD program, by XLA or on CPU replicas."""

    copies_slices = False
    _place: OnCores
    _calls = 0

    def __enter__(self) -> SimdProgramRunner:
        with self._naming_another_runtime():
            self._session = self._sessions.open()
        cores = getattr(self._session, "cores", None)
        self.peak_flops = getattr(self._session, "peak_flops", None)
        self.is_alone = cores is None or cores.is_alone
        self._begin_session()
        if not self.is_alone:
            self._session.steps = self.first_step
        return self

    def __exit__(self, *exception: Any) -> None:
        self._end_island(exception[0])
        self._session.close()

    def _dispatch_batch(self, batch: dict[tf.Tensor, np.ndarray]) -> Callable[[], dict[str, Any]]:
        if self._place.name != "xla":
            values = self._session.run(self._fetches, batch)
            return lambda: values
        with self._naming_another_runtime():
            step = self._session.dispatch(self._fetches, batch)

        def result() -> dict[str, Any]:
            with self._naming_another_runtime():
                return step.result()

        return result

    def begin_save(self, step: int) -> Future[str]:
        self._save_island(step)
        return self._session.begin_save(self._prefix, self._saver, step)

    def agreed_stop(self, received: int | None) -> int | None:
        if self.is_alone:
            return received
        cores = self._session.cores
        self._calls += 1
        if self._calls % _AGREE_STEPS:
            return None
        of_cores = [np.int32(received or 0)] * len(cores.local)
        (signals,) = cores.gather([of_cores])
        return int(max(signals)) or None

    def _scaffold(self) -> tf.train.Scaffold:
        return tf.train.Scaffold(local_init_op=tf.tables_initializer())

    def _with_session(self, use: Callable[[Any], Any]) -> Any:
        return use(self._session)

    @contextlib.contextmanager
    def _naming_another_runtime(self) -> Iterator[None]:
        """Turns an exception of the runtime in the block into a TrainingError.

        The text of the TrainingError also says that the runtime "placement_mesh" runs every model.
        """
        try:
            yield
        except (xla.DevicesError, xla.XlaMissingError, simd.UnsupportedProgramError) as error:
            raise TrainingError(
                f'{error} (train.run.runtime = "{self._place.name}"; "placement_mesh" runs every '
                "model.)"
            ) from error
