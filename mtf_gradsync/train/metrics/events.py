"""TensorBoard event files of a run."""

from __future__ import annotations

import contextlib
import errno
import math
import socket
import time
from pathlib import Path
from typing import Any, Iterator, Mapping

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes.files import free_name
from mtf_gradsync.train.errors import first_line

# What a killed run loses at most, besides what it makes again after its newest checkpoint.
_FLUSH_SECONDS = 30


class EventFile:
    """Scalar summaries in an event file of this session: records of TensorFlow's event protocol.

    Not a ``tf.summary.FileWriter``, whose thread keeps to itself that it could not write. Every
    method raises OSError where it cannot.
    """

    def __init__(self, directory: Path, first_step: int):
        """Begins a file.

        Args:
          directory: where it is made; those of earlier sessions stay.
          first_step: steps made before. What earlier sessions wrote of later ones is made again:
            an event of the kind that TensorFlow's own sessions write says so to TensorBoard.
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
        """Adds values of a step.

        Args:
          step: steps made.
          scalars: numbers by tag; those that are not finite are left out.
        """
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
