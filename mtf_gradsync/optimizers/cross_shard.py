"""CrossShardOptimizer: reduces gradients over the shards of a mesh, all of them together."""

from __future__ import annotations

from typing import Any, Sequence

import gin

from mtf_gradsync import compat_v1
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._warn import warn_once
from mtf_gradsync.compat_v1 import NOT_GIVEN, OptimizerLike, given_optimizer, is_v1
from mtf_gradsync.gradients.copies import SumCopies, check_group_assignment, check_groups_cover
from mtf_gradsync.gradients.stages import each_mesh, on_present
from mtf_gradsync.mesh.axes import LayoutLike, MeshShapeLike, ReplicaAxes
from mtf_gradsync.optimizers.pipeline import Form, GradientSet, Stage, StepBuilder
from mtf_gradsync.optimizers.wrapper import Wrapper
from mtf_gradsync.reduce import Strategy

Reduction = tf.losses.Reduction


class _ReduceOverShards(Stage):
    """Reduces gradients; those of variables with shard dims within groups of shards."""

    gives = Form.REDUCED

    def __init__(self, wrapper: CrossShardOptimizer):
        self._wrapper = wrapper

    def apply(self, gradients: GradientSet, step: StepBuilder) -> GradientSet:
        del step
        wrapper = self._wrapper
        pairs = list(zip(gradients.grads, gradients.variables))
        copies = [g if g is not None and wrapper._has_own_copy(v) else None for g, v in pairs]

        def sum_copies(mesh: mtf.Mesh, present: list[mtf.Tensor]) -> Sequence[mtf.Tensor]:
            del mesh
            dims = [wrapper._shard_dims(g.shape) for g in present]
            return SumCopies(present, dims, wrapper._groups, wrapper.reducer).outputs

        sums = on_present(copies, lambda present: each_mesh(present, sum_copies))
        return gradients.with_grads([g if s is None else s for s, (g, _) in zip(sums, pairs)])


@gin.configurable(module="mtf_gradsync")
class CrossShardOptimizer(Wrapper):
    """Sums gradients over the shards, then applies another optimizer.

    It is the mesh counterpart of `tf.compat.v1.tpu.CrossShardOptimizer`. A gradient may be

    - pending (what `mtf.gradients` returns) or already reduced, of its variable's shape: all
      pending ones are reduced together;
    - per shard, of shape `[shard dims...] + var dims`: it is summed over the shard dims;
    - of a variable that has the shard dims itself: every shard gets the sum over its group. Groups
      for a variable that all shards share are a ValueError.

    References:
      https://www.tensorflow.org/api_docs/python/tf/compat/v1/tpu/CrossShardOptimizer
    """

    def __new__(
        cls,
        opt: OptimizerLike,
        reduction: compat_v1.Reduction = Reduction.MEAN,
        name: str = "CrossShardOptimizer",
        group_assignment: list[list[int]] | None = None,
        learning_rate: Any = NOT_GIVEN,
        axes: ReplicaAxes | None = None,
        mesh_shape: MeshShapeLike | None = None,
        layout: LayoutLike | None = None,
        batch_dims: str | Sequence[str] = ("batch",),
        reducer: Strategy | None = None,
    ) -> Any:
        """Wraps an optimizer.

        A subclass with arguments of its own overrides ``__new__``; there is no ``__init__``.

        Args:
          opt: a Mesh-TF optimizer, or a class or factory of one. With an optimizer of
            `tf.compat.v1.train` the result is `compat_v1.CrossShardOptimizer`, and arguments for
            the mesh have no effect.
          reduction: `tf.compat.v1.losses.Reduction.MEAN` or `.SUM`: whether `compute_gradients`
            scales per-shard losses by 1/num_shards (with groups: 1/group size). Applying
            gradients always sums.
          name: name of the wrapper.
          group_assignment: groups of shards that sum with each other, for variables with shard
            dims: equally long lists of shard numbers, together a permutation of range(num_shards).
            None makes one group of all.
          learning_rate: the learning rate for opt; only if opt is a class or factory.
          axes: the replica axes (`ReplicaAxes`); or give mesh_shape and layout. Without either
            shard dims are recognised by their names.
          mesh_shape: Mesh-TF's mesh shape.
          layout: Mesh-TF's layout rules.
          batch_dims: names of the tensor dimensions that the batch is split along, which are
            the names of the shard dims.
          reducer: the reduction strategy; None takes `FusedAllReduce()`.

        Raises:
          ValueError: reduction or group_assignment is invalid, or arguments contradict each other.
          TypeError: opt is a Keras optimizer.
        """
        if reduction not in (Reduction.SUM, Reduction.MEAN):
            raise ValueError(
                "reduction must be tf.compat.v1.losses.Reduction.SUM or .MEAN "
                f"({Reduction.SUM!r} or {Reduction.MEAN!r}), got {reduction!r}."
            )
        groups = check_group_assignment(group_assignment)
        opt = given_optimizer(opt, learning_rate, cls.__name__)
        if is_v1(opt):
            return compat_v1.CrossShardOptimizer(opt, reduction, name, group_assignment)
        self = super().__new__(cls)
        self._groups, self._reduction = groups, reduction
        self._wrap(opt, NOT_GIVEN, name, axes, mesh_shape, layout, batch_dims, reducer)
        self._check_order()
        if self._groups and self.axes:
            # A processor may hold several shards, so there may be more shards than processors.
            listed = sum(len(group) for group in self._groups)
            check_groups_cover(self._groups, max(self.axes.num_shards, listed))
        return self

    def stages(self) -> list[Stage]:
        """See `Wrapper.stages`."""
        return [_ReduceOverShards(self)]

    def _check_variables(self, variables: Sequence[mtf.Variable]) -> None:
        for variable in variables if self._groups else ():
            if not self._has_own_copy(variable):
                raise ValueError(
                    f"group_assignment={self._groups!r} sums within groups of shards, but all "
                    f"shards share the variable {variable.name!r} of shape "
                    f"{variable.shape.to_string}: it would get a different value in each group. "
                    "Give the variable the shard dims, or do not give group_assignment."
                )
            assert self._groups is not None  # or the loop has no elements
            check_groups_cover(self._groups, mtf.Shape(self._shard_dims(variable.shape)).size)

    def check(self, grads: Sequence[mtf.Tensor | None], variables: Sequence[mtf.Variable]) -> None:
        """See `Wrapper.check`."""
        self._check_variables([v for g, v in zip(grads, variables) if g is not None])

    def _scale_loss(self, loss: mtf.Tensor) -> mtf.Tensor:
        dims = self._shard_dims(loss.shape)
        if not dims:
            # No warning for a scalar if no mesh was given, as in most programs.
            if loss.shape.dims or self.axes is not None or self._groups:
                warn_once(
                    "loss without shard dims",
                    "CrossShardOptimizer: the loss of shape %s has none of the shard dims %s, so "
                    "it counts as the loss of all shards: num_shards is 1 and it is not scaled."
                    "%s",
                    loss.shape.to_string,
                    list(self._shard_names),
                    " If one of its dimensions is the batch's, name it in batch_dims."
                    if loss.shape.dims
                    else "",
                )
            return loss
        num_shards = mtf.Shape(dims).size
        if self._groups:
            num_shards = check_groups_cover(self._groups, num_shards)
        if self._reduction == Reduction.SUM or num_shards == 1:
            return loss
        return loss * (1.0 / num_shards)
