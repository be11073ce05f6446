"""The steps of islands: gradients of each island, and outer steps that join islands' values."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Callable, Mapping, NamedTuple, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients.losses import losses_behind
from mtf_gradsync.gradients.measures import NotFinite
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.optimizers.outer_values import (
    OuterVariable,
    SameSlices,
    differing_variables,
    fragments_of,
    hold_by_islands,
    hold_slots_by_islands,
)
from mtf_gradsync.optimizers.pipeline.accumulators import masked, multiply_by_count
from mtf_gradsync.optimizers.pipeline.builder import StepBuilder
from mtf_gradsync.optimizers.pipeline.forms import (
    Form,
    GradientSet,
    Mask,
    ReductionSettings,
    Weights,
)
from mtf_gradsync.optimizers.pipeline.strategy_state import (
    Owner,
    VariablePiece,
    cut_out,
    put_back,
    variable_of,
)
from mtf_gradsync.optimizers.pipeline.weights import divided, nonzero
from mtf_gradsync.optimizers.skips import ReportsSkips, Skips
from mtf_gradsync.optimizers.slots import owner_of
from mtf_gradsync.optimizers.state import named_state
from mtf_gradsync.optimizers.wrapper import StepAttribute
from mtf_gradsync.reduce import FusedAllReduce, Strategy
from mtf_gradsync.reduce.strategy import has_gradient_reduction
from mtf_gradsync.step.conditional import values_after
from mtf_gradsync.step.writes import Gate


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


class TrainsIslands(ReportsSkips):
    """A wrapper that trains islands and synchronizes them by outer steps, with its settings.

    Attributes:
      islands: the axes between islands, `ReplicaAxes`; without any axis for a single island.
      inside: the replica axes inside an island; None for a single island if no mesh is known.
      inner_steps: updates between two outer steps of a variable.
      fragments: the number of parts into which all values are divided, each with its own outer
        steps.
      outer_learning_rate: the learning rate of the outer step.
      outer_momentum: the momentum of the outer step.
      nesterov: whether the momentum is Nesterov's.
      leave_out_not_finite: whether an outer step skips islands with values that are not finite.
    """

    islands: ReplicaAxes
    inside: ReplicaAxes | None
    inner_steps: int
    fragments: int
    outer_learning_rate: float
    outer_momentum: float
    nesterov: bool
    leave_out_not_finite: bool
    _limit: int | None
    # The mtf variables of the outer values by variable, of the last step that was built.
    _outer = StepAttribute[Mapping[mtf.Variable, OuterVariable]](MappingProxyType({}))

    @property
    def _form_inside(self) -> Form:
        """The form of gradients inside an island: per shard, or reduced if it is a single shard."""
        has_shards = self.inside is not None and self.inside.shard_dims
        return Form.PER_SHARD if has_shards else Form.REDUCED

    @property
    def _plain_reducer(self) -> Strategy:
        """The strategy by which flags and counts are reduced.

        The strategy is `reducer`, or `FusedAllReduce()` if `reducer` has a method
        `reduce_gradients`, because such a method may compress and keeps state.
        """
        return FusedAllReduce() if has_gradient_reduction(self.reducer) else self.reducer


class StepsOfIslands:
    """The operations of the stage `OuterSteps` in one step that is being built.

    The stage makes the object. After that, the builder of the step calls `after_update` and
    `end_of_step`.

    Attributes:
      gradients: the gradients by which each island updates its own values.
    """

    def __init__(self, wrapper: TrainsIslands, gradients: GradientSet, step: StepBuilder):
        """Makes the variables of islands' values, outer values, momenta, and counters.

        With `leave_out_not_finite` there is also the record of losses that are not finite.

        Args:
          wrapper: the wrapper, which keeps the state.
          gradients: the gradients of the whole batch: per shard, or in any form if there is one
            island.
          step: the step that is being built, to which operations are added.
        """
        self._wrapper, self._islands, self._step = wrapper, wrapper.islands, step
        islands, mesh = wrapper.islands, gradients.mesh
        self._variables = gradients.owners
        self._state: OuterState = step.state(wrapper, lambda: self._make(mesh))
        self._weights: Sequence[mtf.Tensor] = ()
        self._has_data: mtf.Tensor | None = None
        if gradients.weights is not None and islands.shard_dims:
            counts = mtf.Dimension("fragments", wrapper.fragments)
            weight = named_state(
                mesh,
                f"{wrapper.name}/weight",
                mtf.Shape([*islands.shard_dims, counts]),
                tf.float32,
                num_island_dims=len(islands.shard_dims),
                is_total=True,
            )
            self._state = self._state._replace(weight=weight)
        elif gradients.weights is not None:
            self._has_data = mtf.greater(gradients.weights.total, 0.0)
        dims, name = islands.shard_dims, f"{wrapper.name}/weight"
        held = [hold_by_islands(v, dims, mean_weight=name) for v in self._variables]
        self._outer = {v: OuterVariable(v) for v in self._variables}
        self._momenta = {
            v: named_state(mesh, f"{v.name}/outer_momentum", v.shape, tf.float32)
            for v in (self._variables if wrapper.outer_momentum else ())
        }
        wrapper._slots.record([*held, *self._momenta.values()], self._variables)

        self.gradients = self._island_gradients(gradients) if islands.shard_dims else gradients
        self._made_before = set(gradients.graph.all_variables)
        if wrapper.leave_out_not_finite:
            between = wrapper.inner_steps // wrapper.fragments
            self._period = self._state.inner_step.value // between + 1
            self._last_bad = self._record_losses(losses_behind(step.received[0].present))

    def _island_gradients(self, gradients: GradientSet) -> GradientSet:
        """Turns gradients of the whole batch into gradients of each island's part of the batch.

        On each island a gradient becomes the gradient of the mean over that island's part of the
        batch. The returned gradients have no dims of islands, although their values differ between
        islands, and are in the form `TrainsIslands._form_inside`. Weights, if there are any, become
        those of the shards inside an island.
        """
        wrapper, islands = self._wrapper, self._islands
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
        return gradients.with_present(own, wrapper._form_inside)

    def _weights_of_islands(self, weights: Weights) -> tuple[mtf.Tensor, Weights]:
        """Returns, from weights of shards, a factor for each island and the weights inside it.

        The factors, `[islands...]`, are the total weight of all islands divided by the weight of
        the island, or 0 for an island without data. If an island's term of the gradient of the
        weighted mean over the batch is multiplied by the island's factor, the product is the
        gradient of the weighted mean over the island's own part of the batch. In the returned
        weights, `total` is the total weight of an island: a scalar that has another value on each
        island.
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

    def _record_losses(self, losses: Sequence[mtf.Tensor]) -> mtf.Tensor:
        """Records which islands have a loss that is not finite in this step.

        Periods between outer steps are numbered from 1. The variable `<name>/bad_loss`, int32
        `[islands...]`, has the number of the last period in which an island had a loss that is not
        finite; 0 if it had none. So nothing has to be reset or sent between islands. Returns the
        value of the variable after the step.
        """
        wrapper, islands, step = self._wrapper, self._islands, self._step
        dims = mtf.Shape(list(islands.shard_dims))
        variable = named_state(
            self._period.mesh, f"{wrapper.name}/bad_loss", dims, num_shard_dims=dims.ndims, fill=0
        )
        last = variable.value
        if losses:
            # A loss that is not finite and that islands share is not counted for any of them.
            reducer = wrapper._plain_reducer
            found = NotFinite(losses, islands, reducer, of_shards_only=True).outputs[0]
            bad = mtf.greater(mtf.reduce_sum(found, output_shape=dims), 0.0)
            bad = bad if self._has_data is None else mtf.logical_and(bad, self._has_data)
            last = last + (self._period - last) * mtf.cast(bad, tf.int32)
        wrapper._slots.record([variable], self._variables)
        step.write([mtf.assign(variable, last)], step.gate([last]))
        return last

    def after_update(self, updates: Sequence[mtf.Operation]) -> list[mtf.Operation]:
        """Makes the outer steps, which run in a branch after `updates` when they are due.

        `updates` are the operations of the inner optimizer's update. Each fragment has an outer
        step in every `inner_steps`-th update, and no two fragments have one in the same update.
        This method also gives slots a value for each island, and counts the update. All operations
        are added to the step, so that the returned list is empty.
        """
        wrapper, step, graph = self._wrapper, self._step, self._step.plan.graph
        made = [v for v in graph.all_variables if v not in self._made_before]
        counts = [v for v in made if getattr(v, "restarts_with_slots", False)]
        differ = [
            *(v.value for v in (*self._variables, *counts)),
            *self.gradients.present,
            *self._weights,
        ]
        self._slots = differing_variables(graph.operations, differ, made)
        if not self._islands.shard_dims:
            # Nothing differs, but slots (not counters) get a value for each island, too.
            names = {v.name for v in self._variables}
            self._slots = [v for v in self._slots if owner_of(v.name, names)]
        hold_slots_by_islands(self._slots, self._islands.shard_dims)
        self._skips = self._make_skips() if wrapper.leave_out_not_finite else None
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
        weights = self._weights_since_outer_step(dues, gate)
        for number, owners in enumerate(parts):
            if not owners:
                continue
            with step.branch_when(dues[number], gate, updates):
                weight = weights[number] if weights else None
                writes += self._outer_step(owners, updates, weight)
        step.show(self._outer, writes)
        return []

    def _weights_since_outer_step(
        self, dues: Sequence[mtf.Tensor], gate: Gate | None
    ) -> list[mtf.Tensor]:
        """Adds up islands' weights; returns those since the last outer step of each fragment.

        `dues` has a boolean scalar for each fragment: whether the current step makes the fragment's
        outer step. If it does, the fragment's sums of weights begin again with 0. `gate` holds back
        the write of the variable with the sums. Returns tensors `[islands...]`, one for each
        fragment, which include the weight of the current step; [] if gradients have no weights, or
        there is one island.
        """
        state, given = self._state.weight, self._step.passed_on[-1].weights
        if state is None or given is None:
            return []
        *dims, fragments = state.shape.dims
        (own,) = SameSlices([given.total], [mtf.Shape(dims)]).outputs
        sums = state.value + own
        ends = mtf.stack([mtf.cast(due, tf.float32) for due in dues], fragments.name)
        self._step.write([mtf.assign(state, sums * (1.0 - ends))], gate)
        return mtf.unstack(sums, fragments)

    def end_of_step(self, operations: Sequence[mtf.Operation]) -> list[mtf.Operation]:
        """Sets the wrapper's attributes for the step; returns the operation that checks its limit.

        `operations` are all other operations of the step. The result is a list of the operation
        that checks max_steps_without_update; [] if outer steps skip no islands.
        """
        state, skips = self._state, self._skips
        made, skipped = map(mtf.anonymize, values_after(state[:2], operations))
        now = OuterState(made, skipped, None)

        def note() -> None:
            self._wrapper._set_step_attributes(state, now, skips)
            self._wrapper._outer = dict(self._outer)

        self._step.when_built(note)
        return skips.end_of_step(operations) if skips else []

    def _make(self, mesh: mtf.Mesh) -> OuterState:
        name, dims = self._wrapper.name, self._islands.shard_dims
        shape = mtf.anonymous_shape(mtf.Shape(list(dims)))
        return OuterState(
            named_state(mesh, f"{name}/inner_step"),
            named_state(mesh, f"{name}/skipped", shape, num_shard_dims=len(dims)),
            named_state(mesh, f"{name}/updated_at", start=f"{name}/inner_step")
            if self._wrapper._limit
            else None,
        )

    def _make_skips(self) -> Skips:
        wrapper, state = self._wrapper, self._state
        return Skips(
            wrapper.name,
            [*(v.name for v in (*self._variables, *self._float_slots())), "the loss"],
            [f"(island {number})" for number in range(self._islands.num_shards)],
            "outer step without islands whose loss or values are not finite:",
            last="Not finite in the last outer step that skipped islands:",
            only_rows=True,
            counts=[state.skipped],
            waiting=[state.inner_step, state.updated_at] if state.updated_at else (),
            limit=wrapper._limit,
        )

    def _float_slots(self) -> list[mtf.Variable]:
        return [v for v in self._slots if v.slice_dtype.is_floating]

    def _outer_step(
        self,
        owners: Sequence[Owner],
        updates: Sequence[mtf.Operation],
        weight: mtf.Tensor | None,
    ) -> list[mtf.Operation]:
        """Makes the outer step of a fragment, from the values that islands have after `updates`.

        `owners` are the variables in the fragment, and the pieces of variables that were cut: a
        piece is a range of the numbers in each core's slice. `weight` has the weight of each
        island, `[islands...]`; None for equal weights.
        Returns the assignments to variables, outer values and momenta.
        """
        wrapper, step = self._wrapper, self._step
        variables = [variable_of(x) for x in owners]
        moved = [self._outer[v] for v in variables]
        momenta = [self._momenta[v] for v in variables if v in self._momenta]
        now = step.value_after([*variables, *moved, *momenta], updates)
        read = iter(x if x.dtype.size >= 4 else mtf.cast(x, tf.float32) for x in now)
        values = [[next(read) for _ in x] for x in (variables, moved, momenta)]
        own, outer, velocity = (_cut_or_put_back(cut_out, owners, x) for x in values)
        shapes = [mtf.Shape([*self._islands.shard_dims, *x.shape.dims]) for x in owners]
        differences = SameSlices([y - x for x, y in zip(own, outer)], shapes).outputs
        given = GradientSet(tuple(differences), tuple(owners), Form.PER_SHARD)
        skip: mtf.Tensor | None = None
        count: mtf.Tensor | None = None
        if wrapper.leave_out_not_finite:
            found = self._flag_not_finite(updates)
            dims = mtf.Shape(list(self._islands.shard_dims))
            skip = mtf.greater(mtf.reduce_sum(found, output_shape=dims), 0.0)
            # Every processor has the numbers of all islands.
            skipped = mtf.anonymize(mtf.cast(skip, tf.float32))
            count = mtf.reduce_sum(1.0 - skipped)
        if weight is not None:
            if wrapper.leave_out_not_finite:
                weight = weight * (1.0 - mtf.cast(skip, tf.float32))
            count = mtf.reduce_sum(weight)
            given = dataclasses.replace(given, weights=Weights(weight))
        if count is not None:
            given = masked(dataclasses.replace(given, mask=Mask(count, skipped=skip)))
        gradients = self._mean(given, count)
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
                for v, x in zip(written, _cut_or_put_back(put_back, owners, before, after))
            ]
        )
        step.add(writes)
        if wrapper.leave_out_not_finite:
            # Skipped islands still have their own values of other fragments' variables, and of
            # the other pieces of variables that are cut.
            rest = [v for v in self._variables if v not in owners]
            self._restart(skip, skipped, found, rest, [*updates, *writes])
            if self._state.updated_at is not None:
                made = self._state.inner_step.value + 1
                last = self._state.updated_at
                now = mtf.cast(any_counts, tf.int32)
                step.add([mtf.assign(last, made * now + last.value * (1 - now))])
        return writes

    def _mean(self, differences: GradientSet, count: mtf.Tensor | None) -> list[mtf.Tensor]:
        """Returns the mean of `differences` over the islands, a tensor for each of them.

        The mean is computed by the wrapper's reduction strategy.

        Args:
          differences: for each variable, or piece of a variable, the outer values minus the values
            of each island: a tensor whose first dimensions number the islands. The differences of
            skipped islands are zeros. If islands have weights, each island's differences are
            already multiplied by the island's weight.
          count: the number of islands that are not skipped, or the sum of the weights if islands
            have weights. None if no island is skipped and there are no weights.
        """
        wrapper, islands, step = self._wrapper, self._islands, self._step
        if not islands.shard_dims:
            return differences.present
        reduction = ReductionSettings(wrapper.reducer, islands.batch_dims, islands, wrapper.name)
        is_mean = self._state.weight is None  # with weights the sum is that of all tokens
        sums = step.reduce_now(differences, reduction, extra=True, is_mean=is_mean).present
        step.write_state()
        if count is None:
            return [x * (1.0 / islands.num_shards) for x in sums]
        if self._state.weight is not None:
            return [divided(x, count) for x in sums]
        share = 1.0 / mtf.maximum(count, 1.0)
        return [x * share for x in sums]

    def _flag_not_finite(self, updates: Sequence[mtf.Operation]) -> mtf.Tensor:
        """Returns flags of islands' values, slots and losses that are not finite after `updates`.

        The flags, float32 `[islands..., values]`, are greater than 0 for a value that is not
        finite. The columns are for the variables, then for the slots of floating point, and the
        last column is for all losses since the last outer step. Slots are checked because in
        Mesh-TF's momentum optimizer a NaN reaches the slot one step before the variable.
        """
        variables = [*self._variables, *self._float_slots()]
        values = list(self._step.value_after(variables, updates))
        found = NotFinite(values, self._islands, self._wrapper._plain_reducer).outputs[0]
        *dims, of = found.shape.dims
        one = mtf.Dimension(of.name, 1)
        losses = mtf.cast(mtf.equal(self._last_bad, self._period), tf.float32)
        losses = mtf.reshape(losses, mtf.Shape([*dims, one]))
        return mtf.concat([found, losses], of.name)

    def _restart(
        self,
        skip: mtf.Tensor,
        skipped: mtf.Tensor,
        found: mtf.Tensor,
        variables: Sequence[mtf.Variable],
        writes: Sequence[mtf.Operation],
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
        """
        step = self._step
        with step.branch_when(mtf.greater(mtf.reduce_sum(skipped), 0.0), None):
            before = self._state.skipped
            now = before.value + mtf.cast(skipped, tf.int32)
            (skips,) = SameSlices([skip], [mtf.Shape([])]).outputs
            own = step.value_after(variables, writes)
            outer = step.value_after([self._outer[v] for v in variables], writes)
            slots = step.value_after(self._slots, writes)
            zeros = [mtf.cwise(tf.zeros_like, [x], x.dtype) for x in slots]
            restarted = [
                *(mtf.assign(v, _where(skips, y, x)) for v, x, y in zip(variables, own, outer)),
                *(mtf.assign(v, _where(skips, y, x)) for v, x, y in zip(self._slots, slots, zeros)),
            ]
            writes = step.plan.graph.combine_assignments([mtf.assign(before, now), *restarted])
            step.add(writes)
            assert self._skips is not None  # as islands are skipped
            step.add(self._skips.report([mtf.anonymize(found)], [now]))


def _cut_or_put_back(
    change: Callable[..., Sequence[mtf.Tensor]],
    owners: Sequence[Owner],
    *values: Sequence[mtf.Tensor],
) -> list[mtf.Tensor]:
    """Cuts pieces of variables out of the variables' values, or puts new pieces back into them.

    A piece is a range of the numbers in each core's slice of a variable.

    Args:
      change: `cut_out` to cut, `put_back` to put back.
      owners: pieces of variables, and whole variables.
      *values: lists with a value for each of `owners`. For `cut_out` one list, of values of
        variables. For `put_back` two lists: values of variables, and new values of the pieces.

    Returns:
      A tensor for each of `owners`. For a piece it is the piece's value (`cut_out`), or the
      variable's value with the new piece in it (`put_back`). For a whole variable it is the
      variable's item of the last list in `values`.
    """
    result = list(values[-1])
    pieces = {i: x for i, x in enumerate(owners) if isinstance(x, VariablePiece)}
    if result and pieces:
        given = [[some[i] for i in pieces] for some in values]
        for index, value in zip(pieces, change(*given, list(pieces.values()))):
            result[index] = value
    return result


def _where(skip: mtf.Tensor, new: mtf.Tensor, old: mtf.Tensor) -> mtf.Tensor:
    # The result has the shape of the first input.
    return mtf.cwise(lambda x, y, skip: tf.where_v2(skip, y, x), [old, new, skip], old.dtype)
