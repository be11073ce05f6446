"""Records the steps on XLA devices, by profiles and compiled programs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from typing import AbstractSet, Any, Callable, Iterable, Iterator, NamedTuple, Sequence, TypeVar

from mtf_gradsync.runtimes._common import first_line
from mtf_gradsync.runtimes._private.jax import compiled_hlo
from mtf_gradsync.runtimes.simd.collectives import list_collectives
from mtf_gradsync.runtimes.simd.communication import CommunicationRow
from mtf_gradsync.runtimes.xla.gathering import OtherProcessError, whole_texts_of_all
from mtf_gradsync.runtimes.xla.hlo import read_module
from mtf_gradsync.runtimes.xla.hlo_collectives import COLLECTIVES, HloCollective, collectives_of
from mtf_gradsync.runtimes.xla.replica_program import ReplicaProgram
from mtf_gradsync.runtimes.xla.xla_session import Dispatched, XlaSession
from mtf_gradsync.tools._private.profiles import Profiler, profile_data
from mtf_gradsync.tools.timelines.jax_profiles import cut_at_first_use, innermost_runs, read_profile
from mtf_gradsync.tools.timelines.recording import (
    Call,
    Collective,
    Event,
    Recording,
    TimelineError,
    check_recorded,
    method_replaced,
    model_name,
    now,
    record_call,
    steps_until,
    sums_of_updates,
)

_Result = TypeVar("_Result")
# What `to_stablehlo` calls every program.
_MODULE = "step"
_ADVICE = (
    "Perhaps another profiler of this process (TensorBoard's, or a jax.profiler.trace around the "
    "steps) is running: end that profiler. On GPUs jax needs CUPTI: install jax[cuda12]."
)


@contextlib.contextmanager
def record_xla(session: XlaSession, lowering: Any) -> Iterator[list[Recording]]:
    """Records the steps of a session on XLA devices: jax profiles the devices inside the block.

    Yields an empty list. At the end of the block, the recordings of all processes are added to this
    list. Each call of the session's method ``dispatch`` is recorded as work of the host. `lowering`
    is the program's lowering, from which the recordings get the variables' names; it may be None.
    """
    profiler = Profiler()
    pending: list[Dispatched] = []
    ends: list[int] = []
    calls: list[Call] = []

    def noted(dispatch: Any) -> Any:
        def dispatch_noted(*args: Any, **kwargs: Any) -> Dispatched:
            before = session.steps
            step: Any = record_call(calls, "dispatch", lambda: dispatch(*args, **kwargs))
            if session.steps > before:  # the program ran
                pending.append(step)
                step.result = functools.partial(waited, step, step.result)
            return step

        return dispatch_noted

    def waited(step: Dispatched, result: Any) -> Any:
        value = record_call(calls, "wait for the step", result)
        if step in pending:
            pending.remove(step)
            ends.append(now())
        return value

    session.wait()
    found: list[Recording] = []
    try:
        _on_all_processes(session, lambda: _start(profiler))
        begin = now()
        with method_replaced(session, "dispatch", noted):
            yield found
        session.wait()
        ends += [now()] * len(pending)
        recording = _on_all_processes(
            session,
            lambda: check_recorded(
                _recording(session, lowering, _end_profile(profiler), begin, ends, calls), _ADVICE
            ),
        )
        if session.cores.is_alone:
            found.append(recording)
        else:
            found += map(Recording.from_json, whole_texts_of_all(recording.to_json()))
    finally:
        # An error that ends the block matters more than an error of the profiler.
        with contextlib.suppress(RuntimeError):
            profiler.stop()


def _on_all_processes(session: XlaSession, work: Callable[[], _Result]) -> _Result:
    """Calls `work`, and waits for the functions of all processes; returns the result of `work`.

    All processes of the session have to call this function, each with a function of its own. If
    `work` raises an exception on this process, this exception is raised. If a function raises an
    exception on another process only, a TimelineError is raised here.
    """
    try:
        return session.cores.call_on_all_processes(work)
    except OtherProcessError as error:
        raise TimelineError(f"No process has a timeline. {error}") from error


def _start(profiler: Profiler) -> None:
    try:
        profiler.start()
    except RuntimeError as error:
        raise TimelineError(f"jax cannot begin a profile: {error}. {_ADVICE}") from error


def _end_profile(profiler: Profiler) -> Any:
    """Ends the profile that `profiler` has begun; returns the parsed profile.

    Raises a TimelineError if jax has no profile, or if the profile cannot be read.
    """
    try:
        profile = profiler.stop()
    except RuntimeError as error:  # jax 0.4 tells only now that another profiler runs
        raise TimelineError(f"jax has no profile: {first_line(error)}. {_ADVICE}") from error
    try:
        return profile_data(profile)
    except ValueError as error:
        raise TimelineError(
            f"The profile of jax, of {len(profile):,} bytes, cannot be read: "
            f"{first_line(error)}. Perhaps it was cut off: record fewer steps."
        ) from error


def _recording(
    session: XlaSession,
    lowering: Any,
    profile: Any,
    begin: int,
    ends: list[int],
    calls: Sequence[Call],
) -> Recording:
    """Makes the recording of this process's steps from a profile of jax.

    Args:
      session: the session that made the steps.
      lowering: the program's lowering, for the variables' names; may be None.
      profile: the profile, which `profile_data` has parsed: a ``ProfileData`` of jax.
      begin: when the first step began, in nanoseconds since the epoch.
      ends: when the host had the result of each step. If the profile shows when each step ended on
        the devices, these times are used in place of `ends`.
      calls: the work of the host.
    """
    cores = session.cores
    rows = list_collectives(session.program, lowering=lowering).rows
    operations = operations_of(
        [(compiled_hlo(p.program.executable), p.replica) for p in session.compiled], rows
    )
    ordinals = [_ordinal(device) for device in cores.local_devices]
    ran = innermost_runs(read_profile(profile, _MODULE, ordinals), operations.inside)
    ran = cut_at_first_use(ran, operations.users)
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
    # Devices know when a step ended. Without their times it ends when its result is there.
    marks = events
    if len(last) == len(ends):
        ends = sorted(last.values())
        # A core may be in the next step before another one has ended this one.
        marks = tuple(
            dataclasses.replace(event, begin=last[one.execution] - 1)
            for event, one in zip(events, ran)
            if event.kind == "collective"
        )
    of_updates = sums_of_updates(operations.facts, session.program.graph)
    steps = steps_until(begin, ends, marks, of_updates)
    process = cores.local_devices[0].process_index
    names = {core: f"core {core}" for core in cores.local}
    return Recording("xla", process, names, steps, events, operations.facts, tuple(calls))


def _ordinal(device: Any) -> int:
    """Returns the number by which profiles of jax name a jax device."""
    found = getattr(device, "local_hardware_id", None)
    return device.id if found is None or device.platform == "cpu" else found


_AROUND_OTHERS = ("while", "conditional", "call")
# "x/(a:b)" is what a compiler makes of x/a and x/b, and "(a:b)" what packs a and b.
_MERGED = re.compile(r"^([^()]*)\(([^()]*)\)$")


class Operations(NamedTuple):
    """The operations of compiled programs: names, kinds, users and bytes.

    Operations are named as in the compiled program. Only in the values of `name` and the keys of
    `facts` are they named as in the model's graph.
    """

    name: dict[str, str]  # the name in the model's graph, where it is known
    collective: set[str]
    inside: dict[str, set[str]]  # of loops, branches and calls: the operations in them
    users: dict[str, set[str]]  # the operations that take a result
    facts: dict[str, Collective]  # by names in the model's graph


def operations_of(
    programs: Iterable[tuple[bytes, ReplicaProgram]], rows: Sequence[CommunicationRow]
) -> Operations:
    """Finds the names, kinds, users and bytes of operations of compiled programs.

    Each of `programs` is a pair: a compiled program, as a serialized ``HloModuleProto``, and the
    core's program from which it was compiled. `rows` lists the collectives of the model's graph and
    the variables that they are for.
    """
    found = Operations({}, set(), {}, {}, {})
    by_name = {row.name: row for row in rows}
    for hlo, replica in programs:
        module = read_module(hlo)
        exchanges = {c.name: c for c in collectives_of(module)}
        nodes = {node.name for node in replica.graph_def.node}
        for instruction in module.instructions:
            for operand in instruction.operands:
                found.users.setdefault(operand.name, set()).add(instruction.name)
            called = instruction.called
            name = instruction.proto.metadata.op_name
            if not name and called and called[0].root is not None:
                name = called[0].root.proto.metadata.op_name
            shown = _shown_name(name, nodes) or instruction.name
            found.name[instruction.name] = shown
            if instruction.operation in COLLECTIVES:
                found.collective.add(instruction.name)
                # A collective with a separate end has its bytes in the instruction that begins it.
                if instruction.name in exchanges or shown not in found.facts:
                    exchange = exchanges.get(instruction.name)
                    found.facts[shown] = _facts(_parts(name, nodes), exchange, by_name)
            if instruction.opcode in _AROUND_OTHERS:
                inner = {one.name for computation in called for one in computation.instructions}
                found.inside.setdefault(instruction.name, set()).update(inner)
    return found


def _shown_name(name: str, nodes: AbstractSet[str] = frozenset()) -> str:
    """Returns the name to show for an operation of a compiled program: its name in the model.

    `name` is the operation's name in the metadata of the compiled program, and `nodes` are the
    names of the graph's nodes. The compiler may merge several operations of the graph into one. The
    result then has the first operation's name and the number of the others, as in "x and 2 more".
    """
    names = [model_name(part) for part in _parts(name, nodes)]
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _parts(name: str, nodes: AbstractSet[str] = frozenset()) -> list[str]:
    match = _MERGED.match(name)
    parts = [match[1] + part for part in match[2].split(":")] if match else [name]
    return [_node_name(part, nodes) for part in parts]


def _node_name(name: str, nodes: AbstractSet[str]) -> str:
    """Returns the end of `name` that names a node of the graph.

    The names of branches and loops in front of the node's name are left out. `nodes` are the names
    of the graph's nodes. If one of them is "node", the result for the name "cond/cond_1/node" is
    "node". If `name` does not end with the name of a node, `name` is returned unchanged.
    """
    rest = name
    while rest and rest not in nodes:
        rest = rest.partition("/")[2]
    return rest or name


def _facts(
    parts: Sequence[str], exchange: HloCollective | None, rows: dict[str, Any]
) -> Collective:
    known = [rows[part] for part in parts if part in rows]
    variables = None
    if known and all(row.variables is not None for row in known):
        variables = tuple(dict.fromkeys(v for row in known for v in row.variables))
    if exchange is None:
        return Collective(None, variables)
    return Collective(exchange.bytes_per_core, variables, exchange.is_conditional)
