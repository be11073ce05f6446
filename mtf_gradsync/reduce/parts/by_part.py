"""Tensors as matrices in which each processor's part is one row."""

from __future__ import annotations

from typing import Any, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.reduce.parts.cuts import Cuts, part_shape


def to_rows(mesh_impl: Any, x: tf.Tensor, cuts: Cuts) -> tf.Tensor:
    """Returns a slice as `[number of parts, elements of a part]`, ordered by `part_number`."""
    split, order = _split_axes(mesh_impl, x.shape.as_list(), cuts)
    parts = mtf.list_product([split[i] for i in order[: len(cuts)]])
    return tf.reshape(_transposed(tf.reshape(x, split), order), [parts, -1])


def from_rows(mesh_impl: Any, rows: tf.Tensor, shape: Sequence[int], cuts: Cuts) -> tf.Tensor:
    """Returns the slice of shape `shape` that `to_rows` turned into `rows`."""
    split, order = _split_axes(mesh_impl, shape, cuts)
    x = tf.reshape(rows, [split[i] for i in order])
    return tf.reshape(_transposed(x, [order.index(i) for i in range(len(order))]), list(shape))


def part_of_row(mesh_impl: Any, row: tf.Tensor, shape: Sequence[int], cuts: Cuts) -> tf.Tensor:
    """Returns the part in one row of `to_rows`, where the slice has shape `shape`."""
    return tf.reshape(row, part_shape(mesh_impl, shape, cuts))


def _split_axes(mesh_impl: Any, shape: Sequence[int], cuts: Cuts) -> tuple[list[int], list[int]]:
    """Returns a shape with cut axes split in two, and its axes, those that number parts first."""
    mesh_axis = {cut.tensor_axis: cut.mesh_axis for cut in cuts}
    split: list[int] = []
    part_axis: dict[int, int] = {}  # mesh axis -> the axis that numbers parts along it
    for axis, size in enumerate(shape):
        if axis in mesh_axis:
            part_axis[mesh_axis[axis]] = len(split)
            parts = mesh_impl.shape.dims[mesh_axis[axis]].size
            split += [parts, size // parts]
        else:
            split.append(size)
    first = [part_axis[cut.mesh_axis] for cut in sorted(cuts)]
    return split, first + [i for i in range(len(split)) if i not in first]


def _transposed(x: tf.Tensor, order: list[int]) -> tf.Tensor:
    return x if order == sorted(order) else tf.transpose(x, order)
