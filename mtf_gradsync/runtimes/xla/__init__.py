"""SIMD (TPU) programs through XLA: runs them on jax's devices, or compiles them without devices.

See ``docs/xla.md`` and ``docs/tpu.md``.
"""

from mtf_gradsync.runtimes.processes.members import LOST_PROCESS_EXIT_CODE, ProcessesError
from mtf_gradsync.runtimes.xla.core_devices import devices_for
from mtf_gradsync.runtimes.xla.distributed import Processes, start_processes
from mtf_gradsync.runtimes.xla.executable import default_cache_dir
from mtf_gradsync.runtimes.xla.export import export, to_checkpoint
from mtf_gradsync.runtimes.xla.hlo_collectives import HloCollective, find_hlo_collectives
from mtf_gradsync.runtimes.xla.installed import XlaMissingError, why_no_tpu_compiler, why_no_xla
from mtf_gradsync.runtimes.xla.runner.jax_devices import DevicesError, StepError
from mtf_gradsync.runtimes.xla.topology.chips import GENERATIONS, Generation
from mtf_gradsync.runtimes.xla.topology.compiled import CompiledProgram, CoreMemory
from mtf_gradsync.runtimes.xla.topology.compiler_process import CompilerDiedError
from mtf_gradsync.runtimes.xla.topology.compiling import compile_for_tpu
from mtf_gradsync.runtimes.xla.xla_session import Dispatched, XlaSession, session

__all__ = [
    "GENERATIONS",
    "LOST_PROCESS_EXIT_CODE",
    "CompiledProgram",
    "CompilerDiedError",
    "CoreMemory",
    "DevicesError",
    "Dispatched",
    "Generation",
    "HloCollective",
    "Processes",
    "ProcessesError",
    "StepError",
    "XlaMissingError",
    "XlaSession",
    "compile_for_tpu",
    "default_cache_dir",
    "devices_for",
    "export",
    "find_hlo_collectives",
    "session",
    "start_processes",
    "to_checkpoint",
    "why_no_tpu_compiler",
    "why_no_xla",
]
