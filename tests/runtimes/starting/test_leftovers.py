"""One run in a directory at a time, and what killed ones left half written."""

import os
from unittest.mock import Mock

import pytest

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes._common import CONFIG_FILE, ConfigError, write_bytes
from mtf_gradsync.runtimes.starting import (
    MANIFEST_FILE,
    lock_model_dir,
    remove_leftovers,
)
from mtf_gradsync.tools.train import run_files

WRITTEN = sorted(
    {value for name, value in vars(run_files).items() if name.endswith("_FILE")}
    | {CONFIG_FILE, MANIFEST_FILE}
)

LEFT = [
    "model.ckpt-20.data-00000-of-00001.tempstate1234567",
    "model.ckpt-20.index.tempstate987",
    "checkpoint.tmp0123456789abcdef0123456789abcdef",
    ".metrics.jsonl.abc_1234",
    ".operative_config.gin.zz00zz00",
]
OURS_AND_OTHERS = [
    "model.ckpt-10.data-00000-of-00001",
    "model.ckpt-10.index",
    "checkpoint",
    "metrics.jsonl",
    ".gitignore",
    ".notes.txt",
    ".settings.json.original",
    ".notes.md.20240101",
    ".completed-by-hand",
    "tempstate123",
    "my.tempstate1",
]


def test_leftovers_go_and_nothing_else_does(tmp_path):
    for name in (*LEFT, *OURS_AND_OTHERS):
        (tmp_path / name).write_text("x")
    (tmp_path / ".completed-abc_1234").mkdir()
    (tmp_path / ".completed-abc_1234" / "model.ckpt-10.index").write_text("x")
    remove_leftovers(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == set(OURS_AND_OTHERS)
    remove_leftovers(str(tmp_path / "not there"))


@pytest.mark.parametrize("name", WRITTEN)
def test_every_file_that_a_run_was_writing_goes(tmp_path, name, monkeypatch):
    monkeypatch.setattr(os, "unlink", lambda path: None)  # the process is killed before
    monkeypatch.setattr(os, "replace", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_bytes(tmp_path / name, b"x")
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 1
    remove_leftovers(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_data_of_a_half_deleted_checkpoint_goes_unless_the_state_file_lists_it(tmp_path):
    for step in (10, 20):
        (tmp_path / f"model.ckpt-{step}.data-00000-of-00001").write_text("x")
    remove_leftovers(str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 2  # no state file: nothing is known
    tf.train.update_checkpoint_state(str(tmp_path), "model.ckpt-20", ["model.ckpt-20"])
    remove_leftovers(str(tmp_path))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"checkpoint", "model.ckpt-20.data-00000-of-00001"}


def test_a_second_run_is_refused(tmp_path):
    directory = str(tmp_path / "run")
    with lock_model_dir(directory):
        with pytest.raises(ConfigError, match="Another run writes to"), lock_model_dir(directory):
            pytest.fail("two runs at once")
    with lock_model_dir(directory):
        pass
    assert not list((tmp_path / "run").iterdir())


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be written to: Not a directory"):
        lock_model_dir(str(tmp_path / "file" / "run")).__enter__()


@pytest.mark.parametrize("name", ["lr[1]", "run*", "gs://bucket/run"])
def test_a_directory_that_tensorflow_would_not_find_again_is_refused(tmp_path, name):
    directory = name if "://" in name else str(tmp_path / name)
    with pytest.raises(ConfigError, match=r"a pattern|of this machine"):
        lock_model_dir(directory).__enter__()
    assert not list(tmp_path.iterdir())
