"""Damages files."""

from __future__ import annotations

from pathlib import Path

HOWS = ("gone", "emptied", "truncated", "one bit", "zeros")


def damage(path: Path, how: str, place: int | None = None) -> None:
    """Damages a file.

    Args:
      path: the file.
      how: one of `HOWS`.
      place: the byte where it ends, or has a wrong bit; None is a quarter of it. Not every byte of
        an index file counts: some is room, which nobody reads.
    """
    content = path.read_bytes()
    place = len(content) // 4 if place is None else place
    if how == "gone":
        path.unlink()
    elif how == "emptied":
        path.write_bytes(b"")
    elif how == "truncated":
        path.write_bytes(content[:place])
    elif how == "one bit":
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    elif how == "zeros":
        path.write_bytes(bytes(len(content)))
    else:
        raise ValueError(how)
