"""One place where all tests here start their jobs."""

import pytest

from tests.runtimes.xla.distributed.jobs import RECORDED, Jobs


@pytest.fixture(scope="package")
def jobs(tmp_path_factory):
    """Starts jobs; whatever still runs at the end is killed."""
    with Jobs(tmp_path_factory.mktemp("jobs")) as jobs:
        yield jobs


@pytest.fixture(scope="package")
def of_two(jobs):
    """A job of two processes that loses nobody, and records a timeline at its end."""
    return jobs.run(2, recorded=RECORDED)
