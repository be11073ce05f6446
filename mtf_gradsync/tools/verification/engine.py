"""Runs a program in several divisions from the same values, on the same batches."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Iterable, Iterator, Mapping, NamedTuple, Sequence

import numpy as np

from mtf_gradsync.extension import tf
from mtf_gradsync.tools.verification.comparing import (
    BFLOAT16,
    Difference,
    compare,
    exchanges_in_bfloat16,
    expected_errors,
    least_error,
)
from mtf_gradsync.tools.verification.programs import (
    Batch,
    BuiltDivision,
    Division,
    Running,
    UserProgram,
    batch_parts,
    joined_batch,
    rows_of,
)
from mtf_gradsync.tools.verification.recording import GRADIENT, UPDATES, Recorded

# In how many orders of the examples the reference is computed besides the given one.
_ORDERS = 3
# More microbatch steps than any program joins: after these there is no update to wait for.
_MOST_STEPS = 256


class Outcome(NamedTuple):
    """What a division has made.

    Attributes:
      recorded: what was seen when it was built.
      losses: the mean loss of each update, by weights where the program gives them.
      gradients: by variable, those of each update.
      values: trainable variables after the last update.
      changed_before: variables that changed in a step before its update.
      apart: variables whose copies are not equal on all processors.
      batches: how many batches each update joined.
      weighted: whether the program says how much the loss of a step stands for.
      exchanges: whether the program exchanges float32 as bfloat16.
    """

    recorded: Recorded
    losses: list[float]
    gradients: list[dict[str, np.ndarray]]
    values: dict[str, np.ndarray]
    changed_before: list[str]
    apart: list[str]
    batches: int
    weighted: bool
    exchanges: bool


class CannotBeDivided(Exception):
    """A program cannot be built or run in a division; the message says why."""


class Engine:
    """Runs divisions of a program.

    Args:
      program: the program.
      batches: its batches, in order.
      steps: how many updates.
    """

    def __init__(self, program: UserProgram, batches: Iterable[Batch], steps: int):
        self._program, self._batches, self._steps = program, iter(batches), steps
        self.groups: list[list[Batch]] = []
        self.initial: dict[str, np.ndarray] = {}
        self._done: dict[Any, Outcome | CannotBeDivided] = {}

    @property
    def steps_per_update(self) -> int:
        """How many batches the program itself joins in an update."""
        return len(self.groups[0])

    def begin(self, division: Division) -> Outcome:
        """Runs the program as it is, which decides the batches of each update, and first values.

        Raises ValueError where it makes no update, or the batches end before.
        """
        first = self._next()
        built = self._program.build(division, first)
        with built.session() as running:
            self.initial = _own(running.values())
            outcome = self._run(built, running, self._groups_of(running, first))
        self._done[division.key] = outcome
        self.schedulers = outcome.recorded.schedulers
        self.sees_gradients = outcome.recorded.sees_gradients
        return outcome

    def run(self, division: Division) -> Outcome:
        """Runs a division; raises `CannotBeDivided` where it cannot be."""
        done = self._done.get(division.key)
        if done is None:
            try:
                groups = [self._batches_of(division, group) for group in self.groups]
                (done,) = self._runs(division, [groups])
            except Exception as error:  # whatever a user's program raises
                done = CannotBeDivided(_one_line(error))
            self._done[division.key] = done
        if isinstance(done, CannotBeDivided):
            raise done
        return done

    def orders(self, division: Division) -> list[Outcome]:
        """Runs a division that joins its batches, with their examples in other orders, too.

        The first outcome is the one that `run` gives.
        """
        every = [[self._batches_of(division, group) for group in self.groups]]
        for seed in range(_ORDERS):
            shuffled = []
            for group in every[0]:
                sizes = [len(tf.nest.flatten(batch)[0]) for batch in group]
                rows = [np.random.RandomState(seed).permutation(size) for size in sizes]
                shuffled.append([rows_of(batch, some) for batch, some in zip(group, rows)])
            every.append(shuffled)
        outcomes = self._runs(division, every)
        self._done[division.key] = outcomes[0]
        return outcomes

    def _runs(self, division: Division, series: list[list[list[Batch]]]) -> list[Outcome]:
        """Builds a division, and runs it on several series of batches from the first values."""
        built = self._program.build(division, series[0][0][0])
        outcomes = []
        with built.session() as running:
            first = {**running.values(), **self.initial}
            for groups in series:
                running.write(first)
                outcomes.append(self._run(built, running, groups))
        return outcomes

    def _batches_of(self, division: Division, group: list[Batch]) -> list[Batch]:
        """Returns the batches of an update: those of the program, joined, or in parts."""
        if not self.sees_gradients:
            return group
        changes = division.changes
        if division.is_reference and changes.mask is not None:
            return [_contributed(joined_batch(group), changes.mask)]
        taken_out = changes.unwrapped or any(x in changes.without for x in self.schedulers)
        if len(group) > 1 and taken_out:
            return [joined_batch(group)]
        if changes.micro_steps > 1:
            return batch_parts(joined_batch(group), changes.micro_steps)
        return group

    # Of the program as it is: the wrappers that join steps, and whether it has an optimizer.
    schedulers: tuple[str, ...] = ()
    sees_gradients: bool = True

    def _next(self) -> Batch:
        try:
            return next(self._batches)
        except StopIteration:
            made = len(self.groups)
            raise ValueError(
                f"The batches ended after {made} of {self._steps} updates: give more batches, or "
                "fewer steps."
            ) from None

    def _groups_of(self, running: Running, first: Batch) -> Iterator[Iterable[Batch]]:
        """Gives for each update the batches until the program has made it."""
        self._batches = itertools.chain([first], self._batches)
        for number in range(self._steps):
            group: list[Batch] = []
            self.groups.append(group)

            yield self._until_update(running, number, group)

    def _until_update(self, running: Running, number: int, group: list[Batch]) -> Iterator[Batch]:
        """Gives batches, and appends them to a group, until the program has made an update."""
        first = running.values()
        while not group or _waits(running, number, first):
            if len(group) == _MOST_STEPS:
                raise ValueError(
                    f"The program made no update in {_MOST_STEPS} steps: it skips every step, or "
                    "needs more batches for one."
                )
            group.append(self._next())
            yield group[-1]

    def _run(
        self, built: BuiltDivision, running: Running, groups: Iterable[Iterable[Batch]]
    ) -> Outcome:
        losses, gradients, changed = [], [], []
        for number, group in enumerate(groups):
            before, of_group = _own(running.values()), []
            for batch in group:
                of_group.append(running.step(batch))
                after = running.values()
                if built.recorded.sees_gradients and _updates(after) <= number:
                    changed += _changed(before, after, built.recorded)
            made = _updates(after)
            if built.recorded.sees_gradients and made != number + 1:
                raise ValueError(
                    f"The program made {made - number:g} updates of the batches of one."
                )
            losses.append(_mean_loss(of_group))
            gradients.append(_gradients(after))
        values = {name: after[name] for name in built.recorded.variables if name in after}
        return Outcome(
            built.recorded,
            losses,
            gradients,
            values,
            list(dict.fromkeys(changed)),
            running.copies_apart(),
            len(of_group),
            built.weight is not None,
            built.program is not None and exchanges_in_bfloat16(built.graph),
        )


class Reference(NamedTuple):
    """What divisions are compared with.

    Attributes:
      outcome: of the reference, in the program's own dtypes.
      exact: the same without rounding where that was possible; else the outcome.
      expected: the errors of gradients, and of values, that rounding explains, by variable.
      of_losses: that of losses.
      source: what they are known from.
    """

    outcome: Outcome
    exact: Outcome
    expected: dict[str, float]
    expected_values: dict[str, float]
    of_losses: float
    source: str


def make_reference(engine: Engine, division: Division, is_random: bool) -> Reference:
    """Runs the reference, and finds out how far rounding moves it.

    A program that draws random numbers (`is_random`) draws others in float64.
    Raises `CannotBeDivided` where the program does not run on one core.
    """
    if is_random:
        outcome = exact = engine.run(division)
        return _reference(outcome, exact, [], "the precision of its dtypes")
    try:
        exact = engine.run(dataclasses.replace(division, doubled=True))
        outcome = engine.run(division)
        others, source = [exact], "float64"
    except CannotBeDivided:
        outcome, *others = engine.orders(division)
        exact, source = outcome, "other orders of the examples"
    return _reference(outcome, exact, others, source)


def _reference(
    outcome: Outcome, exact: Outcome, others: Sequence[Outcome], source: str
) -> Reference:
    flat, least = _flat(outcome.gradients), least_error(outcome.recorded.losses)
    expected = expected_errors(flat, [_flat(other.gradients) for other in others], least)
    values = expected_errors(outcome.values, [other.values for other in others], least)
    losses = expected_errors(
        {"loss": np.array(outcome.losses)}, [{"loss": np.array(o.losses)} for o in others], least
    )
    return Reference(outcome, exact, expected, values, losses["loss"], source)


class Comparison(NamedTuple):
    """How a division compares with the reference.

    Attributes:
      gradients: of each variable, in the order of the backward pass.
      values: of each variable after the last update.
      loss: that of the losses.
    """

    gradients: list[Difference]
    values: list[Difference]
    loss: Difference

    @property
    def first(self) -> Difference | None:
        """The first difference that rounding does not explain: of gradients, values, losses."""
        every = (*self.gradients, *self.values, self.loss)
        return next((x for x in every if not x.is_equal), None)

    @property
    def worst(self) -> Difference:
        """The largest error of gradients, or else of values, in terms of what rounding explains."""
        every = self.gradients or self.values
        return max(every, key=lambda x: x.error / x.expected)


def _mean_loss(steps: Sequence[tuple[float, float]]) -> float:
    """Returns the mean of the losses of some steps, given with their weights."""
    losses, weights = np.array([one for one in steps if one[1] > 0] or steps, np.float64).T
    return float(np.average(losses, weights=weights if weights.any() else None))


def compare_with(reference: Reference, outcome: Outcome, masked: bool) -> Comparison:
    """Compares a division with the reference."""
    more = BFLOAT16 if outcome.exchanges else 0.0
    expected = {k: v + more for k, v in reference.expected.items()}
    expected_values = {k: v + more for k, v in reference.expected_values.items()}
    order = reference.outcome.recorded.order
    sees_gradients = reference.outcome.recorded.sees_gradients
    updates = range(len(reference.exact.gradients))
    keys = [f"{name}@{number}" for number in updates for name in order if sees_gradients]
    gradients = compare(_flat(outcome.gradients), _flat(reference.exact.gradients), keys, expected)
    gradients = [x._replace(variable=x.variable.rpartition("@")[0]) for x in gradients]
    told = _told_apart(outcome, reference.exact, expected)
    values = compare(told, reference.exact.values, order, expected_values)
    losses = {"loss": np.array(outcome.losses)}
    # A masked shard's loss is in the program's mean, and microbatches may weigh differently.
    is_another = masked or (outcome.batches > 1 and not outcome.weighted)
    limit = float("inf") if is_another else reference.of_losses + more
    exact = {"loss": np.array(reference.exact.losses)}
    (loss,) = compare(losses, exact, ["loss"], {"loss": limit})
    return Comparison(gradients, values, loss)


def _told_apart(
    outcome: Outcome, exact: Outcome, expected: Mapping[str, float]
) -> dict[str, np.ndarray]:
    """Returns values, but exact ones where a gradient that is no more than rounding moved them.

    Its sign is rounding, too, which Adam, say, makes a step of full size.
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


def _flat(updates: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {f"{k}@{number}": v for number, of in enumerate(updates) for k, v in of.items()}


def _own(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    hidden = (GRADIENT, UPDATES)
    return {k: np.array(v) for k, v in values.items() if not k.endswith(hidden)}


def _gradients(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    ending = len(GRADIENT)
    return {k[:-ending]: np.array(v) for k, v in values.items() if k.endswith(GRADIENT)}


def _updates(values: Mapping[str, np.ndarray]) -> float:
    return float(next((v for k, v in values.items() if k.endswith(UPDATES)), 0.0))


def _waits(running: Running, number: int, first: Mapping[str, np.ndarray]) -> bool:
    """Whether a program has still to make an update.

    Without an optimizer an update is what changes the values that there were at first.
    """
    recorded = running.built.recorded
    if recorded.sees_gradients:
        return _updates(running.values()) <= number
    return not _changed(first, running.values(), recorded)


def _changed(
    before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray], recorded: Recorded
) -> list[str]:
    return [
        name
        for name in recorded.order
        if name in before and not np.array_equal(before[name], after[name], equal_nan=True)
    ]


def _contributed(batch: Batch, mask: Sequence[bool]) -> Batch:
    """Returns the examples of the shards that contribute."""
    size = len(tf.nest.flatten(batch)[0])
    return rows_of(batch, np.repeat(np.asarray(mask), size // len(mask)))


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if not isinstance(error, ValueError) or not text:
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= 300 else f"{text[:300]}..."
