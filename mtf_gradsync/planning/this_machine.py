"""CPU devices of this machine as what is planned for, so that predictions can be measured."""

from __future__ import annotations

import time
from typing import Sequence

from mtf_gradsync._private.jax import compiled_hlo, memory_bytes, stablehlo_flops
from mtf_gradsync.planning.calibration import Calibration, measure, meetings, work_of
from mtf_gradsync.planning.machines import Begun, Compiled
from mtf_gradsync.planning.sample_steps import samples_like
from mtf_gradsync.simd.facts import UnsupportedProgramError
from mtf_gradsync.simd.program import Program
from mtf_gradsync.xla.devices import devices_for
from mtf_gradsync.xla.executable import Cache, loaded, lowered
from mtf_gradsync.xla.executable import Lowered as DeviceLowered
from mtf_gradsync.xla.replica_program import replica_program
from mtf_gradsync.xla.topology.compiled import CoreMemory, find_hlo_collectives
from mtf_gradsync.xla.topology.compiling import Lowered


def cores_of(name: str) -> int:
    """The number in "cpu:8"; ValueError when there is none."""
    number = name.partition(":")[2]
    if not number.isdigit() or not int(number):
        raise ValueError(f'CPU devices are named with their number, as in "cpu:8"; got {name!r}')
    return int(number)


class CpuMachine:
    """CPU devices of this process; see `Machine`."""

    def __init__(
        self, name: str, cores: int, most: int | None = None, cache_dir: str | None = None
    ):
        """Makes the devices, which are calibrated when the first program comes.

        That takes some minutes, once in a process for short steps and once for long ones. `most`
        devices are made, where others of this process need more than `cores`. Compiled
        programs are kept in `cache_dir`.
        """
        self.name, self.cores = name, cores
        self.memory_per_core: int | None = None
        self.peak_flops_per_core: float | None = None
        self.bytes_per_second_per_core: float | None = None
        self.estimate_source = "measured"
        self._calibrated = tuple(devices_for(max(cores, most or 0), "cpu"))
        self._devices = self._calibrated[:cores]
        self._cache = Cache(cache_dir)
        self.calibration: Calibration | None = None

    def lower(self, program: Program, fetches: Sequence[object]) -> Lowered:
        """See `Machine`. Before the first program is compiled, steps about as long are measured."""
        replica = replica_program(program, fetches)
        try:
            made = lowered(replica, self._cache)
        except UnsupportedProgramError as error:
            return Lowered(replica.num_replicas, None, str(error))
        # Here, where no other program is built, and where Ctrl-C ends it.
        self._calibration_for(made.module)
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
        calibration = self._calibration_for(lowered.module)
        work = work_of(executable, self.cores)
        collectives = tuple(find_hlo_collectives(compiled_hlo(executable)))
        # What `seconds` says comes on top of the estimate.
        elsewhere = sum(self.seconds(c.operation, c.groups, c.bytes_per_core) for c in collectives)
        return Compiled(
            bytes_per_core=CoreMemory(*memory_bytes(executable)).total,
            flops=work.flops,
            bytes_accessed=work.bytes,
            estimate_seconds=max(0.0, calibration.seconds(work) - elsewhere),
            loops_counted_once=lowered.module.count("stablehlo.while"),
            collectives=collectives,
            seconds=time.monotonic() - start,
        )

    def seconds(self, operation: str, groups: Sequence[Sequence[int]], size: float) -> float:
        """See `Machine`. Waiting for each other, and handing on data; the estimate has the rest."""
        del operation
        assert self.calibration is not None  # a program was lowered
        met, rates = meetings(groups, self.cores), self.calibration.rates
        handing_on = self.cores * size * rates.exchanged_byte if met else 0.0
        return met * rates.meeting + handing_on

    def _calibration_for(self, module: str) -> Calibration:
        """The calibration, by steps like the first program's: other meshes' are about as long."""
        if self.calibration is None:
            flops = stablehlo_flops(module, self._devices[0]) * self.cores
            self.calibration = measure(self._calibrated, samples_like(flops))
        return self.calibration
