"""Runs a program in several divisions, from the same initial values and on the same batches.

A step runs the program once, on one batch. An update changes the program's variables. It takes one
step, or several steps whose gradients are accumulated.
"""

from __future__ import annotations

import itertools
import zlib
from typing import Any, Iterable, Iterator, NamedTuple, Sequence

import numpy as np

from mtf_gradsync.extension import STATE_COLLECTION, GradientStrategy, tf
from mtf_gradsync.tools.verification.causes import narrow_dtypes, rounds_to_bfloat16
from mtf_gradsync.tools.verification.comparing import Values
from mtf_gradsync.tools.verification.divisions import Division
from mtf_gradsync.tools.verification.programs import (
    Batch,
    BuiltDivision,
    NotOnCoresError,
    Running,
    UserProgram,
    batch_parts,
    joined_batch,
    select_examples,
    size_of,
)
from mtf_gradsync.tools.verification.recorded_program import (
    GRADIENT,
    RANDOM,
    UPDATES,
    RecordedProgram,
)

# After so many microbatch steps without an update, none is expected any more. The second number is
# for programs that apply gradients of zeros in steps without an update.
_MOST_STEPS, _MOST_ZEROS = 256, 32
# The size of the random numbers that are added to a variable, relative to its root mean square; and
# the size for a variable that is zero.
_PERTURBATION, _PERTURBATION_OF_ZEROS = 0.05, 0.02


class Outcome(NamedTuple):
    """The results of running a program in a division: losses, gradients, values and observations.

    Attributes:
      recorded: what was recorded when the program was built in this division.
      losses: for each update the mean loss of its steps, weighted if the program gives weights.
      gradients: for each update, a dictionary from the names of variables to their gradients.
      values: a dictionary from the names of variables to their values after the last update. It
        does not have the state of wrappers, except moving averages.
      changed_before: names of variables and slots that changed in a step without an update.
      written_early: names of the program's untrained variables that changed in a step without an
        update.
      different_copies: names of variables whose copies differ between cores.
      equal_draws: a pair for each tensor of random numbers that is equal on several cores: the
        tensor's name, and the mesh axes along which these cores lie.
      batches: the largest number of batches in an update.
      weighted: whether the program gives a weight for the loss of each step.
      exchanges: whether the program's model sends float32 numbers as bfloat16.
      rounds: whether the update has tensors in bfloat16 although the model has none.
    """

    recorded: RecordedProgram
    losses: list[float]
    gradients: list[dict[str, np.ndarray]]
    values: dict[str, np.ndarray]
    changed_before: list[str]
    written_early: list[str]
    different_copies: list[str]
    equal_draws: list[tuple[str, str]]
    batches: int
    weighted: bool
    exchanges: bool
    rounds: bool


class CannotBeDivided(Exception):
    """The error of a program that does not build or run in a division; its text says why."""


class BatchesEndError(ValueError):
    """The error of an input that has too few batches for the requested updates."""


class BatchSeries(NamedTuple):
    """The batches on which a built program runs, and the values to which its counters are set.

    Attributes:
      groups: for each update, the list of its batches.
      counters: for each update, the values to which the program's counters (such as a global step)
        are set before the update; None to set no counters.
    """

    groups: list[list[Batch]]
    counters: Sequence[Values] | None = None


class Engine:
    """A runner of the divisions of one program.

    Call the method `begin` before the other methods. The results of each division (an `Outcome`)
    are cached.

    Args:
      program: the program.
      batches: the program's batches, in order.
      steps: the number of updates to make.
      perturbs: whether small random numbers are added to the initial values of trained variables.
    """

    def __init__(self, program: UserProgram, batches: Iterable[Batch], steps: int, perturbs: bool):
        self._program, self._batches, self._steps = program, iter(batches), steps
        self._perturbs = perturbs
        self.groups: list[list[Batch]] = []
        self.initial: dict[str, np.ndarray] = {}
        # For each update, the program's own counters before its first step and before its last one.
        self.counters_of_updates: list[tuple[Values, Values]] = []
        self._applied: list[int] = []  # how often an update applies gradients
        self._done: dict[Any, Outcome | CannotBeDivided] = {}

    _recorded: RecordedProgram  # of the unchanged program; set by `begin`

    @property
    def steps_per_update(self) -> int:
        """The largest number of batches in an update of the program as the user configured it."""
        return max(map(len, self.groups))

    @property
    def repeats_steps(self) -> bool:
        """Whether the reference runs the program's microbatch steps one by one.

        If False, the reference makes each update from one step, on a batch with the examples of all
        microbatch steps. If True, the program seems to accumulate gradients by code of its own,
        which the reference cannot remove. The engine assumes that a program has such code in two
        cases: an optimizer gets gradients of zeros in steps without an update, or no optimizer was
        seen in a program that needs several steps for an update.
        """
        sees_gradients = self._recorded.sees_gradients
        return max(self._applied) > 1 or (self.steps_per_update > 1 and not sees_gradients)

    def begin(self, division: Division) -> Outcome:
        """Runs the program as the user configured it; records its batches and initial values.

        All other divisions then run on the recorded batches, from the recorded initial values.
        `division` is the division that the user configured, and the method returns the results of
        the run in it.

        Raises:
          CannotBeDivided: the program fails, or makes no update.
          BatchesEndError: there are too few batches.
          NotOnCoresError: the program makes a placement mesh although `division` has a SIMD
            runtime. Call `begin` again with the runtime "placement_mesh".
        """
        first = self._next_batch()
        try:
            built = self._program.build(division, first)
            with built.session() as running:
                if self._perturbs:
                    running.write(_perturbed(running.values(), built.recorded))
                self.initial = _without_records(running.values())
                outcome = self._run_built(
                    built, running, self._batches_by_update(running, first), None
                )
        except BatchesEndError:
            raise
        except NotOnCoresError:
            self._batches = itertools.chain([first], self._batches)
            raise
        except Exception as error:  # whatever a user's program raises
            raise CannotBeDivided(_one_line(error)) from error
        self._done[division.key] = outcome
        self._recorded = outcome.recorded
        return outcome

    def run(self, division: Division) -> Outcome:
        """Returns the results of running the program in `division`, as an `Outcome`.

        Results of an earlier call are taken from a cache. The method raises `CannotBeDivided` if
        the program cannot be built or run in `division`.
        """

        def series(groups: list[list[Batch]]) -> BatchSeries:
            # An update from joined steps has the counters of the last of these steps.
            is_joined = any(len(x) < len(own) for x, own in zip(groups, self.groups))
            return BatchSeries(
                groups, [last for _, last in self.counters_of_updates] if is_joined else None
            )

        return self.run_series(division, [series])[0]

    def run_series(self, division: Division, series: Sequence[Any]) -> list[Outcome]:
        """Runs a division several times, from the same initial values each time.

        Args:
          division: the division.
          series: a list of functions, one for each run. A function takes the division's batches: a
            list that has the list of batches of each update. It returns the `BatchSeries` on which
            the division runs.

        Returns:
          An `Outcome` with the results of each run. That of the first run is kept for later calls
          of `run`.

        Raises:
          CannotBeDivided: the program does not build or run in this division.
        """
        done = self._done.get(division.key)
        if isinstance(done, CannotBeDivided):
            raise done
        if done is not None and len(series) == 1:
            return [done]
        try:
            groups = [self._batches_of(division, group) for group in self.groups]
            outcomes = self._build_and_run(division, [make(groups) for make in series])
        except Exception as error:  # whatever a user's program raises
            self._done[division.key] = CannotBeDivided(_one_line(error))
            raise self._done[division.key] from error  # type: ignore[misc]
        self._done[division.key] = outcomes[0]
        return outcomes

    def _build_and_run(self, division: Division, series: Sequence[BatchSeries]) -> list[Outcome]:
        """Builds a division, and runs it on each series of batches from the same initial values.

        `series` has the batches of each run, and the result has an `Outcome` for each run. A graph
        is for batches of one size. So if the size of the batches changes from one update to the
        next, the program is built again. The new program then begins with the values that variables
        had after the update before.
        """
        sizes = [size_of(group[0]) for group in series[0].groups]
        outcomes: list[list[Outcome]] = [[] for _ in series]
        left: list[Values] = []
        begin = 0
        for _, some in itertools.groupby(sizes):
            end = begin + len(list(some))
            built = self._program.build(division, series[0].groups[begin][0])
            with built.session() as running:
                if not begin:
                    running.write(self.initial)
                    left = [running.values()] * len(series)
                for number, one in enumerate(series):
                    if begin or number:
                        running.write(left[number])
                    groups = one.groups[begin:end]
                    outcomes[number].append(
                        self._run_built(built, running, groups, one.counters, begin)
                    )
                    left[number] = running.values()
            begin = end
        return [_joined_outcomes(each) for each in outcomes]

    def _batches_of(self, division: Division, group: list[Batch]) -> list[Batch]:
        """Returns the batches from which a division makes an update.

        `group` has the batches from which the program makes the same update in the division that
        the user configured. If `division` does not accumulate gradients, these batches are joined
        into one. If it adds microbatch steps, the batches are joined and split again: into one
        batch for each microbatch step. In other cases `group` itself is returned.
        """
        if self.repeats_steps:
            return group
        changes = division.changes
        if division.is_reference and changes.mask is not None:
            return [_without_masked_shards(joined_batch(group), changes.mask)]
        taken_out = changes.unwrapped or any(
            x in changes.without for x in self._recorded.accumulating_wrappers
        )
        if len(group) > 1 and taken_out:
            return [joined_batch(group)]
        if changes.micro_steps > 1:
            return batch_parts(joined_batch(group), changes.micro_steps)
        return group

    def _next_batch(self) -> Batch:
        try:
            return next(self._batches)
        except StopIteration:
            made = len(self.counters_of_updates)
            raise BatchesEndError(
                f"The batches ended after {made} of {self._steps} updates: give more batches, or "
                "fewer steps."
            ) from None

    def _batches_by_update(self, running: Running, first: Batch) -> Iterator[Iterable[Batch]]:
        """Yields, for each update, an iterator of the batches from which the program makes it.

        The caller takes a batch from an iterator, runs a step on this batch in the session
        `running`, and then takes the next batch. The iterator of an update ends when variables show
        that the update was made. The batches are also recorded in `self.groups`. `first` is the
        first batch of all updates.
        """
        self._batches = itertools.chain([first], self._batches)
        for _ in range(self._steps):
            group: list[Batch] = []
            self.groups.append(group)
            yield self._until_update(running, group)

    def _until_update(self, running: Running, group: list[Batch]) -> Iterator[Batch]:
        """Yields the batches of one update, and appends them to `group`; see `_batches_by_update`.

        The caller runs a step on each batch in the session `running`. The iterator ends when a step
        has made an update. It raises ValueError if very many steps in a row make no update.
        """
        recorded = running.built.recorded
        first = before = running.values()
        counters: dict[str, np.ndarray] = {}
        while True:
            if len(group) == (_MOST_ZEROS if _updates(before) > _updates(first) else _MOST_STEPS):
                raise ValueError(
                    f"The program made no update in {len(group)} steps: it skips every step, "
                    "needs more batches for an update, or all of its gradients are zero."
                )
            group.append(self._next_batch())
            yield group[-1]
            after = running.values()
            if len(group) == 1:
                counters = _counters(running.built, first, after)
            if _is_updated(recorded, before, after):
                break
            before = after
        self.counters_of_updates.append((counters, {name: before[name] for name in counters}))
        self._applied.append(int(_updates(after) - _updates(first)))

    def _run_built(
        self,
        built: BuiltDivision,
        running: Running,
        groups: Iterable[Iterable[Batch]],
        counters: Sequence[Values] | None,
        begin: int = 0,
    ) -> Outcome:
        """Makes updates by a built program in its session; returns their results as an `Outcome`.

        An update changes the program's variables, and takes one step or several.

        Args:
          built: the program, built in a division.
          running: the session of `built`, in which the steps run.
          groups: for each update to make, the batches of its steps.
          counters: a list with an entry for each update of the run, counted from 0. The entry is a
            dictionary from the names of the program's counters, such as its global step, to the
            values that they get before the update. If `counters` is None, the counters are left as
            they are.
          begin: how many updates of the run earlier calls have made. The first update of this call
            has the number `begin`.

        Raises:
          ValueError: in the steps of one update, the program applies gradients more or fewer times
            than it does as the user configured it.
        """
        recorded, division = built.recorded, built.division
        losses, gradients, changed, early, joined = [], [], [], [], 1
        after = running.values()
        for number, group in enumerate(groups, begin):
            if counters is not None:
                running.write(counters[number])
                after = running.values()
            first = after
            of_group: list[tuple[float, float]] = []
            for batch in group:
                before = after
                if of_group and division.changes.micro_steps > 1 and self.counters_of_updates:
                    # The program does not have these added microbatch steps: reset its counters.
                    running.write(
                        {name: first[name] for name in self.counters_of_updates[number][0]}
                    )
                of_group.append(running.step(batch))
                after = running.values()
                if not _is_updated(recorded, before, after):
                    changed += _changed(before, after, [*recorded.order, *recorded.slots])
                    early += _changed(before, after, _untrained_variables(built, after))
            made = int(_updates(after) - _updates(first))
            expected = 1 if len(of_group) == 1 else self._applied[number:] and self._applied[number]
            if recorded.sees_gradients and expected and made != expected:
                raise ValueError(_reason(division, made, len(of_group)))
            joined = max(joined, len(of_group))
            losses.append(_mean_loss(of_group))
            gradients.append(_gradients(after))
        hidden = _state_of_wrappers(built) - recorded.averages
        return Outcome(
            recorded,
            losses,
            gradients,
            {k: v for k, v in _without_records(after).items() if k not in hidden},
            list(dict.fromkeys(changed)) if recorded.sees_gradients else [],
            list(dict.fromkeys(early)),
            *running.compare_cores(),
            joined,
            built.weight is not None,
            built.program is not None and _exchanges_in_bfloat16(built),
            rounds_to_bfloat16(built.graph, narrow_dtypes(recorded.losses)),
        )


def _joined_outcomes(outcomes: Sequence[Outcome]) -> Outcome:
    """Joins the results of several runs, each of which goes on from the run before, into one.

    `outcomes` are the results of the runs, in their order. The returned `Outcome` has the losses
    and gradients of all updates, and the values after the last run.
    """

    def both(field: str) -> list[Any]:
        return [x for one in outcomes for x in getattr(one, field)]

    return outcomes[-1]._replace(
        losses=both("losses"),
        gradients=both("gradients"),
        changed_before=list(dict.fromkeys(both("changed_before"))),
        written_early=list(dict.fromkeys(both("written_early"))),
        different_copies=list(dict.fromkeys(both("different_copies"))),
        batches=max(one.batches for one in outcomes),
    )


def reordered(groups: list[list[Batch]]) -> list[list[Batch]]:
    """Puts the examples of each batch into another order, at random; returns the new batches.

    The new order is the same in each call. `groups` has a list of batches for each update.
    """
    shuffled = []
    for group in groups:
        rows = [np.random.RandomState(0).permutation(size_of(batch)) for batch in group]
        shuffled.append([select_examples(batch, some) for batch, some in zip(group, rows)])
    return shuffled


def _perturbed(values: Values, recorded: RecordedProgram) -> dict[str, np.ndarray]:
    """Adds small random numbers to the values of trained variables; returns the sums.

    The seed of the random numbers for a variable is made from the variable's name, so that they are
    the same in each call.

    Args:
      values: a dictionary from names to the values of all variables.
      recorded: what was recorded when the program was built; it says which variables are trained.

    Returns:
      A dictionary from the names of the trained variables to the new values, in float64.
    """
    found = {}
    for name in recorded.variables:
        value = values.get(name)
        if value is None or not tf.as_dtype(value.dtype).is_floating:
            continue
        wide = np.asarray(value, np.float64)
        scale = _PERTURBATION * float(np.sqrt(np.mean(wide * wide))) if wide.size else 0.0
        random = np.random.RandomState(zlib.crc32(name.encode()))
        found[name] = wide + (scale or _PERTURBATION_OF_ZEROS) * random.randn(*wide.shape)
    return found


def _mean_loss(steps: Sequence[tuple[float, float]]) -> float:
    """Returns the mean of losses, weighted by their weights; `steps` are pairs (loss, weight).

    If all weights are 0, the mean is not weighted.
    """
    losses, weights = np.array([one for one in steps if one[1] > 0] or steps, np.float64).T
    return float(np.average(losses, weights=weights if weights.any() else None))


def _without_records(values: Values) -> dict[str, np.ndarray]:
    """Returns `values` without the variables that `RecordedProgram` has added to the program.

    `values`, and the result, are dictionaries from the names of variables to their values.
    """
    hidden = (GRADIENT, UPDATES, RANDOM)
    return {k: np.array(v) for k, v in values.items() if not k.endswith(hidden)}


def _gradients(values: Values) -> dict[str, np.ndarray]:
    ending = len(GRADIENT)
    return {k[:-ending]: np.array(v) for k, v in values.items() if k.endswith(GRADIENT)}


def _updates(values: Values) -> float:
    return float(next((v for k, v in values.items() if k.endswith(UPDATES)), 0.0))


def _is_updated(recorded: RecordedProgram, before: Values, after: Values) -> bool:
    """Returns whether a step has made an update.

    If an optimizer was seen in the program, a step makes an update if the optimizer has applied
    gradients. Gradients that are all zero and change no variable do not count: a program that
    accumulates gradients by code of its own gives its optimizer such gradients in steps without an
    update. If no optimizer was seen, a step makes an update if it changes trained variables.

    Args:
      recorded: what was recorded when the program was built.
      before: a dictionary from the names of all variables to their values before the step.
      after: the same after the step.
    """
    is_applied = _updates(after) > _updates(before)
    if recorded.sees_gradients and not is_applied:
        return False
    if is_applied and any(g.any() for g in _gradients(after).values()):
        return True
    return bool(_changed(before, after, recorded.order))


def _changed(before: Values, after: Values, names: Iterable[str]) -> list[str]:
    return [
        name
        for name in names
        if name in before and not np.array_equal(before[name], after[name], equal_nan=True)
    ]


def _untrained_variables(built: BuiltDivision, values: Values) -> list[str]:
    """Returns the names of the variables that are not trained, and that the user's program made.

    An optimizer's slots and wrappers' variables are not among them. `values` is a dictionary from
    the names of all variables to their values.
    """
    others = {*_state_of_wrappers(built), *built.recorded.order, *built.recorded.slots}
    return [name for name in _without_records(values) if name not in others]


def _state_of_wrappers(built: BuiltDivision) -> set[str]:
    return {note.name for note in built.graph.get_collection(STATE_COLLECTION)}


def _counters(built: BuiltDivision, before: Values, after: Values) -> dict[str, np.ndarray]:
    """Returns the program's own counters: its scalar variables that a step has raised by 1.

    Args:
      built: the built program.
      before: a dictionary from names to the values of variables before the step.
      after: the same after the step.

    Returns:
      A dictionary from the names of the counters to their values before the step.
    """
    return {
        name: before[name]
        for name in _untrained_variables(built, after)
        if before[name].dtype.kind in "iuf"
        and before[name].ndim == 0
        and after[name] - before[name] == 1
    }


def _without_masked_shards(batch: Batch, mask: Sequence[bool]) -> Batch:
    """Removes from a batch the examples of the shards for which `mask` is False.

    `mask` has a bool for each shard. In a batch, the examples of the first shard come first, then
    those of the second shard, and so on. Each shard has the same number of examples.
    """
    return select_examples(batch, np.repeat(np.asarray(mask), size_of(batch) // len(mask)))


def _exchanges_in_bfloat16(built: BuiltDivision) -> bool:
    """Returns whether the model of a SIMD program sends float32 numbers as bfloat16.

    Mesh-TensorFlow's all-to-all sends float32 numbers as bfloat16. The result is False if a wrapper
    reduces gradients by a strategy object: the strategy might send bfloat16 as well, and the graph
    does not show whether the model or the strategy sends it.
    """
    wrappers, out = built.recorded.wrappers, built.division.changes.without
    strategies = [getattr(one, "reducer", None) for k, one in wrappers.items() if k not in out]
    return not any(isinstance(one, GradientStrategy) for one in strategies) and any(
        op.type == "AllToAll" and op.inputs[0].dtype == tf.bfloat16
        for op in built.graph.get_operations()
    )


def _reason(division: Division, made: int, batches: int) -> str:
    if division.changes.micro_steps > 1 and made == batches:
        return (
            "gradients are applied on every microbatch step, as accumulation found no optimizer to "
            "be put around: apply them by one apply_grads, or wrap the optimizer in "
            "gs.GradientAccumulationOptimizer(opt, backward_passes_per_step=...)"
        )
    return (
        f"The program made {made} updates from {batches} batches, and it makes one from them as "
        "configured."
    )


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if not isinstance(error, ValueError) or not text:
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= 300 else f"{text[:300]}..."
