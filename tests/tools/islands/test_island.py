"""What an island does when others lag, die, come back or join; replays of it by the journal."""

import logging
import re
import time

import numpy as np
import pytest

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.islands import Island, IslandError, IslandHook, MergeSettings, Waiting
from mtf_gradsync.tools.islands.folder import Folder
from mtf_gradsync.tools.islands.journal import events_by_step, read_status
from mtf_gradsync.tools.islands.tensor_files import TensorSpec
from tests.tools.islands.conftest import Monitored, Program, batches, merging
from tests.tools.islands.toy import PLAIN, Toy, ToyValues, begun, merge


def test_what_was_learned_since_the_contribution_is_kept(folder):
    one, two = begun(folder, ["one", "two"])
    one.steps(2, 1.0)
    two.steps(2, 3.0)
    # No merger is there: the islands go on.
    one.steps(3, 0.25)
    merge(folder, 1, waiting=Waiting(quorum=2))
    one.step(0.5)
    assert one.b == 2.0 - 4.0 - 3 * 0.25 - 0.5
    # It is in its next contribution, which it makes at once, with all steps' tokens.
    two.steps(2, 0.0)
    (decision,) = merge(folder, 1, waiting=Waiting(quorum=2))
    assert [c.weight for c in decision.contributions] == [4.0, 2.0]
    # The outer values are rounded once, as is each island's.
    one.step(0.0)
    assert one.b == np.float32(-2.0 - (3 * 0.25 + 0.5) * 4.0 / 6.0)


def test_an_island_that_is_slower_contributes_the_steps_that_it_has_made(folder):
    fast, slow = begun(folder, ["fast", "slow"])
    slow.step(3.0)
    fast.steps(2, 1.0)
    with merging(folder, PLAIN, Waiting(quorum=1, min_grace=60.0, max_grace=60.0)):
        while not (folder / "versions" / "00000001.soon").exists():
            pass
        slow.step(3.0, tokens=5.0)
        while slow.island.version == 0:
            slow.step(0.0)
    status = read_status(Folder(str(folder)))
    assert [(c.island, c.weight) for c in status.decisions[1].contributions] == [
        ("fast", 2.0), ("slow", 6.0),
    ]  # fmt: skip


def test_returned_and_added_islands_begin_from_the_newest_version(folder):
    one, two = begun(folder, ["one", "two"])
    one.steps(2, 1.0)
    two.steps(2, 1.0)
    two.step(1.0)  # and is killed
    merge(folder, 1, waiting=Waiting(quorum=2))
    again = Toy(folder, "two", 2, wait="none")
    again.session["b"] = np.float32(100.0).reshape(())  # of its checkpoint
    added = Toy(folder, "three", 2, wait="none")
    for toy in (again.begin(step=2), added.begin()):
        assert (toy.b, toy.island.version) == (0.0, 1)
    rows = {row.island: row.joined for row in read_status(Folder(str(folder))).rows}
    assert rows == {"one": 1, "two": 2, "three": 1}


def test_what_an_island_contributed_before_it_was_killed_stays(folder):
    one, two = begun(folder, ["one", "two"])
    one.steps(2, 1.0)
    path = folder / "contributions" / "00000000" / "one@1-1.safetensors"
    before = path.read_bytes()
    again = Toy(folder, "one", 2, wait="none").begin(step=2)
    again.steps(3, 0.25)
    assert path.read_bytes() == before
    two.steps(2, 3.0)
    (decision,) = merge(folder, 1, waiting=Waiting(quorum=2), keep_all=True)
    assert [c.weight for c in decision.contributions] == [2.0, 2.0]
    # What it has learned since it came back is kept, and is in its next contribution.
    again.step(0.0)
    assert (again.b, again.island.version) == (2.0 - 4.0 - 0.75, 1)
    (decision,) = merge(folder, 1, keep_all=True)
    assert [(c.island, c.weight) for c in decision.contributions] == [("one", 4.0)]
    # The journal knows: a replay of its second life keeps it in the same way.
    replayed = Toy(folder, "one", 2, replay=True).begin(2)
    for move in (0.25, 0.25, 0.25, 0.0):
        replayed.step(move)
    assert (replayed.b, replayed.island.version) == (again.b, 1)


def test_two_processes_of_one_name(folder):
    (one,) = begun(folder, ["one"])
    again = Toy(folder, "one", 2, wait="none").begin()
    one.step(1.0)
    with pytest.raises(
        IslandError, match="Another process has taken the name of the island 'one' of"
    ):
        one.step(1.0)
    one.island.close()
    again.steps(2, 1.0)
    assert len(pending(folder)) == 1


def test_values_that_are_not_finite_are_not_contributed(folder, caplog):
    (toy,) = begun(folder, ["one"])
    toy.step(1.0)
    toy.step(float("nan"))
    assert toy.b == 2.0
    assert "of one holds numbers that are not finite, after step 2: it goes back" in caplog.text
    assert not Folder(str(folder)).names("contributions")
    toy.steps(2, 1.0)
    merge(folder, 1)
    toy.step(0.0)
    assert toy.b == 0.0


def test_no_tokens_are_no_contribution(folder):
    one, two = begun(folder, ["one", "two"])
    one.steps(2, 8.0, tokens=0.0)
    two.steps(2, 1.0)
    merge(folder, 1)
    one.step(0.0)
    two.step(0.0)
    assert two.b == 0.0
    # Its own change is not lost: it comes with its first tokens.
    assert one.b == -16.0


def test_a_damaged_version_is_not_taken(folder, caplog):
    (toy,) = begun(folder, ["one"])
    toy.steps(2, 1.0)
    merge(folder, 1)
    path = folder / "versions" / "00000001.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    toy.step(1.0)
    assert toy.island.version == 0
    assert "versions/00000001.safetensors" in caplog.text
    assert "training goes on without it" in caplog.text
    path.write_bytes(whole)
    toy.step(1.0)
    assert (toy.b, toy.island.version) == (-2.0, 1)


@pytest.mark.parametrize(
    ("form", "bytes_sent"), [("bfloat16", 14), ("int8", 2 * 260), ("int4", 2 * 36)]
)
@pytest.mark.mostly_slow
def test_what_rounding_takes_away_is_in_the_next_contribution(folder, form, bytes_sent):
    toy = Toy(folder, "one", 1, wait_seconds=60.0, form=form)
    moves = np.random.RandomState(0).rand(40).astype("f") * 0.01
    total = 0.0
    with merging(folder, PLAIN):
        toy.begin()
        for move in moves:
            toy.step(move)
            total += float(move)
    # One rounding is left, of a change of at most 0.02, and 40 of float32 to values below 8.
    one = 0.02 * {"bfloat16": 2**-9, "int8": 0.5 / 127, "int4": 0.5 / 7}[form]
    assert abs(toy.b - (2.0 - total)) < one + 40 * 2**-21
    assert toy.island.traffic.written == 40 * bytes_sent


def run_live(folder, at_restart):
    """An island that dies and comes back beside one that lags; the first, and its steps."""
    one, two = begun(folder, ["one", "two"], MergeSettings(0.7, 0.5))
    waiting, rng = Waiting(quorum=1), np.random.RandomState(3)
    saved, step = None, 0

    def both(toy, count):
        nonlocal step
        for _ in range(count):
            step += 1
            toy.step(float(rng.rand()), tokens=1.0 + step % 3)
            if step % 5 == 0:
                two.step(float(rng.rand()) * 3.0, tokens=2.0)
            if step % 3 == 0:
                merge(folder, int(bool(pending(folder))), MergeSettings(0.7, 0.5), waiting,
                      keep_all=True)  # fmt: skip

    both(one, 7)
    saved = (step, {k: v.copy() for k, v in one.session.items()}, rng.get_state())
    both(one, 3)  # and is killed
    step, values, state = saved
    rng.set_state(state)
    at_restart()
    again = Toy(folder, "one", 2, wait="none")
    again.session.update(values)
    again.begin(step)
    both(again, 11)
    return again, step


def pending(folder):
    """Contributions to the newest version."""
    newest = Folder(str(folder)).names("versions")[-1].split(".")[0]
    return Folder(str(folder)).names(f"contributions/{newest}")


@pytest.mark.parametrize("is_behind", [False, True])
def test_replayed_it_ends_in_the_same_bits(folder, monkeypatch, is_behind):
    def set_clock_back():
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() - 3600.0)

    live, steps = run_live(folder, set_clock_back if is_behind else lambda: None)
    # Its steps after step 7 were in a version already, which it followed.
    assert live.island.step > steps
    replayed = Toy(folder, "one", 2, replay=True).begin()
    rng = np.random.RandomState(3)
    for step in range(1, steps + 1):
        replayed.step(float(rng.rand()), tokens=1.0 + step % 3)
        if step % 5 == 0:
            rng.rand()
    assert replayed.island.version == live.island.version > 3
    for name, value in live.session.items():
        assert value.tobytes() == replayed.session[name].tobytes()


def test_a_replay_says_what_is_missing(folder):
    with pytest.raises(IslandError, match="does not say that 'one' joined at step 0"):
        Toy(folder, "one", 2, replay=True).begin()
    begun(folder, ["one"])
    with pytest.raises(IslandError, match=r"'one' joined at step 3; it has events of .* \[0\]"):
        Toy(folder, "one", 2, replay=True).begin(3)


def test_without_a_merger_an_island_does_not_begin(folder):
    with pytest.raises(IslandError, match=r"no version .* after 0 s\. Start a merger: mtf-grad"):
        Toy(folder, "one", 2, begin_seconds=0.0).begin()


@pytest.mark.parametrize(
    ("specs", "why"),
    [
        ({"a": TensorSpec((2, 3), "float32")},
         r"it lacks \[\] of the program's tensors and has \['b'\] in addition"),
        ({"a": TensorSpec((2, 3), "float32"), "b": TensorSpec((4,), "float32")},
         r"'b' is float32 of shape \[\], and the program has float32 of shape \[4\]"),
        ({"a": TensorSpec((2, 3), "float64"), "b": TensorSpec((), "float32")},
         r"'a' is float32 of shape \[2, 3\], and the program has float64"),
    ],
)  # fmt: skip
def test_another_model_ends_at_once(folder, specs, why):
    begun(folder, ["one"])
    session = {name: np.zeros(spec.shape, spec.dtype) for name, spec in specs.items()}
    island = Island(str(folder), "two", 2, values=ToyValues(specs))
    began = time.monotonic()
    with pytest.raises(IslandError, match=f"The island has another model: .*{why}"):
        island.begin(session)
    assert time.monotonic() - began < 10.0


def test_one_of_the_islands_may_be_the_merger(folder):
    one = Toy(folder, "one", 1, merge=True, merge_settings=PLAIN, wait_seconds=60.0)
    two = Toy(folder, "two", 1, merge=True, merge_settings=PLAIN, wait="none")
    one.begin()
    two.begin()
    two.step(1.0)
    one.step(1.0)
    assert one.island.version == 1
    one.island.close()
    two.island.close()
    (joined, *_, left) = [e for s in events_by_step(one.island.folder, "one").values() for e in s]
    assert (joined["event"], left["event"]) == ("joined", "left")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "../one"}, "The name of an island consists of letters"),
        ({"inner_steps": 0}, "inner_steps must be a whole number of at least 1"),
        ({"wait": "long"}, "wait must be one of grace, none, got 'long'"),
        ({"form": "int2"}, "form must be one of float32, bfloat16, int8, int4"),
        ({"follow": "none"}, "follow must be one of version, own"),
        ({"wait_seconds": -1.0}, "wait_seconds must be a number of seconds"),
        ({"merge": True, "replay": True}, "A replay writes nothing"),
        ({"folder": "nowhere://x"}, "'nowhere://x' cannot be opened"),
        ({"folder": ""}, "needs a path or URL"),
    ],
)
def test_arguments_that_make_no_sense(folder, arguments, message):
    given = {"folder": folder, "name": "one", "inner_steps": 2, **arguments}
    with pytest.raises(ValueError, match=message):
        Toy(given.pop("folder"), given.pop("name"), given.pop("inner_steps"), **given)


def test_an_island_of_a_graph_without_variables(folder):
    with pytest.raises(ValueError, match="The graph has no trainable variables"):
        Island(str(folder), "one", 2)
    tf.get_variable("w", [3])
    with pytest.raises(ValueError, match=r"The graph has no variable 'v'\. It has: variable w\."):
        Island(str(folder), "one", 2, variables=["v"])
    island = Island(str(folder), "one", 2, poll_seconds=0.01)
    with tf.Session() as session, pytest.raises(ValueError, match="give the step's, Island"):
        island.begin(session)


def test_a_hook_of_monitored_sessions(folder):
    feeds = batches(6)
    program = Program("placement", "2", "sgd", feeds[0], folder, "one", 2, wait_seconds=60.0)
    with program.built.graph.as_default(), merging(folder, PLAIN):
        monitored = Monitored(program)
        tokens = tf.cast(monitored.global_step, tf.float32) * 3.0 + 1.0
        hooks = [IslandHook(program.island, tokens)]
        with monitored.session(folder.parent, hooks) as session:
            monitored.steps(session, feeds)
    merged = read_status(Folder(str(folder))).decisions[1:]
    assert len(merged) == 3
    weights = [c.weight for d in merged for c in d.contributions]
    assert sum(weights) >= sum(3.0 * s + 1.0 for s in range(6)) / 2.0


def test_progress_is_in_the_journal(folder, caplog):
    with caplog.at_level(logging.WARNING):
        (toy,) = begun(folder, ["one"])
    toy.steps(2, 1.0)
    merge(folder, 1)
    toy.step(0.0)
    toy.island.close()
    status = read_status(Folder(str(folder)))
    # 7 numbers of four bytes: contributed once, read at the beginning and with the version.
    assert [(row.written, row.read) for row in status.rows] == [(28, 56)]
    table = status.table()
    line = r"^one +1 +1 +1 +0 +0 +2 +0\.00 +0\.00 +0 +\d+ s ago +left$"
    assert re.search(line, table, re.MULTILINE)
    assert table.startswith("version 1; the last merger has left\n")
