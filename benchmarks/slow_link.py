"""A link between processes of this machine that is as slow as one says, and counts."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

_PIECE = 16 * 1024


class SlowLink:
    """Carries TCP connections between some hosts, each of which sends at a stated rate at most.

    A host is a port on this machine. What goes to it through `port_to` is held up so that all
    that a host sends, on all its connections, keeps the rate. It ends with the ``with`` block.

    Attributes:
      sent: bytes that each host has sent so far.
    """

    def __init__(self, megabits: float):
        """Sets the rate of each host, in million bits a second."""
        self._rate = megabits * 1e6 / 8
        self.sent: dict[int, int] = {}
        self._free_at: dict[int, float] = {}
        self._lock = threading.Lock()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> SlowLink:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()

    def port_to(self, target: int, source: int) -> int:
        """Opens a port at which one host reaches another; nobody has to listen there yet.

        Args:
          target: port of the host that is reached.
          source: port of the host that connects.

        Returns:
          The port.
        """
        listening = self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        # A thread that waits for a connection does not see that another one closes the socket.
        self._stack.callback(_shut, listening)
        self._start(self._serve, listening, target, source)
        return listening.getsockname()[1]

    def _serve(self, listening: socket.socket, target: int, source: int) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listening.accept()
                self._stack.callback(_shut, near)
                try:
                    far = socket.create_connection(("127.0.0.1", target))
                except OSError:
                    _shut(near)  # as a host that is not up yet; the caller tries again
                    continue
                self._stack.callback(_shut, far)
                self._start(self._pump, near, far, source)
                self._start(self._pump, far, near, target)

    def _pump(self, given: socket.socket, taken: socket.socket, sender: int) -> None:
        with contextlib.suppress(OSError):
            while piece := given.recv(_PIECE):
                time.sleep(max(0.0, self._turn(sender, len(piece)) - time.monotonic()))
                taken.sendall(piece)
        _shut(given)
        _shut(taken)

    def _turn(self, sender: int, size: int) -> float:
        """When a sender has sent so many bytes more."""
        with self._lock:
            self.sent[sender] = self.sent.get(sender, 0) + size
            begin = max(time.monotonic(), self._free_at.get(sender, 0.0))
            self._free_at[sender] = begin + size / self._rate
            return self._free_at[sender]

    @staticmethod
    def _start(function: Any, *arguments: Any) -> None:
        threading.Thread(target=function, args=arguments, daemon=True).start()


def _shut(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
