"""Estimates a compiled program's time from a chip's rates: each operation at its roofline."""

from __future__ import annotations

import bisect
import math
from typing import Any, Iterator, NamedTuple, Sequence

from mtf_gradsync.runtimes.xla.hlo import Computation, HloModule, Instruction
from mtf_gradsync.runtimes.xla.topology.chips import Rates

# Operations that take no time: they name values, or make constants while others read them.
_FREE = frozenset(("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"))
# Custom calls that name memory, or mark where a call begins and ends.
_FREE_CALLS = frozenset(
    ("AllocateBuffer", "ConcatBitcast", "PrepareAsyncCallDone", "PrepareAsyncCallStart")
)
# Custom calls that move the halves of numbers of 64 bits.
_MOVES = frozenset(("X64Combine", "X64SplitHigh", "X64SplitLow"))
# Operations that read only that part of their first operand which they return.
_SLICES = frozenset(("dynamic-slice", "gather", "slice"))
_PASSED_ON = frozenset(("bitcast", "reshape"))
_COPIES = frozenset((*_FREE, *_SLICES, "copy", "dynamic-update-slice"))


# A sum of operations' rooflines is between one and two times the roofline of the whole, except that
# the compiler's count of operations also has some that are no multiplications.
_LEAST, _MOST = 0.95, 3.0


def why_doubtful(seconds: float, roofline: float) -> str:
    """Returns why an estimated time is doubtful, as in "below its roofline of 2 ms"; "" if not.

    `seconds` is the estimate, the sum of the operations' rooflines. `roofline` is the roofline of
    the whole program in seconds, to which the sum should be near.
    """
    whole = f"its roofline of {1e3 * roofline:.3g} ms"
    if seconds < _LEAST * roofline:
        return f"below {whole}"
    if roofline and seconds > _MOST * roofline:
        return f"{seconds / roofline:.3g} times {whole}"
    return ""


class Work(NamedTuple):
    """The work of one step of a compiled program on one core, with one iteration of each loop."""

    flops: float  # operations in products of matrices and in convolutions
    bytes: float  # bytes that operations read and write
    seconds: float  # the time of all operations one after the other, each at its roofline
    custom_calls: tuple[str, ...]  # the targets of custom calls

    @property
    def unknown(self) -> tuple[str, ...]:
        """The targets of custom calls whose operations are unknown."""
        return tuple(t for t in self.custom_calls if t not in _FREE_CALLS | _MOVES)


def work_of(module: HloModule, rates: Rates, conditions: bool | None = None) -> Work:
    """Adds up the operations, bytes and seconds of a compiled program's step on one core.

    `module` is the compiled program. `rates` are the core's rates, from which the seconds are
    computed. `conditions` is the value of all conditions, which decides which branches count; None
    counts no branch.
    """
    flops = bytes_ = seconds = 0.0
    custom_calls = []
    for instruction in _timed_instructions(module.entry, conditions):
        own_flops, own_bytes = _flops(instruction), _bytes(instruction)
        flops, bytes_ = flops + own_flops, bytes_ + own_bytes
        seconds += max(own_flops / rates.flops, own_bytes / rates.bytes)
        if instruction.opcode == "custom-call":
            custom_calls.append(instruction.proto.custom_call_target)
    return Work(flops, bytes_, seconds, tuple(custom_calls))


def _timed_instructions(computation: Computation, conditions: bool | None) -> Iterator[Instruction]:
    """Yields the instructions of a computation that take time when it runs.

    The instructions in a loop are yielded once, as for one iteration. `conditions` is the value of
    all conditions, which decides which branches run; if it is None, no branch runs.
    """
    for instruction in computation.instructions:
        called: Sequence[Computation] = ()
        if instruction.opcode in ("while", "call"):
            called = instruction.called
        elif instruction.opcode == "conditional" and conditions is not None:
            # The first branch is for true.
            called = instruction.called[:1] if conditions else instruction.called[1:]
        for one in called:
            yield from _timed_instructions(one, conditions)
        if instruction.opcode not in (*_FREE, "while", "call", "conditional"):
            yield instruction


def _flops(instruction: Instruction) -> float:
    """Returns how many floating-point operations an instruction does: two per multiplication.

    Only products of matrices and convolutions count.
    """
    if instruction.opcode == "dot":
        left = instruction.operands[0].shape.dimensions
        summed = instruction.proto.dot_dimension_numbers.lhs_contracting_dimensions
        return 2.0 * math.prod(instruction.shape.dimensions) * math.prod(left[d] for d in summed)
    if instruction.opcode == "convolution":
        left, right = (operand.shape for operand in instruction.operands)
        return _flops_of_convolution(instruction.proto, left, right)
    if instruction.opcode in ("fusion", "async-start", "call"):
        return sum(_flops(one) for called in instruction.called for one in called.instructions)
    return 0.0


def _bytes(instruction: Instruction) -> int:
    """Returns how many bytes an instruction reads and writes, as one sum.

    An operation that is split into start and end reads at its start and writes at its end. Copies
    to and from the core's fast memory count as 0, because they run beside other operations. The
    copied bytes count in the operations that read the copies.
    """
    opcode = instruction.opcode
    is_free_call = opcode == "custom-call" and instruction.proto.custom_call_target in _FREE_CALLS
    if opcode.endswith("-update") or is_free_call or _copies_beside(instruction):
        return 0
    read = written = 0
    if not opcode.endswith("-done"):
        read = sum(_bytes_read(instruction, n) for n in range(len(instruction.operands)))
    if not opcode.endswith("-start"):
        written = _bytes_written(instruction)
    return read + written


def _copies_beside(instruction: Instruction) -> bool:
    if instruction.opcode in ("async-update", "async-done"):
        return _copies_beside(instruction.operands[0])
    if instruction.opcode == "async-start":
        return all(one.opcode in _COPIES for one in instruction.called[0].instructions)
    return instruction.opcode in ("copy-start", "copy-done")


def _bytes_read(instruction: Instruction, number: int) -> int:
    """Returns how many bytes of its operand number `number`, counted from 0, an instruction reads.

    An operation such as a slice reads only a part of its operand.
    """
    whole, opcode = instruction.operands[number].bytes, instruction.opcode
    if number == 0 and opcode in _SLICES:
        return min(whole, instruction.bytes)
    if number == 0 and opcode == "dynamic-update-slice":
        return 0  # it is written into
    if opcode in ("fusion", "async-start"):
        return min(whole, _bytes_read_in_fusion(instruction.called[0].parameter(number)))
    return whole


def _bytes_read_in_fusion(value: Instruction) -> int:
    """Returns how many bytes of `value`, a parameter of a fusion, the fusion's instructions read.

    The result is the sum over all instructions that use the parameter.
    """
    if not value.users:
        return value.bytes
    return sum(
        _bytes_read_in_fusion(user) if user.opcode in _PASSED_ON else _bytes_read(user, number)
        for user, number in value.users
    )


def _bytes_written(instruction: Instruction) -> int:
    """Returns how many bytes an instruction writes; an update in place writes only a part."""
    if instruction.opcode == "dynamic-update-slice":
        into, written = instruction.operands[:2]
        if _before_reshapes(into).opcode in ("parameter", "get-tuple-element"):
            return written.bytes
    root = instruction.called[0].root if instruction.opcode == "fusion" else None
    return instruction.bytes if root is None else _bytes_written_by_root(root)


def _bytes_written_by_root(root: Instruction) -> int:
    if root.opcode == "tuple":
        return sum(map(_bytes_written_by_root, root.operands))
    return _bytes_written(_before_reshapes(root))


def _before_reshapes(value: Instruction) -> Instruction:
    """Returns the instruction that computed a value; skips instructions that only reshape it."""
    while value.opcode in _PASSED_ON:
        value = value.operands[0]
    return value


def _flops_of_convolution(convolution: Any, left: Any, right: Any) -> float:
    """Returns how many floating-point operations a convolution does with numbers of its input.

    Multiplications with the zeros of padding or dilation do not count: the TPU compiler writes
    products of matrices as convolutions with many such zeros. `convolution` is XLA's
    ``HloInstructionProto``. `left` and `right` are the ``ShapeProto`` messages of the convolution's
    input and kernel.
    """
    numbers = convolution.convolution_dimension_numbers
    positions = 1
    for i, window in enumerate(convolution.window.dimensions):
        positions *= _multiplications_along(
            left.dimensions[numbers.input_spatial_dimensions[i]],
            right.dimensions[numbers.kernel_spatial_dimensions[i]],
            convolution.shape.dimensions[numbers.output_spatial_dimensions[i]],
            window,
        )
    # Fields of no groups are 0 in programs of older versions.
    features = left.dimensions[numbers.input_feature_dimension]
    features //= max(1, convolution.feature_group_count)
    batch = left.dimensions[numbers.input_batch_dimension]
    batch //= max(1, convolution.batch_group_count)
    results = convolution.shape.dimensions[numbers.output_feature_dimension]
    return 2.0 * features * batch * results * positions


def _multiplications_along(numbers: int, kernel: int, results: int, window: Any) -> int:
    """Returns the number of multiplications along one dimension of a convolution.

    A kernel element and a result make a multiplication if, for this result, the kernel element lies
    over a number of the input. They make no multiplication if the kernel element lies over padding
    or dilation. `numbers`, `kernel` and `results` are the sizes of input, kernel and result along
    the dimension. `window` is XLA's message with the stride, padding and dilation along the
    dimension.
    """
    found = 0
    for place in range(kernel):
        first = place * window.window_dilation - window.padding_low
        # Result r meets the number at (first + r * stride) / base_dilation, if that is whole.
        period = window.base_dilation // math.gcd(window.stride, window.base_dilation)
        for r in range(min(period, results)):
            if (first + r * window.stride) % window.base_dilation == 0:
                break
        else:
            continue
        # Every period-th result from r on meets a number.
        step = period * window.stride // window.base_dilation
        start = (first + r * window.stride) // window.base_dilation
        met = range(start, start + step * len(range(r, results, period)), step)
        found += bisect.bisect_left(met, numbers) - bisect.bisect_left(met, 0)
    return found
