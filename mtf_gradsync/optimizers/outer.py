"""OuterOptimizer: islands of a mesh train separately, and outer steps synchronize them.

Every island has its own values of variables and of the inner optimizer's slots: the slices that its
processors hold. So that checkpoints have these values, there is another variable for each of these
variables and slots, `<variable>/island`, with a dimension for the islands (`IslandVariables`). The
slices belong to this other variable. The model and the inner optimizer need no change. A variable's
own master (its value in checkpoints) has the outer values, which evaluation and export read.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Sequence

import gin

from mtf_gradsync._common import check_flag, check_number, check_whole_number
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.compat_v1 import NOT_GIVEN, MeshOptimizerLike
from mtf_gradsync.gradients.arguments import PassedOnArguments
from mtf_gradsync.gradients.shards import Recoverability, check_addable
from mtf_gradsync.mesh.axes import LayoutLike, MeshShapeLike, ReplicaAxes, as_dim_names
from mtf_gradsync.optimizers.outer_steps import StepsOfIslands, TrainsIslands
from mtf_gradsync.optimizers.outer_values import Agreed, IslandVariables
from mtf_gradsync.optimizers.pipeline.builder import StepBuilder
from mtf_gradsync.optimizers.pipeline.forms import (
    Form,
    GradientSet,
    IslandAxes,
    PerShard,
    ReductionSettings,
)
from mtf_gradsync.optimizers.pipeline.order import averages, shards_updates
from mtf_gradsync.optimizers.pipeline.stack import ONE_FOR_EACH_MESH, Place, Stage, stages_of
from mtf_gradsync.optimizers.pipeline.words import About, Line, frequency_text, setting_text
from mtf_gradsync.optimizers.skips import check_limit
from mtf_gradsync.optimizers.wrapper import CommonArguments
from mtf_gradsync.reduce import FusedAllReduce, Strategy
from mtf_gradsync.step.plan import StepPlan


@dataclasses.dataclass(frozen=True)
class OuterSteps(Stage):
    """The stage that gives each island its own gradients, and makes the outer steps."""

    wrapper: TrainsIslands
    _keeps_outer_values = True
    _one_mesh = ONE_FOR_EACH_MESH

    @property
    def takes(self) -> PerShard | None:  # type: ignore[override]
        # One island takes gradients as they are, and sends nothing.
        return PerShard("refuse", "", adds_up=True) if self.wrapper.islands.shard_dims else None

    @property
    def _leaves(self) -> Form | None:  # type: ignore[override]
        return self.wrapper._form_inside if self.wrapper.islands.shard_dims else None

    @property
    def _islands(self) -> IslandAxes | None:  # type: ignore[override]
        wrapper, islands = self.wrapper, self.wrapper.islands
        if not islands.shard_dims:
            return None

        def agree(holds: mtf.Tensor, by_any: bool) -> mtf.Tensor:
            return Agreed(holds, by_any, islands, wrapper._plain_reducer).outputs[0]

        return IslandAxes(islands, wrapper.inside, wrapper.axes, agree)

    def check(
        self,
        grads: Sequence[mtf.Tensor | None],
        variables: Sequence[mtf.Variable],
        arguments: PassedOnArguments,
    ) -> None:
        """Raises ValueError for gradients or variables that cannot differ between islands.

        Raises ValueError, too, if there are fewer variables with gradients than fragments. `grads`
        has the gradient, or None, of each of `variables`. `arguments` is not used.
        """
        del arguments
        given = [v for g, v in zip(grads, variables) if g is not None]
        if not given:
            return
        wrapper, name = self.wrapper, self.wrapper.name
        islands, all_axes = wrapper.islands, wrapper.axes
        held = StepPlan.of(given[0].graph).extension(IslandVariables)
        for variable in given:
            if islands.free_shard_dims(variable.shape) != islands.shard_dims:
                raise ValueError(
                    f"The layout splits variable {variable.name!r} of shape "
                    f"{variable.shape.to_string} over an axis of the islands, so that no island "
                    "has all of it: split it over another mesh axis, or choose other axes for "
                    "islands by outer_dims."
                )
            if isinstance(variable, mtf.StackedVariable):
                raise ValueError(
                    f"{name}: {variable.name!r} is a stack of variables: apply gradients "
                    "before graph.rewrite_stack_variables is called."
                )
            if held.holder(variable) is not None:
                raise ValueError(
                    f"{name} has applied a gradient of {variable.name!r} in this graph "
                    "already; give apply_grads all variables at once."
                )
        if len(given) < wrapper.fragments:
            raise ValueError(
                f"{name} needs at least fragments={wrapper.fragments} variables with gradients, "
                f"but got {len(given)}: {[v.name for v in given]}. Give fewer fragments."
            )
        if all_axes is None or not islands.shard_dims:
            return
        own = [
            None if g is None or any(d.name in all_axes.batch_dims for d in g.shape.dims) else g
            for g in grads
        ]
        names = [f"variable {v.name!r}" for v in variables]
        check_addable(own, all_axes, names)
        Recoverability(own, islands, within=all_axes).check(names)

    def describe(self, about: About) -> list[Line]:
        wrapper, islands = self.wrapper, self.wrapper.islands
        count = islands.num_shards
        lines = []
        if islands.shard_dims:
            lines = [Line(f"split gradients by island, {count} islands")]
        share = f"1/{wrapper.fragments} of " * (wrapper.fragments > 1)
        what = f"outer step of {share}the values: "
        what += f"mean of {count} islands, " if count > 1 else ""
        what += f"learning rate {setting_text(wrapper.outer_learning_rate)}"
        what += f", momentum {setting_text(wrapper.outer_momentum)}" * bool(wrapper.outer_momentum)
        what += ", without islands that are not finite" * wrapper.leave_out_not_finite
        updates = wrapper.inner_steps // wrapper.fragments
        when = "every update" if updates == 1 else f"{frequency_text(updates)} update"
        return [*lines, Line(what, when, after=True)]

    def apply(self, gradients: GradientSet, step: StepBuilder) -> GradientSet:
        made = StepsOfIslands(self.wrapper, gradients, step)
        step.after_update(made.after_update)
        step.at_end(made.end_of_step)
        return made.gradients


@gin.configurable(module="mtf_gradsync")
class OuterOptimizer(TrainsIslands):
    """A wrapper that trains islands separately, and synchronizes them every `inner_steps` updates.

    Each island, a coordinate along the axes of `outer_dims`, updates its own values of variables
    with gradients of its part of the batch. After `inner_steps` updates there is an outer step: the
    outer values minus the islands' values, averaged over the islands, are the gradient in an SGD
    step with momentum on the outer values. All islands continue from the new outer values. On other
    steps islands send each other no gradients.

    The gradient of the mean over the whole batch has a term for each island. An island multiplies
    its term by the number of islands, and so gets the gradient of the mean over its own part of the
    batch. Thus learning rates need no change. A program that fetches a value (a loss, a norm) gets
    the value of all islands if Mesh-TF sums this value over the batch. Otherwise the program gets
    the value of the first island.

    The state is in variables. `<variable>/island` and `<slot>/island` have a value for each island,
    and the variable itself holds the outer values. Other variables are `<variable>/outer_momentum`,
    `<name>/inner_step` (updates of each island) and `<name>/skipped` (outer steps that skipped each
    island). With leave_out_not_finite there is `<name>/bad_loss` (which islands had a loss that is
    not finite). With max_steps_without_update there is `<name>/updated_at` (the last outer step
    that did not skip all islands). If gradients have weights, there is `<name>/weight` (the sum of
    the weights since the last outer step, for each island and fragment).

    If there is a single island, the inner optimizer makes its usual updates, and after every
    `inner_steps` updates an outer step sets the variables; nothing is sent between islands.

    Attributes:
      islands: the axes between islands, `ReplicaAxes`; without any axis for a single island.
      inside: the replica axes inside an island; None for a single island if no mesh is known.

    References:
      Douillard et al., DiLoCo, https://arxiv.org/abs/2311.08105; and with fragments,
      https://arxiv.org/abs/2501.18512

    Examples:
      >>> mesh = {"mesh_shape": "all:4", "layout": "batch:all"}
      >>> opt = gs.OuterOptimizer(mtf.optimize.SgdOptimizer(0.1), inner_steps=16, **mesh)
      >>> print(gs.describe(opt))
      every step         split gradients by island, 4 islands                  (OuterOptimizer)
                         update by Sgd
      every 16th update  outer step of the values: mean of 4 islands, ...  (OuterOptimizer)
    """

    shown = (("outer step", "outer/step"),)

    def __init__(
        self,
        opt: MeshOptimizerLike,
        inner_steps: int = gin.REQUIRED,
        outer_learning_rate: float = 0.7,
        outer_momentum: float = 0.5,
        nesterov: bool = True,
        fragments: int = 1,
        outer_dims: str | Sequence[str] | None = None,
        leave_out_not_finite: bool = False,
        name: str = "OuterOptimizer",
        learning_rate: Any = NOT_GIVEN,
        axes: ReplicaAxes | None = None,
        mesh_shape: MeshShapeLike | None = None,
        layout: LayoutLike | None = None,
        batch_dims: str | Sequence[str] = ("batch",),
        reducer: Strategy | None = None,
        max_steps_without_update: int | None = None,
    ):
        """Wraps an optimizer.

        Args:
          opt: a Mesh-TF optimizer or a wrapper, or a class or factory of one.
          inner_steps: updates of each island between two outer steps of a variable, 1 or more.
          outer_learning_rate: learning rate of the outer step, greater than 0.
          outer_momentum: momentum of the outer step, from 0 up to 1 (not included).
          nesterov: whether the momentum is Nesterov's. It has no effect with a momentum of 0.
          fragments: the number F of equal parts into which all values are divided. Every
            inner_steps / F updates one of them takes its outer step, so that no step sends more
            than 1/F of all values (with a reducer that keeps state, up to a row of a variable
            more).
          outer_dims: the names in batch_dims whose dimensions are split over islands; None for all
            of them. Other dimensions in batch_dims are split over the replicas inside an island.
            () makes one island, which needs no mesh.
          leave_out_not_finite: whether an outer step skips islands with a loss, values or slots
            that are not finite. A skipped island restarts with the outer values and with zeros in
            its slots. The losses of all microbatch steps since the last outer step are checked,
            except losses inside loops.
          name: name of the wrapper, prefix of its state.
          learning_rate: the learning rate for opt; only if opt is a class or factory.
          axes: the replica axes (`ReplicaAxes`); or give mesh_shape and layout. Without either they
            are those of the mesh that the program has made for this graph.
          mesh_shape: Mesh-TF's mesh shape.
          layout: Mesh-TF's layout rules.
          batch_dims: names of the tensor dimensions that the batch is split along.
          reducer: the reduction strategy between islands; None takes `FusedAllReduce()`. Inside an
            island, sums use the reducers of the wrappers inside.
          max_steps_without_update: the largest number of updates in a row during which every outer
            step skipped all islands. One more raises an error that names variables and islands (see
            `NoUpdateError`). It has an effect only with leave_out_not_finite. None for no limit.

        Raises:
          ValueError: an argument is out of range, arguments contradict each other, or there is no
            mesh.
          TypeError: an argument has the wrong type.
        """
        inner_steps = self.inner_steps = check_whole_number("inner_steps", inner_steps)
        fragments = self.fragments = check_whole_number("fragments", fragments)
        if inner_steps % fragments:
            raise ValueError(
                "inner_steps must be a multiple of fragments, as a fragment is synchronized every "
                f"inner_steps / fragments updates, got inner_steps={inner_steps!r} and "
                f"fragments={fragments!r}."
            )
        between = inner_steps // fragments
        why = f"there is an outer step every inner_steps / fragments = {between} updates"
        limit = check_limit(max_steps_without_update, between, why)
        self.outer_learning_rate = check_number(
            "outer_learning_rate", outer_learning_rate, "greater than 0", above=True
        )
        what, below = "from 0 up to 1 (not included)", 1 - 2.0**-25  # float32 rounds that to 1
        self.outer_momentum = check_number("outer_momentum", outer_momentum, what, below=below)
        self.nesterov = check_flag("nesterov", nesterov)
        self.leave_out_not_finite = check_flag("leave_out_not_finite", leave_out_not_finite)
        names = None if outer_dims is None else as_dim_names(outer_dims, "outer_dims")
        needs_mesh_for = "" if names == () and fragments == 1 else "the islands"
        common = CommonArguments(name, axes, mesh_shape, layout, batch_dims, reducer, learning_rate)
        self._wrap(opt, common, needs_mesh_for)
        self.islands, self.inside = _islands(self.axes, names)
        self._limit = limit if leave_out_not_finite else None
        self._check_order()
        for inner in self._wrappers()[1:]:
            if averages(stages_of(inner)) and inner not in self._segment()[0]:
                raise ValueError(
                    f"{inner.name} inside an optimizer of another library would average the values "
                    f"of each island: put {type(inner).__name__} directly inside {self.name}, or "
                    "around it."
                )
            has_one_replica = self.inside is not None and self.inside.num_shards == 1
            if self.islands.shard_dims and has_one_replica and shards_updates(stages_of(inner)):
                raise ValueError(
                    f"{inner.name} splits updates over replicas, but each of the islands along "
                    f"{list(self.islands.batch_dims)} has one replica. Remove "
                    f"{type(inner).__name__}, or give outer_dims that make islands of several "
                    "replicas."
                )

    def _gradient_reduction(
        self, place: Place | None = None, found_axes: ReplicaAxes | None = None
    ) -> ReductionSettings:
        # Gradients are reduced inside an island; the wrapper's reducer is for outer steps.
        reduction = super()._gradient_reduction(place, found_axes)
        return reduction._replace(strategy=FusedAllReduce(), other_axes=None)

    def stages(self, place: Place) -> list[Stage]:
        del place
        return [OuterSteps(self)]

    def outer_value(self, var: mtf.Variable) -> mtf.Variable | None:
        """Returns the mtf variable with the outer values of `var`; None before an update."""
        return self._outer.get(var)

    def reported(self) -> dict[str, mtf.Tensor]:
        """Returns this wrapper's values for `mtf_gradsync.reported`; {} before there is a step.

        `outer/step`, an int32 scalar, is the number of updates divided by inner_steps, rounded
        down. With leave_out_not_finite there is `outer/skipped`, int32 `[islands...]`: the number
        of outer steps that have skipped each island.
        """
        if self._now is None:
            return {}
        made = mtf.cwise(lambda x: x // self.inner_steps, [self._now.inner_step], tf.int32)
        values = {"outer/step": made}
        if self.leave_out_not_finite:
            values["outer/skipped"] = self._now.skipped
        return values


def _islands(
    axes: ReplicaAxes | None, names: tuple[str, ...] | None
) -> tuple[ReplicaAxes, ReplicaAxes | None]:
    """Returns the replica axes between islands, and the replica axes inside an island.

    `axes` are all replica axes, and `names` are outer_dims (None for all batch dims). If there is
    only one island, the first result has no axes. If `axes` is None because no mesh is known, the
    second result is None. Raises ValueError if `names` are not batch dims, or if the mesh splits
    none of them.
    """
    if axes is None:
        return ReplicaAxes(mtf.Shape([]), mtf.LayoutRules([]), ()), None
    names = axes.batch_dims if names is None else names
    unknown = [name for name in names if name not in axes.batch_dims]
    if unknown:
        raise ValueError(
            f"outer_dims must be names in batch_dims {list(axes.batch_dims)}, got {list(names)}: "
            f"give batch_dims={(*unknown, *axes.batch_dims)} if the batch is split along them."
        )
    split = [d.name for d in axes.shard_dims]
    if names and axes.mesh_shape.size > 1 and not set(names).intersection(split):
        raise ValueError(
            f"The mesh {axes.mesh_shape.to_string} with {axes.layout} splits none of the "
            f"outer_dims {list(names)}. Add a layout rule for one of them, or give outer_dims=() "
            "for one island."
        )
    large = [d.name for d in axes.shard_dims if d.name in names and d.size > 1]
    between = [name for name in axes.batch_dims if large and name in names]
    inside = [name for name in axes.batch_dims if name not in between]
    shape, layout = axes.mesh_shape, axes.layout
    return ReplicaAxes(shape, layout, between), ReplicaAxes(shape, layout, inside)
