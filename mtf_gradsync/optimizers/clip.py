"""ClipByGlobalNormOptimizer: clipping as a stage between two optimizers."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import gin

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.compat_v1 import NOT_GIVEN, MeshOptimizerLike, given_optimizer
from mtf_gradsync.gradients import check_clip_norm, clip_by_global_norm
from mtf_gradsync.mesh.axes import LayoutLike, MeshShapeLike, ReplicaAxes
from mtf_gradsync.optimizers.wrapper import Wrapper
from mtf_gradsync.reduce import Strategy


@gin.configurable(module="mtf_gradsync")
class ClipByGlobalNormOptimizer(Wrapper):
    """Sums gradients over the mesh, clips them by their global norm, applies another optimizer.

    Inside `GradientAccumulationOptimizer` it clips once an update, what was accumulated. Around
    `ShardedUpdateOptimizer`, as inside of it, the norm is made of the parts of sums.

    References:
      Pascanu et al., "On the difficulty of training recurrent neural networks", 2013.
    """

    takes_parts = True
    # What makes it NaN is to be left out: a norm that overflows.
    takes_norm = True

    def __init__(
        self,
        opt: MeshOptimizerLike,
        clip_norm: Any = gin.REQUIRED,
        name: str = "ClipByGlobalNormOptimizer",
        learning_rate: Any = NOT_GIVEN,
        axes: ReplicaAxes | None = None,
        mesh_shape: MeshShapeLike | None = None,
        layout: LayoutLike | None = None,
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
        inner = given_optimizer(opt, learning_rate, type(self).__name__)
        super().__init__(inner, name, axes, mesh_shape, layout, batch_dims, reducer)
        self._clip_norm = clip_norm

    @property
    def apply_unsummed(self) -> Callable[..., list[mtf.Operation]] | None:
        """Applies gradients that are not summed, around an optimizer that sums by itself.

        As `ShardedUpdateOptimizer.apply_unsummed`; None around any other optimizer.
        """
        apply = self._inner_apply_unsummed
        if apply is None:
            return None

        def apply_clipped(
            grads: Sequence[mtf.Tensor | None],
            variables: Sequence[mtf.Variable],
            finish: Callable[..., Any] = list,
            hold: Callable[..., Any] | None = None,
        ) -> list[mtf.Operation]:
            def clip(totals: Sequence[mtf.Tensor | None]) -> list[mtf.Tensor | None]:
                return self._clipped(finish(totals))

            return self._apply_inner(grads, variables, lambda g, v: apply(g, v, clip, hold))

        return apply_clipped

    def _to_inner(
        self, grads: list[mtf.Tensor | None], variables: list[mtf.Variable]
    ) -> list[mtf.Operation]:
        apply_unsummed = self.apply_unsummed
        if apply_unsummed is not None:
            return apply_unsummed(grads, variables)
        return self._apply_inner(self._clipped(self._summed(grads, variables)), variables)

    def _clipped(self, sums: Sequence[mtf.Tensor | None]) -> list[mtf.Tensor | None]:
        """Sums, or parts of them, clipped by the norm of all."""
        return clip_by_global_norm(sums, self._clip_norm, self.reducer)[0]
