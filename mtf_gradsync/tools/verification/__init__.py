"""Verification: checks that a program's update is the same for each way to divide it over cores."""

from mtf_gradsync.tools.verification.programs import Division
from mtf_gradsync.tools.verification.verdicts import Compared, DivisionResult, Verification
from mtf_gradsync.tools.verification.verify import verify

__all__ = ["Compared", "Division", "DivisionResult", "Verification", "verify"]
