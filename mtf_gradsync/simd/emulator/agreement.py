"""Checks that cores agree about a branch or one more loop iteration.

A collective inside a branch needs its whole group there, and a write to a variable that all cores
share needs all of them: one core makes it for all. Where their predicates differ a TPU hangs, so
every such predicate is compared within its group before it is used.
"""

from __future__ import annotations

import re
from typing import Any, Iterable, NamedTuple

from mtf_gradsync.simd.errors import BranchDivergenceError
from mtf_gradsync.simd.graph.collective_ops import Collective, connected
from mtf_gradsync.simd.graph.effects import Effects
from mtf_gradsync.simd.graph.facts import Context, GraphFacts, Loop


class Meeting(NamedTuple):
    """A collective or a write to a shared variable; each group has to reach it together."""

    name: str
    groups: tuple[tuple[int, ...], ...]
    context: Context


def find_meetings(
    facts: GraphFacts, collectives: dict[str, Collective], effects: Effects
) -> list[Meeting]:
    """Finds the operations that several cores of a graph's programs have to reach together."""
    meetings = [Meeting(c.name, c.groups, c.context) for c in collectives.values()]
    for name in facts.order:
        if name in effects.shared_writes:
            cores = tuple(range(facts.num_replicas[facts.cluster[name]]))
            meetings.append(Meeting(name, (cores,), facts.context[name]))
    return meetings


def frame_leaders(meetings: Iterable[Meeting]) -> dict[tuple[str, int], int]:
    """Returns (loop, core) -> the core whose frame it shares, where cores meet inside the loop.

    Cores that meet there iterate together in one frame. Others need one of their own: in a branch
    that only some groups take, a frame is either alive or dead as a whole.
    """
    groups: dict[str, list[tuple[int, ...]]] = {}
    for meeting in meetings:
        for around in meeting.context:
            if isinstance(around, Loop):
                groups.setdefault(around.frame, []).extend(meeting.groups)
    return {
        (frame, core): cores[0]
        for frame, found in groups.items()
        for cores in connected(found)
        for core in cores
    }


class Agreement(NamedTuple):
    """One predicate that one group of cores has to agree on."""

    kind: str  # "conditional" or "while loop"
    predicate: str  # in the user's graph, as a NodeDef spells an input
    group: tuple[int, ...]
    meetings: list[str]  # names of the operations that need it


def find_agreements(facts: GraphFacts, meetings: Iterable[Meeting]) -> dict[str, list[Agreement]]:
    """Finds what groups of more than one core have to agree on, by predicate."""
    found: dict[tuple[str, tuple[int, ...]], Agreement] = {}
    for meeting in meetings:
        for around in meeting.context:
            if isinstance(around, Loop):
                kind, predicate = "while loop", facts.node[facts.condition_of[around]].input[0]
            else:
                kind, predicate = "conditional", around.predicate
            for group in meeting.groups:
                if len(group) < 2:
                    continue
                key = (predicate, tuple(sorted(group)))
                if key not in found:
                    found[key] = Agreement(kind, predicate, key[1], [])
                found[key].meetings.append(meeting.name)
    by_predicate: dict[str, list[Agreement]] = {}
    for agreement in found.values():
        by_predicate.setdefault(agreement.predicate, []).append(agreement)
    return by_predicate


def divergence_of(error: Any, checks: dict[str, Agreement]) -> BranchDivergenceError | None:
    """Returns the divergence that an ``InvalidArgumentError`` reports; None for another error.

    `checks`: name of each comparing operation -> what it compares.
    """
    name = error.op.name if error.op is not None else None
    if name not in checks:
        return None
    agreement = checks[name]
    values = re.search(r"assertion failed: \[([01 ]*)\]", error.message)
    if values is None:
        return None
    return BranchDivergenceError(
        agreement.kind,
        agreement.predicate,
        dict(zip(agreement.group, (v == "1" for v in values.group(1).split()))),
        agreement.meetings,
    )
