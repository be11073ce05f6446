"""What the cache of compiled programs keeps, and whom it believes."""

import os
from unittest.mock import Mock

import pytest

from mtf_gradsync.runtimes.xla.executable import Cache, default_cache_dir


@pytest.fixture
def kept(tmp_path):
    """A cache with two entries, and its folder."""
    folder = tmp_path / "home" / "cache"
    mask = os.umask(0)
    try:
        cache = Cache(str(folder))
        cache.put("one", b"1")
        cache.put("two", b"2")
    finally:
        os.umask(mask)
    assert (cache.get("one"), cache.get("two"), cache.get("three")) == (b"1", b"2", None)
    return cache, folder


def test_nobody_else_can_write_what_is_kept_whatever_the_umask(kept):
    _, folder = kept
    assert [os.stat(x).st_mode & 0o022 for x in (folder, *folder.iterdir())] == [0, 0, 0]


def test_a_folder_that_others_can_write_is_not_used(kept, caplog):
    cache, folder = kept
    os.chmod(folder, 0o777)
    assert cache.get("one") is None
    cache.put("three", b"3")
    os.chmod(folder, 0o700)
    assert (cache.get("one"), cache.get("three")) == (b"1", None)
    (warning,) = caplog.records
    assert f"{folder} nor taken from it. The folder can be written by others (mode 777)" in str(
        warning.getMessage()
    )


@pytest.mark.parametrize("change", ["mode", "owner", "link", "name", "folder's owner"])
def test_an_entry_that_somebody_else_may_have_made_is_not_taken(kept, change):
    cache, folder = kept
    one = folder / "one"
    if change == "mode":
        os.chmod(one, 0o666)
    elif change in ("owner", "folder's owner"):
        if os.geteuid() != 0:
            pytest.skip("only root can give a file away")
        os.chown(one if change == "owner" else folder, 4321, -1)
    elif change == "link":
        one.rename(folder / "elsewhere")
        one.symlink_to(folder / "elsewhere")
    else:
        os.replace(folder / "two", one)
    assert cache.get("one") is None


def test_nothing_is_left_of_an_entry_that_cannot_be_written(kept, monkeypatch):
    cache, folder = kept
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError("No space left on device")))
    cache.put("three", b"3")
    assert sorted(os.listdir(folder)) == ["one", "two"]


def test_a_user_without_a_home_gets_no_folder_of_that_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("MTF_GRADSYNC_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = str(tmp_path / ".cache" / "mtf_gradsync" / "xla")
    assert default_cache_dir() == expected
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_cache_dir() == expected
    Cache("~/here").put("one", b"1")
    assert Cache(str(tmp_path / "here")).get("one") == b"1"
    # As of a user whom /etc/passwd does not know either.
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    monkeypatch.delenv("HOME")
    assert default_cache_dir() is None
    Cache("~/there").put("one", b"1")
    assert os.listdir(tmp_path) == ["here"]
