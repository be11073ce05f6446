"""Compares each division with the reference, and finds the part that causes a difference."""

from __future__ import annotations

import dataclasses
from typing import Any, Iterator, NamedTuple

import numpy as np

from mtf_gradsync.extension import ClipByGlobalNormOptimizer, GradientStrategy, mtf, some_of
from mtf_gradsync.runtimes._common import mesh_text
from mtf_gradsync.runtimes.sessions import RUNTIMES
from mtf_gradsync.tools.verification import divisions as kinds
from mtf_gradsync.tools.verification.causes import (
    DifferenceFacts,
    cause_of,
    name_of_factor,
    products_of_means,
    statistics_of,
    why_on_another_mesh,
)
from mtf_gradsync.tools.verification.comparing import Difference
from mtf_gradsync.tools.verification.divisions import Division
from mtf_gradsync.tools.verification.engine import CannotBeDivided, Engine, Outcome
from mtf_gradsync.tools.verification.reference import (
    Comparison,
    Reference,
    compare_with,
    make_reference,
)
from mtf_gradsync.tools.verification.verdicts import (
    CANNOT_BE,
    EQUAL,
    NOT_EQUAL,
    NOT_SHOWN,
    Compared,
    DivisionResult,
)

REFERENCE = "one core without wrappers"


class _Case(NamedTuple):
    """A division, its reference, the results of running the program in it, and their comparison."""

    division: Division
    reference: Reference
    outcome: Outcome
    compared: Comparison

    @classmethod
    def of(cls, division: Division, reference: Reference, outcome: Outcome) -> _Case:
        compared = compare_with(reference, outcome, reference.variables_not_finite())
        return cls(division, reference, outcome, compared)

    @property
    def first_difference(self) -> tuple[str, Difference | None]:
        """The first difference from the reference, and what kind of value it is.

        The value is a pair: the kind of value that differs, as in `DivisionResult.what`, and the
        difference; it is None if nothing differs. Two kinds of differences come first, because they
        may be the cause of differences in later steps: values that were written before the update,
        and copies of a variable that differ between cores.
        """
        for what, names in (
            ("value before the update", self.outcome.changed_before),
            ("copies", self.outcome.different_copies),
        ):
            if names:
                return what, Difference(names[0], float("inf"), 0.0)
        return self.compared.first_difference


class Verifier:
    """The part of `verify` that compares divisions with the reference, and explains differences.

    Args:
      engine: the runner of divisions, after `Engine.begin`.
      base: the division that the user configured.
      outcome: the results of running the program in `base`.
      removed: names, for the user, of the parts that are removed from the program in all divisions,
        such as "random numbers".
    """

    def __init__(self, engine: Engine, base: Division, outcome: Outcome, removed: tuple[str, ...]):
        self._engine, self._base, self._outcome, self._removed = engine, base, outcome, removed
        self._references: dict[Any, Reference | CannotBeDivided] = {}
        self._found: list[tuple[str, float | None, str]] = []
        recorded = outcome.recorded
        found = statistics_of(recorded.losses, recorded.batch_dims)
        self._statistics = list(dict.fromkeys(op for op, _ in found))

    @property
    def source(self) -> str:
        """How the errors that rounding explains were found, in words, such as "float64"."""
        known = [x.source for x in self._references.values() if isinstance(x, Reference)]
        return known[0] if known else "nothing"

    def reference(self, division: Division) -> Reference:
        """Returns the reference with which a division is compared; each reference is run only once.

        Two divisions may need different references: if a division masks shards, or removes a
        wrapper that clips gradients, its reference has to do the same.

        Raises:
          CannotBeDivided: the program does not run on one core.
        """
        one_core = kinds.reference_division(self._base)
        # The reference depends on two things: which wrappers that clip or average are left, and the
        # mask, which decides of which shards the gradients are.
        clips = [
            label
            for label in division.changes.without
            if isinstance(self._outcome.recorded.wrappers[label], ClipByGlobalNormOptimizer)
        ]
        averages = [x for x in division.changes.without if self._outcome.recorded.keeps_averages(x)]
        changes = one_core.changes._replace(
            mask=division.changes.mask,
            without=(*one_core.changes.without, *clips, *averages),
            statistics=division.changes.statistics,
        )
        one_core = dataclasses.replace(one_core, changes=changes)
        if one_core.key not in self._references:
            try:
                made = make_reference(self._engine, one_core, self._outcome)
                why = why_on_another_mesh(made.outcome.recorded, one_core.mesh_shape)
                if why:
                    raise CannotBeDivided(why)
                self._references[one_core.key] = made
            except CannotBeDivided as error:
                self._references[one_core.key] = error
        found = self._references[one_core.key]
        if isinstance(found, CannotBeDivided):
            raise found
        return found

    def result_of(self, division: Division) -> DivisionResult:
        """Runs a division and compares it with the reference.

        Returns:
          The division's line in the table: the verdict, the errors, and the likely cause of a
          difference. If the program does not run in the division, the verdict is `CANNOT_BE`.
        """
        division, out = self._with_constant_statistics(division)
        found = DivisionResult(
            division.name,
            division.mesh_shape,
            division.layout,
            division.runtime,
            CANNOT_BE,
            without=out,
        )
        try:
            outcome = self._engine.run(division)
        except CannotBeDivided as error:
            return dataclasses.replace(found, cause=str(error))
        why = why_on_another_mesh(outcome.recorded, division.mesh_shape)
        if why:
            return dataclasses.replace(found, verdict=NOT_SHOWN, cause=why)
        try:
            reference = self.reference(division)
        except CannotBeDivided as error:
            why = f"There is nothing to compare with. On {REFERENCE}: {error}"
            return dataclasses.replace(found, verdict=NOT_SHOWN, cause=why)
        case = _Case.of(division, reference, outcome)
        compared, worst = case.compared, case.compared.worst
        errors: dict[str, float] = {}
        for one in compared.gradients or compared.values:
            errors[one.variable] = max(one.error, errors.get(one.variable, 0.0))
        open_ones = reference.variables_not_shown()
        counts = Compared(
            len({x.variable for x in compared.gradients} - set(open_ones)),
            len(compared.values),
            len(compared.slots),
        )
        found = dataclasses.replace(
            found,
            verdict=EQUAL,
            error=worst.error,
            expected=worst.expected,
            errors=errors,
            compared=counts,
            not_shown=tuple(open_ones),
        )
        if case.first_difference[1] is not None:
            return self._explain(case, found)
        alike = self._equal_random_numbers(case)
        if alike is not None:
            name, axes = alike
            return dataclasses.replace(
                found,
                verdict=NOT_EQUAL,
                variable=name,
                what="random numbers",
                brought_in_by=f"mesh axis {axes}",
                cause=cause_of(DifferenceFacts("random numbers")),
            )
        if not open_ones:
            return self._check_schedules(found, reference)
        return dataclasses.replace(
            found, verdict=NOT_SHOWN, cause=self._why_nothing_shown(reference)
        )

    def _equal_random_numbers(self, case: _Case) -> tuple[str, str] | None:
        """Finds random numbers of the model that are equal on several shards, which is a fault.

        `case` is the division with its outcome.

        Returns:
          Two texts for the user: which random numbers, such as "a draw of 64 numbers", and the mesh
          axis along which they repeat. None if no random numbers repeat.
        """
        division, outcome = case.division, case.outcome
        if division == self._base and self._outcome.equal_draws:
            return self._outcome.equal_draws[0]
        shape = mtf.convert_to_shape(division.mesh_shape)
        sizes = outcome.recorded.random_sizes, case.reference.outcome.recorded.random_sizes
        if outcome.batches > 1 or len(sizes[0]) != len(sizes[1]):
            return None
        for here, there in zip(*sizes):
            axes = [d.name for d in shape.dims if d.size > 1 and here * d.size == there]
            if axes:
                return f"a draw of {here} numbers", axes[0]
        return None

    def _with_constant_statistics(self, division: Division) -> tuple[Division, tuple[str, ...]]:
        """Replaces statistics over the batch by constants, if a step does not use the whole batch.

        A statistic over the batch is a number that the model computes from several examples, such
        as the mean in batch normalization. Over a microbatch, or over a batch without the examples
        of a masked shard, the statistic has another value than over the whole batch. So the
        division's update would differ from the reference although the program has no fault.

        Returns:
          A pair: the division to run, and the names of the parts of the model that are removed in
          it. The division is a copy of `division` with constants in place of statistics. It is
          `division` itself if the model has no statistics, or if each step uses the whole batch.
          The names are for the user, such as "random numbers". They include the parts that are
          removed in all divisions.
        """
        other_steps = division.changes.micro_steps > 1 or division.changes.mask is not None
        if not self._statistics or not (other_steps or self._engine.steps_per_update > 1):
            return division, self._removed
        changes = division.changes._replace(statistics=self._outcome.recorded.batch_dims)
        text = f"statistics of the batch ({some_of(self._statistics)})"
        return dataclasses.replace(division, changes=changes), (*self._removed, text)

    def _why_nothing_shown(self, reference: Reference) -> str:
        """Returns in words, for the user, why the comparison with a reference proves nothing.

        Called if the reference's gradient of a variable is zero everywhere or not finite.
        """
        names = reference.variables_not_shown()
        if not np.isfinite(reference.exact.losses).all():
            return f"The loss of the reference is {reference.exact.losses[-1]}."
        others = reference.variables_not_finite()
        if others:
            return f"The gradient of {some_of(others)} is not finite in the reference."
        return (
            f"The gradient of {some_of(names)} is zero everywhere, so that no factor shows: take "
            "other batches or more steps, or leave out of the training what is not to be trained."
        )

    def _check_schedules(self, line: DivisionResult, reference: Reference) -> DivisionResult:
        """Checks whether a schedule counts microbatch steps where it should count updates.

        A learning rate schedule that follows a counter of steps is an example of this fault. To
        find it, the method compares the reference with a run in which counters have other values
        (`Reference.with_first_counters`).

        Args:
          line: the result of a division in which all compared values equal the reference's.
          reference: the reference of the division.

        Returns:
          `line` if no schedule counts microbatch steps; else a copy of `line` with the verdict
          `NOT_EQUAL` and the cause.
        """
        early = reference.with_first_counters
        if early is None:
            return line
        counters = self._engine.counters_of_updates[0][0]
        compared = compare_with(reference, early, [*line.not_shown, *counters])
        first = next((x for x in (*compared.values, *compared.slots) if not x.is_equal), None)
        if first is None:
            return line
        return dataclasses.replace(
            line,
            verdict=NOT_EQUAL,
            variable=first.variable,
            what="value",
            error=first.error,
            expected=first.expected,
            brought_in_by=next(iter(self._outcome.recorded.accumulating_wrappers), ""),
            cause=(
                "A schedule follows a counter that goes on in each microbatch step, and so runs "
                "ahead of the updates: base it on gs.get_update_step, or on global_step // K."
            ),
        )

    def _explain(self, case: _Case, line: DivisionResult) -> DivisionResult:
        """Finds why a division differs from the reference; returns the result with the cause.

        Args:
          case: the division and its differences from the reference.
          line: the division's line in the table, with the errors, still without a cause.

        Returns:
          A copy of `line` with the verdict `NOT_EQUAL`, what differs, and why. But the verdict is
          `NOT_SHOWN` if another order of the same examples changes the reference's gradients, too,
          by at least half of the difference.
        """
        division, reference, outcome, compared = case
        what, first = case.first_difference
        assert first is not None
        line = dataclasses.replace(line, error=first.error, expected=first.expected)
        by_order = max(reference.by_order.values(), default=0.0)
        if what in ("gradient", "slot", "value", "loss") and first.error <= 2 * by_order:
            name = max(reference.by_order, key=lambda key: reference.by_order[key])
            why = (
                f"The same examples in another order change gradients by {by_order:.1e} ({name}), "
                "as where experts take a number of each group: what differs no more than that is "
                "not told from it. Give it room for all examples."
            )
            return dataclasses.replace(line, verdict=NOT_SHOWN, cause=why)
        # A program that writes a variable before the update may write it twice in a step, in an
        # order that differs by division. So no culprit is looked for.
        is_early = what == "value before the update"
        culprit, factor = "" if is_early else self._culprit(division, first), first.factor
        named = (
            ""
            if factor is None
            else name_of_factor(factor, self._numbers_for_factors(division, outcome, culprit))
        )
        kind = compared.values if what == "value" else compared.gradients
        factors = [x.factor for x in kind if not x.is_equal]
        is_one = len(factors) > 1 and all(
            x is not None and factor is not None and abs(x - factor) < 1e-3 * abs(factor)
            for x in factors
        )
        if not (named or is_one) and np.size(reference.exact.values.get(first.variable, 0.0)) == 1:
            factor = None  # between two single numbers there is always some factor
        by_counters = ""
        if what in ("value", "slot"):
            by_counters = self._cause_by_counters(case, line)
        facts = DifferenceFacts(
            what,
            culprit,
            factor,
            named,
            first.error,
            is_one and len(factors) == len(compared.gradients),
            not compared.loss.is_equal,
            outcome.rounds,
            self._products() if outcome.batches > 1 else (),
            self._strategy_name(culprit) if factor is None else "",
            by_counters,
            outcome.recorded.sees_gradients,
        )
        return dataclasses.replace(
            line,
            verdict=NOT_EQUAL,
            variable="" if what == "loss" else first.variable,
            what=what,
            factor=factor,
            of_factor=named,
            brought_in_by=culprit,
            cause=cause_of(facts),
        )

    def _products(self) -> list[str]:
        recorded = self._outcome.recorded
        return products_of_means(recorded.losses, recorded.batch_dims)

    def _strategy_name(self, culprit: str) -> str:
        """Returns the class name of the strategy by which a wrapper reduces gradients.

        A strategy that rounds gradients may explain a difference. `culprit` is the wrapper's label.
        The result is "" if the wrapper was given no strategy object, or if `culprit` names another
        part of the division, such as "mesh axis model".
        """
        wrapper = self._outcome.recorded.wrappers.get(culprit)
        strategy = getattr(wrapper, "reducer", None)
        return type(strategy).__name__ if isinstance(strategy, GradientStrategy) else ""

    def _cause_by_counters(self, case: _Case, line: DivisionResult) -> str:
        """Finds out whether a difference comes from a counter that is advanced before the update.

        The counters are scalar variables that the program advances by 1 in each step, such as its
        global step. The reference reads a counter in the update, and advances it afterwards. If the
        division advances the counter first, its update reads a value that is larger by 1. To find
        this, the method compares the outcome with `Reference.with_later_counters`, a run of the
        reference in which all counters are larger by 1.

        Args:
          case: the division and its differences from the reference.
          line: the division's line in the table, still without a cause; it names variables that are
            not compared.

        Returns:
          The cause, in words for the user, if the outcome equals `Reference.with_later_counters`;
          else "", also if the program has no counters.
        """
        later = case.reference.with_later_counters
        if later is None:
            return ""
        counters = list(self._engine.counters_of_updates[0][0])
        compared = compare_with(case.reference, case.outcome, [*line.not_shown, *counters], later)
        if compared.first_difference[1] is not None:
            return ""
        return (
            f"The program counts its step ({some_of(counters)}) before or after the update reads "
            "it, and nothing orders the two: advance it after the update, by "
            "tf.control_dependencies, or give the optimizer a rate of its own."
        )

    def _is_equal(self, division: Division) -> bool:
        division, _ = self._with_constant_statistics(division)
        try:
            outcome = self._engine.run(division)
            case = _Case.of(division, self.reference(division), outcome)
        except CannotBeDivided:
            return False
        return case.first_difference[1] is None

    def _culprit(self, division: Division, first: Difference) -> str:
        """Returns the part of a division without which its update equals the reference's.

        Args:
          division: the division.
          first: the first difference of the division from the reference.

        Returns:
          A wrapper's label, or a name such as "mesh axis model" or "microbatch steps"; "" if the
          update differs without each of the parts, too.
        """
        simpler = list(self._simpler_divisions(division))
        # Parts that were found to be a culprit before are tried first.
        known = [name for variable, factor, name in self._found if variable == first.variable]
        simpler.sort(key=lambda pair: pair[0] not in known)
        for name, other in simpler:
            if self._is_equal(other):
                self._found.append((first.variable, first.factor, name))
                return name
        return ""

    def _simpler_divisions(self, division: Division) -> Iterator[tuple[str, Division]]:
        """Yields divisions that each lack one part of the given division.

        For each of these divisions a pair is yielded: the name of the part that the division lacks,
        such as "mesh axis model" or a wrapper's label, and the division.
        """
        changes = division.changes
        if changes.micro_steps > 1:
            more = changes._replace(micro_steps=1)
            yield "microbatch steps", dataclasses.replace(division, changes=more)
        if changes.mask is not None:
            yield "the mask", dataclasses.replace(division, changes=changes._replace(mask=None))
        for label in self._outcome.recorded.stack:
            if label not in changes.without:
                more = kinds.changes_without(division, label)
                yield label, dataclasses.replace(division, changes=more)
        shape = mtf.convert_to_shape(division.mesh_shape)
        for dim in shape.dims:
            if dim.size > 1:
                dims = [d if d != dim else mtf.Dimension(d.name, 1) for d in shape.dims]
                yield (
                    f"mesh axis {dim.name}",
                    dataclasses.replace(division, mesh_shape=mesh_text(mtf.Shape(dims))),
                )
        if division.params:
            names = ", ".join(name for name, _ in division.params)
            yield f"params {names}", dataclasses.replace(division, params=())
        for runtime in RUNTIMES[:2]:
            if runtime != division.runtime:
                yield f"runtime {division.runtime}", dataclasses.replace(division, runtime=runtime)

    def _numbers_for_factors(
        self, division: Division, outcome: Outcome, culprit: str
    ) -> dict[str, float]:
        """Returns the numbers of a division that may explain by what factor a gradient is wrong.

        If a mesh axis causes the difference, the number of cores along another mesh axis cannot
        explain the factor, so the result does not have it.

        Args:
          division: the division.
          outcome: the results of running the program in the division.
          culprit: the part that makes the difference, such as "mesh axis model"; "" if unknown.

        Returns:
          A dictionary from labels, such as "the number of shards", to numbers other than 1.
        """
        shape = mtf.convert_to_shape(division.mesh_shape)
        batch_axes = kinds.axes_of_batch(division.layout, outcome.recorded)
        shards = int(np.prod([d.size for d in shape.dims if d.name in batch_axes] or [1]))
        # The number of microbatch steps of the first update, in which a factor shows first.
        steps = max(len(self._engine.groups[0]), division.changes.micro_steps)
        axes = [d.name for d in shape.dims if culprit == f"mesh axis {d.name}"]
        axes = axes or [d.name for d in shape.dims]
        numbers: dict[str, float] = {"K, the microbatch steps": steps}
        if not batch_axes or not set(axes).isdisjoint(batch_axes):
            numbers = {"the number of shards": shards, **numbers}
        for dim in shape.dims:
            if dim.name in axes:
                numbers[f"the number of cores along {dim.name}"] = dim.size
        numbers["the number of cores"] = shape.size
        for name, value in division.params:
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                numbers[f"params {name}"] = value
        return {name: value for name, value in numbers.items() if value != 1}
