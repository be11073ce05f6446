"""examples/sync_replicas.py."""

import math
import re

from tests.examples.test_examples import run

STEPS, WITHOUT_DATA = 60, 12


def test_training_goes_on_without_a_replica(tmp_path):
    png = tmp_path / "made" / "picture.png"
    output = run("sync_replicas.py", f"--steps={STEPS}", f"--png={png}")
    rows = re.findall(r"^(all healthy|one dead, \w+) +(\S+) +(\S+) +(\S+)%$", output, re.M)
    first, last = ({row[0]: float(row[i]) for row in rows} for i in (1, 2))
    assert set(last) == {"all healthy", "one dead, SyncReplicas", "one dead, CrossShard"}, output

    # Until the data break off all three have seen the same.
    assert len(set(first.values())) == 1
    healthy, sync = last["all healthy"], last["one dead, SyncReplicas"]
    # Ten digits at random: ln 10. What is learned in 60 steps is far below.
    assert sync < 0.3 < 2 < first["one dead, SyncReplicas"]
    # A fifth of the steps had three quarters of the data: the noise of a batch, not another course.
    assert abs(sync - healthy) < 0.2 * healthy
    # The averages of three replicas are not those of four: that it is as good is no accident.
    assert sync != healthy
    assert math.isnan(last["one dead, CrossShard"])

    # Three replicas are enough for an update in every step.
    assert f"no data in {WITHOUT_DATA} steps, {STEPS} updates made" in output
    counts = re.findall(r"^ +(\d) +(\d+) +(\d+)$", output, re.M)
    assert [[int(n) for n in row] for row in counts] == [
        [0, STEPS, 0],
        [1, STEPS, 0],
        [2, STEPS - WITHOUT_DATA, WITHOUT_DATA],
        [3, STEPS, 0],
    ]
    assert png.read_bytes().startswith(b"\x89PNG")
