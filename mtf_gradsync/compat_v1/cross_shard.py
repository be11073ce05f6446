"""CrossShardOptimizer around an optimizer of tf.compat.v1, with or without a TPU."""

from __future__ import annotations

from typing import Any, Iterable, Literal

from mtf_gradsync._private.libraries import tf
from mtf_gradsync._private.tensorflow import number_of_tpu_shards
from mtf_gradsync.compat_v1.given import OffMesh

#: `tf.compat.v1.losses.Reduction.SUM` and `.MEAN`.
Reduction = Literal["weighted_sum", "weighted_mean"]


class CrossShardOptimizer(OffMesh, tf.tpu.CrossShardOptimizer):
    """TensorFlow's own, which also runs where there is no TPU program.

    There TensorFlow's adds operations that no CPU or GPU can run. This one says, as TensorFlow's
    does, that it assumes one shard, and is the plain optimizer then.

    Attributes:
      opt: the optimizer inside.
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
