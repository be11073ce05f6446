"""Verification: whether an update is the same however a program is divided."""

from mtf_gradsync.tools.verification.comparing import Line, Verification
from mtf_gradsync.tools.verification.programs import Division
from mtf_gradsync.tools.verification.verify import verify

__all__ = ["Division", "Line", "Verification", "verify"]
