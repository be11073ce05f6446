"""Processes that no test leaves behind."""

import pytest

from tests.cluster.processes import Processes


@pytest.fixture
def processes():
    """Starts programs; kills them all when the test ends, however it ends."""
    with Processes() as started:
        yield started
