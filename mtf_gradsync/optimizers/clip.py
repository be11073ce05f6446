"""ClipByGlobalNormOptimizer: clips reduced gradients by their global norm."""

from __future__ import annotations

import dataclasses
from typing import Any, Sequence

import gin

from mtf_gradsync.compat_v1 import NOT_GIVEN, MeshOptimizerLike
from mtf_gradsync.gradients.clipping import check_clip_norm, clip_together
from mtf_gradsync.mesh.axes import LayoutLike, MeshShapeLike, ReplicaAxes
from mtf_gradsync.optimizers.pipeline.builder import StepBuilder
from mtf_gradsync.optimizers.pipeline.forms import Form, GradientSet
from mtf_gradsync.optimizers.pipeline.stack import Place, Stage
from mtf_gradsync.optimizers.pipeline.words import About, Line, setting_text
from mtf_gradsync.optimizers.wrapper import CommonArguments, Wrapper
from mtf_gradsync.reduce import Strategy


@dataclasses.dataclass(frozen=True)
class _Clip(Stage):
    clip_norm: Any
    reducer: Strategy
    name: str
    takes = Form.REDUCED
    takes_parts = squares = True

    def apply(self, gradients: GradientSet, step: StepBuilder) -> GradientSet:
        norm, behind = self.clip_norm, step.received[0].present
        clipped, _ = clip_together(gradients.grads, norm, None, self.reducer, self.name, behind)
        return gradients.with_grads(clipped)

    def describe(self, about: About) -> list[Line]:
        return [Line(f"clip to a global norm of {setting_text(self.clip_norm)}")]


@gin.configurable(module="mtf_gradsync")
class ClipByGlobalNormOptimizer(Wrapper):
    """A wrapper that reduces gradients, clips them by their global norm, and applies them.

    Inside `GradientAccumulationOptimizer` this wrapper clips the accumulated gradients, once for
    each update. Around or inside `ShardedUpdateOptimizer`, the norm is that of all replicas' parts
    of the gradients together.

    References:
      Pascanu et al., "On the difficulty of training recurrent neural networks", 2013.

    Examples:
      >>> opt = gs.ClipByGlobalNormOptimizer(mtf.optimize.SgdOptimizer(0.1), 1.0)
      >>> print(gs.describe(gs.CrossShardOptimizer(opt)))
      every step  reduce over the replica axes: fused  (CrossShardOptimizer)
                  clip to a global norm of 1           (ClipByGlobalNormOptimizer)
                  update by Sgd
    """

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
            tensor or variable, tf or mtf, which is checked in each step. Infinity clips nothing.
          name: name of the wrapper.
          learning_rate: the learning rate for opt; only if opt is a class or factory.
          axes: the replica axes (`ReplicaAxes`); or give mesh_shape and layout.
          mesh_shape: Mesh-TF's mesh shape.
          layout: Mesh-TF's layout rules.
          batch_dims: names of the tensor dimensions that the batch is split along.
          reducer: the reduction strategy; None for `FusedAllReduce()`.

        Raises:
          ValueError: clip_norm is not greater than 0, or arguments contradict each other.
          TypeError: an argument has the wrong type.
        """
        check_clip_norm(clip_norm)
        common = CommonArguments(name, axes, mesh_shape, layout, batch_dims, reducer, learning_rate)
        self._clip_norm = clip_norm
        self._wrap(opt, common)
        self._check_order()

    def stages(self, place: Place) -> list[Stage]:
        del place
        return [_Clip(self._clip_norm, self.reducer, self.name)]
