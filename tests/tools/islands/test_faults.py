"""What happens to the folder ends neither an island nor a merger, and loses nothing in silence."""

import contextlib
import errno
import logging
import os
import threading
import time

import numpy as np
import obstore
import obstore.exceptions
import pytest

from mtf_gradsync.islands import IslandError, Merger, Waiting, replay
from mtf_gradsync.tools.islands import island, leases
from mtf_gradsync.tools.islands.folder import Folder, FolderError
from mtf_gradsync.tools.islands.journal import read_status
from mtf_gradsync.tools.islands.objects import read_decision
from mtf_gradsync.tools.islands.tensor_files import DamagedObjectError
from mtf_gradsync.tools.islands.versions import newest_version
from tests.tools.islands.conftest import merging
from tests.tools.islands.toy import PLAIN, Toy, begun, merge, values_of


class FaultyFolder(Folder):
    """A folder whose n-th request, or all in a time, fail; `late` does it and then fails."""

    def __init__(self, url, fails=lambda number: False, late=False):
        super().__init__(url)
        self.fails, self.late, self.number = fails, late, 0

    @contextlib.contextmanager
    def _store_errors(self, name, what):
        self.number += 1
        is_bad = self.fails(self.number)
        if is_bad and not self.late:
            raise FolderError(f"{name} cannot be {what}: 503")
        with super()._store_errors(name, what):
            yield
        if is_bad:
            raise FolderError(f"{name} cannot be {what}: 404 after it was done")


def rounds(folder, of_merger, of_island, count=4):
    """Two islands and a merger, whose folders may fail; returns the islands when all have ended."""
    toys = [Toy(folder, name, 2, wait_seconds=5.0) for name in ("one", "two")]
    waiting = Waiting(1, 0.0, 0.01)
    merger = Merger(of_merger(str(folder)), PLAIN, waiting, True, poll_seconds=0.001)
    for toy in toys:
        toy.island.folder = of_island(str(folder))
    stopped = []
    threads = [threading.Thread(target=merger.run, args=(lambda: bool(stopped),))]

    def train(toy):
        toy.begin()
        toy.steps(2 * count, 1.0)
        toy.island.finish(toy.session)

    trained = [threading.Thread(target=train, args=(toy,)) for toy in toys]
    for thread in (*threads, *trained):
        thread.start()
    for thread in trained:
        thread.join(60.0)
    stopped.append(True)
    threads[0].join(60.0)
    return toys


def check_nothing_lost(folder, steps):
    """Each island's tokens are in versions; nothing was merged twice; all versions replay."""
    place = Folder(str(folder))
    totals = read_decision(place, newest_version(place)).totals
    assert {name: total.tokens for name, total in totals.items()} == dict.fromkeys(
        ("one", "two"), float(steps)
    )
    assert replay(place) == []


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("who", ["merger", "islands"])
def test_requests_that_fail_now_and_then_lose_nothing(folder, who, late):
    def faulty(url):
        rng = np.random.RandomState(0)
        return FaultyFolder(url, lambda number: number > 8 and rng.rand() < 0.15, late)

    rounds(folder, faulty if who == "merger" else Folder, faulty if who == "islands" else Folder)
    check_nothing_lost(folder, 8)


def test_a_folder_that_fails_for_a_while_is_said_once_and_when_it_works_again(folder, caplog):
    toy = Toy(folder, "one", 2, wait="none")
    toy.island.folder = faulty = FaultyFolder(str(folder))
    with merging(folder, PLAIN):
        toy.begin()
        faulty.fails = lambda number: True
        toy.steps(7, 1.0)
        faulty.fails = lambda number: False
        toy.island._exchange._next_try = 0.0
        toy.step(1.0)
        toy.island.finish(toy.session)
    said = [r.getMessage() for r in caplog.records if "503" in r.getMessage()]
    assert sum("contribution" in x or "journal" in x for x in said) <= 4
    assert any(x.startswith("Over after") for x in said)
    assert values_of(folder)["b"] == -6.0


@pytest.mark.parametrize("when", ["begin", "later"])
def test_a_full_disk_of_the_folder_ends_no_training(folder, monkeypatch, caplog, when):
    is_full = threading.Event()
    put = obstore.put

    def put_if_there_is_room(*args, **kwargs):
        if is_full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return put(*args, **kwargs)

    monkeypatch.setattr(obstore, "put", put_if_there_is_room)
    toy = Toy(folder, "one", 2, wait="none", wait_seconds=5.0)
    with merging(folder, PLAIN):
        begins = threading.Thread(target=toy.begin)
        if when == "begin":
            is_full.set()
        begins.start()
        if when == "begin":
            while "No space left on device" not in caplog.text:
                time.sleep(0.01)
            is_full.clear()
        begins.join(60.0)
        is_full.set()
        toy.steps(7, 1.0)  # the run goes on to its own checkpoint
        assert "No space left on device" in caplog.text
        is_full.clear()
        toy.island._exchange._next_try = 0.0
        toy.island.finish(toy.session)
    assert values_of(folder)["b"] == toy.b == -5.0


def test_what_was_created_without_an_answer_is_its_own(folder, monkeypatch):
    put, unanswered = obstore.put, []

    def put_and_fail(store, name, data, **more):
        found = put(store, name, data, **more)
        if name.endswith((".json", ".safetensors")) and name not in unanswered:
            unanswered.append(name)
            raise obstore.exceptions.NotFoundError("404 Not Found")
        return found

    monkeypatch.setattr(obstore, "put", put_and_fail)
    (toy,) = begun(folder, ["one"])
    toy.steps(2, 1.0)
    toy.island._exchange._next_try = 0.0
    toy.step(0.0)
    merge(folder, 1)
    toy.step(0.0)
    assert toy.b == 0.0
    assert {"members/one@00000001.json", "decisions/00000001.json"} <= {*unanswered}
    assert "00000002.json" not in "".join(Folder(str(folder)).names("members"))


def test_an_island_whose_folder_never_works_ends_with_the_reason(folder, monkeypatch):
    monkeypatch.setattr(leases, "LIFE_SECONDS", 0.1)
    toy = Toy(folder, "one", 2, begin_seconds=0.3)
    toy.island.folder = FaultyFolder(str(folder), lambda number: True)
    with pytest.raises(IslandError, match=r"Island one: members cannot be listed: 503; it is trie"):
        toy.begin()


def test_a_refused_contribution_is_made_again(folder, caplog):
    one, two = begun(folder, ["one", "two"])
    one.steps(2, 1.0)
    two.steps(2, 3.0)
    path = folder / "contributions" / "00000000" / "one@1-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with merging(folder, PLAIN, Waiting(quorum=2)):
        while not path.with_name("one@1-1.refused").exists():
            time.sleep(0.01)
        one.step(1.0)
        assert "one@1-1.safetensors: the merger refuses it" in caplog.text
        while two.island.version == 0:
            two.step(0.0)
            one.step(0.0)
    totals = read_decision(Folder(str(folder)), 1).totals
    assert (totals["one"].merged, totals["one"].refused) == (1, 1)


def test_a_contribution_that_vanishes_is_made_again(folder, caplog):
    (one,) = begun(folder, ["one"])
    one.steps(2, 1.0)
    os.remove(folder / "contributions" / "00000000" / "one@1-1.safetensors")
    one.step(1.0)
    assert "one@1-1.safetensors: it is gone" in caplog.text
    (decision,) = merge(folder, 1)
    assert [c.tokens for c in decision.contributions] == [3.0]
    assert values_of(folder, 1)["b"] == -1.0


def test_without_a_merger_it_says_so_and_contributes_what_it_learns(folder, caplog, monkeypatch):
    monkeypatch.setattr(island, "_LONG", 0.0)
    (toy,) = begun(folder, ["one"])
    toy.steps(200, 1.0)
    assert "its contribution to version 0 waits: no merger makes the next one" in caplog.text
    toy.island.finish(toy.session, waits=False)
    (decision,) = merge(folder, 1)
    assert [c.tokens for c in decision.contributions] == [200.0]


def test_a_version_that_waits_for_islands_is_said(folder, caplog):
    one, _ = begun(folder, ["one", "two"])
    one.steps(2, 1.0)
    waiting = Waiting(quorum=2, min_grace=0.0, max_grace=0.0)
    with merging(folder, PLAIN, waiting):
        while "version 1 waits: it has 1 of 2 contributions (one)" not in caplog.text:
            time.sleep(0.01)


def test_quorum_of_the_living(folder, monkeypatch):
    monkeypatch.setattr(leases, "LIFE_SECONDS", 0.5)
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.1)
    one, two = begun(folder, ["one", "two"])
    two.kill()
    with merging(folder, PLAIN, Waiting(quorum="living")):
        one.steps(2, 1.0)
        began = time.monotonic()
        while one.island.version == 0 and time.monotonic() < began + 20.0:
            time.sleep(0.05)
            one.step(0.0)
    assert one.island.version >= 1


def test_a_merger_that_wakes_up_cannot_write_over_what_another_has_decided(folder, monkeypatch):
    one, two = begun(folder, ["one", "two"])
    one.steps(2, 1.0)
    two.is_blind = True  # it does not see that a version is about to be made
    late = Merger(Folder(str(folder)), PLAIN, Waiting(1, 0.0, 0.0), True, poll_seconds=0.001)
    create_json = late._folder.create_json

    def stopped(name, value):
        if name.startswith("decisions/"):
            monkeypatch.setattr(late._folder, "create_json", create_json)
            two.steps(2, 5.0)
            # Meanwhile another makes version 1.
            leases._HELD.clear()
            merge(folder, 1, waiting=Waiting(quorum=2), keep_all=True)
        return create_json(name, value)

    monkeypatch.setattr(late._folder, "create_json", stopped)
    made = []
    late.run(lambda: bool(made), made.append)
    assert [c.island for c in made[0].contributions] == ["one", "two"]
    assert values_of(folder, 1)["b"] == 2.0 - (2.0 + 10.0) / 2.0
    assert replay(Folder(str(folder))) == []


def test_the_newest_version_is_made_again_from_its_decision_and_back(folder):
    (one,) = begun(folder, ["one"])
    one.steps(2, 1.0)
    merge(folder, 1)
    version, decision = "versions/00000001.safetensors", folder / "decisions" / "00000001.json"
    before, told = Folder(str(folder)).load(version), decision.read_bytes()
    for how in ("gone", "empty"):
        damage(folder / version, how)
        merge(folder, 0)
        assert Folder(str(folder)).load(version).checksum == before.checksum
    decision.unlink()
    merge(folder, 0)
    assert decision.read_bytes() == told
    assert (folder / version).exists()


def test_a_name_that_lives_elsewhere_is_refused(folder, monkeypatch):
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.1)
    (one,) = begun(folder, ["one"])
    own = leases._machine_id()
    monkeypatch.setattr(leases, "_machine_id", lambda: f"elsewhere {own}")
    with pytest.raises(
        IslandError, match=r"The island 'one' of .* is running already: process .* uses its name"
    ):
        Toy(folder, "one", 2).begin()
    one.steps(2, 1.0)


def test_a_decision_cannot_remove_other_files(folder, tmp_path):
    (toy,) = begun(folder, ["one"])
    toy.steps(2, 1.0)
    merge(folder, 1)
    precious = tmp_path / "precious"
    precious.write_text("kept")
    place = Folder(str(folder))
    told = place.read_json("decisions/00000001.json")
    for name in ("../precious", str(precious)):
        told["contributions"][0]["object"] = name
        place.write_json("decisions/00000001.json", told)
        with pytest.raises(DamagedObjectError):
            read_decision(place, 1)
    toy.steps(2, 1.0)
    merge(folder, 1)
    assert precious.read_text() == "kept"


def test_a_folder_that_is_moved_away_and_back(folder, tmp_path):
    toy = Toy(folder, "one", 2, wait="none")
    with merging(folder, PLAIN):
        toy.begin()
        folder.rename(tmp_path / "away")
        folder.mkdir()
        toy.steps(6, 1.0)
        assert not list(folder.iterdir())
        folder.rmdir()
        (tmp_path / "away").rename(folder)
        toy.island._exchange._next_try = 0.0
        toy.step(1.0)
        toy.island.finish(toy.session)
    assert values_of(folder)["b"] == -5.0


@pytest.mark.parametrize("request_", ["names", "read", "write", "create"])
def test_a_folder_that_is_moved_away_during_a_request(folder, tmp_path, monkeypatch, request_):
    place = Folder(str(folder))
    place.write("members/a", b"a")
    known = {"names": (os, "scandir"), "read": (obstore, "get"), "write": (obstore, "put"),
             "create": (obstore, "put")}[request_]  # fmt: skip
    original = getattr(*known)

    def moved(*args, **more):
        monkeypatch.setattr(*known, original)
        folder.rename(tmp_path / "away")
        return original(*args, **more)

    monkeypatch.setattr(*known, moved)
    given = {"names": ["members"], "read": ["members/a"]}.get(request_, ["members/b", b"b"])
    with pytest.raises(FolderError, match=r"is gone; it was|is another folder than before"):
        getattr(place, request_)(*given)


def test_a_name_that_cannot_be_seen_is_not_lost(folder, monkeypatch):
    place = leases.Lease(Folder(str(folder)), "members", "one@")
    assert not place.take()
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "read_json", lambda self, name, kind=None: None)
        assert place.is_held()
    other = leases.Lease(Folder(str(folder)), "members", "one@", replaces_own=True)
    assert not other.take()
    assert (place.is_held(), other.is_held()) == (False, True)


PATHS = [
    "README", "settings.json", "versions/00000000.safetensors", "versions/00000001.safetensors",
    "versions/00000002.safetensors", "versions/99999999.safetensors", "versions/00000002.soon",
    "versions/README", "momenta/00000001.safetensors", "momenta/README",
    "decisions/00000000.json", "decisions/00000001.json", "decisions/00000002.json",
    "decisions/99999999.json", "decisions/README", "contributions/README",
    "contributions/00000001/one@1-2.safetensors", "contributions/00000001/other@1-1.safetensors",
    "contributions/00000001/README", "contributions/00000001/one@1-2.refused",
    "contributions/99999999/one@1-1.safetensors", "offers/one.safetensors", "offers/README",
    "merger/00000001.json", "merger/00000009.json", "merger/README", "members/one@00000001.json",
    "members/one@00000001.beat", "members/README", "journal/one/00000001-000000.jsonl",
    "journal/README",
]  # fmt: skip


def damage(path, how):
    """Puts something wrong in an object's place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if how == "half" and path.exists():
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        return
    if path.is_file():
        path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "link":
        path.symlink_to(path.parent)
    elif how != "gone":
        data = {"half": b"{", "empty": b"", "other type": b"3", "deep": b"[" * 5000,
                "noise": bytes(range(256))}[how]  # fmt: skip
        path.write_bytes(data)


@pytest.mark.parametrize(
    "how", ["half", "empty", "gone", "folder", "pipe", "link", "other type", "deep", "noise"]
)
@pytest.mark.parametrize("name", PATHS)
@pytest.mark.mostly_slow(every=7)
def test_damaged_and_foreign_objects_end_nobody(folder, name, how):
    (toy,) = begun(folder, ["one"])
    toy.steps(2, 1.0)
    merge(folder, 1)
    toy.step(1.0)
    damage(folder / name, how)
    toy.steps(2, 1.0)
    with merging(folder):
        until = time.monotonic() + 10.0
        while toy.island.version < 2 and time.monotonic() < until:
            time.sleep(0.002)
            toy.step(0.0)
        read_status(Folder(str(folder))).table()
        toy.island.finish(toy.session)
    assert toy.island.version >= 2
    added = Toy(folder, "added", 2, begin_seconds=10.0)
    with merging(folder):
        added.begin()
    assert added.b == toy.b == 2.0 - 5.0


def test_what_lasts_is_said_at_growing_intervals(caplog):
    now = 0.0
    reminders = leases.Reminders(logging.getLogger("test"), lambda: now)
    for second in range(1000):
        now = float(second)
        reminders.remind("key", "it waits", after=10.0)
    reminders.end("key")
    said = [r.getMessage() for r in caplog.records]
    assert said == [
        *(f"it waits (for {n} s now)" for n in (10, 70, 210, 630)), "Over after 999 s: it waits",
    ]  # fmt: skip


def test_a_lease_is_held_as_soon_as_another_thread_can_see_it(folder):
    found = []

    class Slow(Folder):
        def create_json(self, name, content):
            is_created = super().create_json(name, content)
            found.append(leases.Lease(Folder(str(folder)), "merger").take())
            return is_created

    assert leases.Lease(Slow(str(folder)), "merger").take() == ""
    assert found == [f"process {os.getpid()} on {leases._machine_id().split(' ')[0]}"]


def test_a_good_offer_is_never_away(folder, monkeypatch):
    """The merger may have decided on it, and a folder that fails then has it no more."""
    offered = folder / "offers" / "one.safetensors"
    toy = Toy(folder, "one", 1, begin_seconds=0.0)
    with pytest.raises(IslandError, match="has no version"):
        toy.begin()
    before = offered.read_bytes()
    again = Toy(folder, "one", 1, begin_seconds=0.0)
    monkeypatch.setattr(Folder, "set_aside", lambda self, name: pytest.fail(name))
    with pytest.raises(IslandError, match="has no version"):
        again.begin()
    assert offered.read_bytes() == before
