"""OuterOptimizer: islands of a mesh train separately, and outer steps synchronize them.

Every island has its own values of variables and of the inner optimizer's slots, in the variables'
slices. Variables `<variable>/island`, with a dimension for the islands, hold these slices and have
masters for checkpoints (`mtf_gradsync.step.Islands`). The model and the inner optimizer need no
change. The variable's own master has the outer values, which evaluation and export read.
"""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import gin

from mtf_gradsync._common import check_flag, check_number, check_whole_number
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.compat_v1 import NOT_GIVEN, MeshOptimizerLike
from mtf_gradsync.gradients.losses import losses_behind
from mtf_gradsync.gradients.measures import NotFinite
from mtf_gradsync.gradients.recoverable import check_addable, check_recoverable
from mtf_gradsync.mesh.axes import LayoutLike, MeshShapeLike, ReplicaAxes, as_dim_names
from mtf_gradsync.optimizers.outer_values import (
    Agreed,
    OuterVariable,
    SameSlices,
    differing_variables,
    fragments_of,
    hold_by_islands,
    hold_slots_by_islands,
)
from mtf_gradsync.optimizers.pipeline.accumulators import ZerosWhere, times
from mtf_gradsync.optimizers.pipeline.builder import StepBuilder
from mtf_gradsync.optimizers.pipeline.forms import Form, GradientSet, PerShard
from mtf_gradsync.optimizers.pipeline.passes import ONE_FOR_EACH_MESH
from mtf_gradsync.optimizers.pipeline.stack import (
    About,
    IslandAxes,
    Line,
    OwnArguments,
    Place,
    Reduction,
    Stage,
    nth,
    told,
)
from mtf_gradsync.optimizers.pipeline.strategy_state import (
    CutOut,
    Owner,
    PutBack,
    VariablePiece,
    variable_of,
)
from mtf_gradsync.optimizers.pipeline.weights import Weights, divided, nonzero
from mtf_gradsync.optimizers.skips import ReportsSkips, Skips, Words, check_limit
from mtf_gradsync.optimizers.state.slots import owner_of
from mtf_gradsync.optimizers.state.variables import named_state, scalar_state
from mtf_gradsync.optimizers.wrapper import CommonArguments, OfStep
from mtf_gradsync.reduce import FusedAllReduce, Strategy
from mtf_gradsync.reduce.strategy import has_gradient_reduction
from mtf_gradsync.step import Gate, Islands, StepPlan, values_after


class OuterState(NamedTuple):
    """Counters: mesh variables, or their values after a step.

    Attributes:
      inner_step: int32 scalar, updates that each island has made.
      skipped: int32 `[islands...]`, outer steps that have skipped each island.
      updated_at: int32 scalar, `inner_step` at the last outer step that did not skip all islands;
        None without a limit.
      weight: float32 `[islands..., fragments]`, weights of the gradients of each island since the
        last outer step of a fragment; None without weights.
    """

    inner_step: mtf.Variable
    skipped: mtf.Variable
    updated_at: mtf.Variable | None
    weight: mtf.Variable | None = None


@dataclasses.dataclass(frozen=True)
class OuterSteps(Stage):
    """Gives the inner optimizer each island's own gradients, and makes the outer steps."""

    wrapper: OuterOptimizer
    islands: ReplicaAxes
    _keeps_outer_values = True
    _one_mesh = ONE_FOR_EACH_MESH

    @property
    def takes(self) -> PerShard | None:  # type: ignore[override]
        """See `Stage.takes`."""
        # One island takes gradients as they are, and sends nothing.
        return PerShard("refuse", "", adds_up=True) if self.islands.shard_dims else None

    @property
    def _leaves(self) -> Form | None:  # type: ignore[override]
        return self.wrapper._form_inside if self.islands.shard_dims else None

    @property
    def _islands(self) -> IslandAxes | None:  # type: ignore[override]
        wrapper, islands = self.wrapper, self.islands
        return IslandAxes(islands, wrapper.inside, wrapper.axes) if islands.shard_dims else None

    def check(
        self,
        grads: Sequence[mtf.Tensor | None],
        variables: Sequence[mtf.Variable],
        arguments: OwnArguments,
    ) -> None:
        """See `Stage.check`."""
        self.wrapper._check_gradients(grads, variables)

    def describe(self, about: About) -> list[Line]:
        """See `Stage.describe`."""
        wrapper, count = self.wrapper, self.islands.num_shards
        lines = []
        if self.islands.shard_dims:
            lines = [Line(f"split gradients into those of {count} islands")]
        share = f"1/{wrapper.fragments} of " * (wrapper.fragments > 1)
        what = f"outer step of {share}the values: "
        what += f"mean of {count} islands, " if count > 1 else ""
        what += f"learning rate {told(wrapper.outer_learning_rate)}"
        what += f", momentum {told(wrapper.outer_momentum)}" * bool(wrapper.outer_momentum)
        what += ", without islands that are not finite" * wrapper.leave_out_not_finite
        when = nth(wrapper.inner_steps // wrapper.fragments)
        return [*lines, Line(what, f"{when} update", after=True)]

    def apply(self, gradients: GradientSet, step: StepBuilder) -> GradientSet:
        """See `Stage.apply`."""
        made = _OuterStepsOf(self.wrapper)
        step.after_update(lambda updates: made.after_update(updates, step))
        step.at_end(lambda operations: made.end_of_step(operations, step))
        return made.apply(gradients, step)


class _OuterStepsOf:
    """The outer steps of one step that is being built."""

    def __init__(self, wrapper: OuterOptimizer):
        self._wrapper, self._islands = wrapper, wrapper.islands
        # `apply` sets these.
        self._variables: list[mtf.Variable] = []
        self._outer: dict[mtf.Variable, OuterVariable] = {}
        self._momenta: dict[mtf.Variable, mtf.Variable] = {}
        self._gradients: Sequence[mtf.Tensor] = ()
        self._slots: list[mtf.Variable] = []
        self._made_before: set[mtf.Variable] = set()
        self._skips: Skips | None = None

    def apply(self, gradients: GradientSet, step: StepBuilder) -> GradientSet:
        """Returns the gradients of the islands; makes their values and what holds them."""
        wrapper, islands, mesh = self._wrapper, self._islands, gradients.mesh
        self._variables = gradients.owners
        self._state: OuterState = step.plan.state(wrapper, wrapper.name, lambda: self._make(mesh))
        self._weights: Sequence[mtf.Tensor] = ()
        self._has_data: mtf.Tensor | None = None
        if gradients.weights is not None and islands.shard_dims:
            self._state = self._state._replace(weight=self._make_weight(mesh))
        elif gradients.weights is not None:
            self._has_data = mtf.greater(gradients.weights.total, 0.0)
        dims, weight = islands.shard_dims, f"{wrapper.name}/weight"
        held = [hold_by_islands(v, dims, mean_weight=weight) for v in self._variables]
        self._outer = {v: OuterVariable(v) for v in self._variables}
        if wrapper.outer_momentum:
            self._momenta = {
                v: named_state(mesh, f"{v.name}/outer_momentum", v.shape, tf.float32)
                for v in self._variables
            }
        wrapper._slots.record([*held, *self._momenta.values()], self._variables)

        if islands.shard_dims:
            gradients = self._of_islands(gradients, step)
        self._gradients = gradients.present
        self._made_before = set(gradients.graph.all_variables)
        if wrapper.leave_out_not_finite:
            period = self._state.inner_step.value // (wrapper.inner_steps // wrapper.fragments) + 1
            given = [g for g in step.received[0].grads if g is not None]
            self._losses = LossesOfPeriod(
                given, period, islands, wrapper.plain_reducer, wrapper.name, self._has_data
            )
            wrapper._slots.record([self._losses.variable], self._variables)
            now = self._losses.last
            step.write([mtf.assign(self._losses.variable, now)], step.gate([now]))
        return gradients

    def _of_islands(self, gradients: GradientSet, step: StepBuilder) -> GradientSet:
        """Returns each island's own gradients, and has decisions taken by all islands alike."""
        wrapper, islands = self._wrapper, self._islands

        def agree(holds: mtf.Tensor, by_any: bool) -> mtf.Tensor:
            return Agreed(holds, by_any, islands, wrapper.plain_reducer).outputs[0]

        step.agree = agree
        # An island's term of the mean over the batch becomes the mean over its part of the batch.
        weights, scaled = gradients.weights, gradients.present
        if weights is None:
            scaled = [g * float(islands.num_shards) for g in scaled]
        else:
            share, weights = self._weights_of_islands(weights)
            self._weights = [x for x in weights if x is not None]
            gradients = gradients.with_grads(gradients.grads, weights=weights)
            scaled = [times(share, g) for g in scaled]
        dims = [[d for d in g.shape.dims if d not in islands.shard_dims] for g in scaled]
        own = SameSlices(scaled, list(map(mtf.Shape, dims))).outputs
        return gradients.with_present(own, wrapper._form_inside)

    def _weights_of_islands(self, weights: Weights) -> tuple[mtf.Tensor, Weights]:
        """Returns what makes an island's term its own mean, and the weights inside of an island.

        The first, `[islands...]`, is the weight of all over that of the island.
        """
        islands, axes = self._islands, self._wrapper.axes
        assert axes is not None  # or there would be one island
        of_shards = weights.by_shard(axes)
        dims = mtf.Shape(list(islands.shard_dims))
        totals = mtf.reduce_sum(of_shards, output_shape=dims)
        self._has_data = mtf.greater(totals, 0.0)
        # An island without data takes a step with gradients of zeros.
        share = mtf.cwise(
            lambda own, all_: tf.where_v2(own > 0, all_ / nonzero(own), 0.0),
            [totals, weights.total],
        )
        inside = [d for d in of_shards.shape.dims if d not in islands.shard_dims]
        own = SameSlices([totals, of_shards], [mtf.Shape([]), mtf.Shape(inside)]).outputs
        return share, Weights(own[0], own[1] if inside else None)

    def after_update(
        self, updates: Sequence[mtf.Operation], step: StepBuilder
    ) -> list[mtf.Operation]:
        """Makes the outer steps."""
        wrapper, graph = self._wrapper, step.plan.graph
        made = [v for v in graph.all_variables if v not in self._made_before]
        counts = [v for v in made if getattr(v, "restarts_with_slots", False)]
        differ = [*(v.value for v in (*self._variables, *counts)), *self._gradients, *self._weights]
        self._slots = differing_variables(graph.operations, differ, made)
        if not self._islands.shard_dims:
            # Nothing differs; slots have a value for each island all the same, counters have not.
            names = {v.name for v in self._variables}
            self._slots = [v for v in self._slots if owner_of(v.name, names)]
        hold_slots_by_islands(self._slots, self._islands.shard_dims)
        if wrapper.leave_out_not_finite:
            self._skips = self._make_skips()
        count = self._state.inner_step.value + 1
        gate = step.gate(step.passed_on[-1].present)
        step.write([mtf.assign(self._state.inner_step, count)], gate)
        period, fragments = wrapper.inner_steps, wrapper.fragments
        by_rows = has_gradient_reduction(wrapper.reducer)
        parts = fragments_of(self._variables, fragments, self._islands, by_rows)
        writes: list[mtf.Operation] = []
        dues = [
            mtf.equal(mtf.mod(count, period), number * period // fragments % period)
            for number in range(1, fragments + 1)
        ]
        weights = self._weights_of_rounds(dues, gate, step)
        for number, owners in enumerate(parts):
            if not owners:
                continue
            with step.branch_when(dues[number], gate, updates):
                weight = weights[number] if weights else None
                writes += self._outer_step(owners, updates, step, weight)
        step.show(self._outer, writes)
        return []

    def _weights_of_rounds(
        self, dues: Sequence[mtf.Tensor], gate: Gate | None, step: StepBuilder
    ) -> list[mtf.Tensor]:
        """Adds the weights of the update, and returns those of islands for each fragment.

        Where an outer step of the fragment is due, the next round begins with 0.
        """
        state, given = self._state.weight, step.passed_on[-1].weights
        if state is None or given is None:
            return []
        *dims, fragments = state.shape.dims
        (own,) = SameSlices([given.total], [mtf.Shape(dims)]).outputs
        sums = state.value + own
        ends = mtf.stack([mtf.cast(due, tf.float32) for due in dues], fragments.name)
        step.write([mtf.assign(state, sums * (1.0 - ends))], gate)
        return mtf.unstack(sums, fragments)

    def end_of_step(
        self, operations: Sequence[mtf.Operation], step: StepBuilder
    ) -> list[mtf.Operation]:
        """Notes what was made, and checks what is skipped."""
        state, skips = self._state, self._skips
        made, skipped = map(mtf.anonymize, values_after(state[:2], operations))
        now = OuterState(made, skipped, None)

        def note() -> None:
            self._wrapper._note(state, now, skips)
            self._wrapper._outer = dict(self._outer)

        step.when_built(note)
        return skips.end_of_step(operations) if skips else []

    def _make(self, mesh: mtf.Mesh) -> OuterState:
        name, dims = self._wrapper.name, self._islands.shard_dims
        shape = mtf.anonymous_shape(mtf.Shape(list(dims)))
        return OuterState(
            scalar_state(mesh, f"{name}/inner_step", stacked=False),
            named_state(mesh, f"{name}/skipped", shape, num_shard_dims=len(dims)),
            scalar_state(mesh, f"{name}/updated_at", stacked=False, start=f"{name}/inner_step")
            if self._wrapper._limit
            else None,
        )

    def _make_weight(self, mesh: mtf.Mesh) -> mtf.Variable:
        dims = list(self._islands.shard_dims)
        shape = mtf.Shape([*dims, mtf.Dimension("fragments", self._wrapper.fragments)])
        name = f"{self._wrapper.name}/weight"
        return named_state(mesh, name, shape, tf.float32, num_island_dims=len(dims), is_total=True)

    def _make_skips(self) -> Skips:
        wrapper, state = self._wrapper, self._state
        words = Words(
            "outer step without islands whose loss or values are not finite:",
            [*(v.name for v in (*self._variables, *self._float_slots())), "the loss"],
            [f"(island {number})" for number in range(self._islands.num_shards)],
            "none",
            "Not finite in the last outer step that skipped islands:",
            only_rows=True,
        )
        waiting = [state.inner_step, state.updated_at] if state.updated_at else ()
        return Skips(wrapper.name, words, [state.skipped], waiting, wrapper._limit)

    def _float_slots(self) -> list[mtf.Variable]:
        return [v for v in self._slots if v.slice_dtype.is_floating]

    def _outer_step(
        self,
        owners: Sequence[Owner],
        updates: Sequence[mtf.Operation],
        step: StepBuilder,
        weight: mtf.Tensor | None,
    ) -> list[mtf.Operation]:
        """Makes the outer step of a fragment, from the values after `updates`.

        `owners` are the variables and pieces of the fragment, and `weight` are the weights of the
        islands, `[islands...]`; None for equal ones. Returns the assignments to variables,
        outer values and momenta.
        """
        wrapper = self._wrapper
        variables = [variable_of(x) for x in owners]
        moved = [self._outer[v] for v in variables]
        momenta = [self._momenta[v] for v in variables if v in self._momenta]
        read = iter(map(_wide, step.value_after([*variables, *moved, *momenta], updates)))
        values = [[next(read) for _ in x] for x in (variables, moved, momenta)]
        own, outer, velocity = (_at_pieces(CutOut, owners, x) for x in values)
        shapes = [mtf.Shape([*self._islands.shard_dims, *x.shape.dims]) for x in owners]
        differences: Sequence[mtf.Tensor] = SameSlices(
            [y - x for x, y in zip(own, outer)], shapes
        ).outputs
        count: mtf.Tensor | None = None
        if wrapper.leave_out_not_finite:
            found = self._not_finite(updates, step)
            dims = mtf.Shape(list(self._islands.shard_dims))
            skip = mtf.greater(mtf.reduce_sum(found, output_shape=dims), 0.0)
            differences = ZerosWhere(differences, skip).outputs
            # Every processor has the numbers of all islands.
            skipped = mtf.anonymize(mtf.cast(skip, tf.float32))
            count = mtf.reduce_sum(1.0 - skipped)
        if weight is not None:
            if wrapper.leave_out_not_finite:
                weight = weight * (1.0 - mtf.cast(skip, tf.float32))
            count = mtf.reduce_sum(weight)
            differences = [times(weight, x) for x in differences]
        gradients = self._mean(differences, owners, count, step)
        new_outer, new_velocity = [], []
        # If no island is finite, outer values and momentum do not change.
        any_counts = 1.0 if count is None else mtf.cast(mtf.greater(count, 0.0), tf.float32)
        for index, (x, gradient) in enumerate(zip(outer, gradients)):
            move = gradient
            if velocity:
                after = velocity[index] * wrapper.outer_momentum + gradient
                move = gradient + after * wrapper.outer_momentum if wrapper.nesterov else after
                if count is not None:
                    after = velocity[index] + (after - velocity[index]) * any_counts
                new_velocity.append(after)
            new_outer.append(x - move * (any_counts * wrapper.outer_learning_rate))
        new = [new_outer, new_outer, new_velocity]
        writes = step.plan.graph.combine_assignments(
            [
                mtf.assign(v, x)
                for written, before, after in zip((variables, moved, momenta), values, new)
                for v, x in zip(written, _at_pieces(PutBack, owners, before, after))
            ]
        )
        step.add(writes)
        if wrapper.leave_out_not_finite:
            # Skipped islands still have their own values of other fragments' variables, and of
            # the other pieces of variables that are cut.
            rest = [v for v in self._variables if v not in owners]
            self._restart(skip, skipped, found, rest, [*updates, *writes], step)
            if self._state.updated_at is not None:
                made = self._state.inner_step.value + 1
                last = self._state.updated_at
                now = mtf.cast(any_counts, tf.int32)
                step.add([mtf.assign(last, made * now + last.value * (1 - now))])
        return writes

    def _mean(
        self,
        differences: Sequence[mtf.Tensor],
        owners: Sequence[Owner],
        count: mtf.Tensor | None,
        step: StepBuilder,
    ) -> list[mtf.Tensor]:
        """Returns the mean of `differences`, `[islands...] + owner dims`, over the islands.

        `count` is the number of islands that are not skipped, None for all; the differences of
        skipped ones are zeros already. With weights it is their sum, and differences have theirs.
        """
        wrapper, islands = self._wrapper, self._islands
        if not islands.shard_dims:
            return list(differences)
        reduction = Reduction(wrapper.reducer, islands.batch_dims, islands, wrapper.name)
        given = GradientSet(tuple(differences), tuple(owners), Form.PER_SHARD)
        is_mean = self._state.weight is None  # with weights the sum is that of all tokens
        sums = step.reduce_now(given, reduction, extra=True, is_mean=is_mean).present
        step.write_state()
        if count is None:
            return [x * (1.0 / islands.num_shards) for x in sums]
        if self._state.weight is not None:
            return [divided(x, count) for x in sums]
        share = 1.0 / mtf.maximum(count, 1.0)
        return [x * share for x in sums]

    def _not_finite(self, updates: Sequence[mtf.Operation], step: StepBuilder) -> mtf.Tensor:
        """Returns the values, slots and losses of islands that are not finite.

        The flags, `[islands..., values]`, are greater than 0 there. Losses, the last column, count
        since the outer step before. Slots count, as Mesh-TF's momentum reaches the variable one
        step later.
        """
        variables = [*self._variables, *self._float_slots()]
        values = list(step.value_after(variables, updates))
        found = NotFinite(values, self._islands, self._wrapper.plain_reducer).outputs[0]
        *dims, of = found.shape.dims
        one = mtf.Dimension(of.name, 1)
        losses = mtf.reshape(self._losses.are_bad(), mtf.Shape([*dims, one]))
        return mtf.concat([found, losses], of.name)

    def _restart(
        self,
        skip: mtf.Tensor,
        skipped: mtf.Tensor,
        found: mtf.Tensor,
        variables: Sequence[mtf.Variable],
        writes: Sequence[mtf.Operation],
        step: StepBuilder,
    ) -> None:
        """Gives skipped islands the outer values and slots of zeros, counts and reports them.

        `skip` is true for the skipped islands, `[islands...]`; `skipped` is 1 for them, else 0, of
        the same shape but with all islands on each processor; `found` are the flags behind them.
        `variables` are those to set to their outer values; values are read after `writes`.
        """
        with step.branch_when(mtf.greater(mtf.reduce_sum(skipped), 0.0), None):
            before = self._state.skipped
            now = before.value + mtf.cast(skipped, tf.int32)
            (mine,) = SameSlices([skip], [mtf.Shape([])]).outputs
            own = step.value_after(variables, writes)
            outer = step.value_after([self._outer[v] for v in variables], writes)
            slots = step.value_after(self._slots, writes)
            zeros = [mtf.cwise(tf.zeros_like, [x], x.dtype) for x in slots]
            restarted = [
                *(mtf.assign(v, _where(mine, y, x)) for v, x, y in zip(variables, own, outer)),
                *(mtf.assign(v, _where(mine, y, x)) for v, x, y in zip(self._slots, slots, zeros)),
            ]
            writes = step.plan.graph.combine_assignments([mtf.assign(before, now), *restarted])
            step.add(writes)
            assert self._skips is not None  # as islands are skipped
            step.add(self._skips.report([mtf.anonymize(found)], [now]))


def _at_pieces(
    kind: Callable[..., CutOut | PutBack], owners: Sequence[Owner], *values: Sequence[mtf.Tensor]
) -> list[mtf.Tensor]:
    """Applies `CutOut` or `PutBack` to the values of owners that are pieces.

    `values` are the inputs of `kind`, lists with a value for each owner. For an owner that is a
    whole variable, the result has its value in the last list.
    """
    result, pieces = (
        list(values[-1]),
        {i: x for i, x in enumerate(owners) if isinstance(x, VariablePiece)},
    )
    if result and pieces:
        given = [[some[i] for i in pieces] for some in values]
        for index, value in zip(pieces, kind(*given, list(pieces.values())).outputs):
            result[index] = value
    return result


def _where(skip: mtf.Tensor, new: mtf.Tensor, old: mtf.Tensor) -> mtf.Tensor:
    # The result has the shape of the first one.
    return mtf.cwise(lambda x, y, skip: tf.where_v2(skip, y, x), [old, new, skip], old.dtype)


def _wide(x: mtf.Tensor) -> mtf.Tensor:
    return x if x.dtype.size >= 4 else mtf.cast(x, tf.float32)


class LossesOfPeriod:
    """Finds which islands have had a loss that is not finite since the outer step before.

    Each island keeps the number of the last period that it had one in, so that nothing has to be
    reset, and nothing is sent between islands. Periods are numbered from 1.

    Attributes:
      variable: `<owner>/bad_loss`, the number for each island, or 0.
      last: its value after the step.
    """

    def __init__(
        self,
        grads: Sequence[mtf.Tensor],
        period: mtf.Tensor,
        islands: ReplicaAxes,
        strategy: Strategy,
        owner: str,
        has_data: mtf.Tensor | None = None,
    ):
        dims = list(islands.shard_dims)
        self.variable = named_state(
            period.mesh, f"{owner}/bad_loss", mtf.Shape(dims), num_shard_dims=len(dims), fill=0
        )
        self._period, last = period, self.variable.value
        losses = losses_behind(grads)
        if losses:
            # A loss that islands share says of none of them that it is its own.
            found = NotFinite(losses, islands, strategy, of_shards_only=True).outputs[0]
            bad = mtf.greater(mtf.reduce_sum(found, output_shape=mtf.Shape(dims)), 0.0)
            bad = bad if has_data is None else mtf.logical_and(bad, has_data)
            last = last + (period - last) * mtf.cast(bad, tf.int32)
        self.last = last

    def are_bad(self) -> mtf.Tensor:
        """1 for each island that had one, else 0: float32 `[islands...]`."""
        return mtf.cast(mtf.equal(self.last, self._period), tf.float32)


@gin.configurable(module="mtf_gradsync")
class OuterOptimizer(ReportsSkips):
    """Trains islands of the mesh separately, and synchronizes them every `inner_steps` updates.

    Each island, a coordinate along the axes of `outer_dims`, updates its own values with gradients
    of its part of the batch. After `inner_steps` updates the mean over the islands of the
    difference of their values from the outer values is the gradient for SGD with momentum on the
    outer values, which all islands then continue from. On other steps islands send each other no
    gradients.

    An island's gradient is scaled by num_islands, to estimate that of the whole batch, so that
    learning rates need no change. Values that a program fetches (a loss, a norm) are those of all
    islands if Mesh-TF sums over the batch, otherwise of the first one.

    State, by name: `<variable>/island` and `<slot>/island` with a value for each island,
    `<variable>/outer_momentum`, `<name>/inner_step`, `<name>/skipped`, with leave_out_not_finite
    `<name>/bad_loss`, with max_steps_without_update `<name>/updated_at`, with weights
    `<name>/weight` with a value for each island and fragment. The variable itself holds
    the outer values.

    There may be a single island: then the steps are those of the inner optimizer, nothing is sent,
    and every `inner_steps` updates the variables go on from where the outer step leads.

    Attributes:
      islands: the axes between islands, `ReplicaAxes`; one island has no axes.
      inside: the replica axes inside of an island; None for one island if no mesh is known.

    References:
      Douillard et al., DiLoCo, https://arxiv.org/abs/2311.08105; and with fragments,
      https://arxiv.org/abs/2501.18512
    """

    shown = (("outer step", "outer/step"),)
    _outer = OfStep[Mapping[mtf.Variable, mtf.Variable]](MappingProxyType({}))

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
          fragments: the number F of equal parts of all values, of which one is synchronized every
            inner_steps / F updates: no step sends more than 1/F of what it takes to send all, or
            with a reducer that keeps state up to a row of a variable more.
          outer_dims: the names in batch_dims that are split over islands; None for all of them.
            The others are split over the replicas inside an island. () for one island, which needs
            no mesh.
          leave_out_not_finite: whether an outer step skips islands with a loss, values or slots
            that are not finite: these restart with the outer values and zeros in their slots. The
            losses are those of all microbatch steps since the outer step before, except inside of
            loops.
          name: name of the wrapper, prefix of its state.
          learning_rate: the learning rate for opt; only if opt is a class or factory.
          axes: the replica axes (`ReplicaAxes`); or give mesh_shape and layout. Without either they
            are those of the mesh that the program has made for this graph.
          mesh_shape: Mesh-TF's mesh shape.
          layout: Mesh-TF's layout rules.
          batch_dims: names of the tensor dimensions that the batch is split along.
          reducer: the reduction strategy between islands; None takes `FusedAllReduce()`. Inside an
            island, sums use the reducers of the wrappers inside.
          max_steps_without_update: the largest number of updates of islands in a row without an
            outer step that did not skip all islands; one more raises an error that names variables
            and islands (see `NoUpdateError`). It has an effect only with leave_out_not_finite. None
            for no limit.

        Raises:
          ValueError: an argument is out of range, arguments contradict each other, or there is no
            mesh.
          TypeError: an argument has the wrong type.
        """
        inner_steps = check_whole_number("inner_steps", inner_steps)
        fragments = check_whole_number("fragments", fragments)
        if inner_steps % fragments:
            raise ValueError(
                "inner_steps must be a multiple of fragments, as a fragment is synchronized every "
                f"inner_steps / fragments updates, got inner_steps={inner_steps!r} and "
                f"fragments={fragments!r}."
            )
        between = inner_steps // fragments
        why = f"there is an outer step every inner_steps / fragments = {between} updates"
        limit = check_limit(max_steps_without_update, between, why)
        outer_learning_rate = check_number(
            "outer_learning_rate", outer_learning_rate, "greater than 0", above=True
        )
        what, below = "from 0 up to 1 (not included)", 1 - 2.0**-25  # float32 rounds that to 1
        outer_momentum = check_number("outer_momentum", outer_momentum, what, below=below)
        nesterov = check_flag("nesterov", nesterov)
        leave_out_not_finite = check_flag("leave_out_not_finite", leave_out_not_finite)
        names = None if outer_dims is None else as_dim_names(outer_dims, "outer_dims")
        needs_mesh_for = "the islands"
        if names == () and fragments == 1:
            needs_mesh_for = ""
        common = CommonArguments(name, axes, mesh_shape, layout, batch_dims, reducer, learning_rate)
        self._wrap(opt, common, needs_mesh_for)
        self.islands, self.inside = _islands(self.axes, names)
        self.inner_steps, self.fragments = inner_steps, fragments
        self.outer_learning_rate, self.outer_momentum = outer_learning_rate, outer_momentum
        self.nesterov, self.leave_out_not_finite = nesterov, leave_out_not_finite
        self._limit = limit if leave_out_not_finite else None
        self._check_order()
        for inner in self._wrappers()[1:]:
            if inner.traits.averages and inner not in self._segment_wrappers():
                raise ValueError(
                    f"{inner.name} inside an optimizer of another library would average the values "
                    f"of each island: put {type(inner).__name__} directly inside {self.name}, or "
                    "around it."
                )
            if self.islands.shard_dims and self.inside is not None:
                inner._check_inside(self.islands, self.inside)

    def _gradient_reduction(
        self, place: Place | None = None, own: ReplicaAxes | None = None
    ) -> Reduction:
        # Gradients are reduced inside an island; the wrapper's reducer is for outer steps.
        return (
            super()
            ._gradient_reduction(place, own)
            ._replace(strategy=FusedAllReduce(), other_axes=None)
        )

    @property
    def _form_inside(self) -> Form:
        """The form of gradients inside of an island."""
        has_shards = self.inside is not None and self.inside.shard_dims
        return Form.PER_SHARD if has_shards else Form.REDUCED

    @property
    def plain_reducer(self) -> Strategy:
        """The strategy for flags and counts, without compression."""
        return FusedAllReduce() if has_gradient_reduction(self.reducer) else self.reducer

    def stages(self, place: Place) -> list[Stage]:
        """See `Wrapper.stages`."""
        del place
        return [OuterSteps(self, self.islands)]

    def _check_gradients(
        self, grads: Sequence[mtf.Tensor | None], variables: Sequence[mtf.Variable]
    ) -> None:
        """Raises ValueError for gradients or variables that islands cannot have of their own."""
        given = [v for g, v in zip(grads, variables) if g is not None]
        if not given:
            return
        held = StepPlan.of(given[0].graph).part(Islands)
        for variable in given:
            if self.islands.free_shard_dims(variable.shape) != self.islands.shard_dims:
                raise ValueError(
                    f"The layout splits variable {variable.name!r} of shape "
                    f"{variable.shape.to_string} over an axis of the islands, so that no island "
                    "has all of it: split it over another mesh axis, or choose other axes for "
                    "islands by outer_dims."
                )
            if isinstance(variable, mtf.StackedVariable):
                raise ValueError(
                    f"{self.name}: {variable.name!r} is a stack of variables: apply gradients "
                    "before graph.rewrite_stack_variables is called."
                )
            if held.holder(variable) is not None:
                raise ValueError(
                    f"{self.name} has applied a gradient of {variable.name!r} in this graph "
                    "already; give apply_grads all variables at once."
                )
        if len(given) < self.fragments:
            raise ValueError(
                f"{self.name} needs at least fragments={self.fragments} variables with gradients, "
                f"but got {len(given)}: {[v.name for v in given]}. Give fewer fragments."
            )
        if self.axes is None or not self.islands.shard_dims:
            return
        own = [None if g is None or self._shard_dims(g.shape) else g for g in grads]
        names = [f"variable {v.name!r}" for v in variables]
        check_addable(own, self.axes, names)
        check_recoverable(own, self.islands, names, within=self.axes)

    def outer_value(self, var: mtf.Variable) -> mtf.Variable | None:
        """Returns the holder of a variable's outer values; None before gradients were applied."""
        return self._outer.get(var)

    def reported(self) -> dict[str, mtf.Tensor]:
        """See `mtf_gradsync.reported`; `outer/skipped` has a count for each island."""
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
    """Returns the replica axes between islands, and those inside an island.

    `names` are outer_dims. Where islands would be one, the first has no axes.
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
