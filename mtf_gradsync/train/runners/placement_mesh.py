"""Training steps on a placement mesh: TensorFlow operations on devices."""

from __future__ import annotations

from typing import Any, Callable, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.train.data.batches import TrainingBatches
from mtf_gradsync.train.runners.runner import (
    Runner,
    Start,
    checkpointer,
    fetches_of,
    watch_skips,
    watch_waits,
)
from mtf_gradsync.train.train_graph import TrainGraph


class PlacementMeshRunner(Runner):
    """Runs the default graph, finalized here, in a ``MonitoredSession``."""

    def __init__(
        self,
        graph: TrainGraph,
        batches: TrainingBatches,
        model_dir: str,
        start: Start,
        keep_checkpoint_max: int | None,
        config: tf.ConfigProto,
        hooks: Sequence[Any] = (),
        target: str = "",
    ):
        """Adds what it needs to the default graph.

        Args:
          graph: from `build_train_graph`, in the default graph.
          batches: what it is fed.
          model_dir: directory of the checkpoints.
          start: where it begins.
          keep_checkpoint_max: older checkpoints are deleted; None keeps all.
          config: of the session.
          hooks: more tf.train.SessionRunHooks.
          target: the server to run on; "" is this process.
        """
        # The hook adds the copy from masters to slices and runs it after every restore.
        masters_to_slices = mtf.MtfRestoreHook(graph.lowering)
        self._checkpoints = checkpointer(graph, model_dir, start, keep_checkpoint_max)
        self._fetches, self._batches = fetches_of(graph), batches
        self._waits = watch_waits(graph.optimizers)
        self._skips = watch_skips(graph.optimizers)
        self._global_step = tf.train.get_global_step()
        self._start, self._hooks = start, [masters_to_slices, *hooks]
        self._config, self._target = config, target
        self._initializers = {v.op.name: v.initializer for v in tf.global_variables()}
        self._session: Any = None

    def __enter__(self) -> PlacementMeshRunner:
        """See `Runner`."""
        with self._start.restorable(self._initial_values) as path:
            # Not one that begins again by itself where a device is lost: the loop counts steps.
            self._session = tf.train.SingularMonitoredSession(
                hooks=self._hooks,
                scaffold=tf.train.Scaffold(saver=self._checkpoints.saver),
                master=self._target,
                config=self._config,
                checkpoint_filename_with_path=path,
            ).__enter__()
        self.first_step = int(self._session.run(self._global_step))
        self._batches.begin(self.first_step)
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
        return self._raw(lambda session: self._checkpoints.save(session, step))

    def waits_too_long(self) -> Exception | None:
        """See `Runner`."""
        return self._raw(self._waits.ask)

    def left_out(self) -> str | None:
        """See `Runner`."""
        return self._raw(self._skips.ask)

    def should_stop(self) -> bool:
        """See `Runner`."""
        return self._session.should_stop()

    def _initial_values(self, names: Sequence[str]) -> dict[str, Any]:
        with tf.Session(self._target, config=self._config) as session:
            session.run([self._initializers[name] for name in names])
            variables = {v.op.name: v for v in tf.global_variables() if v.op.name in names}
            return session.run(variables)

    def _raw(self, use: Callable[[tf.Session], Any]) -> Any:
        """Calls a function with the session without hooks."""
        # The argument's name is prescribed.
        return self._session.run_step_fn(lambda step_context: use(step_context.session))
