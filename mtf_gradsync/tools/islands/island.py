"""`Island`: a training program that shares what it learns with other islands, through a folder."""

from __future__ import annotations

import logging
import time
from typing import Any, Literal, Mapping, NamedTuple, Sequence, get_args

import numpy as np

from mtf_gradsync.extension import counted, is_number
from mtf_gradsync.tools.islands.changes import FORMS, Form, MergeSettings, wide
from mtf_gradsync.tools.islands.exchange import Exchange, IslandError, Unmerged
from mtf_gradsync.tools.islands.folder import Folder, FolderError
from mtf_gradsync.tools.islands.island_checkpoint import SavedIsland, Sent, saved_beside
from mtf_gradsync.tools.islands.journal import events_by_step
from mtf_gradsync.tools.islands.learning import Learning
from mtf_gradsync.tools.islands.merger import Merger, MergerThread, Waiting, poll_seconds_of
from mtf_gradsync.tools.islands.objects import ISLAND_NAME, ContributionFacts, Decision, IslandTotal
from mtf_gradsync.tools.islands.session_values import StepCounts, Values
from mtf_gradsync.tools.islands.tensor_files import Arrays, OtherTensorsError, TensorSpec, dtype_of
from mtf_gradsync.tools.islands.versions import ReadVersion

logger = logging.getLogger(__name__)

Wait = Literal["grace", "none"]
Follow = Literal["version", "own"]


def check_island_name(name: Any) -> None:
    """Raises ValueError unless `name` can be an island's name, which is part of objects' names.

    The name of an island is a string of at most 100 letters, digits, ".", "_" and "-", and begins
    with a letter or a digit.
    """
    if not isinstance(name, str) or not ISLAND_NAME.fullmatch(name):
        raise ValueError(
            f"The name of an island consists of letters, digits, '.', '_' and '-', got {name!r}."
        )


class FolderTraffic(NamedTuple):
    """The bytes of tensors that an island has written to the folder and read from it."""

    written: int
    read: int


# How often an island contributes to the same version at most. It contributes again, with all that
# it has learned since the version, if nobody merges for long and when it ends.
_ATTEMPTS = 3
# After how many seconds without a new version an island logs this, and contributes again.
_LONG = 120.0


class Island:
    """An island: contributes its change every `inner_steps` steps, and takes merged values.

    Each island is a program of its own, on a mesh and a runtime of its own. An island may die, be
    late, come back or be added while the others go on. Islands write their changes into a folder.
    In this folder a merger (see `Merger`) makes versions: the values of all variables, merged from
    the changes that islands contribute.

    Create the `Island` after the training step has been built and lowered, and before the session.
    Call `begin(session)` once the session's variables are initialized or restored, and then
    `after_step(session, tokens)` after each step.

    Args:
      folder: path or URL that all islands and the merger can read and write; see `Folder`.
      name: the island's name, the same after a restart; letters, digits, ``.``, ``_`` and ``-``.
      inner_steps: the number of updates between two contributions of this island (H). The island
        contributes earlier if the merger is about to make a version without it.
      lowering: the step's lowering, for sessions of TensorFlow; see `Values`.
      variables: names of the variables to exchange; default all trainable ones.
      values: for another kind of session, an object with `specs`, `read` and `write` like those of
        `Values`. This object replaces `lowering` and `variables`.
      wait: "grace" waits for merged values after a contribution, for at most `wait_seconds`; "none"
        goes on with steps at once. Either way, merged values that come later are taken after a
        step, and everything that the island has learned since its contribution is kept.
      wait_seconds: the most seconds to wait for merged values: after a contribution if `wait` is
        "grace", and in `finish`.
      begin_seconds: how long to wait for the first version when the folder has none.
      form: how a change is sent: "float32", "bfloat16", "int8" with a scale for every 256 numbers,
        or "int4" with one for every 64. Rounding errors are added to the next change.
      follow: "version" raises the global step and the counts of updates, which learning rate
        schedules depend on, to those of each version that the island takes: an island that joins
        late has the same learning rate as the others. "own" counts the island's own steps.
      merge: whether a thread of this process merges, or waits to take over from another merger.
      merge_settings: the settings of that thread's merger; see `MergeSettings`.
      waiting: how long that merger waits; see `Waiting`.
      keep_all: whether that merger keeps all objects that a replay needs.
      replay: whether to repeat an earlier run of this island. If True, the island takes merged
        values after the same steps as the earlier run, whose journal says which these are. Nothing
        is written.
      poll_seconds: the least time between two looks into the folder; default 0.2 s on a local disk,
        else 2 s.

    Raises:
      ValueError: an argument makes no sense, or the graph lacks one of `variables`.
    """

    def __init__(
        self,
        folder: str,
        name: str,
        inner_steps: int,
        *,
        lowering: Any = None,
        variables: Sequence[str] | None = None,
        values: Any = None,
        wait: Wait = "grace",
        wait_seconds: float = 60.0,
        begin_seconds: float = 600.0,
        form: Form = "float32",
        follow: Follow = "version",
        merge: bool = False,
        merge_settings: MergeSettings | None = None,
        waiting: Waiting | None = None,
        keep_all: bool = False,
        replay: bool = False,
        poll_seconds: float | None = None,
    ):
        check_island_name(name)
        if isinstance(inner_steps, bool) or not isinstance(inner_steps, int) or inner_steps < 1:
            raise ValueError(f"inner_steps must be a whole number of at least 1: {inner_steps!r}.")
        choices = {"wait": (wait, get_args(Wait)), "form": (form, FORMS),
                   "follow": (follow, get_args(Follow))}  # fmt: skip
        for argument, (choice, allowed) in choices.items():
            if choice not in allowed:
                raise ValueError(f"{argument} must be one of {', '.join(allowed)}, got {choice!r}.")
        for argument, value in (("wait_seconds", wait_seconds), ("begin_seconds", begin_seconds)):
            if not is_number(value) or not value >= 0.0:
                raise ValueError(f"{argument} must be a number of seconds, got {value!r}.")
        if merge and replay:
            raise ValueError(f"A replay writes nothing and needs no merger, got merge={merge!r}.")
        self.name, self.inner_steps, self.form = name, inner_steps, form
        self.folder = Folder(folder)
        self._values = Values(lowering, variables) if values is None else values
        # Versions are in float32 or wider, whatever the program's variables are in.
        self._specs = {
            name: TensorSpec(shape, str(np.promote_types(dtype_of(dtype), np.float32)))
            for name, (shape, dtype) in self._values.specs.items()
        }
        self._follows: Mapping[str, str] = (
            getattr(self._values, "follows", {}) if follow == "version" else {}
        )
        self._wait = wait_seconds if wait == "grace" else 0.0
        self._wait_at_end, self._follow = wait_seconds, follow == "version"
        self._begin_seconds, self._replay = begin_seconds, replay
        self._poll = poll_seconds or poll_seconds_of(self.folder)
        self.traffic = FolderTraffic(0, 0)
        self._make_merger = lambda: (
            MergerThread(Merger(self.folder, merge_settings, waiting, keep_all)) if merge else None
        )
        self._merger = self._make_merger()  # made here, so that wrong settings raise at once
        self._exchange = self._new_exchange()
        self._has_left = False
        self._learning = Learning(self._specs)
        self.step = 0

    @property
    def version(self) -> int | None:
        """The number of the version whose values the island has taken last; None if none yet."""
        return self._learning.version

    def _new_exchange(self) -> Exchange:
        return Exchange(
            self.folder, self.name, self._specs, self._poll,
            lambda: {"version": self.version, "step": self.step},
        )  # fmt: skip

    def _write_event(self, event: str, **fields: Any) -> None:
        """Adds an event to the island's journal, with the island's step and version.

        If the island repeats an earlier run (`Island(replay=True)`), nothing is written.

        Args:
          event: the kind of event, such as "took" or "joined".
          **fields: more facts of the event, which JSON can hold.
        """
        if not self._replay:
            given = {"step": self._at, "version": self.version, **fields}
            self._exchange.journal.write(event, **given)

    def begin(self, session: Any, step: int = 0, checkpoint: str | None = None) -> None:
        """Takes the folder's newest version, or offers this island's values for the first version.

        Call `begin` before the first step. Call it again after `finish`, or if a new session has
        restored older values. An island that was made with replay=True repeats an earlier run of
        the island instead: it reads from the journal, the record of events in the folder, which
        versions that run took.

        Args:
          session: a session in which variables are initialized or restored from a checkpoint.
          step: the number of steps that the island has made before. After `begin` the attribute
            `step` may be larger: if `follow` is "version", it is raised to the version's step.
          checkpoint: path of the checkpoint from which the session was restored; None if there is
            none. If `save` has written a file beside it, the island also contributes what it had
            learned when the checkpoint was written.

        Raises:
          IslandError: there was no version within `begin_seconds`; another living process has the
            island's name; the folder's versions are of another model; or, with replay=True, the
            journal has no run of this island that began at `step`.
        """
        self.step = self._at = step
        self._has_left, self._learning = False, Learning(self._specs)
        self._learning.start_counting(self._step_counts(session))
        self._checkpoint = checkpoint
        saved = saved_beside(checkpoint, self.name, self._specs) if checkpoint else None
        if saved and not (saved.has_learned or self._replay):
            saved = None
        self._exchange.lease.abandon()
        self._exchange = self._new_exchange()
        if self._replay:
            self._events = events_by_step(self.folder, self.name)
            return self._begin_replay(session, step, saved)
        self._exchange.take_name(self._begin_seconds)
        self._merger = self._merger or self._make_merger()
        if self._merger:
            self._merger.start()
        found = self._await_version(session)
        decision, version = found.decision, found.decision.version
        # The merger may still merge a contribution of an earlier run of this island's process.
        unmerged = self._exchange.find_unmerged(decision, self._learning.specs_after(version))
        self._exchange.journal.keeps_all = decision.keeps_all
        sent = unmerged.name if unmerged else ""
        last = decision.totals.get(self.name, IslandTotal()).last
        life, fragments = self._exchange.journal.life, self._learning.fragments
        if saved and saved.is_uncontributed([last, sent], life, version, fragments):
            return self._continue_restored(session, saved, found)
        self._join(session, found, unmerged)
        self._write_event("joined", bytes=_bytes(self._learning.base), sent=sent)
        # It is normal that a new run takes a version's values. If an older run's values are
        # overwritten, or the step jumps, a warning says so.
        level = logging.WARNING if self.step != step or step else logging.INFO
        logger.log(
            level, "The island %s goes on from version %d, whose values take the place of its own "
            "of step %d, as step %d", self.name, version, step, self.step,
        )  # fmt: skip

    # The file beside a checkpoint.

    def save(self, checkpoint: str) -> None:
        """Writes the island's state into a file beside a checkpoint, for a later `begin`.

        Without the file beside the checkpoint, an island that is killed and restarted from the
        checkpoint loses everything that it had learned since its last contribution.

        Args:
          checkpoint: path of a checkpoint with the present values of the session's variables. The
            path of the island's file is this path with ".island" added.
        """
        if self.version is None:
            return
        journal = self._exchange.journal
        saved = self._learning.state_to_save(
            self.name, journal.life, self._exchange.number, journal.event_count
        )
        try:
            saved.write(checkpoint, self._checkpoint)
            self._checkpoint = checkpoint
        except FolderError as error:
            logger.warning("Island %s: %s", self.name, error)

    def _continue_restored(self, session: Any, saved: SavedIsland, found: ReadVersion) -> None:
        """Continues from a checkpoint: takes a version, and adds what the island had learned.

        What the island had learned by the checkpoint and not contributed is in `saved`, the content
        of the file beside the checkpoint.

        Args:
          session: the session that trains; its variables are restored from the checkpoint.
          saved: the content of the file beside the checkpoint.
          found: the folder's newest version.
        """
        self._restore(session, saved)
        learned, version = saved.learned, found.decision.version
        sent = self._learning.sent
        waiting = sent.tokens if sent else 0.0
        self._write_event("joined", restored=[learned.life, learned.events])
        if version > learned.version:
            self._take_version(session, version, found)
        logger.warning(
            "The island %s goes on from version %d, with what its checkpoint of step %d has "
            "learned from %g tokens since version %d, as step %d", self.name, version, self._at,
            max(learned.tokens) + waiting, learned.version, self.step,
        )  # fmt: skip

    def _restore(self, session: Any, saved: SavedIsland) -> None:
        """Restores what the island had learned and sent, from the file beside its checkpoint.

        `saved` is the content of this file; it has all attributes of `Learning`. The variables of
        `session` have been restored from the checkpoint already. The method makes a first write to
        the session, which sets no variable. In a session of TensorFlow, averages and other derived
        variables can begin anew only at the first write. After this first write, later writes leave
        the averages as they were restored.
        """
        self._learning.restore(saved)
        self._sent_at = time.monotonic()
        self._values.write(session, {})

    def _step_counts(self, session: Any) -> StepCounts:
        counts = getattr(self._values, "counts", None)
        return counts(session) if counts else StepCounts()

    def _schedule_counters(self, values: Mapping[str, Any]) -> dict[str, int]:
        """Returns the counters that learning rate schedules follow, as a dictionary by name.

        The counters are "step", which is the island's own attribute `step`, and counts of updates.
        `values` is a dictionary from the names of the session's variables to their values; the
        counts of updates are among them.
        """
        found = {key: int(values[name]) for key, name in self._follows.items()}
        return {"step": self.step, **found}

    def _await_version(self, session: Any) -> ReadVersion:
        """Waits until the folder has a version, and reads the values of all variables in it.

        Until the folder has a version, the island offers the values of `session`: it writes them
        into the folder, so that the merger can make the first version of them.

        Raises:
          IslandError: there was no version within `begin_seconds`, or the version is of another
            model.
        """
        until, values = time.monotonic() + self._begin_seconds, self._values.read(session)
        facts = ContributionFacts(island=self.name, counts=self._schedule_counters(values))
        offered = {name: wide(values[name]) for name in self._specs}
        exchange = self._exchange
        while True:
            newest = exchange.run_or_default("versions", lambda: exchange.newest(None), None)
            if newest is not None:
                self._read_fragments()
                try:
                    found = self._read_values(newest, 0)
                except OtherTensorsError as error:
                    raise IslandError(f"The island has another model: {error}") from error
                if found:
                    return found
            else:
                self._exchange.offer(facts, offered)
            merger = self._merger.says() if self._merger else ""
            if time.monotonic() > until:
                way = f"Start a merger: mtf-gradsync islands {self.folder.url}, or merge=True."
                raise IslandError(
                    f"{self.folder.url} has no version of the values after "
                    f"{self._begin_seconds:g} s. {merger or way}"
                )
            if self._merger is None:
                exchange.log_wait("begin", f"waiting for a version in {self.folder.url}")
            time.sleep(min(self._poll, 0.5))

    def _read_fragments(self) -> None:
        fragments = self._learning.fragments = self._exchange.settings().fragments
        if self.inner_steps % fragments:
            raise IslandError(
                f"inner_steps={self.inner_steps} must be a multiple of {fragments}: the versions "
                f"in {self.folder.url} are made with fragments={fragments}."
            )

    def _read_values(self, newest: int, since: int) -> ReadVersion | None:
        """Reads the variables that versions from `since` to `newest` changed.

        The number of bytes that are read is added to the attribute `traffic`.

        Args:
          newest: the number of the version to read.
          since: the number of the first version whose variables are read; 0 reads all variables.

        Returns:
          The values of these variables as of `newest`, and the decision that made `newest`. None if
          `newest` cannot be read.
        """
        found = self._exchange.read_values(newest, self._learning.fragments, since)
        if found:
            self.traffic = self.traffic._replace(read=self.traffic.read + _bytes(found.values))
        return found

    def _join(self, session: Any, found: ReadVersion, unmerged: Unmerged | None) -> None:
        """Sets the session's variables to a version's values; from these the island learns.

        If an earlier run of this island's process has made a contribution that is not merged yet,
        its change is added to the values.

        Args:
          session: the session that trains.
          found: the version.
          unmerged: the contribution of the earlier run; None if there is no such contribution.
        """
        counts, learning = self._schedule_counters(self._values.read(session)), self._learning
        learning.base = {}
        learning.start_from(found.decision.version, counts)
        name, facts, change = unmerged or ("", None, {})
        learned = {key: -value for key, value in change.items()}
        followed = self._follow_version(found.decision, counts, counts)
        self._write_values(session, found.values, learned, followed)
        if facts and facts.version is not None:
            now = self._values.read(session)
            values = {key: now[key] for key in change}
            sent = Sent(
                facts.version, values, learning.counts_before, facts.tokens, facts.steps, {}
            )
            learning.sent, learning.attempts = sent, {name: sent}
            self._sent_at = time.monotonic()

    def _write_values(
        self, session: Any, merged: Arrays, learned: Arrays, more: Mapping[str, Any]
    ) -> None:
        """Sets the session's variables to a version's values plus what the island has learned.

        Args:
          session: the session that trains.
          merged: a dictionary from the names of variables to their values in a version.
          learned: a dictionary from the names of variables to arrays that are added to these
            values: what the island has learned and the version does not contain.
          more: a dictionary from the names of other variables, such as counters, to new values.
        """
        dtypes = {name: dtype_of(spec.dtype) for name, spec in self._values.specs.items()}
        self._values.write(session, {**more, **self._learning.add_learned(merged, learned, dtypes)})

    def _follow_version(
        self, decision: Decision, counts: Mapping[str, int], before: Mapping[str, int]
    ) -> dict[str, int]:
        """Lets the island's counters follow a version: sets `step`, returns the others' new values.

        `Learning.advance_counters` computes the new values. No counter becomes smaller.

        Args:
          decision: the decision that made the version, which has the version's counters.
          counts: a dictionary from the names of the island's counters to their values now.
          before: the values of the same counters when the island made the contribution that the
            version contains.

        Returns:
          A dictionary from the names of the session's variables to new values. It has only the
          counters that change.
        """
        new = self._learning.advance_counters(
            decision.counts if self._follow else {}, counts, before
        )
        self.step += new["step"] - counts["step"]
        return {name: new[key] for key, name in self._follows.items() if new[key] != counts[key]}

    def after_step(self, session: Any, tokens: float = 1.0, checkpoint: str | None = None) -> None:
        """Contributes the island's change, or takes merged values, if either is due.

        Args:
          session: the session in which a step was made.
          tokens: the number of tokens (or another weight) of that step's loss. A contribution's
            weight is made of the tokens of its steps. Tokens of steps that only accumulate
            gradients count once the update is made; tokens of skipped steps do not count.
          checkpoint: path of a checkpoint that was written since that step; the island's state is
            saved beside it, as `save` does. None if there is no new checkpoint.
        """
        if self.version is None:
            raise ValueError(
                f"Call begin(session) before the first step of the island {self.name!r}."
            )
        if not is_number(tokens) or not 0.0 <= tokens < float("inf"):
            raise ValueError(f"tokens must be a finite number, not negative, got {tokens!r}.")
        self.step += 1
        self._at = self.step
        self._learning.count_step(self._step_counts(session), float(tokens))
        if checkpoint:
            self.save(checkpoint)
        if self._replay:
            return self._repeat_events(session)
        exchange, learning = self._exchange, self._learning
        newest, is_soon = exchange.look_for_version(self.version)
        if newest > self.version:
            self._take_version(session, newest)
            is_soon = False
        self._withdraw_if_lost()
        is_due = learning.since >= self.inner_steps // learning.fragments or is_soon
        is_again = bool(learning.attempts)
        if learning.sent is None and is_due and exchange.may_contribute():
            is_there = self._contribute(session, is_soon)
            if is_there and not is_again:
                self._wait_and_take(session, self._wait)

    def _withdraw_if_lost(self) -> None:
        """Withdraws the last contribution if it cannot be merged, or has waited too long.

        The change of a contribution that is withdrawn becomes part of the next contribution.
        """
        learning = self._learning
        if learning.sent is None:
            return
        name, version = next(reversed(learning.attempts), ""), learning.sent.version
        why = self._exchange.why_lost(name, version)
        self._exchange.log_wait(
            "sent", f"its contribution to version {version} waits: no merger makes the next one",
            max(self._wait, _LONG),
        )  # fmt: skip
        attempts = len(learning.attempts)
        is_long = time.monotonic() - self._sent_at > _LONG * 4**attempts
        if is_long and attempts < _ATTEMPTS and learning.since >= self.inner_steps:
            why = why or "nobody has merged it, and there is more"
        if why:
            self._withdraw(f"{name}: {why}; what is in it goes into another contribution")

    def _withdraw(self, why: str) -> None:
        """Treats the last contribution as not made, so that the next one contains its change.

        `why` is the reason, which is logged and written into the journal. If `why` is "", nothing
        is logged.
        """
        self._learning.withdraw_contribution()
        if why:
            logger.warning("Island %s: %s", self.name, why)
        self._write_event("took_back", why=why)

    def finish(self, session: Any, waits: bool = True) -> None:
        """Contributes what is left, takes merged values that come in time, and leaves the folder.

        What the island learned after its last contribution can be contributed only once this
        contribution is merged. So `finish` waits for the merge for at most `wait_seconds`, even if
        the island's `wait` is "none".

        Args:
          session: the session in which steps were made.
          waits: whether there is time to wait. If not, merged values are taken only if they are
            there at once.
        """
        if self._replay or self._has_left or self.version is None:
            return
        learning = self._learning
        until = time.monotonic() + (self._wait_at_end if waits else 0.0)
        while learning.sent is not None or any(learning.tokens):
            if learning.sent is None and not self._contribute(session, True):
                if not any(learning.tokens) or time.monotonic() > until:
                    break
                time.sleep(min(self._poll, 0.5))
            if not self._wait_and_take(session, until - time.monotonic()):
                self._withdraw_if_lost()
                if time.monotonic() > until:
                    break
        if learning.sent is not None and any(learning.tokens):
            # Contribute again, with what was learned since. The merger takes the last contribution.
            self._withdraw("it ends: all that is left goes into one contribution")
            self._contribute(session, True)
            if self._wait_and_take(session, 0.0):  # a version with the former one came in between
                self._contribute(session, True)
        left = max(learning.tokens)
        if left or (learning.sent and waits):
            what = "is in no contribution" if left else "waits to be merged"
            logger.warning(
                "The island %s ends, and what it has learned from %g tokens since version %d %s",
                self.name, left or (learning.sent.tokens if learning.sent else 0.0), self.version,
                what,
            )  # fmt: skip
        self.close()

    def close(self) -> None:
        """Leaves the folder without a last contribution, and stops this process's merger thread."""
        if self._merger:
            self._merger.stop()
            self._merger = None
        if self.version is not None and not self._has_left:
            self._has_left = True
            self._write_event("left", step=self.step, tokens_left=max(self._learning.tokens))
            self._exchange.lease.leave()

    def _wait_and_take(self, session: Any, seconds: float) -> bool:
        """Waits for a version that is newer than the island's, and takes its values.

        The method waits for at most `seconds`, and only while a contribution of this island waits
        to be merged. The result is True if a version was taken.
        """
        assert self.version is not None
        learning, before, until = self._learning, self.version, time.monotonic() + seconds
        while learning.sent is not None:
            newest, _ = self._exchange.look_for_version(before, at_once=True)
            if newest > before:
                self._take_version(session, newest)
                return self.version != before
            if time.monotonic() >= until:
                return False
            name = next(reversed(learning.attempts), "")
            if self._exchange.why_lost(name, learning.sent.version):
                self._withdraw_if_lost()
                return False
            time.sleep(min(self._poll, 0.05))
        return False

    def _contribute(self, session: Any, is_early: bool) -> bool:
        """Contributes this island's change of the variables that the next version changes.

        If the change has a NaN or an infinity, nothing is contributed, and the island's variables
        are reset to the values of its version.

        Args:
          session: the session that trains.
          is_early: whether the contribution is made before it is due, because the merger is about
            to decide, or the island ends. This is only recorded in the journal.

        Returns:
          Whether the contribution is surely in the folder. The result is False if there was nothing
          to contribute, or if the folder failed.
        """
        assert self.version is not None
        learning = self._learning
        tokens, steps = learning.tokens_to_send, learning.since
        if not tokens:
            return False
        if not self._replay:
            self._exchange.check_name()
        now = self._values.read(session)
        changed = learning.change_since_version(now)
        bad = [name for name, value in changed.items() if not np.isfinite(value).all()]
        if bad:
            anew = self._reset_to_version(session)
            if not self._replay:
                logger.warning(
                    "%s of %s holds numbers that are not finite, after step %d: it goes back to "
                    "version %d%s", bad[0], self.name, self._at, self.version,
                    f", and {counted(sorted(anew), 'slot')} begin anew" if anew else "",
                )  # fmt: skip
                self._write_event("went_back", variable=bad[0], tokens=tokens)
            return False
        counts = self._schedule_counters(now)
        change = learning.rounded_change(changed, now, counts, self.form)
        name, is_there = "", True
        if not self._replay:
            facts = ContributionFacts(
                island=self.name,
                version=self.version,
                tokens=tokens,
                steps=steps,
                form=self.form,
                counts=counts,
            )
            event = {"step": self._at, "version": self.version, "tokens": tokens, "steps": steps,
                     "early": is_early, "bytes": _bytes(change.tensors)}  # fmt: skip
            name, is_there = self._exchange.contribute(facts, change.tensors, event)
            written = self.traffic.written + _bytes(change.tensors)
            self.traffic = self.traffic._replace(written=written)
        # The object may exist even if the folder reported an error.
        learning.record_contribution(change, name)
        self._sent_at = time.monotonic()
        if not is_there:
            self._withdraw("")
        return is_there

    def _reset_to_version(self, session: Any) -> list[str]:
        """Resets variables to the values of the version that the island has taken last.

        If a slot of a variable is not finite, all slots of this variable get their initial values.
        The result is a list of the names of these slots.
        """
        slots_to_reset = getattr(self._values, "slots_to_reset", None)
        anew = slots_to_reset(session) if slots_to_reset else {}
        self._write_values(session, self._learning.base, {}, anew)
        self._learning.start_from(self.version, self._schedule_counters(self._values.read(session)))
        return list(anew)

    def _take_version(
        self,
        session: Any,
        newest: int,
        found: ReadVersion | None = None,
        merged_as: str | None = "?",
    ) -> None:
        """Takes a newer version's values, and adds to them what only the island has learned.

        What the island has learned is added to the values, except what a merged contribution
        contains. If the island's last contribution can no longer be merged, it is withdrawn. If the
        version cannot be read, nothing happens.

        Args:
          session: the session that trains.
          newest: the number of the newer version.
          found: what `_read_values` has returned for the version; None reads the version.
          merged_as: used only if the island repeats an earlier run: what the journal says about
            this island's contributions. It is the name of the contribution that was merged, "" if
            none was merged, or None if a contribution could still be merged.
        """
        assert self.version is not None
        found = found or self._read_values(newest, self.version + 1)
        if not found:
            return
        values, decision = found
        learning = self._learning
        now, sent = self._values.read(session), learning.sent
        if not self._replay:
            version = self.version if sent is None else sent.version
            merged_as = self._exchange.merged_contribution(
                list(learning.attempts), version, decision
            )
        if merged_as and not self._replay:
            learning.record_merged(merged_as)
        elif sent and merged_as == "":
            why = "came too late to be merged, or was refused"
            self._withdraw(f"its contribution to version {sent.version} {why}: it is made again")
        counts = self._schedule_counters(now)
        before = learning.sent.counts if learning.sent else learning.counts_before
        followed = self._follow_version(decision, counts, before)
        learned = learning.take_version(newest, values, now, may_still_merge=merged_as is None)
        self._write_values(session, values, learned, followed)
        self._exchange.reminders.end("sent")
        self._write_event("took", merged=merged_as, bytes=_bytes(values))

    def _begin_replay(self, session: Any, step: int, saved: SavedIsland | None) -> None:
        """Begins to repeat an earlier run of this island, from the journal of that run.

        Args:
          session: the session that trains.
          step: the step at which the earlier run began.
          saved: the content of the file beside the checkpoint; None if there is none.

        Raises:
          IslandError: the journal has no run that began at `step`; or the run began from a
            checkpoint with a file beside it, and `saved` is None.
        """
        events = self._events.get(step, [])
        begins = [number for number, e in enumerate(events) if e["event"] == "joined"]
        if not begins:
            raise IslandError(
                f"The journal of {self.folder.url} does not say that {self.name!r} joined at step "
                f"{step}; it has events of the steps {sorted(self._events)[:10]}."
            )
        self._events[step] = events[begins[-1] :]
        if "restored" in events[begins[-1]]:
            if saved is None:
                raise IslandError(
                    f"{self.name!r} joined at step {step} with what it had learned by a "
                    "checkpoint: a replay from this step needs the file that Island.save wrote "
                    "beside this checkpoint."
                )
            self._read_fragments()
            self._restore(session, saved)
        self._repeat_events(session)

    def _lack_of_version(self, event: Mapping[str, Any]) -> IslandError:
        return IslandError(
            f"Version {event['version']}, which {self.name!r} took after step {self._at}, cannot "
            f"be read from {self.folder.url}: a replay needs all versions (keep_all)."
        )

    def _repeat_events(self, session: Any) -> None:
        """Repeats what the earlier run did after the step that was made last, by its journal.

        Called at the beginning and after each step of an island that repeats an earlier run
        (`Island(replay=True)`).
        """
        for event in self._events.get(self._at, []):
            kind = event["event"]
            if kind == "joined" and "restored" in event:
                continue  # `_begin_replay` has restored this
            if kind == "joined":
                self._read_fragments()
                found = self._read_values(event["version"], 0)
                if not found:
                    raise self._lack_of_version(event)
                specs, name = self._learning.specs_after(event["version"]), event.get("sent", "")
                unmerged = self._exchange.read_contribution(name, specs) if name else None
                self._join(session, found, unmerged)
            elif kind == "took":
                self._take_version(session, event["version"], merged_as=event.get("merged"))
                if self.version != event["version"]:
                    raise self._lack_of_version(event)
            elif kind == "took_back" and self._learning.sent:
                self._withdraw("")
            elif kind == "contributed":
                self._contribute(session, False)
            elif kind == "went_back":
                self._reset_to_version(session)


def _bytes(values: Arrays) -> int:
    return sum(value.nbytes for value in values.values())
