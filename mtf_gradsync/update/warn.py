"""Warnings that are given once a process."""

from mtf_gradsync._warn import reset_warnings, warn_once

__all__ = ["reset_warnings", "warn_once"]
