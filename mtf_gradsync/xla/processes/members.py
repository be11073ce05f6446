"""Who takes part."""

from __future__ import annotations

import os
import socket
from typing import NamedTuple


class Member(NamedTuple):
    """One process of a job.

    Attributes:
      index: its number, from 0.
      host: name of its machine.
      pid: its number there.
    """

    index: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.index} (host {self.host}, pid {self.pid})"

    @classmethod
    def this(cls, index: int) -> Member:
        """This process, as one of a job."""
        return cls(index, socket.gethostname(), os.getpid())
