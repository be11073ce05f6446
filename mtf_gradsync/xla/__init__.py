"""SIMD (TPU) programs through XLA: lowered to HLO, and compiled for topologies without a TPU.

See ``docs/tpu.md``.
"""

from mtf_gradsync.xla.collectives import HloCollective, find_hlo_collectives
from mtf_gradsync.xla.compiled import CompiledProgram, CoreMemory
from mtf_gradsync.xla.compiling import compile_for_tpu
from mtf_gradsync.xla.installed import CompilerMissingError, why_no_tpu_compiler
from mtf_gradsync.xla.lowering import TensorFlowTooOldError
from mtf_gradsync.xla.own_process import CompilerDiedError
from mtf_gradsync.xla.running import CpuDevicesRun, run_on_cpu_devices
from mtf_gradsync.xla.topologies import GENERATIONS, Generation

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
