"""What goes wrong between processes."""

from __future__ import annotations

# EX_TEMPFAIL of sysexits.h: nothing is wrong with the program; started again, it goes on.
LOST_PROCESS_EXIT_CODE = 75


class ProcessesError(RuntimeError):
    """Processes cannot work together on one mesh."""


class MissingProcessesError(ProcessesError):
    """Processes did not come in time; nothing else is wrong, so another start may do."""
