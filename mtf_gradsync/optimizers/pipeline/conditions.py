"""Conditions for operations that run on some steps only."""

from __future__ import annotations

import contextlib
from typing import Callable, Iterator, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.step import Branch, Conditional, Gate, Plan


class StepConditions:
    """The operations of a step that is being built, and their conditions.

    Attributes:
      plan: the plan of the mtf graph.
      updated: int32 scalar, 1 if the step has an update, else 0; None if every step counts as one.
      agree: combines booleans of the islands, if there are any: true on all of them, or on any.
    """

    plan: Plan

    def __init__(self) -> None:
        self._lists: list[list[mtf.Operation]] = [[]]
        self._branches = contextlib.ExitStack()
        self.updated: mtf.Tensor | None = None
        self.agree: Callable[[mtf.Tensor, bool], mtf.Tensor] | None = None
        self._if_finite: list[Callable[[mtf.Tensor], object]] = []

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

        Inside another branch, they run on steps where both conditions hold. With
        `counts_every_step`, steps without an update advance the global step, too. The other
        arguments are those of `branch_when`.
        """
        if not counts_every_step and not self.plan.is_in_branch and self.updated is None:
            self.updated = mtf.cast(due, tf.int32)
        self._branches.enter_context(self.branch_when(due, gate, behind, as_call, at_end))

    def agreed(self, holds: mtf.Tensor, by_any: bool = False) -> mtf.Tensor:
        """Returns whether a boolean scalar is true on all islands, or with `by_any` on one of them.

        Stages use it if a decision depends on gradients, as inside `OuterOptimizer` each island has
        its own. Without islands it is the scalar itself.
        """
        return holds if self.agree is None else self.agree(holds, by_any)

    def when_finite_is_known(self, then: Callable[[mtf.Tensor], object]) -> None:
        """Registers a function to call with what a stage inside gives `tell_finite`.

        That stage (`Stage.tells_finite`) knows which shards it skips.
        """
        self._if_finite.append(then)

    def tell_finite(self, make: Callable[[], mtf.Tensor]) -> None:
        """Says whether the step is one with finite gradients, a boolean scalar that `make` makes.

        What a skipped shard has does not count, unless no shard is left for it. Call it before the
        branch of the update is opened.
        """
        if self._if_finite:
            finite = make()
            for then in self._if_finite:
                then(finite)

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
