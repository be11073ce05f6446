"""ShardedUpdateOptimizer: each replica updates its part of every variable."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Sequence

import gin

from mtf_gradsync._names import counted, some_lines
from mtf_gradsync._numbers import check_whole_number
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync._private.mesh_tensorflow import (
    dims_known_by_name,
    keeps_no_slot_of_shape,
    mesh_impls_made,
    mesh_key,
)
from mtf_gradsync.compat_v1 import NOT_GIVEN, MeshOptimizerLike
from mtf_gradsync.mesh.axes import LayoutLike, MeshShapeLike, ReplicaAxes
from mtf_gradsync.mesh.shared_copies import shares_all
from mtf_gradsync.optimizers.own_arguments import OwnArguments
from mtf_gradsync.optimizers.pipeline import (
    Form,
    GradientSet,
    Partition,
    Stage,
    StepBuilder,
    Traits,
)
from mtf_gradsync.optimizers.sharded_updates import slots
from mtf_gradsync.optimizers.sharded_updates.cutting import (
    fills_tiles,
    shape_of_part,
    split_twice,
    why_whole,
)
from mtf_gradsync.optimizers.sharded_updates.savings import log_savings
from mtf_gradsync.optimizers.sharded_updates.stand_ins import PartOfVariable, assign_whole
from mtf_gradsync.optimizers.sharded_updates.waves import sum_together
from mtf_gradsync.optimizers.state.slots import owner_of
from mtf_gradsync.optimizers.wrapper import Wrapper
from mtf_gradsync.reduce import Strategy

_MIN_SIZE = 128


class _UpdateParts(Stage):
    """Gives the inner optimizer parts of variables, and gathers the new values."""

    takes = Form.REDUCED

    def __init__(self, wrapper: ShardedUpdateOptimizer):
        self._wrapper = wrapper

    def update(
        self,
        gradients: GradientSet,
        step: StepBuilder,
        apply_inner: Callable[[GradientSet], list[mtf.Operation]],
    ) -> list[mtf.Operation]:
        return self._wrapper._update_parts(gradients, apply_inner)


@gin.configurable(module="mtf_gradsync")
class ShardedUpdateOptimizer(Wrapper):
    """Splits the update of each variable over its replicas, and with it the slots.

    Processors that hold the same values otherwise all make the same update. Here each gets its
    part of the summed gradient (a reduce-scatter), the inner optimizer updates that part, and the
    parts are gathered. Each core holds 1/num_shards of the slots.

    The inner optimizer is given stand-ins: variables of the same names whose first dimension that
    can be split is laid out over the replica axes. It may be any that acts on one variable at a
    time. A variable stays whole where no dimension can be split, and where it is too small.

    It adds no variables. Slots keep the inner optimizer's names and, in checkpoints, their whole
    shapes: sharded and unsharded runs, on any mesh, continue each other.

    References:
      Xu et al., "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training",
      2020; Rajbhandari et al., "ZeRO", 2019 (stage 1).
    """

    traits = Traits(shards_updates=True)
    axes: ReplicaAxes

    def __init__(
        self,
        opt: MeshOptimizerLike,
        min_size: int | None = None,
        name: str = "ShardedUpdateOptimizer",
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
          min_size: variables of fewer elements stay whole. None for 128; then a matrix of which the
            optimizer keeps factored statistics alone (Adafactor) also stays whole if its parts
            would fill few of a TPU's tiles, where they cost more than they save.
          name: name of the wrapper.
          learning_rate: only with a class or factory as opt: passed on untouched.
          axes: the replica axes (`ReplicaAxes`); or give mesh_shape and layout. Without either,
            those of the mesh that the program has made for this graph.
          mesh_shape: Mesh-TF's mesh shape.
          layout: Mesh-TF's layout rules.
          batch_dims: names of the tensor dimensions that the batch is split along.
          reducer: how sums cross the mesh; None takes `FusedAllReduce()`.

        Raises:
          ValueError: the mesh has a single shard, so that there is nothing to split; an argument
            is out of range, or arguments contradict each other.
          TypeError: an argument has the wrong type.
        """
        if min_size is not None:
            check_whole_number("min_size", min_size, 0)
        self._wrap(
            opt, learning_rate, name, axes, mesh_shape, layout, batch_dims, reducer, "the replicas"
        )
        self._check_order()
        if self.axes.num_shards == 1:
            raise ValueError(
                "ShardedUpdateOptimizer splits updates over the replicas of a batch, but the mesh "
                f"{self.axes.mesh_shape.to_string} with {self.axes.layout} splits none of the "
                f"batch dims {list(self.axes.batch_dims)}: there is one replica. Leave the "
                "wrapper out, checkpoints stay the same."
            )
        self._min_size = _MIN_SIZE if min_size is None else min_size
        self._weighs_tiles = min_size is None
        self._parts: dict[mtf.Variable, PartOfVariable] = {}
        # Variables with slots that are gathered for the update.
        self._gathered: set[mtf.Variable] = set()

    def get_slot(self, var: mtf.Variable, name: str) -> mtf.Variable | None:
        """See `Wrapper.get_slot`."""
        return super().get_slot(self._parts.get(var, var), name)

    def _stand_inside(self, islands: ReplicaAxes, inside: ReplicaAxes) -> None:
        if inside.num_shards == 1:
            raise ValueError(
                f"{self.name} splits updates over replicas, but each of the islands along "
                f"{list(islands.batch_dims)} has one: leave it out, or make islands of several "
                "replicas by outer_dims."
            )
        super()._stand_inside(islands, inside)

    def part_of(self, var: mtf.Variable) -> mtf.Shape | None:
        """The shape of a variable's part: dimensions that are named after the batch are split.

        Args:
          var: a variable.

        Returns:
          The shape; None for a variable that stays whole.
        """
        shape = shape_of_part(var.shape, self.axes, self._kept(), self._min_size)
        return None if shape == var.shape or self._costs_more(var.shape, shape) else shape

    def _costs_more(self, whole: mtf.Shape, part: mtf.Shape) -> bool:
        """Whether parts would cost more on a TPU than they save."""
        if not self._weighs_tiles:
            return False
        sizes = self.axes.slice_shape(whole), self.axes.slice_shape(part)
        factored = any(keeps_no_slot_of_shape(opt, whole) for opt in self.inner_stack())
        return factored and not fills_tiles(*sizes)

    def _is_made_once(self) -> bool:
        """Whether the program's mesh makes the update of what replicas share once for all.

        So does `placement_mesh_impl` on the devices of one memory, and keeps slots once: parts
        would only be more operations.
        """
        key = mesh_key(self.axes.mesh_shape, self.axes.layout)
        impls = [x for x in mesh_impls_made() if mesh_key(x.shape, x.layout_rules) == key]
        return bool(impls) and all(map(shares_all, impls))

    def stages(self) -> list[Stage]:
        """See `Wrapper.stages`."""
        return [_UpdateParts(self)]

    def partition(self) -> Partition:
        """See `Wrapper.partition`."""
        splits = not self._is_made_once()
        return Partition(
            self.axes, self.reducer, lambda v: self.part_of(v) if splits else None, self.name
        )

    def _update_parts(
        self,
        gradients: GradientSet,
        apply_inner: Callable[[GradientSet], list[mtf.Operation]],
    ) -> list[mtf.Operation]:
        shape_of = self.partition().shape_of
        parts: dict[mtf.Variable, PartOfVariable] = {}
        inner = list(gradients.variables)
        for index, (grad, variable) in enumerate(zip(gradients.grads, gradients.variables)):
            shape = shape_of(variable) if grad is not None else None
            if shape is not None:
                inner[index] = parts[variable] = self._part(variable, shape)
        graph = gradients.graph
        before = set(graph.operations)
        updates = apply_inner(dataclasses.replace(gradients, variables=tuple(inner)))
        made = [op for op in graph.operations if op not in before and isinstance(op, mtf.Variable)]
        # A slot of its variable's shape lies in parts already, if the variable is cut.
        names = [v.name for v in parts]
        is_whole = {s for s in made if self.axes.free_shard_dims(s.shape) == self.axes.shard_dims}
        factored = [s for s in made if owner_of(s.name, names) and s in is_whole]
        first = slots.keep_in_parts(
            factored,
            updates,
            lambda shape: split_twice(shape, self.axes, max(self._min_size, slots.WORTH_A_GATHER)),
        )
        owners = {owner_of(s.name, names) for s in factored} if first else set()
        self._gathered.update(v for v in parts if v.name in owners)
        assign_whole(updates, parts)
        log_savings(self.name, self.axes, made, list(parts), gradients.owners)
        early = [*made, *first]
        late = [op for op in graph.operations if op not in before and op not in early]
        sum_together([*early, *late], self.axes, self.reducer)
        return updates

    def _part(self, variable: mtf.Variable, shape: mtf.Shape) -> PartOfVariable:
        """The stand-in, the same one for each update, so that optimizers find their slots."""
        made = PartOfVariable(variable, shape)
        known = self._parts.setdefault(variable, made)
        known.__dict__.update(vars(made))
        return known

    def _kept(self) -> set[str]:
        return {name for opt in self.inner_stack() for name in dims_known_by_name(opt)}

    def check_arguments(self, own: OwnArguments, variables: Sequence[mtf.Variable]) -> None:
        """Raises ValueError for a tensor with a dimension that variables are split along."""
        shape_of = self.partition().shape_of
        for name, tensor in own.tensors():
            for variable in variables:
                part = shape_of(variable)
                split = [d.name for d in variable.shape.dims if part and d not in part.dims]
                if set(split).intersection(d.name for d in tensor.shape.dims):
                    raise ValueError(
                        f"ShardedUpdateOptimizer gives the optimizer parts of {variable.name!r}, "
                        f"split along {split}, but its argument {name} of shape "
                        f"{tensor.shape.to_string} would be whole: give scalars, or leave the "
                        "wrapper out."
                    )

    def _why_whole(self, shape: mtf.Shape, kept: set[str]) -> str:
        part = shape_of_part(shape, self.axes, kept, self._min_size)
        if part != shape:
            return "would have parts that fill few tiles of a TPU; min_size=1 splits it"
        return why_whole(shape, self.axes, kept, self._min_size)

    def check(self, grads: Sequence[mtf.Tensor | None], variables: Sequence[mtf.Variable]) -> None:
        """Raises ValueError where no variable has a part, or one has its part already."""
        given = [v for g, v in zip(grads, variables) if g is not None]
        again = [v.name for v in given if v in self._gathered]
        if again:
            raise ValueError(
                f"ShardedUpdateOptimizer has applied gradients to {counted(again, 'variable')}, "
                "in this graph already, and keeps factored statistics of theirs in parts, which "
                "one update can use: apply gradients once, or take another graph."
            )
        if not given or any(self.part_of(v) is not None for v in given):
            return
        kept = self._kept()
        lines = [
            f"\n  {v.name!r} of shape {v.shape.to_string} {self._why_whole(v.shape, kept)}"
            for v in given
        ]
        raise ValueError(
            "ShardedUpdateOptimizer has nothing to split over the replica axes "
            f"{[d.name for d in self.axes.shard_dims]} of the mesh "
            f"{self.axes.mesh_shape.to_string}:{some_lines(lines)}\nLeave the "
            "wrapper out, checkpoints stay the same, or use a mesh whose sizes divide a dimension."
        )
