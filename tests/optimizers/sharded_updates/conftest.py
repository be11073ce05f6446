"""Fixtures of the tests of sharded updates."""

import pytest

from mtf_gradsync.optimizers.sharded_updates import slots


@pytest.fixture
def small_slots_in_parts(monkeypatch):
    """Statistics that are gathered for the update are kept in parts, however small."""
    monkeypatch.setattr(slots, "WORTH_A_GATHER", 0)
