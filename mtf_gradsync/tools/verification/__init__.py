"""Verification: whether an update is the same however a program is divided."""

from mtf_gradsync.tools.verification.programs import Division
from mtf_gradsync.tools.verification.verdicts import Compared, DivisionResult, Verification
from mtf_gradsync.tools.verification.verify import verify

__all__ = ["Compared", "Division", "DivisionResult", "Verification", "verify"]
