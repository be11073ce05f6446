"""Counts the iterations of while loops, as far as the graph determines them."""

from __future__ import annotations

import math
from typing import Sequence

from mtf_gradsync.simd.graph.facts import GraphFacts


def loop_turns(facts: GraphFacts, frame: str) -> int | None:
    """Returns how often a loop runs, if it counts from one constant to another by a third.

    None where the graph does not determine it that plainly.
    """
    condition = next(
        name
        for name in facts.order
        if facts.node[name].op == "LoopCond" and facts.loop_of(name).frame == frame
    )
    test = facts.inputs(condition)[0][0]
    if facts.node[test].op != "Less":
        return None
    counter, limit = (source for source, _ in facts.inputs(test)[:2])
    end = facts.constant(limit)
    if facts.node[counter].op != "Merge" or end is None:
        return None
    first, step = None, None
    for source, _ in facts.inputs(counter):
        if facts.node[source].op == "Enter":
            first = facts.constant(source)
        elif facts.node[source].op == "NextIteration":
            step = _step(facts, facts.inputs(source)[0][0])
    if first is None or not step or step < 0:
        return None
    return max(0, math.ceil((float(end) - float(first)) / step))


def product_of_turns(counts: Sequence[int | None]) -> int | None:
    """Returns how often the innermost of nested loops runs; None if one of the counts is None."""
    known = [count for count in counts if count is not None]
    return math.prod(known) if len(known) == len(counts) else None


def _step(facts: GraphFacts, name: str) -> float | None:
    """Returns the constant that an addition adds, or None."""
    if facts.node[name].op not in ("Add", "AddV2"):
        return None
    values = [facts.constant(source) for source, number in facts.inputs(name) if number >= 0]
    found = [float(v) for v in values if v is not None and v.ndim == 0]
    return found[0] if len(found) == 1 else None
