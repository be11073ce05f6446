"""The processes of a job."""

from __future__ import annotations

import os
import socket
from typing import NamedTuple


class Member(NamedTuple):
    """One process of a job."""

    index: int  # type: ignore[assignment]  # in place of the method of tuples, which none calls
    host: str
    pid: int
    name: str  # in the job: "process 1", "worker 1"

    def __str__(self) -> str:
        return f"{self.name} (host {self.host}, pid {self.pid})"

    @classmethod
    def this(cls, index: int, name: str) -> Member:
        """Returns this process as a member of a job."""
        return cls(index, socket.gethostname(), os.getpid(), name)
