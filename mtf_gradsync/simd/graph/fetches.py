"""Checks whether a fetch can reach a tensor of a program."""

from __future__ import annotations

from mtf_gradsync.simd.graph.facts import GraphFacts


def check_alive_outside(facts: GraphFacts, name: str, number: int) -> None:
    """Raises ValueError for an output, see `split_input`, that only exists in a loop or branch."""
    if facts.context_of_output(name, number):
        raise ValueError(
            f"{name!r} cannot be fetched: it stands inside a loop or conditional of the program. "
            "Fetch what the loop or conditional returns."
        )
