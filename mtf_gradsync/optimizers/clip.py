"""ClipByGlobalNormOptimizer: clipping as a stage between two optimizers."""

from __future__ import annotations

from typing import Any, Sequence

import gin

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.compat_v1 import NOT_GIVEN, given_optimizer
from mtf_gradsync.gradients import check_clip_norm, clip_by_global_norm
from mtf_gradsync.optimizers.wrapper import Wrapper
from mtf_gradsync.reduce import Strategy


@gin.configurable(module="mtf_gradsync")
class ClipByGlobalNormOptimizer(Wrapper):
    """Sums gradients over the mesh, clips them by their global norm, applies another optimizer.

    Inside `GradientAccumulationOptimizer` it clips once an update, what was accumulated.

    References:
      Pascanu et al., "On the difficulty of training recurrent neural networks", 2013.
    """

    takes_parts = True

    def __init__(
        self,
        opt: Any,
        clip_norm: Any = gin.REQUIRED,
        name: str = "ClipByGlobalNormOptimizer",
        learning_rate: Any = NOT_GIVEN,
        axes: Any = None,
        mesh_shape: Any = None,
        layout: Any = None,
        batch_dims: str | Sequence[str] = ("batch",),
        reducer: Strategy | None = None,
    ):
        """Wraps an optimizer.

        Args:
          opt: a Mesh-TF optimizer, or a class or factory of one.
          clip_norm: largest norm of all gradients together: a number greater than 0, or a scalar
            tf or mtf tensor.
          name: name of the wrapper.
          learning_rate: only with a class or factory as opt: passed on untouched.
          axes: the replica axes (`ReplicaAxes`); or give mesh_shape and layout.
          mesh_shape: Mesh-TF's mesh shape.
          layout: Mesh-TF's layout rules.
          batch_dims: names of the tensor dimensions that the batch is split along.
          reducer: how sums cross the mesh; None takes `FusedAllReduce()`.

        Raises:
          ValueError: clip_norm is not greater than 0, or arguments contradict each other.
          TypeError: an argument has the wrong type.
        """
        check_clip_norm(clip_norm)
        opt = given_optimizer(opt, learning_rate, type(self).__name__)
        super().__init__(opt, name, axes, mesh_shape, layout, batch_dims, reducer)
        self._clip_norm = clip_norm

    def _check_inner_stack(self) -> None:
        super()._check_inner_stack()
        if self._inner_apply_unsummed is not None:
            raise ValueError(
                "ClipByGlobalNormOptimizer around ShardedUpdateOptimizer would send whole "
                "gradients for their norm: turn them round, "
                "ShardedUpdateOptimizer(ClipByGlobalNormOptimizer(opt, ...), ...), which makes the "
                "same norm of the parts."
            )

    def _to_inner(
        self, grads: list[mtf.Tensor | None], variables: list[mtf.Variable]
    ) -> list[mtf.Operation]:
        summed = self._summed(grads, variables)
        clipped, _ = clip_by_global_norm(summed, self._clip_norm, self.reducer)
        return self._apply_inner(clipped, variables)
