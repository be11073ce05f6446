"""Errors of SIMD programs."""

from __future__ import annotations

from typing import Any, Sequence

from mtf_gradsync._names import some_of


class UnsupportedProgramError(ValueError):
    """The program has something that cannot run here."""

    @classmethod
    def of(cls, node: Any, problem: str, remedy: str) -> UnsupportedProgramError:
        """Returns the error for one operation; its message names the operation and its type.

        Args:
          node: a ``NodeDef``.
          problem: what is wrong with it, as in "it stands outside every TPU program".
          remedy: what to do, as in "build it inside simd.tpu_program(...)".
        """
        return cls(
            f"Operation {node.name!r} of type {node.op} cannot run: {problem}. To go on, {remedy}."
        )


class BranchDivergenceError(RuntimeError):
    """Cores that have to stay together took different branches; on a TPU they would wait forever.

    Attributes:
      predicate: name of the predicate tensor in the user's graph.
      values: core number -> the predicate's value on that core.
      collectives: names of the operations in the branch or loop that need these cores together:
        collectives, and writes to variables that all cores share.
    """

    def __init__(
        self, kind: str, predicate: str, values: dict[int, bool], collectives: Sequence[str]
    ):
        self.predicate = predicate
        self.values = values
        self.collectives = list(collectives)
        sides = [
            f"{side} on cores {[c for c, v in values.items() if v is side]}"
            for side in (True, False)
        ]
        names = some_of([repr(name) for name in self.collectives])
        super().__init__(
            f"Cores {list(values)} have to come to {names} together, inside a "
            f"{kind}, but its predicate {predicate!r} is {' and '.join(sides)}. On a TPU they "
            "would wait for each other forever. Make the predicate the same on all of these cores, "
            "for example by reducing it over their mesh axes first."
        )
