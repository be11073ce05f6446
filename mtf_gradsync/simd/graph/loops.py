"""Counts the iterations of while loops, as far as the graph determines them."""

from __future__ import annotations

import math

from mtf_gradsync.simd.graph.facts import Context, GraphFacts, Loop


def turns_in(facts: GraphFacts, context: Context) -> int | None:
    """Returns how often a step runs what is in a context; None if the graph does not say."""
    turns = 1
    for loop in context:
        if isinstance(loop, Loop):
            count = _turns(facts, loop)
            if count is None:
                return None
            turns *= count
    return turns


def _turns(facts: GraphFacts, loop: Loop) -> int | None:
    """Returns how often a loop runs, if it counts from one constant to another by a third."""
    test = facts.inputs(facts.condition_of[loop])[0][0]
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


def _step(facts: GraphFacts, name: str) -> float | None:
    """Returns the constant that an addition adds, or None."""
    if facts.node[name].op not in ("Add", "AddV2"):
        return None
    values = [facts.constant(source) for source, number in facts.inputs(name) if number >= 0]
    found = [float(v) for v in values if v is not None and v.ndim == 0]
    return found[0] if len(found) == 1 else None
