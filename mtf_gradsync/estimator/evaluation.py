"""The steps of an evaluation and their result."""

from __future__ import annotations

from typing import Any

import numpy as np

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.estimator.host import Metrics


class Evaluation:
    """Averages a spec's losses and metrics over the steps of an evaluation."""

    def __init__(self, spec: Any, is_program: bool):
        """Builds the metrics of the spec that the model_fn returned."""
        metric_ops = dict(getattr(spec, "eval_metric_ops", None) or {})
        if metric_ops and is_program:
            raise ValueError(
                f"eval_metric_ops {sorted(metric_ops)} would be part of a core's program; give "
                "eval_metrics in a TPUEstimatorSpec instead, which run on the host."
            )
        eval_metrics = getattr(spec, "eval_metrics", None)
        self._metrics = Metrics(eval_metrics) if eval_metrics else None
        self._fetches = {
            "loss": spec.loss,
            "tensors": self._metrics.tensors if self._metrics else (),
            "updates": [update for _, update in metric_ops.values()],
        }
        self._values = {name: value for name, (value, _) in metric_ops.items()}
        self._step = tf.train.get_global_step()

    def run(self, session: tf.train.MonitoredSession, steps: int | None) -> dict[str, Any]:
        """Makes the steps; returns the mean "loss", the metrics, and "global_step", by name.

        `steps` of None makes all that the input has.
        """
        global_step = _without_hooks(session, self._step)
        losses: list[Any] = []
        try:
            while not session.should_stop() and (steps is None or len(losses) < steps):
                fetched = session.run(self._fetches)
                losses.append(fetched["loss"])
                if self._metrics:
                    self._metrics.add(fetched["tensors"])
        except (tf.errors.OutOfRangeError, StopIteration):
            pass
        if not losses:
            raise ValueError(
                "The input_fn of the evaluation gave no batch: its data are missing, or they are "
                "fewer examples than a batch takes."
            )
        result = _without_hooks(session, self._values) if self._values else {}
        result.update(self._metrics.result() if self._metrics else {})
        result.update(loss=np.float32(np.mean(losses)), global_step=int(global_step))
        return result


def _without_hooks(session: Any, fetches: Any) -> Any:
    # The argument's name is prescribed.
    return session.run_step_fn(lambda step_context: step_context.session.run(fetches))
