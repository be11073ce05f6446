"""Training steps as a SIMD program: on XLA devices, or on CPU replicas."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np

from mtf_gradsync import simd, xla
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes.sessions import OnCores
from mtf_gradsync.train.errors import TrainingError
from mtf_gradsync.train.runners.runner import GraphRunner

# Every this many steps several processes exchange whether one has received a signal to stop.
_AGREE_STEPS = 10


class SimdProgramRunner(GraphRunner):
    """Runs a SIMD program of the default graph."""

    copies_slices = False
    _place: OnCores
    _calls = 0

    def __enter__(self) -> SimdProgramRunner:
        try:
            self._session = self._sessions.open()
        except (xla.DevicesError, xla.XlaMissingError, simd.UnsupportedProgramError) as error:
            raise self._other_runtime(error) from error
        cores = getattr(self._session, "cores", None)
        self.is_alone = cores is None or cores.is_alone
        self._begin()
        if not self.is_alone:
            self._session.steps = self.first_step
        return self

    def __exit__(self, *exception: Any) -> None:
        self._session.close()

    def dispatch(self) -> Callable[[], dict[str, Any]]:
        """See `Runner`."""
        batch = self._batches.next()
        if self._place.name != "xla":
            values = self._session.run(self._fetches, batch)
            return lambda: values
        try:
            step = self._session.dispatch(self._fetches, batch)
        except (xla.DevicesError, simd.UnsupportedProgramError) as error:
            raise self._other_runtime(error) from error

        def result() -> dict[str, Any]:
            try:
                return step.result()
            except xla.DevicesError as error:
                raise self._other_runtime(error) from error

        return result

    def save(self, step: int) -> str:
        """See `Runner`."""
        return self._session.save(self._prefix, saver=self._saver, global_step=step)

    def agreed_stop(self, received: int | None) -> int | None:
        """See `Runner`."""
        if self.is_alone:
            return received
        cores = self._session.cores
        self._calls += 1
        if self._calls % _AGREE_STEPS:
            return None
        mine = [np.int32(received or 0)] * len(cores.local)
        (signals,) = cores.gather([mine])
        return int(max(signals)) or None

    def _scaffold(self) -> tf.train.Scaffold:
        return tf.train.Scaffold(local_init_op=tf.tables_initializer())

    def _raw(self, use: Callable[[Any], Any]) -> Any:
        return use(self._session)

    def _other_runtime(self, error: Exception) -> TrainingError:
        name = self._place.name
        return TrainingError(
            f'{error} (train.run.runtime = "{name}"; "placement_mesh" runs every model.)'
        )
