"""Sums in two levels, which send less over slow links between inner groups."""

from __future__ import annotations

from typing import Any, Sequence

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

    def sum_one(value: Any, groups: ProcessorGroups, turn: int) -> Any:
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

    return lambda values, groups, turns: [
        sum_one(x, groups, turn) for x, turn in zip(values, turns)
    ]


def _hand_out(total: tf.Tensor, device: str, size: int) -> list[tf.Tensor]:
    """Copies a sum to one member of an inner group, which all members then read."""
    if size > 1:
        with tf.device(device):
            total = tf.identity(total)
    return [total] * size


def simd_two_levels(
    mesh_impl: Any, outer_axes: Sequence[Axis] | None, scatter: bool, one_group: bool
) -> SumFn:
    """Makes a function that sums along the inner axes, then along the outer ones, on all cores.

    Each level sums all values before the next one begins, with `one_group` in a group of its own.
    With `scatter` each core sends only a part of a tensor over the outer axes, and a third sum,
    along the inner axes, joins the parts.
    """

    def sum_fn(values: Sequence[Any], groups: ProcessorGroups, turns: Sequence[int]) -> list[Any]:
        del turns
        levels = level_groups(mesh_impl, groups, outer_axes)
        if levels is None:
            warn_once(
                "uneven levels on SIMD",
                "The groups %s have inner groups of different sizes, which a SIMD mesh cannot sum; "
                "they are summed in one level.",
                groups.groups,
            )
        if levels is None or any(level.group_size == 1 for level in levels):
            return simd_all_reduce(mesh_impl, values, groups, one_group)
        inner, outer = levels
        sums = simd_all_reduce(mesh_impl, values, inner, one_group)
        shapes = [x.slice_shape for x in sums]
        cut = [
            i
            for i, shape in enumerate(shapes)
            if scatter and mtf.list_product(shape) >= inner.group_size
        ]
        at = positions(mesh_impl, inner) if cut else None
        for i in cut:
            sums[i] = _part(mesh_impl, sums[i], inner.group_size, at)
        sums = simd_all_reduce(mesh_impl, sums, outer, one_group)
        alone = [_among_zeros(mesh_impl, sums[i], inner.group_size, at) for i in cut]
        for i, x in zip(cut, simd_all_reduce(mesh_impl, alone, inner, one_group)):
            sums[i] = _joined(mesh_impl, x, shapes[i])
        return sums

    return sum_fn


def _part(mesh_impl: Any, value: Any, parts: int, at: Any) -> Any:
    """Returns each core's part of a value: the one at its position in its group."""
    size = mtf.list_product(value.slice_shape)
    part = -(-size // parts)

    def take(x: tf.Tensor, position: tf.Tensor) -> tf.Tensor:
        padded = tf.pad(tf.reshape(x, [-1]), [[0, part * parts - size]])
        return tf.slice(padded, [position * part], [part])

    return mesh_impl.slicewise(take, value, at)


def _among_zeros(mesh_impl: Any, value: Any, parts: int, at: Any) -> Any:
    """Returns each core's part in its row of a matrix that is 0 elsewhere."""

    def put(x: tf.Tensor, position: tf.Tensor) -> tf.Tensor:
        # tf.where and not a product, as an infinity times zero would be NaN in the other parts.
        here = tf.expand_dims(tf.equal(tf.range(parts), position), 1)
        return tf.where_v2(here, tf.expand_dims(x, 0), tf.zeros([parts, *x.shape], x.dtype))

    return mesh_impl.slicewise(put, value, at)


def _joined(mesh_impl: Any, value: Any, shape: Sequence[int]) -> Any:
    size = mtf.list_product(shape)
    return mesh_impl.slicewise(
        lambda x: tf.reshape(tf.slice(tf.reshape(x, [-1]), [0], [size]), shape), value
    )
