"""Builds a training step from the stages of a stack of wrappers."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

from mtf_gradsync._names import counted, some_of
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._warn import warn_once
from mtf_gradsync.gradients.pending import Cause
from mtf_gradsync.gradients.recoverable import Apart, mixed_gradients
from mtf_gradsync.gradients.scatter import scatter_gradients
from mtf_gradsync.gradients.stage import dims_to_sum
from mtf_gradsync.gradients.stages import SumGradients, shard_dims_in, split_into_shards
from mtf_gradsync.optimizers.own_arguments import OwnArguments
from mtf_gradsync.optimizers.pipeline.conditions import StepConditions
from mtf_gradsync.optimizers.pipeline.dtypes import finished, in_dtypes_of
from mtf_gradsync.optimizers.pipeline.forms import Form, GradientSet
from mtf_gradsync.optimizers.pipeline.reduction import Partition, Reduced, Reduction
from mtf_gradsync.optimizers.pipeline.stage import Segment, Stage
from mtf_gradsync.optimizers.pipeline.strategy_state import StrategyReductions
from mtf_gradsync.optimizers.state.schedules import UpdateCounters
from mtf_gradsync.optimizers.state.slots import SlotBook, SlotOwners
from mtf_gradsync.step import Plan, WriteOrder, built, gated_update, in_order, values_after


class StepBuilder(StepConditions):
    """One training step while it is being built.

    Attributes:
      received: for each wrapper, from the outside in, the gradients that it received.
      passed_on: for each wrapper, in the same order, the gradients that it passed on.
      per_shard: per-shard gradients that a stage has recovered; None if there are none.
      reduced: the first reduction; None before.
      compressions: what strategies that compress report of the bytes that they save.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        opt: Any,
        takes_pending: bool,
        partition: Partition | None,
        slots: SlotBook,
        arguments: OwnArguments,
        keeper: Any,
    ):
        """Describes the step of a stack of wrappers; builds nothing.

        Args:
          segments: the stages of each wrapper, from the outside in.
          opt: the inner optimizer of the innermost wrapper.
          takes_pending: whether opt takes gradients that are not reduced.
          partition: how updates are sharded; None if they are not.
          slots: records the variables that the step creates.
          arguments: arguments of opt's `apply_grads` after gradients and variables.
          keeper: the optimizer that keeps the slots: opt, or one inside of it.
        """
        super().__init__()
        self._slots, self._arguments, self._keeper = slots, arguments, keeper
        self._segments = list(segments)
        self.stages = [stage for segment in segments for stage in segment.stages]
        self._opt, self._takes_pending, self._partition = opt, takes_pending, partition
        self._notes: list[Callable[[], None]] = []
        # Stages, not built yet, that need reduced gradients and not parts.
        self._wants_reduced = [stage for stage in self.stages if stage.wants_reduced]
        self._by_strategy = StrategyReductions(slots)
        self.received: list[GradientSet] = []
        self.passed_on: list[GradientSet] = []
        self.per_shard: GradientSet | None = None
        self.reduced: Reduced | None = None
        self.compressions = self._by_strategy.compressions
        self._shown: dict[mtf.Variable, mtf.Variable] = {}
        self._shown_after: list[mtf.Operation] = []

    def build(self, gradients: GradientSet) -> list[mtf.Operation]:
        """Returns the operations of the step, from the gradients for the outermost wrapper."""
        self.plan = Plan.of(gradients.graph)
        before = set(gradients.graph.operations)
        with self._branches:
            for segment in self._segments:
                self.received.append(gradients)
                for stage in segment.stages:
                    if stage.takes is Form.PER_SHARD:
                        gradients = self._per_shard(gradients, segment.reduction, stage)
                    elif stage.takes is Form.REDUCED:
                        gradients = self.reduce(gradients, segment.reduction)
                    gradients = stage.apply(gradients, self)
                    if stage in self._wants_reduced:
                        self._wants_reduced.remove(stage)
                    if stage.gives is Form.REDUCED:
                        gradients = self.reduce(gradients, segment.reduction)
                self.passed_on.append(gradients)
            if not self._takes_pending:
                gradients = self.reduce(gradients, self._segments[-1].reduction)
            self.write_state()
            gradients = in_dtypes_of(self._opt, gradients)
            self.passed_on[-1] = gradients
            updates = gated_update(lambda: self._counted_update(gradients), gradients.grads)
            self.add(updates)
            for stage in sorted(reversed(self.stages), key=lambda stage: stage.reads_shown):
                self.add(stage.after_update(updates, self))
        (operations,) = self._lists
        for stage in reversed(self.stages):
            self.add(stage.end_of_step(list(operations), self))
        for note in self._notes:
            note()
        self._by_strategy.warn_of_unused(self._segments)
        made = [op for op in gradients.graph.operations if op not in before]
        self.plan.part(WriteOrder).one_step(made)
        return operations

    @property
    def names(self) -> list[str]:
        """Names of the wrappers, from the outside in."""
        return [segment.reduction.name for segment in self._segments]

    # For stages.

    def when_built(self, note: Callable[[], None]) -> None:
        """Registers a function to call once the step was built without an error."""
        self._notes.append(note)

    def show(
        self, shown: Mapping[mtf.Variable, mtf.Variable], writes: Sequence[mtf.Operation]
    ) -> None:
        """Makes `value_after` read other variables from now on, after the operations `writes`.

        `shown` has for each variable the one to read instead.
        """
        self._shown = {**self._shown, **shown}
        self._shown_after += writes

    def write_state(self, when: Callable[[], mtf.Tensor] | None = None) -> None:
        """Writes the new state that strategies have from the reductions since the last call.

        The builder calls it for the update; a stage that adds up reduced gradients calls it itself.
        `when` makes a boolean scalar, the same on all processors. Where it is false, the state does
        not change; give it if some steps do not use the sums.
        """
        state, self._by_strategy.new_state = self._by_strategy.new_state, []
        if not state:
            return

        def writes() -> list[mtf.Operation]:
            return [mtf.assign(variable, value) for variable, value in state]

        gate = self.gate([value for _, value in state])
        if when is None:
            self.write(writes(), gate)
        else:
            self.run_when(when(), gate, writes)

    def reduce(self, gradients: GradientSet, reduction: Reduction) -> GradientSet:
        """Reduces gradients over the mesh, divides them by their divisor and casts them.

        The result has form `PART` if updates are sharded, by the strategy of the partition, and
        `REDUCED` if not, or if a stage that is not built yet `wants_reduced`. Gradients that have
        this form already are returned as they are.
        """
        partition = None if self._wants_reduced else self._partition
        if gradients.form is (Form.PART if partition else Form.REDUCED):
            return gradients
        given = gradients.present
        if partition is None:
            strategy = reduction.strategy
            gradients = self.reduce_now(gradients, reduction)
        else:
            axes, strategy, shapes_of, name = partition
            own = Reduction(strategy, axes.batch_dims, axes, name)
            gradients = self._by_strategy.reduce(gradients, own)
            unscattered = gradients.present
            of_parts = shapes_of(gradients.owners)
            shapes = [of_parts.get(v, v.shape) for v in gradients.owners]
            sources, parts = scatter_gradients(
                unscattered, gradients.owners, shapes, axes, strategy
            )
            given = [s if x is y else x for x, y, s in zip(given, unscattered, sources)]
            gradients = gradients.with_present(parts, Form.PART)
        if self.reduced is None:
            self.reduced = Reduced(given, gradients.present, self.plan.open_branch, strategy)
        return finished(gradients, self._opt)

    def reduce_now(
        self, gradients: GradientSet, reduction: Reduction, extra: bool = False
    ) -> GradientSet:
        """Reduces gradients over the mesh, never to parts, without division and casts.

        `extra` is for values that are not the step's gradients: a strategy may keep state for both,
        under names of their own.
        """
        gradients = self._by_strategy.reduce(gradients, reduction, extra)
        dims = dims_to_sum(gradients.present, gradients.owners)
        operation = SumGradients(gradients.present, dims, reduction.strategy, reduction.batch_dims)
        return gradients.with_present(operation.outputs, Form.REDUCED)

    def value_after(
        self, variables: Sequence[mtf.Variable], updates: Sequence[mtf.Operation]
    ) -> Sequence[mtf.Tensor]:
        """Returns variables' values after operations; see `mtf_gradsync.step.values_after`.

        Where `show` was called for a variable, it is the value of the variable shown instead.
        """
        shown = [self._shown.get(v, v) for v in variables]
        return values_after(shown, [*updates, *self._shown_after])

    # From stage to stage.

    def _per_shard(self, gradients: GradientSet, reduction: Reduction, stage: Stage) -> GradientSet:
        """Returns per-shard gradients; those in which shards are mixed as `Stage.mixed` says."""
        grads, axes = gradients.grads, reduction.axes
        assert axes is not None  # wrappers with such stages know the mesh
        own = [None if g is None or shard_dims_in(g.shape, axes) else g for g in grads]
        apart = Apart(own, axes)
        found = mixed_gradients(own, axes) if stage.adds_up else apart.mixed
        made = apart.made_of_sums if stage.remakes else {}
        shared = apart.shared if stage.remakes else ()
        if stage.mixed == "refuse" and not stage.adds_up:
            apart.check([f"variable {v.name!r}" for v in gradients.variables], stage.remakes)
        # Where an operation drops the sum, reduced gradients would differ between shards.
        mixed = {
            i: operation
            for i, (operation, cause) in found.items()
            if stage.mixed == "reduce" and cause is not Cause.DROPS_SUM and i not in made
        }
        if mixed and stage.mixed_warning:
            which = counted([gradients.variables[i].name for i in mixed], "variable")
            mixing = some_of(list(dict.fromkeys(repr(op.name) for op in mixed.values())))
            warn_once(stage.mixed_warning, stage.mixed_warning, reduction.name, which, mixing)
        reduced = [grads[i] if i in made else None for i in range(len(grads))]
        to_reduce = {*mixed, *shared}
        if to_reduce:
            some = [g if i in to_reduce else None for i, g in enumerate(grads)]
            now = self.reduce_now(gradients.with_grads(some), reduction).grads
            reduced = [x if r is None else r for x, r in zip(now, reduced)]
        others = [None if r is not None else g for r, g in zip(reduced, grads)]
        strategy = reduction.other_axes or reduction.strategy
        shards = split_into_shards(others, axes, strategy, accept_summed=stage.mixed != "refuse")
        result = gradients.with_grads(
            [s if r is None else r for r, s in zip(reduced, shards)],
            Form.PER_SHARD,
            already_reduced=frozenset({*to_reduce, *made}),
            made_of_sums=made,
        )
        if not (apart.mixed or apart.shared or gradients.form.is_reduced):
            self.per_shard = result
        return result

    def _counted_update(self, gradients: GradientSet) -> list[mtf.Operation]:
        """Makes the update, and advances the counters of updates that nothing else advances."""
        updates = self._update(gradients, self.stages)
        meshes = {v.mesh for v in gradients.variables}
        return [*updates, *self.plan.part(UpdateCounters).advances(gradients.graph, meshes)]

    def _update(self, gradients: GradientSet, stages: Sequence[Stage]) -> list[mtf.Operation]:
        """Makes the inner optimizer's update inside `Stage.update` of all stages, in order."""
        if stages:
            first, *others = stages
            return first.update(gradients, self, lambda given: self._update(given, others))
        before = set(gradients.graph.all_variables)
        args, kwargs = self._arguments
        updates = self._opt.apply_grads(
            list(gradients.grads), list(gradients.variables), *args, **kwargs
        )
        if updates is None:
            raise TypeError(
                f"apply_grads of {self._opt!r} must return a list of mtf operations, got None. "
                "Return an empty list for no operations."
            )
        inside = getattr(self._opt, "variables", None)
        updates = in_order(built(updates))
        known = {*before, *(inside() if callable(inside) else ())}
        created = [v for v in gradients.graph.all_variables if v not in known]
        written = [v for op in updates if isinstance(op, mtf.Assign) for v in op.variables]
        self.plan.part(SlotOwners).check(self._keeper, written, gradients.variables)
        self._slots.record(created, gradients.variables, tf.get_variable_scope().name)
        return updates
