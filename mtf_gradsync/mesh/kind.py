"""Distinguishes SIMD meshes from placement meshes."""

from __future__ import annotations

from typing import Any

from mtf_gradsync._private.libraries import mtf


def is_simd(mesh_impl: Any) -> bool:
    """Returns whether one program runs on all processors, so that tensors have a single slice."""
    return isinstance(mesh_impl, mtf.simd_mesh_impl.SimdMeshImpl)
