"""The first tier has some of every room, and takes minutes."""

from __future__ import annotations

import pathlib

import pytest

import mtf_gradsync as gs
from tests import tiers


def test_the_first_tier_takes_minutes():
    seconds = sum(room["first tier"][1] for room in tiers.measured()["rooms"].values())
    assert seconds <= tiers.BUDGET


def test_every_room_of_the_package_has_tests_in_the_first_tier():
    rooms = tiers.measured()["rooms"]
    for path in pathlib.Path(gs.__file__).parent.glob("*/__init__.py"):
        room = rooms[path.parent.name.strip("_")]
        assert 3 * room["first tier"][0] > room["rest"][0], path


BUSY = """
import time, pytest

def work():
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
"""
OPTIONS = ["-p", "tests.tiers", "--strict-markers", "-o", "markers=slow", "-p", "no:cacheprovider"]


@pytest.fixture
def small_bounds(monkeypatch, tmp_path):
    monkeypatch.setattr(tiers, "FILE", tmp_path / "durations.json")
    monkeypatch.setattr(tiers, "SLOW", 0.1)
    monkeypatch.setattr(tiers, "LIMIT", 0.1)
    monkeypatch.setattr(tiers, "_LISTED", 0.1)
    monkeypatch.delenv("CI", raising=False)


@pytest.mark.usefixtures("small_bounds")
def test_a_test_that_takes_long_fails_where_the_tiers_are_kept(pytester, monkeypatch):
    tests = """
def test_long():
    work()

@pytest.mark.slow
def test_marked():
    work()

def test_waits():
    time.sleep(0.2)
"""
    pytester.mkpydir("room").joinpath("test_it.py").write_text(BUSY + tests)
    tiers.FILE.write_text('{"tests": {}}')
    pytester.inline_run(*OPTIONS).assertoutcome(passed=3)
    monkeypatch.setenv("CI", "true")
    run = pytester.inline_run(*OPTIONS)
    (failed,) = (r for r in run.getreports("pytest_runtest_logreport") if r.failed)
    assert failed.nodeid.endswith("::test_long")
    assert "0.2 s of processor time" in str(failed.longrepr)


@pytest.mark.usefixtures("small_bounds")
def test_measured_tests_are_chosen_and_a_shared_fixture_counts_to_each_of_its_tests(pytester):
    tests = """
@pytest.fixture(scope="module")
def shared():
    work()

def test_first(shared): pass
def test_second(shared): pass
def test_other(): pass
"""
    pytester.mkpydir("room").joinpath("test_it.py").write_text(BUSY + tests)
    tiers.FILE.write_text('{"tests": {"room/test_it.py::test_other": 3}}')
    pytester.inline_run(*OPTIONS, "-m", "not slow").assertoutcome(passed=2)
    pytester.inline_run(*OPTIONS, "--write-durations").assertoutcome(passed=3)
    found = tiers.measured()
    assert set(found["tests"]) == {f"room/test_it.py::test_{n}" for n in ("first", "second")}
    room = found["rooms"]["test_it.py"]
    assert [room["first tier"][0], room["rest"][0]] == [1, 2]
    # The kernel counts in hundredths of a second.
    assert 0.18 <= room["rest"][1] < 0.4
    pytester.inline_run(*OPTIONS, "-m", "not slow").assertoutcome(passed=1)
