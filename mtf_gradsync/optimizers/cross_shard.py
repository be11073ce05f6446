"""CrossShardOptimizer: reduces all gradients together over the shards of a mesh."""

from __future__ import annotations

import dataclasses
from typing import Any, Sequence

import gin

from mtf_gradsync import compat_v1
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.compat_v1 import NOT_GIVEN, OptimizerLike, given_optimizer, is_v1
from mtf_gradsync.gradients.arguments import OwnArguments
from mtf_gradsync.gradients.operations import each_mesh, map_present
from mtf_gradsync.gradients.shards import SumCopies, check_group_assignment, check_groups_cover
from mtf_gradsync.mesh.axes import LayoutLike, MeshShapeLike, ReplicaAxes
from mtf_gradsync.optimizers.pipeline.builder import StepBuilder
from mtf_gradsync.optimizers.pipeline.forms import Form, GradientSet
from mtf_gradsync.optimizers.pipeline.stack import Place, Stage
from mtf_gradsync.optimizers.pipeline.words import About, Line
from mtf_gradsync.optimizers.wrapper import CommonArguments, Wrapper
from mtf_gradsync.reduce import Strategy

Reduction = tf.losses.Reduction


@dataclasses.dataclass(frozen=True)
class _ReduceOverShards(Stage):
    """The stage that reduces gradients over the shards.

    If each shard has its own copy of a variable, the gradients of the copies are summed by this
    stage, within groups of shards.
    """

    wrapper: CrossShardOptimizer
    place: Place
    gives = Form.REDUCED

    def check(
        self,
        grads: Sequence[mtf.Tensor | None],
        variables: Sequence[mtf.Variable],
        arguments: OwnArguments,
    ) -> None:
        del arguments
        present = [v for g, v in zip(grads, variables) if g is not None]
        self.wrapper._check_variables(present, self.place)

    def apply(self, gradients: GradientSet, step: StepBuilder) -> GradientSet:
        del step
        wrapper, place = self.wrapper, self.place
        around = [stage for one in place.around for stage in one.stages]
        others = [stage for stage in around if isinstance(stage, _ReduceOverShards)]

        def is_to_sum(variable: mtf.Variable) -> bool:
            summed = any(x.wrapper._has_own_copy(variable, x.place) for x in others)
            return wrapper._has_own_copy(variable, place) and not summed

        pairs = list(zip(gradients.grads, gradients.variables))
        copies = [g if g is not None and is_to_sum(v) else None for g, v in pairs]

        def sum_copies(mesh: mtf.Mesh, present: list[mtf.Tensor]) -> Sequence[mtf.Tensor]:
            del mesh
            dims = [wrapper._shard_dims(g.shape, place) for g in present]
            return SumCopies(present, dims, wrapper._groups, wrapper.reducer).outputs

        sums = map_present(copies, lambda present: each_mesh(present, sum_copies))
        return gradients.with_grads([g if s is None else s for s, (g, _) in zip(sums, pairs)])

    def describe(self, about: About) -> list[Line]:
        groups = self.wrapper._groups
        if groups is None:
            return []
        return [Line(f"sum gradients of the shards' own copies in {len(groups)} groups of shards")]


@gin.configurable(module="mtf_gradsync")
class CrossShardOptimizer(Wrapper):
    """A wrapper that sums gradients over the shards, and applies them by another optimizer.

    This wrapper is the mesh counterpart of `tf.compat.v1.tpu.CrossShardOptimizer`. It takes three
    kinds of gradients:

    - A gradient of its variable's shape is pending (not yet reduced, as `mtf.gradients` returns it)
      or already reduced. All pending gradients are reduced together.
    - A gradient per shard, of shape `[shard dims...] + var dims`, is summed over the shard dims.
    - If a variable has the shard dims itself, each shard has its own copy of the variable. For its
      copy a shard gets the sum of the gradients in its group of shards. With `group_assignment`, a
      variable that all shards share raises ValueError.

    References:
      https://www.tensorflow.org/api_docs/python/tf/compat/v1/tpu/CrossShardOptimizer

    Examples:
      >>> print(gs.describe(gs.CrossShardOptimizer(mtf.optimize.SgdOptimizer(0.1))))
      every step  reduce over the replica axes: fused  (CrossShardOptimizer)
                  update by Sgd
    """

    def __init__(
        self,
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
    ) -> None:
        """Wraps an optimizer.

        Args:
          opt: a Mesh-TF optimizer, or a class or factory of one. With an optimizer of
            `tf.compat.v1.train` the result is `compat_v1.CrossShardOptimizer`, and arguments for
            the mesh have no effect. A subclass takes mesh optimizers only.
          reduction: `tf.compat.v1.losses.Reduction.MEAN` or `.SUM`: whether `compute_gradients`
            scales per-shard losses by 1/num_shards (with groups: 1/group size), in any wrapper of
            the stack. Applying gradients always sums.
          name: name of the wrapper.
          group_assignment: groups of shards that sum with each other, for variables with shard
            dims: equally long lists of shard numbers, together a permutation of range(num_shards).
            None puts all shards into one group.
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
        opt = given_optimizer(opt, learning_rate, type(self).__name__)
        if type(self) is CrossShardOptimizer and is_v1(opt):
            arguments = (opt, reduction, name, group_assignment)
            self._turn_into_v1(compat_v1.CrossShardOptimizer, *arguments)
            return
        self._groups, self.loss_reduction = groups, reduction
        self._wrap(opt, CommonArguments(name, axes, mesh_shape, layout, batch_dims, reducer))
        self._check_order()
        if self._groups and self.axes:
            # A processor may hold several shards, so there may be more shards than processors.
            listed = sum(len(group) for group in self._groups)
            check_groups_cover(self._groups, max(self.axes.num_shards, listed))

    def stages(self, place: Place) -> list[Stage]:
        return [_ReduceOverShards(self, place)]

    def _check_variables(
        self, variables: Sequence[mtf.Variable], place: Place | None = None
    ) -> None:
        others = [w for w in self._wrappers()[1:] if isinstance(w, CrossShardOptimizer)]
        for variable in variables if self._groups or others else ():
            if self._groups and not self._has_own_copy(variable, place):
                raise ValueError(
                    f"group_assignment={self._groups!r} sums within groups of shards, but all "
                    f"shards share the variable {variable.name!r} of shape "
                    f"{variable.shape.to_string}, which would get another value in each group. "
                    "Give the variable the shard dims, or do not give group_assignment."
                )
            mine = self._describe_sums_of_copies(variable, place)
            for other in others if mine else ():
                its = other._describe_sums_of_copies(
                    variable, place and other._place(place.islands, (), place.program)
                )
                if its and (its != mine or other not in self._segment()[0]):
                    raise ValueError(
                        f"{self.name} and {other.name} inside it would both sum the gradients of "
                        f"the copies that shards have of {variable.name!r}, {mine} and {its}: use "
                        "one of them."
                    )

    def _describe_sums_of_copies(self, variable: mtf.Variable, place: Place | None) -> str:
        """Returns in words which shards add up the gradients of their own copies of a variable.

        The result is "" if the shards have no copies of their own. `place` is the wrapper's place
        in its stack; None if no wrapper is around this one. Raises ValueError if the groups of
        shards do not have every shard.
        """
        if not self._has_own_copy(variable, place):
            return ""
        dims = mtf.Shape(self._shard_dims(variable.shape, place))
        groups = self._groups or [list(range(dims.size))]
        check_groups_cover(groups, dims.size)
        return f"along {dims.dimension_names} in groups {sorted(map(sorted, groups))}"
