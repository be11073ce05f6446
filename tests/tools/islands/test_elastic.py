"""Settings of a run that is an island, and the part of the data that it claims."""

from unittest import mock

import gin
import pytest

from mtf_gradsync.islands import DataPart, ElasticIslands, IslandError, claim_part
from mtf_gradsync.tools.islands import elastic
from mtf_gradsync.tools.islands.folder import Folder
from tests.tools.islands.conftest import at_once


def test_each_island_claims_a_part_once(folder, caplog):
    there = Folder(str(folder))
    found = {name: claim_part(there, name, 3) for name in "abc"}
    assert found == {"a": (0, 3), "b": (1, 3), "c": (2, 3)}
    assert not caplog.text
    # After a restart it has the same.
    assert claim_part(Folder(str(folder)), "b", 3) == DataPart(1, 3)
    assert claim_part(there, "d", 3) == DataPart(0, 3)
    assert "4 islands have begun" in caplog.text
    assert "d learns from the same part" in caplog.text


def test_islands_that_claim_at_once_have_parts_of_their_own(folder):
    names = [f"island-{n}" for n in range(8)]
    found = at_once([lambda n=n: claim_part(Folder(str(folder)), n, 17) for n in names])
    assert sorted(part.part for part in found) == list(range(8))


def test_a_replay_claims_nothing(folder):
    with pytest.raises(IslandError, match="does not say which part of the data the island 'a' had"):
        claim_part(Folder(str(folder)), "a", 3, claims=False)
    claim_part(Folder(str(folder)), "b", 3)
    claim_part(Folder(str(folder)), "a", 3)
    assert claim_part(Folder(str(folder)), "a", 3, claims=False) == DataPart(1, 3)


def test_parts_that_make_no_sense(folder):
    with pytest.raises(ValueError, match="parts must be a whole"):
        claim_part(Folder(str(folder)), "a", 0)
    with pytest.raises(ValueError, match="The name of an island"):
        claim_part(Folder(str(folder)), "../a", 3)
    assert claim_part(Folder(str(folder)), "a", 1) == DataPart(0, 1)
    assert not folder.exists()


def test_gin_binds_the_quorum_of_the_living(folder):
    gin.parse_config(["ElasticIslands.quorum = 'living'", f"ElasticIslands.folder = '{folder}'"])
    try:
        with mock.patch.object(elastic, "Island") as island:
            ElasticIslands().island(None, "run")
    finally:
        gin.clear_config()
    waiting = island.call_args.kwargs["waiting"]
    waiting.check()
    assert waiting.quorum == "living"


def test_a_run_by_itself_has_all_data():
    assert ElasticIslands().part("run") == DataPart(0, 1)
    assert ElasticIslands().island(None, "run") is None
