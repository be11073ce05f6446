"""The guide's program runs as it stands."""

import re

import pytest

from mtf_gradsync import xla
from tests import documents

pytestmark = pytest.mark.xla
GUIDE = (documents.ROOT / "docs" / "processes.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_guide_s_program(jobs, tmp_path):
    (block,) = documents.blocks("docs/processes.md")
    script = tmp_path / "train.py"
    script.write_text(block.code, encoding="utf-8")
    job = jobs.run(2, folder=tmp_path, script=str(script))
    losses = [re.search(r"process \d: loss (\d\.\d+)", m.output()).group(1) for m in job.members]
    assert losses[0] == losses[1]
    assert (tmp_path / "step_20.index").exists()


def test_the_guide_s_exit_code():
    assert f"**exit code {xla.LOST_PROCESS_EXIT_CODE}**" in GUIDE
