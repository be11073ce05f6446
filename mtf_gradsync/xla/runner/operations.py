"""Finds and makes operations of MLIR modules."""

from __future__ import annotations

from typing import Any, Iterator, Mapping, Sequence


def walk(operation: Any) -> Iterator[Any]:
    """Yields all operations inside one, with old and new versions of jaxlib."""
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from walk(inner.operation)


def text_of(module: Any, with_names: bool) -> str:
    """A module as text, with or without the names that its operations have in the graph."""
    return module.operation.get_asm(enable_debug_info=with_names)


def fill_with_sum(region: Any, operand: Any) -> None:
    """Fills the empty region of a collective of an operand's elements with their sum."""
    from jaxlib.mlir import ir

    element = ir.RankedTensorType.get([], ir.RankedTensorType(operand.type).element_type)
    block = ir.Block.create_at_start(region, [element, element])
    with ir.InsertionPoint(block):
        total = ir.Operation.create(
            "stablehlo.add", results=[element], operands=list(block.arguments)
        )
        ir.Operation.create("stablehlo.return", operands=[total.results[0]])


def create(
    name: str,
    result: Any,
    operands: Sequence[Any],
    attributes: Mapping[str, Any] | None = None,
    regions: int = 0,
) -> Any:
    """Makes an operation with one result, of a type, where the context says; returns the result."""
    from jaxlib.mlir import ir

    made = ir.Operation.create(
        name,
        results=[result],
        operands=list(operands),
        attributes=dict(attributes or {}),
        regions=regions,
    )
    return made.results[0]
