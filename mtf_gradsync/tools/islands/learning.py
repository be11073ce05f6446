"""The arithmetic of an island: what it has learned since a version, and how much of it was sent."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple

import numpy as np

from mtf_gradsync.tools.islands.changes import Form, encoded, wide
from mtf_gradsync.tools.islands.island_checkpoint import Learned, SavedIsland, Sent
from mtf_gradsync.tools.islands.session_values import StepCounts
from mtf_gradsync.tools.islands.tensor_files import Arrays, Specs, TensorSpec
from mtf_gradsync.tools.islands.versions import fragment_of


class RoundedChange(NamedTuple):
    """A change in the form in which it is sent, and the errors that rounding to this form makes.

    Attributes:
      tensors: a dictionary from the names of tensors to the arrays that are sent.
      errors: a dictionary from the names of variables to rounding errors: the exact change minus
        the change that is sent. They are added to the next change of the variable.
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
      attempts: a dictionary from the names of all contributions that this island has made from
        `version` to what they contained. There are several if no merger merged the first
        contribution for a long time, so that the island has contributed again.
      since: the number of updates since the last contribution.
      tokens: for each fragment, the tokens since its last contribution.
      counts_before: the counters that schedules follow (global step, updates), as they were before
        the updates that are not contributed yet.
    """

    def __init__(self, specs: Specs):
        self._specs = specs
        self.base: dict[str, np.ndarray] = {}
        self.fragments = 1
        self.start_from(None, {})
        self.start_counting(StepCounts())

    def start_counting(self, counts: StepCounts) -> None:
        """Begins to count steps in a session.

        `counts` says how many steps the session's optimizers have accumulated and skipped so far.
        It is read after the session has initialized or restored its variables.
        """
        self._step_counts = counts
        # The tokens of gradients that are accumulated and in no update yet. None: not known, as
        # the gradients were restored.
        self._waiting_tokens: float | None = None if counts.waiting else 0.0

    def start_from(self, version: int | None, counts: Mapping[str, int]) -> None:
        """Begins to record from a version on, and forgets what was not contributed before.

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

        `saved` is the content of the file beside the checkpoint: what `state_to_save` returned
        when the file was written.
        """
        learned = saved.learned
        self.version, self.base = learned.version, dict(saved.base)
        self.counts_before, self.attempts = dict(learned.counts), dict(saved.attempts)
        self.sent = next(reversed(saved.attempts.values())) if learned.is_sent else None
        self.since, self.tokens = learned.since, list(learned.tokens)
        self._residual, self._waiting_tokens = dict(saved.residual), learned.waiting

    def state_to_save(self, island: str, life: int, number: int, events: int) -> SavedIsland:
        """Returns the content of the file to write beside a checkpoint, for `restore`.

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

    def count_step(self, counts: StepCounts, tokens: float) -> None:
        """Counts a step: an update and its tokens, if the step has made an update.

        Tokens of a step that only accumulates gradients are counted with the next update. Tokens of
        a skipped update are not counted.

        Args:
          counts: how many steps the session's optimizers have accumulated and skipped, after the
            step.
          tokens: the number of tokens of the step's loss.
        """
        before, self._step_counts = self._step_counts, counts
        if self._waiting_tokens is None:  # restored sums, of which no tokens are known: estimate
            self._waiting_tokens = before.waiting * tokens
        if counts.waiting:
            self._waiting_tokens += tokens if counts.waiting != before.waiting else 0.0
            return
        tokens += self._waiting_tokens
        self._waiting_tokens = 0.0
        if counts.skipped > before.skipped:
            return
        self.since += 1
        self.tokens = [count + tokens for count in self.tokens]

    # Contributions.

    @property
    def tokens_to_send(self) -> float:
        """The number of tokens that the next contribution is learned from.

        The next contribution is for the variables that the next version changes. Tokens are counted
        from the last contribution for these variables.
        """
        assert self.version is not None
        return self.tokens[self.version % self.fragments]

    def change_since_version(self, values: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Returns what the island has changed since `base`, in the variables of the next version.

        The result is a dictionary from the names of the variables that the next version changes to
        float32 arrays: the variable's value in `base` minus its value in `values`. `values` is a
        dictionary from the names of variables to their values in the session now.
        """
        assert self.version is not None
        names = fragment_of(self.version + 1, list(self.base), self.fragments)
        return {n: (self.base[n] - wide(values[n])).astype(np.float32) for n in names}

    def rounded_change(
        self, changed: Arrays, values: Mapping[str, Any], counts: dict[str, int], form: Form
    ) -> RoundedChange:
        """Adds earlier rounding errors to a change, and rounds it to the form in which it is sent.

        Args:
          changed: the change to contribute, as `change_since_version` returns it.
          values: a dictionary from the names of variables to the values in the session from which
            the change was computed.
          counts: a dictionary from the names of the counters that schedules follow to their values
            now.
          form: the form in which the change is sent: "float32", "bfloat16", "int8" or "int4".
        """
        assert self.version is not None
        residual = {name: self._residual[name] for name in changed if name in self._residual}
        whole = {n: x + residual[n] if n in residual else x for n, x in changed.items()}
        tensors, errors = encoded(whole, form)
        sent = Sent(
            self.version, {name: values[name] for name in changed}, counts, self.tokens_to_send,
            self.since, residual,
        )  # fmt: skip
        return RoundedChange(tensors, errors, sent)

    def record_contribution(self, change: RoundedChange, name: str) -> None:
        """Records that a change was contributed, and counts tokens and updates from 0 again.

        `name` is the name of the object (a file of the folder) that holds the contribution. It is
        "" if the island repeats an earlier run (`Island(replay=True)`) and writes no objects.
        """
        if name:
            self.attempts[name] = change.sent
        self.sent = change.sent
        self.since, self.tokens[change.sent.version % self.fragments] = 0, 0.0
        self._residual.update(change.errors)

    def withdraw_contribution(self) -> None:
        """Treats the contribution `sent` as not made, so that the next one contains its change.

        The method adds the tokens and updates of the contribution to those that are not contributed
        yet, and restores the rounding errors from before it.
        """
        assert self.sent is not None
        sent, self.sent = self.sent, None
        self.since += sent.steps
        self.tokens[sent.version % self.fragments] += sent.tokens
        for name in sent.values:
            self._residual.pop(name, None)
        self._residual.update(sent.residual)

    def record_merged(self, name: str) -> None:
        """Sets `sent` to the contribution that the merger has merged, and corrects the counts.

        The island may have contributed several times from the same version; the merger merges one
        of these contributions. The tokens and updates that only a later contribution contains count
        as not contributed. `name` is the name of the merged contribution, a key of `attempts`.
        """
        then, sent = self.attempts[name], self.sent
        if sent is not then:
            fragment = then.version % self.fragments
            self.tokens[fragment] += (sent.tokens if sent else 0.0) - then.tokens
            self.since += (sent.steps if sent else 0) - then.steps
        self.sent = then

    # Versions.

    def take_version(
        self, version: int, merged: Arrays, now: Mapping[str, Any], may_still_merge: bool
    ) -> dict[str, np.ndarray]:
        """Records that the island takes a newer version; returns what to add to the new values.

        The result is what the island has learned and the version does not contain. The caller
        passes it to `add_learned`.

        Args:
          version: the number of the newer version.
          merged: a dictionary from the names of the variables that the version changed to their
            values in it.
          now: a dictionary from the names of variables to their values in the session.
          may_still_merge: whether the contribution in `sent` may still be merged into a later
            version. If True, the arrays that this method returns contain the contribution's change,
            and the contribution stays in `sent`. If False, the version contains the change, and
            `sent` becomes None.

        Returns:
          A dictionary from the names in `merged` to arrays, to be added to the values in `merged`.
        """
        sent = self.sent
        before = {name: wide(x) for name, x in (sent.values if sent else {}).items()}
        learned = {name: wide(now[name]) - before.get(name, self.base[name]) for name in merged}
        self.version = version
        if not (may_still_merge and sent):
            self.sent, self.attempts = None, {}
            return learned
        more = {name: before[name] - self.base[name] for name in before}
        learned = {name: x + more[name] if name in more else x for name, x in learned.items()}
        kept = {name: wide(merged[name]) + more[name] for name in more}
        self.sent = sent._replace(values=kept)
        self.attempts = {name: self.sent for name in self.attempts}
        return learned

    def add_learned(
        self, merged: Arrays, learned: Arrays, dtypes: Mapping[str, np.dtype]
    ) -> dict[str, np.ndarray]:
        """Adds what the island has learned to a version's values; returns the sums by name.

        The method also sets `base` for the variables in `merged`, so that the island's next change
        contains what is in `learned`.

        Args:
          merged: a dictionary from the names of variables to their values in the version.
          learned: a dictionary from the names of variables to arrays to add, as `take_version`
            returns it; for a variable that is not in it, nothing is added.
          dtypes: a dictionary from the names of variables to the dtypes of the results.
        """
        written: dict[str, np.ndarray] = {}
        for name, value in merged.items():
            since = learned.get(name, np.zeros((), value.dtype))
            # If nothing was learned since, these are exactly the merged values.
            written[name] = (value + since).astype(dtypes[name])
            is_exact = written[name].dtype == value.dtype
            self.base[name] = value if is_exact else wide(written[name]) - since
        return written

    def advance_counters(
        self, version: Mapping[str, int], counts: Mapping[str, int], before: Mapping[str, int]
    ) -> dict[str, int]:
        """Returns the values that the island's counters get when it takes a version, by name.

        A counter, such as the global step, gets the version's value plus what the island has
        counted since its contribution. If this sum is lower than the island's own value, or if the
        version does not have the counter, the counter keeps the island's own value.

        Args:
          version: a dictionary from the names of counters to their values in the version; {} if the
            island does not follow the version's counters.
          counts: the island's own values of the counters now, by name.
          before: the island's own values when it made the contribution that the version contains.
        """
        since = {key: counts[key] - before[key] for key in counts}
        behind = {key: version[key] + since[key] for key in counts.keys() & version.keys()}
        new = {key: max(count, behind.get(key, count)) for key, count in counts.items()}
        self.counts_before = {key: new[key] - since[key] for key in counts}
        return new
