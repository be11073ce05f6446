"""Keeps one of equal constants."""

from __future__ import annotations

from typing import Any


def share_constants(operation: Any) -> None:
    """Keeps the first of equal arrays in each block, as XLA does when it reads a module.

    TensorFlow makes one for each layer: of relative positions, say, a megabyte each, and more than
    twice that as text.
    """
    from jaxlib.mlir import ir

    for region in operation.regions:
        for block in region:
            first: dict[Any, Any] = {}
            for inner in list(block):
                op = inner.operation
                share_constants(op)
                if op.name != "stablehlo.constant":
                    continue
                value = op.attributes["value"]
                if ir.DenseElementsAttr(value).is_splat:
                    continue
                kept = first.setdefault(value, op)
                if kept is not op:
                    op.results[0].replace_all_uses_with(kept.results[0])
                    op.erase()
