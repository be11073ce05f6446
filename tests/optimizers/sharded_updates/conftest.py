"""Fixtures of the tests of sharded updates."""

import pytest

from mtf_gradsync.optimizers import sharded_variables


@pytest.fixture
def small_slots_in_parts(monkeypatch):
    """Partitions factored statistics of any size over the replicas."""
    monkeypatch.setattr(sharded_variables, "MIN_GATHERED_SIZE", 0)
