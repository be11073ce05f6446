"""What a training pipeline of Mesh-TensorFlow's loses in each step, on CPU devices."""

from __future__ import annotations

from typing import Any

from mtf_gradsync import session_config
from mtf_gradsync._private.libraries import tf
from tests import ordering


class Losses(tf.train.SessionRunHook):
    """Keeps the loss of every step.

    Attributes:
      values: the losses.
    """

    def __init__(self):
        self.values: list[float] = []

    def begin(self) -> None:
        self._loss = tf.get_collection(tf.GraphKeys.LOSSES)[-1]

    def before_run(self, run_context: Any) -> tf.train.SessionRunArgs:
        return tf.train.SessionRunArgs(self._loss)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.values.append(float(run_values.results))


def on_cpu_devices(estimator: Any, number: int) -> list[float]:
    """Makes a pipeline's estimator train with a seed, on several CPU devices, and without races.

    The pipelines have no argument for the first two. The last is for bare optimizers: what others
    are compared with has to be right.

    Args:
      estimator: the pipeline's.
      number: of devices.

    Returns:
      The losses of its steps, a list that grows as it trains.
    """
    estimator._session_config.CopyFrom(session_config(num_cpu_devices=number))
    estimator._config = estimator._config.replace(tf_random_seed=1)
    hook, train = Losses(), estimator.train
    call = estimator._call_model_fn

    def call_and_settle(*given: Any, **named: Any) -> Any:
        spec = call(*given, **named)
        if spec.mode == tf.estimator.ModeKeys.TRAIN:
            ordering.settle([getattr(x, "op", x) for x in (spec.train_op, spec.loss)])
        return spec

    estimator._call_model_fn = call_and_settle
    estimator.train = lambda **given: train(**{**given, "hooks": [*given["hooks"], hook]})
    return hook.values
