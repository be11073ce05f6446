"""Runs the examples as programs of their own."""

from __future__ import annotations

from tests.runtimes.cluster.processes import ROOT, Processes

# Grappler takes longer than the steps of an example; see tests/grappler.py.
_WITHOUT_GRAPPLER = """
import os, runpy, sys
from tests import grappler
grappler.turn_off()
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(name, *args, with_grappler=False):
    """Runs an example and returns what it printed."""
    command = [ROOT / "examples" / name, *args]
    if not with_grappler:
        command = ["-c", _WITHOUT_GRAPPLER, *command]
    with Processes() as processes:
        process = processes.fork(*command)
        return processes.wait(process)
