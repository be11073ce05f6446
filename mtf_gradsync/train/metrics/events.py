"""Writes TensorBoard event files of a run."""

from __future__ import annotations

import contextlib
import errno
import math
import socket
import time
from pathlib import Path
from typing import Any, Iterator, Mapping

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes.manifest import free_name
from mtf_gradsync.train.errors import first_line

# Seconds of events that a killed run may lose, besides the steps that are made again.
_FLUSH_SECONDS = 30


class EventFile:
    """Writes scalar summaries to an event file of this session.

    Unlike a ``tf.summary.FileWriter``, whose thread keeps errors to itself, every method raises
    OSError where it cannot write.
    """

    def __init__(self, directory: Path, first_step: int):
        """Creates the file of a session that begins after first_step steps.

        It begins with an event, as TensorFlow's own sessions write it, by which TensorBoard ignores
        later steps of earlier sessions.
        """
        now = time.time()
        # Files are named by the second; a session may begin within the same one.
        name = f"events.out.tfevents.{int(now)}.{socket.gethostname()}.from_step_{first_step:09d}"
        self._path = free_name(directory / name)
        self._flushed_at = time.monotonic()
        with self._writing():
            self._writer = tf.io.TFRecordWriter(str(self._path))
        self._add(tf.Event(wall_time=now, file_version="brain.Event:2"))
        start = tf.SessionLog(status=tf.SessionLog.START)
        self._add(tf.Event(wall_time=now, step=first_step + 1, session_log=start))

    def write(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Adds the numbers of a step, by tag; those that are not finite are skipped."""
        values = [
            tf.Summary.Value(tag=tag, simple_value=float(value))
            for tag, value in scalars.items()
            if math.isfinite(value)
        ]
        if values:
            summary = tf.Summary(value=values)
            self._add(tf.Event(wall_time=time.time(), step=step, summary=summary))

    def flush(self) -> None:
        """Puts on disk what was written."""
        with self._writing():
            self._writer.flush()
        self._flushed_at = time.monotonic()

    def close(self) -> None:
        """Ends the file; calling it twice does no harm."""
        with self._writing():
            self._writer.close()

    def _add(self, event: Any) -> None:
        with self._writing():
            self._writer.write(event.SerializeToString())
        if time.monotonic() - self._flushed_at > _FLUSH_SECONDS:
            self.flush()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        # TensorFlow has errors of its own for some, and Python's for others.
        except (tf.errors.OpError, LookupError, RuntimeError, ValueError) as error:
            what = first_line(error).replace(f"{self._path}; ", "")
            raise OSError(errno.EIO, what, str(self._path)) from error
