"""Makes the operations of a training step from a stack of wrappers, in the order of its stages."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Callable, Iterator, Mapping, Sequence

from mtf_gradsync._common import counted, some_of, warn_once
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients.arguments import PassedOnArguments
from mtf_gradsync.gradients.flow import Cause
from mtf_gradsync.gradients.operations import dims_to_sum
from mtf_gradsync.gradients.reduce_gradients import scatter_gradients
from mtf_gradsync.gradients.shards import (
    Recoverability,
    mixed_gradients,
    shard_dims_in,
    split_into_shards,
    sum_gradients,
)
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.optimizers.pipeline.forms import (
    Form,
    GradientSet,
    Mask,
    Partition,
    PerShard,
    Reduced,
    ReductionSettings,
    cast_for,
    divide_and_cast,
    gather_parts,
)
from mtf_gradsync.optimizers.pipeline.stack import Condition, Stack, Stage, in_blocks
from mtf_gradsync.optimizers.pipeline.strategy_state import ReductionsByStrategies
from mtf_gradsync.optimizers.slots import (
    SlotBook,
    SlotOwners,
    note_slots,
    warn_of_names_and_dtypes,
    written_by,
)
from mtf_gradsync.optimizers.state import UpdateCounters
from mtf_gradsync.step.conditional import Branch, Conditional, values_after
from mtf_gradsync.step.plan import StepPlan, resolve_stand_ins
from mtf_gradsync.step.writes import Gate, WriteOrder, gated_update, write_in_order


class StepBuilder:
    """A training step that is being built.

    Attributes:
      plan: the plan of the mtf graph.
      updated: int32 scalar, 1 if the step has an update, else 0; None if every step counts as an
        update.
      received: the gradients that each wrapper received, from the outermost wrapper to the
        innermost.
      passed_on: the gradients that each wrapper passed on, in the same order.
      per_shard: per-shard gradients that a stage has recovered; None if there are none.
      mixed: for each wrapper that has recovered per-shard gradients, by its name, the variables
        whose gradients are reduced instead, because shards are mixed in them.
      stack: the stack that the step is made of.
      reduced_first: the first reduction of gradients in the step; None before any reduction.
      compressions: the reports of compressing strategies on the bytes that they save.
      counts_without_data: the variable that counts updates that were skipped because their weights
        were 0; None without weights.
      without_data: int32 scalar, the value of that variable after the step; None without weights.
    """

    plan: StepPlan

    def __init__(self, stack: Stack, slots: SlotBook, arguments: PassedOnArguments, keeper: Any):
        """Sets what the step is made of. Nothing is built before `build` is called.

        Args:
          stack: the completed stack.
          slots: the `SlotBook` in which the variables that the step creates are recorded.
          arguments: the arguments for `apply_grads` of the inner optimizer, without gradients and
            variables.
          keeper: the optimizer that owns the slots: the inner optimizer of the stack, or an
            optimizer inside it.
        """
        self.stack = stack
        self._lists: list[list[mtf.Operation]] = [[]]
        self.updated: mtf.Tensor | None = None
        self._if_finite: list[Callable[[mtf.Tensor, mtf.Tensor | None], object]] = []
        self._slots, self._arguments, self._keeper = slots, arguments, keeper
        # Of the stage that is being built: the number of its wrapper, and the islands around it.
        self._number, self._islands = 0, self.stack.segments[0].islands
        self._notes: list[Callable[[], None]] = []
        self._around: list[Callable[..., list[mtf.Operation]]] = []
        self._after: list[tuple[bool, Callable[..., Sequence[mtf.Operation]]]] = []
        self._at_end: list[Callable[..., Sequence[mtf.Operation]]] = []
        self.received: list[GradientSet] = []
        self.passed_on: list[GradientSet] = []
        self.per_shard: GradientSet | None = None
        self.mixed: dict[str, list[mtf.Variable]] = {}
        self.reduced_first: Reduced | None = None
        self._by_strategies = ReductionsByStrategies(slots)
        self.compressions = self._by_strategies.compressions
        self.without_data: mtf.Tensor | None = None
        self.counts_without_data: mtf.Variable | None = None
        self._shown: dict[mtf.Variable, mtf.Variable] = {}
        self._shown_after: list[mtf.Operation] = []

    def build(self, gradients: GradientSet) -> list[mtf.Operation]:
        """Makes and returns the operations of the step, for the gradients given to the stack."""
        self.plan = StepPlan.of(gradients.graph)
        before = set(gradients.graph.operations)
        segments = self.stack.segments
        with contextlib.ExitStack() as branches:
            # 1. The stages, the outermost first: each block of them in a branch of the one before.
            for block in in_blocks(self.stack):
                if block.condition is not None:
                    gradients = branches.enter_context(
                        self._open_branch(block.condition, gradients)
                    )
                for number, stage in block.stages:
                    gradients = self._apply_stage(number, stage, gradients)
            self._record_received(len(segments) - 1, gradients)
            # 2. The update.
            self.write_state()
            gradients = cast_for(self.stack.opt, gradients)
            self.passed_on = [*self.received[1:], gradients]

            def update() -> list[mtf.Operation]:
                made = self._update(gradients, self._around)
                # Counters of updates that nothing else advances are advanced here.
                counters = self.plan.known_extension(UpdateCounters)
                meshes = {v.mesh for v in gradients.variables}
                return [*made, *(counters.advances(gradients.graph, meshes) if counters else [])]

            updates = gated_update(update, gradients.grads)
            self.add(updates)
            # 3. Operations after an update: the innermost wrapper first, `is_shown` ones last.
            for _, make in sorted(reversed(self._after), key=lambda pair: pair[0]):
                self.add(make(updates))
        # 4. The last operations of every step.
        (operations,) = self._lists
        for make in reversed(self._at_end):
            self.add(make(list(operations)))
        if self.counts_without_data is not None:
            (self.without_data,) = values_after([self.counts_without_data], operations)
        for note in self._notes:
            note()
        for one in (segment.reduction for segment in segments):
            if one.reduces_gradients and one.strategy not in self._by_strategies.strategies:
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
        self.plan.extension(WriteOrder).declare_one_update(made)
        return operations

    def _record_received(self, number: int, gradients: GradientSet) -> None:
        """Records the gradients that wrapper `number` received, if there is no record for it yet.

        Wrappers have the numbers 0, 1, ... from the outermost. A wrapper without stages passes on
        what it receives, so wrappers before `number` that have no record get the same record.
        """
        missing = number + 1 - len(self.received)
        self.received += [gradients] * missing

    def _apply_stage(self, number: int | None, stage: Stage, given: GradientSet) -> GradientSet:
        """Makes the operations of a stage; returns the gradients for the next stage.

        `number` is the number of the stage's wrapper, from the outermost (0); None for a stage that
        belongs to no wrapper. `given` are the gradients for the stage.
        """
        if number is not None:
            self._record_received(number, given)
            self._number, self._islands = number, self.stack.segments[number].islands
        elif self.received:  # the last stages, behind those of all wrappers
            self._islands = self.stack.islands
        gradients = stage.apply(given, self)
        if gradients.mask is not None:
            self._publish_finite(gradients.mask)
        if (gradients.condition is None) != (stage.condition is None):
            kind = type(stage).__name__
            raise TypeError(
                f"{kind} needs both or neither: a condition, which says that all that comes after "
                "it runs in some steps only, and a method apply that returns "
                "gradients.only_when(...)."
            )
        return gradients

    def _publish_finite(self, mask: Mask) -> None:
        """Calls the functions that outer stages have registered by `when_finite_is_known`.

        `mask` is the mask of a stage that adds up gradients. If it says which shards are asked to
        contribute, and all of them are skipped because of their gradients, `finite` is false.
        """
        if self._if_finite and mask.asked is not None:
            # If no shard was asked to contribute, no gradient stopped one.
            number = mtf.reduce_sum(mtf.anonymize(mtf.cast(mask.asked, tf.int32)))
            asked, some = mtf.greater(number, 0), mtf.greater(mask.number, 0)
            finite = mtf.logical_or(some, mtf.logical_not(asked))
            for then in self._if_finite:
                then(finite, asked)

    @contextlib.contextmanager
    def _open_branch(self, condition: Condition, gradients: GradientSet) -> Iterator[GradientSet]:
        """Opens the branch in which a block of stages runs, for the time of a `with` block.

        `condition` is the condition of the block, and `gradients` are what the stage before the
        block returned. The gradients for the stages in the branch are the value of `with ... as`.
        """
        assert gradients.condition is not None  # as `_apply_stage` has checked
        holds, gate, wait_for, first, last = gradients.condition
        if not condition.counts_every_step and not self.plan.is_in_branch and self.updated is None:
            self.updated = mtf.cast(holds, tf.int32)
        gradients = dataclasses.replace(gradients, condition=None)  # they exist outside, too
        with self.branch_when(holds, gate, wait_for, condition.as_call):
            yield gradients if first is None else first(gradients)
            self.add(last())

    @property
    def names(self) -> list[str]:
        """The names of the wrappers, the outermost first."""
        return [segment.reduction.name for segment in self.stack.segments]

    # For stages.

    def state(self, wrapper: Any, make: Callable[[], Any]) -> Any:
        """Returns a wrapper's own variables in this graph, in whatever structure `make` returns.

        Only the first call for a wrapper and a graph calls `make`; later calls return the same
        variables. Raises ValueError if another wrapper of the same name has variables in the graph.
        """
        return self.plan.state(wrapper, wrapper.name, make)

    def add(self, operations: Sequence[mtf.Operation]) -> None:
        """Adds operations to the branch that is open, or else to the step."""
        self._lists[-1].extend(operations)

    def when_finite_is_known(self, then: Callable[[mtf.Tensor, mtf.Tensor | None], object]) -> None:
        """Registers a function to call as `then(finite, has_data)` when these scalars are known.

        `finite` is a boolean scalar: whether the gradients of the shards that are not skipped are
        finite. `has_data` is a boolean scalar: whether any shard has data in this step; None if
        there always are data. Both scalars are computed from the mask of the stage that skips
        shards. This stage is inside the stage that calls `when_finite_is_known`, so that its
        operations, and the scalars, are made later.
        """
        self._if_finite.append(then)

    @contextlib.contextmanager
    def branch_when(
        self,
        due: mtf.Tensor,
        gate: Gate | None,
        wait_for: Sequence[mtf.Operation] = (),
        as_call: bool = False,
    ) -> Iterator[None]:
        """Adds a branch to the step: the operations that are added inside the `with` block.

        Args:
          due: a boolean scalar, the same on all processors: whether a step runs the branch.
          gate: the gate (which holds back writes) that the branch waits for; None inside another
            branch.
          wait_for: operations of the step that the branch waits for, too.
          as_call: whether the branch is one function call, which makes steps without it cheap.
        """
        branch = Branch(self.plan)
        self._lists.append(branch.updates)
        with branch.opened():
            yield
        self._lists.pop()
        self.add(Conditional(due, gate, branch, wait_for, as_call).updates)

    def gate(self, tensors: Sequence[mtf.Tensor]) -> Gate | None:
        """Returns a gate, which holds back writes until `tensors` exist and all variables are read.

        While a branch of the step is open, the result is None, because a branch waits as a whole.
        """
        return None if self.plan.is_in_branch else Gate(self.plan, tensors)

    def write(self, writes: Sequence[mtf.Operation], gate: Gate | None) -> None:
        """Adds the assignments `writes` to the step; they wait for `gate` unless it is None."""
        if gate is not None:
            gate.hold(writes)
        self.add(writes)

    def around_update(self, update: Callable[..., list[mtf.Operation]]) -> None:
        """Registers a function that makes the update in place of the inner optimizer.

        The function is called as `update(gradients, make_inner)` and returns the operations of the
        update. It can call `make_inner(gradients)`, which returns the operations that the inner
        optimizer or the next registered function makes for these gradients.
        """
        self._around.append(update)

    def after_update(
        self, make: Callable[[list[mtf.Operation]], Sequence[mtf.Operation]], is_shown: bool = False
    ) -> None:
        """Registers a function that makes operations to run after the update, in steps with one.

        `make` is called with the operations of the update, and returns the operations that it adds.
        In `make`, `value_after` gives the new values of variables. Functions of the innermost
        wrapper are called first. `is_shown` says that `make` reads the values that evaluation uses.
        Functions with `is_shown` are called last, because other functions may change, by `show`,
        which values evaluation uses.
        """
        self._after.append((is_shown, make))

    def at_end(self, make: Callable[[list[mtf.Operation]], Sequence[mtf.Operation]]) -> None:
        """Registers a function that makes the last operations of every step.

        `make` is called with the operations that the step has so far, and returns the operations to
        add. The function that was registered last is called first.
        """
        self._at_end.append(make)

    def axes_now(self, grads: Sequence[mtf.Tensor]) -> ReplicaAxes | None:
        """Returns the replica axes for the stage that is being built; None if they are not known.

        The axes are those that the stage's wrapper, or the first wrapper inside that wrapper, was
        given, or else those of the program that computed `grads`.
        """
        return self.stack.axes_now(self._number, grads)

    def shard_numbering(self, given: GradientSet) -> tuple[ReplicaAxes | None, bool]:
        """Returns how log lines of the stage that is being built number the shards, as two values.

        The first value has the replica axes whose shards are numbered: those of the whole mesh,
        also inside islands; None if they are not known, or if gradients are replicas' parts of
        sums, which tell nothing of a shard's own gradient. The second value is true if a reduced
        gradient is a sum over several of these shards. It is false inside islands of one shard
        each, where a reduced gradient belongs to a single shard. `given` are the gradients that the
        stage's wrapper has received.
        """
        if (given.unreduced or given).form is Form.PART:
            return None, True
        return self.stack.shard_numbering(self._number, given.present)

    def when_built(self, note: Callable[[], None]) -> None:
        """Registers a function that is called once the whole step was built without an error.

        `note` is the function. It may set a wrapper's attributes that describe the step, for
        example.
        """
        self._notes.append(note)

    def show(
        self, shown: Mapping[mtf.Variable, mtf.Variable], writes: Sequence[mtf.Operation]
    ) -> None:
        """Makes `value_after` read other variables in the place of some, as evaluation does.

        `shown` has, for each replaced variable, the variable that is read in its place.
        `value_after` reads these variables after `writes`, the operations that write them.
        """
        self._shown = {**self._shown, **shown}
        self._shown_after += writes

    def agreed(self, holds: mtf.Tensor, by_any: bool = False) -> mtf.Tensor:
        """Returns whether a boolean scalar is true on all islands; with `by_any`, on any island.

        Stages use this method for decisions that depend on gradients, because inside
        `OuterOptimizer` each island has gradients of its own. Without islands the result is
        `holds`, the boolean scalar that the method was given.
        """
        return holds if self._islands is None else self._islands.agree(holds, by_any)

    def write_state(self, when: Callable[[], mtf.Tensor] | None = None) -> None:
        """Adds the writes of strategies' new state, from all reductions since the last call.

        The builder calls this method before the update. A stage that adds up reduced gradients
        calls the method itself. `when` is for stages that do not use the reduced gradients in every
        step: a function that makes a boolean scalar, the same on all processors. In steps in which
        the scalar is false, the state does not change. If `when` is None, the state is written in
        every step.
        """
        state, self._by_strategies.new_state = self._by_strategies.new_state, []
        if not state:
            return
        gate = self.gate([value for _, value in state])
        if when is None:
            self.write([mtf.assign(variable, value) for variable, value in state], gate)
            return
        with self.branch_when(when(), gate):
            self.add([mtf.assign(variable, value) for variable, value in state])

    def reduce_and_divide(
        self, gradients: GradientSet, by: ReductionSettings | Partition
    ) -> GradientSet:
        """Reduces gradients over the mesh, divides them by their set's divisor, and casts them.

        If `by` is a partition, each replica gets its part of a gradient. If `by` is a reduction,
        gradients that are parts already are divided and then gathered. For other values than the
        gradients of the step, use `reduce_now`.
        """
        given, unreduced = gradients.present, gradients
        if gradients.form is Form.PART:
            of_sums = divide_and_cast(gradients, self.stack.opt)
            return of_sums if isinstance(by, Partition) else gather_parts(of_sums)
        if isinstance(by, Partition):
            axes, strategy, shapes_of, name = by
            own = ReductionSettings(strategy, axes.batch_dims, axes, name)
            if own.reduces_gradients:
                gradients = self._by_strategies.reduce(gradients, own)
            unscattered = gradients.present
            of_parts = shapes_of(gradients.owners)
            shapes = [of_parts.get(v, v.shape) for v in gradients.owners]
            sources, parts = scatter_gradients(
                unscattered, gradients.owners, shapes, axes, strategy
            )
            given = [s if x is y else x for x, y, s in zip(given, unscattered, sources)]
            gradients = gradients.with_present(parts, Form.PART)
        else:
            gradients = self.reduce_now(gradients, by)
        if self.reduced_first is None:
            branch = self.plan.open_branch
            self.reduced_first = Reduced(given, gradients.present, branch, by.strategy)
        if not unreduced.form.is_reduced:
            gradients = dataclasses.replace(gradients, unreduced=unreduced)
        return divide_and_cast(gradients, self.stack.opt)

    def reduce_now(
        self,
        gradients: GradientSet,
        reduction: ReductionSettings,
        extra: bool = False,
        is_mean: bool = False,
    ) -> GradientSet:
        """Returns the full sums of gradients over the mesh, as `Form.REDUCED`, on all replicas.

        The sums are not divided and not cast yet.

        Args:
          gradients: gradients in any form, of variables or of pieces of variables (ranges of the
            numbers in each core's slice).
          reduction: the settings of the reduction.
          extra: whether `gradients` holds other values than the step's gradients. A strategy may
            keep state for both, under different names.
          is_mean: whether the caller divides the sums by the number of shards. If a run goes on
            with another number of shards, the mean of the strategy's state over the old shards is
            kept if `is_mean` is true, and the sum if it is false.
        """
        if reduction.reduces_gradients:
            gradients = self._by_strategies.reduce(gradients, reduction, extra, is_mean)
        dims = dims_to_sum(gradients.present, gradients.owners)
        sums = sum_gradients(gradients.present, dims, reduction.strategy, reduction.batch_dims)
        return gradients.with_present(sums, Form.REDUCED)

    def value_after(
        self, variables: Sequence[mtf.Variable], updates: Sequence[mtf.Operation]
    ) -> Sequence[mtf.Tensor]:
        """Returns the values that variables have after the operations `updates`, as mtf tensors.

        The list is in the order of `variables`. If `show` has named another variable to be read in
        the place of one of `variables`, the value is that of the other variable.
        """
        shown = [self._shown.get(v, v) for v in variables]
        return values_after(shown, [*updates, *self._shown_after])

    def split_by_shard(
        self, gradients: GradientSet, reduction: ReductionSettings, request: PerShard
    ) -> GradientSet:
        """Returns gradients with one gradient per shard, as `Form.PER_SHARD`.

        `request` says what to do about gradients in which shards are mixed. `reduction` has the
        replica axes, and the strategy by which such gradients are reduced if `request` says so.
        """
        grads, axes = gradients.grads, reduction.axes
        assert axes is not None  # wrappers with such stages know the mesh
        own = [None if g is None or shard_dims_in(g.shape, axes) else g for g in grads]
        recoverability = Recoverability(own, axes)
        found = mixed_gradients(own, axes) if request.adds_up else recoverability.mixed
        made = recoverability.from_sums if request.recomputes else {}
        shared = recoverability.shared if request.recomputes else ()
        if request.mixed == "refuse" and not request.adds_up:
            recoverability.check(
                [f"variable {v.name!r}" for v in gradients.variables], request.recomputes
            )
        # If an operation drops the sum, reduced gradients would differ between shards.
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
            from_sums=made,
        )
        if not gradients.form.is_reduced:
            self.mixed[reduction.name] = [gradients.variables[i] for i in mixed]
            if not (recoverability.mixed or recoverability.shared):
                self.per_shard = result
        return result

    def _update(
        self, gradients: GradientSet, around: Sequence[Callable[..., list[mtf.Operation]]]
    ) -> list[mtf.Operation]:
        """Returns the operations of the update of variables by reduced gradients.

        The first function in `around` makes the operations and may call the other functions (see
        `around_update`). If `around` is empty, the inner optimizer makes the operations.
        """
        if around:
            first, *others = around
            return first(gradients, lambda given: self._update(given, others))
        before = set(gradients.graph.all_variables)
        args, kwargs = self._arguments
        opt = self.stack.opt
        with self.plan.inside_islands(self.stack.islands):
            updates = opt.apply_grads(
                list(gradients.grads), list(gradients.variables), *args, **kwargs
            )
        if updates is None:
            raise TypeError(
                f"apply_grads of {opt!r} must return a list of mtf operations, got None. "
                "Return an empty list for no operations."
            )
        inside = getattr(opt, "variables", None)
        updates = write_in_order(resolve_stand_ins(updates))
        known = {*before, *(inside() if callable(inside) else ())}
        created = [v for v in gradients.graph.all_variables if v not in known]
        written = written_by(updates)
        self.plan.extension(SlotOwners).record_keeper(self._keeper, written, gradients.variables)
        note_slots(written, gradients.variables)
        self._slots.record(created, gradients.variables, tf.get_variable_scope().name)
        warn_of_names_and_dtypes(opt, gradients.variables)
        return updates
