"""Plans a step: the source of each fetch, and the parts of the graph to run."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import numpy as np

from mtf_gradsync._private.tensorflow import with_own_types
from mtf_gradsync.simd.facts import CONTROL, GraphFacts, check_alive_outside, split_input
from mtf_gradsync.xla.devices.outside import Needs, Outside
from mtf_gradsync.xla.processes.cores import Cores


class Place(NamedTuple):
    """The source of a fetch, outside the program or inside."""

    # Outside: an operation or tensor, or one for each core, with "" for a core of another process.
    names: tuple[str, ...] = ()
    inside: str = ""  # a tensor of the program
    # Where the cores to fetch it from are among this process's; None for one of another process.
    positions: tuple[int | None, ...] = ()
    is_list: bool = False  # whether it is one value for each core
    runs_program: bool = False  # whether it is inside the program

    def value(self, values: dict[str, Any]) -> Any:
        """Returns the fetch's value, given all values of a step by name."""
        if self.inside:
            arrays = values[self.inside].arrays
            found = [
                None if p is None else with_own_types(np.asarray(arrays[p]))[()]
                for p in self.positions
            ]
        else:
            found = [values.get(name) for name in self.names] or [None]
        return found if self.is_list else found[0]


class StepPlan(NamedTuple):
    """What a step does for a set of fetches: `first` outside, the program, and `last` outside."""

    places: tuple[Place, ...]
    runs_program: bool
    inside: tuple[str, ...]  # tensors of the program to fetch, sorted
    first: frozenset[str]
    last: frozenset[str]
    needs: Needs  # of `last`

    @classmethod
    def of(cls, places: Sequence[Place], outside: Outside) -> StepPlan:
        """Plans a step."""
        names = {name for place in places for name in place.names if name}
        last = {name for name in names if outside.is_after(name)}
        needs = outside.needs(last)
        inside = {p.inside for p in places if p.inside}
        inside |= {inner for inner, _ in needs.returned.values()}
        first = (names - last) | set(needs.carried.values()) | needs.run_before
        runs_program = bool(last) or any(p.runs_program for p in places)
        return cls(
            tuple(places), runs_program, tuple(sorted(inside)), frozenset(first), frozenset(last),
            needs,
        )  # fmt: skip


def place_of(facts: GraphFacts, program: str, name: str, per_replica: bool, cores: Cores) -> Place:
    """Returns the source of a fetch; raises a ValueError for one in a loop or branch."""
    node_name, number = split_input(name)
    node = facts.node[node_name]
    position = {core: p for p, core in enumerate(cores.local)}
    if node.op == "TPUReplicatedOutput":
        inner, inner_number = facts.inputs(node_name)[number]
        return Place((), f"{inner}:{inner_number}", (position.get(number),), False, True)
    if node.op == "TPUReplicatedInput":
        sources = [f"{n}:{k}" for n, k in facts.inputs(node_name) if k != CONTROL]
        if not per_replica:
            return Place((sources[cores.local[0]],))
        return Place(tuple(s if c in position else "" for c, s in enumerate(sources)), is_list=True)
    if node_name not in facts.cluster:
        return Place((name,))
    check_alive_outside(facts, node_name, number)
    if ":" not in name:
        return Place(runs_program=True)
    wanted = range(facts.num_replicas[program]) if per_replica else cores.local[:1]
    return Place((), name, tuple(position.get(c) for c in wanted), per_replica, True)
