"""SIMD (TPU) programs without a TPU: run them on CPU replicas, and list what their cores exchange.

See ``docs/simd.md`` for a guide that starts from a model.
"""

from mtf_gradsync.simd.collectives import list_collectives
from mtf_gradsync.simd.emulated_graph import EmulatedGraph
from mtf_gradsync.simd.errors import BranchDivergenceError, UnsupportedProgramError
from mtf_gradsync.simd.program import Program, replicas
from mtf_gradsync.simd.report import CommunicationReport, CommunicationRow, Total
from mtf_gradsync.simd.rewrite import emulate
from mtf_gradsync.simd.session import Session, cpu_config, session_on
from mtf_gradsync.simd.transfers import list_transfers

__all__ = [
    "BranchDivergenceError",
    "CommunicationReport",
    "CommunicationRow",
    "EmulatedGraph",
    "Program",
    "Session",
    "Total",
    "UnsupportedProgramError",
    "cpu_config",
    "emulate",
    "list_collectives",
    "list_transfers",
    "replicas",
    "session_on",
]
