"""A seeded hundred of the quick faults; `make soak` has the others."""

import json
import subprocess
import sys

import pytest

from tests.cluster.processes import ROOT
from tests.soak.faults import faults_for

# Of these a start takes a second or two.
QUICK = ["--runtime=CPU replicas", "--config=plain"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_is_lost_by_fifty_faults(tmp_path, seed):
    soak = subprocess.run(
        [
            sys.executable, "-m", "tests.soak", "--faults=50", "--jobs=1", f"--seed={seed}",
            f"--directory={tmp_path}", *QUICK,
        ],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    lines = (tmp_path / "lane-0.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert not [row for row in rows if row["problems"] or not row["same_bits"]]
    assert soak.returncode == 0, soak.stderr[-3000:]
    assert len(rows) >= 50
    # Of a short soak on a busy machine some kinds come too late to hit.
    assert len({row["fault"] for row in rows}) >= len(faults_for(1)) // 2
