"""A network with one neighbour, to show what another machine can reach."""

import contextlib
import os
import shutil
import subprocess
import sys
from typing import Iterator, NamedTuple

import pytest

ADDRESS = "10.213.77.1"
_CONNECT = """
import socket, sys
for port in sys.argv[2:]:
    try:
        socket.create_connection((sys.argv[1], int(port)), timeout=5).close()
        print(port)
    except OSError:
        pass
"""


class Machine(NamedTuple):
    """A network namespace whose host name stands for `ADDRESS`, and one of its neighbour."""

    name: str
    neighbour: str

    def command(self, *args: object) -> list[str]:
        """Returns the command line of a command on this machine."""
        named = ["unshare", "--uts", "sh", "-c", f'hostname {ADDRESS}; exec "$@"', "sh"]
        return ["ip", "netns", "exec", self.name, *named, *map(str, args)]

    def listening(self) -> dict[int, str]:
        """Returns the TCP ports that are listened on, and the address, with its device, of each."""
        lines = _run(*self.command("ss", "-ltnH")).splitlines()
        found = [line.split()[3].rpartition(":") for line in lines]
        return {int(port): address for address, _, port in found}

    def reached_by_the_neighbour(self, ports: list[int]) -> list[int]:
        """Returns those ports of this machine that the other one can connect to."""
        there = ["ip", "netns", "exec", self.neighbour, sys.executable, "-c", _CONNECT, ADDRESS]
        return [int(port) for port in _run(*there, *map(str, ports)).split()]


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def machine() -> Iterator[Machine]:
    """Makes a machine with a neighbour; skips the test where there can be none."""
    if not shutil.which("ip") or not shutil.which("unshare") or not shutil.which("ss"):
        pytest.skip("needs ip and ss (iproute2), and unshare")
    here, there = (f"mtf{os.getpid()}{end}" for end in "ab")
    with contextlib.ExitStack() as stack:
        try:
            for name in (here, there):
                _run("ip", "netns", "add", name)
                stack.callback(subprocess.run, ["ip", "netns", "delete", name], check=False)
            _run(
                "ip", "-n", here, "link", "add", "v0", "type", "veth", "peer", "v1", "netns", there
            )
            for name, link, number in ((here, "v0", 1), (there, "v1", 2)):
                address = f"{ADDRESS[:-1]}{number}/30"
                _run("ip", "-n", name, "address", "add", address, "dev", link)
                for one in ("lo", link):
                    _run("ip", "-n", name, "link", "set", one, "up")
            made = Machine(here, there)
            _run(*made.command("true"))
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)}")
        yield made
