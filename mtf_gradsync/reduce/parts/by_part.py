"""Tensors as matrices in which each processor's part is one row."""

from __future__ import annotations

from typing import Any, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.reduce.parts.cuts import Cuts, part_shape


def to_rows(mesh_impl: Any, x: tf.Tensor, cuts: Cuts) -> tf.Tensor:
    """A slice as `[number of parts, elements of a part]`, in the order of `part_number`."""
    shape = x.shape.as_list()
    split, axis_of_cut = _split_axes(mesh_impl, shape, cuts)
    order = _order(cuts, axis_of_cut, len(split))
    x = tf.reshape(x, split)
    if order != list(range(len(split))):
        x = tf.transpose(x, order)
    return tf.reshape(x, [_count(mesh_impl, cuts), -1])


def from_rows(mesh_impl: Any, rows: tf.Tensor, shape: Sequence[int], cuts: Cuts) -> tf.Tensor:
    """The slice of shape `shape` that `to_rows` turned into `rows`."""
    split, axis_of_cut = _split_axes(mesh_impl, shape, cuts)
    order = _order(cuts, axis_of_cut, len(split))
    x = tf.reshape(rows, [split[i] for i in order])
    if order != list(range(len(split))):
        x = tf.transpose(x, [order.index(i) for i in range(len(split))])
    return tf.reshape(x, list(shape))


def part_of_row(mesh_impl: Any, row: tf.Tensor, shape: Sequence[int], cuts: Cuts) -> tf.Tensor:
    """The part in one row of `to_rows`, where the slice has shape `shape`."""
    return tf.reshape(row, part_shape(mesh_impl, shape, cuts))


def _split_axes(
    mesh_impl: Any, shape: Sequence[int], cuts: Cuts
) -> tuple[list[int], dict[int, int]]:
    """A shape with each cut axis split in two, and mesh axis -> the new axis that numbers parts."""
    sizes = {cut.tensor_axis: mesh_impl.shape.dims[cut.mesh_axis].size for cut in cuts}
    mesh_axis = {cut.tensor_axis: cut.mesh_axis for cut in cuts}
    split: list[int] = []
    axis_of_cut: dict[int, int] = {}
    for axis, size in enumerate(shape):
        if axis in sizes:
            axis_of_cut[mesh_axis[axis]] = len(split)
            split += [sizes[axis], size // sizes[axis]]
        else:
            split.append(size)
    return split, axis_of_cut


def _order(cuts: Cuts, axis_of_cut: dict[int, int], rank: int) -> list[int]:
    first = [axis_of_cut[cut.mesh_axis] for cut in sorted(cuts)]
    return first + [i for i in range(rank) if i not in first]


def _count(mesh_impl: Any, cuts: Cuts) -> int:
    return mtf.list_product([mesh_impl.shape.dims[cut.mesh_axis].size for cut in cuts])
