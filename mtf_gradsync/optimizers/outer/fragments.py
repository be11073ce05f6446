"""Fragments: sets of variables that are synchronized on different steps."""

from __future__ import annotations

import re
from typing import Sequence

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync._warn import warn_once

# A warning says so where a set holds this many times its share.
_ROOM = 1.25
# The number of a layer in a variable's name, as in "decoder/layer_003/kernel" or "h3/w".
_NUMBER = re.compile(r"\d+(?=/)")


def fragments_of(variables: Sequence[mtf.Variable], count: int) -> list[list[mtf.Variable]]:
    """Splits variables into sets that are sent on different steps.

    Layer l belongs to set l modulo count, as in streaming DiLoCo; layers are numbered by the first
    number that ends a part of their variables' names. Other variables, and layers that would make a
    set larger than its share, go where there is room, the largest first. A variable is not cut; a
    warning says so where one makes its set much larger than the others.

    Args:
      variables: at least `count` variables.
      count: the number of sets, 1 or more.

    Returns:
      The sets, none of them empty, each in the order of variables.
    """
    sizes = {v: v.shape.size for v in variables}
    share = sum(sizes.values()) / count
    numbers = {v: _NUMBER.search(v.name) for v in variables}
    layers = sorted({int(found.group()) for found in numbers.values() if found})
    filled, place = [0] * count, dict[mtf.Variable, int]()

    def put(variable: mtf.Variable, turn: int) -> None:
        place[variable] = turn
        filled[turn] += sizes[variable]

    def put_where_there_is_room(some: Sequence[mtf.Variable]) -> None:
        for variable in sorted(some, key=lambda v: -sizes[v]):
            taken = set(place.values())
            empty = [turn for turn in range(count) if turn not in taken]
            put(variable, min(empty or range(count), key=lambda t: filled[t]))

    # First, so that nothing is put beside them that has room elsewhere.
    put_where_there_is_room([v for v in variables if sizes[v] > share])
    for variable, found in numbers.items():
        if found and variable not in place:
            turn = layers.index(int(found.group())) % count
            if filled[turn] + sizes[variable] <= share:
                put(variable, turn)
    put_where_there_is_room([v for v in variables if v not in place])
    if max(filled) > _ROOM * share:
        largest = max(variables, key=lambda v: sizes[v])
        warn_once(
            f"fragments {count} {largest.name}",
            "fragments=%d: the largest step sends %.0f%% of all values between islands and not "
            "%.0f%%, since a variable is not cut and %r has %.0f%% of them. Fewer fragments send "
            "as little at a time.",
            count,
            *(100 * x / sum(sizes.values()) for x in (max(filled), share)),
            largest.name,
            100 * sizes[largest] / sum(sizes.values()),
        )
    return [[v for v in variables if place[v] == turn] for turn in range(count)]
