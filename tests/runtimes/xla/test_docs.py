"""The code in the guide runs, and leaves its program where the guide says."""

import pytest

from tests import documents


@pytest.mark.xla
def test_code_of_the_guide_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("MTF_GRADSYNC_CACHE_DIR", str(tmp_path))
    documents.run("docs/xla.md")
    assert list(tmp_path.iterdir())
