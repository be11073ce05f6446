"""Operations of MLIR modules: finding them, making them."""

from __future__ import annotations

from typing import Any, Iterator


def walk(operation: Any) -> Iterator[Any]:
    """All operations inside one, by the bindings of old and new versions of jaxlib."""
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from walk(inner.operation)


def text_of(module: Any, with_names: bool) -> str:
    """A module as text, with or without the names that its operations have in the graph."""
    return module.operation.get_asm(enable_debug_info=with_names)


def fill_with_sum(region: Any, operand: Any) -> None:
    """Makes a collective of an operand's elements, to whom an empty region belongs, a sum."""
    from jaxlib.mlir import ir

    element = ir.RankedTensorType.get([], ir.RankedTensorType(operand.type).element_type)
    block = ir.Block.create_at_start(region, [element, element])
    with ir.InsertionPoint(block):
        total = ir.Operation.create(
            "stablehlo.add", results=[element], operands=list(block.arguments)
        )
        ir.Operation.create("stablehlo.return", operands=[total.results[0]])
