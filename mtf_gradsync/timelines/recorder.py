"""What records the steps of one runtime."""

from __future__ import annotations

import abc
import bisect
import re
import time
from typing import AbstractSet, Any, Callable, Iterable, Mapping, NamedTuple, Sequence

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.optimizers.state.variables import STAND_INS
from mtf_gradsync.simd.traffic import CommunicationRow
from mtf_gradsync.timelines.events import Call, Collective, Event, Recording, Step, model_name
from mtf_gradsync.xla.hlo import read_module
from mtf_gradsync.xla.replica_program import ReplicaProgram
from mtf_gradsync.xla.topology.compiled import COLLECTIVES, HloCollective, find_hlo_collectives


class Recorder(abc.ABC):
    """Records steps between `start` and `stop`."""

    @abc.abstractmethod
    def start(self) -> None:
        """Begins."""

    @abc.abstractmethod
    def stop(self) -> list[Recording]:
        """Ends, and returns what each process recorded; the session is as it was before."""

    @abc.abstractmethod
    def cancel(self) -> None:
        """Ends without a recording."""


class Replaced:
    """A method of one object, replaced until it is put back: what is not recorded costs nothing."""

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any]):
        """Puts what `make` returns for the bound method in the method's place."""
        self._owner, self._name = owner, name
        # Not None where another recording has replaced it.
        self._own = vars(owner).get(name)
        setattr(owner, name, make(getattr(owner, name)))

    def put_back(self) -> None:
        """Puts the method back."""
        if self._own is None:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._own)


def now() -> int:
    """Nanoseconds since the epoch, as profiles count."""
    return time.time_ns()


def steps_until(
    begin: int,
    ends: Iterable[int],
    events: Iterable[Event],
    of_updates: AbstractSet[str],
) -> tuple[Step, ...]:
    """Steps, from when the first one began and each of them ended.

    A step updated the variables if it ran one of `of_updates`. Without any it is not known.
    """
    moments = [begin, *sorted(ends)]
    at = sorted(e.begin for e in events if e.name in of_updates)

    def is_update(first: int, last: int) -> bool | None:
        ran = bisect.bisect_left(at, first) < bisect.bisect_left(at, last)
        return ran if of_updates else None

    return tuple(Step(a, b, is_update(a, b)) for a, b in zip(moments, moments[1:]))


def sums_of_updates(collectives: Mapping[str, Collective], graph: tf.Graph) -> set[str]:
    """The collectives in branches whose results become part of what the program trains.

    A wrapper's own values are not that: it may sum some in the steps that make no update.
    """
    keys = tf.GraphKeys
    collections = (keys.GLOBAL_VARIABLES, keys.LOCAL_VARIABLES, STAND_INS, keys.TRAINABLE_VARIABLES)
    *all_names, trained = ({v.op.name for v in graph.get_collection(key)} for key in collections)
    others = set().union(*all_names) - trained
    return {
        name
        for name, one in collectives.items()
        if one.is_conditional and set(one.variables or ()) - others
    }


def timed(calls: list[Call], name: str, work: Callable[[], Any]) -> Any:
    """Does something, and adds to a list that the host did it."""
    began = now()
    try:
        return work()
    finally:
        calls.append(Call(name, began, now()))


_AROUND_OTHERS = ("while", "conditional", "call")
# "x/(a:b)" is what a compiler makes of x/a and x/b, and "(a:b)" what packs a and b.
_MERGED = re.compile(r"^([^()]*)\(([^()]*)\)$")


class Operations(NamedTuple):
    """The operations of compiled programs, by their names there where nothing else is said."""

    name: dict[str, str]  # the name in the model's graph, where it is known
    collective: set[str]
    inside: dict[str, set[str]]  # of loops, branches and calls: the operations in them
    users: dict[str, set[str]]  # the operations that take a result
    facts: dict[str, Collective]  # by names in the model's graph


def operations_of(
    programs: Iterable[tuple[bytes, ReplicaProgram]], rows: Sequence[CommunicationRow]
) -> Operations:
    """Reads compiled programs; `rows` are the list of their collectives.

    A program is a serialized ``HloModuleProto``, with the core's program that it was made of.
    """
    found = Operations({}, set(), {}, {}, {})
    by_name = {row.name: row for row in rows}
    for hlo, replica in programs:
        module = read_module(hlo)
        exchanges = {c.name: c for c in find_hlo_collectives(hlo)}
        nodes = {node.name for node in replica.graph_def.node}
        computations = {c.id: c for c in module.computations}
        inner = {c.id: {i.name for i in c.instructions} for c in module.computations}
        roots = {
            c.id: next((i for i in c.instructions if i.id == c.root_id), None)
            for c in module.computations
        }
        for computation in computations.values():
            names = {i.id: i.name for i in computation.instructions}
            for instruction in computation.instructions:
                for operand in instruction.operand_ids:
                    found.users.setdefault(names[operand], set()).add(instruction.name)
                called = list(instruction.called_computation_ids)
                name = instruction.metadata.op_name
                root = roots[called[0]] if called else None
                if not name and root is not None:
                    name = root.metadata.op_name
                shown = _name(name, nodes) or instruction.name
                found.name[instruction.name] = shown
                kind = re.sub("-(start|done|update)$", "", instruction.opcode)
                if kind in COLLECTIVES:
                    found.collective.add(instruction.name)
                    # What begins and ends apart has its bytes where it begins.
                    if instruction.name in exchanges or shown not in found.facts:
                        exchange = exchanges.get(instruction.name)
                        found.facts[shown] = _facts(_parts(name, nodes), exchange, by_name)
                if instruction.opcode in _AROUND_OTHERS:
                    found.inside.setdefault(instruction.name, set()).update(
                        *(inner[c] for c in called)
                    )
    return found


def _name(name: str, nodes: AbstractSet[str] = frozenset()) -> str:
    """A name as the model's graph has it."""
    names = [model_name(part) for part in _parts(name, nodes)]
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _parts(name: str, nodes: AbstractSet[str] = frozenset()) -> list[str]:
    match = _MERGED.match(name)
    parts = [match[1] + part for part in match[2].split(":")] if match else [name]
    return [_node(part, nodes) for part in parts]


def _node(name: str, nodes: AbstractSet[str]) -> str:
    """The node of a name, which begins with the branches and loops around it: cond/cond_1/node."""
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
