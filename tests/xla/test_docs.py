"""The code in the guide runs."""

import pathlib
import re

import numpy as np
import pytest

GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "xla.md"


@pytest.mark.xla
def test_code_of_the_guide_runs(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("MTF_GRADSYNC_CACHE_DIR", str(tmp_path))
    names = {}
    (code,) = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    exec(code, names)
    loss, shape = capsys.readouterr().out.strip().split(" ", 1)
    assert np.isfinite(float(loss))
    assert float(loss) < 1
    assert shape == "(8, 4)"
    assert list(tmp_path.iterdir())
