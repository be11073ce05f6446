"""SIMD (TPU) programs without a TPU: run them, list what their cores exchange, compile them.

See ``docs/simd.md`` for a guide that starts from a model, and ``docs/tpu.md`` for compiling.
"""

from mtf_gradsync.simd.collectives import list_collectives
from mtf_gradsync.simd.compiled import CompiledProgram, CoreMemory
from mtf_gradsync.simd.emulated_graph import EmulatedGraph
from mtf_gradsync.simd.errors import BranchDivergenceError, UnsupportedProgramError
from mtf_gradsync.simd.hlo import TensorFlowTooOldError
from mtf_gradsync.simd.hlo_collectives import HloCollective, find_hlo_collectives
from mtf_gradsync.simd.program import Program, replicas
from mtf_gradsync.simd.report import CommunicationReport, CommunicationRow, Total
from mtf_gradsync.simd.rewrite import emulate
from mtf_gradsync.simd.session import Session, cpu_config, session_on
from mtf_gradsync.simd.topologies import GENERATIONS, Generation
from mtf_gradsync.simd.tpu import (
    CompilerDiedError,
    CompilerMissingError,
    CpuDevicesRun,
    compile_for_tpu,
    run_on_cpu_devices,
    why_no_tpu_compiler,
)
from mtf_gradsync.simd.transfers import ProcessTransfers, count_process_transfers, list_transfers

__all__ = [
    "GENERATIONS",
    "BranchDivergenceError",
    "CommunicationReport",
    "CommunicationRow",
    "CompiledProgram",
    "CompilerDiedError",
    "CompilerMissingError",
    "CoreMemory",
    "CpuDevicesRun",
    "EmulatedGraph",
    "Generation",
    "HloCollective",
    "ProcessTransfers",
    "Program",
    "Session",
    "TensorFlowTooOldError",
    "Total",
    "UnsupportedProgramError",
    "compile_for_tpu",
    "count_process_transfers",
    "cpu_config",
    "emulate",
    "find_hlo_collectives",
    "list_collectives",
    "list_transfers",
    "replicas",
    "run_on_cpu_devices",
    "session_on",
    "why_no_tpu_compiler",
]
