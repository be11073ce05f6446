"""Serializes StableHLO in the form that other versions of jax read."""

from __future__ import annotations

from typing import NamedTuple

from mtf_gradsync.xla.runner.packs import group_names


class Artifact(NamedTuple):
    """StableHLO as a portable artifact."""

    content: bytes
    version: str  # the oldest that reads it; "text" for text
    # Each collective's group, in order. The oldest versions have no room for such attributes.
    groups: list[str | None]


def to_artifact(module: str) -> Artifact:
    """Returns StableHLO as a portable artifact for the oldest version that reads it.

    A program with operations that artifacts lack is returned as text.
    """
    from jax.interpreters import mlir
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    with mlir.make_ir_context():
        parsed = ir.Module.parse(module)
        groups = group_names(parsed)
        for version in (stablehlo.get_minimum_version(), stablehlo.get_current_version()):
            try:
                content = stablehlo.serialize_portable_artifact(parsed, version)
                return Artifact(content, version, groups)
            except ValueError:
                continue
    return Artifact(module.encode(), "text", groups)
