"""Damages files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes.starting import (
    add_to_manifest,
)

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


STEPS = (10, 20, 30)


def write_run(directory, steps=STEPS, value=0.0):
    """A directory as a run leaves it."""
    directory.mkdir(exist_ok=True)
    with tf.Graph().as_default():
        step = tf.train.get_or_create_global_step()
        weights = tf.get_variable("weights", [4096])
        saver = tf.train.Saver(save_relative_paths=True)
        with tf.Session() as session:
            for number in steps:
                step.load(number, session)
                weights.load(np.full(4096, value + number, "f"), session)
                prefix = str(directory / "model.ckpt")
                path = saver.save(session, prefix, global_step=number, write_meta_graph=False)
                add_to_manifest(path)
    return directory


def files(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }
