"""Sums in two levels, which send less over slow links between inner groups."""

from __future__ import annotations

import functools
from typing import Any, Callable, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._warn import warn_once
from mtf_gradsync.mesh.groups import ProcessorGroups
from mtf_gradsync.reduce.sums.algorithms import GroupSum
from mtf_gradsync.reduce.sums.levels import Axis, inner_groups, level_groups
from mtf_gradsync.reduce.sums.one_level import SumFn, in_groups, positions, simd_all_reduce


def placement_two_levels(
    mesh_impl: Any, inner_sum: GroupSum, outer_sum: GroupSum, outer_axes: Sequence[Axis] | None
) -> SumFn:
    """Makes a function that sums within inner groups (`levels.inner_groups`), then over them.

    Only one member of each inner group takes part in the outer sum; the others read its result.
    """

    def sum_fn(value: Any, groups: ProcessorGroups, turn: int) -> Any:
        def sums_of(number: int, group: list[int]) -> list[Any]:
            inners = inner_groups(mesh_impl, group, outer_axes)
            start = turn + number
            roots = [start % len(inner) for inner in inners]
            sums = []
            for inner, root in zip(inners, roots):
                members = [value.tensor_list[p] for p in inner]
                devices = [mesh_impl.devices[p] for p in inner]
                sums.append(members if len(inner) == 1 else inner_sum(members, devices, root))
            if len(inners) > 1:
                partial = [s[root] for s, root in zip(sums, roots)]
                devices = [mesh_impl.devices[inner[root]] for inner, root in zip(inners, roots)]
                totals = outer_sum(partial, devices, start % len(inners))
                sums = [
                    _hand_out(total, device, len(inner))
                    for total, device, inner in zip(totals, devices, inners)
                ]
            total_of = {p: x for inner, xs in zip(inners, sums) for p, x in zip(inner, xs)}
            return [total_of[p] for p in group]

        return in_groups(mesh_impl, value, groups, sums_of)

    return sum_fn


def _hand_out(total: tf.Tensor, device: str, size: int) -> list[tf.Tensor]:
    """Copies a sum to one member of an inner group, which all members then read."""
    if size > 1:
        with tf.device(device):
            total = tf.identity(total)
    return [total] * size


def simd_two_levels(mesh_impl: Any, outer_axes: Sequence[Axis] | None, scatter: bool) -> SumFn:
    """Makes a function that sums along the inner axes, then along the outer ones, on all cores.

    With `scatter` each core sends only a part of the tensor over the outer axes, and a third sum,
    along the inner axes, joins the parts.
    """

    def sum_fn(value: Any, groups: ProcessorGroups, turn: int) -> Any:
        del turn
        levels = level_groups(mesh_impl, groups, outer_axes)
        if levels is None:
            warn_once(
                "uneven levels on SIMD",
                "The groups %s have inner groups of different sizes, which a SIMD mesh cannot sum; "
                "they are summed in one level.",
                groups.groups,
            )
            return simd_all_reduce(mesh_impl, value, groups)
        inner, outer = levels
        if inner.group_size == 1 or outer.group_size == 1:
            return simd_all_reduce(mesh_impl, value, groups)
        value = simd_all_reduce(mesh_impl, value, inner)
        outer_sum = functools.partial(simd_all_reduce, mesh_impl, groups=outer)
        if scatter and mtf.list_product(value.slice_shape) >= inner.group_size:
            return _share_out(mesh_impl, value, inner, outer_sum)
        return outer_sum(value)

    return sum_fn


def _share_out(
    mesh_impl: Any, value: Any, inner: ProcessorGroups, outer_sum: Callable[[Any], Any]
) -> Any:
    """Applies outer_sum to parts of a value that is the same within each inner group."""
    shape = value.slice_shape
    size, parts = mtf.list_product(shape), inner.group_size
    part = -(-size // parts)
    mine = positions(mesh_impl, inner)

    def take(x: tf.Tensor, position: tf.Tensor) -> tf.Tensor:
        padded = tf.pad(tf.reshape(x, [-1]), [[0, part * parts - size]])
        return tf.slice(padded, [position * part], [part])

    def put(x: tf.Tensor, position: tf.Tensor) -> tf.Tensor:
        # tf.where and not a product, as an infinity times zero would be NaN in the other parts.
        here = tf.expand_dims(tf.equal(tf.range(parts), position), 1)
        return tf.where_v2(here, tf.expand_dims(x, 0), tf.zeros([parts, part], x.dtype))

    summed = mesh_impl.slicewise(put, outer_sum(mesh_impl.slicewise(take, value, mine)), mine)
    together = simd_all_reduce(mesh_impl, summed, inner)
    return mesh_impl.slicewise(
        lambda x: tf.reshape(tf.slice(tf.reshape(x, [-1]), [0], [size]), shape), together
    )
