"""Training steps on a placement mesh: TensorFlow operations on devices."""

from __future__ import annotations

from typing import Any, Callable, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.tensorflow import singular_monitored_session
from mtf_gradsync.runtimes.checkpoints.start import Start
from mtf_gradsync.runtimes.places import OnDevices
from mtf_gradsync.train.data.batches import TrainingBatches
from mtf_gradsync.train.runners.runner import GraphRunner
from mtf_gradsync.train.train_graph import TrainGraph


class PlacementMeshRunner(GraphRunner):
    """Runs the default graph in a monitored session; finalizes the graph."""

    def __init__(
        self,
        graph: TrainGraph,
        batches: TrainingBatches,
        model_dir: str,
        start: Start,
        keep_checkpoint_max: int | None,
        place: OnDevices,
        hooks: Sequence[Any] = (),
    ):
        """Adds what it needs to the default graph; see `GraphRunner`.

        `place` is the runtime, and `hooks` are more tf.train.SessionRunHooks.
        """
        # The hook adds the copy from masters to slices and runs it after every restore.
        self._hooks = [mtf.MtfRestoreHook(graph.lowering), *hooks]
        super().__init__(graph, batches, model_dir, start, keep_checkpoint_max, copies=True)
        self._sessions = place.sessions(
            graph.lowering, tf.train.Scaffold(saver=self._saver), lambda: start
        )

    def __enter__(self) -> PlacementMeshRunner:
        """See `Runner`."""
        # Not a session that restarts itself when a device is lost: the loop counts steps.
        self._session = singular_monitored_session(self._sessions, self._hooks).__enter__()
        self._begin()
        return self

    def __exit__(self, *exception: Any) -> None:
        """See `Runner`."""
        self._session.__exit__(*exception)

    def dispatch(self) -> Callable[[], dict[str, Any]]:
        """See `Runner`."""
        values = self._session.run(self._fetches, self._batches.next())
        return lambda: values

    def save(self, step: int) -> str:
        """See `Runner`."""
        # The graph can be rebuilt from the config; its file would be larger than the variables'.
        return self._raw(
            lambda session: self._saver.save(session, self._prefix, step, write_meta_graph=False)
        )

    def should_stop(self) -> bool:
        """See `Runner`."""
        return self._session.should_stop()

    def _raw(self, use: Callable[[tf.Session], Any]) -> Any:
        # The argument's name is prescribed.
        return self._session.run_step_fn(lambda step_context: use(step_context.session))
