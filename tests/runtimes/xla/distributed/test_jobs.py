"""Several processes with a part of the devices each are as one process with all of them."""

import json

import numpy as np
import pytest

from tests.runtimes.xla.distributed.jobs import RECORDED, results
from tests.sessions import assert_same_bits
from tests.tools.timelines import traces

pytestmark = pytest.mark.xla

EPS = np.finfo(np.float32).eps
# Of float32 additions that stand one behind the other, from the first loss to the last variable:
# sums over 16 x 8 numbers in each of 6 steps, in another order.
ROUNDINGS = 6 * 16 * 8


@pytest.fixture(scope="module")
def of_four(jobs, of_two):
    return jobs.run(4, again_from=str(of_two.folder / "step_3"))


@pytest.fixture(scope="module")
def of_one(jobs, of_two):
    return jobs.run(1, again_from=str(of_two.folder / "step_3"))


def assert_equal_to_rounding(a, b):
    assert a.keys() == b.keys()
    for name, value in a.items():
        scale = np.max(np.abs(value), initial=0)
        np.testing.assert_allclose(
            b[name], value, rtol=0, atol=ROUNDINGS * EPS * scale, err_msg=name
        )


@pytest.mark.slow
def test_all_processes_find_the_same(of_two, of_four):
    for job, count in ((of_two, 2), (of_four, 4)):
        for process in range(1, count):
            assert_same_bits(results(job, 0), results(job, process))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["of_two", "of_four"])
def test_training_is_as_in_one_process(request, name, of_one):
    assert_equal_to_rounding(results(of_one), results(request.getfixturevalue(name)))


@pytest.mark.slow
def test_training_changes_what_it_should(of_one):
    losses = results(of_one)["losses"]
    assert len(losses) == 6
    assert np.all(np.isfinite(losses))
    assert losses[-1] < losses[0]
    assert results(of_one)["variable/GradientAccumulationOptimizer/update_step"] == 3


@pytest.mark.slow
def test_variables_begin_with_the_same_random_values(of_two, of_four):
    for job in (of_two, of_four):
        drawn = {line for m in job.members for line in m.output().splitlines() if "drawn [" in line}
        assert len(drawn) == 1
        assert len(set(json.loads(drawn.pop().split(" ", 1)[1]))) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "run"), [("of_four", "again/"), ("of_one", "again/"), ("of_one", "replicas/")]
)
def test_a_checkpoint_goes_on_with_other_processes(request, of_two, name, run):
    whole = results(of_two)
    whole["losses"] = whole["losses"][3:]
    assert_equal_to_rounding(whole, results(request.getfixturevalue(name), 0, run))


@pytest.mark.slow
def test_checkpoints_are_written_once(of_two):
    names = sorted(path.name for path in of_two.folder.glob("step_*"))
    assert names == [
        f"step_{step}.{kind}" for step in (3, 6) for kind in ("data-00000-of-00001", "index")
    ]


@pytest.fixture(scope="module")
def without_steps(jobs):
    return jobs.run(2, odd="fetches and save", steps=0)


@pytest.mark.slow
def test_values_of_other_processes_are_none(without_steps):
    for process, member in enumerate(without_steps.members):
        mine = [core // 4 == process for core in range(8)]
        assert f"fetched {[mine, mine]}" in member.output()


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_is_an_error_everywhere(without_steps):
    first, second = without_steps.members
    assert "save: " in first.output()
    assert "save: OtherProcessError: On process 0: " in second.output()


@pytest.mark.slow
def test_another_program_is_an_error_everywhere(jobs):
    job = jobs.start(2, odd="program", steps=1)
    assert job.codes() == [1, 1], job.outputs()
    for member in job.members:
        assert "on process 1 are not those on process 0" in member.output()


@pytest.mark.slow
def test_a_timeline_shows_the_cores_of_all_processes(of_two):
    first, second = (traces.read(of_two.folder / f"trace_{process}.json") for process in range(2))
    assert first == second
    traces.check(first)
    names = traces.process_names(first)
    steps = {f"steps of process {process}" for process in range(2)}
    assert set(names.values()) == steps | {f"core {core}" for core in range(8)}
    found = traces.tracks(first)
    for pid, name in names.items():
        rows = [row for (one, _), rows in found.items() if one == pid for row in rows]
        if name in steps:
            # Which of them updated is tested in one process: the profiles of jaxlib 0.4 do not say
            # which program an operation was part of, and a guess can be wrong.
            assert len(found[pid, 1]) == RECORDED
        else:
            assert {row["cat"] for row in rows} == {"compute", "collective"}


@pytest.mark.slow
def test_a_profile_that_one_process_cannot_read_is_an_error_of_all(of_two):
    """And all can go on."""
    first, second = of_two.members
    whose = "No process has a timeline. On process 1: TimelineError: "
    begun = "jax cannot begin a profile: another one runs. Perhaps another profiler"
    cut = "The profile of jax, of "
    for name, text in (("start", begun), ("stop", cut)):
        assert f"{name}: {text}" in second.output()
        assert f"{name}: {whose}{text}" in first.output()
        for member in of_two.members:
            assert f"made steps after {name}" in member.output()
    assert "Perhaps it was cut off: record fewer steps." in first.output()
