"""Collectives find their counterparts, whoever is early and whoever is late."""

import pytest

from mtf_gradsync.runtimes.processes.members import ProcessesError
from mtf_gradsync.xla import core_devices
from tests.runtimes.xla.distributed import order_program

pytestmark = pytest.mark.xla


@pytest.fixture(scope="module")
def job(jobs):
    return jobs.run(4, script=order_program.__file__)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["one program", "many programs"])
def test_collectives_keep_their_order_though_processes_are_late(job, what):
    """Every kind, in loops and branches; programs in a row, and exchanges of the host."""
    for member in job.members:
        assert f"{what}: in order" in member.output()


def test_a_jaxlib_that_hangs_is_refused(monkeypatch):
    import jaxlib

    monkeypatch.setattr(jaxlib, "__version__", "0.4.31")
    with pytest.raises(ProcessesError, match=r"jaxlib 0\.4\.33 or later; this is jaxlib 0\.4\.31"):
        core_devices.check_jaxlib_for_processes()
