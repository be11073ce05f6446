"""A process that is lost ends the others, with an error that names it."""

import re
import signal
import time

import pytest

from mtf_gradsync import xla
from tests.runtimes.cluster.processes import ended
from tests.runtimes.xla.distributed import unlike_program
from tests.runtimes.xla.distributed.jobs import results
from tests.sessions import assert_same_bits

pytestmark = pytest.mark.xla
SILENCE = 3.0
STEPS = 6


def lose(jobs, lost, number, count=2, step=4, **plan):
    """Starts a job, sends a signal to one process after a step, and waits for the others."""
    job = jobs.start(count, steps=STEPS, pace=0.3, silence=SILENCE, **plan)
    job.wait_for(f"step {step}\n")
    begin = time.monotonic()
    job.members[lost].send(number)
    others = [m for i, m in enumerate(job.members) if i != lost]
    codes = job.codes(others)
    assert time.monotonic() - begin < 60
    assert codes == [xla.LOST_PROCESS_EXIT_CODE] * (count - 1), job.outputs()
    for member in others:
        # The last words, whatever jax and gloo said before.
        last = member.output().rstrip().splitlines()[-1]
        name = rf"lost process {lost} \(host \S+, pid {job.members[lost].pid}\): it "
        assert re.search(name, last), job.outputs()
        assert "newest checkpoint" in last
    return job


@pytest.mark.slow
def test_a_killed_process_is_named_and_the_job_goes_on_later(jobs, of_two):
    job = lose(jobs, 1, signal.SIGKILL)
    # What goes on is a job like any other, and loses the process that writes the checkpoints.
    lose(jobs, 0, signal.SIGKILL, folder=job.folder, newest=True)
    jobs.run(2, folder=job.folder, newest=True, steps=STEPS)
    after, before = results(job), results(of_two)
    before["losses"] = before["losses"][-len(after["losses"]) :]
    assert 0 < len(after["losses"]) < STEPS
    assert_same_bits(before, after)


@pytest.mark.parametrize(("lost", "count"), [(0, 2), (2, 4)])
@pytest.mark.slow
def test_a_stopped_process_is_named_and_ends_when_it_goes_on(jobs, lost, count):
    job = lose(jobs, lost, signal.SIGSTOP, count)
    stopped = job.members[lost]
    assert stopped.code is None
    stopped.send(signal.SIGCONT)
    assert job.codes([stopped]) == [xla.LOST_PROCESS_EXIT_CODE]
    last = stopped.output().rstrip().splitlines()[-1]
    assert "this process stood still for" in last or "have given this process up" in last
    assert ended([m.pid for m in job.members])


@pytest.mark.parametrize(("odd", "code", "said"), [
    ("raise", 1, "KeyError: 'as asked'"), ("exit", 3, "SystemExit: 3")
])  # fmt: skip
@pytest.mark.slow
def test_an_exception_of_one_ends_the_others_with_its_words(jobs, odd, code, said):
    job = jobs.start(2, odd=odd)
    assert job.codes() == [xla.LOST_PROCESS_EXIT_CODE, code], job.outputs()
    last = job.members[0].output().rstrip().splitlines()[-1]
    assert f"it ended with an error: {said}" in last
    assert "lost process 1 (host " in last


@pytest.mark.slow
def test_an_error_that_all_hear_of_is_reported_by_the_process_that_raised_it(jobs):
    job = jobs.start(2, odd="fail in turn")
    assert job.codes() == [1, xla.LOST_PROCESS_EXIT_CODE], job.outputs()
    assert "NotADirectoryError" in job.members[0].output().rstrip().splitlines()[-1]
    last = job.members[1].output().rstrip().splitlines()[-1]
    assert "lost process 0 (host " in last
    assert "it ended with an error: NotADirectoryError" in last


@pytest.mark.parametrize(("odd", "name"), [("abort", "SIGABRT"), ("fault", "SIGSEGV")])
@pytest.mark.slow
def test_a_crash_of_one_ends_all_with_its_step_and_versions(jobs, odd, name):
    import jaxlib

    job = jobs.start(2, odd=odd)
    assert job.codes() == [xla.LOST_PROCESS_EXIT_CODE] * 2, job.outputs()
    for member in job.members:
        last = member.output().rstrip().splitlines()[-1]
        assert f"crashed: {name} inside jax" in last, job.outputs()
        assert f"jaxlib {jaxlib.__version__}" in last
        assert "The last work that it had begun is step 1." in last
        assert "The main thread stood at File" in last
        assert "job.py" in last, job.outputs()
    assert "lost process 1 (host " in job.members[0].output()


@pytest.mark.slow
def test_a_crash_that_cannot_report_itself_is_reported_with_its_step(jobs):
    job = jobs.start(2, odd="abort with the lock", silence=20.0)
    assert job.codes() == [xla.LOST_PROCESS_EXIT_CODE, -signal.SIGABRT], job.outputs()
    last = job.members[0].output().rstrip().splitlines()[-1]
    assert "the last work that it had reported is step 1" in last


@pytest.mark.slow
def test_values_of_unlike_lengths_end_all_with_what_is_known(jobs):
    """gloo ends a process by an exception of C++ in a thread of its own."""
    job = jobs.start(2, script=unlike_program.__file__)
    assert job.codes() == [xla.LOST_PROCESS_EXIT_CODE] * 2, job.outputs()
    assert "EnforceNotMet" in job.outputs()
    for member in job.members:
        last = member.output().rstrip().splitlines()[-1]
        assert "crashed: SIGABRT inside jax" in last, job.outputs()


@pytest.mark.slow
def test_a_proxy_sends_the_beats_of_a_blocked_process(jobs):
    jobs.run(2, odd="hold patiently in turn", steps=2, silence=SILENCE)


@pytest.mark.slow
def test_a_process_that_is_silent_otherwise_is_lost(jobs):
    job = jobs.start(2, odd="hold", steps=1, silence=SILENCE)
    assert job.codes() == [xla.LOST_PROCESS_EXIT_CODE] * 2, job.outputs()
    assert "has sent no heartbeat for 3 s" in job.members[0].output()


@pytest.mark.parametrize(
    ("lost", "number", "how"),
    [
        (0, signal.SIGSTOP, "has sent no heartbeat for 3 s"),
        (1, signal.SIGKILL, "ended without a word"),
    ],
)
@pytest.mark.slow
def test_a_process_that_is_lost_while_it_cannot_speak_is_named(jobs, lost, number, how):
    job = jobs.start(2, odd=f"hold patiently {lost}", steps=1, silence=SILENCE)
    job.wait_for("holds the lock", [job.members[lost]])
    begin = time.monotonic()
    job.members[lost].send(number)
    other = job.members[1 - lost]
    assert job.codes([other]) == [xla.LOST_PROCESS_EXIT_CODE], job.outputs()
    assert time.monotonic() - begin < 60
    assert f"lost process {lost} (host " in other.output()
    assert how in other.output()
    if number == signal.SIGSTOP:
        job.members[lost].send(signal.SIGCONT)
    job.codes()
    assert ended([m.pid for m in job.members])
