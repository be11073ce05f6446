"""CPU devices of this machine as what is planned for, so that predictions can be measured."""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple, Sequence

from mtf_gradsync._private.jax import compiled_hlo, cost_numbers, memory_bytes
from mtf_gradsync.planning.calibration import Rates, measure
from mtf_gradsync.planning.machines import Begun, Compiled
from mtf_gradsync.planning.rings import bytes_sent
from mtf_gradsync.simd.errors import UnsupportedProgramError
from mtf_gradsync.simd.program import Program
from mtf_gradsync.xla.devices.available import devices_for
from mtf_gradsync.xla.devices.cache import Cache
from mtf_gradsync.xla.devices.executable import Lowered as DeviceLowered
from mtf_gradsync.xla.devices.executable import loaded, lowered
from mtf_gradsync.xla.hlo import read_module, shape_bytes
from mtf_gradsync.xla.lowering.packed_sums import with_packed_sums
from mtf_gradsync.xla.lowering.replica_program import replica_program
from mtf_gradsync.xla.topology.collectives import find_hlo_collectives
from mtf_gradsync.xla.topology.compiled import CoreMemory
from mtf_gradsync.xla.topology.compiling import Lowered

# They name values and run nothing.
_NAMES = frozenset(("parameter", "constant", "tuple", "get-tuple-element", "bitcast"))


def cores_of(name: str) -> int:
    """The number in "cpu:8".

    Raises:
      ValueError: when there is none.
    """
    number = name.partition(":")[2]
    if not number.isdigit() or not int(number):
        raise ValueError(f'CPU devices are named with their number, as in "cpu:8"; got {name!r}')
    return int(number)


class CpuMachine:
    """CPU devices of this process; see `Machine`."""

    def __init__(
        self, name: str, cores: int, most: int | None = None, cache_dir: str | None = None
    ):
        """Measures the rates of the devices, which takes some seconds.

        Args:
          name: as it was asked for.
          cores: how many devices.
          most: how many to make, where others of this process need more; None for `cores`.
          cache_dir: where compiled programs are kept; None for nowhere.

        Raises:
          XlaMissingError: when jax is not installed.
          DevicesError: when jax has fewer devices already.
        """
        self.name, self.cores = name, cores
        self.memory_per_core: int | None = None
        self.peak_flops_per_core: float | None = None
        self._devices = devices_for(max(cores, most or 0), "cpu")[:cores]
        self._cache = Cache(cache_dir)
        self.rates: Rates = measure(self._devices)

    def lower(self, program: Program, fetches: Sequence[object]) -> Lowered:
        """See `Machine`. Sums that go together are packed, as sessions do it on CPU devices."""
        replica = with_packed_sums(replica_program(program, fetches))
        try:
            made = lowered(replica, self._cache)
        except UnsupportedProgramError as error:
            return Lowered(replica.num_replicas, None, str(error))
        return Lowered(replica.num_replicas, made.module)

    def compile(self, lowered: Lowered, begun: Begun) -> Compiled:
        """See `Machine`. The estimate is made of the measured rates."""
        del begun
        start = time.monotonic()
        assert lowered.module is not None  # it would have been refused
        program = DeviceLowered(lowered.module, 0, (), False)
        try:
            executable = loaded(program, self._devices, self._cache).executable
        except UnsupportedProgramError as error:
            return Compiled(error=str(error))
        hlo, cost = compiled_hlo(executable), cost_numbers(executable)
        memory = CoreMemory(*memory_bytes(executable))
        collectives = tuple(find_hlo_collectives(hlo))
        flops, touched = cost.get("flops", 0.0), cost.get("bytes accessed", 0.0)
        work, rates = _work(hlo), self.rates
        # What products and collectives read and write is in their own times.
        other = touched - work.product_bytes - 2 * sum(c.bytes_per_core for c in collectives)
        alone = (
            rates.run
            + work.operations * rates.operation
            + sum(rates.product(*sizes) for sizes in work.products)
            + max(0.0, other) * rates.byte
        )
        meetings = [max(map(len, c.groups), default=self.cores) for c in collectives]
        meetings = [self._nearest(members) for members in meetings if members > 1]
        return Compiled(
            bytes_per_core=memory.total,
            flops=flops,
            bytes_accessed=touched,
            estimate_seconds=alone + sum(rates.wait(n, alone / len(meetings)) for n in meetings),
            collectives=collectives,
            seconds=time.monotonic() - start,
        )

    def seconds(self, operation: str, groups: Sequence[Sequence[int]], size: float) -> float:
        """See `Machine`. Those of an all-reduce were measured; others take as long for a byte.

        What cores wait for each other is in the estimate, as it depends on what is in between.
        """
        members = max(len(group) for group in groups)
        if members < 2:
            return 0.0
        share = bytes_sent(operation, members, 1.0) / bytes_sent("all-reduce", members, 1.0)
        return self.rates.all_reduce(self._nearest(members), size * share)

    def _nearest(self, members: int) -> int:
        """The size of groups that was measured and is nearest to another."""
        return min(self.rates.sums, key=lambda n: abs(n - members))


class _Work(NamedTuple):
    """What a core does in a step; what a loop repeats counts once.

    Attributes:
      operations: how many it starts.
      products: (batch, m, n, k) of each product of matrices.
      product_bytes: what these read and write.
    """

    operations: int
    products: list[tuple[int, int, int, int]]
    product_bytes: int


def _work(hlo: bytes) -> _Work:
    module: Any = read_module(hlo)
    operations, products, product_bytes = 0, [], 0
    for computation in module.computations:
        shapes = {instruction.id: instruction.shape for instruction in computation.instructions}
        if computation.id == module.entry_computation_id:
            operations = sum(i.opcode not in _NAMES for i in computation.instructions)
        for instruction in computation.instructions:
            if instruction.opcode == "dot":
                left, right = (shapes[i] for i in instruction.operand_ids)
                numbers = instruction.dot_dimension_numbers
                k = math.prod(left.dimensions[i] for i in numbers.lhs_contracting_dimensions)
                batch = math.prod(left.dimensions[i] for i in numbers.lhs_batch_dimensions)
                m = math.prod(left.dimensions) // (k * batch)
                n = math.prod(right.dimensions) // (k * batch)
                products.append((batch, m, n, k))
                product_bytes += sum(map(shape_bytes, (left, right, instruction.shape)))
    return _Work(operations, products, product_bytes)
