"""Builds a training step from the stages of a stack of wrappers."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._warn import warn_once
from mtf_gradsync.gradients import SumGradients, on_present
from mtf_gradsync.gradients.parts import scatter_gradients
from mtf_gradsync.optimizers.pipeline.apart import reduce_apart, warn_of_unused
from mtf_gradsync.optimizers.pipeline.forms import Form, GradientSet
from mtf_gradsync.optimizers.pipeline.reduction import Partition, Reduced, Reduction
from mtf_gradsync.optimizers.pipeline.stage import Segment, Stage
from mtf_gradsync.optimizers.state.slots import SlotBook
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.step import Branch, Conditional, Gate, Plan, gated_update, values_after


class StepBuilder:
    """One training step while it is being built.

    Attributes:
      plan: the plan of the mtf graph.
      received: for each wrapper of the stack, the gradients that came to it.
      passed_on: for each wrapper, the gradients that it passed on.
      per_shard: gradients of all shards, where a stage has recovered them; None elsewhere.
      reduced: the first reduction; None before.
      updated: int32 scalar, 1 where the step has an update and 0 where not; None where every step
        counts as one.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        opt: Any,
        takes_pending: bool,
        partition: Partition | None,
        slots: SlotBook,
    ):
        """Describes the step; builds nothing.

        Args:
          segments: the wrappers' stages, from the outside in.
          opt: the inner optimizer.
          takes_pending: whether it wants gradients as they come, not reduced.
          partition: how its updates are sharded; None for whole updates.
          slots: where the slots are recorded that it makes.
        """
        self._slots = slots
        self._segments = list(segments)
        self._opt, self._takes_pending, self._partition = opt, takes_pending, partition
        self._lists: list[list[mtf.Operation]] = [[]]
        self._branches = contextlib.ExitStack()
        self._notes: list[Callable[[], None]] = []
        self._kept: list[tuple[mtf.Variable, mtf.Tensor]] = []
        self._reduced_apart: frozenset[mtf.Variable] = frozenset()
        self._used_apart: list[Strategy] = []
        self.received: list[GradientSet] = []
        self.passed_on: list[GradientSet] = []
        self.per_shard: GradientSet | None = None
        self.reduced: Reduced | None = None
        self.updated: mtf.Tensor | None = None

    def build(self, gradients: GradientSet) -> list[mtf.Operation]:
        """Builds the step.

        Args:
          gradients: what the outermost wrapper was given.

        Returns:
          The operations of the step.
        """
        self.plan = Plan.of(gradients.graph)
        with self._branches:
            for segment in self._segments:
                self.received.append(gradients)
                for stage in segment.stages:
                    gradients = self._convert(gradients, stage.takes, segment.reduction)
                    gradients = stage.apply(gradients, self)
                    gradients = self._convert(gradients, stage.gives, segment.reduction)
                self.passed_on.append(gradients)
            if not self._takes_pending:
                gradients = self.reduce(gradients, self._segments[-1].reduction)
            self.write_state()
            gradients = self._in_dtypes_of_inner(gradients)
            self.passed_on[-1] = gradients
            stages = [stage for segment in self._segments for stage in segment.stages]
            updates = self._updates(gradients, stages)
            self.add(updates)
            for stage in reversed(stages):
                self.add(stage.after_update(updates, self))
        (operations,) = self._lists
        for stage in reversed(stages):
            self.add(stage.end_of_step(list(operations), self))
        for note in self._notes:
            note()
        warn_of_unused(self._segments, self._used_apart)
        return operations

    @property
    def names(self) -> list[str]:
        """Names of the wrappers, from the outside in."""
        return [segment.name for segment in self._segments]

    # For stages.

    def add(self, operations: Sequence[mtf.Operation]) -> None:
        """Makes operations part of the step, or of the branch of it that is open."""
        self._lists[-1].extend(operations)

    def when_built(self, note: Callable[[], None]) -> None:
        """Calls a function once the whole step was built without an error."""
        self._notes.append(note)

    def only_when(
        self,
        due: mtf.Tensor,
        gate: Gate | None,
        behind: Sequence[mtf.Operation] = (),
        as_call: bool = True,
        counts_every_step: bool = False,
        at_end: Callable[[], Sequence[mtf.Operation]] = list,
    ) -> None:
        """Opens a branch: all that follows in the pipeline runs on some steps only.

        A condition inside another one holds where both do.

        Args:
          due: a boolean scalar, the same on all processors.
          gate: the point of the step that the branch waits for; None inside another branch.
          behind: operations of the step that the branch waits for, too.
          as_call: as for `Conditional`.
          counts_every_step: whether steps without an update advance the global step, too.
          at_end: makes the last operations of the branch, which run even where a condition inside
            of it does not hold.
        """
        if not counts_every_step and not self.plan.is_in_branch and self.updated is None:
            self.updated = mtf.cast(due, tf.int32)
        self._branches.enter_context(self._branch(due, gate, behind, as_call, at_end))

    def beside_when(
        self, due: mtf.Tensor, gate: Gate | None, make: Callable[[], Sequence[mtf.Operation]]
    ) -> None:
        """Adds operations that run on some steps only, beside the pipeline."""
        self.add(Conditional(due, gate, Branch(self.plan, make), [], as_call=False).updates)

    def gate(self, tensors: Sequence[mtf.Tensor]) -> Gate | None:
        """A point of the step that tensors and all reads come before; None inside a branch.

        All that a branch holds waits with it already.
        """
        return None if self.plan.is_in_branch else Gate(self.plan, tensors)

    def write(self, writes: Sequence[mtf.Operation], gate: Gate | None) -> None:
        """Adds assignments that wait for a gate."""
        if gate is not None:
            gate.hold(writes)
        self.add(writes)

    def write_state(self, when: Callable[[], mtf.Tensor] | None = None) -> None:
        """Writes what strategies keep of the reductions so far, once these are used.

        The builder does it where the update is. A stage that adds reduced gradients up does it
        there.

        Args:
          when: makes a boolean scalar, the same on all processors: where it does not hold, the sums
            are not used and the state stays. None where they are always used.
        """
        kept, self._kept = self._kept, []
        if not kept:
            return

        def writes() -> list[mtf.Operation]:
            return [mtf.assign(variable, value) for variable, value in kept]

        gate = self.gate([value for _, value in kept])
        if when is None:
            self.write(writes(), gate)
        else:
            self.beside_when(when(), gate, writes)

    def reduce(self, gradients: GradientSet, reduction: Reduction) -> GradientSet:
        """Reduces gradients over the mesh: whole, or in parts where the updates are sharded.

        Args:
          gradients: in any form.
          reduction: how; sharded updates have a way of their own.

        Returns:
          The set in form `REDUCED` or `PART`, divided by its divisor, in its dtypes.
        """
        if gradients.form.is_reduced:
            return gradients
        if self._partition is None:
            return self._finished(self.reduce_whole(gradients, reduction))
        axes, strategy, shape_of, name = self._partition
        shapes = [shape_of(v) or v.shape for v in gradients.owners]
        given = gradients.present
        gradients = self._apart(gradients, Reduction(strategy, axes.batch_dims, axes, name))
        sources, parts = scatter_gradients(
            gradients.present, gradients.owners, shapes, axes, strategy
        )
        sources = [s if x is y else x for x, y, s in zip(given, gradients.present, sources)]
        self._note(sources, parts, strategy)
        return self._finished(_replaced(gradients, parts, Form.PART))

    def reduce_whole(self, gradients: GradientSet, reduction: Reduction) -> GradientSet:
        """Reduces gradients over the mesh, whole and as they are: nothing is divided or cast."""
        given = gradients.present
        if not given:
            return gradients
        gradients = self._apart(gradients, reduction)
        dims = [
            [d for d in g.shape.dims if d not in v.shape.dims]
            for g, v in zip(gradients.present, gradients.owners)
        ]
        strategy = reduction.strategy
        sums = SumGradients(gradients.present, dims, strategy, reduction.batch_dims).outputs
        self._note(given, sums, strategy)
        return _replaced(gradients, sums, Form.REDUCED)

    def value_after(
        self, variables: Sequence[mtf.Variable], updates: Sequence[mtf.Operation]
    ) -> Sequence[mtf.Tensor]:
        """What variables hold after operations; see `mtf_gradsync.step.values_after`."""
        return values_after(variables, updates)

    # The way.

    @contextlib.contextmanager
    def _branch(
        self,
        due: mtf.Tensor,
        gate: Gate | None,
        behind: Sequence[mtf.Operation],
        as_call: bool,
        at_end: Callable[[], Sequence[mtf.Operation]],
    ) -> Iterator[None]:
        branch = Branch(self.plan)
        self._lists.append(branch.updates)
        with branch.opened():
            yield
            branch.updates.extend(at_end())
        self._lists.pop()
        self.add(Conditional(due, gate, branch, behind, as_call).updates)

    def _convert(
        self, gradients: GradientSet, form: Form | None, reduction: Reduction
    ) -> GradientSet:
        return self.reduce(gradients, reduction) if form is Form.REDUCED else gradients

    def _apart(self, gradients: GradientSet, reduction: Reduction) -> GradientSet:
        """Gradients, those reduced that the strategy has a way of its own for."""
        if gradients.form.is_reduced or not reduction.is_apart:
            return gradients
        done = reduce_apart(gradients, reduction, self._slots, self._reduced_apart)
        self._used_apart.append(reduction.strategy)
        self._reduced_apart |= done.owners
        self._kept += done.kept
        return done.gradients

    def _finished(self, gradients: GradientSet) -> GradientSet:
        """Reduced gradients, divided and in the dtypes that the inner optimizer is to get."""
        dtypes, divisor = gradients.dtypes, gradients.divisor
        if dtypes is None and divisor is None:
            return gradients

        def finish(total: mtf.Tensor, dtype: tf.DType | None) -> mtf.Tensor:
            if divisor is not None:
                wide = total if total.dtype.size >= 4 else mtf.cast(total, tf.float32)
                total = mtf.divide(wide, mtf.cast(divisor, wide.dtype))
            dtype = total.dtype if dtype is None else self._inner_dtype(dtype)
            return total if total.dtype == dtype else mtf.cast(total, dtype)

        finished = [
            None if g is None else finish(g, dtypes[i] if dtypes else None)
            for i, g in enumerate(gradients.grads)
        ]
        return gradients.with_grads(finished, divisor=None, dtypes=None)

    def _inner_dtype(self, dtype: tf.DType) -> tf.DType:
        """What the inner optimizer gets for gradients of a dtype: float32 for narrow ones."""
        # Mesh-TF 0.1.21's Momentum adds gradients to a velocity of the variable's dtype; the
        # others cast to float32 themselves.
        if dtype.size >= 4 or isinstance(self._opt, mtf.optimize.MomentumOptimizer):
            return dtype
        return tf.float32

    def _in_dtypes_of_inner(self, gradients: GradientSet) -> GradientSet:
        """Gradients as Mesh-TF's Momentum takes them: in the dtype of the variable's value."""
        if not isinstance(self._opt, mtf.optimize.MomentumOptimizer):
            return gradients
        pairs = list(zip(gradients.grads, gradients.variables))
        other = [g is not None and g.dtype != v.activation_dtype for g, v in pairs]
        if not any(other):
            return gradients
        warn_once(
            "narrow momentum",
            "mtf.optimize.MomentumOptimizer takes gradients in the dtype of activations, %s, "
            "and adds them up in it: small ones are lost. "
            "MeshOptimizer(tf.train.MomentumOptimizer(...)) adds up in float32.",
            gradients.variables[other.index(True)].activation_dtype.name,
        )
        return gradients.with_grads(
            [mtf.cast(g, v.activation_dtype) if casts else g for (g, v), casts in zip(pairs, other)]
        )

    def _updates(self, gradients: GradientSet, stages: Sequence[Stage]) -> list[mtf.Operation]:
        """The inner optimizer's update inside of what stages make around it, behind a gate."""

        def apply_inner(given: GradientSet) -> list[mtf.Operation]:
            before = set(given.graph.all_variables)
            updates = self._opt.apply_grads(list(given.grads), list(given.variables))
            if updates is None:
                raise TypeError(
                    f"apply_grads of {self._opt!r} must return a list of mtf operations, got None."
                )
            tells = getattr(self._opt, "variables", None)
            told = {*before, *(tells() if callable(tells) else ())}
            created = [v for v in given.graph.all_variables if v not in told]
            self._slots.record(created, given.variables, tf.get_variable_scope().name)
            return list(updates)

        def around(stage: Stage, inner: Callable[[GradientSet], list[mtf.Operation]]) -> Any:
            return lambda given: stage.update(given, self, inner)

        make: Callable[[GradientSet], list[mtf.Operation]] = apply_inner
        for stage in reversed(stages):
            make = around(stage, make)
        return gated_update(lambda: make(gradients), gradients.grads)

    def _note(
        self, parts: Sequence[mtf.Tensor], sums: Sequence[mtf.Tensor], strategy: Strategy
    ) -> None:
        if self.reduced is None:
            self.reduced = Reduced(list(parts), list(sums), self.plan.open_branch, strategy)


def _replaced(gradients: GradientSet, present: Sequence[mtf.Tensor], form: Form) -> GradientSet:
    return gradients.with_grads(on_present(gradients.grads, lambda _: present), form)
