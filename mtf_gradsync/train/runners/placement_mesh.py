"""Training steps on a placement mesh: TensorFlow operations on devices."""

from __future__ import annotations

from typing import Any, Callable

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.tensorflow import singular_monitored_session
from mtf_gradsync.train.runners.runner import GraphRunner


class PlacementMeshRunner(GraphRunner):
    """Runs the default graph in a monitored session; finalizes the graph."""

    copies_slices = True

    def __enter__(self) -> PlacementMeshRunner:
        # Copies masters to slices after every restore.
        hooks = [mtf.MtfRestoreHook(self._lowering), *self._hooks]
        # Not a session that restarts itself when a device is lost: the loop counts steps.
        self._session = singular_monitored_session(self._sessions, hooks).__enter__()
        self._begin()
        return self

    def __exit__(self, *exception: Any) -> None:
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

    def _scaffold(self) -> tf.train.Scaffold:
        return tf.train.Scaffold(saver=self._saver)

    def _raw(self, use: Callable[[tf.Session], Any]) -> Any:
        # The argument's name is prescribed.
        return self._session.run_step_fn(lambda step_context: use(step_context.session))
