"""The code in the guide runs, and its tables name all there is."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from mtf_gradsync.runtimes.xla.runner import Step, command
from tests import documents

pytestmark = pytest.mark.xla
GUIDE = (documents.ROOT / "docs" / "portable.md").read_text(encoding="utf-8")


def test_code_of_the_guide_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    documents.run("docs/portable.md")
    step = Step.load("step")
    batch = np.ones([16, 8], np.float32)
    losses = [step({"batch": batch})["loss"] for _ in range(3)]
    assert losses[2] < losses[0]
    manifest = json.loads((tmp_path / "step" / "manifest.json").read_text())
    for name in {*manifest, *manifest["results"][0]}.union(*manifest["parameters"]):
        assert f"`{name}`" in GUIDE, name


def test_the_guide_names_all_flags():
    flags = re.findall(r"--[a-z_-]+", command.parser("").format_help())
    for flag in set(flags) - {"--help"}:
        assert f"`{flag}" in GUIDE, flag
