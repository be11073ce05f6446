"""Serializes StableHLO in the form that other versions of jax read."""

from __future__ import annotations


def to_artifact(module: str) -> tuple[bytes, str]:
    """Returns StableHLO as a portable artifact, and the oldest version that reads it.

    A program with operations that artifacts lack is returned as text.
    """
    from jax.interpreters import mlir
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    with mlir.make_ir_context():
        parsed = ir.Module.parse(module)
        for version in (stablehlo.get_minimum_version(), stablehlo.get_current_version()):
            try:
                return stablehlo.serialize_portable_artifact(parsed, version), version
            except ValueError:
                continue
    return module.encode(), "text"
