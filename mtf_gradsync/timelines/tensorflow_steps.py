"""Records steps that a ``tf.Session`` runs: of a placement mesh, or on CPU replicas."""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.mesh.devices import place_of
from mtf_gradsync.simd.collectives import list_collectives
from mtf_gradsync.simd.cpu_replicas import CpuReplicaSession
from mtf_gradsync.simd.facts import Branch, GraphFacts
from mtf_gradsync.timelines.events import (
    Call,
    Collective,
    Event,
    Kind,
    Recording,
    check_recorded,
    model_name,
)
from mtf_gradsync.timelines.recorder import (
    Recorder,
    Replaced,
    now,
    steps_until,
    sums_of_updates,
    timed,
)

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
                            joined, None, any(isinstance(c, Branch) for c in context)
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
