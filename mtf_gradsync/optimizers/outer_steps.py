"""The steps of islands: gradients of each island, and outer steps that join islands' values."""

from __future__ import annotations

import dataclasses
from typing import Callable, NamedTuple, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients.measures import NotFinite
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.optimizers.outer_values import (
    LossesOfPeriod,
    OuterVariable,
    SameSlices,
    differing_variables,
    fragments_of,
    hold_by_islands,
    hold_slots_by_islands,
)
from mtf_gradsync.optimizers.pipeline.accumulators import masked, multiply_by_count
from mtf_gradsync.optimizers.pipeline.builder import StepBuilder
from mtf_gradsync.optimizers.pipeline.forms import Form, GradientSet, Mask, Reduction, Weights
from mtf_gradsync.optimizers.pipeline.strategy_state import (
    CutOut,
    Owner,
    PutBack,
    VariablePiece,
    variable_of,
)
from mtf_gradsync.optimizers.pipeline.weights import divided, nonzero
from mtf_gradsync.optimizers.skips import ReportsSkips, SkipMessages, Skips
from mtf_gradsync.optimizers.slots import owner_of
from mtf_gradsync.optimizers.state import named_state
from mtf_gradsync.reduce import FusedAllReduce, Strategy
from mtf_gradsync.reduce.strategy import has_gradient_reduction
from mtf_gradsync.step import Gate, values_after


class OuterState(NamedTuple):
    """The counters of outer steps: mesh variables, or their values after a step.

    Attributes:
      inner_step: int32 scalar, the number of updates that each island has made.
      skipped: int32 `[islands...]`, the number of outer steps that have skipped the island.
      updated_at: int32 scalar, `inner_step` at the last outer step that did not skip all islands;
        None without a limit.
      weight: float32 `[islands..., fragments]`, the sum of the weights of an island's gradients
        since the last outer step of the fragment; None without weights.
    """

    inner_step: mtf.Variable
    skipped: mtf.Variable
    updated_at: mtf.Variable | None
    weight: mtf.Variable | None = None


@dataclasses.dataclass(frozen=True)
class OuterSettings:
    """The settings of outer steps, and the axes of their islands.

    Attributes:
      wrapper: the wrapper, which keeps the state.
      islands: the axes between islands; without any axis for a single island.
      inside: the replica axes inside an island; None for a single island without a known mesh.
      all_axes: all replica axes; None for a single island without a known mesh.
      inner_steps: updates between two outer steps of a variable.
      fragments: the number of parts into which all values are divided, each with its own outer
        steps.
      learning_rate: the learning rate of the outer step.
      momentum: the momentum of the outer step.
      nesterov: whether the momentum is Nesterov's.
      skips_islands: whether an outer step skips islands with values that are not finite.
      reducer: the reduction strategy between islands.
      limit: max_steps_without_update, or None.
      note_outer: a function that is called when a step has been built, with the mtf variables of
        the outer values by variable.
    """

    wrapper: ReportsSkips
    islands: ReplicaAxes
    inside: ReplicaAxes | None
    all_axes: ReplicaAxes | None
    inner_steps: int
    fragments: int
    learning_rate: float
    momentum: float
    nesterov: bool
    skips_islands: bool
    reducer: Strategy
    limit: int | None
    note_outer: Callable[[dict[mtf.Variable, OuterVariable]], None]

    @property
    def form_inside(self) -> Form:
        """The form of gradients inside an island: per shard, or reduced if it is a single shard."""
        has_shards = self.inside is not None and self.inside.shard_dims
        return Form.PER_SHARD if has_shards else Form.REDUCED

    @property
    def plain_reducer(self) -> Strategy:
        """The strategy by which flags and counts are reduced.

        The strategy is `reducer`, or `FusedAllReduce()` if `reducer` has a method
        `reduce_gradients`, because such a method may compress and keeps state.
        """
        return FusedAllReduce() if has_gradient_reduction(self.reducer) else self.reducer


class StepsOfIslands:
    """The operations of the stage `OuterSteps` in one step that is being built.

    The stage `OuterSteps` calls `apply` first. After that, the builder of the step calls
    `after_update` and `end_of_step`.
    """

    def __init__(self, settings: OuterSettings):
        self._settings, self._islands = settings, settings.islands
        # `apply` sets these.
        self._variables: list[mtf.Variable] = []
        self._outer: dict[mtf.Variable, OuterVariable] = {}
        self._momenta: dict[mtf.Variable, mtf.Variable] = {}
        self._gradients: Sequence[mtf.Tensor] = ()
        self._slots: list[mtf.Variable] = []
        self._made_before: set[mtf.Variable] = set()
        self._skips: Skips | None = None

    def apply(self, gradients: GradientSet, step: StepBuilder) -> GradientSet:
        """Returns the gradients by which each island updates its own values.

        This method makes the variables that hold islands' values, outer values and momenta, and the
        counters. With `skips_islands` it also makes the record of losses that are not finite.
        `gradients` are those of the whole batch: per shard, or in any form if there is one island.
        `step` is the step that is being built, to which the method adds operations.
        """
        settings, islands, mesh = self._settings, self._islands, gradients.mesh
        self._variables = gradients.owners
        self._state: OuterState = step.plan.state(
            settings.wrapper, settings.wrapper.name, lambda: self._make(mesh)
        )
        self._weights: Sequence[mtf.Tensor] = ()
        self._has_data: mtf.Tensor | None = None
        if gradients.weights is not None and islands.shard_dims:
            counts = mtf.Dimension("fragments", settings.fragments)
            weight = named_state(
                mesh,
                f"{settings.wrapper.name}/weight",
                mtf.Shape([*islands.shard_dims, counts]),
                tf.float32,
                num_island_dims=len(islands.shard_dims),
                is_total=True,
            )
            self._state = self._state._replace(weight=weight)
        elif gradients.weights is not None:
            self._has_data = mtf.greater(gradients.weights.total, 0.0)
        dims, name = islands.shard_dims, f"{settings.wrapper.name}/weight"
        held = [hold_by_islands(v, dims, mean_weight=name) for v in self._variables]
        self._outer = {v: OuterVariable(v) for v in self._variables}
        if settings.momentum:
            self._momenta = {
                v: named_state(mesh, f"{v.name}/outer_momentum", v.shape, tf.float32)
                for v in self._variables
            }
        settings.wrapper._slots.record([*held, *self._momenta.values()], self._variables)

        if islands.shard_dims:
            gradients = self._island_gradients(gradients)
        self._gradients = gradients.present
        self._made_before = set(gradients.graph.all_variables)
        if settings.skips_islands:
            period = (
                self._state.inner_step.value // (settings.inner_steps // settings.fragments) + 1
            )
            given = [g for g in step.received[0].grads if g is not None]
            self._losses = LossesOfPeriod(
                given,
                period,
                islands,
                settings.plain_reducer,
                settings.wrapper.name,
                self._has_data,
            )
            settings.wrapper._slots.record([self._losses.variable], self._variables)
            now = self._losses.last
            step.write([mtf.assign(self._losses.variable, now)], step.gate([now]))
        return gradients

    def _island_gradients(self, gradients: GradientSet) -> GradientSet:
        """Turns gradients of the whole batch into gradients of each island's part of the batch.

        On each island a gradient becomes the gradient of the mean over that island's part of the
        batch. The returned gradients have no dims of islands, although their values differ between
        islands, and are in the form `OuterSettings.form_inside`. Weights, if there are any, become
        those of the shards inside an island.
        """
        settings, islands = self._settings, self._islands
        # An island's term of the mean over the batch becomes the mean over its part of the batch.
        weights, scaled = gradients.weights, gradients.present
        if weights is None:
            scaled = [g * float(islands.num_shards) for g in scaled]
        else:
            share, weights = self._weights_of_islands(weights)
            self._weights = [x for x in weights if x is not None]
            gradients = gradients.with_grads(gradients.grads, weights=weights)
            scaled = [multiply_by_count(share, g) for g in scaled]
        dims = [[d for d in g.shape.dims if d not in islands.shard_dims] for g in scaled]
        own = SameSlices(scaled, list(map(mtf.Shape, dims))).outputs
        return gradients.with_present(own, settings.form_inside)

    def _weights_of_islands(self, weights: Weights) -> tuple[mtf.Tensor, Weights]:
        """Returns, from weights of shards, a factor for each island and the weights inside it.

        The factors, `[islands...]`, are the total weight of all islands divided by the weight of
        the island, or 0 for an island without data. If an island's term of the gradient of the
        weighted mean over the batch is multiplied by the island's factor, the product is the
        gradient of the weighted mean over the island's own part of the batch. In the returned
        weights, `total` is the total weight of an island: a scalar that has another value on each
        island.
        """
        islands, axes = self._islands, self._settings.all_axes
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
        """Makes the outer steps, which run in a branch after `updates` when they are due.

        `updates` are the operations of the inner optimizer's update. Each fragment has an outer
        step in every `inner_steps`-th update, and no two fragments have one in the same update.
        This method also gives slots a value for each island, and counts the update. All operations
        are added to `step`, so that the returned list is empty.
        """
        settings, graph = self._settings, step.plan.graph
        made = [v for v in graph.all_variables if v not in self._made_before]
        counts = [v for v in made if getattr(v, "restarts_with_slots", False)]
        differ = [*(v.value for v in (*self._variables, *counts)), *self._gradients, *self._weights]
        self._slots = differing_variables(graph.operations, differ, made)
        if not self._islands.shard_dims:
            # Nothing differs, but slots (not counters) get a value for each island, too.
            names = {v.name for v in self._variables}
            self._slots = [v for v in self._slots if owner_of(v.name, names)]
        hold_slots_by_islands(self._slots, self._islands.shard_dims)
        if settings.skips_islands:
            self._skips = self._make_skips()
        count = self._state.inner_step.value + 1
        gate = step.gate(step.passed_on[-1].present)
        step.write([mtf.assign(self._state.inner_step, count)], gate)
        period, fragments = settings.inner_steps, settings.fragments
        by_rows = has_gradient_reduction(settings.reducer)
        parts = fragments_of(self._variables, fragments, self._islands, by_rows)
        writes: list[mtf.Operation] = []
        dues = [
            mtf.equal(mtf.mod(count, period), number * period // fragments % period)
            for number in range(1, fragments + 1)
        ]
        weights = self._weights_since_outer_step(dues, gate, step)
        for number, owners in enumerate(parts):
            if not owners:
                continue
            with step.branch_when(dues[number], gate, updates):
                weight = weights[number] if weights else None
                writes += self._outer_step(owners, updates, step, weight)
        step.show(self._outer, writes)
        return []

    def _weights_since_outer_step(
        self, dues: Sequence[mtf.Tensor], gate: Gate | None, step: StepBuilder
    ) -> list[mtf.Tensor]:
        """Adds up islands' weights; returns those since the last outer step of each fragment.

        `dues` has a boolean scalar for each fragment: whether the current step makes the fragment's
        outer step. If it does, the fragment's sums of weights begin again with 0. `gate` holds back
        the write of the variable with the sums. Returns tensors `[islands...]`, one for each
        fragment, which include the weight of the current step; [] if gradients have no weights, or
        there is one island.
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
        """Sets the wrapper's attributes for the step; returns the operation that checks its limit.

        `operations` are all other operations of the step. The result is a list of the operation
        that checks max_steps_without_update; [] if outer steps skip no islands.
        """
        state, skips = self._state, self._skips
        made, skipped = map(mtf.anonymize, values_after(state[:2], operations))
        now = OuterState(made, skipped, None)

        def note() -> None:
            self._settings.wrapper._set_step_attributes(state, now, skips)
            self._settings.note_outer(dict(self._outer))

        step.when_built(note)
        return skips.end_of_step(operations) if skips else []

    def _make(self, mesh: mtf.Mesh) -> OuterState:
        name, dims = self._settings.wrapper.name, self._islands.shard_dims
        shape = mtf.anonymous_shape(mtf.Shape(list(dims)))
        return OuterState(
            named_state(mesh, f"{name}/inner_step"),
            named_state(mesh, f"{name}/skipped", shape, num_shard_dims=len(dims)),
            named_state(mesh, f"{name}/updated_at", start=f"{name}/inner_step")
            if self._settings.limit
            else None,
        )

    def _make_skips(self) -> Skips:
        settings, state = self._settings, self._state
        words = SkipMessages(
            "outer step without islands whose loss or values are not finite:",
            [*(v.name for v in (*self._variables, *self._float_slots())), "the loss"],
            [f"(island {number})" for number in range(self._islands.num_shards)],
            "none",
            "Not finite in the last outer step that skipped islands:",
            only_rows=True,
        )
        waiting = [state.inner_step, state.updated_at] if state.updated_at else ()
        return Skips(settings.wrapper.name, words, [state.skipped], waiting, settings.limit)

    def _float_slots(self) -> list[mtf.Variable]:
        return [v for v in self._slots if v.slice_dtype.is_floating]

    def _outer_step(
        self,
        owners: Sequence[Owner],
        updates: Sequence[mtf.Operation],
        step: StepBuilder,
        weight: mtf.Tensor | None,
    ) -> list[mtf.Operation]:
        """Makes the outer step of a fragment, from the values that islands have after `updates`.

        `owners` are the variables in the fragment, and the pieces of variables that were cut: a
        piece is a range of the numbers in each core's slice. `weight` has the weight of each
        island, `[islands...]`; None for equal weights. `step` is the step that is being built.
        Returns the assignments to variables, outer values and momenta.
        """
        settings = self._settings
        variables = [variable_of(x) for x in owners]
        moved = [self._outer[v] for v in variables]
        momenta = [self._momenta[v] for v in variables if v in self._momenta]
        now = step.value_after([*variables, *moved, *momenta], updates)
        read = iter(x if x.dtype.size >= 4 else mtf.cast(x, tf.float32) for x in now)
        values = [[next(read) for _ in x] for x in (variables, moved, momenta)]
        own, outer, velocity = (_cut_or_put_back(CutOut, owners, x) for x in values)
        shapes = [mtf.Shape([*self._islands.shard_dims, *x.shape.dims]) for x in owners]
        differences = SameSlices([y - x for x, y in zip(own, outer)], shapes).outputs
        given = GradientSet(tuple(differences), tuple(owners), Form.PER_SHARD)
        skip: mtf.Tensor | None = None
        count: mtf.Tensor | None = None
        if settings.skips_islands:
            found = self._flag_not_finite(updates, step)
            dims = mtf.Shape(list(self._islands.shard_dims))
            skip = mtf.greater(mtf.reduce_sum(found, output_shape=dims), 0.0)
            # Every processor has the numbers of all islands.
            skipped = mtf.anonymize(mtf.cast(skip, tf.float32))
            count = mtf.reduce_sum(1.0 - skipped)
        if weight is not None:
            if settings.skips_islands:
                weight = weight * (1.0 - mtf.cast(skip, tf.float32))
            count = mtf.reduce_sum(weight)
            given = dataclasses.replace(given, weights=Weights(weight))
        if count is not None:
            given = masked(dataclasses.replace(given, mask=Mask(count, skipped=skip)))
        gradients = self._mean(given, count, step)
        new_outer, new_velocity = [], []
        # If no island is finite, outer values and momentum do not change.
        any_counts = 1.0 if count is None else mtf.cast(mtf.greater(count, 0.0), tf.float32)
        for index, (x, gradient) in enumerate(zip(outer, gradients)):
            move = gradient
            if velocity:
                after = velocity[index] * settings.momentum + gradient
                move = gradient + after * settings.momentum if settings.nesterov else after
                if count is not None:
                    after = velocity[index] + (after - velocity[index]) * any_counts
                new_velocity.append(after)
            new_outer.append(x - move * (any_counts * settings.learning_rate))
        new = [new_outer, new_outer, new_velocity]
        writes = step.plan.graph.combine_assignments(
            [
                mtf.assign(v, x)
                for written, before, after in zip((variables, moved, momenta), values, new)
                for v, x in zip(written, _cut_or_put_back(PutBack, owners, before, after))
            ]
        )
        step.add(writes)
        if settings.skips_islands:
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
        differences: GradientSet,
        count: mtf.Tensor | None,
        step: StepBuilder,
    ) -> list[mtf.Tensor]:
        """Returns the mean of `differences` over the islands, a tensor for each of them.

        The mean is computed by the settings' reduction strategy, as a part of `step`.

        Args:
          differences: for each variable, or piece of a variable, the outer values minus the values
            of each island: a tensor whose first dimensions number the islands. The differences of
            skipped islands are zeros. If islands have weights, each island's differences are
            already multiplied by the island's weight.
          count: the number of islands that are not skipped, or the sum of the weights if islands
            have weights. None if no island is skipped and there are no weights.
          step: the step that is being built.
        """
        settings, islands = self._settings, self._islands
        if not islands.shard_dims:
            return differences.present
        reduction = Reduction(settings.reducer, islands.batch_dims, islands, settings.wrapper.name)
        is_mean = self._state.weight is None  # with weights the sum is that of all tokens
        sums = step.reduce_now(differences, reduction, extra=True, is_mean=is_mean).present
        step.write_state()
        if count is None:
            return [x * (1.0 / islands.num_shards) for x in sums]
        if self._state.weight is not None:
            return [divided(x, count) for x in sums]
        share = 1.0 / mtf.maximum(count, 1.0)
        return [x * share for x in sums]

    def _flag_not_finite(self, updates: Sequence[mtf.Operation], step: StepBuilder) -> mtf.Tensor:
        """Returns flags of islands' values, slots and losses that are not finite after `updates`.

        The flags, float32 `[islands..., values]`, are greater than 0 for a value that is not
        finite. The columns are for the variables, then for the slots of floating point, and the
        last column is for all losses since the last outer step. Slots are checked because in
        Mesh-TF's momentum optimizer a NaN reaches the slot one step before the variable.
        """
        variables = [*self._variables, *self._float_slots()]
        values = list(step.value_after(variables, updates))
        found = NotFinite(values, self._islands, self._settings.plain_reducer).outputs[0]
        *dims, of = found.shape.dims
        one = mtf.Dimension(of.name, 1)
        losses = mtf.reshape(self._losses.bad_islands(), mtf.Shape([*dims, one]))
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
        """Gives skipped islands the outer values, and zeros as slots; counts and reports the skips.

        Args:
          skip: boolean `[islands...]`, true for skipped islands.
          skipped: float32 `[islands...]`, 1 for skipped islands, else 0. Each processor has the
            numbers of all islands.
          found: the flags of values that are not finite, from `_flag_not_finite`.
          variables: the variables that are set to their outer values. Those of the fragment have
            the new outer values already.
          writes: the operations after which variables, outer values and slots are read.
          step: the step that is being built.
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


def _cut_or_put_back(
    kind: Callable[..., CutOut | PutBack], owners: Sequence[Owner], *values: Sequence[mtf.Tensor]
) -> list[mtf.Tensor]:
    """Cuts pieces of variables out of the variables' values, or puts new pieces back into them.

    A piece is a range of the numbers in each core's slice of a variable.

    Args:
      kind: `CutOut` to cut, `PutBack` to put back.
      owners: pieces of variables, and whole variables.
      *values: lists with a value for each of `owners`. For `CutOut` one list, of values of
        variables. For `PutBack` two lists: values of variables, and new values of the pieces.

    Returns:
      A tensor for each of `owners`. For a piece it is the piece's value (`CutOut`), or the
      variable's value with the new piece in it (`PutBack`). For a whole variable it is the
      variable's item of the last list in `values`.
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
    # The result has the shape of the first input.
    return mtf.cwise(lambda x, y, skip: tf.where_v2(skip, y, x), [old, new, skip], old.dtype)
