"""Processes that no test leaves behind, and those that many tests have in common."""

import json

import pytest

from tests.runtimes.cluster import two_processes_program
from tests.runtimes.cluster.processes import Processes


@pytest.fixture
def processes():
    """Starts programs; kills them all when the test ends, however it ends."""
    with Processes() as started:
        yield started


@pytest.fixture(scope="package")
def of_two_processes(tmp_path_factory):
    """What the program of two processes writes."""
    path = tmp_path_factory.mktemp("two_processes") / "found.json"
    with Processes() as started:
        started.wait(started.fork("-m", two_processes_program.__name__, path))
    return json.loads(path.read_text(encoding="utf-8"))
