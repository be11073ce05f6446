"""XlaSession: runs a SIMD program on the devices that jax has, one core on each."""

from __future__ import annotations

import collections
import dataclasses
import logging
import os
from concurrent.futures import Future
from typing import Any, Callable, Collection, Iterable, Sequence

import numpy as np

from mtf_gradsync.extension import NoUpdateError, mtf, tf
from mtf_gradsync.runtimes._private.tensorflow import as_tensorflow_bfloat16
from mtf_gradsync.runtimes.processes.watchdog import note_work
from mtf_gradsync.runtimes.simd.graph_facts import split_input
from mtf_gradsync.runtimes.simd.program import Program
from mtf_gradsync.runtimes.simd.replica_session import ReplicaSession, copy_array, lowerings_in
from mtf_gradsync.runtimes.xla.bridge import initial_state
from mtf_gradsync.runtimes.xla.core_devices import devices_for
from mtf_gradsync.runtimes.xla.device_values import DeviceInputs, DeviceVariables
from mtf_gradsync.runtimes.xla.executable import (
    Cache,
    CompiledCore,
    PreparedProgram,
    default_cache_dir,
)
from mtf_gradsync.runtimes.xla.gathering import Cores
from mtf_gradsync.runtimes.xla.host_graph import BOUNDARY, FetchPlan, FetchSource
from mtf_gradsync.runtimes.xla.runner.jax_devices import (
    DevicesError,
    DeviceValues,
    devices_errors,
    put,
)
from mtf_gradsync.runtimes.xla.topology.chips import peak_flops_of

_logger = logging.getLogger("mtf_gradsync")

# How many steps may be dispatched before the session waits for what an earlier one has skipped:
# enough to keep devices busy.
_STEPS_UNCHECKED = 4


@dataclasses.dataclass(eq=False)
class Dispatched:
    """A step that was begun, and may still run or wait on the devices."""

    # The fetches, nested as the user gave them; the result is nested in the same way.
    _structure: Any
    _fetch_sources: Sequence[FetchSource]  # in the order of ``tf.nest.flatten``
    _values: dict[str, Any]  # the step's values, by the name of the tensor
    # Waits for all steps up to this one, and raises their errors.
    _check_steps: Callable[[], None] = lambda: None

    def result(self) -> Any:
        """Waits for the step and returns its values.

        Returns:
          What `XlaSession.run` returns.

        Raises:
          DevicesError: when the step failed.
          NoUpdateError: when there were too many steps without an update.
        """
        with devices_errors():
            found = [source.value(self._values) for source in self._fetch_sources]
        if any(source.inside for source in self._fetch_sources):
            self._check_steps()
        return tf.nest.pack_sequence_as(self._structure, found)


class XlaSession(ReplicaSession):
    """A session on XLA devices. Use it as a context manager.

    Variables stay on the devices from step to step, and new values are written over the old values.
    The program is compiled once for each set of tensors that are fetched from inside the program.

    If the cores are on several processes, all processes have to call the same methods, `save` and
    `restore` included, in the same order. The first process writes checkpoints. On all processes
    `save` returns when the files of the checkpoint exist.

    Attributes:
      steps: how many steps were made so far. A user may set `steps` to the number of steps that
        earlier runs made. In a program of several processes, errors name the step by this number.
    """

    def __init__(self, program: Program, prepared: PreparedProgram, config: tf.ConfigProto | None):
        """Opens a session of `program`; the function `session` prepares the program."""
        self.steps = 0
        self._program = program
        self._prepared = prepared
        self._cores = cores = prepared.cores
        host = prepared.host
        self._facts, self._outside = host.facts, host
        self._watches, cluster = host.ops.watches, host.facts.cluster
        self._counts = [
            name for name in self._watches.counts if cluster[split_input(name)[0]] == program.name
        ]
        self._plans: dict[tuple[tuple[str, ...], bool], FetchPlan] = {}
        self._random_state: DeviceValues | None = None
        self._dispatched = 0  # `steps` belongs to the user
        # For each step not yet checked for skips: its number, and the counters to look at.
        self._pending_checks: collections.deque[tuple[int, dict[str, DeviceValues]]] = (
            collections.deque()
        )
        self._entropy = int.from_bytes(os.urandom(7), "little")
        opened = tf.Session(graph=host.graph, config=config or host_config())
        self._variables = DeviceVariables(opened, cores)
        self._inputs = DeviceInputs(self._outside, cores)
        super().__init__(opened, host.ops, self._variables.copy_from_first_process)

    @property
    def cores(self) -> Cores:
        """The program's cores, and which of them are on this process."""
        return self._cores

    @property
    def program(self) -> Program:
        """The program that runs."""
        return self._program

    @property
    def compiled(self) -> tuple[CompiledCore, ...]:
        """The programs compiled so far, one for each set of fetches."""
        return tuple(self._prepared.by_fetches.values())

    @property
    def peak_flops(self) -> float | None:
        """The peak of all devices together, in bfloat16 operations per second; None if unknown."""
        peaks = [peak_flops_of(device.device_kind) for device in self._cores.devices]
        known = [peak for peak in peaks if peak is not None]
        return sum(known) if len(known) == len(peaks) else None

    def wait(self) -> None:
        """Waits until the steps that were dispatched have ended on this process's devices.

        Raises:
          DevicesError: when one of the steps failed.
          NoUpdateError: when there were too many steps without an update.
        """
        with devices_errors():
            self._variables.wait()
        self._report_skips_until(self._dispatched)

    def close(self) -> None:
        try:
            self._report_skips_until(self._dispatched)
        except NoUpdateError as error:
            _logger.error("%s", error)
        except DevicesError:
            pass  # whoever asks for a result of the step gets it
        super().close()

    def run(
        self, fetches: Any, feed_dict: dict[Any, Any] | None = None, per_replica: bool = False
    ) -> Any:
        """Runs the program once, and returns the values of the fetches.

        If the cores are on several processes, all processes have to call `run` with the same
        fetches. Each process feeds the inputs of its own cores.

        Args:
          fetches: a tensor, operation or name of the user's graph, inside or outside the program,
            or a nested structure of them.
          feed_dict: the values to feed, by tensor; the tensors have to be outside the program.
          per_replica: whether to return, for a tensor of the program, the list of its values on all
            cores in place of its value on the first core. The list has None for the cores of other
            processes.

        Returns:
          The structure of `fetches`, with values in place of tensors and None in place of
          operations.

        Raises:
          DevicesError: when the step failed on the devices.
          UnsupportedProgramError: when XLA cannot run the program.
          ValueError: when a fetch or feed is not in the graph, or cannot be fetched or fed.
        """
        return self.dispatch(fetches, feed_dict, per_replica).result()

    def dispatch(
        self, fetches: Any, feed_dict: dict[Any, Any] | None = None, per_replica: bool = False
    ) -> Dispatched:
        """Begins a step, and returns before the step is done.

        Steps run in the order in which they were dispatched.

        Args:
          fetches: a tensor, operation or name of the user's graph, inside or outside the program,
            or a nested structure of them.
          feed_dict: the values to feed, by tensor; the tensors have to be outside the program.
          per_replica: whether the step returns, for a tensor of the program, the list of its values
            on all cores in place of its value on the first core.

        Returns:
          The step. Its method `result` waits for the step, and returns the values of the fetches.
        """
        names = tuple(self._name_of(f) for f in tf.nest.flatten(fetches))
        plan = self._plans.get((names, per_replica))
        if plan is None:
            plan = self._outside.plan(names, per_replica, self._cores)
            self._plans[names, per_replica] = plan
        feeds = {self._name_to_feed(k): v for k, v in (feed_dict or {}).items()}
        values: dict[str, Any] = {}
        if not plan.runs_program:
            values.update(self._run_outside(plan.first, feeds))
            return Dispatched(fetches, plan.fetch_sources, values)
        compiled = self._prepared.compiled(tuple(sorted({*plan.inside, *self._counts})))
        sources = self._inputs.sources(compiled.replica.tensors, feeds)
        first = {n: v for n, v in feeds.items() if not self._outside.is_after(n)}
        run_by_any = None
        if not self._cores.is_alone:
            run_by_any = plan.first.union(*(i.sources for i in compiled.replica.tensors))
        values.update(self._run_outside(sources | plan.first, first, run_by_any))
        values.update(self._run_program(compiled, values, feeds, plan.shared))
        step = self._dispatched = self._dispatched + 1
        self._pending_checks.append((step, {name: values[name] for name in self._counts}))
        # The caller may never ask for the results.
        self._report_skips_until(step - _STEPS_UNCHECKED)
        if plan.last:
            last = {n: v for n, v in feeds.items() if self._outside.is_after(n)}
            last.update((k, values[v]) for k, v in plan.carried.items())
            last.update(self._values_for_host(plan.returned, values))
            values.update(self._run_outside(plan.last, last))
        return Dispatched(
            fetches, plan.fetch_sources, values, lambda: self._report_skips_until(step)
        )

    def _report_skips_until(self, step: int) -> None:
        """Waits for this session's steps up to number `step`, and reports the updates they skipped.

        The method logs warnings about skipped updates, and raises a NoUpdateError if too many
        updates were skipped. All processes check the same steps, so that either all processes
        raise an error or none does.
        """
        while self._pending_checks and self._pending_checks[0][0] <= step:
            _, counts = self._pending_checks.popleft()
            with devices_errors():
                values = {name: np.asarray(x.arrays[0]) for name, x in counts.items()}
            self._watches.report(values, self._read_records, logs=self._cores.is_first)

    def _read_records(self, names: list[str]) -> list[Any]:
        found = self._run_outside(names, {}, names)
        return [found[name] for name in names]

    def _run_program(
        self,
        compiled: CompiledCore,
        values: dict[str, Any],
        fed: Collection[str],
        shared: Collection[str],
    ) -> dict[str, DeviceValues]:
        """Runs the program once, and returns the values that it fetches, by the tensors' names.

        Args:
          compiled: the program, compiled for the fetches.
          values: the values of tensors outside the program, by name.
          fed: the names of tensors that the user feeds in this step.
          shared: the names of tensors whose values other code holds, too. The values of shared and
            of fed tensors are copied, so that no result is written over the values themselves.
        """
        self.steps += 1
        self._is_stepped = True
        note_work(f"step {self.steps}")
        with devices_errors():
            arguments = self._inputs.put(compiled.replica.tensors, values, fed, shared)
            arguments += self._variables.take(compiled.replica.variables)
            if compiled.lowered.has_randomness:
                arguments.append(self._random_state or self._initial_random_state())
            results = compiled.program.run(arguments)
        count = compiled.lowered.num_fetches
        for parameter, value in zip(compiled.lowered.updated, results[count:]):
            if parameter == len(compiled.replica.inputs):
                self._random_state = value
            else:
                self._variables.put(compiled.replica.inputs[parameter], value)
        return dict(zip(compiled.replica.fetches, results))

    def _initial_random_state(self) -> DeviceValues:
        step = 0
        counter = tf.train.get_global_step(self._program.graph)
        if counter is not None:
            name = self._name_of(counter)
            step = int(self._run_outside([name], {})[name])
        states = [initial_state(core, step, self._entropy) for core in self._cores.local]
        return put(states, self._cores.local_devices)

    def _values_for_host(
        self, returned: dict[str, tuple[str, int]], values: dict[str, Any]
    ) -> dict[str, np.ndarray]:
        """Returns the values that operations after the program take from it, by placeholder's name.

        `returned` says, for the name of each placeholder, which tensor of the program is fed to it,
        and from which core. `values` has the values of these tensors on this process's cores, by
        the tensor's name. If the cores are on several processes, the processes exchange the values.
        """
        inner = sorted({name for name, _ in returned.values()})
        with devices_errors():
            local = [[np.asarray(a) for a in values[name].arrays] for name in inner]
        on_cores = dict(zip(inner, self._cores.gather(local) if inner else ()))
        return {
            tensor: as_tensorflow_bfloat16(on_cores[name][core])
            for tensor, (name, core) in returned.items()
        }

    def _run_outside(
        self, names: Iterable[str], feeds: dict[str, Any], run_by_any: Iterable[str] | None = None
    ) -> dict[str, Any]:
        """Runs operations outside the program in TensorFlow; returns tensors' values by name.

        Before the operations run, the newest values of the variables that they read are copied from
        the devices to TensorFlow.

        Args:
          names: the names of the operations to run, and of the tensors to return.
          feeds: the values to feed, by the name of the tensor.
          run_by_any: the names of all operations and tensors that at least one process runs; None
            if all processes run the same ones. The variables that these operations read are copied,
            because all processes have to copy the same variables.
        """
        names = sorted(names)
        feeds = {name: copy_array(value) for name, value in feeds.items()}
        touched = self._outside.touched(names if run_by_any is None else run_by_any)
        self._variables.copy_to_tensorflow(touched.used)
        values = self._session.run(names, feeds) if names else ()
        self._variables.forget(touched.written)
        return dict(zip(names, values))

    def checksums(self) -> dict[tuple[str, ...], list[Any]]:
        """Returns a checksum of each core's copy of each variable on the devices.

        A key of the result is the tuple of the names that a variable has on the cores, and the
        value has the checksums, one per core. If the cores are on several processes, all processes
        have to call `checksums`.
        """
        self._report_skips_until(self._dispatched)
        with devices_errors():
            return self._variables.checksums()

    def copies_of(self, names: Sequence[str]) -> list[np.ndarray]:
        """Returns a variable's values on some cores, in the order of `names`.

        `names` are the names of these cores' copies of the variable. If the copies of all cores
        have one name, the values on all cores are returned. If the cores are on several processes,
        all processes have to call `copies_of`.
        """
        with devices_errors():
            return self._variables.values_on_cores(names)

    def begin_save(self, path: str, saver: Any, global_step: int) -> Future[str]:
        """Begins to save a checkpoint; returns a future, whose result is the checkpoint's path.

        The values are read now, and `saver`, a `TrainingSaver`, writes them to files while later
        steps run. `path` is the prefix of the checkpoint's files, to which "-" and `global_step`
        are added. If the cores are on several processes, the checkpoint is written completely
        before `begin_save` returns.
        """
        if self._cores.is_alone:
            return super().begin_save(path, saver, global_step)
        written: Future[str] = Future()
        written.set_result(self.save(path, saver=saver, global_step=global_step))
        return written

    def _write_checkpoint(
        self, path: str, saver: tf.train.Saver | None, global_step: int | None
    ) -> str:
        """Writes the checkpoint on the first process; then returns its path on every process.

        `path` is the prefix of the checkpoint's files, to which "-" and `global_step` are added
        unless `global_step` is None. `saver` writes the files; None for a saver that neither
        deletes older checkpoints nor writes the state file.
        """

        def write() -> str:
            if not self._cores.is_first:
                return path if global_step is None else f"{path}-{global_step}"
            return super(XlaSession, self)._write_checkpoint(path, saver, global_step)

        return self._cores.call_on_all_processes(write)

    def _read_masters(self, path: str) -> None:
        """Reads the checkpoint at `path` into TensorFlow's variables, on every process."""
        self._cores.call_on_all_processes(lambda: super(XlaSession, self)._read_masters(path))

    def _copy_slices_to_masters(self) -> None:
        self._report_skips_until(self._dispatched)
        self._variables.copy_to_tensorflow()
        super()._copy_slices_to_masters()

    def _set_masters(self, values: Iterable[tuple[str, Any]]) -> None:
        # Values, unlike a checkpoint, do not say at which step random numbers should begin.
        state = self._random_state
        self._cores.call_on_all_processes(lambda: super(XlaSession, self)._set_masters(values))
        self._random_state = state

    def _copy_masters_to_slices(self) -> None:
        super()._copy_masters_to_slices()
        self._variables.forget()
        self._random_state = None

    def _is_inside(self, name: str) -> bool:
        node = self._facts.node[split_input(name)[0]]
        return node.name in self._facts.cluster or node.op in BOUNDARY


def host_config() -> tf.ConfigProto:
    """Returns the default configuration of sessions that run operations outside the program.

    In sessions with this configuration TensorFlow uses no GPUs, because jax uses the GPUs.
    """
    return tf.ConfigProto(device_count={"GPU": 0}, allow_soft_placement=True)


def session(
    program: Program,
    lowering: mtf.Lowering | Sequence[mtf.Lowering] | Any = None,
    *,
    devices: Sequence[Any] | None = None,
    platform: str | None = None,
    config: tf.ConfigProto | None = None,
    cache_dir: str | None = "default",
) -> XlaSession:
    """Returns a session on XLA devices, with variables initialized and copied into slices.

    The session has the same methods as a session on CPU replicas, which `Program.session` returns.

    Args:
      program: the program that `tpu_program` yielded, with the whole model built.
      lowering: the program's lowering, a list of lowerings, or the EstimatorSpec that a model_fn
        returned. None for a program without mesh variables.
      devices: a jax device for each core; default the first ones that jax has.
      platform: "cpu", "gpu" or "tpu"; default jax's own choice.
      config: configuration of the ``tf.Session`` that runs operations outside the program.
      cache_dir: the folder in which compiled programs are cached for later runs; default
        `default_cache_dir`. None for no cache.

    Returns:
      An `XlaSession`; use it as a context manager.

    Raises:
      XlaMissingError: when jax is not installed.
      DevicesError: when there are too few devices.
      ProcessesError: when several processes cannot work on the mesh together, for example because
        they have different numbers of cores.
      UnsupportedProgramError: when an operation of the graph cannot run on XLA devices.
      TypeError: when `lowering` has another type, or is an EstimatorSpec without a lowering.
    """
    cores = Cores(devices_for(program.num_replicas, platform, devices))
    lowerings = lowerings_in(lowering)
    cache_dir = default_cache_dir() if cache_dir == "default" else cache_dir
    key = "xla", *cores.devices, cache_dir, *map(id, lowerings)
    prepared = program.prepared(
        key, lambda: PreparedProgram(program, lowerings, cores, Cache(cache_dir))
    )
    return XlaSession(program, prepared, config)
