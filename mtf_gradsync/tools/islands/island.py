"""`Island`: a training program that exchanges what it learned with others through a folder."""

from __future__ import annotations

import logging
import time
from typing import Any, Literal, Mapping, NamedTuple, Sequence, get_args

import numpy as np

from mtf_gradsync.extension import counted, is_number
from mtf_gradsync.tools.islands.changes import FORMS, Form, encoded, wide
from mtf_gradsync.tools.islands.exchange import Exchange, IslandError
from mtf_gradsync.tools.islands.folder import Folder, FolderError
from mtf_gradsync.tools.islands.island_checkpoint import (
    Learned,
    SavedIsland,
    Sent,
    saved_beside,
)
from mtf_gradsync.tools.islands.journal import events_by_step
from mtf_gradsync.tools.islands.merger import Merger, MergerThread, Waiting, poll_seconds_of
from mtf_gradsync.tools.islands.objects import (
    ISLAND_NAME,
    ContributionFacts,
    Decision,
    IslandTotal,
)
from mtf_gradsync.tools.islands.session_values import StepCounts, Values
from mtf_gradsync.tools.islands.tensor_files import (
    OtherTensorsError,
    TensorSpec,
    dtype_of,
)
from mtf_gradsync.tools.islands.versions import MergeSettings, fragment_of

logger = logging.getLogger(__name__)

Wait = Literal["grace", "none"]
Follow = Literal["version", "own"]


def check_island_name(name: Any) -> None:
    """Raises ValueError for a name that cannot be part of an object's name."""
    if not isinstance(name, str) or not ISLAND_NAME.fullmatch(name):
        raise ValueError(
            f"The name of an island is of letters, digits, '.', '_' and '-', got {name!r}."
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

    Each island is a program of its own, on a mesh and a runtime of its own. It may die, lag, come
    back or be added while the others go on. Islands exchange objects through a folder, in which a
    merger (see `Merger`) makes versions: the values of all variables, merged from the changes that
    islands contribute.

    Create the Island after the step has been built and lowered, and before the session. Call
    `begin(session)` once variables are initialized or restored, then `after_step(session, tokens)`
    after each step.

    Args:
      folder: path or URL that all islands and the merger can read and write; see `Folder`.
      name: the island's name, the same after a restart; letters, digits, ``.``, ``_`` and ``-``.
      inner_steps: the number of updates between two contributions of this island (H). The island
        contributes earlier if the merger is about to make a version without it.
      lowering: the step's lowering, for sessions of TensorFlow; see `Values`.
      variables: names of the variables to exchange; default all trainable ones.
      values: for another kind of session, an object with `specs`, `read` and `write` like those of
        `Values`. It replaces `lowering` and `variables`.
      wait: "grace" waits for merged values after a contribution, up to `wait_seconds`; "none" goes
        on with steps at once. Either way, merged values that come later are taken after a step,
        and everything that the island has learned since its contribution is kept.
      wait_seconds: see `wait`.
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
      replay: whether to repeat an earlier run of this island: merged values are taken after the
        same steps as its journal says, and nothing is written.
      poll_seconds: the least time between two looks into the folder; default 0.2 s on a local disk,
        else 2 s.

    Raises:
      ValueError: an argument makes no sense, or the graph has no such variables.
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
            MergerThread(lambda: Merger(self.folder, merge_settings, waiting, keep_all))
            if merge
            else None
        )
        self._merger = self._make_merger()  # made here, so that wrong settings raise at once
        self._exchange = self._new_exchange()
        self._has_left = False
        self.version: int | None = None  # the version whose values the island has taken last
        self._base: dict[str, np.ndarray] = {}  # the values of that version
        self.step = 0
        self._fragments = 1

    def _new_exchange(self) -> Exchange:
        return Exchange(
            self.folder, self.name, self._specs, self._poll,
            lambda: {"version": self.version, "step": self.step},
        )  # fmt: skip

    def _note(self, event: str, **fields: Any) -> None:
        """Adds an event to the island's journal; does nothing in a replay."""
        if not self._replay:
            given = {"step": self._at, "version": self.version, **fields}
            self._exchange.journal.write(event, **given)

    # The state between two versions.

    def _start_from(self, version: int, counts: Mapping[str, int]) -> None:
        """Resets the state to the begin of a version, and drops what was not contributed.

        `counts` are the counters that schedules follow (global step, updates) as of now.
        """
        self.version = version
        self._counts_before = dict(counts)
        self._sent: Sent | None = None  # the contribution that waits to be merged
        self._attempts: dict[str, Sent] = {}  # contributions to this version, by name
        self._since = 0  # updates since it contributed
        self._tokens = [0.0] * self._fragments
        self._residual: dict[str, np.ndarray] = {}

    def begin(self, session: Any, step: int = 0, checkpoint: str | None = None) -> None:
        """Takes the folder's newest version, or offers this island's values for the first version.

        Call it before the first step; and again after `finish`, or if a new session has restored
        older values.

        Args:
          session: a session in which variables are initialized or restored from a checkpoint.
          step: the number of steps that the island has made before. Afterwards the attribute `step`
            may be larger, since it follows the version's.
          checkpoint: path of the checkpoint from which the session was restored. If `save` has
            written a file beside it, the island also contributes what it had learned by then.

        Raises:
          IslandError: there was no version within `begin_seconds`, another living process has the
            island's name, the folder's versions are of another model, or a replay has no journal.
        """
        self.step = self._at = step
        self._has_left, self.version = False, None
        self._step_counts = self._counts_of(session)
        self._waiting_tokens: float | None = None if self._step_counts.waiting else 0.0
        self._checkpoint = checkpoint
        saved = saved_beside(checkpoint, self.name, self._specs) if checkpoint else None
        if saved and not (saved.has_learned or self._replay):
            saved = None
        self._exchange.lease.abandon()
        self._exchange = self._new_exchange()
        if self._replay:
            self._events = events_by_step(self.folder, self.name)
            return self._begin_replay(session, step, saved)
        self._exchange.begin(self._begin_seconds)
        self._merger = self._merger or self._make_merger()
        if self._merger:
            self._merger.start()
        version, decision = self._await_version(session)
        # The merger may still merge a contribution of an earlier run of this island's process.
        outstanding = self._exchange.outstanding(decision, self._turn_specs(version))
        self._exchange.journal.keeps_all = decision.keeps_all
        sent = outstanding[0] if outstanding else ""
        last = decision.totals.get(self.name, IslandTotal()).last
        life, fragments = self._exchange.journal.life, self._fragments
        if saved and saved.is_left([last, sent], life, version, fragments):
            return self._go_on_with(session, saved, version, decision)
        self._join(session, version, decision, outstanding)
        self._note("joined", bytes=_bytes(self._base), sent=sent)
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

        Without this file, an island that is killed and restarted from the checkpoint loses
        everything that it had learned since its last contribution.

        Args:
          checkpoint: path of a checkpoint of the session's current values. The file's name is this
            path with ".island" added.
        """
        if self.version is None:
            return
        journal = self._exchange.journal
        learned = Learned(
            island=self.name, version=self.version, counts=self._counts_before, since=self._since,
            life=journal.life, number=self._exchange.number, events=journal.events,
            tokens=self._tokens,
            waiting=self._waiting_tokens, is_sent=self._sent is not None,
        )  # fmt: skip
        try:
            SavedIsland(learned, self._base, self._residual, self._attempts).write(
                checkpoint, self._checkpoint
            )
            self._checkpoint = checkpoint
        except FolderError as error:
            logger.warning("Island %s: %s", self.name, error)

    def _go_on_with(
        self, session: Any, saved: SavedIsland, version: int, decision: Decision
    ) -> None:
        """Takes a version, and adds what the restored island had learned and not contributed."""
        self._restore(session, saved)
        learned = saved.learned
        waiting = self._sent.tokens if self._sent else 0.0
        self._note("joined", restored=[learned.life, learned.events])
        if version > learned.version:
            self._take(session, version, (self._new, decision))
        logger.warning(
            "The island %s goes on from version %d, with what its checkpoint of step %d has "
            "learned from %g tokens since version %d, as step %d", self.name, version, self._at,
            max(learned.tokens) + waiting, learned.version, self.step,
        )  # fmt: skip

    def _restore(self, session: Any, saved: SavedIsland) -> None:
        """Restores the island's state from the file beside its checkpoint."""
        learned = saved.learned
        self.version, self._base = learned.version, dict(saved.base)
        self._counts_before, self._attempts = dict(learned.counts), dict(saved.attempts)
        self._sent = next(reversed(saved.attempts.values())) if learned.is_sent else None
        self._sent_at = time.monotonic()
        self._since, self._tokens = learned.since, list(learned.tokens)
        self._residual, self._waiting_tokens = dict(saved.residual), learned.waiting
        self._values.write(session, {})

    def _counts_of(self, session: Any) -> StepCounts:
        counts = getattr(self._values, "counts", None)
        return counts(session) if counts else StepCounts()

    def _counts_in(self, values: Mapping[str, Any]) -> dict[str, int]:
        """Returns the counters that schedules follow: the island's step, and counts of updates.

        `values` are the session's variables by name, which hold the counts of updates.
        """
        found = {key: int(values[name]) for key, name in self._follows.items()}
        return {"step": self.step, **found}

    def _await_version(self, session: Any) -> tuple[int, Decision]:
        """Waits for a version that can be read, and reads it; offers values until there is one.

        Returns the version's number and the decision that made it. Its values are in `_new`.
        """
        until, values = time.monotonic() + self._begin_seconds, self._values.read(session)
        facts = ContributionFacts(island=self.name, counts=self._counts_in(values))
        offered = {name: wide(values[name]) for name in self._specs}
        exchange = self._exchange
        while True:
            newest = exchange.trying("versions", lambda: exchange.newest(None), None)
            if newest is not None:
                self._take_fragments()
                try:
                    found = self._load(newest, 0)
                except OtherTensorsError as error:
                    raise IslandError(f"The island has another model: {error}") from error
                if found:
                    self._new, decision = found
                    return newest, decision
            else:
                self._exchange.offer(facts, offered)
            merger = self._merger.says() if self._merger else ""
            if time.monotonic() > until:
                way = f"A merger makes it: mtf-gradsync islands {self.folder.url}, or merge=True."
                raise IslandError(
                    f"{self.folder.url} has no version of the values after "
                    f"{self._begin_seconds:g} s. {merger or way}"
                )
            if self._merger is None:
                exchange.waits("begin", f"waiting for a version in {self.folder.url}")
            time.sleep(min(self._poll, 0.5))

    def _take_fragments(self) -> None:
        self._fragments = self._exchange.settings().fragments
        if self.inner_steps % self._fragments:
            raise IslandError(
                f"inner_steps={self.inner_steps} is no multiple of the {self._fragments} "
                f"fragments of {self.folder.url}."
            )

    def _load(self, newest: int, since: int) -> tuple[dict[str, np.ndarray], Decision] | None:
        """Returns what `Exchange.load` returns, and counts the bytes that were read."""
        found = self._exchange.load(newest, self._fragments, since)
        if found:
            self.traffic = self.traffic._replace(read=self.traffic.read + _bytes(found[0]))
        return found

    def _join(
        self,
        session: Any,
        version: int,
        decision: Decision,
        outstanding: tuple[str, ContributionFacts, Mapping[str, np.ndarray]] | None,
    ) -> None:
        """Begins from a version's values, plus a change that was contributed but not yet merged.

        `outstanding` is that contribution, from an earlier run of this island's process: its name,
        facts and change. None if there is none.
        """
        counts = self._counts_in(self._values.read(session))
        self._base = {}
        self._start_from(version, counts)
        name, facts, change = outstanding or ("", None, {})
        learned = {key: -value for key, value in change.items()}
        followed = self._follow_version(decision, counts, counts)
        self._write(session, self._new, learned, followed)
        if facts and facts.version is not None:
            now = self._values.read(session)
            values = {key: now[key] for key in change}
            sent = Sent(facts.version, values, self._counts_before, facts.tokens, facts.steps, {})
            self._sent, self._attempts, self._sent_at = sent, {name: sent}, time.monotonic()

    def _write(
        self,
        session: Any,
        merged: Mapping[str, np.ndarray],
        learned: Mapping[str, np.ndarray],
        more: Mapping[str, Any],
    ) -> None:
        """Writes merged values, plus what the island has learned in the meantime, to the session.

        Args:
          session: the session to write to.
          merged: name of a variable -> its value in the version.
          learned: name -> what was learned and is not in the version; the next change contains it.
          more: name -> new value of other variables, such as counters.
        """
        written: dict[str, Any] = dict(more)
        for name, value in merged.items():
            since = learned.get(name, np.zeros((), value.dtype))
            # If nothing was learned since, these are exactly the merged values.
            written[name] = (value + since).astype(dtype_of(self._values.specs[name].dtype))
            is_exact = written[name].dtype == value.dtype
            self._base[name] = value if is_exact else wide(written[name]) - since
        self._values.write(session, written)

    def _follow_version(
        self, decision: Decision, counts: Mapping[str, int], before: Mapping[str, int]
    ) -> dict[str, int]:
        """Returns new values of the session's counters: the version's, plus those counted since.

        A counter is never lowered. Also raises the island's `step`.

        Args:
          decision: the decision that made the version, with the version's counts.
          counts: the island's counters now.
          before: the island's counters when it made the contribution that the version contains.
        """
        self._counts_before = dict(counts)
        if not self._follow:
            return {}
        for key in counts.keys() & decision.counts.keys():
            since = counts[key] - before[key]
            self._counts_before[key] = max(counts[key], decision.counts[key] + since) - since
        new = {key: self._counts_before[key] + counts[key] - before[key] for key in counts}
        self.step += new["step"] - counts["step"]
        return {name: new[key] for key, name in self._follows.items() if new[key] != counts[key]}

    def _turn(self) -> list[str]:
        """Returns the names of the variables that the next version changes."""
        assert self.version is not None
        return fragment_of(self.version + 1, list(self._base), self._fragments)

    def _turn_specs(self, version: int) -> dict[str, TensorSpec]:
        names = fragment_of(version + 1, list(self._specs), self._fragments)
        return {name: self._specs[name] for name in names}

    def after_step(self, session: Any, tokens: float = 1.0, checkpoint: str | None = None) -> None:
        """Contributes the island's change, or takes merged values, if either is due.

        Args:
          session: the session in which a step was made.
          tokens: the number of tokens (or another weight) of that step's loss. A contribution's
            weight is made of the tokens of its steps. Tokens of steps that only accumulate
            gradients count once the update is made; tokens of skipped steps do not count.
          checkpoint: path of a checkpoint written since that step; see `save`.
        """
        if self.version is None:
            raise ValueError(
                f"Call begin(session) before the first step of the island {self.name!r}."
            )
        if not is_number(tokens) or not 0.0 <= tokens < float("inf"):
            raise ValueError(f"tokens must be a finite number, not negative, got {tokens!r}.")
        self.step += 1
        self._at = self.step
        self._count(session, float(tokens))
        if checkpoint:
            self.save(checkpoint)
        if self._replay:
            return self._replay_step(session)
        exchange = self._exchange
        newest, is_soon = exchange.look(self.version)
        if newest > self.version:
            self._take(session, newest)
            is_soon = False
        self._look_after_sent()
        is_due = self._since >= self.inner_steps // self._fragments or is_soon
        is_again = bool(self._attempts)
        if self._sent is None and is_due and exchange.may_try():
            is_there = self._contribute(session, is_soon)
            if is_there and not is_again:
                self._wait_and_take(session, self._wait)

    def _look_after_sent(self) -> None:
        """Takes the last contribution back if it cannot be merged, or has waited too long."""
        if self._sent is None:
            return
        name, version = next(reversed(self._attempts), ""), self._sent.version
        why = self._exchange.is_lost(name, version)
        self._exchange.waits(
            "sent", f"its contribution to version {version} waits: no merger makes the next one",
            max(self._wait, _LONG),
        )  # fmt: skip
        is_long = time.monotonic() - self._sent_at > _LONG * 4 ** len(self._attempts)
        if is_long and len(self._attempts) < _ATTEMPTS and self._since >= self.inner_steps:
            why = why or "nobody has merged it, and there is more"
        if why:
            self._take_back(f"{name}: {why}; what is in it goes into another contribution")

    def _take_back(self, why: str) -> None:
        """Treats the last contribution as not made, so that the next one contains it; logs why."""
        assert self._sent is not None
        sent, self._sent = self._sent, None
        self._since += sent.steps
        self._tokens[sent.version % self._fragments] += sent.tokens
        for name in sent.values:
            self._residual.pop(name, None)
        self._residual.update(sent.residual)
        if why:
            logger.warning("Island %s: %s", self.name, why)
        self._note("took_back", why=why)

    def _count(self, session: Any, tokens: float) -> None:
        """Counts the update of this step and its tokens, unless the step accumulated or skipped."""
        before, now = self._step_counts, self._counts_of(session)
        self._step_counts = now
        if self._waiting_tokens is None:  # restored sums, of which no tokens are known: estimate
            self._waiting_tokens = before.waiting * tokens
        if now.waiting:
            self._waiting_tokens += tokens if now.waiting != before.waiting else 0.0
            return
        tokens += self._waiting_tokens
        self._waiting_tokens = 0.0
        if now.skipped > before.skipped:
            return
        self._since += 1
        self._tokens = [count + tokens for count in self._tokens]

    def finish(self, session: Any, waits: bool = True) -> None:
        """Contributes what is left, takes merged values that come in time, and leaves the folder.

        What was learned after the last contribution can be contributed only once that one is
        merged. So this method waits for the merge up to `wait_seconds`, whatever `wait` is.

        Args:
          session: the session in which steps were made.
          waits: whether there is time to wait. If not, merged values are taken only if they are
            there at once.
        """
        if self._replay or self._has_left or self.version is None:
            return
        until = time.monotonic() + (self._wait_at_end if waits else 0.0)
        while self._sent is not None or any(self._tokens):
            if self._sent is None and not self._contribute(session, True):
                if not any(self._tokens) or time.monotonic() > until:
                    break
                time.sleep(min(self._poll, 0.5))
            if not self._wait_and_take(session, until - time.monotonic()):
                self._look_after_sent()
                if time.monotonic() > until:
                    break
        if self._sent is not None and any(self._tokens):
            # Contribute again, with what was learned since. The merger takes the last contribution.
            self._take_back("it ends: all that is left goes into one contribution")
            self._contribute(session, True)
            if self._wait_and_take(session, 0.0):  # a version with the former one came in between
                self._contribute(session, True)
        left = max(self._tokens)
        if left or (self._sent and waits):
            what = "is in no contribution" if left else "waits to be merged"
            logger.warning(
                "The island %s ends, and what it has learned from %g tokens since version %d %s",
                self.name, left or (self._sent.tokens if self._sent else 0.0), self.version, what,
            )  # fmt: skip
        self.close()

    def close(self) -> None:
        """Leaves the folder without a last contribution, and stops this process's merger thread."""
        if self._merger:
            self._merger.stop()
            self._merger = None
        if self.version is not None and not self._has_left:
            self._has_left = True
            self._note("left", step=self.step, tokens_left=max(self._tokens))
            self._exchange.lease.leave()

    def _wait_and_take(self, session: Any, seconds: float) -> bool:
        """Waits for merged values up to `seconds`, and takes them; returns whether they came."""
        assert self.version is not None
        before, until = self.version, time.monotonic() + seconds
        while self._sent is not None:
            newest, _ = self._exchange.look(before, at_once=True)
            if newest > before:
                self._take(session, newest)
                return self.version != before
            if time.monotonic() >= until:
                return False
            name = next(reversed(self._attempts), "")
            if self._exchange.is_lost(name, self._sent.version):
                self._look_after_sent()
                return False
            time.sleep(min(self._poll, 0.05))
        return False

    def _contribute(self, session: Any, is_early: bool) -> bool:
        """Contributes this island's change of the variables that the next version changes.

        Returns whether the contribution is surely in the folder. Values that are not finite are not
        contributed: the island goes back to its version. `is_early` says, for the journal, that
        the merger was about to decide.
        """
        assert self.version is not None
        fragment = self.version % self._fragments
        names, tokens = self._turn(), self._tokens[fragment]
        if not tokens:
            return False
        if not self._replay:
            self._exchange.check_name()
        now = self._values.read(session)
        change = {name: (self._base[name] - wide(now[name])).astype(np.float32) for name in names}
        bad = [name for name, value in change.items() if not np.isfinite(value).all()]
        if bad:
            anew = self._go_back(session)
            if not self._replay:
                logger.warning(
                    "%s of %s holds numbers that are not finite, after step %d: it goes back to "
                    "version %d%s", bad[0], self.name, self._at, self.version,
                    f", and {counted(sorted(anew), 'slot')} begin anew" if anew else "",
                )  # fmt: skip
                self._note("went_back", variable=bad[0], tokens=tokens)
            return False
        counts, steps = self._counts_in(now), self._since
        residual = {name: self._residual[name] for name in names if name in self._residual}
        values = {name: now[name] for name in names}
        sent = Sent(self.version, values, counts, tokens, steps, residual)
        for name, value in residual.items():
            change[name] += value
        tensors, errors = encoded(change, self.form)
        is_there = True
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
                     "early": is_early, "bytes": _bytes(tensors)}  # fmt: skip
            name, is_there = self._exchange.contribute(facts, tensors, event)
            self._attempts[name] = sent  # the object may exist even if the folder reported an error
            self.traffic = self.traffic._replace(written=self.traffic.written + _bytes(tensors))
        self._sent, self._sent_at = sent, time.monotonic()
        self._since, self._tokens[fragment] = 0, 0.0
        self._residual.update(errors)
        if not is_there:
            self._take_back("")
        return is_there

    def _go_back(self, session: Any) -> list[str]:
        """Resets variables to the version's values; returns the slots that it resets as well.

        Those are the slots that are not finite, and the other slots of their variables.
        """
        begin_anew = getattr(self._values, "begin_anew", None)
        anew = begin_anew(session) if begin_anew else {}
        self._write(session, self._base, {}, anew)
        assert self.version is not None
        self._start_from(self.version, self._counts_in(self._values.read(session)))
        return list(anew)

    def _take(
        self,
        session: Any,
        newest: int,
        found: tuple[dict[str, np.ndarray], Decision] | None = None,
        merged_as: str | None = "?",
    ) -> None:
        """Takes a newer version's values, and adds what the island learned that is not in them.

        A contribution that can no longer be merged counts as not contributed.

        Args:
          session: the session to write to.
          newest: the newer version's number.
          found: the version's values and decision, if they were read before.
          merged_as: only in a replay: the name of this island's contribution that was merged, ""
            if none was, None if that was not known yet.
        """
        assert self.version is not None
        found = found or self._load(newest, self.version + 1)
        if not found:
            return
        values, decision = found
        now, sent = self._values.read(session), self._sent
        if not self._replay:
            version = self.version if sent is None else sent.version
            merged_as = self._exchange.fate(list(self._attempts), version, decision)
        if merged_as and not self._replay:
            # The merged contribution may be an earlier attempt than the last one.
            then = self._attempts[merged_as]
            if sent is not then:
                self._tokens[then.version % self._fragments] += (
                    sent.tokens if sent else 0.0
                ) - then.tokens
                self._since += (sent.steps if sent else 0) - then.steps
            sent = self._sent = then
        elif sent and merged_as == "":
            why = "came too late to be merged, or was refused"
            self._take_back(f"its contribution to version {sent.version} {why}: it is made again")
            sent = None
        before = {name: wide(x) for name, x in (sent.values if sent else {}).items()}
        learned = {name: wide(now[name]) - before.get(name, self._base[name]) for name in values}
        counts = self._counts_in(now)
        counts_before = sent.counts if sent else self._counts_before
        is_open = sent is not None and merged_as is None
        if is_open and sent:
            # The contribution may still be merged into a later version, so its change is kept.
            more = {name: before[name] - self._base[name] for name in before}
            learned = {name: x + more[name] if name in more else x for name, x in learned.items()}
        followed = self._follow_version(decision, counts, counts_before)
        self._write(session, values, learned, followed)
        self.version = newest
        if is_open and sent:
            kept = {name: wide(values[name]) + more[name] for name in more}
            self._sent = sent._replace(values=kept)
            self._attempts = {name: self._sent for name in self._attempts}
        else:
            self._sent, self._attempts = None, {}
        self._exchange.reminders.over("sent")
        self._note("took", merged=merged_as, bytes=_bytes(values))

    def _begin_replay(self, session: Any, step: int, saved: SavedIsland | None) -> None:
        """Begins a replay at a step at which, says the journal, the island joined."""
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
                    f"{self.name!r} joined at step {step} with what its checkpoint had learned: a "
                    "replay from there needs what Island.save left beside it."
                )
            self._take_fragments()
            self._restore(session, saved)
        self._replay_step(session)

    def _lack_of_version(self, event: Mapping[str, Any]) -> IslandError:
        return IslandError(
            f"Version {event['version']}, which {self.name!r} took after step {self._at}, cannot "
            f"be read from {self.folder.url}: a replay needs all versions (keep_all)."
        )

    def _replay_step(self, session: Any) -> None:
        """Repeats what the island did after this step in the run that is replayed."""
        for event in self._events.get(self._at, []):
            kind = event["event"]
            if kind == "joined" and "restored" in event:
                continue  # `_begin_replay` has restored this
            if kind == "joined":
                self._take_fragments()
                found = self._load(event["version"], 0)
                if not found:
                    raise self._lack_of_version(event)
                self._new = found[0]
                name, outstanding = event.get("sent", ""), None
                if name:
                    outstanding = self._exchange.contribution(
                        name, self._turn_specs(event["version"])
                    )
                self._join(session, event["version"], found[1], outstanding)
            elif kind == "took":
                self._take(session, event["version"], merged_as=event.get("merged"))
                if self.version != event["version"]:
                    raise self._lack_of_version(event)
            elif kind == "took_back" and self._sent:
                self._take_back("")
            elif kind == "contributed":
                self._contribute(session, False)
            elif kind == "went_back":
                self._go_back(session)


def _bytes(values: Mapping[str, np.ndarray]) -> int:
    return sum(value.nbytes for value in values.values())
