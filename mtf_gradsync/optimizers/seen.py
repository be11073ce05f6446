"""Gradients at a place of a stack of wrappers, remembered for who asks what became of them."""

from __future__ import annotations

from typing import NamedTuple, Sequence

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.step import Branch, Plan


class Summed(NamedTuple):
    """Gradients before and after they were summed over the shards.

    Attributes:
      parts: pending or per shard.
      sums: their sums, whole or in parts that processors share out.
    """

    parts: Seen
    sums: Seen


class Seen(NamedTuple):
    """Gradients that came by.

    Attributes:
      grads: mtf tensors, at least one.
      branch: the branch that they can be used in; None where all steps have them.
    """

    grads: list[mtf.Tensor]
    branch: Branch | None


def seen_now(grads: Sequence[mtf.Tensor | None]) -> Seen | None:
    """Remembers gradients; None where there are none."""
    present = [g for g in grads if g is not None]
    if not present:
        return None
    return Seen(present, Plan.of(present[0].graph).open_branch)
