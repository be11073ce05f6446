"""Fragments: sets of variables that are synchronized on different steps."""

from __future__ import annotations

import re
from typing import Sequence

from mtf_gradsync._private.libraries import mtf

# The number of a layer in a variable's name, as in "decoder/layer_003/kernel" or "h3/w".
_NUMBER = re.compile(r"\d+(?=/)")


def fragments_of(variables: Sequence[mtf.Variable], count: int) -> list[list[mtf.Variable]]:
    """Splits variables into sets that are sent on different steps.

    Layer l belongs to set l modulo count, as in streaming DiLoCo; layers are numbered by the first
    number that ends a part of their variables' names. Other variables, and layers that would make a
    set larger than its share, go where there is room, the largest first.

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
    filled, place, rest = [0] * count, {}, []
    for variable in variables:
        found = numbers[variable]
        turn = layers.index(int(found.group())) % count if found else None
        if turn is None or filled[turn] + sizes[variable] > share:
            rest.append(variable)
        else:
            place[variable] = turn
            filled[turn] += sizes[variable]
    for variable in sorted(rest, key=lambda v: -sizes[v]):
        taken = set(place.values())
        empty = [turn for turn in range(count) if turn not in taken]
        turn = min(empty or range(count), key=lambda t: filled[t])
        place[variable] = turn
        filled[turn] += sizes[variable]
    return [[v for v in variables if place[v] == turn] for turn in range(count)]
