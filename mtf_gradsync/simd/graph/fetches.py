"""Checks whether a fetch can reach a tensor of a program."""

from __future__ import annotations

from mtf_gradsync.simd.graph.facts import GraphFacts


def check_alive_outside(facts: GraphFacts, name: str, number: int) -> None:
    """Raises a ValueError for what exists only in a loop or conditional, and cannot be fetched.

    `number` is that of an output of the node, or `CONTROL` for the node itself.
    """
    if facts.context_of_output(name, number):
        raise ValueError(
            f"{name!r} cannot be fetched: it stands inside a loop or conditional of the program. "
            "Fetch what the loop or conditional returns."
        )
