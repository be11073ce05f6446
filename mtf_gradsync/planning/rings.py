"""Bytes and hops of a collective over a ring of links, by the standard formulas.

Sources: R. Thakur, R. Rabenseifner and W. Gropp, Optimization of Collective Communication
Operations in MPICH (2005); https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md;
for links between neighbours alone, https://jax-ml.github.io/scaling-book/sharding.
"""

from __future__ import annotations


def bytes_sent(operation: str, members: int, size: float) -> float:
    """Bytes that each member of a ring sends to its neighbour.

    Args:
      operation: HLO's name of the collective, as in "all-reduce".
      members: the number of members of the ring.
      size: bytes that each member puts in.

    Returns:
      The bytes; 0 for one member.

    Raises:
      ValueError: when the collective is not known.
    """
    n = members
    if n < 2:
        return 0.0
    factors = {
        "all-reduce": 2 * (n - 1) / n,
        "reduce-scatter": (n - 1) / n,
        "all-gather": n - 1,  # each puts in its part of the result
        # What goes to the other side of the ring passes every link on its way.
        "all-to-all": max((n - 1) / n, n / 4),
        "collective-permute": 1.0,
        "collective-broadcast": 1.0,
    }
    if operation not in factors:
        raise ValueError(f"There is no formula for {operation!r}; known are {', '.join(factors)}")
    return factors[operation] * size


def bytes_of_chip(operation: str, cores: float, size: float) -> float:
    """Bytes that a chip puts in, some of whose cores put in `size` each.

    What is summed is summed on the chip first. Of the others' data no two parts become one.
    """
    return cores * size if operation in ("all-gather", "all-to-all") else size


def hops(operation: str, members: int) -> int:
    """The number of hops from neighbour to neighbour that follow each other; 0 for one member."""
    if members < 2:
        return 0
    if operation == "collective-permute":
        return 1
    return (2 if operation == "all-reduce" else 1) * (members - 1)
