"""Where the processes of a job meet."""

from __future__ import annotations

import contextlib
import ipaddress
from typing import NamedTuple


class Place(NamedTuple):
    """The address at which the processes of a job meet."""

    host: str  # the machine of process 0, as the others see it
    port: int  # a free port there
    argument: str  # the argument by which a user gave the address, for errors

    def __str__(self) -> str:
        return f"{self.host}:{self.port} ({self.argument})"

    @property
    def loopback(self) -> str | None:
        """The host, if it is an address that only processes of one machine can reach."""
        # Not what a machine's name stands for: many machines have their own as 127.0.1.1, which is
        # not what others know it by.
        host = "127.0.0.1" if self.host == "localhost" else self.host
        with contextlib.suppress(ValueError):
            return host if ipaddress.ip_address(host).is_loopback else None
        return None
