"""SIMD (TPU) programs through XLA: lowered to HLO, and compiled for topologies without a TPU.

See ``docs/tpu.md``.
"""

from mtf_gradsync.xla.compiled import CompiledProgram, CoreMemory
from mtf_gradsync.xla.hlo_collectives import HloCollective, find_hlo_collectives
from mtf_gradsync.xla.lowering import TensorFlowTooOldError
from mtf_gradsync.xla.topologies import GENERATIONS, Generation
from mtf_gradsync.xla.tpu import (
    CompilerDiedError,
    CompilerMissingError,
    CpuDevicesRun,
    compile_for_tpu,
    run_on_cpu_devices,
    why_no_tpu_compiler,
)

__all__ = [
    "GENERATIONS",
    "CompiledProgram",
    "CompilerDiedError",
    "CompilerMissingError",
    "CoreMemory",
    "CpuDevicesRun",
    "Generation",
    "HloCollective",
    "TensorFlowTooOldError",
    "compile_for_tpu",
    "find_hlo_collectives",
    "run_on_cpu_devices",
    "why_no_tpu_compiler",
]
