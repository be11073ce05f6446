"""What an island had learned by its checkpoint is contributed when it comes back."""

import contextlib
import logging

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.islands import IslandError, IslandHook, MergeSettings, Waiting
from mtf_gradsync.tools.islands.folder import Folder
from mtf_gradsync.tools.islands.journal import read_status
from mtf_gradsync.tools.islands.versions import newest_version, replay
from tests.tools.islands.conftest import (
    KINDS,
    Monitored,
    Program,
    contributions,
    feed,
    line,
    merging,
)
from tests.tools.islands.toy import PLAIN, Toy, begun, merge, values_of


def save(toy, path):
    """Saves a checkpoint; returns it."""
    path.with_name(f"{path.name}.index").touch()
    toy.island.save(str(path))
    return str(path), {name: value.copy() for name, value in toy.session.items()}


def back(folder, saved, step, name="one", **arguments):
    """A new life of an island, from its checkpoint."""
    toy = Toy(folder, name, 2, wait="none", **arguments)
    toy.session.update(saved[1])
    toy.island.begin(toy.session, step, saved[0])
    return toy


def test_what_a_checkpoint_has_learned_is_contributed(folder, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    (one,) = begun(folder, ["one"])
    one.island.inner_steps = 10
    for move in (1.0, 2.0, 4.0):
        one.step(move, tokens=5.0)
    saved = save(one, tmp_path / "model.ckpt-3")
    one.step(100.0)
    one.kill()
    again = back(folder, saved, 3)
    assert (again.b, again.island.version, again.island.step) == (2.0 - 7.0, 0, 3)
    assert "with what its checkpoint of step 3 has learned from 15 tokens since" in caplog.text
    again.step(8.0, tokens=5.0)
    (decision,) = merge(folder, 1)
    assert [(c.tokens, c.steps) for c in decision.contributions] == [(20.0, 4)]
    assert values_of(folder)["b"] == 2.0 - 15.0
    joined = [e for e in read_status(Folder(str(folder))).events if e["event"] == "joined"]
    assert [e.get("restored") for e in joined] == [None, [1, 1]]


def test_it_is_contributed_on_top_of_newer_versions(folder, tmp_path):
    one, two = begun(folder, ["one", "two"])
    one.island.inner_steps = 10
    one.steps(3, 1.0)
    saved = save(one, tmp_path / "model.ckpt-3")
    one.kill()
    for _ in range(3):
        two.step(16.0)
        two.step(0.0)
        merge(folder, 1)
        two.step(0.0)
    before = float(values_of(folder)["b"])
    assert before < -16.0
    again = back(folder, saved, 3)
    assert (again.b, again.island.version) == (before - 3.0, 3)
    again.step(0.0)
    (decision,) = merge(folder, 1)
    (own,) = [c for c in decision.contributions if c.island == "one"]
    assert own.tokens == 4.0
    assert Folder(str(folder)).load(own.object).tensors["b"] == 3.0


@pytest.mark.parametrize("becomes", ["merged", "open", "refused", "late", "gone"])
def test_what_was_contributed_before_the_checkpoint(folder, tmp_path, becomes):
    one, two = begun(folder, ["one", "two"])
    one.steps(2, 1.0)
    sent = folder / "contributions" / "00000000" / "one@1-1.safetensors"
    assert sent.exists()
    one.step(0.25)
    saved = save(one, tmp_path / "model.ckpt-3")
    one.kill()
    data = sent.read_bytes()
    if becomes == "merged":
        merge(folder, 1)
    elif becomes == "refused":
        sent.write_bytes(data[:-1])
        two.steps(2, 0.0, tokens=1e-9)
        merge(folder, 1)
    elif becomes in ("late", "gone"):
        sent.unlink()
        if becomes == "late":
            two.steps(2, 0.0, tokens=1e-9)
            merge(folder, 1)
            sent.write_bytes(data)
    again = back(folder, saved, 3)
    assert again.b == 2.0 - 2.25
    for _ in range(3):
        again.step(0.0, tokens=0.0)
        merge(
            folder,
            1
            if Folder(str(folder)).names(f"contributions/{newest_version(Folder(str(folder))):08d}")
            else 0,
        )
    again.island.finish(again.session, waits=False)
    merge(folder, 0)
    total = read_status(Folder(str(folder))).decisions[-1].totals["one"].tokens
    assert (values_of(folder)["b"], total) == (2.0 - 2.25, 3.0)


@pytest.mark.parametrize("becomes", ["merged", "open"])
def test_what_was_contributed_after_the_checkpoint_is_not_contributed_again(
    folder, tmp_path, becomes
):
    (one,) = begun(folder, ["one"])
    one.step(1.0)
    saved = save(one, tmp_path / "model.ckpt-1")
    one.step(1.0)  # contributes both
    one.kill()
    if becomes == "merged":
        merge(folder, 1)
    again = back(folder, saved, 1)
    assert again.b == 0.0
    again.step(0.0)
    merge(folder, 1 if becomes == "open" else 0)
    again.step(0.5)
    again.step(0.0)
    merge(folder, 1)
    assert values_of(folder)["b"] == -0.5


def test_of_several_lives_from_one_checkpoint(folder, tmp_path):
    (one,) = begun(folder, ["one"])
    one.step(1.0)
    saved = save(one, tmp_path / "model.ckpt-1")
    one.kill()
    second = back(folder, saved, 1)
    second.step(0.25)  # contributes
    second.kill()
    third = back(folder, saved, 1)
    assert third.b == 2.0 - 1.25
    third.step(0.0)
    merge(folder, 1)
    third.step(4.0)
    third.step(0.0)
    merge(folder, 1)
    assert values_of(folder)["b"] == 2.0 - 1.25 - 4.0


def test_contributions_for_older_versions_that_may_still_be_merged(folder, tmp_path):
    waiting = Waiting(max_staleness=2)
    one, two = begun(folder, ["one", "two"])
    one.step(1.0)
    saved = save(one, tmp_path / "model.ckpt-1")
    late = folder / "contributions" / "00000000" / "one@1-1.safetensors"
    one.step(2.0)
    data = late.read_bytes()
    one.kill()
    late.unlink()
    two.steps(2, 0.0)
    merge(folder, 1, waiting=waiting)
    late.write_bytes(data)
    again = back(folder, saved, 1)
    # All that it had contributed is still to be merged, and is there only once.
    assert (again.b, again.island.version) == (2.0 - 3.0, 1)
    two.steps(2, 0.0)
    again.steps(2, 0.0)
    merge(folder, 1, waiting=waiting)
    again.island.finish(again.session, waits=False)
    merge(folder, 1, waiting=waiting)
    assert values_of(folder)["b"] < 2.0 - 3.0 / 4.0
    assert read_status(Folder(str(folder))).decisions[-1].totals["one"].tokens == 4.0


def test_fragments_and_rounded_forms(folder, tmp_path):
    settings = PLAIN._replace(fragments=2)
    toy = Toy(folder, "one", 4, wait="none", form="int8")
    with merging(folder, settings):
        toy.begin()
    rng, moved = np.random.RandomState(0), 0.0
    for number in range(30):
        move = float(rng.rand())
        moved += move
        toy.step(move)
        if number % 4 == 3:
            saved = save(toy, tmp_path / f"model.ckpt-{number + 1}")
            toy.kill()
            toy = Toy(folder, "one", 4, wait="none", form="int8")
            toy.session.update(saved[1])
            toy.island.begin(toy.session, number + 1, saved[0])
        if number % 3 == 2:
            merge(folder, 1, settings)
    for _ in range(3):
        for _ in range(2):
            toy.step(0.0)
        merge(folder, 1, settings)
    values = values_of(folder, fragments=2)
    np.testing.assert_allclose(values["b"], 2.0 - moved, atol=0.02)
    np.testing.assert_allclose(values["a"], np.arange(6).reshape(2, 3) - moved, atol=0.02)


def test_kills_at_random_lose_nothing_that_was_in_a_checkpoint(folder, tmp_path):
    """SGD on w of ones, in numbers: the sum of all versions is what was trained to checkpoints."""
    rng, waiting = np.random.RandomState(7), Waiting(min_grace=0.0)
    toys = dict(zip(("one", "two"), begun(folder, ["one", "two"])))
    # What was trained, in all and to the last checkpoint or contribution: how far, how many steps.
    moved, made, steps = dict.fromkeys(toys, 0.0), dict.fromkeys(toys, 0), dict.fromkeys(toys, 0)
    kept = {name: (0.0, 0) for name in toys}
    saved = {name: save(toy, tmp_path / f"{name}.ckpt-0") for name, toy in toys.items()}
    for _ in range(300):
        name = str(rng.choice(list(toys)))
        what, toy = rng.rand(), toys[name]
        if what < 0.6:
            move = float(rng.randint(1, 9)) / 8.0
            before = toy.island._exchange.number
            toy.step(move, tokens=1.0)
            steps[name], made[name], moved[name] = (
                steps[name] + 1,
                made[name] + 1,
                moved[name] + move,
            )
            if toy.island._exchange.number > before:
                kept[name] = moved[name], made[name]
        elif what < 0.75:
            path = tmp_path / f"{name}.ckpt-{steps[name]}"
            saved[name] = save(toy, path)
            kept[name] = moved[name], made[name]
        elif what < 0.85:
            toy.kill()
            toys[name] = back(folder, saved[name], steps[name], name)
            moved[name], made[name] = kept[name]
        else:
            version = newest_version(Folder(str(folder)))
            if Folder(str(folder)).names(f"contributions/{version:08d}"):
                merge(folder, 1, PLAIN, waiting, keep_all=True)
    for toy in toys.values():
        toy.island.finish(toy.session, waits=False)
    merge(folder, 1, PLAIN, waiting, keep_all=True)
    place = Folder(str(folder))
    merged = [one for d in read_status(place).decisions[1:] for one in d.contributions]
    assert len(merged) > 20
    for name in toys:
        total = sum(place.load(c.object).tensors["b"] for c in merged if c.island == name)
        # Each contribution is rounded once, of values below 64.
        np.testing.assert_allclose(total, moved[name], rtol=0, atol=len(merged) * 2**-18)
        assert sum(c.steps for c in merged if c.island == name) == made[name]
    assert replay(place) == []


def test_replayed_it_ends_in_the_same_bits(folder, tmp_path):
    settings, waiting = MergeSettings(0.7, 0.5), Waiting(quorum=1)
    one, two = begun(folder, ["one", "two"], settings)
    rng, moves = np.random.RandomState(3), []

    def step(toy):
        moves.append(float(rng.rand()))
        toy.step(moves[-1])

    def merged():
        two.step(float(rng.rand()))
        two.step(float(rng.rand()))
        merge(folder, 1, settings, waiting, keep_all=True)

    for number in range(5):
        step(one)
        if number == 2:
            merged()
    saved = save(one, tmp_path / "model.ckpt-5")
    for _ in range(4):
        one.step(float(rng.rand()))
    one.kill()
    merged()
    again = back(folder, saved, 5)
    for number in range(6):
        step(again)
        if number == 3:
            merged()
    replayed = Toy(folder, "one", 2, replay=True).begin()
    for move in moves:
        replayed.step(move)
    assert replayed.island.version == again.island.version > 2
    for name, value in again.session.items():
        assert value.tobytes() == replayed.session[name].tobytes()
    # And from the checkpoint on.
    with pytest.raises(
        IslandError, match=r"a replay from this step needs the file that Island\.save wrote"
    ):
        Toy(folder, "one", 2, replay=True).begin(5)
    late = Toy(folder, "one", 2, replay=True)
    late.session.update(saved[1])
    late.island.begin(late.session, 5, saved[0])
    for move in moves[5:]:
        late.step(move)
    for name, value in again.session.items():
        assert value.tobytes() == late.session[name].tobytes()


@pytest.mark.parametrize("kind", ["damaged", "gone", "other name", "other folder"])
def test_what_is_not_its_own_is_passed_over(folder, tmp_path, caplog, kind):
    (one,) = begun(folder, ["one"])
    one.step(1.0)
    saved = save(one, tmp_path / "model.ckpt-1")
    path = tmp_path / "model.ckpt-1.island"
    one.kill()
    name = "one"
    if kind == "damaged":
        path.write_bytes(path.read_bytes()[:-1])
    elif kind == "gone":
        path.unlink()
    elif kind == "other name":
        name = "two"
    else:
        folder = folder / "other"
    with merging(folder, PLAIN):
        again = back(folder, saved, 1, name)
    assert again.b == (1.0 if kind == "other folder" else 2.0)  # there it is the first
    assert not any(again.island._learning.tokens)
    assert ("model.ckpt-1.island" in caplog.text) == (kind == "damaged")


def test_what_is_beside_checkpoints_that_are_gone_is_removed(folder, tmp_path):
    (one,) = begun(folder, ["one"])
    other = tmp_path / "other.ckpt-1.island"
    other.touch()
    there = []
    for number in range(1, 6):
        save(one, tmp_path / f"model.ckpt-{number}")
        (tmp_path / f"model.ckpt-{max(number - 2, 0)}.index").unlink(missing_ok=True)
        there.append(sorted(path.stem[-1] for path in tmp_path.glob("model*.island")))
    # One more than there are checkpoints: from the one before it begins if it is killed meanwhile.
    assert there == [["1"], ["1", "2"], ["1", "2", "3"], ["2", "3", "4"], ["3", "4", "5"]]
    for path in tmp_path.glob("*.index"):  # of a format of one's own
        path.unlink()
    one.island.save(str(tmp_path / "model.ckpt-6"))
    there = sorted(path.stem[-1] for path in tmp_path.glob("model*.island"))
    assert there == ["5", "6"]
    assert other.exists()


def test_a_directory_that_cannot_be_written_ends_no_training(folder, tmp_path, caplog):
    (one,) = begun(folder, ["one"])
    (tmp_path / "file").touch()
    one.step(1.0)
    one.island.save(str(tmp_path / "file" / "model.ckpt-1"))
    one.step(1.0)
    assert "Island one: " in caplog.text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.mostly_slow
def test_steps_that_accumulate_go_on_where_the_checkpoint_is(kind, folder, tmp_path):
    def wrap(opt):
        return gs.GradientAccumulationOptimizer(opt, backward_passes_per_step=4)

    path = str(tmp_path / "model.ckpt-6")
    for life in range(2):
        program = Program(kind, "2", line(wrap), feed(0.5), folder, "a", 8, wait="none")
        with program.session() as session, merging(folder, PLAIN):
            if life:
                session.restore(path)
            program.island.begin(session, 6 * life, path)
            for _ in range(6):
                program.learn(session, feed(0.5), 3.0)
            if not life:
                session.save(path)
                program.island.save(path)
                program.island._exchange.lease.abandon()
                continue
            program.island.finish(session)
    # 12 steps, 3 updates of 4 steps each.
    assert contributions(folder) == {"a": [(3, 36.0)]}
    np.testing.assert_allclose(values_of(folder)["w"], 1.0 - 6.0, rtol=0, atol=1e-6)


def test_a_hook_keeps_what_checkpoints_have(folder, tmp_path):
    program = Program("placement", "2", line(gs.CrossShardOptimizer), feed(1.0), folder, "one", 50,
                      wait="none")  # fmt: skip
    with program.built.graph.as_default(), merging(folder, PLAIN, Waiting(min_grace=0.0)):
        monitored = Monitored(program)

        class Collect(tf.train.CheckpointSaverListener):
            def before_save(self, session, global_step_value):
                session.run(program.built.collect)

        for steps, is_last in ((7, False), (3, True)):
            save_hook = tf.train.CheckpointSaverHook(
                str(tmp_path), save_steps=5, saver=monitored.saver, listeners=[Collect()]
            )
            hook = IslandHook(program.island, 2.0, str(tmp_path))
            with pytest.raises(KeyboardInterrupt) if not is_last else contextlib.nullcontext():
                with monitored.session(tmp_path, [save_hook, hook]) as session:
                    monitored.steps(session, [feed(1.0)] * steps)
                    if not is_last:
                        program.island._exchange.lease.abandon()
                        program.island._merger = None
                        raise KeyboardInterrupt
    total = sum(tokens for _, tokens in contributions(folder)["one"])
    saved_at = int(tf.train.latest_checkpoint(str(tmp_path)).rsplit("-", 1)[1])
    assert total == 2.0 * saved_at
    np.testing.assert_array_equal(values_of(folder)["w"], np.full(6, 1.0 - saved_at))
