"""Combines collectives when a program is compiled for CPUs, as XLA does for TPUs and GPUs.

The graph says which collectives form a group (`summed_together`). The collectives of a group that
do not depend on each other become one collective, in the order of the program. A strategy may also
have packed tensors into one collective when the graph was built (see `mtf_gradsync.reduce.sums`).
Such a pack, if it is large, is written piece by piece, because a concatenation is slow on CPUs.
"""

from __future__ import annotations

import math
import re
from typing import Any, Iterator, Mapping, NamedTuple, Sequence

import numpy as np
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo


def nested_operations(operation: Any) -> Iterator[Any]:
    """Yields all MLIR operations inside an MLIR operation, at any depth, in the program's order."""
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from nested_operations(inner.operation)


def text_of(module: Any, with_names: bool) -> str:
    """Returns an MLIR module as text.

    `with_names` says whether the text has the names that the operations have in the graph of
    TensorFlow.
    """
    return module.operation.get_asm(enable_debug_info=with_names)


def fill_with_sum(region: Any, operand: Any) -> None:
    """Makes a new collective add up what cores send, by filling its empty MLIR region.

    `region` is the collective's region. `operand` is the value that a core sends; the sum has
    elements of the same type.
    """
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
    """Adds an MLIR operation with one result at the current insertion point; returns the result.

    Args:
      name: the operation's name, as in "stablehlo.reshape".
      result: the MLIR type of the result.
      operands: the values that the operation takes.
      attributes: the operation's attributes, by name.
      regions: how many empty regions the operation gets.
    """
    made = ir.Operation.create(
        name,
        results=[result],
        operands=list(operands),
        attributes=dict(attributes or {}),
        regions=regions,
    )
    return made.results[0]


#: The attribute of a collective that names its group.
TOGETHER = "mtf_gradsync.together"
# The most bytes that are combined: they bound the extra memory.
_MOST_BYTES = 32 * 1024 * 1024
_ALL_REDUCE, _SCATTER, _GATHER = (
    f"stablehlo.{name}" for name in ("all_reduce", "reduce_scatter", "all_gather")
)
_AXIS = {_SCATTER: "scatter_dimension", _GATHER: "all_gather_dim"}
_ARTIFACT = b"ML\xefR"  # how MLIR's bytecode begins
_NAME = re.compile(r'loc\("([^"\\]*)"')


def group_names(module: Any) -> list[str | None]:
    """Returns the name of each collective's group of sums, in the order of the collectives.

    The collectives of a group may be combined into one. The name is None for a collective that
    belongs to no group and is not combined. `module` is an MLIR module with all collectives.
    """
    return [_group(op) for op in _collectives(module)]


def combined_for_cpus(program: bytes | str, groups: Sequence[str | None] = ()) -> bytes | str:
    """Returns a program in which the collectives of each group are combined into few collectives.

    A group is a set of collectives that the graph has marked as made together. The results of the
    program stay the same. `program` is StableHLO, as text or as a portable artifact (MLIR
    bytecode). If the program is text, each collective has an attribute with the name of its group.
    If it is an artifact, the collectives may lack this attribute. `groups` then has the name of
    each collective's group, in the order of the program, as `group_names` returned them. A program
    that this jax cannot read is returned unchanged.
    """
    with mlir.make_ir_context() as context, ir.Location.unknown():
        try:
            if program[:4] == _ARTIFACT:
                module = stablehlo.deserialize_portable_artifact(context, program)
            else:
                module = ir.Module.parse(program)
        except (ir.MLIRError, SystemError, ValueError):
            return program  # the compiler says what is wrong
        for op, group in zip(_collectives(module), groups):
            if group is not None:
                op.attributes[TOGETHER] = ir.StringAttr.get(group)
        combined = [_combine_block(block) for block in list(_blocks(module.operation))]
        pieces = write_by_piece(module)
        return text_of(module, with_names=True) if any(combined) or pieces else program


class _Member(NamedTuple):
    """A collective, as an MLIR operation, that is combined with other collectives of its group."""

    op: Any
    given: tuple[int, ...]  # the shape of the operand
    result: tuple[int, ...]
    axis: int  # the axis along which a result is cut or joined
    cores: int  # how many cores a group of it has

    @property
    def elements_per_core(self) -> int:
        """The number of elements that a core gives to an all-gather, or gets from other kinds."""
        return math.prod(self.given if self.op.name == _GATHER else self.result)


def _collectives(module: Any) -> Iterator[Any]:
    return (op for op in nested_operations(module.operation) if op.name in (_ALL_REDUCE, *_AXIS))


def _group(op: Any) -> str | None:
    return ir.StringAttr(op.attributes[TOGETHER]).value if TOGETHER in op.attributes else None


def _blocks(operation: Any) -> Iterator[Any]:
    """Yields all MLIR blocks in an operation, inner blocks before the blocks around them."""
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield from _blocks(inner.operation)
            yield block


def _combine_block(block: Any) -> bool:
    """Combines the collectives of each group in an MLIR block; returns whether it combined any."""
    keys = [_combination_key(op.operation) for op in block]
    several = [key for key in dict.fromkeys(keys) if key is not None and keys.count(key) > 1]
    return any([_combine_group(block, key) for key in several])


def _combination_key(op: Any) -> tuple[str, ...] | None:
    """Returns a key that is equal for collectives that can be combined.

    The key holds the group, the kind of collective, the type of elements, and which cores exchange
    data. The result is None if the MLIR operation `op` is no collective, or is in no group.
    """
    if op.name not in (_ALL_REDUCE, *_AXIS):
        return None
    group = _group(op)
    if group is None:
        return None
    element = ir.RankedTensorType(op.results[0].type).element_type
    return group, op.name, str(element), str(op.attributes["replica_groups"])


def _combine_group(block: Any, key: tuple[str, ...]) -> bool:
    """Combines collectives of an MLIR block that have one key and do not depend on each other.

    `key` is what `_combination_key` returned for the collectives. A combined collective has at most
    `_MOST_BYTES`, so one key may lead to several combined collectives. Returns whether any
    collectives were combined.
    """
    operations = [op.operation for op in block]
    runs = [(run, dependents) for run, dependents in _runs(operations, key) if len(run) > 1]
    for run, dependents in runs:
        next_operation = operations[run[-1] + 1]
        members = [_member(operations[i]) for i in run]
        # Neighbours of one shape are stacked, not flattened.
        _combine(sorted(members, key=lambda m: m.result), next_operation)
        for i in dependents:
            if i < run[-1]:
                operations[i].move_before(next_operation)
        for member in members:
            member.op.erase()
    return bool(runs)


def _runs(operations: Sequence[Any], key: tuple[str, ...]) -> Iterator[tuple[list[int], list[int]]]:
    """Yields which operations of a block to combine, and which operations take their results.

    Both are lists of positions in `operations`. The collectives of a list have the key `key`, do
    not depend on each other, and have at most `_MOST_BYTES` together.
    """
    run: list[int] = []
    dependents: list[int] = []
    results: set[Any] = set()  # the results of both
    size = 0
    for position, op in enumerate(operations):
        depends = bool(results) and any(value in results for value in _operands(op))
        if _combination_key(op) == key and _bytes(op) <= _MOST_BYTES:
            if depends or size + _bytes(op) > _MOST_BYTES:
                yield run, dependents
                run, dependents, results, size = [], [], set(), 0
            run.append(position)
            size += _bytes(op)
        elif depends:
            dependents.append(position)
        else:
            continue
        results.update(op.results)
    yield run, dependents


def _operands(operation: Any) -> Iterator[Any]:
    """Yields all MLIR values that an operation and the operations in its regions take."""
    yield from operation.operands
    for inner in nested_operations(operation):
        yield from inner.operands


def _bytes(op: Any) -> int:
    kind = ir.RankedTensorType(op.results[0].type)
    (bits,) = re.findall(r"\d+", str(kind.element_type))[:1] or ["64"]
    return math.prod(kind.shape) * max(8, int(bits)) // 8


def _member(op: Any) -> _Member:
    groups = ir.DenseElementsAttr(op.attributes["replica_groups"]).type
    axis = ir.IntegerAttr(op.attributes[_AXIS[op.name]]).value if op.name in _AXIS else 0
    given, result = tuple(_shape(op.operands[0])), tuple(_shape(op.results[0]))
    return _Member(op, given, result, axis, ir.RankedTensorType(groups).shape[1])


def _combine(members: Sequence[_Member], next_operation: Any) -> None:
    """Inserts one collective that does the work of all `members`, before `next_operation`.

    Operations that used the result of a member then use the member's slice of the new collective's
    result. The caller erases the members.
    """
    first, cores = members[0].op, members[0].cores
    names = [_NAME.match(str(m.op.location)) for m in members]
    # Compilers name an operation made from several others like this.
    merged = f"({':'.join(name[1] if name else '?' for name in names)})"
    location = ir.Location.name(merged) if all(names) else first.location
    stacks = first.name == _ALL_REDUCE and len({m.result for m in members}) == 1
    sizes = [1] * len(members) if stacks else [m.elements_per_core for m in members]
    with ir.InsertionPoint(next_operation):
        given = []
        for member in members:
            with member.op.location:
                given.append(_packable_operand(member, stacks))
        with location:
            axis = 0 if first.name == _ALL_REDUCE else 1
            packed = _concatenate(given, axis)
            shape = _shape(packed)
            if first.name == _SCATTER:
                shape[0] = 1
            elif first.name == _GATHER:
                shape[0] = cores
            attributes = {"replica_groups": first.attributes["replica_groups"]}
            if first.name in _AXIS:
                int64 = ir.IntegerType.get_signless(64)
                attributes[_AXIS[first.name]] = ir.IntegerAttr.get(int64, 0)
            regions = 0 if first.name == _GATHER else 1
            made = create(first.name, _like(packed, shape), [packed], attributes, regions)
            if regions:
                fill_with_sum(made.owner.regions[0], packed)
        begin = 0
        for member, size in zip(members, sizes):
            with member.op.location:
                piece = _slice(made, axis, begin, begin + size)
                member.op.results[0].replace_all_uses_with(_unpacked_result(member, piece))
            begin += size


def _packable_operand(member: _Member, stacks: bool) -> Any:
    """Returns the operand of the collective `member`, reshaped for a concatenation with others.

    If `stacks` is True, all operands have the same shape, and the returned value has a new first
    dimension of size 1. If `stacks` is False, the returned value depends on the collective. For an
    all-reduce it is flat. For an all-gather it is a matrix with one row. For a reduce-scatter it is
    a matrix with a row for each core.
    """
    x, shape, axis = member.op.operands[0], list(member.given), member.axis
    if stacks:
        return _reshape(x, [1, *shape])
    if member.op.name == _ALL_REDUCE:
        return _reshape(x, [math.prod(shape)])
    if member.op.name == _GATHER:
        return _reshape(x, [1, math.prod(shape)])
    # A row for each core.
    x = _reshape(x, [*shape[:axis], member.cores, shape[axis] // member.cores, *shape[axis + 1 :]])
    rest = [i for i in range(len(shape) + 1) if i != axis]
    return _reshape(_transpose(x, [axis, *rest]), [member.cores, member.elements_per_core])


def _unpacked_result(member: _Member, piece: Any) -> Any:
    """Returns the value that replaces the result of the collective `member`, in the same shape.

    `piece` is a slice of the combined collective's result: the part that belongs to `member`.
    """
    if member.op.name == _GATHER:
        axis, count = member.axis, len(member.given)
        x = _reshape(piece, [member.cores, *member.given])
        piece = _transpose(x, [*range(1, axis + 1), 0, *range(axis + 1, count + 1)])
    return _reshape(piece, list(member.result))


def _like(value: Any, shape: Sequence[int]) -> Any:
    return ir.RankedTensorType.get(shape, ir.RankedTensorType(value.type).element_type)


def _shape(value: Any) -> list[int]:
    return list(ir.RankedTensorType(value.type).shape)


def _reshape(x: Any, shape: Sequence[int]) -> Any:
    if _shape(x) == list(shape):
        return x
    return create("stablehlo.reshape", _like(x, shape), [x])


def _transpose(x: Any, order: list[int]) -> Any:
    if order == sorted(order):
        return x
    shape = _shape(x)
    permutation = {"permutation": ir.DenseI64ArrayAttr.get(order)}
    return create("stablehlo.transpose", _like(x, [shape[i] for i in order]), [x], permutation)


def _concatenate(values: Sequence[Any], axis: int) -> Any:
    shape = _shape(values[0])
    shape[axis] = sum(_shape(x)[axis] for x in values)
    dimension = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), axis)
    return create(
        "stablehlo.concatenate", _like(values[0], shape), values, {"dimension": dimension}
    )


def _slice(x: Any, axis: int, begin: int, end: int) -> Any:
    shape = _shape(x)
    starts, limits = [0] * len(shape), list(shape)
    starts[axis], limits[axis], shape[axis] = begin, end, end - begin
    numbers = {"start_indices": starts, "limit_indices": limits, "strides": [1] * len(shape)}
    attributes = {name: ir.DenseI64ArrayAttr.get(n) for name, n in numbers.items()}
    return create("stablehlo.slice", _like(x, shape), [x], attributes)


# Smaller packs are concatenated: a loop takes no longer than starting so many copies.
_FEWEST_TENSORS = 8
_ELEMENTS_A_TENSOR = 512
_SUMS = ("stablehlo.all_reduce", "stablehlo.reduce_scatter")


def write_by_piece(module: Any) -> bool:
    """Makes an MLIR module write large packs tensor by tensor; returns whether it was changed.

    A large pack is a concatenation of many tensors that is added up over cores. In its place, the
    module then writes each of the tensors into an array of zeros, with ``dynamic_update_slice``. A
    module without large packs is not changed.
    """
    operations = list(nested_operations(module.operation))
    packs = [op for op in operations if _is_large_concatenation(op)]
    if packs:
        for op in [op for op in operations if op.name == "stablehlo.reduce_scatter"]:
            _skip_reshape_of_pack(op)
    for op in packs:
        _by_piece(op)
    return bool(packs)


def _is_large_concatenation(op: Any) -> bool:
    if op.name != "stablehlo.concatenate" or len(op.operands) < _FEWEST_TENSORS:
        return False
    kind = ir.RankedTensorType(op.results[0].type)
    elements = math.prod(kind.shape)
    is_float = str(kind.element_type) in ("f32", "f64", "bf16", "f16")
    is_large = elements >= _ELEMENTS_A_TENSOR * len(op.operands)
    return is_float and is_large and _is_summed(op)


def _is_summed(op: Any) -> bool:
    """Returns whether the result of an MLIR operation is added up over cores.

    `op` is the operation. The result may be reshaped before it is added up.
    """
    users = [use.owner for use in op.results[0].uses]
    users += [
        use.owner for u in users if u.name == "stablehlo.reshape" for use in u.results[0].uses
    ]
    return any(u.name in _SUMS for u in users)


def _skip_reshape_of_pack(op: Any) -> None:
    """Makes a reduce-scatter take a concatenation of tensors directly, without a reshape of it.

    Programs reshape the concatenation into the tiles of a TPU. On CPUs, XLA would fuse this reshape
    with the write of the last tensor, into a loop over all tensors. So the reshape is made after
    the reduce-scatter. `op` is the reduce-scatter, an MLIR operation. The reduce-scatter is not
    changed if its operand is not reshaped, or if the reshape changes the number of rows.
    """
    reshape = op.operands[0].owner
    if getattr(reshape, "name", "") != "stablehlo.reshape":
        return
    packed = reshape.operands[0]
    kind, result = ir.RankedTensorType(packed.type), ir.RankedTensorType(op.results[0].type)
    rows = ir.RankedTensorType(op.operands[0].type).shape[0]
    axis = ir.IntegerAttr(op.attributes["scatter_dimension"]).value
    if axis != 0 or not kind.rank or kind.shape[0] != rows:
        return
    part = ir.RankedTensorType.get([result.shape[0], *kind.shape[1:]], kind.element_type)
    # Versions of jaxlib iterate over attributes with names, or over names.
    names = [getattr(one, "name", one) for one in op.attributes]
    with ir.InsertionPoint(op), op.location:
        made = create(op.name, part, [packed], {name: op.attributes[name] for name in names}, 1)
        back = create("stablehlo.reshape", result, [made])
    fill_with_sum(made.owner.regions[0], packed)
    op.results[0].replace_all_uses_with(back)
    op.erase()


def _by_piece(op: Any) -> None:
    kind = ir.RankedTensorType(op.results[0].type)
    axis = ir.IntegerAttr(op.attributes["dimension"]).value
    with ir.InsertionPoint(op), op.location:
        zeros = ir.DenseElementsAttr.get_splat(kind, ir.FloatAttr.get(kind.element_type, 0.0))
        pack = _constant(zeros)
        first, begin = _number(0), 0
        for piece in op.operands:
            where = [first] * kind.rank
            where[axis] = _number(begin)
            pack = create("stablehlo.dynamic_update_slice", kind, [pack, piece, *where])
            begin += ir.RankedTensorType(piece.type).shape[axis]
    op.results[0].replace_all_uses_with(pack)
    op.erase()


def _number(value: int) -> Any:
    return _constant(ir.DenseElementsAttr.get(np.array(value, np.int32)))


def _constant(value: Any) -> Any:
    return create("stablehlo.constant", value.type, [], {"value": value})
