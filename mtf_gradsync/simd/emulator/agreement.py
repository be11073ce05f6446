"""Where the cores of a collective's group have to agree about a branch or one more loop turn.

A collective inside a branch needs its whole group there. Cores that test another value of the
predicate leave the rest of the group waiting: a TPU hangs, and a CPU session fails with an error
that names neither. So every such predicate is compared within its group before it is used.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from mtf_gradsync.simd.errors import BranchDivergenceError
from mtf_gradsync.simd.graph.collective_ops import Collective
from mtf_gradsync.simd.graph.facts import GraphFacts, Loop


class Agreement(NamedTuple):
    """One predicate that one group of cores has to agree on.

    Attributes:
      kind: "conditional" or "while loop".
      predicate: the predicate's name in the user's graph, as a ``NodeDef`` spells an input.
      group: core numbers.
      collectives: names of the collectives that need it.
    """

    kind: str
    predicate: str
    group: tuple[int, ...]
    collectives: list[str]


def find_agreements(
    facts: GraphFacts, collectives: dict[str, Collective]
) -> dict[str, list[Agreement]]:
    """Finds what groups have to agree on.

    Args:
      facts: the graph's facts.
      collectives: its collective operations.

    Returns:
      predicate -> its `Agreement` per group of more than one core.
    """
    loop_predicate = {
        facts.context[name][-1]: facts.node[name].input[0]
        for name in facts.order
        if facts.node[name].op == "LoopCond"
    }
    found: dict[tuple[str, tuple[int, ...]], Agreement] = {}
    for collective in collectives.values():
        for around in collective.context:
            is_loop = isinstance(around, Loop)
            predicate = loop_predicate[around] if is_loop else around.predicate
            for group in collective.groups:
                if len(group) < 2:
                    continue
                key = (predicate, tuple(sorted(group)))
                if key not in found:
                    kind = "while loop" if is_loop else "conditional"
                    found[key] = Agreement(kind, predicate, key[1], [])
                found[key].collectives.append(collective.name)
    by_predicate: dict[str, list[Agreement]] = {}
    for agreement in found.values():
        by_predicate.setdefault(agreement.predicate, []).append(agreement)
    return by_predicate


def divergence_of(error: Any, checks: dict[str, Agreement]) -> BranchDivergenceError | None:
    """Reads a session's error.

    Args:
      error: a ``tf.errors.InvalidArgumentError``.
      checks: name of each comparing operation -> what it compares.

    Returns:
      The divergence that the error stands for, or None when it is another error.
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
        agreement.collectives,
    )
