"""Training steps as a SIMD program: on XLA devices, or on CPU replicas."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import numpy as np

from mtf_gradsync import simd, xla
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.train.data.batches import TrainingBatches
from mtf_gradsync.train.errors import TrainingError
from mtf_gradsync.train.runners.runner import (
    Runner,
    Start,
    checkpointer,
    fetches_of,
    watch_skips,
    watch_waits,
)
from mtf_gradsync.train.train_graph import TrainGraph

# Enough to keep devices busy while the host reads a result and fetches a batch.
_STEPS_AHEAD = 2
# Several processes ask each other this often whether one has got a signal to stop.
_AGREE_STEPS = 10


class SimdProgramRunner(Runner):
    """Runs a SIMD program of the default graph."""

    def __init__(
        self,
        graph: TrainGraph,
        program: simd.Program,
        batches: TrainingBatches,
        runtime: str,
        model_dir: str,
        start: Start,
        keep_checkpoint_max: int | None,
    ):
        """Adds what it needs to the default graph.

        Args:
          graph: from `build_train_graph`, in the default graph.
          program: what it was lowered into.
          batches: what it is fed.
          runtime: "xla" or "cpu_replicas".
          model_dir: directory of the checkpoints.
          start: where it begins.
          keep_checkpoint_max: older checkpoints are deleted; None keeps all.
        """
        self._graph, self._program, self._runtime = graph, program, runtime
        self._start = start
        self._checkpoints = checkpointer(graph, model_dir, start, keep_checkpoint_max)
        self._waits = watch_waits(graph.optimizers)
        self._skips = watch_skips(graph.optimizers)
        self._fetches, self._batches = fetches_of(graph), batches
        self._tables = tf.tables_initializer()
        self._global_step = tf.train.get_global_step()
        self.steps_ahead = _STEPS_AHEAD if runtime == "xla" else 0
        self._session: Any = None
        self._asked = 0

    def __enter__(self) -> SimdProgramRunner:
        """See `Runner`."""
        lowering = self._graph.lowering
        try:
            if self._runtime == "xla":
                self._session = xla.session(self._program, lowering)
            else:
                self._session = self._program.session(lowering)
        except (xla.DevicesError, xla.XlaMissingError, simd.UnsupportedProgramError) as error:
            raise self._other_runtime(error) from error
        cores = getattr(self._session, "cores", None)
        self.is_alone = cores is None or cores.is_alone
        with self._start.restorable(self._initial_values) as path:
            if path:
                self._session.restore(path)
        self._session.run(self._tables)
        self._skips.ask(self._session)
        self.first_step = int(self._session.run(self._global_step))
        if not self.is_alone:
            self._session.steps = self.first_step
        self._batches.begin(self.first_step)
        return self

    def __exit__(self, *exception: Any) -> None:
        """See `Runner`."""
        self._session.close()

    def dispatch(self) -> Callable[[], dict[str, Any]]:
        """See `Runner`."""
        batch = self._batches.next()
        if self._runtime != "xla":
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
        return self._session.save(
            self._checkpoints.prefix, saver=self._checkpoints.saver, global_step=step
        )

    def agreed_stop(self, received: int | None) -> int | None:
        """See `Runner`."""
        if self.is_alone:
            return received
        cores = self._session.cores
        self._asked += 1
        if self._asked % _AGREE_STEPS:
            return None
        mine = [np.int32(received or 0)] * len(cores.local)
        (signals,) = cores.gather([mine])
        return int(max(signals)) or None

    def waits_too_long(self) -> Exception | None:
        """See `Runner`."""
        return self._waits.ask(self._session)

    def left_out(self) -> str | None:
        """See `Runner`."""
        return self._skips.ask(self._session)

    def _initial_values(self, names: Sequence[str]) -> dict[str, Any]:
        return {name: self._session.read(name) for name in names}

    def _other_runtime(self, error: Exception) -> TrainingError:
        return TrainingError(
            f'{error} (train.run.runtime = "{self._runtime}"; "placement_mesh" runs every model.)'
        )
