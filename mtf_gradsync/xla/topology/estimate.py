"""The compiler's own estimate of what a program costs."""

from __future__ import annotations

import dataclasses
from typing import Any, Iterator, Mapping

from mtf_gradsync.xla.hlo import read_module, stored_bytes
from mtf_gradsync.xla.runner.operations import walk

# Custom calls that take no time: they name a piece of memory.
_FREE = frozenset({"AllocateBuffer"})
# Custom calls that never have an estimate (libtpu 0.0.42).
_NEVER_KNOWN = frozenset({"ConcatBitcast", "X64Combine", "X64SplitHigh", "X64SplitLow"})
# What TensorFlow's conditionals become; its first branch is the one for true.
_IF, _NOT = "stablehlo.if", "stablehlo.not"
# Marks a conditional on the opposite of another one's condition.
_OPPOSITE = "mtf_gradsync.opposite"


@dataclasses.dataclass(frozen=True)
class CostEstimate:
    """The compiler's estimate of one step on one core, for comparing two programs. It is no timing.

    The estimate adds up the program's operations one after the other: nothing overlaps, and neither
    the host nor the input counts.

    Attributes:
      flops: floating-point operations.
      bytes_accessed: bytes that operations read from memory and write to it.
      seconds: the time of all operations that the compiler can estimate.
      unknown: the number of operations that it cannot estimate.
      unknown_operations: targets of the program's custom calls, which may be those operations.
      bytes_copied: bytes that the compiled program copies from one memory of the core to another
        while other operations run, padding included. In small programs `bytes_accessed` counts each
        about four times.
      loops_counted_once: the number of loops of which one turn is in the numbers, because it is not
        known how often they turn.
    """

    flops: float
    bytes_accessed: float
    seconds: float
    unknown: int = 0
    unknown_operations: tuple[str, ...] = ()
    bytes_copied: float = 0.0
    loops_counted_once: int = 0

    def plus(self, times: int, less: CostEstimate, more: CostEstimate) -> CostEstimate:
        """This estimate, and so many times what one of two others has more than the other."""
        sums = {
            name: getattr(self, name) + times * (getattr(more, name) - getattr(less, name))
            for name in ("flops", "bytes_accessed", "seconds", "bytes_copied")
        }
        return dataclasses.replace(self, **sums)


def read_estimate(numbers: Mapping[str, float], compiled: bytes) -> CostEstimate:
    """Returns the estimate in libtpu's numbers for a compiled program, an ``HloModuleProto``.

    The numbers are "flops", "bytes accessed" and "optimal_seconds", a sum in which each operation
    that the compiler cannot estimate counts as -1 (libtpu 0.0.42).
    """
    module = read_module(compiled)
    instructions = [i for c in module.computations for i in c.instructions]
    # A sum of more than a second does not show how many it lacks.
    unknown = sum(i.custom_call_target in _NEVER_KNOWN for i in _counted(module))
    seconds = numbers["optimal_seconds"] + unknown
    while seconds < 0:
        seconds, unknown = seconds + 1, unknown + 1
    targets = {i.custom_call_target for i in instructions if i.opcode == "custom-call"}
    # The first part of a copy's result is the copy itself.
    copied = sum(
        stored_bytes(i.shape.tuple_shapes[0]) for i in instructions if i.opcode == "copy-start"
    )
    names = tuple(sorted(targets - _FREE)) if unknown else ()
    bytes_accessed = numbers["bytes accessed"]
    return CostEstimate(numbers["flops"], bytes_accessed, seconds, unknown, names, copied)


def _counted(module: Any) -> Iterator[Any]:
    """Yields the instructions that the estimate counts: none in a branch."""
    computations = {c.id: c for c in module.computations}
    waiting = [module.entry_computation_id]
    while waiting:
        for instruction in computations[waiting.pop()].instructions:
            yield instruction
            if instruction.opcode in ("while", "call"):
                waiting += instruction.called_computation_ids


def with_conditions(module: str, value: bool) -> str | None:
    """Returns a StableHLO program's text with its conditionals replaced by one of their branches.

    What the compiler's estimate counts of a conditional is not what a step runs. All conditions
    have the same `value`, except one that is the negation of another ("report if not finite" beside
    "update if finite"): it has the opposite value. Returns None for a program without conditionals.
    """
    from jax.interpreters import mlir
    from jaxlib.mlir import ir

    with mlir.make_ir_context(), ir.Location.unknown():
        parsed = ir.Module.parse(module)
        conditionals = [op for op in walk(parsed.operation) if op.name == _IF]
        conditions = [op.operands[0] for op in conditionals]
        for conditional, condition in zip(conditionals, conditions):
            # The owner may be a view of the operation, or the block that has the value as argument.
            made_by = getattr(condition.owner, "operation", None)
            if made_by is None or made_by.name != _NOT:
                continue
            if made_by.operands[0] in conditions:
                conditional.attributes[_OPPOSITE] = ir.UnitAttr.get()
        found = 0
        while True:
            conditional = next((op for op in walk(parsed.operation) if op.name == _IF), None)
            if conditional is None:
                return str(parsed) if found else None
            is_true = value is not (_OPPOSITE in conditional.attributes)
            _put_in_line(conditional, 0 if is_true else 1)
            found += 1


def _put_in_line(conditional: Any, branch: int) -> None:
    """Replaces a conditional by one of its branches.

    The compiler keeps a conditional with collectives even where its condition is a constant.
    """
    *operations, last = conditional.regions[branch].blocks[0].operations
    for operation in operations:
        operation.operation.move_before(conditional)
    for result, value in zip(conditional.results, last.operands):
        result.replace_all_uses_with(value)
    conditional.erase()
