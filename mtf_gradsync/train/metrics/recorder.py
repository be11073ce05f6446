"""Writes a run's measurements to the metrics file and TensorBoard's event file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Mapping

import numpy as np

from mtf_gradsync.optimizers import split_by_shard
from mtf_gradsync.train.metrics.events import EventFile
from mtf_gradsync.train.metrics.file import MetricsFile

# Names in the metrics file that differ from their tags in the event file, for old files' sake.
_TAGS = {"held_out_nats": "held_out/nats_per_token"}


class Recorder:
    """Writes the measurements of steps to both files, while it is entered."""

    def __init__(self, directory: Path, metrics_file: str, first_step: int):
        """Begins a session of a run, after first_step steps, with files in its directory."""
        self._metrics = MetricsFile(directory / metrics_file, first_step)
        self._events = EventFile(directory, first_step)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *unused_exception: Any) -> None:
        self._events.close()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Adds the measurements of a step: numbers, or arrays with one for each shard, by name.

        Of values that are not finite, only the loss is written.
        """
        scalars = split_by_shard(values)
        self._events.write(step, {_TAGS.get(name, name): x for name, x in scalars.items()})
        plain = {name: _plain(value) for name, value in values.items()}
        line = {name: value for name, value in plain.items() if value is not None}
        if "loss" in values:
            # To all of its digits, by which runs are compared.
            line["loss"] = float(values["loss"])
        self._metrics.write(step, **line)

    def write_once(self, step: int, scalars: Mapping[str, float]) -> None:
        """Adds numbers that do not change during a run, to the event file alone."""
        self._events.write(step, scalars)

    def flush(self) -> None:
        """Puts on disk what was written, before a checkpoint is saved."""
        self._events.flush()


def _plain(value: Any) -> Any:
    """Returns a value for JSON: a number, or a list of one for each shard; None if not finite."""
    array = np.asarray(value)
    if not np.all(np.isfinite(array)):
        return None
    if array.dtype.kind != "f":
        return array.ravel().tolist() if array.shape else array.item()
    rounded = [float(f"{x:.6g}") for x in array.ravel().tolist()]
    return rounded if array.shape else rounded[0]
