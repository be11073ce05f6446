"""TensorFlow's own wrappers around its optimizers, which are used where there is no mesh."""

from __future__ import annotations

from typing import Any, Iterable, Literal

from mtf_gradsync._numbers import is_number
from mtf_gradsync._private.libraries import tf
from mtf_gradsync._private.tensorflow import number_of_tpu_shards, optimizers_inside
from mtf_gradsync.compat_v1.accumulation import GradientAccumulationOptimizer
from mtf_gradsync.compat_v1.checks import OffMesh

#: `tf.compat.v1.losses.Reduction.SUM` and `.MEAN`.
Reduction = Literal["weighted_sum", "weighted_mean"]


class CrossShardOptimizer(OffMesh, tf.tpu.CrossShardOptimizer):
    """`tf.compat.v1.tpu.CrossShardOptimizer`, which here also runs outside of a TPU program.

    There TensorFlow's class adds operations that no CPU or GPU can run. This one logs, as
    TensorFlow's does, that it assumes one shard, and then does what the inner optimizer does.

    Attributes:
      opt: the inner optimizer.
    """

    def __init__(
        self,
        opt: tf.train.Optimizer,
        reduction: Reduction = tf.losses.Reduction.MEAN,
        name: str = "CrossShardOptimizer",
        group_assignment: list[list[int]] | None = None,
    ):
        """Wraps an optimizer; see `tf.compat.v1.tpu.CrossShardOptimizer`."""
        super().__init__(opt, reduction, name, group_assignment)
        self.opt = opt

    def apply_gradients(
        self, grads_and_vars: Iterable[Any], global_step: Any = None, name: str | None = None
    ) -> tf.Operation:
        """Sums gradients over the shards of the TPU program, where there is one; applies them.

        Args:
          grads_and_vars: pairs as ``compute_gradients`` returns them.
          global_step: a variable to add one to, or None.
          name: name of the operation.

        Returns:
          The operation.

        Raises:
          TypeError: a gradient or variable is one of Mesh-TensorFlow.
          ValueError: grads_and_vars is malformed.
        """
        pairs = list(grads_and_vars)
        if number_of_tpu_shards() is not None:
            return super().apply_gradients(pairs, global_step, name)
        self._refuse_mesh(pairs, global_step)
        return self.opt.apply_gradients(pairs, global_step, name)


class SyncReplicasOptimizer(OffMesh, tf.train.SyncReplicasOptimizer):
    """TensorFlow's class, which here also refuses gradients and variables of a mesh."""

    def __init__(
        self,
        opt: tf.train.Optimizer,
        replicas_to_aggregate: int,
        total_num_replicas: int | None = None,
        variable_averages: Any = None,
        *arguments: Any,
        **named: Any,
    ):
        """Wraps an optimizer; see `tf.compat.v1.train.SyncReplicasOptimizer`.

        Args:
          opt: the optimizer.
          replicas_to_aggregate: gradients of an update.
          total_num_replicas: how many replicas there are; None for replicas_to_aggregate.
          variable_averages: a `tf.train.ExponentialMovingAverage`, or its decay.
          *arguments: TensorFlow's.
          **named: TensorFlow's.

        Raises:
          ValueError: there is accumulation inside.
        """
        if any(isinstance(o, GradientAccumulationOptimizer) for o in optimizers_inside(opt)):
            raise ValueError(
                "SyncReplicasOptimizer updates on the parameter server, where sums of "
                "GradientAccumulationOptimizer would begin anew with every worker that starts. It "
                "adds up gradients itself: give it the inner optimizer, and multiply "
                "replicas_to_aggregate by backward_passes_per_step."
            )
        if is_number(variable_averages):
            variable_averages = tf.train.ExponentialMovingAverage(variable_averages)
        super().__init__(
            opt, replicas_to_aggregate, total_num_replicas, variable_averages, *arguments, **named
        )
