"""How long a compiled program takes by a chip's rates: each operation at its roofline."""

from __future__ import annotations

import collections
import functools
import math
from typing import Any, Iterator, NamedTuple

from mtf_gradsync.runtimes.xla.hlo import shape_bytes
from mtf_gradsync.runtimes.xla.topology.chips import Rates

# They name values, or make them out of nothing while another operation reads them.
_FREE = frozenset(("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"))
# Custom calls that name memory, or mark where a call begins and ends.
_FREE_CALLS = frozenset(
    ("AllocateBuffer", "ConcatBitcast", "PrepareAsyncCallDone", "PrepareAsyncCallStart")
)
# Custom calls that move the halves of numbers of 64 bits.
_MOVES = frozenset(("X64Combine", "X64SplitHigh", "X64SplitLow"))
# They read of their first operand what they return, and no more.
_SLICES = frozenset(("dynamic-slice", "gather", "slice"))
_PASSED_ON = frozenset(("bitcast", "reshape"))
_COPIES = frozenset((*_FREE, *_SLICES, "copy", "dynamic-update-slice"))


# An estimate of a sum of rooflines is between one and two rooflines of the whole, to what is no
# product in the compiler's count of operations.
_LEAST, _MOST = 0.95, 3.0


def why_doubtful(seconds: float, roofline: float) -> str:
    """Returns why an estimate cannot be right beside the roofline of the whole; "" if it can."""
    whole = f"its roofline of {1e3 * roofline:.3g} ms"
    if seconds < _LEAST * roofline:
        return f"below {whole}"
    if roofline and seconds > _MOST * roofline:
        return f"{seconds / roofline:.3g} times {whole}"
    return ""


class Work(NamedTuple):
    """The operations of a step on one core; those of a loop count once, those of branches not."""

    flops: float  # of products of matrices and of convolutions
    bytes: float  # that operations read and write
    seconds: float  # of all operations one after the other, each at its roofline
    custom_calls: tuple[str, ...]  # their targets

    @property
    def unknown(self) -> tuple[str, ...]:
        """Targets of the custom calls of which the bytes are known alone."""
        return tuple(t for t in self.custom_calls if t not in _FREE_CALLS | _MOVES)


def work_of(module: Any, rates: Rates) -> Work:
    """Returns the work of a compiled program, an ``HloModuleProto``."""
    reader = _Reader({c.id: c for c in module.computations})
    flops = bytes_ = seconds = 0.0
    custom_calls = []
    for instruction, computation in reader.run_by(module.entry_computation_id):
        own_flops = reader.flops(instruction, computation)
        own_bytes = reader.bytes(instruction, computation)
        flops, bytes_ = flops + own_flops, bytes_ + own_bytes
        seconds += max(own_flops / rates.flops, own_bytes / rates.bytes)
        if instruction.opcode == "custom-call":
            custom_calls.append(instruction.custom_call_target)
    return Work(flops, bytes_, seconds, tuple(custom_calls))


class _Reader:
    """Reads instructions of a module's computations."""

    def __init__(self, computations: dict[int, Any]):
        self._computations = computations
        self._by_id = functools.lru_cache(None)(self._instructions_by_id)
        self._users = functools.lru_cache(None)(self._users_by_id)
        self._flops_within = functools.lru_cache(None)(self._flops_of_computation)

    def _instructions_by_id(self, computation: int) -> dict[int, Any]:
        return {i.id: i for i in self._computations[computation].instructions}

    def _users_by_id(self, computation: int) -> dict[int, list[tuple[Any, int]]]:
        """Value -> instructions that take it, each with the number of the operand."""
        users = collections.defaultdict(list)
        for instruction in self._computations[computation].instructions:
            for number, operand in enumerate(instruction.operand_ids):
                users[operand].append((instruction, number))
        return users

    def _parameter(self, computation: int, number: int) -> Any:
        instructions = self._computations[computation].instructions
        return next(
            i for i in instructions if i.opcode == "parameter" and i.parameter_number == number
        )

    def run_by(self, computation: int) -> Iterator[tuple[Any, int]]:
        """Yields instructions that take time with their computations; loops turn once."""
        for instruction in self._computations[computation].instructions:
            if instruction.opcode in ("while", "call"):
                for called in instruction.called_computation_ids:
                    yield from self.run_by(called)
            elif instruction.opcode not in (*_FREE, "conditional"):
                yield instruction, computation

    def flops(self, instruction: Any, computation: int) -> float:
        """Operations of the products in an instruction, twice the number of multiplications."""
        if instruction.opcode in ("convolution", "dot"):
            by_id = self._by_id(computation)
            left, right = (by_id[operand].shape for operand in instruction.operand_ids)
            if instruction.opcode == "dot":
                return _flops_of_dot(instruction, left)
            return _flops_of_convolution(instruction, left, right)
        if instruction.opcode in ("fusion", "async-start", "call"):
            return sum(map(self._flops_within, instruction.called_computation_ids))
        return 0.0

    def _flops_of_computation(self, computation: int) -> float:
        instructions = self._computations[computation].instructions
        return sum(self.flops(instruction, computation) for instruction in instructions)

    def bytes(self, instruction: Any, computation: int) -> int:
        """Bytes that an instruction reads and writes.

        One that is started and done later reads at its start, and writes when it is done. Copies
        that are so, to the core's fast memory and back, run beside other operations: what they
        bring counts where it is read.
        """
        opcode, is_call = instruction.opcode, instruction.opcode == "custom-call"
        if opcode.endswith("-update") or (
            is_call and instruction.custom_call_target in _FREE_CALLS
        ):
            return 0
        if self._copies_beside(instruction, computation):
            return 0
        read = written = 0
        if not opcode.endswith("-done"):
            numbers = range(len(instruction.operand_ids))
            read = sum(self._read_by(instruction, number, computation) for number in numbers)
        if not opcode.endswith("-start"):
            written = self._written(instruction, computation)
        return read + written

    def _copies_beside(self, instruction: Any, computation: int) -> bool:
        if instruction.opcode in ("async-update", "async-done"):
            return self._copies_beside(
                self._by_id(computation)[instruction.operand_ids[0]], computation
            )
        if instruction.opcode == "async-start":
            called = self._computations[instruction.called_computation_ids[0]]
            return all(i.opcode in _COPIES for i in called.instructions)
        return instruction.opcode in ("copy-start", "copy-done")

    def _read_by(self, instruction: Any, number: int, computation: int) -> int:
        """Bytes that an instruction reads of one of its operands."""
        operand = self._by_id(computation)[instruction.operand_ids[number]]
        whole, opcode = shape_bytes(operand.shape), instruction.opcode
        if number == 0 and opcode in _SLICES:
            return min(whole, shape_bytes(instruction.shape))
        if number == 0 and opcode == "dynamic-update-slice":
            return 0  # it is written into
        if opcode in ("fusion", "async-start"):
            called = instruction.called_computation_ids[0]
            return min(whole, self._read_within(called, self._parameter(called, number)))
        return whole

    def _read_within(self, computation: int, value: Any) -> int:
        """Bytes that the instructions of a fusion read of a value."""
        users = self._users(computation)[value.id]
        if not users:
            return shape_bytes(value.shape)
        return sum(
            self._read_within(computation, user)
            if user.opcode in _PASSED_ON
            else self._read_by(user, number, computation)
            for user, number in users
        )

    def _written(self, instruction: Any, computation: int) -> int:
        """Bytes of a result; of one that is written into a parameter only what is written."""
        by_id, opcode = self._by_id(computation), instruction.opcode
        if opcode == "dynamic-update-slice":
            into = by_id[instruction.operand_ids[0]]
            while into.opcode in _PASSED_ON:
                into = by_id[into.operand_ids[0]]
            if into.opcode in ("parameter", "get-tuple-element"):
                return shape_bytes(by_id[instruction.operand_ids[1]].shape)
        if opcode == "fusion":
            called = instruction.called_computation_ids[0]
            root = self._by_id(called)[self._computations[called].root_id]
            return self._written_by_root(root, called)
        return shape_bytes(instruction.shape)

    def _written_by_root(self, root: Any, computation: int) -> int:
        by_id = self._by_id(computation)
        if root.opcode == "tuple":
            return sum(self._written_by_root(by_id[i], computation) for i in root.operand_ids)
        while root.opcode in _PASSED_ON:
            root = by_id[root.operand_ids[0]]
        return self._written(root, computation)


def _flops_of_dot(dot: Any, left: Any) -> float:
    summed = dot.dot_dimension_numbers.lhs_contracting_dimensions
    return 2.0 * math.prod(dot.shape.dimensions) * math.prod(left.dimensions[d] for d in summed)


def _flops_of_convolution(convolution: Any, left: Any, right: Any) -> float:
    """Counts only positions at which the window meets numbers, and no padding or dilation.

    The TPU compiler writes products of matrices as convolutions with much of both.
    """
    numbers = convolution.convolution_dimension_numbers
    positions = 1
    for i, window in enumerate(convolution.window.dimensions):
        positions *= _positions(
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


def _positions(numbers: int, kernel: int, results: int, window: Any) -> int:
    """Pairs, along a dimension, of a place in the kernel and a result that meet a number."""
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
        # Every period-th result from r on; those are in order.
        step = period * window.stride // window.base_dilation
        start = (first + r * window.stride) // window.base_dilation
        count = (results - r + period - 1) // period
        low = max(0, -(start // step)) if start < 0 else 0
        high = min(count, max(0, (numbers - 1 - start) // step + 1)) if start < numbers else 0
        found += max(0, high - low)
    return found
