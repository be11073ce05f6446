"""Records the steps that TensorFlow runs: on placement meshes and on CPU replicas."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Sequence, Tuple

from mtf_gradsync.extension import place_of, tf
from mtf_gradsync.runtimes.simd.collectives import list_collectives
from mtf_gradsync.runtimes.simd.communication import bytes_of
from mtf_gradsync.runtimes.simd.graph_facts import CalledBranch, GraphFacts
from mtf_gradsync.runtimes.simd.program import CpuReplicaSession
from mtf_gradsync.tools.timelines.recording import (
    Call,
    Collective,
    Event,
    Kind,
    Recording,
    check_recorded,
    method_replaced,
    model_name,
    now,
    record_call,
    steps_until,
    sums_of_updates,
)

# Operations that put values of several cores together, on a placement mesh.
_JOINS = frozenset(["Add", "AddN", "AddV2", "Concat", "ConcatV2", "Maximum", "Minimum", "Pack"])
_COPIES = frozenset(["Identity", "Snapshot"])
_OWN_COLLECTIVES = ("Collective", "Nccl")
_NO_NUMBERS = (tf.resource, tf.string, tf.variant)
_ADVICE = (
    "Profiles of TensorFlow are switched off for this session, or another session runs the steps: "
    "give gs.timeline the session whose method `run` makes the steps."
)

# What a step ran: the cores, events of each run, and collectives by the names of their events.
_Read = Tuple[Dict[int, str], List[List[Event]], Dict[str, Collective]]


def record_replicas(session: CpuReplicaSession, lowering: Any) -> ContextManager[list[Recording]]:
    """Returns a context manager that records the steps of a session on CPU replicas.

    The context manager gives an empty list, and at the end of the ``with`` block it adds the
    recording to this list. `lowering` is the program's lowering, from which the recording gets the
    variables' names; it may be None.
    """
    emulated = session.emulated

    def read(runs: Sequence[Any]) -> _Read:
        rows = list_collectives(session.source, lowering=lowering).rows
        sums = emulated.groups_of_sums()
        collectives = {
            row.name: Collective(row.bytes_per_core, row.variables, row.is_conditional)
            for row in rows
        }
        events = []
        for stats in runs:
            found = []
            for node in (n for device in stats.dev_stats for n in device.node_stats):
                place, times = emulated.place_of(node.node_name), _begin_and_end(node)
                if place is None or times is None:
                    continue
                core, name = place
                collective = _collective_of(name, collectives)
                if not collective:
                    found.append(Event(core, model_name(name), "compute", *times))
                elif not (name == collective and sums.get(name)):  # a core's view of its sum
                    # One sum is made for all cores of a group, which wait for it.
                    group = next((g for g in sums.get(collective, ()) if core in g), (core,))
                    shown = model_name(collective)
                    found += [Event(one, shown, "collective", *times) for one in group]
            events.append(found)
        count = max(emulated.num_replicas.values())
        cores = {core: f"core {core}" for core in range(count)}
        return cores, events, {model_name(name): one for name, one in collectives.items()}

    return _record_session(
        session.tf_session, session.source, "cpu_replicas", "SOFTWARE_TRACE", read
    )


def record_mesh(session: Any, is_remote: bool) -> ContextManager[list[Recording]]:
    """Returns a context manager that records the steps of a TensorFlow session on a placement mesh.

    The context manager gives an empty list, and at the end of the ``with`` block it adds the
    recording to this list. The cores of the recording are the devices on which the session's graph
    places operations. `is_remote` says whether the steps run on a ``tf.train.Server``.
    """
    graph = session.graph

    def read(runs: Sequence[Any]) -> _Read:
        operations = {op.name: op for op in graph.get_operations()}
        named = {op.device for op in operations.values() if op.device}
        places = sorted({place_of(device) for device in named}, key=repr)
        number = {place: core for core, place in enumerate(places)}
        facts = GraphFacts(graph.as_graph_def())
        collectives: dict[str, Collective] = {}
        seen: dict[int, str] = {}
        events = []
        for stats in runs:
            found = []
            for device in stats.dev_stats:
                core = number.get(place_of(device.device)) if number else 0
                if core is None:
                    continue
                for node in device.node_stats:
                    operation, times = operations.get(node.node_name), _begin_and_end(node)
                    # An operation that names no device runs on the host, beside the mesh.
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
        return (
            {core: _short_device_name(device) for core, device in sorted(seen.items())},
            events,
            collectives,
        )

    # A server gives times for FULL_TRACE only. In this process that level gives no other times of
    # CPUs, and begins a profiler that logs lines in every step.
    level = "FULL_TRACE" if is_remote else "SOFTWARE_TRACE"
    return _record_session(session, graph, "placement_mesh", level, read)


@contextlib.contextmanager
def _record_session(
    session: Any, graph: tf.Graph, runtime: str, level: str, read: Callable[[Sequence[Any]], _Read]
) -> Iterator[list[Recording]]:
    """Records the steps of a ``tf.Session``: traces each call of ``run`` inside the block.

    Yields an empty list. At the end of the block, the recording is added to this list.

    Args:
      session: the session.
      graph: the model's graph, whose collections tell which variables are trained.
      runtime: the runtime's name, which the recording gets.
      level: TensorFlow's name for how detailed the traces are, such as "SOFTWARE_TRACE".
      read: a function that takes the ``StepStats`` of each call of ``run``. It returns the names of
        the cores by number, a list of events for each call, and the collectives by name.
    """
    runs: list[tuple[int, Any]] = []  # the end of each, and its statistics
    calls: list[Call] = []

    def traced(run: Any) -> Any:
        def run_traced(
            fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
        ) -> Any:
            asked = tf.RunOptions()
            if options is not None:
                asked.CopyFrom(options)
            asked.trace_level = getattr(tf.RunOptions, level)
            metadata = tf.RunMetadata() if run_metadata is None else run_metadata
            values = record_call(
                calls,
                "session.run",
                lambda: run(fetches, feed_dict, options=asked, run_metadata=metadata),
            )
            runs.append((now(), metadata.step_stats))
            return values

        return run_traced

    found: list[Recording] = []
    begin = now()
    with method_replaced(session, "run", traced):
        yield found
    cores, events, collectives = read([stats for _, stats in runs])
    # Other calls, of a counter or of an evaluation, belong to the host's time.
    ends = [end for (end, _), ran in zip(runs, events) if ran]
    flat = tuple(event for ran in events for event in ran)
    steps = steps_until(begin, ends, flat, sums_of_updates(collectives, graph))
    recording = Recording(runtime, 0, cores, steps, flat, collectives, tuple(calls))
    found.append(check_recorded(recording, _ADVICE))


def _begin_and_end(node: Any) -> tuple[int, int] | None:
    """Returns when an operation began and ended, in nanoseconds since the epoch.

    `node` is the ``NodeExecStats`` of the operation. The result is None if the operation did not
    run, for example because the operation is in a branch that was not taken.
    """
    begin = node.all_start_nanos or node.all_start_micros * 1000
    first = node.op_start_rel_nanos or node.op_start_rel_micros * 1000
    last = node.op_end_rel_nanos or node.op_end_rel_micros * 1000
    return (begin + first, begin + last) if last > first else None


def _collective_of(name: str, collectives: dict[str, Collective]) -> str:
    """Returns the name of the collective to which an operation belongs; "" if there is none.

    `name` is the operation's name, and `collectives` has all collectives by name. An operation
    belongs to a collective if it has the collective's name, or if its name begins with this name
    and a slash.
    """
    while name and name not in collectives:
        name = name.rpartition("/")[0]
    return name


def _joined_bytes(operation: tf.Operation) -> int | None:
    """Returns how many bytes an operation takes from other devices; None if it is no collective.

    On a placement mesh, three kinds of operations count as collectives: TensorFlow's own
    collectives, operations that join tensors of several devices, and copies of another device's
    tensor.
    """
    if operation.type.startswith(_OWN_COLLECTIVES):
        return bytes_of(t for t in operation.inputs if t.dtype not in _NO_NUMBERS)
    if not operation.device or operation.type not in _JOINS | _COPIES:
        return None
    here = place_of(operation.device)
    given = [tensor for tensor in operation.inputs if tensor.op.device]
    others = [tensor for tensor in given if place_of(tensor.op.device) != here]
    sources = {place_of(tensor.op.device) for tensor in given}
    if not others or (operation.type in _JOINS and len(sources) < 2):
        return None
    return bytes_of(t for t in others if t.dtype not in _NO_NUMBERS)


def _short_device_name(device: str) -> str:
    """Returns a short name of a device, as in "CPU:3", or "worker 1 CPU:3" in a cluster.

    `device` is TensorFlow's name of the device, with job and task.
    """
    spec = tf.DeviceSpec.from_string(device)
    task = "" if spec.job in (None, "localhost") else f"{spec.job} {spec.task} "
    return f"{task}{spec.device_type}:{spec.device_index}"
