"""Which tests `make test` runs, from what each took when `make durations` measured them.

`durations.json` has the tests of some length, in seconds of processor time, which unlike the
clock's do not grow when a machine is busy: the test's own, of the processes that it starts, and of
the fixtures that it shares with others. Tests over `SLOW` are marked ``slow`` and left to
`make test-rest`; a test that was never measured is not slow.
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import pytest

FILE = pathlib.Path(__file__).with_name("durations.json")
# Seconds of processor time: what a test of the first tier measured at most, and what it may take
# on a continuous integration's machine, which may be half as fast and the first to load a library.
SLOW = 1.0
LIMIT = 5.0
# All tests of the first tier together: on two cores about five minutes.
BUDGET = 600.0
# Shorter ones are in the file as a sum.
_LISTED = 0.5
_PROPERTY = "processor_seconds"


def processor_seconds() -> float:
    """What this process took so far, and all that it has started and that has ended.

    So the process that programs are forked from (tests/forked.py) counts to no test.
    """
    total = sum(os.times()[:4])
    ticks = os.sysconf("SC_CLK_TCK")
    for listed in pathlib.Path("/proc/self/task").glob("*/children"):
        try:
            children = listed.read_text().split()
        except OSError:  # The thread ended meanwhile.
            continue
        for child in children:
            try:
                stat = pathlib.Path("/proc", child, "stat").read_text()
            except OSError:  # It ended meanwhile.
                continue
            # After a name in parentheses: user's and system's time of those it has waited for.
            total += sum(map(int, stat.rpartition(")")[2].split()[13:15])) / ticks
    return total


def measured() -> dict[str, Any]:
    """The file.

    Returns:
      "rooms": for each folder of tests, the number of tests and their seconds in the "first tier"
      and in the "rest"; "tests": seconds of those of some length, by name.
    """
    return json.loads(FILE.read_text())


def pytest_addoption(parser: Any) -> None:
    """`make durations` asks for the file to be written."""
    parser.addoption("--write-durations", action="store_true", help=f"makes {FILE.name} anew")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Before -m chooses by marker."""
    seconds = measured()["tests"]
    for item in items:
        if seconds.get(item.nodeid, 0) > SLOW:
            item.add_marker("slow")


class _Clock:
    """Measures tests. One a session, because a test of this plugin has sessions of its own."""

    def __init__(self) -> None:
        self.began = self.until_teardown = 0.0
        # What each shared fixture of the test of now took, and those that were made for it.
        self.shared: dict[str, float] = {}
        self.made: set[str] = set()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Any:
        """A shared fixture counts to each test that has it, whichever comes first."""
        before = processor_seconds()
        yield
        self.shared.pop(fixturedef.argname, None)
        if fixturedef.scope != "function":
            self.shared[fixturedef.argname] = processor_seconds() - before
            self.made.add(fixturedef.argname)

    def pytest_runtest_logstart(self) -> None:
        """Starts the test's clock."""
        self.began = processor_seconds()
        self.made.clear()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        """The last of a test's reports says how long it took, and fails if that was too long."""
        if call.when != "teardown":
            # Then fixtures of whole modules may end, and processes that many tests used.
            self.until_teardown = processor_seconds() - self.began
            yield
            return
        took = processor_seconds() - self.began
        others = self.shared.keys() & set(item.fixturenames) - self.made
        alone = took + sum(self.shared[name] for name in others)
        item.user_properties.append((_PROPERTY, [took, alone]))
        report = (yield).get_result()
        kept = os.environ.get("CI") == "true" and item.get_closest_marker("slow") is None
        if kept and self.until_teardown > LIMIT and report.passed:
            report.outcome = "failed"
            report.longrepr = (
                f"{item.nodeid} took {self.until_teardown:.1f} s of processor time. "
                f"A test of the first tier may take {LIMIT:g} s: make it cheaper, or measure "
                "anew with `make durations`."
            )


class _Writer:
    """Makes the file anew from what the clocks say, also those of xdist's workers."""

    def __init__(self) -> None:
        self.took: dict[str, tuple[float, float]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "teardown":
            self.took.update(
                (report.nodeid, v) for k, v in report.user_properties if k == _PROPERTY
            )

    def pytest_sessionfinish(self) -> None:
        """The longest test comes first."""
        rooms: dict[str, Any] = {}
        for name, (took, alone) in sorted(self.took.items()):
            folder = name.partition("::")[0].split("/")[1]
            room = rooms.setdefault(folder, {"first tier": [0, 0.0], "rest": [0, 0.0]})
            counted = room["rest" if alone > SLOW else "first tier"]
            counted[:] = counted[0] + 1, round(counted[1] + took, 2)
        tests = [(name, round(alone, 1)) for name, (_, alone) in self.took.items()]
        tests = [test for test in tests if test[1] >= _LISTED]
        tests.sort(key=lambda test: (-test[1], test[0]))
        # A room and a test a line.
        rows, lines = (
            ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in pairs)
            for pairs in (rooms.items(), tests)
        )
        FILE.write_text(f'{{"rooms": {{\n{rows}\n}}, "tests": {{\n{lines}\n}}}}\n')


def pytest_configure(config: Any) -> None:
    """Starts what measures, and what writes if the file is asked for."""
    config.pluginmanager.register(_Clock())
    if config.getoption("--write-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Writer())
