"""Mesh shapes as text."""

from __future__ import annotations

from mtf_gradsync._private.libraries import mtf


def mesh_text(shape: mtf.Shape) -> str:
    """Returns a mesh's shape as users write it, such as "batch:4;model:2"."""
    return ";".join(f"{dim.name}:{dim.size}" for dim in shape.dims)
