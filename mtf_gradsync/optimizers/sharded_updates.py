"""ShardedUpdateOptimizer: each replica updates its part of every variable (ZeRO-1)."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from types import MappingProxyType
from typing import Any, Callable, FrozenSet, Mapping, Optional, Sequence

import gin

from mtf_gradsync._common import check_whole_number, counted
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync._private.mesh_tensorflow import stacked_dim_names
from mtf_gradsync.compat_v1 import NOT_GIVEN, MeshOptimizerLike
from mtf_gradsync.gradients.arguments import PassedOnArguments
from mtf_gradsync.mesh.axes import LayoutLike, MeshShapeLike, ReplicaAxes
from mtf_gradsync.optimizers import sharded_variables
from mtf_gradsync.optimizers.pipeline.builder import StepBuilder
from mtf_gradsync.optimizers.pipeline.forms import Form, GradientSet, Partition
from mtf_gradsync.optimizers.pipeline.stack import ONE_FOR_EACH_MESH, Place, Stage
from mtf_gradsync.optimizers.pipeline.words import About, Line
from mtf_gradsync.optimizers.sharded_variables import PartOfVariable
from mtf_gradsync.optimizers.slots import optimizers_of, owner_of
from mtf_gradsync.optimizers.wrapper import CommonArguments, StepAttribute, Wrapper
from mtf_gradsync.reduce import Strategy

_logger = logging.getLogger("mtf_gradsync")


def log_savings(
    name: str,
    axes: ReplicaAxes,
    slots: Sequence[mtf.Variable],
    split: Sequence[mtf.Variable],
    variables: Sequence[mtf.Variable],
) -> None:
    """Logs how many bytes of slots a core holds, and whether sharded updates may not be worth it.

    Args:
      name: the wrapper's name.
      axes: the replica axes.
      slots: the slots of the inner optimizer.
      split: those variables of which each replica updates its part.
      variables: all variables that get gradients.
    """
    if not slots and not split:
        return
    held = sum(_core_bytes(axes, v) for v in slots)
    unsharded = sum(
        _core_bytes(axes, v)
        * math.prod(d.size for d in axes.shard_dims if d.name in v.shape.dimension_names)
        for v in slots
    )
    gathered = sum(_core_bytes(axes, v) for v in split)
    unsplit = [v.name for v in variables if v not in split]
    _logger.info(
        "%s splits the updates of %d of %d variables: a core holds %d bytes of slots, and %d "
        "without the wrapper%s.",
        name,
        len(split),
        len(variables),
        held,
        unsharded,
        f"; it does not split {counted(unsplit, 'variable')}" if unsplit else "",
    )
    # Gathered values take memory beside the slots. Adam's slots save more than that, Adafactor's
    # next to nothing. And half of an update saves less than it takes to gather new values.
    doubts = []
    if unsharded - held < gathered / 4:
        doubts.append(
            f"It saves {unsharded - held} bytes of slots a core, and gathers {gathered} bytes of "
            "new values: with this optimizer it can save time but hardly memory, and a program for "
            "a TPU can take more memory, and on some generations more time, than without it."
        )
    if split and axes.num_shards == 2:
        doubts.append(
            "It splits updates over two replicas: that saves memory, but a step on a TPU can take "
            "more time than without it."
        )
    if doubts:
        _logger.info(
            "%s may not pay. %s `mtf-gradsync compile --compare_with_bare` shows the time and the "
            "memory that the compiler for TPUs expects of both.",
            name,
            " ".join(doubts),
        )


def _core_bytes(axes: ReplicaAxes, variable: mtf.Variable) -> int:
    return math.prod(axes.slice_shape(variable.shape)) * variable.slice_dtype.size


@dataclasses.dataclass(frozen=True)
class _UpdateParts(Stage):
    """The stage that makes each replica update its part of variables, and gathers new values."""

    wrapper: ShardedUpdateOptimizer
    axes: ReplicaAxes
    _partition: Partition
    takes = Form.REDUCED
    _one_mesh = ONE_FOR_EACH_MESH

    def check(
        self,
        grads: Sequence[mtf.Tensor | None],
        variables: Sequence[mtf.Variable],
        arguments: PassedOnArguments,
    ) -> None:
        """Raises ValueError if the update cannot be split over the replicas.

        At least one of the variables must be one that can be split. A tensor among the arguments
        for the inner optimizer (`arguments`) must not have a dimension along which a variable is
        split, because it would have to be split, too. And no earlier update in this graph may have
        updated one of the variables and gathered its slots. `grads` has the gradient, or None, of
        each of `variables`.
        """
        wrapper, axes = self.wrapper, self.axes
        given = [v for g, v in zip(grads, variables) if g is not None]
        again = [v.name for v in given if v in wrapper._with_gathered_slots]
        if again:
            raise ValueError(
                "ShardedUpdateOptimizer can update variables with large factored statistics once "
                "in a graph, because it gathers the statistics for one update, but it got "
                f"gradients for {counted(again, 'variable')} again. Call apply_grads once, or "
                "build a new graph."
            )
        if given and not wrapper._shapes_of_parts(given, axes):
            why = sharded_variables.nothing_to_split(
                given, axes, wrapper._fixed_dims(), wrapper._least
            )
            raise ValueError(
                f"ShardedUpdateOptimizer {why}Use the inner optimizer without the wrapper (its "
                "checkpoints are the same), or a mesh whose sizes divide a dimension."
            )
        parts = self._partition.shapes_of(given)
        for name, tensor in arguments.named_tensors():
            for variable, part in parts.items():
                split = [d.name for d in variable.shape.dims if d not in part.dims]
                if set(split).intersection(d.name for d in tensor.shape.dims):
                    raise ValueError(
                        f"ShardedUpdateOptimizer splits {variable.name!r} along {split}, but not "
                        f"the optimizer's argument {name} of shape {tensor.shape.to_string}. Give "
                        "a scalar, or use the optimizer without ShardedUpdateOptimizer."
                    )

    def apply(self, gradients: GradientSet, step: StepBuilder) -> GradientSet:
        step.around_update(functools.partial(self._update, step))
        return gradients

    def describe(self, about: About) -> list[Line]:
        what = "update each replica's part of the variables, gather the new values"
        if about.variables:
            parts = self._partition.shapes_of(about.variables)
            what += f": {len(parts)} of {len(about.variables)} variables are split"
        return [Line(what)]

    def _update(
        self,
        step: StepBuilder,
        gradients: GradientSet,
        apply_inner: Callable[[GradientSet], list[mtf.Operation]],
    ) -> list[mtf.Operation]:
        wrapper, axes, owners = self.wrapper, self.axes, gradients.owners
        shapes = self._partition.shapes_of(owners)
        parts = {v: wrapper._make_part(v, shape) for v, shape in shapes.items()}
        inner = tuple(parts.get(v, v) for v in gradients.variables)
        graph = gradients.graph
        before = set(graph.operations)
        updates = apply_inner(dataclasses.replace(gradients, variables=inner))
        made = [op for op in graph.operations if op not in before and isinstance(op, mtf.Variable)]
        # The layout splits slots of a part's shape already.
        by_name = {v.name: v for v in parts}
        unsplit = {
            s: by_name[owner]
            for s in made
            if (owner := owner_of(s.name, by_name))
            and axes.free_shard_dims(s.shape) == axes.shard_dims
        }
        min_size = max(wrapper._least, sharded_variables.MIN_GATHERED_SIZE)
        gathers = sharded_variables.partition_slots(
            list(unsplit),
            updates,
            lambda shape: sharded_variables.shapes_of_split_slot(shape, axes, min_size),
        )
        gathered = list(unsplit.values()) if gathers else []

        def note() -> None:
            wrapper._parts = {**wrapper._parts, **{v: parts.get(v) for v in owners}}
            wrapper._with_gathered_slots = wrapper._with_gathered_slots.union(gathered)

        step.when_built(note)
        sharded_variables.assign_gathered(updates, parts)
        log_savings(wrapper.name, axes, made, list(parts), owners)
        first = [*made, *gathers]
        others = [op for op in graph.operations if op not in before and op not in first]
        sharded_variables.group_sums([*first, *others], axes, wrapper.reducer)
        return updates


@gin.configurable(module="mtf_gradsync")
class ShardedUpdateOptimizer(Wrapper):
    """A wrapper that splits each variable's update and slots over the replicas (ZeRO-1).

    Without this wrapper all replicas of a variable make the same update. With this wrapper each
    replica receives its part of the reduced gradient (a reduce-scatter), the inner optimizer
    updates that part of the variable, and the new values are gathered. Each core holds 1/num_shards
    of the slots.

    In place of each variable the inner optimizer receives a variable of the same name, with one
    dimension split over the replica axes: the dimension whose parts fit best into a TPU's tiles
    (the first, if several fit equally well). The inner optimizer may be any optimizer that updates
    each variable by itself. Variables that are small, or have no dimension that can be split, are
    not split.

    The wrapper adds no variables. Slots keep the inner optimizer's names and, in checkpoints, their
    full shapes. So a run with sharded updates can continue, on any mesh, from a checkpoint of a run
    without sharded updates, and the other way round.

    References:
      Xu et al., "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training",
      2020; Rajbhandari et al., "ZeRO", 2019 (stage 1).

    Examples:
      >>> mesh = {"mesh_shape": "all:4", "layout": "batch:all"}
      >>> adam = mtf.optimize.AdamWeightDecayOptimizer(0.001)
      >>> print(gs.describe(gs.ShardedUpdateOptimizer(adam, **mesh)))
      every step  reduce, each replica its part, over batch, 4 shards: fused         (ShardedUp...)
                  update each replica's part of the variables, gather the new values (ShardedUp...)
                  update by AdamWeightDecay
    """

    axes: ReplicaAxes
    # In the steps that were built: the parts of variables (None for a variable that is not split),
    # and the variables with partitioned slots, which are gathered for the update.
    _parts = StepAttribute[Mapping[mtf.Variable, Optional[PartOfVariable]]](MappingProxyType({}))
    _with_gathered_slots = StepAttribute[FrozenSet[mtf.Variable]](frozenset())

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
          min_size: variables of fewer elements are not split. With None these are variables of
            fewer than 128 elements, and also variables whose parts save few of a TPU's tiles.
          name: name of the wrapper.
          learning_rate: the learning rate for opt; only if opt is a class or factory.
          axes: the replica axes; or give mesh_shape and layout. Without either they are those of
            the mesh that the program has made for this graph.
          mesh_shape: Mesh-TF's mesh shape.
          layout: Mesh-TF's layout rules.
          batch_dims: names of the tensor dimensions that the batch is split along.
          reducer: the reduction strategy; None takes `FusedAllReduce()`.

        Raises:
          ValueError: the mesh has a single replica; an argument is out of range, or arguments
            contradict each other.
          TypeError: an argument has the wrong type.
        """
        if min_size is not None:
            min_size = check_whole_number("min_size", min_size, 0, most=None)
        common = CommonArguments(name, axes, mesh_shape, layout, batch_dims, reducer, learning_rate)
        self._wrap(opt, common, "the replicas")
        self._min_size = min_size
        self._least = sharded_variables.MIN_SIZE if min_size is None else min_size
        self._check_order()
        if self.axes.num_shards == 1:
            raise ValueError(
                "ShardedUpdateOptimizer splits updates over the replicas of a batch, but the mesh "
                f"{self.axes.mesh_shape.to_string} with {self.axes.layout} has one replica of the "
                f"batch dims {list(self.axes.batch_dims)}. Use the inner optimizer without the "
                "wrapper; its checkpoints are the same."
            )

    def get_slot(self, var: mtf.Variable, name: str) -> mtf.Variable | None:
        return super().get_slot(self._parts.get(var) or var, name)

    def part_of(self, var: mtf.Variable) -> mtf.Shape | None:
        """Returns the shape of a variable's parts.

        Args:
          var: a variable. If no step with its gradient was built yet, the answer is for a step with
            gradients of all trainable variables of the graph.

        Returns:
          The variable's shape, in which the dimensions that are split over the replicas have the
          names of batch dimensions. None for a variable that is not split.
        """
        together = dict.fromkeys([*var.graph.trainable_variables, var])
        return self._shapes_of_parts(list(together), self.axes).get(var)

    def _shapes_of_parts(
        self, variables: Sequence[mtf.Variable], axes: ReplicaAxes
    ) -> dict[mtf.Variable, mtf.Shape]:
        before = {v: (part or v).shape for v, part in self._parts.items()}
        return sharded_variables.shapes_of_parts(
            variables, axes, self._fixed_dims(), self._min_size, before
        )

    def stages(self, place: Place) -> list[Stage]:
        axes = place.axes
        assert axes is not None  # as the wrapper needs to know the mesh

        def shapes_of(variables: Sequence[mtf.Variable]) -> dict[mtf.Variable, mtf.Shape]:
            return (
                {}
                if sharded_variables.replicas_share_copies(axes)
                else self._shapes_of_parts(variables, axes)
            )

        return [_UpdateParts(self, axes, Partition(axes, self.reducer, shapes_of, self.name))]

    def _make_part(self, variable: mtf.Variable, shape: mtf.Shape) -> PartOfVariable:
        """Returns the variable that the inner optimizer is given in the place of `variable`.

        The returned variable stands for a replica's part of `variable`; the part has the shape
        `shape`. The inner optimizer finds its slots by the returned variable. So if an earlier step
        has made a variable for the part already, the same object is returned, with its attributes
        set anew for this step.
        """
        new = PartOfVariable(variable, shape)
        part = self._parts.get(variable) or new
        part.__dict__.update(vars(new))
        return part

    def _fixed_dims(self) -> set[str]:
        """Returns the names of dimensions that inner optimizers know by name.

        A dimension that the inner optimizer knows by name is not split, because splitting gives a
        dimension another name.
        """
        inner = (opt for one in self.inner_stack() for opt in optimizers_of(one))
        return {name for opt in inner for name in stacked_dim_names(opt)}
