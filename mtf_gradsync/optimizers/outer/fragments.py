"""Fragments: parts of all variables that are synchronized on different steps."""

from __future__ import annotations

import math
import re
from typing import Sequence

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.optimizers.pipeline.pieces import Owner, Piece

# The number of a layer in a variable's name, as in "decoder/layer_003/kernel" or "h3/w".
_NUMBER = re.compile(r"\d+(?=/)")


def fragments_of(
    variables: Sequence[mtf.Variable], count: int, axes: ReplicaAxes, by_rows: bool = False
) -> list[list[Owner]]:
    """Splits variables into fragments, of which each has an equal share of what a core sends.

    Layer l belongs to fragment l modulo `count`, as in streaming DiLoCo; layers are numbered by the
    first number that ends a part of their variables' names. Other variables, and layers that would
    make a fragment larger than its share, go where there is room, the largest first. A variable
    for which no fragment has room is cut; a fragment has at most one piece of it.

    No fragment is larger than a share, rounded up to a whole number. With `by_rows` variables are
    cut between rows, so that pieces of matrices are matrices: then a fragment may be larger, by
    less than a row of a variable that is cut. Each fragment has the order of `variables`.
    """
    shapes = {v: axes.slice_shape(v.shape) for v in variables}
    sizes = {v: math.prod(shape) for v, shape in shapes.items()}
    room = [-(-sum(sizes.values()) // count)] * count
    fragments: list[dict[mtf.Variable, Owner]] = [{} for _ in range(count)]

    def put(variable: mtf.Variable, number: int) -> None:
        fragments[number][variable] = variable
        room[number] -= sizes[variable]

    def cut(variable: mtf.Variable) -> None:
        unit = shapes[variable][-1] if by_rows and len(shapes[variable]) > 1 else 1
        units = [max(0, space) // unit for space in room]
        missing = sizes[variable] // unit - sum(units)
        largest_rest_first = sorted(range(count), key=lambda i: units[i] * unit - room[i])
        for number in largest_rest_first[: max(0, missing)]:
            units[number] += 1
        start, errors = 0, dict[str, mtf.Variable]()
        for number in sorted(range(count), key=lambda i: -units[i]):
            stop = min(start + units[number] * unit, sizes[variable])
            if stop - start == sizes[variable]:
                put(variable, number)
            elif stop > start:
                piece = Piece(variable, number, start, stop, shapes[variable], errors)
                fragments[number][variable] = piece
                room[number] -= stop - start
            start = stop

    numbers = {v: _NUMBER.search(v.name) for v in variables}
    layers = sorted({int(found.group()) for found in numbers.values() if found})
    for variable, found in numbers.items():
        if found:
            number = layers.index(int(found.group())) % count
            if sizes[variable] <= room[number]:
                put(variable, number)
    placed = {v for fragment in fragments for v in fragment}
    for variable in sorted((v for v in variables if v not in placed), key=lambda v: -sizes[v]):
        number = max(range(count), key=lambda i: room[i])
        if sizes[variable] <= room[number]:
            put(variable, number)
        else:
            cut(variable)
    return [[some[v] for v in variables if v in some] for some in fragments]
