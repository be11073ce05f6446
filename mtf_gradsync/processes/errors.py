"""Errors between the processes of a job, and the exit code where one is lost."""

from __future__ import annotations

# EX_TEMPFAIL of sysexits.h: nothing is wrong with the program; started again, it goes on.
LOST_PROCESS_EXIT_CODE = 75


class ProcessesError(RuntimeError):
    """The processes of a job cannot work together on one mesh."""


class MissingProcessesError(ProcessesError):
    """Some processes did not come in time; nothing else is wrong, so starting again may help."""
