"""Groups of a mesh's processors."""

from __future__ import annotations

from typing import Any, Sequence

from mtf_gradsync._private.libraries import mtf


class ProcessorGroups:
    """A partition of a mesh's processors into equally large groups.

    Attributes:
      groups: lists of logical processor numbers; each processor stands in one of them.
      mesh_axes: the mesh axes that the groups run along, or None for groups that no set of axes
        describes.
    """

    def __init__(self, groups: Sequence[Sequence[int]], mesh_axes: Sequence[int] | None = None):
        """Sets the groups.

        Args:
          groups: equally long lists of processor numbers, together every number from 0 on once.
          mesh_axes: the mesh axes by number that the groups run along; None where it is not known.

        Raises:
          ValueError: groups are no such lists.
        """
        try:
            self.groups: list[list[int]] = [list(group) for group in groups]
            members = sorted(processor for group in self.groups for processor in group)
        except TypeError:
            self.groups, members = [], []
        if (
            members != list(range(len(members)))
            or not members
            or len({len(group) for group in self.groups}) > 1
        ):
            raise ValueError(
                "groups must be equally long lists of processor numbers, in which each number from "
                f"0 on stands once, such as [[0, 1], [2, 3]], got {groups!r}."
            )
        self.mesh_axes: tuple[int, ...] | None = (
            None if mesh_axes is None else tuple(sorted(mesh_axes))
        )

    @classmethod
    def along(cls, mesh_impl: Any, mesh_axes: Sequence[int | str]) -> ProcessorGroups:
        """Returns groups of the processors that differ only in their coordinates along mesh_axes.

        Args:
          mesh_impl: an `mtf.MeshImpl`.
          mesh_axes: mesh dimensions by number or name.

        Raises:
          ValueError: the mesh has no such dimension.
        """
        axes = sorted({axis_number(mesh_impl.shape, axis, "mesh_axes") for axis in mesh_axes})
        return cls(mtf.processor_groups(mesh_impl.shape, axes), axes)

    @property
    def group_size(self) -> int:
        """How many processors a group has."""
        return len(self.groups[0])


def check_mesh(mesh_impl: Any) -> None:
    """Raises TypeError unless mesh_impl is a mesh implementation."""
    if not isinstance(mesh_impl, mtf.MeshImpl):
        raise TypeError(
            "mesh_impl must be an mtf.MeshImpl, such as gs.placement_mesh_impl(...) makes, got "
            f"{mesh_impl!r}."
        )


def check_groups(mesh_impl: Any, groups: Any) -> None:
    """Raises TypeError or ValueError unless groups are `ProcessorGroups` of a mesh's processors."""
    check_mesh(mesh_impl)
    if not isinstance(groups, ProcessorGroups):
        raise TypeError(
            "groups must be ProcessorGroups, such as ProcessorGroups.along(mesh_impl, [0]) makes, "
            f"got {groups!r}."
        )
    size = sum(map(len, groups.groups))
    if size != mesh_impl.size:
        raise ValueError(
            f"groups must hold the {mesh_impl.size} processors of the mesh "
            f"{mesh_impl.shape.to_string}, got {size} in {groups.groups}."
        )


def axis_number(shape: mtf.Shape, axis: Any, argument: str) -> int:
    """Returns the number of a mesh dimension that is given by name or number.

    Anything else raises a ValueError, which names the caller's `argument`.
    """
    names = shape.dimension_names
    if axis in names:
        return names.index(axis)
    if isinstance(axis, int) and not isinstance(axis, bool) and 0 <= axis < shape.ndims:
        return axis
    raise ValueError(
        f"{argument} must be dimensions of the mesh {shape.to_string} by name, or by number from "
        f"0 to {shape.ndims - 1}, got {axis!r}."
    )
