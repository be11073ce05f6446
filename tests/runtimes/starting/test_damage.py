"""Damaged checkpoints: found by reading them, named, and never deleted."""

import pytest

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes._common import ConfigError
from mtf_gradsync.runtimes.starting import (
    MANIFEST_FILE,
    Start,
    choose_checkpoint,
    find_damage,
)
from tests.damage import HOWS, STEPS, damage, files, write_run

NEWEST = "model.ckpt-30"
DATA = f"{NEWEST}.data-00000-of-00001"


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run")


DAMAGES = [(file, how) for file in (f"{NEWEST}.index", DATA) for how in HOWS]


@pytest.mark.parametrize("with_manifest", [True, False])
@pytest.mark.parametrize(("file", "how"), DAMAGES)
def test_damage_is_named_and_the_one_before_is_used_if_the_user_says_so(
    run, file, how, with_manifest
):
    damage(run / file, how)
    if not with_manifest:
        (run / MANIFEST_FILE).unlink()
    before = files(run)
    with pytest.raises(ConfigError) as raised:
        choose_checkpoint(str(run), False, print)
    message = str(raised.value)
    assert f"{run / NEWEST}, is damaged: " in message
    assert "Nothing was changed. With --skip_damaged_checkpoint the run goes on from" in message
    assert f"from {run / 'model.ckpt-20'}, which is intact" in message
    assert files(run) == before

    said = []
    choice = choose_checkpoint(str(run), True, said.append)
    assert choice.path == str(run / "model.ckpt-20")
    assert choice.step == 20
    assert [path.rpartition("-")[2] for path in choice.kept] == ["10", "20"]
    assert "is damaged" in said[0]
    after = files(run)
    kept = {name for name in before if name.startswith(NEWEST)}
    assert {f"damaged/{name}" for name in kept} <= set(after)
    assert all(after[f"damaged/{name}"] == before[name] for name in kept)
    # Afterwards there is nothing to say.
    assert choose_checkpoint(str(run), False, pytest.fail) == choice


def test_a_checkpoint_of_another_run_under_the_same_name_is_found_by_the_manifest(run, tmp_path):
    other = write_run(tmp_path / "other", value=0.5)
    for file in (f"{NEWEST}.index", DATA):
        (run / file).write_bytes((other / file).read_bytes())
    assert "index is not the one that the run wrote" in find_damage(str(run / NEWEST))
    # Only its data: TensorFlow's own checksum.
    again = write_run(tmp_path / "again")
    (again / DATA).write_bytes((other / DATA).read_bytes())
    assert find_damage(str(again / NEWEST)).startswith("weights cannot be read: ")


def test_a_file_that_is_no_checkpoint_of_a_run_is_named(tmp_path):
    with tf.Graph().as_default(), tf.Session() as session:
        weights = tf.get_variable("weights", [3], initializer=tf.zeros_initializer())
        session.run(weights.initializer)
        tf.train.Saver().save(session, str(tmp_path / "model.ckpt"), global_step=3)
    with pytest.raises(ConfigError, match=r"no global_step.*No older one in .* is intact"):
        choose_checkpoint(str(tmp_path), True, print)


def test_the_newest_intact_checkpoint_is_found_behind_damaged_ones(run):
    damage(run / DATA, "zeros")
    damage(run / "model.ckpt-20.index", "gone")
    choice = choose_checkpoint(str(run), True, print)
    assert choice.step == 10
    damage(run / "model.ckpt-10.index", "truncated")
    with pytest.raises(ConfigError, match=r"model.ckpt-10, is damaged.*No older one"):
        choose_checkpoint(str(run), True, print)


@pytest.mark.parametrize("how", ["gone", "emptied", "zeros", "truncated"])
def test_without_a_state_file_the_newest_on_disk_is_taken(run, how):
    """Such as after a kill between the first checkpoint and its state file."""
    damage(run / "checkpoint", how)
    said = []
    assert choose_checkpoint(str(run), False, said.append).step == 30
    assert "checkpoint, which says what the newest checkpoint is, is missing or cannot" in said[0]
    assert tf.train.latest_checkpoint(str(run)) == str(run / NEWEST)


def test_a_checkpoint_that_the_state_file_does_not_know_yet_is_made_again(run):
    state = (run / "checkpoint").read_bytes()
    write_run(run, steps=(*STEPS, 40))
    (run / "checkpoint").write_bytes(state)
    assert choose_checkpoint(str(run), False, pytest.fail).step == 30


def test_an_empty_directory_begins(tmp_path):
    assert choose_checkpoint(str(tmp_path / "none"), False, pytest.fail) == Start(
        path=None, step=0, kept=()
    )


@pytest.mark.parametrize("content", [b"", b"{", b'{"checkpoints": 3}', b"\xff\xfe", b"[1]"])
def test_a_manifest_that_cannot_be_read_is_none(run, content):
    (run / MANIFEST_FILE).write_bytes(content)
    assert find_damage(str(run / NEWEST)) is None


def test_a_manifest_does_not_describe_a_later_checkpoint_of_the_same_name(run, tmp_path):
    """A run that skipped it may be killed between its own checkpoint and the manifest."""
    damage(run / DATA, "zeros")
    choose_checkpoint(str(run), True, print)
    other = write_run(tmp_path / "other", value=0.5)
    for file in (f"{NEWEST}.index", DATA):
        (run / file).write_bytes((other / file).read_bytes())
    assert find_damage(str(run / NEWEST)) is None
