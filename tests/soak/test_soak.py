"""A seeded few of the soak's faults, on every runtime; `make soak` has the others."""

import collections
import json

import pytest

from tests.runtimes.cluster.processes import ROOT, Processes
from tests.soak import settings
from tests.soak.faults import FAULTS, faults_for
from tests.soak.plan import plan
from tests.soak.table import tables

NAMES, CONFIGS = list(settings.RUNTIMES), list(settings.CONFIGS)


@pytest.mark.parametrize("number", [1000, 997, 3])
def test_faults_are_spread_evenly(number):
    groups = plan(0, number, NAMES, CONFIGS)
    of_runtime = collections.Counter()
    for group in groups:
        of_runtime[group.runtime.name] += len(group.faults)
    assert sum(of_runtime.values()) == number
    assert {of_runtime[name] for name in NAMES} <= {number // 5, number // 5 + 1}
    for group in groups:
        kinds = collections.Counter(fault.name for fault in group.faults)
        possible = [fault.name for fault in faults_for(group.runtime, group.config)]
        assert set(kinds) <= set(possible)
        if number > 900:
            assert max(kinds.values()) - min(kinds[name] for name in possible) <= 1


def test_a_seed_chooses_the_same_faults_again():
    def names(seed):
        return [
            (group.runtime.name, group.config, [fault.name for fault in group.faults], group.seed)
            for group in plan(seed, 200, NAMES, CONFIGS)
        ]

    assert names(4) == names(4) != names(5)


def test_few_faults_are_of_many_kinds():
    groups = plan(1, len(FAULTS), NAMES, ["plain"])
    assert {fault.name for group in groups for fault in group.faults} == {f.name for f in FAULTS}


def test_the_tables_are_those_of_the_docs():
    docs = (ROOT / "docs" / "trouble.md").read_text(encoding="utf-8").splitlines()
    row = {"fault": "SIGTERM", "runtime": "XLA devices", "seconds": 0.5, "cpu_seconds": 2.0}
    bad = {**row, "problems": ["hangs"], "same_bits": False, "seconds": 31.0}
    lines = tables([{**row, "problems": [], "same_bits": True}, bad]).splitlines()
    assert "| SIGTERM | 2 | 1 | 1 | 31.0 |" in lines
    assert lines[-1] == "| XLA devices | 2 | 1 | 1 | 31.0 | 2.0 |"
    assert set(lines[:2]) <= set(docs)


# A seed by which each runtime has two kinds of faults, and all that only the soak brings about are
# among them: kills at any moment, processes that stand still, and a machine that is busy.
SEED, NUMBER = 636, 10


@pytest.mark.slow
def test_nothing_is_lost_by_faults_of_ten_kinds(tmp_path):
    arguments = [f"--faults={NUMBER}", "--jobs=1", f"--seed={SEED}", "--config=plain"]
    arguments.append("--without_grappler")
    with Processes() as processes:
        soak = processes.fork("-m", "tests.soak", *arguments, f"--directory={tmp_path}")
        status = soak.wait(timeout=2400)
    files = [file.read_text(encoding="utf-8") for file in tmp_path.glob("rows-*.jsonl")]
    rows = [json.loads(line) for text in files for line in text.splitlines()]
    assert not [row for row in rows if row["problems"] or not row["same_bits"]]
    assert status == 0, soak.output()[-3000:] + soak.errors()[-3000:]
    hit = [(group.runtime.name, fault.name) for group in plan(SEED, NUMBER, NAMES, ["plain"])
           for fault in group.faults]  # fmt: skip
    assert {name for name, _ in hit} == set(NAMES)
    assert len({fault for _, fault in hit}) == NUMBER
    assert sorted((row["runtime"], row["fault"]) for row in rows) == sorted(hit)
