"""SIMD (TPU) programs without a TPU: run them on CPU replicas, and list what their cores exchange.

See ``docs/simd.md`` for a guide that starts from a model.
"""

from mtf_gradsync.simd.errors import BranchDivergenceError, UnsupportedProgramError
from mtf_gradsync.simd.program import Program, replicas
from mtf_gradsync.simd.rewrite import EmulatedGraph, emulate
from mtf_gradsync.simd.session import Session, cpu_config

__all__ = [
    "BranchDivergenceError",
    "EmulatedGraph",
    "Program",
    "Session",
    "UnsupportedProgramError",
    "cpu_config",
    "emulate",
    "replicas",
]
