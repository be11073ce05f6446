"""The arithmetic of an island: what it has learned since a version, and what of it was sent."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple

import numpy as np

from mtf_gradsync.tools.islands.changes import Form, encoded, wide
from mtf_gradsync.tools.islands.island_checkpoint import Learned, SavedIsland, Sent
from mtf_gradsync.tools.islands.session_values import StepCounts
from mtf_gradsync.tools.islands.tensor_files import TensorSpec
from mtf_gradsync.tools.islands.versions import fragment_of


class Change(NamedTuple):
    """A change that is ready to be contributed.

    Attributes:
      tensors: the change in the form in which it is sent, by name of the tensor.
      errors: a dictionary from the names of variables to the rounding errors of this form, which
        are added to their next changes.
      sent: the values and counts from which the change was made.
    """

    tensors: dict[str, np.ndarray]
    errors: dict[str, np.ndarray]
    sent: Sent


class Learning:
    """The record of what an island has learned since the version that it took last.

    A version holds values of variables that are merged from all islands. A contribution is the
    version's values (`base`) minus the island's values when it contributes. While the contribution
    waits to be merged, the island goes on with steps. When the island takes the newer version,
    which contains the contribution, it adds what it has learned since the contribution to the
    values of this version.

    Attributes:
      version: the number of the version that was taken last; None before the first.
      base: a dictionary from the names of variables to their values in that version.
      fragments: the number of sets of variables that versions change in turn.
      sent: the contribution that waits to be merged; None if there is none.
      attempts: a dictionary from the names of contributions to the version to what they contained.
      since: the number of updates since the last contribution.
      tokens: for each fragment, the tokens since its last contribution.
      counts_before: the counters that schedules follow (global step, updates), as they were before
        the updates that are not contributed yet.
    """

    def __init__(self, specs: Mapping[str, TensorSpec]):
        self._specs = specs
        self.base: dict[str, np.ndarray] = {}
        self.fragments = 1
        self.start_from(None, {})
        self.start_counting(StepCounts())

    def start_counting(self, counts: StepCounts) -> None:
        """Begins to count steps in a session.

        `counts` are the counts of the session's optimizers now, after the session has initialized
        or restored its variables.
        """
        self._step_counts = counts
        # The tokens of gradients that are accumulated and in no update yet. None: not known, as
        # the gradients were restored.
        self._waiting_tokens: float | None = None if counts.waiting else 0.0

    def start_from(self, version: int | None, counts: Mapping[str, int]) -> None:
        """Begins to learn from a version anew, and drops what was not contributed.

        The method does not set the attribute `base`: its caller does.

        Args:
          version: the number of the version; None if there is none yet.
          counts: the counters that schedules follow (global step, updates) now, by name.
        """
        self.version = version
        self.counts_before = dict(counts)
        self.sent: Sent | None = None
        self.attempts: dict[str, Sent] = {}
        self.since = 0
        self.tokens = [0.0] * self.fragments
        self._residual: dict[str, np.ndarray] = {}

    def restore(self, saved: SavedIsland) -> None:
        """Restores all attributes to those that were saved beside a checkpoint.

        `saved` is the content of the file beside the checkpoint: what the method `saved` returned
        when the file was written.
        """
        learned = saved.learned
        self.version, self.base = learned.version, dict(saved.base)
        self.counts_before, self.attempts = dict(learned.counts), dict(saved.attempts)
        self.sent = next(reversed(saved.attempts.values())) if learned.is_sent else None
        self.since, self.tokens = learned.since, list(learned.tokens)
        self._residual, self._waiting_tokens = dict(saved.residual), learned.waiting

    def saved(self, island: str, life: int, number: int, events: int) -> SavedIsland:
        """Returns the content of the file beside a checkpoint, which `restore` takes.

        Args:
          island: the island's name.
          life: the number of the run of the island's process.
          number: the number of the last contribution in this run.
          events: the number of events that the journal has of this run.
        """
        assert self.version is not None
        learned = Learned(
            island=island, life=life, number=number, events=events, version=self.version,
            counts=self.counts_before, since=self.since, tokens=self.tokens,
            waiting=self._waiting_tokens, is_sent=self.sent is not None,
        )  # fmt: skip
        return SavedIsland(learned, self.base, self._residual, self.attempts)

    def specs_after(self, version: int) -> dict[str, TensorSpec]:
        """Returns the shapes and dtypes of the variables that the version after `version` changes.

        The result is a dictionary from the names of these variables to their shapes and dtypes.
        """
        names = fragment_of(version + 1, list(self._specs), self.fragments)
        return {name: self._specs[name] for name in names}

    def count(self, now: StepCounts, tokens: float) -> None:
        """Counts a step: an update and its tokens, unless the step accumulated or was skipped.

        Tokens of a step that only accumulates gradients are counted with the next update.

        Args:
          now: the counts of the session's optimizers after the step.
          tokens: the number of tokens of the step's loss.
        """
        before, self._step_counts = self._step_counts, now
        if self._waiting_tokens is None:  # restored sums, of which no tokens are known: estimate
            self._waiting_tokens = before.waiting * tokens
        if now.waiting:
            self._waiting_tokens += tokens if now.waiting != before.waiting else 0.0
            return
        tokens += self._waiting_tokens
        self._waiting_tokens = 0.0
        if now.skipped > before.skipped:
            return
        self.since += 1
        self.tokens = [count + tokens for count in self.tokens]

    # Contributions.

    @property
    def tokens_to_send(self) -> float:
        """The number of tokens that the next contribution is learned from.

        Tokens are counted from the last contribution of the variables that the next version
        changes.
        """
        assert self.version is not None
        return self.tokens[self.version % self.fragments]

    def changed(self, values: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Returns the change of each variable that the next version changes, in float32.

        The change of a variable is its value in `base` minus its value in `values`, the session's
        values by name. The result is a dictionary from the names of variables to their changes.
        """
        assert self.version is not None
        names = fragment_of(self.version + 1, list(self.base), self.fragments)
        return {n: (self.base[n] - wide(values[n])).astype(np.float32) for n in names}

    def to_send(
        self,
        changed: Mapping[str, np.ndarray],
        values: Mapping[str, Any],
        counts: dict[str, int],
        form: Form,
    ) -> Change:
        """Returns the change to contribute, in the form in which it is sent.

        The rounding errors of earlier contributions are added to the change before it is rounded.

        Args:
          changed: the result of the method `changed`.
          values: the session's values by name, from which it was made.
          counts: the counters that schedules follow, now, by name.
          form: how the change is sent: "float32", "bfloat16", "int8" or "int4".
        """
        assert self.version is not None
        residual = {name: self._residual[name] for name in changed if name in self._residual}
        whole = {n: x + residual[n] if n in residual else x for n, x in changed.items()}
        tensors, errors = encoded(whole, form)
        sent = Sent(
            self.version, {name: values[name] for name in changed}, counts, self.tokens_to_send,
            self.since, residual,
        )  # fmt: skip
        return Change(tensors, errors, sent)

    def send(self, change: Change, name: str) -> None:
        """Records that a change was contributed, and begins to count the next one.

        `name` is the name of the object (a file of the folder) that holds the contribution. It is
        "" in a replay, which writes nothing.
        """
        if name:
            self.attempts[name] = change.sent
        self.sent = change.sent
        self.since, self.tokens[change.sent.version % self.fragments] = 0, 0.0
        self._residual.update(change.errors)

    def take_back(self) -> None:
        """Treats the last contribution as not made, so that the next one contains it."""
        assert self.sent is not None
        sent, self.sent = self.sent, None
        self.since += sent.steps
        self.tokens[sent.version % self.fragments] += sent.tokens
        for name in sent.values:
            self._residual.pop(name, None)
        self._residual.update(sent.residual)

    def merged_was(self, name: str) -> None:
        """Records which contribution to the version was merged.

        `name` is the name of the merged contribution, a key of `attempts`. If the island made
        further attempts to contribute after this one, the tokens and updates that only these have
        count as not contributed.
        """
        then, sent = self.attempts[name], self.sent
        if sent is not then:
            fragment = then.version % self.fragments
            self.tokens[fragment] += (sent.tokens if sent else 0.0) - then.tokens
            self.since += (sent.steps if sent else 0) - then.steps
        self.sent = then

    # Versions.

    def take(
        self, version: int, merged: Mapping[str, np.ndarray], now: Mapping[str, Any], is_open: bool
    ) -> dict[str, np.ndarray]:
        """Takes a newer version, and returns what was learned that it does not contain.

        The caller of `take` adds the result to the version's values by the method `values_of`.

        Args:
          version: the version's number.
          merged: a dictionary from the names of the variables that changed to their values in the
            version.
          now: the session's values by name.
          is_open: whether `sent` may still be merged into a later version. If so, its change is
            kept; if not, the version contains it.

        Returns:
          A dictionary from the names in `merged` to what is to be added to the values in `merged`.
        """
        sent = self.sent
        before = {name: wide(x) for name, x in (sent.values if sent else {}).items()}
        learned = {name: wide(now[name]) - before.get(name, self.base[name]) for name in merged}
        self.version = version
        if not (is_open and sent):
            self.sent, self.attempts = None, {}
            return learned
        more = {name: before[name] - self.base[name] for name in before}
        learned = {name: x + more[name] if name in more else x for name, x in learned.items()}
        kept = {name: wide(merged[name]) + more[name] for name in more}
        self.sent = sent._replace(values=kept)
        self.attempts = {name: self.sent for name in self.attempts}
        return learned

    def values_of(
        self,
        merged: Mapping[str, np.ndarray],
        learned: Mapping[str, np.ndarray],
        dtypes: Mapping[str, np.dtype],
    ) -> dict[str, np.ndarray]:
        """Returns new values of variables by name: merged values plus what was learned since.

        The method also sets `base` for the variables in `merged`, so that the island's next change
        contains what is in `learned`.

        Args:
          merged: a dictionary from the names of variables to their values in the version.
          learned: a dictionary from names to what was learned and is not in the version; nothing
            was learned of a variable that it lacks.
          dtypes: a dictionary from names to the dtypes of the session's variables.
        """
        written: dict[str, np.ndarray] = {}
        for name, value in merged.items():
            since = learned.get(name, np.zeros((), value.dtype))
            # If nothing was learned since, these are exactly the merged values.
            written[name] = (value + since).astype(dtypes[name])
            is_exact = written[name].dtype == value.dtype
            self.base[name] = value if is_exact else wide(written[name]) - since
        return written

    def follow(
        self, version: Mapping[str, int], counts: Mapping[str, int], before: Mapping[str, int]
    ) -> dict[str, int]:
        """Returns new values of the island's counters, by name.

        The new value of a counter is the version's value plus what the island has counted since its
        contribution. If this is lower than the island's present value, or if the version does not
        have the counter, the counter keeps the present value.

        Args:
          version: the version's counters, by name; {} if the island follows its own counters.
          counts: the island's counters now.
          before: the island's counters when it made the contribution that the version contains.
        """
        since = {key: counts[key] - before[key] for key in counts}
        behind = {key: version[key] + since[key] for key in counts.keys() & version.keys()}
        new = {key: max(count, behind.get(key, count)) for key, count in counts.items()}
        self.counts_before = {key: new[key] - since[key] for key in counts}
        return new
