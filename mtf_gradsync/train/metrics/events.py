"""TensorBoard event files of a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Mapping

from mtf_gradsync._private.libraries import tf

# What a killed run loses at most, besides what it makes again after its newest checkpoint.
_FLUSH_SECONDS = 30


class EventFile:
    """Scalar summaries in an event file of this session."""

    def __init__(self, directory: Path, first_step: int):
        """Begins a file.

        Args:
          directory: where it is made; those of earlier sessions stay.
          first_step: steps made before. What earlier sessions wrote of later ones is made again:
            an event of the kind that TensorFlow's own sessions write says so to TensorBoard.
        """
        # The writer needs graph mode, whatever the program's default is.
        with tf.Graph().as_default():
            self._writer = tf.summary.FileWriter(
                str(directory),
                flush_secs=_FLUSH_SECONDS,
                # TensorFlow names files by the second; a session may begin within the same one.
                filename_suffix=f".from_step_{first_step:09d}",
            )
        start = tf.SessionLog(status=tf.SessionLog.START)
        self._writer.add_session_log(start, first_step + 1)

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
            self._writer.add_summary(tf.Summary(value=values), step)

    def flush(self) -> None:
        """Puts on disk what was written."""
        self._writer.flush()

    def close(self) -> None:
        """Ends the file; calling it twice does no harm."""
        self._writer.close()
