"""Island: a program that trains by itself, and exchanges what it has learned through a folder."""

from __future__ import annotations

import contextlib
import logging
import re
import time
import uuid
from typing import Any, Literal, Mapping, NamedTuple, Sequence, get_args

import numpy as np

from mtf_gradsync.extension import counted, is_number
from mtf_gradsync.tools.islands.changes import FORMS, Form, encoded, wide
from mtf_gradsync.tools.islands.folder import DamagedObjectError, Folder, Spec
from mtf_gradsync.tools.islands.journal import Journal, events_by_step
from mtf_gradsync.tools.islands.merger import ROUND, Merger, MergerThread, Waiting, poll_seconds_of
from mtf_gradsync.tools.islands.values import StepCounts, Values
from mtf_gradsync.tools.islands.versions import (
    MergeSettings,
    contribution_object,
    decision_object,
    fragment_of,
    member_object,
    newest_version,
    offer_object,
    read_values,
)

logger = logging.getLogger(__name__)

Wait = Literal["grace", "none"]
Follow = Literal["version", "own"]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_island_name(name: Any) -> None:
    """Raises ValueError for what cannot be a part of the names of objects."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"The name of an island is of letters, digits, '.', '_' and '-', got {name!r}."
        )


class IslandError(RuntimeError):
    """An island cannot begin or be replayed."""


class FolderTraffic(NamedTuple):
    """Bytes that an island has written to the folder and read from it, of tensors."""

    written: int
    read: int


class Sent(NamedTuple):
    """What an island had when it contributed, until a version has it.

    Attributes:
      values: of the variables that it contributed.
      counts: those that schedules go by.
      tokens: what the contribution stands for.
      steps: how many updates are in it.
      residual: what rounding had taken away before, and is in it.
    """

    values: dict[str, np.ndarray]
    counts: dict[str, int]
    tokens: float
    steps: int
    residual: dict[str, np.ndarray]


# How long an island that is told to stop waits for a version before it contributes the rest.
_SECONDS_TO_LEAVE = 5.0


class Island:
    """One island of many: contributes its change every `inner_steps`, and takes merged values.

    Each island is a program of its own, on a mesh and a runtime of its own, which may die, lag,
    come back or be added while the others go on. They meet in a folder, where a merger (see
    `Merger`) makes versions of the values from what islands contribute.

    Make it when the step has been built and lowered, before a session. Call `begin(session)` once
    its variables are initialized or restored, then `after_step(session, tokens)` after each step.

    Args:
      folder: path or URL that all islands and the merger can read and write; see `Folder`.
      name: of this island, the same after a restart; letters, digits, ``.``, ``_`` and ``-``.
      inner_steps: updates of its own before it contributes (H): steps, where nothing accumulates or
        skips. It contributes earlier when the merger is about to make a version without it.
      lowering: of the step, for sessions of TensorFlow; see `Values`.
      variables: names of the variables to exchange; default all trainable ones.
      values: in place of both, what reads and writes the values of another kind of session: an
        object with `specs`, `read` and `write` as `Values` has them.
      wait: "grace" waits for merged values after a contribution, up to `wait_seconds`; "none" goes
        on with steps at once. Either way merged values that come later are taken after the step
        that sees them, and what the island has learned since it contributed is kept.
      wait_seconds: see `wait`.
      begin_seconds: how long to wait for the first version when the folder has none.
      form: how a change is sent: "float32", "bfloat16", "int8" with a scale for every 256 numbers,
        or "int4" with one for every 64. What rounding takes away is added to the next change.
      follow: "version" sets the global step and the counts of updates, by which schedules go, to
        what is behind the values of a version that it takes: a joiner goes on where the others are.
        "own" counts the island's own steps.
      merge: whether a thread of this process is the merger, or waits to become it.
      merge_settings: of that merger; see `MergeSettings`.
      waiting: of that merger; see `Waiting`.
      keep_all: of that merger: keep what replaying needs.
      replay: whether to take merged values at the steps where the journal says that this island
        took them, and to write nothing.
      poll_seconds: how often to look into the folder at most; default 0.2 on a local disk, else 2.

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
            name: Spec(shape, str(np.promote_types(_dtype(dtype), np.float32)))
            for name, (shape, dtype) in self._values.specs.items()
        }
        self._follows: Mapping[str, str] = (
            getattr(self._values, "follows", {}) if follow == "version" else {}
        )
        self._wait = wait_seconds if wait == "grace" else 0.0
        self._wait_at_end, self._follow = wait_seconds, follow == "version"
        self._begin_seconds, self._replay = begin_seconds, replay
        self._poll = poll_seconds or poll_seconds_of(self.folder)
        self._looked_at = -float("inf")
        self.traffic = FolderTraffic(0, 0)
        self._make_merger = lambda: (
            MergerThread(lambda: Merger(self.folder, merge_settings, waiting, keep_all))
            if merge
            else None
        )
        self._merger = self._make_merger()  # wrong settings are an error at once
        self._life = uuid.uuid4().hex  # tells this process from others of its name
        self._has_left = False
        self.version: int | None = None  # whose values the island goes on from
        self.step = 0
        self._fragments = 1

    # What stands between two versions.

    def _start_from(self, version: int, counts: Mapping[str, int]) -> None:
        """Forgets all that was learned and not contributed, and goes on from a version."""
        self.version = version
        self._counts_before = dict(counts)
        self._sent: Sent | None = None
        self._since = 0  # updates since it contributed
        self._tokens = dict.fromkeys(range(self._fragments), 0.0)
        self._residual: dict[str, np.ndarray] = {}

    def begin(self, session: Any, step: int = 0) -> None:
        """Goes on from the newest version in the folder, or offers its values for the first one.

        After `finish`, or where a session was made anew and has older values, it begins again.

        Args:
          session: with the island's own values, initialized or restored from its checkpoint.
          step: how many steps the island has made before. `step` of the island may be more
            afterwards, as it follows the version.

        Raises:
          IslandError: there was no version within `begin_seconds`, or a replay has no journal.
        """
        self.step = self._at = step
        self._has_left, self.version = False, None
        self._step_counts = self._counts_of(session)
        self._waiting_tokens: float | None = None if self._step_counts.waiting else 0.0
        if self._replay:
            self._events = events_by_step(self.folder, self.name)
            self._lack_of(step)
            return self._replay_step(session)
        self._merger = self._merger or self._make_merger()
        if self._merger:
            self._merger.start()
        self._journal = Journal(self.folder, self.name)
        values = self._values.read(session)
        if newest_version(self.folder) is None:
            facts = {"island": self.name, "version": None, "tokens": 1.0, "steps": 0,
                     "counts": self._counts_in(values)}  # fmt: skip
            offered = {name: wide(values[name]) for name in self._specs}
            self.folder.store(offer_object(self.name), facts, offered)
        version = self._await_version()
        self.folder.write_json(member_object(self.name), {"version": version, "life": self._life})
        # The merger may have decided on what an earlier life contributed: it stays as it is.
        has_sent = self._has_contribution(version)
        self._join(session, version, has_sent)
        self._journal.write("joined", step=step, version=version, has_sent=has_sent,
                            bytes=_bytes(self._new))  # fmt: skip
        # A run that begins takes values as it should; what is overwritten or jumps is said.
        level = logging.WARNING if self.step != step or step else logging.INFO
        logger.log(
            level, "the island %s goes on from version %d, whose values take the place of its own "
            "of step %d, as step %d", self.name, version, step, self.step,
        )  # fmt: skip

    def _counts_of(self, session: Any) -> StepCounts:
        counts = getattr(self._values, "counts", None)
        return counts(session) if counts else StepCounts()

    def _counts_in(self, values: Mapping[str, Any]) -> dict[str, int]:
        """Returns the counts that schedules go by, of the island's own steps and of updates."""
        found = {key: int(values[name]) for key, name in self._follows.items()}
        return {"step": self.step, **found}

    def _has_contribution(self, version: int) -> bool:
        with contextlib.suppress(DamagedObjectError):
            return self.folder.load(contribution_object(version, self.name)) is not None
        return False

    def _check_merger(self) -> None:
        error = self._merger.error if self._merger else None
        if error is not None:
            raise IslandError(f"The merger of this process ended: {error}") from error

    def _has_name(self) -> bool:
        member = self.folder.read_json(member_object(self.name))
        return not member or member.get("life") == self._life

    def _check_name(self) -> None:
        """Raises IslandError if another process has begun by this island's name."""
        if not self._has_name():
            raise IslandError(
                f"Another process has begun as the island {self.name!r} of {self.folder.url}: "
                "each island needs a name of its own. This one ends."
            )

    def _await_version(self) -> int:
        """Returns the newest version that is whole, once there is one."""
        until, is_said, refused = time.monotonic() + self._begin_seconds, False, ""
        while True:
            self._check_merger()
            newest = newest_version(self.folder)
            if newest is not None:
                settings = MergeSettings.of(self.folder)
                self._fragments = settings.fragments if settings else 1
                if self.inner_steps % self._fragments:
                    raise IslandError(
                        f"inner_steps={self.inner_steps} is no multiple of the {self._fragments} "
                        f"fragments of {self.folder.url}."
                    )
                try:
                    self._new = self._load(range(newest + 1))
                    return newest
                except DamagedObjectError as error:
                    if str(error) != refused:
                        logger.warning("%s", error)
                    refused = str(error)
            if time.monotonic() > until:
                way = f"A merger makes it: mtf-gradsync islands {self.folder.url}, or merge=True."
                raise IslandError(
                    f"{self.folder.url} has no version of the values after "
                    f"{self._begin_seconds:g} s. {refused or way}"
                )
            if not is_said and self._merger is None:
                logger.warning("waiting for the first version in %s", self.folder.url)
                is_said = True
            time.sleep(self._poll)

    def _load(self, versions: range) -> dict[str, np.ndarray]:
        """Returns what the newest of some versions has of the variables that they changed."""
        specs, newest = self._specs, versions[-1]
        found = read_values(self.folder, newest, self._fragments, specs, versions[0])
        self.traffic = self.traffic._replace(read=self.traffic.read + _bytes(found))
        return found

    def _join(self, session: Any, version: int, has_sent: bool) -> None:
        counts = self._counts_in(self._values.read(session))
        self._base: dict[str, np.ndarray] = {}
        self._start_from(version, counts)
        self._write(session, self._new, {}, self._follow_version(version, counts, counts))
        if has_sent:
            values = {name: self._base[name] for name in self._turn()}
            self._sent = Sent(values, self._counts_before, 0.0, 0, {})

    def _write(
        self,
        session: Any,
        merged: Mapping[str, np.ndarray],
        learned: Mapping[str, np.ndarray],
        more: Mapping[str, Any],
    ) -> None:
        """Writes merged values with what was learned since; the next change is from the former."""
        written: dict[str, Any] = dict(more)
        for name, value in merged.items():
            since = learned.get(name, np.zeros((), value.dtype))
            # Exactly the merged values where nothing was learned since.
            written[name] = (value + since).astype(_dtype(self._values.specs[name].dtype))
            is_exact = written[name].dtype == value.dtype
            self._base[name] = value if is_exact else wide(written[name]) - since
        self._values.write(session, written)

    def _follow_version(
        self, version: int, counts: Mapping[str, int], before: Mapping[str, int]
    ) -> dict[str, int]:
        """Returns the counters to set so that they are the version's and what came since `before`.

        A counter never goes back.
        """
        self._counts_before = dict(counts)
        if not self._follow:
            return {}
        with contextlib.suppress(DamagedObjectError):
            behind = (self.folder.read_json(decision_object(version)) or {}).get("counts", {})
            for key in counts.keys() & behind.keys():
                since = counts[key] - before[key]
                new = max(counts[key], behind[key] + since)
                self._counts_before[key] = new - since
        new = {key: self._counts_before[key] + counts[key] - before[key] for key in counts}
        self.step += new["step"] - counts["step"]
        return {name: new[key] for key, name in self._follows.items() if new[key] != counts[key]}

    def _turn(self) -> list[str]:
        """The names of the variables that the next version changes."""
        assert self.version is not None
        return fragment_of(self.version + 1, list(self._base), self._fragments)

    def after_step(self, session: Any, tokens: float = 1.0) -> None:
        """Contributes what the island has learned, or takes merged values, where it is time to.

        Args:
          session: in which a step has been made.
          tokens: how much that step's loss stands for; what islands contribute is weighted by it.
            Those of steps that accumulate count with their update, those of skipped steps never.
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
        if self._replay:
            return self._replay_step(session)
        newest, is_closing = self._look()
        if newest > self.version:
            self._take(session, newest)
            newest, is_closing = self.version, False
        is_due = self._since >= self.inner_steps // self._fragments or is_closing
        if self._sent is None and is_due and self._contribute(session, is_closing):
            self._wait_and_take(session, self._wait)

    def _count(self, session: Any, tokens: float) -> None:
        """Counts an update and the tokens that it applies, once it has applied them."""
        before, now = self._step_counts, self._counts_of(session)
        self._step_counts = now
        if self._waiting_tokens is None:  # a checkpoint does not say how many are in its sums
            self._waiting_tokens = before.waiting * tokens
        if now.waiting:
            self._waiting_tokens += tokens if now.waiting != before.waiting else 0.0
            return
        tokens += self._waiting_tokens
        self._waiting_tokens = 0.0
        if now.skipped > before.skipped:
            return
        self._since += 1
        for fragment in self._tokens:
            self._tokens[fragment] += tokens

    def finish(self, session: Any, waits: bool = True) -> None:
        """Contributes all that is left, takes merged values if they come in time, says good-bye.

        What it has learned since a contribution that is not merged yet can be contributed when that
        is: it waits for this up to `wait_seconds`, whatever `wait` is.

        Args:
          session: in which steps were made.
          waits: whether there is time for merged values; they are not taken otherwise, unless they
            come within some seconds and there is more to contribute.
        """
        if self._replay or self._has_left or self.version is None:
            return
        until = time.monotonic() + (self._wait_at_end if waits else _SECONDS_TO_LEAVE)
        while self._sent is not None or any(self._tokens.values()):
            if self._sent is None and not self._contribute(session, True):
                break
            if not waits and not any(self._tokens.values()):
                break  # all is contributed
            if not self._wait_and_take(session, until - time.monotonic()):
                break
        left = max(self._tokens.values())
        if left:
            logger.warning(
                "the island %s ends, and what it has learned from %g tokens since version %d is "
                "in no contribution: no newer version came in time", self.name, left, self.version,
            )  # fmt: skip
        self.close()

    def close(self) -> None:
        """Says good-bye without a last contribution, and ends this process's merger."""
        if self._merger:
            self._merger.stop()
            self._merger = None
        if not self._replay and self.version is not None and not self._has_left:
            self._has_left = True
            if self._has_name():
                self.folder.remove(member_object(self.name))
            left = max(self._tokens.values())
            self._journal.write("left", step=self.step, version=self.version, tokens_left=left)

    def _look(self) -> tuple[int, bool]:
        """Returns the newest version, and whether the next one is about to be made."""
        assert self.version is not None
        now = time.monotonic()
        if now - self._looked_at < self._poll:
            return self.version, False
        self._looked_at = now
        self._check_merger()
        with contextlib.suppress(DamagedObjectError):
            told = self.folder.read_json(ROUND) or {}
            newest = told.get("version")
            if isinstance(newest, int) and newest >= self.version:
                return newest, bool(told.get("closing")) and newest == self.version
        return self.version, False

    def _wait_and_take(self, session: Any, seconds: float) -> bool:
        """Takes merged values if they come within some seconds; returns whether it did."""
        before, until = self.version, time.monotonic() + seconds
        while True:
            self._looked_at = -float("inf")
            newest, _ = self._look()
            if newest > (self.version or 0):
                self._take(session, newest)
                return self.version != before
            if time.monotonic() >= until:
                return False
            time.sleep(min(self._poll, 0.05))

    def _contribute(self, session: Any, is_early: bool) -> bool:
        """Contributes the change of the fragment whose turn it is; returns whether it did."""
        assert self.version is not None
        fragment = self.version % self._fragments
        names, tokens = self._turn(), self._tokens[fragment]
        if not tokens:
            return False
        if not self._replay:
            self._check_name()
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
                self._journal.write("went_back", step=self._at, version=self.version,
                                    variable=bad[0], tokens=tokens)  # fmt: skip
            return False
        counts, steps = self._counts_in(now), self._since
        residual = {name: self._residual[name] for name in names if name in self._residual}
        self._sent = Sent({name: now[name] for name in names}, counts, tokens, steps, residual)
        self._since, self._tokens[fragment] = 0, 0.0
        for name, value in residual.items():
            change[name] += value
        tensors, errors = encoded(change, self.form)
        self._residual.update(errors)
        if self._replay:
            return True
        facts = {"island": self.name, "version": self.version, "tokens": tokens, "steps": steps,
                 "form": self.form, "counts": counts}  # fmt: skip
        self.traffic = self.traffic._replace(written=self.traffic.written + _bytes(tensors))
        # Before the object: what is merged is in the journal.
        self._journal.write(
            "contributed", step=self._at, version=self.version, tokens=tokens, steps=steps,
            early=is_early, bytes=_bytes(tensors),
        )  # fmt: skip
        self.folder.store(contribution_object(self.version, self.name), facts, tensors)
        return True

    def _go_back(self, session: Any) -> list[str]:
        """Goes back to the version's values; returns which slots begin anew, not being finite."""
        begin_anew = getattr(self._values, "begin_anew", None)
        anew = begin_anew(session) if begin_anew else {}
        self._write(session, self._base, {}, anew)
        assert self.version is not None
        self._start_from(self.version, self._counts_in(self._values.read(session)))
        return list(anew)

    def _take(self, session: Any, newest: int) -> None:
        """Takes the values of a newer version, and keeps what was learned and not contributed."""
        assert self.version is not None
        try:
            merged = self._load(range(self.version + 1, newest + 1))
        except DamagedObjectError as error:
            logger.warning("%s; training goes on without it", error)
            return
        now = self._values.read(session)
        sent = self._sent.values if self._sent else {}
        learned = {
            name: wide(now[name]) - wide(sent.get(name, self._base[name])) for name in merged
        }
        counts = self._counts_in(now)
        before = self._sent.counts if self._sent else self._counts_before
        self._write(session, merged, learned, self._follow_version(newest, counts, before))
        self.version, self._sent = newest, None
        if not self._replay:
            self._journal.write("took", step=self._at, version=newest, bytes=_bytes(merged))

    def _lack_of(self, step: int) -> None:
        first = [e for e in self._events.get(step, []) if e["event"] == "joined"]
        if not first:
            raise IslandError(
                f"The journal of {self.folder.url} does not say that {self.name!r} joined at step "
                f"{step}; it has events of the steps {sorted(self._events)[:10]}."
            )

    def _replay_step(self, session: Any) -> None:
        """Does after a step what the journal says that the island did after it."""
        for event in self._events.get(self._at, []):
            kind = event["event"]
            if kind == "joined":
                settings = MergeSettings.of(self.folder)
                self._fragments = settings.fragments if settings else 1
                self._new = self._load(range(event["version"] + 1))
                self._join(session, event["version"], event.get("has_sent", False))
            elif kind == "took":
                self._take(session, event["version"])
                if self.version != event["version"]:
                    raise IslandError(
                        f"Version {event['version']}, which {self.name!r} took after step "
                        f"{self._at}, cannot be read from {self.folder.url}: a replay needs all "
                        "versions (keep_all)."
                    )
            elif kind == "contributed":
                self._contribute(session, False)
            elif kind == "went_back":
                self._go_back(session)


def _bytes(values: Mapping[str, np.ndarray]) -> int:
    return sum(value.nbytes for value in values.values())


def _dtype(name: str) -> np.dtype[Any]:
    import ml_dtypes  # gives numpy the name "bfloat16"

    return np.dtype(getattr(ml_dtypes, name, name))
