"""Directories that were copied or moved, whose state files have absolute paths."""

import shutil

import pytest

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes.starting import choose_checkpoint
from tests.damage import damage, files, write_run


@pytest.fixture
def original(tmp_path):
    """As Estimator and Mesh-TF's own runs leave it."""
    run = write_run(tmp_path / "original")
    paths = [str(run / f"model.ckpt-{step}") for step in (10, 20, 30)]
    (run / "checkpoint").write_text(
        f'model_checkpoint_path: "{paths[-1]}"\n'
        + "".join(f'all_model_checkpoint_paths: "{path}"\n' for path in paths)
    )
    return run


def test_a_copy_has_its_own_checkpoints(original, tmp_path):
    copy = shutil.copytree(original, tmp_path / "copy")
    before = files(original)
    choice = choose_checkpoint(str(copy), False, pytest.fail)
    assert choice.kept == tuple(str(copy / f"model.ckpt-{step}") for step in (10, 20, 30))
    damage(copy / "model.ckpt-30.index", "emptied")
    assert choose_checkpoint(str(copy), True, print).path == str(copy / "model.ckpt-20")
    assert files(original) == before


def test_a_moved_one_goes_on(original, tmp_path):
    moved = original.rename(tmp_path / "moved")
    assert choose_checkpoint(str(moved), False, pytest.fail).step == 30


@pytest.mark.parametrize("prefix", ["./", ".//"])
def test_each_checkpoint_counts_once_however_the_directory_is_written(
    tmp_path, monkeypatch, prefix
):
    run = write_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    damage(run / "model.ckpt-30.index", "gone")
    choice = choose_checkpoint(f"{prefix}run", True, print)
    assert [path.rpartition("-")[2] for path in choice.kept] == ["10", "20"]
    state = tf.train.get_checkpoint_state(str(run))
    assert len(state.all_model_checkpoint_paths) == 2
