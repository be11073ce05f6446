"""Programs to estimate what loops cost: a compiler's estimate counts what is in a loop once."""

from __future__ import annotations

import math
from typing import Any, Iterator, NamedTuple, Sequence

_WHILE = "stablehlo.while"
# They pass a number on.
_SAME = frozenset(("stablehlo.reshape", "stablehlo.convert"))


class OneTurnMore(NamedTuple):
    """A program in which one of its loops turns once more, before the loop."""

    module: str  # StableHLO
    times: int  # how often its difference from the program is to be added to the program's estimate


def turns_more(module: str) -> tuple[list[OneTurnMore], int]:
    """Returns a program for each loop whose turns count, and the number of the other loops.

    The estimate of the program, with what these differ from it, counts each turn of each loop. A
    loop whose number of turns the program does not say counts once.
    """
    if _WHILE not in module:
        return [], 0
    from jax.interpreters import mlir
    from jaxlib.mlir import ir

    found, unknown = [], 0
    with mlir.make_ir_context(), ir.Location.unknown():
        parsed = ir.Module.parse(module)
        turns = _turns_with_those_around(parsed)
        for number, (own, around) in enumerate(turns):
            if own is None or around is None:
                unknown += 1
            elif own > 1 and around:  # without any turn the compiler removes it
                copy = ir.Module.parse(module)
                loop, _ = list(_loops(_main(copy), ()))[number]
                _put_a_turn_before(loop)
                found.append(OneTurnMore(str(copy), own * around - around))
    return found, unknown


def _turns_with_those_around(module: Any) -> list[tuple[int | None, int | None]]:
    """For each loop its turns, and the product of those around it; None where not known."""
    functions = {_symbol(op): op.operation for op in module.body.operations}
    all_loops = list(_loops(_main(module), ()))
    own = [_turns(loop, functions) for loop, _ in all_loops]
    found: list[tuple[int | None, int | None]] = []
    for number, (_, around) in enumerate(all_loops):
        known = [own[i] for i in around]
        product = None if None in known else math.prod(n for n in known if n is not None)
        found.append((own[number], product))
    return found


def _loops(operation: Any, around: tuple[int, ...]) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """Yields loops, with the numbers of those around each, in an order that programs share."""
    numbers = iter(range(10**9))

    def inside(op: Any, around: tuple[int, ...]) -> Iterator[tuple[Any, tuple[int, ...]]]:
        for region in op.regions:
            for block in region:
                for inner in block:
                    here = around
                    if inner.operation.name == _WHILE:
                        here = (*around, next(numbers))
                        yield inner.operation, around
                    yield from inside(inner.operation, here)

    yield from inside(operation, around)


def _main(module: Any) -> Any:
    return next(op.operation for op in module.body.operations if _symbol(op) == "main")


def _symbol(op: Any) -> str:
    from jaxlib.mlir import ir

    return ir.StringAttr(op.operation.attributes["sym_name"]).value


def _put_a_turn_before(loop: Any) -> None:
    """Copies a loop's body to before it, and begins the loop with that turn's results."""
    from jaxlib.mlir import ir

    turn = loop.clone(ip=ir.InsertionPoint(loop))
    block = turn.regions[1].blocks[0]
    *operations, last = block.operations
    for argument, value in zip(block.arguments, turn.operands):
        argument.replace_all_uses_with(value)
    for operation in operations:
        operation.operation.move_before(loop)
    for number, value in enumerate(list(last.operands)):
        loop.operands[number] = value
    turn.erase()


class _Place(NamedTuple):
    """A value, and the calls of functions that it is inside of."""

    value: Any
    calls: tuple[Any, ...] = ()


def _turns(loop: Any, functions: dict[str, Any]) -> int | None:
    """How often a loop turns, if it counts from one constant to another by a third."""
    condition, body = (region.blocks[0] for region in loop.regions)
    test = _origin(_Place(_results(condition)[0]), functions)
    made_by = _operation(test)
    if made_by is None or made_by.name != "stablehlo.compare":
        return None
    counter, limit = (
        _origin(_Place(operand, test.calls), functions) for operand in made_by.operands
    )
    end = _constant(limit)
    number = _index(condition.arguments, counter)
    is_less = "LT" in str(made_by.attributes["comparison_direction"])
    if end is None or number is None or not is_less:
        return None
    first = _constant(_origin(_Place(loop.operands[number]), functions))
    step = _step(_origin(_Place(_results(body)[number]), functions), body, number, functions)
    if first is None or step is None or step < 1:
        return None
    return max(0, math.ceil((end - first) / step))


def _step(place: _Place, body: Any, number: int, functions: dict[str, Any]) -> int | None:
    """The constant that a body adds to one of its arguments, if that is what it does."""
    added = _operation(place)
    if added is None or added.name != "stablehlo.add":
        return None
    terms = [_origin(_Place(operand, place.calls), functions) for operand in added.operands]
    constants = [n for n in map(_constant, terms) if n is not None]
    if len(constants) != 1 or number not in [_index(body.arguments, term) for term in terms]:
        return None
    return constants[0]


def _origin(place: _Place, functions: dict[str, Any]) -> _Place:
    """Follows a value through reshapes, and into and out of calls and tuples."""
    from jaxlib.mlir import ir

    while True:
        made_by = _operation(place)
        value, calls = place
        if made_by is None and calls:
            block = functions[_callee(calls[-1])].regions[0].blocks[0]
            number = _index(block.arguments, _Place(value))
            if number is None:
                return place
            place = _Place(calls[-1].operands[number], calls[:-1])
        elif made_by is not None and made_by.name in _SAME:
            place = _Place(made_by.operands[0], calls)
        elif made_by is not None and made_by.name == "func.call":
            number = list(made_by.results).index(value)
            block = functions[_callee(made_by)].regions[0].blocks[0]
            place = _Place(_results(block)[number], (*calls, made_by))
        elif made_by is not None and made_by.name == "stablehlo.get_tuple_element":
            # TensorFlow 2.15 calls functions with tuples.
            whole = _origin(_Place(made_by.operands[0], calls), functions)
            tuple_op = _operation(whole)
            if tuple_op is None or tuple_op.name != "stablehlo.tuple":
                return place
            index = ir.IntegerAttr(made_by.attributes["index"]).value
            place = _Place(tuple_op.operands[index], whole.calls)
        else:
            return place


def _callee(call: Any) -> str:
    from jaxlib.mlir import ir

    return ir.FlatSymbolRefAttr(call.attributes["callee"]).value


def _results(block: Any) -> list[Any]:
    *_, last = block.operations
    return list(last.operands)


def _operation(place: _Place) -> Any:
    """The operation that makes a value; None for an argument of a block."""
    return getattr(place.value.owner, "operation", None)


def _index(arguments: Sequence[Any], place: _Place) -> int | None:
    if place.calls:
        return None
    return next((i for i, one in enumerate(arguments) if one == place.value), None)


def _constant(place: _Place) -> int | None:
    """The whole number that a value is, if the program says."""
    from jaxlib.mlir import ir

    made_by = _operation(place)
    if made_by is None or made_by.name != "stablehlo.constant":
        return None
    value = made_by.attributes["value"]
    if not isinstance(ir.RankedTensorType(made_by.results[0].type).element_type, ir.IntegerType):
        return None
    numbers = list(ir.DenseIntElementsAttr(value))
    return int(numbers[0]) if len(numbers) == 1 else None
