"""Which processors sum with each other."""

from __future__ import annotations

from typing import Any, Sequence

from mtf_gradsync._tf_compat import mtf


class ProcessorGroups:
    """A partition of a mesh's processors into equally large groups.

    Attributes:
      groups: lists of logical processor numbers; each processor stands in one of them.
      mesh_axes: the mesh axes that the groups run along, or None for groups that no set of axes
        describes.
    """

    def __init__(self, groups: Sequence[Sequence[int]], mesh_axes: Sequence[int] | None = None):
        self.groups: list[list[int]] = [list(group) for group in groups]
        self.mesh_axes: tuple[int, ...] | None = (
            None if mesh_axes is None else tuple(sorted(mesh_axes))
        )

    @classmethod
    def along(cls, mesh_impl: Any, mesh_axes: Sequence[int]) -> ProcessorGroups:
        """Groups of the processors that differ only in their coordinates along mesh_axes."""
        axes = sorted(mesh_axes)
        return cls(mtf.processor_groups(mesh_impl.shape, axes), axes)

    @property
    def group_size(self) -> int:
        """How many processors a group has."""
        return len(self.groups[0])
