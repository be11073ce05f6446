"""The inner and the outer groups of sums in two levels."""

from __future__ import annotations

from typing import Any, Callable, Sequence, Union

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.mesh.devices import process_of
from mtf_gradsync.mesh.groups import ProcessorGroups, axis_number

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
