"""Sums over several levels: along the inner axes of a mesh first, or by groups of devices."""

from __future__ import annotations

from typing import Any, Callable, Sequence, Union

from mtf_gradsync._common import warn_once
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.mesh.devices import process_of
from mtf_gradsync.mesh.groups import ProcessorGroups, axis_number
from mtf_gradsync.reduce.sums import GroupSum, SumFn, in_groups, positions, simd_all_reduce

Axis = Union[int, str]  # a mesh axis by name or number


def check_outer_axes(outer_axes: Any) -> tuple[Axis, ...] | None:
    """Returns outer axes as a tuple, None for None; raises ValueError for anything but axes."""
    if outer_axes is None:
        return None
    if isinstance(outer_axes, str):
        outer_axes = [name.strip() for name in outer_axes.split(",") if name.strip()]
    try:
        axes = tuple(outer_axes)
    except TypeError:
        axes = (None,)
    if not all(isinstance(a, (int, str)) and not isinstance(a, bool) for a in axes):
        raise ValueError(
            f"outer_axes must be names or numbers of mesh axes, such as ('rows',), or None for a "
            f"default, got {outer_axes!r}."
        )
    return axes


def outer_axis_numbers(shape: mtf.Shape, outer_axes: Sequence[Axis]) -> list[int]:
    """Returns the numbers of outer axes; raises ValueError if one is not on the mesh."""
    return [axis_number(shape, axis, "outer_axes") for axis in outer_axes]


def inner_groups(
    mesh_impl: Any, group: Sequence[int], outer_axes: Sequence[Axis] | None
) -> list[list[int]]:
    """Splits a group of processor numbers into inner groups, whose members have fast links.

    Members of an inner group do not differ along outer_axes. Without these, a mesh whose devices
    are in several processes is split by process, and any other along the first mesh axis that the
    group runs along, Mesh-TF's slowest; a group along a single axis is one inner group.
    """
    key = _place(mesh_impl, group, outer_axes)
    inner: dict[Any, list[int]] = {}
    for processor in group:
        inner.setdefault(key(processor), []).append(processor)
    return list(inner.values())


def level_groups(
    mesh_impl: Any, groups: ProcessorGroups, outer_axes: Sequence[Axis] | None
) -> tuple[ProcessorGroups, ProcessorGroups] | None:
    """Returns the groups of the first sum and of the second; None if inner groups differ in size.

    The first members of a group's inner groups make one outer group, the second another, and so on.
    """
    split = [inner_groups(mesh_impl, group, outer_axes) for group in groups.groups]
    if len({len(inner) for inners in split for inner in inners}) > 1:
        return None
    inner = [inner for inners in split for inner in inners]
    outer = [list(members) for inners in split for members in zip(*inners)]
    return (
        _with_axes(mesh_impl, inner, groups.mesh_axes),
        _with_axes(mesh_impl, outer, groups.mesh_axes),
    )


def _with_axes(
    mesh_impl: Any, level: list[list[int]], axes: Sequence[int] | None
) -> ProcessorGroups:
    """Makes `ProcessorGroups`, with the mesh axes that they run along if there are any."""
    if axes is not None:
        coordinates = [mtf.pnum_to_processor_coordinates(mesh_impl.shape, p) for p in level[0]]
        mine = [a for a in axes if len({c[a] for c in coordinates}) > 1]
        along = ProcessorGroups.along(mesh_impl, mine)
        if sorted(map(sorted, along.groups)) == sorted(map(sorted, level)):
            return along
    return ProcessorGroups(level)


def _place(
    mesh_impl: Any, group: Sequence[int], outer_axes: Sequence[Axis] | None
) -> Callable[[int], Any]:
    """Makes a function of processors that has the same value in an inner group."""
    shape = mesh_impl.shape

    def coordinates(processor: int) -> list[int]:
        return mtf.pnum_to_processor_coordinates(shape, processor)

    if outer_axes is not None:
        outer = outer_axis_numbers(shape, outer_axes)
        return lambda processor: tuple(coordinates(processor)[a] for a in outer)
    devices = getattr(mesh_impl, "devices", None)
    if devices is not None and len({process_of(device) for device in devices}) > 1:
        return lambda processor: process_of(devices[processor])
    varying = [a for a in range(shape.ndims) if len({coordinates(p)[a] for p in group}) > 1]
    if len(varying) < 2:
        return lambda processor: ()
    return lambda processor: coordinates(processor)[varying[0]]


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
