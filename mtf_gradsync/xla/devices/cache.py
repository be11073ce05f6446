"""A cache of lowered and compiled programs for the next start."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

# Beyond this size the least recently used entries are deleted; reading an entry uses it.
_MOST_BYTES = 2 << 30


def default_cache_dir() -> str | None:
    """Returns where compiled programs are kept unless a session says otherwise.

    Returns:
      The environment variable ``MTF_GRADSYNC_CACHE_DIR``, where it is set (empty: nothing is kept,
      None), otherwise a folder in the user's cache.
    """
    given = os.environ.get("MTF_GRADSYNC_CACHE_DIR")
    if given is not None:
        return given or None
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "mtf_gradsync", "xla")


class Cache:
    """A folder of entries by key. A folder that cannot be used, or None, keeps nothing."""

    def __init__(self, folder: str | None):
        self._folder = Path(folder) if folder else None

    def get(self, key: str) -> bytes | None:
        """Returns the content stored under a key, or None."""
        if self._folder is None:
            return None
        path = self._folder / key
        try:
            content = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        checksum, content = content[:32], content[32:]
        return content if hashlib.sha256(content).digest() == checksum else None

    def put(self, key: str, content: bytes) -> None:
        """Stores content under a key, for this and other processes."""
        if self._folder is None:
            return
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                file.write(hashlib.sha256(content).digest() + content)
            os.replace(file.name, self._folder / key)
            self._drop_old(self._folder)

    def _drop_old(self, folder: Path) -> None:
        found = [(p.stat().st_mtime, p.stat().st_size, p) for p in folder.iterdir()]
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= _MOST_BYTES:
                break
            path.unlink()
            total -= size


def key_of(*parts: bytes | str) -> str:
    """Returns a key, usable as a file's name, of everything that the stored content depends on."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
