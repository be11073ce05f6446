"""An estimate of a compiled program's cost, in which every iteration of loops counts."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Iterator, Mapping, NamedTuple

from mtf_gradsync.runtimes.xla.hlo import read_module, stored_bytes
from mtf_gradsync.runtimes.xla.topology.chips import Rates
from mtf_gradsync.runtimes.xla.topology.roofline import work_of

_SUMS = (
    *("flops", "bytes_accessed", "seconds", "bytes_copied"),
    *("compiler_seconds", "compiler_bytes"),
)
# Custom calls of which libtpu 0.0.42 has no estimate.
_NEVER_KNOWN = frozenset({"ConcatBitcast", "X64Combine", "X64SplitHigh", "X64SplitLow"})
# TensorFlow's conditionals become this operation; its first branch is for true.
_IF, _NOT = "stablehlo.if", "stablehlo.not"


@dataclasses.dataclass(frozen=True)
class CostEstimate:
    """The estimated cost of one step on one core. It is not measured.

    The estimate adds up the operations of the compiled program, as if they ran one after the other.
    The time on links, on the host and for the input does not count.

    Attributes:
      flops: floating-point operations, by the compiler's count.
      bytes_accessed: bytes that operations read and write, in any of the core's memories. Copies
        between these memories that run while other operations run do not count.
      seconds: the time of all operations, each at its roofline. The roofline is the longer of two
        times: the time of the operation's multiplications at the chip's published peak, and the
        time of the operation's bytes at the published bandwidth of the memory.
      unknown: the number of custom calls whose operations are not known. Only their bytes count.
      unknown_operations: targets of these custom calls.
      bytes_copied: bytes that the compiled program copies from one memory of the core to another
        while other operations run, padding included. In small programs `compiler_bytes` counts each
        of these bytes about four times.
      loops_counted_once: the number of loops of which only one iteration counts, because their
        number of iterations is not known.
      rates: the published rates of the core.
      compiler_seconds: libtpu's own estimate, for comparing two programs. The estimate of libtpu
        0.0.17 does not depend on the chip. The estimate of 0.0.42 leaves out small operations if
        there are many that it cannot estimate.
      compiler_bytes: libtpu's own count of bytes.
    """

    flops: float
    bytes_accessed: float
    seconds: float
    unknown: int = 0
    unknown_operations: tuple[str, ...] = ()
    bytes_copied: float = 0.0
    loops_counted_once: int = 0
    rates: Rates | None = None
    compiler_seconds: float = 0.0
    compiler_bytes: float = 0.0

    @property
    def roofline_seconds(self) -> float:
        """The least possible time in seconds: the longer of all operations' and all bytes' times.

        The value is 0 if the rates are unknown.
        """
        if self.rates is None:
            return 0.0
        return max(self.flops / self.rates.flops, self.bytes_accessed / self.rates.bytes)

    def plus(self, times: int, less: CostEstimate, more: CostEstimate) -> CostEstimate:
        """Returns this estimate + `times` * (`more` - `less`), figure by figure.

        Figures that cannot be added up, such as the rates, stay as they are in this estimate.
        """
        sums = {
            name: getattr(self, name) + times * (getattr(more, name) - getattr(less, name))
            for name in _SUMS
        }
        return dataclasses.replace(self, **sums)


def read_estimate(
    numbers: Mapping[str, float], compiled: bytes, rates: Rates, conditions: bool | None = None
) -> CostEstimate:
    """Estimates a compiled program's cost, counting one iteration of each loop.

    Args:
      numbers: libtpu's "flops", "bytes accessed" and "optimal_seconds" of the program.
        "optimal_seconds" is a sum in which each operation that libtpu cannot estimate counts as -1.
      compiled: the program, a serialized ``HloModuleProto``.
      rates: the rates of one core.
      conditions: the value of all conditions, which decides which branches count; None counts no
        branch of a conditional.
    """
    module = read_module(compiled)
    work = work_of(module, rates, conditions)
    # The first part of a copy's result is the copy itself.
    copied = sum(
        stored_bytes(one.shape.tuple_shapes[0])
        for one in module.instructions
        if one.opcode == "copy-start"
    )
    # If the sum is more than a second, it does not show how many operations count as -1.
    never_known = sum(target in _NEVER_KNOWN for target in work.custom_calls)
    own = numbers["optimal_seconds"] + never_known
    unknown = work.unknown
    return CostEstimate(
        flops=numbers.get("flops", 0.0),  # a program of collectives alone has none
        bytes_accessed=work.bytes,
        seconds=work.seconds,
        unknown=len(unknown),
        unknown_operations=tuple(sorted(set(unknown))),
        bytes_copied=copied,
        rates=rates,
        compiler_seconds=own if own >= 0 else own + math.ceil(-own),
        compiler_bytes=numbers["bytes accessed"],
    )


def with_conditions(module: str, value: bool) -> str | None:
    """Returns a StableHLO program's text with each conditional replaced by one of its branches.

    `module` is the program's text, and `value` is the value of all conditions, which decides which
    branches stay. Only a condition that is the negation of another one ("report if not finite"
    beside "update if finite") has the opposite value. Returns None for a program without
    conditionals. The changed program serves to estimate the cost of the branches that a step runs;
    the compiler's own estimate of a conditional is not the cost of one branch.
    """
    from jax.interpreters import mlir
    from jaxlib.mlir import ir

    from mtf_gradsync.runtimes.xla.runner.combiner import nested_operations

    with mlir.make_ir_context(), ir.Location.unknown():
        parsed = ir.Module.parse(module)
        conditionals = [op for op in nested_operations(parsed.operation) if op.name == _IF]
        conditions = [op.operands[0] for op in conditionals]
        branches = []
        for condition in conditions:
            # The owner may be a view of the operation, or the block that has the value as argument.
            made_by: Any = getattr(condition.owner, "operation", None)
            is_negation = made_by is not None and made_by.name == _NOT
            is_opposite = is_negation and made_by.operands[0] in conditions
            branches.append(0 if value is not is_opposite else 1)
        # Inner conditionals first, because a branch that does not stay is erased.
        for conditional, branch in reversed(list(zip(conditionals, branches))):
            _replace_by_branch(conditional, branch)
        return str(parsed) if conditionals else None


def _replace_by_branch(conditional: Any, branch: int) -> None:
    """Replaces a conditional, an MLIR operation, by the operations of one of its branches.

    `branch` is the branch's number: 0 is the branch that runs if the condition is true. (A constant
    condition would not be enough, because the compiler keeps conditionals that have collectives.)
    """
    *operations, last = conditional.regions[branch].blocks[0].operations
    for operation in operations:
        operation.operation.move_before(conditional)
    for result, value in zip(conditional.results, last.operands):
        result.replace_all_uses_with(value)
    conditional.erase()


_WHILE = "stablehlo.while"


class OneMoreIteration(NamedTuple):
    """A program in which one loop has one more iteration, whose operations are before the loop."""

    module: str  # StableHLO
    times: int  # how many times to add the difference of the estimates to the program's


def with_one_more_iteration(module: str) -> tuple[list[OneMoreIteration], int]:
    """Makes, for each loop of a program, a program with one more iteration of this loop.

    `module` is the StableHLO of the original program. An iteration of a loop costs the difference
    between the estimate of the program that was made for the loop and the estimate of the original
    program.

    Returns:
      The new programs, and the number of loops whose iterations cannot be counted: these loops, or
      loops around them, lack the attribute `ITERATIONS`. For a loop whose iterations cannot be
      counted no new program is made, nor for a loop with fewer than two iterations.
    """
    if _WHILE not in module:
        return [], 0
    from jax.interpreters import mlir
    from jaxlib.mlir import ir

    from mtf_gradsync.runtimes.xla.stablehlo import ITERATIONS, main_of

    found, unknown = [], 0
    with mlir.make_ir_context(), ir.Location.unknown():
        parsed = ir.Module.parse(module)
        for number, (loop, around) in enumerate(_loops(main_of(parsed))):
            all_loops = (*around, loop)
            known = [
                ir.IntegerAttr(op.attributes[ITERATIONS]).value
                for op in all_loops
                if ITERATIONS in op.attributes
            ]
            outer = math.prod(known[:-1])
            if len(known) < len(all_loops):
                unknown += 1
            elif known[-1] > 1 and outer:  # a loop without iterations is removed by the compiler
                copy = ir.Module.parse(module)
                _put_iteration_before(list(_loops(main_of(copy)))[number][0])
                found.append(OneMoreIteration(str(copy), known[-1] * outer - outer))
    return found, unknown


def _loops(operation: Any, around: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yields each loop in an MLIR operation, with a tuple of the loops around it, outermost first.

    `around` are the loops around `operation` itself. The order of the loops is the same for a copy
    of the program, so that a loop can be found in the copy by its number.
    """
    for region in operation.regions:
        for block in region:
            for inner in (op.operation for op in block):
                is_loop = inner.name == _WHILE
                if is_loop:
                    yield inner, around
                yield from _loops(inner, (*around, inner) if is_loop else around)


def _put_iteration_before(loop: Any) -> None:
    """Puts a copy of a loop's body before the loop; the loop then begins with the copy's results.

    `loop` is an MLIR operation.
    """
    from jaxlib.mlir import ir

    copied_loop = loop.clone(ip=ir.InsertionPoint(loop))
    block = copied_loop.regions[1].blocks[0]
    *operations, last = block.operations
    for argument, value in zip(block.arguments, copied_loop.operands):
        argument.replace_all_uses_with(value)
    for operation in operations:
        operation.operation.move_before(loop)
    for number, value in enumerate(list(last.operands)):
        loop.operands[number] = value
    copied_loop.erase()
