"""Fixtures of the tests of sharded updates."""

import pytest

from mtf_gradsync.optimizers.sharded_updates import slots


@pytest.fixture
def small_slots_in_parts(monkeypatch):
    """Partitions factored statistics of any size over the replicas."""
    monkeypatch.setattr(slots, "MIN_GATHERED_SIZE", 0)
