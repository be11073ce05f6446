"""SyncReplicasOptimizer around an optimizer of tf.compat.v1, for the workers of a cluster."""

from __future__ import annotations

from typing import Any, Sequence

from mtf_gradsync._numbers import is_number
from mtf_gradsync._private.libraries import tf
from mtf_gradsync._private.tensorflow import optimizers_inside
from mtf_gradsync.compat_v1.accumulation import GradientAccumulationOptimizer
from mtf_gradsync.compat_v1.given import OffMesh


class SyncReplicasOptimizer(OffMesh, tf.train.SyncReplicasOptimizer):
    """TensorFlow's own, which also refuses gradients and variables of a mesh by name."""


def sync_replicas(
    opt: tf.train.Optimizer,
    replicas_to_aggregate: int,
    total_num_replicas: int | None = None,
    variable_averages: Any = None,
    variables_to_average: Sequence[Any] | None = None,
    use_locking: bool = False,
    name: str = "sync_replicas",
) -> SyncReplicasOptimizer:
    """Makes TensorFlow's SyncReplicasOptimizer, for the workers of a cluster.

    Args:
      opt: the optimizer.
      replicas_to_aggregate: gradients that an update takes.
      total_num_replicas: number of workers; None takes replicas_to_aggregate.
      variable_averages: decay of moving averages, or a `tf.train.ExponentialMovingAverage`.
      variables_to_average: what is averaged.
      use_locking: as TensorFlow's.
      name: its name.

    Returns:
      The optimizer.

    Raises:
      ValueError: there is accumulation inside.
    """
    if any(isinstance(o, GradientAccumulationOptimizer) for o in optimizers_inside(opt)):
        raise ValueError(
            "SyncReplicasOptimizer updates on the parameter server, where sums of "
            "GradientAccumulationOptimizer would begin anew with every worker that starts. It adds "
            "up itself: give it the optimizer inside, and replicas_to_aggregate times as many."
        )
    if is_number(variable_averages):
        variable_averages = tf.train.ExponentialMovingAverage(variable_averages)
    return SyncReplicasOptimizer(
        opt,
        replicas_to_aggregate,
        total_num_replicas,
        variable_averages,
        variables_to_average,
        use_locking,
        name,
    )
