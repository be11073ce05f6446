"""Records the steps of each runtime: a placement mesh's, of CPU replicas, and on XLA devices."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from typing import Any, Callable, NamedTuple, TypeVar

import numpy as np

from mtf_gradsync.extension import place_of, tf
from mtf_gradsync.runtimes._common import first_line
from mtf_gradsync.runtimes._private.jax import compiled_hlo
from mtf_gradsync.runtimes.simd.collectives import list_collectives
from mtf_gradsync.runtimes.simd.graph_facts import CalledBranch, GraphFacts
from mtf_gradsync.runtimes.simd.program import CpuReplicaSession
from mtf_gradsync.runtimes.xla.gathering import OtherProcessError
from mtf_gradsync.runtimes.xla.session import Dispatched, XlaSession
from mtf_gradsync.tools._private.profiles import Profiler, profile_data
from mtf_gradsync.tools.timelines.events import (
    Call,
    Collective,
    Event,
    Kind,
    Recorder,
    Recording,
    Replaced,
    TimelineError,
    check_recorded,
    leaves,
    model_name,
    now,
    operations_of,
    steps_until,
    sums_of_updates,
    timed,
    until_used,
)
from mtf_gradsync.tools.timelines.profiles import read_profile

# On a placement mesh: how values of several cores are put together.
_JOINS = frozenset(["Add", "AddN", "AddV2", "Concat", "ConcatV2", "Maximum", "Minimum", "Pack"])
_COPIES = frozenset(["Identity", "Snapshot"])
_OWN_COLLECTIVES = ("Collective", "Nccl")

_ADVICE = (
    "Profiles of TensorFlow are switched off for this session, or its steps run elsewhere: give "
    "gs.timeline the session whose run makes them."
)


class _Run(NamedTuple):
    """One call of ``session.run``."""

    end: int
    stats: Any


class TensorFlowRecorder(Recorder):
    """Has a ``tf.Session`` trace each call of its ``run``."""

    def __init__(self, session: Any, graph: tf.Graph, is_remote: bool = False):
        """Takes a session, whose ``run`` makes steps, on a ``tf.train.Server`` if `is_remote`.

        `graph` is the user's.
        """
        self._session, self._graph, self._is_remote = session, graph, is_remote
        self._runs: list[_Run] = []
        self._calls: list[Call] = []
        self._begin = 0

    def start(self) -> None:
        """See `Recorder`."""
        self._begin = now()
        self._replaced = Replaced(self._session, "run", self._traced)

    def cancel(self) -> None:
        """See `Recorder`."""
        self._replaced.put_back()

    def stop(self) -> list[Recording]:
        """See `Recorder`."""
        self.cancel()
        return [check_recorded(self._recording(), _ADVICE)]

    def _traced(self, run: Any) -> Any:
        def traced(
            fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
        ) -> Any:
            asked = tf.RunOptions()
            if options is not None:
                asked.CopyFrom(options)
            # A server answers with times for FULL_TRACE only. Here it has the same of CPUs, and a
            # profiler that writes lines at every step.
            level = "FULL_TRACE" if self._is_remote else "SOFTWARE_TRACE"
            asked.trace_level = getattr(tf.RunOptions, level)
            metadata = tf.RunMetadata() if run_metadata is None else run_metadata
            values = timed(
                self._calls,
                "session.run",
                lambda: run(fetches, feed_dict, options=asked, run_metadata=metadata),
            )
            self._runs.append(_Run(now(), metadata.step_stats))
            return values

        return traced

    @abc.abstractmethod
    def _recording(self) -> Recording:
        """What was recorded."""

    def _made(
        self,
        runtime: str,
        cores: dict[int, str],
        events: list[list[Event]],
        collectives: dict[str, Collective],
    ) -> Recording:
        """A recording of the runs, from the events of each."""
        # Other calls, of a counter or of an evaluation, belong to the host's time.
        ends = [run.end for run, found in zip(self._runs, events) if found]
        flat = tuple(event for found in events for event in found)
        of_updates = sums_of_updates(collectives, self._graph)
        steps = steps_until(self._begin, ends, flat, of_updates)
        return Recording(runtime, 0, cores, steps, flat, collectives, tuple(self._calls))


class ReplicasRecorder(TensorFlowRecorder):
    """Records steps on CPU replicas, whose cores are parts of one graph."""

    def __init__(self, session: CpuReplicaSession, lowering: Any = None):
        """Takes the session, and the lowering to name variables by."""
        super().__init__(session.tf_session, session.source)
        self._emulated, self._lowering = session.emulated, lowering

    def _recording(self) -> Recording:
        rows = list_collectives(self._graph, lowering=self._lowering).rows
        sums = self._emulated.groups_of_sums()
        collectives = {
            row.name: Collective(row.bytes_per_core, row.variables, row.is_conditional)
            for row in rows
        }
        events = []
        for run in self._runs:
            found = []
            for node in (n for device in run.stats.dev_stats for n in device.node_stats):
                place, times = self._emulated.place_of(node.node_name), _times(node)
                if place is None or times is None:
                    continue
                core, name = place
                collective = _within(name, collectives)
                if not collective:
                    found.append(Event(core, model_name(name), "compute", *times))
                elif not (name == collective and sums.get(name)):  # a core's view of its sum
                    # One sum is made for all cores of a group, which wait for it.
                    group = next((g for g in sums.get(collective, ()) if core in g), (core,))
                    shown = model_name(collective)
                    found += [Event(one, shown, "collective", *times) for one in group]
            events.append(found)
        # As events are called.
        collectives = {model_name(name): one for name, one in collectives.items()}
        count = max(self._emulated.num_replicas.values())
        cores = {core: f"core {core}" for core in range(count)}
        return self._made("cpu_replicas", cores, events, collectives)


class MeshRecorder(TensorFlowRecorder):
    """Records steps of a placement mesh, whose cores are the devices that its operations name."""

    def _recording(self) -> Recording:
        graph = self._graph
        operations = {op.name: op for op in graph.get_operations()}
        named = {op.device for op in operations.values() if op.device}
        places = sorted({place_of(device) for device in named}, key=repr)
        number = {place: core for core, place in enumerate(places)}
        facts = GraphFacts(graph.as_graph_def())
        collectives: dict[str, Collective] = {}
        seen: dict[int, str] = {}
        events = []
        for run in self._runs:
            found = []
            for device in run.stats.dev_stats:
                core = number.get(place_of(device.device)) if number else 0
                if core is None:
                    continue
                for node in device.node_stats:
                    operation, times = operations.get(node.node_name), _times(node)
                    # What names no device stands on the host, beside the mesh.
                    on_host = number and operation is not None and not operation.device
                    if times is None or on_host or node.node_name.startswith("_"):
                        continue
                    name = model_name(node.node_name)
                    joined = None if operation is None else _joined_bytes(operation)
                    if joined is not None:
                        context = facts.context[node.node_name]
                        collectives[name] = Collective(
                            joined, None, any(isinstance(c, CalledBranch) for c in context)
                        )
                    kind: Kind = "compute" if joined is None else "collective"
                    found.append(Event(core, name, kind, *times))
                    seen[core] = device.device
            events.append(found)
        cores = {core: _short(device) for core, device in sorted(seen.items())}
        return self._made("placement_mesh", cores, events, collectives)


def _times(node: Any) -> tuple[int, int] | None:
    """When an operation began and ended; None for one that did not run, in another branch."""
    begin = node.all_start_nanos or node.all_start_micros * 1000
    first = node.op_start_rel_nanos or node.op_start_rel_micros * 1000
    last = node.op_end_rel_nanos or node.op_end_rel_micros * 1000
    return (begin + first, begin + last) if last > first else None


def _within(name: str, collectives: dict[str, Collective]) -> str:
    """The collective that an operation of the emulated graph is, or helps with; or ""."""
    while name and name not in collectives:
        name = name.rpartition("/")[0]
    return name


def _joined_bytes(operation: tf.Operation) -> int | None:
    """Bytes that an operation takes from other devices to put together; None for all others."""
    if operation.type.startswith(_OWN_COLLECTIVES):
        return _bytes_of(operation.inputs)
    if not operation.device or operation.type not in _JOINS | _COPIES:
        return None
    here = place_of(operation.device)
    given = [tensor for tensor in operation.inputs if tensor.op.device]
    others = [tensor for tensor in given if place_of(tensor.op.device) != here]
    sources = {place_of(tensor.op.device) for tensor in given}
    if not others or (operation.type in _JOINS and len(sources) < 2):
        return None
    return _bytes_of(others)


def _bytes_of(tensors: Any) -> int | None:
    found = [t for t in tensors if t.dtype not in (tf.resource, tf.string, tf.variant)]
    if not all(t.shape.is_fully_defined() for t in found):
        return None
    return sum(t.shape.num_elements() * t.dtype.size for t in found)


def _short(device: str) -> str:
    """A device's name as people say it."""
    spec = tf.DeviceSpec.from_string(device)
    task = "" if spec.job in (None, "localhost") else f"{spec.job} {spec.task} "
    return f"{task}{spec.device_type}:{spec.device_index}"


_Result = TypeVar("_Result")

# What `to_stablehlo` calls every program.
_MODULE = "step"

_ADVICE_FOR_PROFILES = (
    "Perhaps another profiler of this process (TensorBoard's, or a jax.profiler.trace around the "
    "steps) has them: end that one. On GPUs jax needs CUPTI: install jax[cuda12]."
)


class XlaRecorder(Recorder):
    """Has jax profile the devices."""

    def __init__(self, session: XlaSession, lowering: Any = None):
        """Takes the session, and the lowering to name variables by."""
        self._session, self._lowering = session, lowering
        self._profiler = Profiler()
        self._pending: list[Dispatched] = []
        self._ends: list[int] = []
        self._calls: list[Call] = []
        self._begin = 0

    def start(self) -> None:
        """See `Recorder`."""
        self._session.wait()
        try:
            self._everywhere(self._start_profiler)
        except BaseException:
            self._drop_profile()
            raise
        self._begin = now()
        self._replaced = Replaced(self._session, "dispatch", self._noted)

    def cancel(self) -> None:
        """See `Recorder`."""
        self._replaced.put_back()
        self._drop_profile()

    def stop(self) -> list[Recording]:
        """See `Recorder`."""
        self._replaced.put_back()
        try:
            self._session.wait()
        except BaseException:
            self._drop_profile()
            raise
        self._ends += [now()] * len(self._pending)
        recording = self._everywhere(self._recording)
        if self._session.cores.is_alone:
            return [recording]
        return _gathered(self._session, recording)

    def _everywhere(self, work: Callable[[], _Result]) -> _Result:
        """Returns what a function returns; an error of one process is one of all."""
        try:
            return self._session.cores.together(work)
        except OtherProcessError as error:
            raise TimelineError(f"No process has a timeline. {error}") from error

    def _start_profiler(self) -> None:
        try:
            self._profiler.start()
        except RuntimeError as error:
            raise TimelineError(
                f"jax cannot begin a profile: {error}. {_ADVICE_FOR_PROFILES}"
            ) from error

    def _drop_profile(self) -> None:
        # What ends the block is worth more than what the profiler says.
        with contextlib.suppress(RuntimeError):
            self._profiler.stop()

    def _recording(self) -> Recording:
        try:
            profile = self._profiler.stop()
        except RuntimeError as error:  # jax 0.4 tells only now that another profiler runs
            raise TimelineError(
                f"jax has no profile: {first_line(error)}. {_ADVICE_FOR_PROFILES}"
            ) from error
        try:
            data = profile_data(profile)
        except ValueError as error:
            raise TimelineError(
                f"The profile of jax, of {len(profile):,} bytes, cannot be read: "
                f"{first_line(error)}. Perhaps it was cut off: record fewer steps."
            ) from error
        return check_recorded(self._recorded(data), _ADVICE_FOR_PROFILES)

    def _noted(self, dispatch: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Dispatched:
            before = self._session.steps
            step = timed(self._calls, "dispatch", lambda: dispatch(*args, **kwargs))
            if self._session.steps == before:
                return step  # the program did not run
            self._pending.append(step)
            Replaced(step, "result", lambda result: lambda: self._waited(step, result))
            return step

        return noted

    def _waited(self, step: Dispatched, result: Any) -> Any:
        value = timed(self._calls, "wait for the step", result)
        if step in self._pending:
            self._pending.remove(step)
            self._ends.append(now())
        return value

    def _recorded(self, profile: Any) -> Recording:
        session = self._session
        cores = session.cores
        rows = list_collectives(session.program, lowering=self._lowering).rows
        operations = operations_of(
            [(compiled_hlo(p.program.executable), p.replica) for p in session.compiled], rows
        )
        ordinals = [_ordinal(device) for device in cores.local_devices]
        ran = leaves(read_profile(profile, _MODULE, ordinals), operations.inside)
        ran = until_used(ran, operations.users)
        events = tuple(
            Event(
                cores.local[one.core],
                operations.name.get(one.operation, one.operation),
                "collective" if one.operation in operations.collective else "compute",
                one.begin,
                one.end,
            )
            for one in ran
        )
        last: dict[int, int] = {}
        for one in ran:
            last[one.execution] = max(last.get(one.execution, 0), one.end)
        # The devices know when a step ended. Without them it is when its result was there.
        ends, marks = self._ends, events
        if len(last) == len(self._ends):
            ends = sorted(last.values())
            # A core may be in the next step before another one has ended this one.
            marks = tuple(
                dataclasses.replace(event, begin=last[one.execution] - 1)
                for event, one in zip(events, ran)
                if event.kind == "collective"
            )
        of_updates = sums_of_updates(operations.facts, session.program.graph)
        steps = steps_until(self._begin, ends, marks, of_updates)
        process = cores.local_devices[0].process_index
        names = {core: f"core {core}" for core in cores.local}
        calls = tuple(self._calls)
        return Recording("xla", process, names, steps, events, operations.facts, calls)


def _ordinal(device: Any) -> int:
    """What a profile calls a device."""
    found = getattr(device, "local_hardware_id", None)
    return device.id if found is None or device.platform == "cpu" else found


def _gathered(session: XlaSession, recording: Recording) -> list[Recording]:
    """The recordings of all processes, on each of them."""
    cores = session.cores
    mine = np.frombuffer(recording.to_json().encode(), np.uint8)
    count = len(cores.local)
    (sizes,) = cores.gather([[np.array(len(mine))] * count])
    padded = np.zeros(int(max(sizes)), np.uint8)
    padded[: len(mine)] = mine
    # A part of it for each core: every core's array has one shape.
    parts = np.array_split(np.pad(padded, (0, -len(padded) % count)), count)
    (gathered,) = cores.gather([parts])
    texts: dict[int, list[np.ndarray]] = {}
    length: dict[int, int] = {}
    for core, device in enumerate(cores.devices):
        texts.setdefault(device.process_index, []).append(gathered[core])
        length[device.process_index] = int(sizes[core])
    return [
        Recording.from_json(np.concatenate(texts[p]).tobytes()[: length[p]].decode())
        for p in sorted(texts)
    ]
