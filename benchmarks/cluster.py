"""A cluster on this machine: processes that serve CPU devices, and end when their starter does."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Callable

JOB = "worker"
LEADER = f"/job:{JOB}/task:0"
# The module that each process runs.
SERVER = "benchmarks.cluster"
_ROOT = Path(__file__).resolve().parents[1]
# Read on Linux: tcpi_bytes_acked and tcpi_bytes_received of struct tcp_info.
_TCP_INFO_BYTES = struct.Struct("=120xQQ")


# Below the ports that Linux gives to outgoing connections, which come and go all the time.
_PORTS = range(10_000, 32_000)


def free_ports(number: int) -> list[int]:
    """Ports that nothing uses now, on any address: gRPC listens on all of them."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        if len(found) == number:
            break
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("", port))
            found.append(port)
    return found


@contextlib.contextmanager
def reserved_ports(number: int):
    """Ports for servers that share theirs (TF_GRPC_REUSE_PORT=1).

    A port that is free when it is chosen may be taken when the server has been imported and
    started, seconds later. These stay taken: the block holds a socket on each, which does not
    listen.

    Args:
      number: how many.

    Yields:
      Their numbers.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one, port in zip(sockets, free_ports(number)):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            one.bind(("", port))
        yield [one.getsockname()[1] for one in sockets]


class LocalCluster:
    """Server processes with some CPU devices each; all end with the ``with`` block.

    They also end when the process that started them does, however that ends: each reads a pipe
    that closes then. If one of them ends too early, the program is ended with its output, because
    TensorFlow would wait for it for ever.

    Attributes:
      target: for ``tf.Session``.
      devices: device strings, task by task.
      pids: the processes' numbers.
    """

    def __init__(
        self,
        tasks: int,
        devices_each: int,
        route: Callable[[int, list[int]], list[int]] = lambda task, ports: ports,
    ):
        """Sets how many processes there are, and how many devices each has.

        Args:
          tasks: processes.
          devices_each: devices of each.
          route: of a task and the ports of all, the ports at which it reaches them; its own stays.
        """
        self.devices = [
            f"/job:{JOB}/task:{task}/device:CPU:{device}"
            for task in range(tasks)
            for device in range(devices_each)
        ]
        self.target = ""
        self.pids: list[int] = []
        self._sizes = tasks, devices_each
        self._route = route
        self._stack = contextlib.ExitStack()
        self._tasks: list[_Task] = []

    def __enter__(self) -> LocalCluster:
        tasks, devices_each = self._sizes
        with contextlib.ExitStack() as stack:
            ports = stack.enter_context(reserved_ports(tasks))
            reached = [self._route(task, ports) for task in range(tasks)]
            self._tasks = [
                stack.enter_context(_Task([json.dumps(addresses), str(task), str(devices_each)]))
                for task, addresses in enumerate(
                    [f"127.0.0.1:{port}" for port in one] for one in reached
                )
            ]
            self.pids = [task.pid for task in self._tasks]
            for task in self._tasks:
                task.answer()
            self.target = f"grpc://127.0.0.1:{ports[0]}"
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()

    def bytes_on_sockets(self) -> int | None:
        """What the processes have sent each other so far, all of it; None except on Linux."""
        counts = [task.ask() for task in self._tasks]
        return None if None in counts else sum(counts)


class _Task:
    """One process; it answers each line on its standard input by a line."""

    def __init__(self, arguments: list[str]):
        # A file and not a pipe: nobody has to read for the process to go on.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._closing = False
        self._popen = subprocess.Popen(
            [sys.executable, "-m", SERVER, *arguments],
            cwd=_ROOT,
            env={**os.environ, "TF_GRPC_REUSE_PORT": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            # Ctrl-C is for the starter, which ends its processes in order.
            start_new_session=True,
        )
        self.pid = self._popen.pid
        threading.Thread(target=self._watch, daemon=True).start()

    def __enter__(self) -> _Task:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._closing = True
        self._popen.kill()
        self._popen.wait()
        self._popen.stdin.close()
        self._popen.stdout.close()
        self._log.close()

    def ask(self) -> Any:
        """Asks for the number of bytes."""
        self._popen.stdin.write("\n")
        self._popen.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        """What the process says next; it says something once it serves, and when asked."""
        line = self._popen.stdout.readline()
        if not line:
            threading.Event().wait()  # The process is gone, and _watch ends the program.
        return json.loads(line)

    def _watch(self) -> None:
        code = self._popen.wait()
        if not self._closing:
            self._log.seek(0)
            log = self._log.read().decode("utf-8", "replace")
            print(f"{log}\nA process of the cluster ended with {code}.", file=sys.stderr)
            sys.stderr.flush()
            os._exit(1)


def bytes_to_peers(ports: set[int]) -> int | None:
    """Bytes that this process has sent and received on connections that it made to some ports."""
    if not hasattr(socket, "TCP_INFO") or not os.path.isdir("/proc/self/fd"):
        return None
    total = 0
    for name in os.listdir("/proc/self/fd"):
        # Sockets that listen have no peer, others may close meanwhile.
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if (
                    one.family in (socket.AF_INET, socket.AF_INET6)
                    and one.getpeername()[1] in ports
                ):
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += sum(_TCP_INFO_BYTES.unpack_from(info))
    return total


def main(addresses: str, task: str, devices: str) -> None:
    """Serves devices until standard input ends."""
    from mtf_gradsync import session_config
    from mtf_gradsync._private.libraries import tf

    tasks = json.loads(addresses)
    config = session_config(num_cpu_devices=int(devices), collective_group_leader=LEADER)
    server = tf.train.Server({JOB: tasks}, JOB, int(task), config=config)
    others = {int(a.rpartition(":")[2]) for i, a in enumerate(tasks) if i != int(task)}
    print(json.dumps(server.target), flush=True)
    while os.read(0, 1):
        print(json.dumps(bytes_to_peers(others)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
