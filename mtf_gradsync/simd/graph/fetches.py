"""Checks whether a fetch can reach a tensor of a program."""

from __future__ import annotations

from mtf_gradsync.simd.graph.facts import GraphFacts


def check_alive_outside(facts: GraphFacts, name: str, number: int) -> None:
    """Raises an error for what exists only inside a loop or conditional, and cannot be fetched.

    Args:
      facts: the graph's facts.
      name: a node's name.
      number: number of its output, or `CONTROL` for the node itself.

    Raises:
      ValueError: when it stands in a loop or conditional.
    """
    if facts.context_of_output(name, number):
        raise ValueError(
            f"{name!r} cannot be fetched: it stands inside a loop or conditional of the program. "
            "Fetch what the loop or conditional returns."
        )
