"""SIMD (TPU) programs without a TPU: runs them, and lists what their cores exchange.

See ``docs/simd.md`` for a guide that starts from a model. `mtf_gradsync.xla` compiles SIMD
programs.
"""

from mtf_gradsync.runtimes.simd.collectives import list_collectives
from mtf_gradsync.runtimes.simd.communication import (
    CommunicationReport,
    CommunicationRow,
    ProcessTransfers,
    Total,
    count_process_transfers,
    list_transfers,
)
from mtf_gradsync.runtimes.simd.emulator import EmulatedGraph, emulate
from mtf_gradsync.runtimes.simd.graph_facts import BranchDivergenceError, UnsupportedProgramError
from mtf_gradsync.runtimes.simd.program import (
    CpuReplicaSession,
    Program,
    cpu_config,
    session_on,
    tpu_program,
)

__all__ = [
    "BranchDivergenceError",
    "CommunicationReport",
    "CommunicationRow",
    "CpuReplicaSession",
    "EmulatedGraph",
    "ProcessTransfers",
    "Program",
    "Total",
    "UnsupportedProgramError",
    "count_process_transfers",
    "cpu_config",
    "emulate",
    "list_collectives",
    "list_transfers",
    "session_on",
    "tpu_program",
]
