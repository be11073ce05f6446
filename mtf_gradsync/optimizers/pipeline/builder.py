"""Makes the operations of a training step from a stack of wrappers, in the order of its stages."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Callable, Iterator, Mapping, Sequence

from mtf_gradsync._common import counted, some_of, warn_once
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients.arguments import OwnArguments
from mtf_gradsync.gradients.flow import Cause
from mtf_gradsync.gradients.operations import dims_to_sum
from mtf_gradsync.gradients.recoverable import Apart, mixed_gradients
from mtf_gradsync.gradients.reduce_gradients import scatter_gradients
from mtf_gradsync.gradients.shards import shard_dims_in, split_into_shards, sum_gradients
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.optimizers.pipeline.forms import (
    Form,
    GradientSet,
    PerShard,
    Reduced,
    finished,
    gathered,
    in_dtypes_of,
)
from mtf_gradsync.optimizers.pipeline.stack import Partition, Reduction, Stack
from mtf_gradsync.optimizers.pipeline.strategy_state import reduce_by_strategy
from mtf_gradsync.optimizers.state.slots import (
    SlotBook,
    SlotOwners,
    note_slots,
    tell_of_names_and_dtypes,
    written_by,
)
from mtf_gradsync.optimizers.state.variables import UpdateCounters
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.reduce.strategy import Compression
from mtf_gradsync.step import (
    Branch,
    Conditional,
    Gate,
    StepPlan,
    WriteOrder,
    built,
    gated_update,
    values_after,
    write_in_order,
)


class StepConditions:
    """The operations of a step that is being built, and their conditions.

    Attributes:
      plan: the plan of the mtf graph.
      updated: int32 scalar, 1 if the step has an update, else 0; None if every step counts as one.
      agree: combines booleans of the islands, if there are any: true on all of them, or on any.
    """

    plan: StepPlan

    def __init__(self) -> None:
        self._lists: list[list[mtf.Operation]] = [[]]
        self._branches = contextlib.ExitStack()
        self.updated: mtf.Tensor | None = None
        self.agree: Callable[[mtf.Tensor, bool], mtf.Tensor] | None = None
        self._if_finite: list[Callable[[mtf.Tensor, mtf.Tensor | None], object]] = []

    def add(self, operations: Sequence[mtf.Operation]) -> None:
        """Adds operations to the step, or to its open branch."""
        self._lists[-1].extend(operations)

    def only_when(
        self,
        due: mtf.Tensor,
        gate: Gate | None,
        behind: Sequence[mtf.Operation] = (),
        as_call: bool = True,
        counts_every_step: bool = False,
        at_end: Callable[[], Sequence[mtf.Operation]] = list,
    ) -> None:
        """Opens a branch: all later operations of the pipeline run on some steps only.

        Inside another branch, operations run on steps where both conditions hold. With
        `counts_every_step`, steps without an update advance the global step, too. The other
        arguments are as for `branch_when`.
        """
        if not counts_every_step and not self.plan.is_in_branch and self.updated is None:
            self.updated = mtf.cast(due, tf.int32)
        self._branches.enter_context(self.branch_when(due, gate, behind, as_call, at_end))

    def agreed(self, holds: mtf.Tensor, by_any: bool = False) -> mtf.Tensor:
        """Returns whether a boolean scalar is true on all islands; with `by_any`, on one of them.

        Stages use it if a decision depends on gradients, as inside `OuterOptimizer` each island has
        its own. Without islands it is the scalar itself.
        """
        return holds if self.agree is None else self.agree(holds, by_any)

    def when_finite_is_known(self, then: Callable[[mtf.Tensor, mtf.Tensor | None], object]) -> None:
        """Registers a function to call with the answers of a later `tell_finite`.

        The stage that calls it knows which shards it skips.
        """
        self._if_finite.append(then)

    def tell_finite(self, make: Callable[[], tuple[mtf.Tensor, mtf.Tensor | None]]) -> None:
        """Tells outer stages whether gradients are finite, and whether there are data.

        `make` makes these boolean scalars; None in place of the second if it always has some.
        Gradients of skipped shards do not count, unless all shards are skipped. Call it before the
        branch of the update is opened.
        """
        if self._if_finite:
            finite, has_data = make()
            for then in self._if_finite:
                then(finite, has_data)

    @contextlib.contextmanager
    def branch_when(
        self,
        due: mtf.Tensor,
        gate: Gate | None,
        behind: Sequence[mtf.Operation] = (),
        as_call: bool = False,
        at_end: Callable[[], Sequence[mtf.Operation]] = list,
    ) -> Iterator[None]:
        """Adds operations that are made inside the block to a branch that some steps skip.

        Args:
          due: a boolean scalar, the same on all processors.
          gate: the point of the step that the branch waits for; None inside another branch.
          behind: operations of the step that the branch waits for, too.
          as_call: as for `Conditional`.
          at_end: makes the last operations of the branch, which run even if the condition of a
            branch inside does not hold.
        """
        branch = Branch(self.plan)
        self._lists.append(branch.updates)
        with branch.opened():
            yield
            branch.updates.extend(at_end())
        self._lists.pop()
        self.add(Conditional(due, gate, branch, behind, as_call).updates)

    def run_when(
        self, due: mtf.Tensor, gate: Gate | None, make: Callable[[], Sequence[mtf.Operation]]
    ) -> None:
        """Adds operations that run on some steps only, without a branch for later ones."""
        with self.branch_when(due, gate):
            self.add(make())

    def gate(self, tensors: Sequence[mtf.Tensor]) -> Gate | None:
        """Makes a gate for tensors and all reads; None inside a branch, which waits itself."""
        return None if self.plan.is_in_branch else Gate(self.plan, tensors)

    def write(self, writes: Sequence[mtf.Operation], gate: Gate | None) -> None:
        """Adds assignments that wait for a gate."""
        if gate is not None:
            gate.hold(writes)
        self.add(writes)


class StepBuilder(StepConditions):
    """A training step that is being built.

    Attributes:
      received: for each wrapper, from the outside in, the gradients that it received.
      passed_on: for each wrapper, in the same order, the gradients that it passed on.
      per_shard: per-shard gradients that a stage has recovered; None if there are none.
      stack: the stack that the step is made of.
      reduced_first: the first reduction; None before.
      compressions: the reports of compressing strategies on the bytes that they save.
      counts_without_data: the variable that counts updates without data; None without weights.
      without_data: int32 scalar, updates that were skipped so far as their weights were 0, after
        the step; None without weights.
    """

    def __init__(self, stack: Stack, slots: SlotBook, arguments: OwnArguments, keeper: Any):
        """Describes the step of a stack of wrappers; builds nothing.

        Args:
          stack: the stack, completed.
          slots: records the variables that the step creates.
          arguments: arguments of the inner `apply_grads` after gradients and variables.
          keeper: the optimizer that keeps the slots: the stack's, or one inside it.
        """
        super().__init__()
        self.stack = stack
        self._slots, self._arguments, self._keeper = slots, arguments, keeper
        self._number = 0  # of the wrapper whose stages are being built
        self._notes: list[Callable[[], None]] = []
        self._around: list[Callable[..., list[mtf.Operation]]] = []
        self._after: list[tuple[bool, Callable[..., Sequence[mtf.Operation]]]] = []
        self._at_end: list[Callable[..., Sequence[mtf.Operation]]] = []
        self.received: list[GradientSet] = []
        self.passed_on: list[GradientSet] = []
        self.per_shard: GradientSet | None = None
        self.reduced_first: Reduced | None = None
        self.compressions: list[Compression] = []
        # Of strategies that reduce gradients: those that did, the gradients of which variables, and
        # their new state, which is not written yet.
        self._strategies: list[Strategy] = []
        self._by_strategy: set[mtf.Variable] = set()
        self._new_state: list[tuple[mtf.Variable, mtf.Tensor]] = []
        self.without_data: mtf.Tensor | None = None
        self.counts_without_data: mtf.Variable | None = None
        self._shown: dict[mtf.Variable, mtf.Variable] = {}
        self._shown_after: list[mtf.Operation] = []

    def build(self, gradients: GradientSet) -> list[mtf.Operation]:
        """Returns the operations of the step, from the gradients for the outermost wrapper."""
        self.plan = StepPlan.of(gradients.graph)
        before = set(gradients.graph.operations)
        segments = self.stack.segments
        with self._branches:
            # 1. The stages, from the outside in; some open branches for all that follows.
            for stage in self.stack.first:
                gradients = stage.apply(gradients, self)
            for self._number, segment in enumerate(segments):
                self.received.append(gradients)
                for stage in segment.stages:
                    gradients = stage.apply(gradients, self)
                self.passed_on.append(gradients)
            for stage in self.stack.last:
                gradients = stage.apply(gradients, self)
            # 2. The update.
            self.write_state()
            gradients = in_dtypes_of(self.stack.opt, gradients)
            self.passed_on[-1] = gradients

            def update() -> list[mtf.Operation]:
                made = self._update(gradients, self._around)
                # Counters of updates advance that nothing else advances.
                counters = self.plan.known_extension(UpdateCounters)
                meshes = {v.mesh for v in gradients.variables}
                return [*made, *(counters.advances(gradients.graph, meshes) if counters else [])]

            updates = gated_update(update, gradients.grads)
            self.add(updates)
            # 3. What follows an update, innermost first; what reads values for evaluation last.
            for _, make in sorted(reversed(self._after), key=lambda pair: pair[0]):
                self.add(make(updates))
        # 4. What every step ends with.
        (operations,) = self._lists
        for make in reversed(self._at_end):
            self.add(make(list(operations)))
        if self.counts_without_data is not None:
            (self.without_data,) = values_after([self.counts_without_data], operations)
        for note in self._notes:
            note()
        for one in (segment.reduction for segment in segments):
            if one.reduces_gradients and one.strategy not in self._strategies:
                warn_once(
                    f"unused {one.name}",
                    "No gradients are reduced by %s, the reducer of %s: another wrapper of its "
                    "stack, %s, reduces them. Give it to the outermost wrapper that reduces, and "
                    "to ShardedUpdateOptimizer if updates are sharded.",
                    type(one.strategy).__name__,
                    one.name,
                    self.names,
                )
        made = [op for op in gradients.graph.operations if op not in before]
        self.plan.extension(WriteOrder).one_step(made)
        return operations

    @property
    def names(self) -> list[str]:
        """The names of the wrappers, from the outside in."""
        return [segment.reduction.name for segment in self.stack.segments]

    # For stages.

    def state(self, wrapper: Any, make: Callable[[], Any]) -> Any:
        """Returns a wrapper's variables in this graph, which the first call makes.

        Raises a ValueError if another wrapper of its name has some in this graph.
        """
        return self.plan.state(wrapper, wrapper.name, make)

    def around_update(self, update: Callable[..., list[mtf.Operation]]) -> None:
        """Registers a function to make the update.

        It is called with gradients and a function that makes the operations of the update inside
        from gradients, and returns the operations of the update.
        """
        self._around.append(update)

    def after_update(
        self, make: Callable[[list[mtf.Operation]], Sequence[mtf.Operation]], is_shown: bool = False
    ) -> None:
        """Registers a function that makes operations for steps with an update, to run after it.

        It is called with the operations of the update; `value_after` gives the new value of a
        variable. The innermost wrapper's functions are called first. Functions that read values for
        evaluation (`is_shown`) are called last, as others may replace these values (`show`).
        """
        self._after.append((is_shown, make))

    def at_end(self, make: Callable[[list[mtf.Operation]], Sequence[mtf.Operation]]) -> None:
        """Registers a function that makes operations for every step from all others of the step."""
        self._at_end.append(make)

    def axes_now(self, grads: Sequence[mtf.Tensor]) -> ReplicaAxes | None:
        """Returns `Stack.axes_now` for the wrapper whose stages are being built."""
        return self.stack.axes_now(self._number, grads)

    def shards_to_name(self, grads: Sequence[mtf.Tensor]) -> tuple[ReplicaAxes | None, bool]:
        """Returns `Stack.shards_to_name` for the wrapper whose stages are being built."""
        return self.stack.shards_to_name(self._number, grads)

    def when_built(self, note: Callable[[], None]) -> None:
        """Registers a function to call once the step was built without an error."""
        self._notes.append(note)

    def show(
        self, shown: Mapping[mtf.Variable, mtf.Variable], writes: Sequence[mtf.Operation]
    ) -> None:
        """Makes `value_after` read other variables, after the operations `writes`.

        `shown` has for each variable the variable to read instead.
        """
        self._shown = {**self._shown, **shown}
        self._shown_after += writes

    def write_state(self, when: Callable[[], mtf.Tensor] | None = None) -> None:
        """Writes strategies' new state from the reductions since the last call.

        The builder calls it for the update; a stage that adds up reduced gradients calls it itself.
        `when` makes a boolean scalar, the same on all processors. Where it is false, the state does
        not change; give it if some steps do not use the sums.
        """
        state, self._new_state = self._new_state, []
        if not state:
            return

        def writes() -> list[mtf.Operation]:
            return [mtf.assign(variable, value) for variable, value in state]

        gate = self.gate([value for _, value in state])
        if when is None:
            self.write(writes(), gate)
        else:
            self.run_when(when(), gate, writes)

    def reduced(
        self, gradients: GradientSet, reduction: Reduction, partition: Partition | None
    ) -> GradientSet:
        """Reduces gradients over the mesh, divides them by their divisor and casts them.

        With a partition each replica gets its part. Without, parts are divided and then gathered.
        `reduce_now` is for values that are not the gradients of the step.
        """
        given, unreduced = gradients.present, gradients
        if gradients.form is Form.PART:
            of_sums = finished(gradients, self.stack.opt)
            return of_sums if partition is not None else gathered(of_sums)
        if partition is None:
            strategy = reduction.strategy
            gradients = self.reduce_now(gradients, reduction)
        else:
            axes, strategy, shapes_of, name = partition
            own = Reduction(strategy, axes.batch_dims, axes, name)
            gradients = self._reduced_by_strategy(gradients, own)
            unscattered = gradients.present
            of_parts = shapes_of(gradients.owners)
            shapes = [of_parts.get(v, v.shape) for v in gradients.owners]
            sources, parts = scatter_gradients(
                unscattered, gradients.owners, shapes, axes, strategy
            )
            given = [s if x is y else x for x, y, s in zip(given, unscattered, sources)]
            gradients = gradients.with_present(parts, Form.PART)
        if self.reduced_first is None:
            branch = self.plan.open_branch
            self.reduced_first = Reduced(given, gradients.present, branch, strategy)
        if not unreduced.form.is_reduced:
            gradients = dataclasses.replace(gradients, unreduced=unreduced)
        return finished(gradients, self.stack.opt)

    def reduce_now(
        self,
        gradients: GradientSet,
        reduction: Reduction,
        extra: bool = False,
        is_mean: bool = False,
    ) -> GradientSet:
        """Reduces gradients over the mesh, never to parts, without division and casts.

        `extra` is for values that are not the step's gradients: a strategy may keep state for both,
        under names of their own. With `is_mean` their sum is divided by the number of shards.
        """
        gradients = self._reduced_by_strategy(gradients, reduction, extra, is_mean)
        dims = dims_to_sum(gradients.present, gradients.owners)
        sums = sum_gradients(gradients.present, dims, reduction.strategy, reduction.batch_dims)
        return gradients.with_present(sums, Form.REDUCED)

    def _reduced_by_strategy(
        self,
        gradients: GradientSet,
        reduction: Reduction,
        extra: bool = False,
        is_mean: bool = False,
    ) -> GradientSet:
        """Reduces pending gradients by a strategy with its own reduction, each once a step."""
        if gradients.form.is_reduced or not reduction.reduces_gradients:
            return gradients
        before = set() if extra else self._by_strategy
        made = reduce_by_strategy(gradients, reduction, before, self._slots, extra, is_mean)
        self._strategies.append(reduction.strategy)
        self._new_state += made.new_state
        self.compressions += made.compressions
        if not extra:
            self._by_strategy.update(made.sums)
        return gradients.with_grads(
            [made.sums.get(v, g) for g, v in zip(gradients.grads, gradients.variables)]
        )

    def value_after(
        self, variables: Sequence[mtf.Variable], updates: Sequence[mtf.Operation]
    ) -> Sequence[mtf.Tensor]:
        """Returns variables' values after operations; see `mtf_gradsync.step.values_after`.

        For a variable that `show` replaced, it is the value of the replacement.
        """
        shown = [self._shown.get(v, v) for v in variables]
        return values_after(shown, [*updates, *self._shown_after])

    def split_by_shard(
        self, gradients: GradientSet, reduction: Reduction, request: PerShard
    ) -> GradientSet:
        """Returns per-shard gradients; the request says what to do with mixed ones."""
        grads, axes = gradients.grads, reduction.axes
        assert axes is not None  # wrappers with such stages know the mesh
        own = [None if g is None or shard_dims_in(g.shape, axes) else g for g in grads]
        apart = Apart(own, axes)
        found = mixed_gradients(own, axes) if request.adds_up else apart.mixed
        made = apart.made_of_sums if request.remakes else {}
        shared = apart.shared if request.remakes else ()
        if request.mixed == "refuse" and not request.adds_up:
            apart.check([f"variable {v.name!r}" for v in gradients.variables], request.remakes)
        # Where an operation drops the sum, reduced gradients would differ between shards.
        mixed = {
            i: operation
            for i, (operation, cause) in found.items()
            if request.mixed == "reduce" and cause is not Cause.DROPS_SUM and i not in made
        }
        if mixed and request.warning:
            which = counted([gradients.variables[i].name for i in mixed], "variable")
            mixing = some_of(list(dict.fromkeys(repr(op.name) for op in mixed.values())))
            warn_once(request.warning, request.warning, reduction.name, which, mixing)
        reduced = [grads[i] if i in made else None for i in range(len(grads))]
        to_reduce = {*mixed, *shared}
        if to_reduce:
            some = [g if i in to_reduce else None for i, g in enumerate(grads)]
            now = self.reduce_now(gradients.with_grads(some), reduction).grads
            reduced = [x if r is None else r for x, r in zip(now, reduced)]
        others = [None if r is not None else g for r, g in zip(reduced, grads)]
        strategy = reduction.other_axes or reduction.strategy
        shards = split_into_shards(others, axes, strategy, accept_summed=request.mixed != "refuse")
        result = gradients.with_grads(
            [s if r is None else r for r, s in zip(reduced, shards)],
            Form.PER_SHARD,
            already_reduced=frozenset({*to_reduce, *made}),
            made_of_sums=made,
        )
        if not (apart.mixed or apart.shared or gradients.form.is_reduced):
            self.per_shard = result
        return result

    def _update(
        self, gradients: GradientSet, around: Sequence[Callable[..., list[mtf.Operation]]]
    ) -> list[mtf.Operation]:
        """Makes the inner optimizer's update, inside all functions of `around_update`."""
        if around:
            first, *others = around
            return first(gradients, lambda given: self._update(given, others))
        before = set(gradients.graph.all_variables)
        args, kwargs = self._arguments
        opt = self.stack.opt
        with self.plan.building_inside(self.stack.islands):
            updates = opt.apply_grads(
                list(gradients.grads), list(gradients.variables), *args, **kwargs
            )
        if updates is None:
            raise TypeError(
                f"apply_grads of {opt!r} must return a list of mtf operations, got None. "
                "Return an empty list for no operations."
            )
        inside = getattr(opt, "variables", None)
        updates = write_in_order(built(updates))
        known = {*before, *(inside() if callable(inside) else ())}
        created = [v for v in gradients.graph.all_variables if v not in known]
        written = written_by(updates)
        self.plan.extension(SlotOwners).check(self._keeper, written, gradients.variables)
        note_slots(written, gradients.variables)
        self._slots.record(created, gradients.variables, tf.get_variable_scope().name)
        tell_of_names_and_dtypes(opt, gradients.variables)
        return updates
