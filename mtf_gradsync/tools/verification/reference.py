"""The reference of comparisons: the program on one core without wrappers, and expected rounding."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Mapping, NamedTuple, Sequence

import numpy as np

from mtf_gradsync.tools.verification.comparing import (
    BFLOAT16,
    LEAST,
    LITTLE,
    MOST_ROUNDED,
    ORDER,
    ROUNDED,
    Difference,
    Values,
    compare,
    error_of,
    expected_errors,
    factor_of,
    is_finite,
)
from mtf_gradsync.tools.verification.divisions import Division, on_one_core
from mtf_gradsync.tools.verification.engine import (
    BatchSeries,
    CannotBeDivided,
    Engine,
    Outcome,
    reordered,
)


class Reference(NamedTuple):
    """The results of runs on one core without wrappers, with which divisions are compared.

    Attributes:
      initial: a dictionary from the names of variables to the values with which divisions begin.
      outcome: the results of a run in the program's own dtypes.
      exact: the results of the same run in float64; equal to `outcome` if float64 was impossible.
      expected: a dictionary with the largest errors that rounding explains. Its keys are names of
        variables, for their values; keys such as "kernel@0", for gradients (see `flatten_updates`);
        and "loss".
      by_order: a dictionary from the names of variables to the errors of their gradients if the
        examples are in another order; it has only errors larger than rounding.
      with_first_counters: the results of a run in which counters of the program (such as its global
        step) have in each update the values from the update's first step. In `exact` the counters
        have the values from the update's last step. None if each update has only one step, or if
        the program has no counters.
      with_later_counters: the results of a run in which each update reads counters that are larger
        by 1 than in `exact`. A program reads such counters if it advances them before the update,
        and not after it. None if the program has no counters.
      step_by_step: the results of the program's microbatch steps one by one on one core. They serve
        to compare variables that the program writes in each step; None if the program has no such
        variables.
      source: how the expected errors were found: by "float64", or by "another order of the
        examples".
    """

    initial: Values
    outcome: Outcome
    exact: Outcome
    expected: dict[str, float]
    by_order: dict[str, float]
    with_first_counters: Outcome | None
    with_later_counters: Outcome | None
    step_by_step: Outcome | None
    source: str

    def variables_not_shown(self) -> list[str]:
        """Returns the names of variables whose comparison with a division would prove nothing.

        The comparison of a variable shows nothing if the variable's gradient is zero everywhere or
        not finite. If no optimizer was seen, gradients are unknown; then the change of the
        variable's value is looked at in place of its gradient.
        """
        found = []
        for name in self.exact.recorded.order:
            if self.exact.recorded.sees_gradients:
                values = [of[name] for of in self.exact.gradients if name in of]
            else:
                values = [self.exact.values[name] - self.initial[name]]
            if not all(map(is_finite, values)) or not any(x.any() for x in values):
                found.append(name)
        return found

    def variables_not_finite(self) -> list[str]:
        """Returns the names of variables whose gradients are not finite in the reference."""
        gradients = self.exact.gradients
        return [
            name
            for name in self.variables_not_shown()
            if not all(is_finite(of[name]) for of in gradients if name in of)
        ]


def make_reference(engine: Engine, division: Division, base: Outcome) -> Reference:
    """Runs the reference, and measures how large differences by rounding may be.

    Rounding is measured by a run in float64 or, if that is impossible, by a run on the same
    examples in another order.

    Args:
      engine: the runner of divisions.
      division: the division of the reference: one core without wrappers.
      base: the results of running the program in the division that the user configured.

    Returns:
      The reference: the results of its runs, and the errors that rounding explains.

    Raises:
      CannotBeDivided: the program does not run on one core.
    """
    first, last = ([pair[n] for pair in engine.counters_of_updates] for n in (0, 1))
    joins = engine.steps_per_update > 1
    own = None if engine.repeats_steps else last
    series = [
        lambda groups: BatchSeries(groups, own),
        lambda groups: BatchSeries(reordered(groups), own),
    ]
    if joins and own and any(first):
        series.append(lambda groups: BatchSeries(groups, first))
    if own and any(last):
        after = [{k: v + np.ones_like(v) for k, v in one.items()} for one in last]
        series.append(lambda groups: BatchSeries(groups, after))
    try:
        outcomes = engine.run_series(dataclasses.replace(division, precision="float64"), series)
        (outcome,) = engine.run_series(division, series[:1])
        others, source = outcomes[:1], "float64"
    except CannotBeDivided:
        outcomes = engine.run_series(division, series)
        outcome, others, source = outcomes[0], outcomes[1:2], "another order of the examples"
    exact, other, *by_counters = outcomes
    flats = [[{**flatten_updates(x.gradients), **x.values, **_loss(x)}] for x in (outcome, *others)]
    expected = expected_errors(flats[0][0], [x[0] for x in flats[1:]])
    if source != "float64":
        # If the order of examples changes values by more, this is not rounding.
        expected = {k: min(x, MOST_ROUNDED) for k, x in expected.items()}
    for name in exact.recorded.order:
        value, before = exact.values.get(name), engine.initial.get(name)
        if value is not None and before is not None and expected.get(name) == LEAST:
            # If a value hardly changes, the tolerance must be smaller than its change.
            expected[name] = min(LEAST, max(ROUNDED, LITTLE * error_of(value, before)))
    by_order: dict[str, float] = {}
    others_of = flatten_updates(other.gradients)
    for key, value in flatten_updates(exact.gradients).items():
        name = key.rpartition("@")[0]
        if key in others_of and expected.get(key, 0.0) < 1:  # else the gradient is only rounding
            by_order[name] = max(by_order.get(name, 0.0), error_of(others_of[key], value))
    step_by_step = None
    if joins and set(base.written_early) - set(first[0]):
        alone = dataclasses.replace(
            division,
            name="one core",
            mesh_shape=on_one_core(division.mesh_shape),
            changes=division.changes._replace(unwrapped=False),
            is_reference=False,
        )
        with contextlib.suppress(CannotBeDivided):
            step_by_step = engine.run(alone)
    is_exact = source == "float64"
    return Reference(
        engine.initial,
        outcome,
        exact,
        expected,
        {k: x for k, x in by_order.items() if x > (ORDER if is_exact else MOST_ROUNDED)},
        by_counters[0] if by_counters and joins else None,
        by_counters[-1] if by_counters else None,
        step_by_step,
        source,
    )


class Comparison(NamedTuple):
    """The comparison of a division with the reference.

    Attributes:
      gradients: the differences of gradients, in the order of the backward pass.
      values: the differences of the values, after the last update, of variables with a gradient.
      slots: the differences of the values of all other variables.
      loss: the difference of the losses.
    """

    gradients: list[Difference]
    values: list[Difference]
    slots: list[Difference]
    loss: Difference

    @property
    def first_difference(self) -> tuple[str, Difference | None]:
        """A pair: the kind of value that differs first, and the first difference.

        Only differences that rounding does not explain count. The kinds are "gradient", "slot",
        "value" and "loss", in this order. The pair is ("loss", None) if nothing differs.
        """
        kinds = {"gradient": self.gradients, "slot": self.slots, "value": self.values}
        for what, found in kinds.items():
            first = next((x for x in found if not x.is_equal), None)
            if first is not None:
                return what, first
        return "loss", None if self.loss.is_equal else self.loss

    @property
    def worst(self) -> Difference:
        """The gradient whose error is the largest multiple of expected rounding, as a `Difference`.

        If no gradients were compared, the result is the value whose error is the largest multiple
        of expected rounding. If no values were compared either, the result is the difference of the
        loss.
        """
        every = self.gradients or self.values or [self.loss]
        return max(every, key=lambda x: x.error / x.expected)


def compare_with(
    reference: Reference, outcome: Outcome, left_out: Sequence[str], exact: Outcome | None = None
) -> Comparison:
    """Compares the outcome of a division with the reference.

    Args:
      reference: the reference.
      outcome: the results of running the program in the division.
      left_out: names of variables that are not compared.
      exact: the results of the reference to compare with; default `reference.exact`.

    Returns:
      The differences of gradients, values, slots and the loss. Each compared variable has a
      `Difference`, even if it is equal.
    """
    exact = exact or reference.exact
    more = BFLOAT16 if outcome.exchanges else 0.0
    expected = {k: v + more for k, v in reference.expected.items()}
    sees_gradients = exact.recorded.sees_gradients
    order = [name for name in exact.recorded.order if name not in left_out]
    updates = range(len(exact.gradients))
    keys = [f"{name}@{number}" for number in updates for name in order if sees_gradients]
    gradients = compare(
        flatten_updates(outcome.gradients), flatten_updates(exact.gradients), keys, expected
    )
    gradients = [x._replace(variable=x.variable.rpartition("@")[0]) for x in gradients]
    computed = _exact_where_rounding(outcome, exact, expected)
    values = [
        x if x.is_equal else x._replace(factor=_factor_of_change(reference, computed, exact, x))
        for x in compare(computed, exact.values, order, expected)
    ]
    slots = _compare_slots(reference, outcome, computed, exact, left_out, expected)
    # Losses are not comparable in two cases: the program's mean includes the loss of a masked
    # shard, and the mean over microbatches may lack their weights.
    is_masked = outcome.recorded.changes.mask is not None
    is_another = is_masked or (outcome.batches > 1 and not outcome.weighted)
    limit = float("inf") if is_another else expected["loss"]
    (loss,) = compare(_loss(outcome), _loss(exact), ["loss"], {"loss": limit})
    return Comparison(gradients, values, slots, loss)


def _factor_of_change(
    reference: Reference, computed: Values, exact: Outcome, found: Difference
) -> float | None:
    """Returns a variable's change divided by its change in the reference, if that is one number.

    A variable's change is its value after the last update minus its initial value, which is in
    `reference.initial`.

    Args:
      reference: the reference.
      computed: a dictionary from names to the values of variables in the division.
      exact: the results of the reference with which the division is compared.
      found: the difference of the variable; it tells the variable's name and expected error.

    Returns:
      The factor; None if it is not one number for all elements, or a value is missing.
    """
    name = found.variable
    if not all(name in values for values in (reference.initial, computed, exact.values)):
        return None
    first = np.asarray(reference.initial[name], np.float64)
    if not first.shape == computed[name].shape == exact.values[name].shape:
        return None
    changes = computed[name] - first, exact.values[name] - first
    largest = float(np.max(np.abs(changes[1]), initial=0.0))
    scale = float(np.max(np.abs(first), initial=0.0))
    return factor_of(*changes, found.expected * scale / largest if largest else 0.0)


def _compare_slots(
    reference: Reference,
    outcome: Outcome,
    computed: Values,
    exact: Outcome,
    left_out: Sequence[str],
    expected: Mapping[str, float],
) -> list[Difference]:
    """Compares variables without gradients, such as slots, with the reference.

    Args:
      reference: the reference.
      outcome: the results of running the program in the division.
      computed: a dictionary from names to the values of variables in the division.
      exact: the results of the reference to compare with.
      left_out: names of variables that are not compared.
      expected: a dictionary from names to the errors that rounding explains.

    Returns:
      A `Difference` for each compared variable, even if it is equal. The order is that in which the
      backward pass reaches the variables that the slots belong to.
    """
    known = {*exact.recorded.order, *left_out}
    names = [k for k, v in computed.items() if k not in known and v.dtype.kind in "iufbV"]
    places = {name: number for number, name in enumerate(exact.recorded.order)}
    owner = {n: max((v for v in places if n.startswith(v)), key=len, default="") for n in names}
    names.sort(key=lambda name: places.get(owner[name], len(places)))
    early = set(outcome.written_early) if outcome.batches > 1 else set()
    slots = compare(
        computed, exact.values, [x for x in names if x in exact.values and x not in early], expected
    )
    own = reference.step_by_step
    if own is not None and own.batches == outcome.batches:
        again = [name for name in names if name in early and name in own.values]
        limits = {name: MOST_ROUNDED for name in again}  # both sides are computed in float32
        slots += compare(computed, own.values, again, limits)
    return slots


def flatten_updates(updates: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Puts the gradients of all updates into one dictionary.

    Args:
      updates: for each update, a dictionary from the names of variables to their gradients.

    Returns:
      A dictionary of the gradients. A key is the variable's name and the number of the update, from
      0, such as "kernel@0".
    """
    return {f"{k}@{number}": v for number, of in enumerate(updates) for k, v in of.items()}


def _loss(outcome: Outcome) -> dict[str, np.ndarray]:
    return {"loss": np.array(outcome.losses)}


def _exact_where_rounding(
    outcome: Outcome, exact: Outcome, expected: Mapping[str, float]
) -> dict[str, np.ndarray]:
    """Returns a division's values, with the reference's values where a gradient is only rounding.

    If an element of a gradient is no larger than rounding errors, its sign may be wrong. An
    optimizer such as Adam makes a full step even from such an element. So an element of the
    variable would differ from the reference although the division has no fault.

    Args:
      outcome: the results of running the program in the division.
      exact: the results of the reference.
      expected: a dictionary from the keys that `flatten_updates` makes to the largest errors that
        rounding explains. A gradient's element is only rounding if it is smaller than this error,
        times the gradient's largest number.

    Returns:
      A dictionary from the names of variables to their values after the last update.
    """
    values = dict(outcome.values)
    for number, (found, right) in enumerate(zip(outcome.gradients, exact.gradients)):
        for name, gradient in right.items():
            value, given, there = values.get(name), found.get(name), exact.values.get(name)
            if value is None or given is None or there is None:
                continue
            if not value.shape == given.shape == gradient.shape == there.shape:
                continue
            limit = expected.get(f"{name}@{number}", 0.0) * np.max(np.abs(gradient), initial=0.0)
            is_rounding = (np.abs(gradient) <= limit) & (given != gradient)
            values[name] = np.where(is_rounding & np.isfinite(value), there, value)
    return values
