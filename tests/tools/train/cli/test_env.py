"""The command ``mtf-gradsync env``."""

import pytest

from mtf_gradsync import xla
from mtf_gradsync.tools.train.cli import main as cli


@pytest.mark.parametrize("missing", ["", "This needs jax, which is not installed."])
def test_env_says_what_runs_here_and_why_not(capsys, monkeypatch, missing):
    monkeypatch.setattr(xla, "why_no_xla", lambda: missing)
    # Tests have devices of their own.
    device = type("Device", (), {"platform": "gpu", "device_kind": "NVIDIA X"})()
    device.client = type("Client", (), {"devices": lambda self: [device] * 2})()
    monkeypatch.setattr(xla, "devices_for", lambda number: [device])
    assert cli.main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = {line[:24].strip(): line[24:] for line in lines}
    assert found["runtime xla"] == (f"no: {missing}" if missing else "yes, on 2 NVIDIA X")
    assert found["runtime fastest"] == ("is cpu_replicas" if missing else "is xla")
    assert "CPU of TensorFlow" in found["runtime placement_mesh"]
    assert {"Python", "tensorflow", "mesh-tensorflow", "numpy", "jax"} <= set(found)
