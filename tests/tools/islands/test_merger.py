"""What the merger makes of contributions: values in float64, whoever came when, killed anywhere."""

import itertools
import logging
import os
import time
import types
from unittest import mock

import numpy as np
import pytest

from mtf_gradsync.islands import (
    DamagedObjectError,
    FolderTakenError,
    Merger,
    MergeSettings,
    Waiting,
    replay,
)
from mtf_gradsync.tools.islands import leases
from mtf_gradsync.tools.islands.folder import Folder
from mtf_gradsync.tools.islands.journal import read_status
from mtf_gradsync.tools.islands.objects import island_of, offer_object
from mtf_gradsync.tools.islands.versions import newest_version
from tests.tools.islands.conftest import merging
from tests.tools.islands.toy import (
    PLAIN,
    FragileFolder,
    Killed,
    Toy,
    begun,
    merge,
    new_session,
    values_of,
)


def test_a_version_is_the_mean_weighted_by_tokens(folder):
    one, two = begun(folder, ["one", "two"])
    one.steps(2, 1.0, tokens=3.0)
    two.steps(2, 5.0, tokens=1.0)
    (decision,) = merge(folder, 1, waiting=Waiting(quorum=2))
    assert [(c.island, c.weight) for c in decision.contributions] == [
        ("one", 6.0), ("two", 2.0),
    ]  # fmt: skip
    # 2 less the mean of 2 with weight 6 and of 10 with weight 2.
    values = values_of(folder, 1)
    assert values["b"] == 2.0 - 4.0
    np.testing.assert_array_equal(values["a"], new_session()["a"] - 4.0)
    # Both go on from it, after the next step, with what that step has learned.
    one.step(0.25)
    two.step(0.5)
    assert (one.b, two.b) == (-2.25, -2.5)


def test_what_a_killed_merger_has_half_written_goes(folder):
    (toy,) = begun(folder, ["one"])
    half = folder / "versions" / "00000001.safetensors#1"
    half.write_bytes(b"half")
    os.utime(half, (0.0, 0.0))
    toy.steps(2, 1.0)
    merge(folder, 1)
    assert [path.name for path in sorted((folder / "versions").iterdir())] == [
        "00000000.safetensors", "00000001.safetensors",
    ]  # fmt: skip


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("fragments", [1, 2])
def test_versions_are_sgd_with_momentum(folder, nesterov, fragments):
    settings = MergeSettings(0.5, 0.75, nesterov, fragments)
    toy = Toy(folder, "one", 2, wait_seconds=60.0)
    rng, velocity, outer, base = np.random.RandomState(1), {}, {}, {}
    moves = rng.randint(-8, 8, 24).astype(float)
    with merging(folder, settings, keep_all=True):
        toy.begin()
        outer = {k: v.astype(float) for k, v in new_session().items()}
        base = {k: v.copy() for k, v in outer.items()}
        here = {k: v.copy() for k, v in outer.items()}
        version = 0
        for step, move in enumerate(moves, 1):
            toy.step(move)
            here = {k: v - move for k, v in here.items()}
            if step % (2 // fragments):
                continue
            for k in sorted(outer)[version % fragments :: fragments]:
                gradient = base[k] - here[k]
                velocity[k] = 0.75 * velocity.get(k, 0.0) + gradient
                outer[k] = outer[k] - 0.5 * (
                    gradient + 0.75 * velocity[k] if nesterov else velocity[k]
                )
                base[k], here[k] = outer[k].copy(), outer[k].copy()
            version += 1
            assert toy.island.version == version
            for k, value in here.items():
                # A version rounds once, relative to values of less than 256.
                np.testing.assert_allclose(toy.session[k], value, rtol=0, atol=version * 2**-16)
    assert replay(Folder(str(folder))) == []


def test_names_decide_the_order_and_not_arrival(folder, tmp_path):
    bits = []
    for number, order in enumerate(itertools.permutations(["a", "b", "c"])):
        place = tmp_path / str(number)
        toys = dict(zip("abc", begun(place, "abc")))
        for name in order:
            toys[name].steps(2, {"a": 1e-3, "b": 1e3, "c": -0.7}[name], tokens=0.1 + ord(name))
        merge(place, 1, waiting=Waiting(quorum=3))
        bits.append({k: v.tobytes() for k, v in values_of(place, 1).items()})
    assert all(b == bits[0] for b in bits)


def test_late_contributions_are_counted_and_dropped(folder):
    one, slow = begun(folder, ["one", "slow"])
    one.steps(2, 1.0)
    merge(folder, 1)
    slow.is_blind = True  # it has not looked yet
    slow.steps(2, 3.0)
    slow.is_blind = False
    one.steps(2, 1.0)
    (decision,) = merge(folder, 1)
    assert [c.island for c in decision.contributions] == ["one"]
    assert [(c.island, c.weight) for c in decision.dropped] == [("slow", 2.0)]
    assert {r.island: (r.merged, r.late) for r in read_status(Folder(str(folder))).rows} == {
        "one": (2, 0), "slow": (0, 1),
    }  # fmt: skip
    # What was dropped is still there, and goes into its next contribution.
    slow.step(0.5)
    assert slow.b == 2.0 - 4.0 - 6.0 - 0.5
    (decision,) = merge(folder, 1)
    assert [(c.island, c.weight) for c in decision.contributions] == [("slow", 3.0)]
    slow.step(0.0)
    assert slow.b == -8.5


def test_an_older_contribution_is_merged_within_max_staleness(folder):
    one, slow = begun(folder, ["one", "slow"])
    one.steps(2, 1.0)
    waiting = Waiting(max_staleness=1)
    merge(folder, 1, waiting=waiting)
    slow.is_blind = True
    slow.steps(2, 3.0)
    one.steps(2, 1.0)
    (decision,) = merge(folder, 1, waiting=waiting)
    assert [(c.island, c.version) for c in decision.contributions] == [
        ("one", 1), ("slow", 0),
    ]  # fmt: skip
    assert values_of(folder, 2)["b"] == 2.0 - 2.0 - (2.0 + 6.0) / 2.0
    # It is used once.
    one.steps(2, 1.0)
    (decision,) = merge(folder, 1, waiting=waiting)
    assert [c.island for c in decision.contributions] == ["one"]


def test_the_grace_window_follows_how_far_apart_contributions_come(folder, monkeypatch):
    monkeypatch.setattr(leases, "LIFE_SECONDS", 11.0)
    one, two, _ = begun(folder, ["one", "two", "dead"])
    two.island.inner_steps = 100  # it contributes when it sees that others have
    now, begin, gap = 0.0, 0.0, 2.0

    def sleep(seconds):
        nonlocal now
        now += 0.25
        for toy in (one, two):
            toy.island._exchange.lease.write_heartbeat()
        if now - begin >= gap and two.island._learning.sent is None:
            two.step(1.0)

    waiting = Waiting(quorum=1, min_grace=0.5, max_grace=10.0)
    waited, made = [], []
    merger = Merger(Folder(str(folder)), PLAIN, waiting, poll_seconds=1e-9, clock=lambda: now)

    def on_version(decision):
        nonlocal begin, gap
        made.append(decision)
        waited.append((decision.waited, len(decision.contributions)))
        begin = now
        gap = 100.0 if len(made) == 1 else 2.0
        for toy in (one, one, two):
            toy.step(0.0)

    one.steps(2, 1.0)
    merger.run(lambda: len(made) == 3, on_version, sleep)
    # At first nothing is known of it. Then it is half as long again as the usual 2 s, also after a
    # version with one contribution alone, and over when all are there that were there lately.
    assert waited == [(10.0, 2), (3.0, 1), (2.0, 2)]


def test_damaged_and_foreign_contributions_are_refused_by_name(folder, caplog):
    toys = begun(folder, ["damaged", "foreign", "good", "nan"])
    for toy in toys:
        toy.steps(2, 1.0)
    there = folder / "contributions" / "00000000"
    content = bytearray((there / "damaged@1-1.safetensors").read_bytes())
    content[-1] ^= 1
    (there / "damaged@1-1.safetensors").write_bytes(content)
    (there / "foreign@1-1.safetensors").write_bytes(b"of another kind")
    Folder(str(folder)).store(
        "contributions/00000000/nan@1-2.safetensors",
        {"island": "nan", "version": 0, "tokens": 1.0, "form": "float32"},
        {"a": np.full((2, 3), np.nan, "f"), "b": np.zeros((), "f")},
    )
    Folder(str(folder)).store(
        "contributions/00000000/other@1-1.safetensors",
        {"island": "other", "version": 0, "tokens": 1.0, "form": "float32"},
        {"a": np.zeros((2, 4), "f"), "b": np.zeros((), "f")},
    )
    with caplog.at_level(logging.WARNING, "mtf_gradsync.tools.islands.merger"):
        caplog.clear()
        (decision,) = merge(folder, 1)
    assert [c.island for c in decision.contributions] == ["good"]
    refused = {island_of(path): why for path, why in decision.refused.items()}
    assert "checksum is not that of its content" in refused["damaged"]
    assert "foreign@1-1.safetensors" in refused["foreign"]
    assert "NaN or an infinity in 'a'" in refused["nan"]
    assert "[2, 4]" in refused["other"]
    assert "[2, 3]" in refused["other"]
    assert len(caplog.records) == 4


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
def test_killed_anywhere_it_makes_the_same_bits(folder, tmp_path, after):
    def rounds(place, kill_at):
        """Three versions, by mergers of which the first is killed at its n-th change."""
        settings = MergeSettings(0.7, 0.5)
        toys = begun(place, ["one", "two"], settings)
        fragile = FragileFolder(str(place), kill_at, after)
        for number in range(3):
            for toy, move in zip(toys, (0.3, 0.7)):
                toy.steps(2, move + number)
            missing = lambda: number + 1 - newest_version(Folder(str(place)))  # noqa: B023, E731
            try:
                merge(fragile, missing(), settings, Waiting(quorum=2), keep_all=True)
            except Killed:
                fragile.left = 10**9
                merge(place, missing(), settings, Waiting(quorum=2), keep_all=True)
        assert replay(Folder(str(place))) == []
        bits = {k: v.tobytes() for k, v in values_of(place, 3).items()}
        return bits, 10**9 - fragile.left

    expected, changes = rounds(tmp_path / "whole", 10**9)
    assert changes > 9
    for kill_at in range(1, changes + 1):
        found, _ = rounds(tmp_path / f"killed_{kill_at}", kill_at)
        assert found == expected, kill_at


def test_a_second_merger_says_so_and_ends(folder):
    with merging(folder, PLAIN):
        while not (folder / "merger" / "00000001.json").exists():
            time.sleep(0.01)
        with pytest.raises(FolderTakenError, match=r"process \d+ on .*\. One is enough"):
            merge(folder, 1)
    # The first one has gone.
    toy = Toy(folder, "one", 1, wait="none")
    with merging(folder, PLAIN):
        toy.begin()


def test_settings_of_a_folder_do_not_change(folder):
    begun(folder, ["one"])
    with pytest.raises(ValueError, match=r"was begun with .*outer_learning_rate=1\.0"):
        Merger(Folder(str(folder)), MergeSettings(0.5))
    assert Merger(Folder(str(folder))).settings == PLAIN


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (MergeSettings(-1.0), "outer_learning_rate must be above 0 and below 10, got -1.0"),
        (MergeSettings(outer_momentum=1.0), r"outer_momentum must be in \[0, 1\)"),
        (MergeSettings(fragments=0), "fragments must be a whole number"),
        (MergeSettings(weight="steps"), "weight must be one of tokens, tokens_per_step, got 'st"),
        (MergeSettings(merge="median"), "merge must be one of mean, radial, got 'median'"),
        (MergeSettings(max_norm=0.5), "max_norm must be above 1, or 0 for none, got 0.5"),
        (Waiting(quorum=0), "quorum must be a whole number of at least 1, or 'living', got 0"),
        (Waiting(min_grace=5.0, max_grace=1.0), "min_grace=5.0, max_grace=1.0"),
    ],
)
def test_settings_that_make_no_sense(made, message):
    with pytest.raises(ValueError, match=message):
        made.check()


def test_old_versions_go_unless_all_are_kept(folder, tmp_path):
    for place, keep_all, kept in ((folder, False, [4, 5]), (tmp_path / "all", True, range(6))):
        toy = Toy(place, "one", 1, wait_seconds=60.0)
        with merging(place, MergeSettings(), keep_all=keep_all):
            toy.begin()
            toy.steps(5, 1.0)
        names = [f"{number:08d}.safetensors" for number in kept]
        assert Folder(str(place)).names("versions") == names
    with pytest.raises(DamagedObjectError, match="is gone"):
        replay(Folder(str(folder)))


@pytest.mark.slow
def test_a_folder_in_an_object_store(tmp_path):
    place = f"memory://{tmp_path.name}"
    toy = Toy(place, "one", 1, wait_seconds=60.0)
    with merging(place, PLAIN, keep_all=True):
        toy.begin()
        toy.step(0.5)
        toy.step(0.25)
        # There are no locks: a second merger waits whether the first one's number goes on.
        merger = Merger(Folder(place), poll_seconds=0.01)
        with pytest.raises(FolderTakenError, match=r"process \d+ on .*\. One is enough"):
            merger.run(sleep=lambda seconds: time.sleep(seconds / 3))
    toy.island.close()
    assert (toy.b, toy.island.version) == (1.25, 2)
    assert replay(Folder(place)) == []
    Folder(place).write("contributions/00000002/two.safetensors", b"foreign")
    with pytest.raises(DamagedObjectError, match=r"two\.safetensors in memory://.* is refused"):
        Folder(place).load("contributions/00000002/two.safetensors")
    assert {row.island: row.merged for row in read_status(Folder(place)).rows} == {"one": 2}


def test_changes_of_equal_bits_are_named(folder, caplog):
    toys = begun(folder, ["one", "two", "three"])
    for toy, move in zip(toys, (0.5, 0.5, 0.75)):
        toy.steps(2, move)
    merge(folder, 1, waiting=Waiting(quorum=3))
    assert caplog.text.count("The changes of one, two have equal bits") == 1


def test_an_island_whose_changes_stay_absurd_does_not_become_usual(folder):
    one, two = begun(folder, ["one", "two"])
    for number in range(4):
        for toy, move in ((one, 1.0), (two, 1e6)):
            toy.steps(2, move)
        (decision,) = merge(folder, 1, waiting=Waiting(quorum=2))
        scales = [one.scale for one in decision.contributions]
        assert scales[0] == 1.0
        assert scales[1] < 1e-3, number
        for toy in (one, two):
            toy.island._wait_and_take(toy.session, 0.0)


def test_a_version_that_would_overflow_keeps_the_values_of_before(folder, caplog):
    settings = MergeSettings(outer_learning_rate=0.7, outer_momentum=0.5)
    toy = Toy(folder, "one", 1, wait="none")
    with merging(folder, settings, keep_all=True):
        toy.begin()
    toy.step(3.3e38)  # finite; 0.7 * 1.5 times as much is not
    merge(folder, 1, settings, keep_all=True)
    assert "a of version 1 would not be finite: it keeps the values of before" in caplog.text
    assert values_of(folder, 1)["b"] == 2.0
    toy.island._wait_and_take(toy.session, 0.0)
    assert toy.b == 2.0
    toy.step(1.0)
    merge(folder, 1, settings, keep_all=True)
    np.testing.assert_allclose(values_of(folder, 2)["b"], 2.0 - 0.7 * 1.5)
    assert replay(Folder(str(folder))) == []


@pytest.mark.parametrize("can_be_read", [True, False])
def test_an_offer_stays_where_the_decision_that_names_it_cannot_be_read(tmp_path, can_be_read):
    folder = Folder(str(tmp_path))
    for name in ("a", "b"):
        folder.write(f"offers/{name}.safetensors", b"values")
    named = types.SimpleNamespace(contributions=[types.SimpleNamespace(object=offer_object("a"))])
    cleans = types.SimpleNamespace(
        settings=types.SimpleNamespace(fragments=1),
        _waiting=types.SimpleNamespace(max_staleness=1),
        _decisions={}, _received=mock.Mock(), _folder=folder, _keep_all=True,
        _decision=lambda version: named if can_be_read else None,
    )  # fmt: skip
    Merger._clean_up(cleans, types.SimpleNamespace(version=5))
    stay = {"a.safetensors"} if can_be_read else {"a.safetensors", "b.safetensors"}
    assert set(folder.names("offers")) == stay
