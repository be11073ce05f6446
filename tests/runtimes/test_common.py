"""Files that are written in one step."""

import os

import pytest

from mtf_gradsync.runtimes._common import write_bytes


def test_a_file_is_replaced_and_a_device_is_not(tmp_path):
    file, device = tmp_path / "file", tmp_path / "device"
    for content in (b"old", b"new"):
        write_bytes(file, content)
    assert file.read_bytes() == b"new"
    device.symlink_to("/dev/null")
    write_bytes(device, b"content")
    assert device.is_symlink()
    assert device.read_bytes() == b""


def test_a_file_is_for_whom_the_umask_lets_it_be(tmp_path):
    before = os.umask(0o027)
    try:
        write_bytes(tmp_path / "file", b"content")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_nothing_is_left_of_a_file_that_cannot_be_written(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_bytes(tmp_path / "file", b"content")
    assert list(tmp_path.iterdir()) == []
