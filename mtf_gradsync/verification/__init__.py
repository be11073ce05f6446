"""Verification: whether an update is the same however a program is divided."""

from mtf_gradsync.verification.comparing import Line, Verification
from mtf_gradsync.verification.programs import Division
from mtf_gradsync.verification.verify import verify

__all__ = ["Division", "Line", "Verification", "verify"]
