"""The merger: the process or thread that makes versions of the values from islands' contributions.

A version is made in two steps. First the merger writes down which contributions it merges into the
version, with their weights and checksums: this object is the decision on the version. Then the
merger writes the version's values (see module `versions`). Both objects are files of the folder
that are created once and never replaced. So if a merger is killed at any point and started again,
it makes a version with the same bits. If a merger was stopped and wakes up, another merger may have
made a decision meanwhile: it then finds this decision, and makes no other. `replay` can make every
version again from its decision.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Any, Callable, Literal, NamedTuple, Sequence

import numpy as np

from mtf_gradsync.extension import is_whole_number, some_of
from mtf_gradsync.tools.islands import leases
from mtf_gradsync.tools.islands.changes import Length, MergeSettings, scale_of
from mtf_gradsync.tools.islands.folder import Folder, FolderError
from mtf_gradsync.tools.islands.leases import HeartbeatAges, Lease, Reminders, terms_of
from mtf_gradsync.tools.islands.objects import (
    REFUSED,
    SETTINGS,
    Contribution,
    Decision,
    MadeBy,
    announcement_object,
    decision_object,
    island_of,
    last_contributions,
    momentum_object,
    numbers_in,
    read_decision,
    version_object,
)
from mtf_gradsync.tools.islands.received import ReceivedContributions
from mtf_gradsync.tools.islands.tensor_files import (
    SUFFIX,
    Arrays,
    DamagedObjectError,
    tensor_object,
)
from mtf_gradsync.tools.islands.versions import (
    MergedState,
    counters_of_version,
    make_version,
    read_state,
    versions_that_make,
)

logger = logging.getLogger(__name__)

# Contributions to versions that are older by up to so many are still counted as late. And so many
# decisions are kept.
_VERSIONS_LOOKED_AT, _DECISIONS_KEPT = 8, 64
# The usual length of an island's change is found from its changes for so many versions.
_VERSIONS_OF_LENGTHS = 8


class MergerError(RuntimeError):
    """The error of a merger that cannot go on; base class of `FolderTakenError`."""


class FolderTakenError(MergerError):
    """The error of a folder in which another process already merges."""


Quorum = int | Literal["living"]


class Waiting(NamedTuple):
    """The settings of how long a merger waits for contributions.

    Attributes:
      quorum: how many contributions that begin from the newest version are needed for the next: a
        number, or "living" for one of each island that writes heartbeats.
      min_grace: the least seconds to wait for more contributions after the quorum is reached.
      max_grace: the most seconds to wait. Between the two limits, the wait is 1.5 times the usual
        time between the first and the last contribution that begin from the same version.
      max_staleness: by how many versions the version from which a contribution begins may be older
        than the newest version. Older contributions are not merged.
    """

    quorum: Quorum = 1
    min_grace: float = 1.0
    max_grace: float = 60.0
    max_staleness: int = 0

    def check(self) -> None:
        """Raises ValueError if a setting is out of range, or `min_grace` is above `max_grace`."""
        whole = "must be a whole number of at least"
        if self.quorum != "living" and not is_whole_number(self.quorum):
            raise ValueError(f"quorum {whole} 1, or 'living', got {self.quorum!r}.")
        if not is_whole_number(self.max_staleness, 0):
            raise ValueError(f"max_staleness {whole} 0, got {self.max_staleness!r}.")
        if not 0.0 <= self.min_grace <= self.max_grace:
            raise ValueError(
                "min_grace and max_grace need 0 <= min_grace <= max_grace, got "
                f"min_grace={self.min_grace!r}, max_grace={self.max_grace!r}."
            )


class Merger:
    """The maker of versions in a folder, where only one merger can work at a time.

    Args:
      folder: the folder of the islands.
      settings: how versions are made; None takes the folder's settings, or the defaults if the
        folder is new.
      waiting: how long to wait for contributions.
      keep_all: whether to keep all versions and contributions, for `replay`.
      poll_seconds: seconds between two looks into the folder; default 0.2 on a local disk, else 2.
      clock: a function that returns the time in seconds; tests replace it.

    Raises:
      ValueError: a setting makes no sense, or differs from the folder's.
    """

    def __init__(
        self,
        folder: Folder,
        settings: MergeSettings | None = None,
        waiting: Waiting | None = None,
        keep_all: bool = False,
        poll_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        waiting = waiting or Waiting()
        waiting.check()
        there = None
        with contextlib.suppress(DamagedObjectError, FolderError):
            there = MergeSettings.of(folder)
        self.settings = settings or there or MergeSettings()
        self.settings.check()
        if there is not None and there != self.settings:
            raise ValueError(
                f"{folder.url} was begun with {there}, and this merger got {self.settings}: it "
                "would merge contributions by other settings than those for which they were made. "
                "Give the same settings, or begin in another folder."
            )
        if waiting.max_staleness and self.settings.fragments > 1:
            raise ValueError(
                f"max_staleness={waiting.max_staleness} needs fragments=1, got fragments="
                f"{self.settings.fragments}: an older contribution has other variables than the "
                "next version."
            )
        self._folder, self._waiting, self._keep_all = folder, waiting, keep_all
        self._poll = poll_seconds or poll_seconds_of(folder)
        self._clock = clock
        self._reminders = Reminders(logger, clock)
        self._heartbeats = HeartbeatAges(leases.LIFE_SECONDS, clock)
        self._living: set[str] = set()
        self._state: MergedState | None = None  # of the newest version
        self._has_begun = False
        self._decisions: dict[int, Decision | None] = {}
        self._received = ReceivedContributions(folder, clock, self._reminders)

    def run(
        self,
        should_stop: Callable[[], bool] = lambda: False,
        on_version: Callable[[Decision], None] = lambda decision: None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Makes versions until `should_stop()` is True.

        If the folder fails, the failure is logged, and the work is tried again. The method raises
        FolderTakenError if another merger works in the folder.

        Args:
          should_stop: a function that says whether to end; it is called again and again.
          on_version: a function that is called after each version, with its decision.
          sleep: a function that waits for a number of seconds.
        """
        lease = Lease(self._folder, "merger", report=self._report)
        try:
            while True:
                try:
                    has_worked = lease.term is not None or self._take_lease(lease)
                    if has_worked:
                        has_worked = self._make_next_version(lease, on_version)
                    self._reminders.end("folder")
                except FolderError as error:
                    self._reminders.remind("folder", f"Merger: {error}; it is tried again")
                    has_worked = False
                if should_stop():
                    return
                if not has_worked:
                    sleep(self._poll)
        finally:
            lease.leave()

    def says(self) -> list[str]:
        """Returns messages, in words, on what the merger waits for now, or cannot do."""
        return self._reminders.messages()

    def begin_anew(self) -> None:
        """Forgets what was read from the folder, so that it is read again.

        Call `begin_anew` if another merger may have worked in the folder since the last read.
        """
        self._has_begun, self._decisions = False, {}
        self._received.clear()

    def _report(self) -> dict[str, Any]:
        version = self._state.version if self._state else None
        return {"says": self.says(), "version": version, "living": sorted(self._living)}

    def _take_lease(self, lease: Lease) -> bool:
        """Takes the lease to merge if it is free; returns whether this process has it now.

        `lease` is the lease to merge. The method raises FolderTakenError if another process has the
        lease and writes heartbeats.
        """
        holder = lease.take()
        if holder and lease.has_new_heartbeat():
            raise FolderTakenError(
                f"Another merger works in {self._folder.url}: {holder}. One is enough, so that "
                "this merger ends."
            )
        if holder:
            self._reminders.remind("place", f"waiting whether {holder} still merges")
        return not holder

    def _make_next_version(self, lease: Lease, on_version: Callable[[Decision], None]) -> bool:
        """Makes the next version, if enough islands have contributed and the wait is over.

        The first call of the method reads the folder's newest version. If the folder has a decision
        on the next version already, the first call also makes that version. Later calls decide on
        the next version, and make it.

        Args:
          lease: the lease to merge, which this process has.
          on_version: a function that is called after the version was made, with its decision.

        Returns:
          False if it is too early to decide on a version, so that the caller should wait before the
          next call. True if a version was made or read.

        Raises:
          FolderTakenError: another merger has taken the lease.
        """
        if not self._has_begun:
            self._folder.remove_half_written()
            self._write_or_adopt_settings()
            self._state = self._newest_state()
            self._has_begun = True
            decided = self._read_decision(self._next_version)
        else:
            decided = None
            decision = self._decide()
            if decision is None:
                return False
            if not lease.is_held():
                raise FolderTakenError(
                    f"Another merger has taken over {self._folder.url}: this merger ends."
                )
            if self._folder.create_json(decision_object(decision.version), decision):
                decided = decision
                self._received.refused = {}
            else:  # another merger has decided, or this one, whose write reported an error
                decided = self._read_decision(decision.version)
        if decided:
            self._make(decided)
            on_version(decided)
            self._clean_up(decided)
        return True

    @property
    def _next_version(self) -> int:
        return self._state.version + 1 if self._state else 0

    # The folder's content when the merger begins.

    def _write_or_adopt_settings(self) -> None:
        """Writes this merger's settings into the folder, unless the folder has settings already.

        If the folder has settings, they become this merger's. A warning is logged if they differ
        from the settings that the merger had before.
        """
        if self._folder.create_json(SETTINGS, self.settings._asdict()):
            return
        try:
            found = self._folder.read_json(SETTINGS, dict[str, Any])
            MergeSettings.from_dict(found or {}, SETTINGS)
        except DamagedObjectError as error:
            logger.warning("%s; it is made again", error)
            self._folder.set_aside(SETTINGS)
            return self._write_or_adopt_settings()
        there = MergeSettings.of(self._folder)
        if there is not None and there != self.settings:
            logger.warning(
                "%s was begun with %s meanwhile: this merger goes on with these, in place of %s",
                self._folder.url, there, self.settings,
            )  # fmt: skip
            self.settings = there

    def _newest_state(self) -> MergedState | None:
        """Reads the values and momenta as of the newest version; None if there is no version.

        If the newest version is damaged, it is made again from its decision. If the version is
        damaged and has no decision, its object is moved away, and the method goes on with the
        previous version.
        """
        known = {*numbers_in(self._folder, "versions", SUFFIX)}
        for version in sorted(known, reverse=True):
            try:
                state: MergedState | None = read_state(self._folder, version, self.settings)
            except DamagedObjectError as error:
                state = self._remake_version(version, error)
            if state is not None:
                # If the decision's own object is gone or damaged, it is written again.
                decision = self._decision(version)
                if decision is not None:
                    self._folder.create_json(decision_object(version), decision)
                return state
            aside = self._folder.set_aside(version_object(version))
            logger.warning("Nobody has decided on version %d: it goes to %s", version, aside)
        return None

    def _remake_version(self, version: int, reason: DamagedObjectError) -> MergedState | None:
        """Makes a damaged version again from its decision, and writes it into the folder.

        Args:
          version: the number of the version.
          reason: the error by which the existing version could not be read, for the log.

        Returns:
          The values and momenta as of the version; None if there is no decision on it.

        Raises:
          FolderError: the version cannot be made again.
        """
        decision = self._read_decision(version)
        if decision is None:
            return None
        logger.warning("%s; version %d is made again", reason, version)
        try:
            before = read_state(self._folder, version - 1, self.settings) if version else None
            self._make(decision, before)
            return self._state
        except DamagedObjectError as error:
            raise FolderError(
                f"version {version} of {self._folder.url} can neither be read nor made again: "
                f"{reason} {error}"
            ) from error

    def _read_decision(self, version: int) -> Decision | None:
        """Reads the decision on a version from its object in the folder; None if there is none.

        If the object (a file of the folder) is damaged, it is moved away, and the result is None.
        """
        try:
            return read_decision(self._folder, version)
        except DamagedObjectError as error:
            aside = self._folder.set_aside(decision_object(version))
            logger.warning("%s; it goes to %s", error, aside)
            return None

    # One version.

    def _make(self, decision: Decision, before: MergedState | None = None) -> None:
        try:
            state = make_version(self._folder, decision, before or self._state)
        except DamagedObjectError as error:
            if before or (not decision.version and self._state):
                raise
            # The version cannot be made, so nobody has taken it, and the decision can be replaced.
            aside = self._folder.set_aside(decision_object(decision.version))
            self._received.clear()
            logger.warning("%s; the decision goes to %s, and is made anew", error, aside)
            return
        made = state.changed_part(self.settings)
        if made.momenta:
            self._create(momentum_object(state.version), decision, made.momenta)
        # Values are written last: if they exist, all other objects of the version do.
        self._create(version_object(state.version), decision, made.values)
        self._state = state

    def _create(self, name: str, decision: Decision, tensors: Arrays) -> None:
        """Creates an object with a version's values or momenta in the folder.

        If the folder has an object of the same name with other bits, this other object is moved
        away first.

        Args:
          name: the name of the object.
          decision: the decision on the version, which is stored in the object.
          tensors: a dictionary from the names of variables to their values or momenta.
        """
        found, data = tensor_object(MadeBy(decision), tensors)
        if self._folder.create(name, data):
            return
        reason = "it is another"
        with contextlib.suppress(DamagedObjectError):
            there = self._folder.load(name, kind=MadeBy)
            if there is None or there.checksum == found:
                return
            reason = f"it was made by another decision on version {there.facts.decision.version}"
        logger.warning("%s: %s; it goes to %s", name, reason, self._folder.set_aside(name))
        self._folder.create(name, data)

    def _decide(self) -> Decision | None:
        """Chooses the contributions for the next version; returns the decision, not yet written.

        The result is None if it is too early to decide: too few islands have contributed, or the
        wait for more contributions is not over.
        """
        self._look_for_heartbeats()
        if self._state is None:
            return self._decide_first()
        newest = self._state.version
        oldest = max(newest - self._waiting.max_staleness, 0)
        merged, counted = self._merged_and_late(oldest)
        there, late = list[Contribution](), list[Contribution]()
        for version in numbers_in(self._folder, "contributions", ""):
            if not oldest - _VERSIONS_LOOKED_AT <= version <= newest:
                continue
            for pair, name in last_contributions(self._folder, version).items():
                if pair not in (merged if version >= oldest else counted):
                    found = self._received.checked_record(self._state, self.settings, name)
                    if found:
                        (there if version >= oldest else late).append(found)
        current = [one for one in there if one.version == newest]
        quorum = self._quorum()
        if not self._are_enough([one.island for one in current], quorum):
            return None
        self._folder.create_json(announcement_object(newest + 1), True)
        now, arrived = self._clock(), sorted(self._received.arrived[one.pair] for one in current)
        is_complete = self._living <= {one.island for one in current}
        if not is_complete and now - arrived[quorum - 1] < self._grace():
            return None
        # Sorted by name, so that the order in which contributions arrive does not matter.
        there.sort(key=lambda one: (one.island, one.version))
        contributions = [self._limit_length(one, there) for one in there]
        self._received.warn_of_equal_changes(contributions)
        before = self._decision(newest)
        decision = Decision(
            version=newest + 1,
            contributions=contributions,
            dropped=sorted(late, key=lambda one: one.object),
            refused=dict(sorted(self._received.refused.items())),
            counts=counters_of_version(before.counts if before else {}, contributions),
            settings=self.settings._asdict(),
            oldest=max(newest + 1 - self._waiting.max_staleness, 0),
            keeps_all=self._keep_all,
            time=time.time(),
            waited=round(now - arrived[0], 3),
            arrivals={
                one.island: round(self._received.arrived[one.pair] - arrived[0], 3)
                for one in current
            },
        )
        return decision.with_totals_after(before)

    def _decide_first(self) -> Decision | None:
        names = [f"offers/{x}" for x in self._folder.names("offers") if x.endswith(SUFFIX)]
        offers = [self._received.checked_record(None, self.settings, name) for name in names]
        # Offers of islands that do not live are left over from earlier attempts.
        found = [one for one in offers if one and one.island in self._living]
        if not self._are_enough([one.island for one in found], self._quorum()):
            return None
        # Take the offer of the island that has made most steps.
        found.sort(key=lambda one: (-one.counts.get("step", 0), one.island))
        return Decision(
            version=0, contributions=found[:1], counts=found[0].counts, time=time.time(),
            settings=self.settings._asdict(), keeps_all=self._keep_all,
        )  # fmt: skip

    def _look_for_heartbeats(self) -> None:
        terms = terms_of(self._folder.marks("members"))
        self._living = {name.rstrip("@") for name in self._heartbeats.living(terms)}

    def _quorum(self) -> int:
        if self._waiting.quorum == "living":
            return max(len(self._living), 1)
        return self._waiting.quorum

    def _are_enough(self, islands: Sequence[str], quorum: int) -> bool:
        """Returns whether at least `quorum` islands have contributed.

        If the merger has waited for contributions for a long time, a message is logged that names
        the islands whose contributions are missing.

        Args:
          islands: the names of the islands that have contributed from the newest version.
          quorum: the number of contributions that a merge needs.
        """
        if len(islands) >= quorum:
            self._reminders.end("quorum")
            return True
        missing, there = sorted(self._living - set(islands)), ""
        if islands:
            there = f" ({some_of(sorted(islands), 5)})"
        who = f"{some_of(missing, 5)} may come"
        self._reminders.remind(
            "quorum",
            f"version {self._next_version} waits: it has {len(islands)} of {quorum} "
            f"contributions{there}; " + (who if missing else "no other island writes heartbeats"),
            after=self._waiting.max_grace,
        )
        return False

    def _merged_and_late(self, oldest: int) -> tuple[set[tuple[str, int]], set[tuple[str, int]]]:
        """Returns two sets of contributions: those merged, and those merged or counted as late.

        A contribution stands in a set as a pair: the island's name, and the version from which the
        change begins. The sets are read from the decisions on the latest versions.

        Args:
          oldest: the number of the oldest version from which contributions may still be merged.
            Only decisions on versions from `oldest` - 7 on are read.
        """
        merged, counted = set[tuple[str, int]](), set[tuple[str, int]]()
        for version in range(max(oldest - _VERSIONS_LOOKED_AT, 0) + 1, self._next_version):
            decision = self._decision(version)
            if decision:
                merged |= {one.pair for one in decision.contributions}
                counted |= {one.pair for one in decision.dropped}
        return merged, merged | counted

    def _decision(self, version: int) -> Decision | None:
        """Returns the decision on a version, from a cache or from the folder; None if it is gone.

        The decision has an object (a file of the folder) of its own. If this object is damaged or
        gone, the decision is read from the object with the version's values, which contains it,
        too.
        """
        if version not in self._decisions:
            found = self._read_decision(version) if version >= 0 else None
            if found is None and version >= 0:
                with contextlib.suppress(DamagedObjectError):
                    made = self._folder.load(version_object(version), kind=MadeBy)
                    found = made.facts.decision if made else None
            self._decisions[version] = found
        return self._decisions[version]

    def _limit_length(
        self, contribution: Contribution, to_merge: Sequence[Contribution]
    ) -> Contribution:
        """Returns a contribution whose change is scaled down if it is unusually long.

        The limit is `MergeSettings.max_norm` times the usual length. A change that is short enough
        gets the scale 1.

        Args:
          contribution: the contribution.
          to_merge: all contributions that make the version. The usual length is the median of the
            lengths of the other contributions in `to_merge`, and of this island's earlier changes.
        """
        before = range(max(self._next_version - _VERSIONS_OF_LENGTHS, 1), self._next_version)
        own = [
            Length(past.norm * past.scale, past.steps)
            for decision in map(self._decision, before)
            if decision
            for past in decision.contributions
            if past.island == contribution.island
        ]
        others = [Length(x.norm, x.steps) for x in to_merge if x is not contribution]
        length = Length(contribution.norm, contribution.steps)
        scale = scale_of(length, [*others, *own], self.settings.max_norm)
        if scale < 1.0:
            logger.warning(
                "%s is %.3g long, more than %g times as long as usual: it counts with %.3g of its "
                "length (max_norm)", contribution.object, length.norm, self.settings.max_norm,
                scale,
            )  # fmt: skip
        return contribution.scaled(scale)

    def _grace(self) -> float:
        """Returns how many seconds to wait for more contributions after the quorum is reached.

        The result is 1.5 times the usual time between the first and the last contribution to a
        version. But it is at least `min_grace` and at most `max_grace` of the settings `Waiting`.
        """
        decisions = map(self._decision, range(max(self._next_version - 8, 1), self._next_version))
        arrivals = [decision.arrivals.values() for decision in decisions if decision]
        # A single contribution says nothing about how far apart contributions arrive.
        spreads = [max(seconds) for seconds in arrivals if len(seconds) > 1]
        usual = 1.5 * float(np.median(spreads)) if spreads else self._waiting.max_grace
        return min(max(usual, self._waiting.min_grace), self._waiting.max_grace)

    def _clean_up(self, decision: Decision) -> None:
        """Removes objects that no island and no restarted merger needs any more.

        If the merger's `keep_all` is True, only two kinds of objects are removed: islands' offers
        of values for version 0, and announcements that the merger will soon decide. If `keep_all`
        is False, old versions, momenta, contributions and decisions are removed, too, and these
        objects stay: the values and momenta from which the newest two versions are read,
        contributions that may still be merged or are to be counted as late, and the last
        `_DECISIONS_KEPT` decisions.

        Args:
          decision: the decision on the newest version.
        """
        version, fragments = decision.version, self.settings.fragments
        kept = version - self._waiting.max_staleness - _VERSIONS_LOOKED_AT
        self._decisions = {v: d for v, d in self._decisions.items() if v >= kept}
        self._received.forget_before(kept)
        for number in numbers_in(self._folder, "versions", ".soon"):
            if number <= version:
                self._folder.remove(announcement_object(number))
        # An island may be reading the version before, and the newest may have to be made again.
        needed = {*versions_that_make(version, fragments)}
        needed |= {*versions_that_make(max(version - 1, 0), fragments)}
        # Version 0 is made from the offer that its decision names. If this decision cannot be read
        # now, all offers stay.
        is_needed = self._keep_all or 0 in needed
        first = self._decision(0) if is_needed else None
        for name in self._folder.names("offers") if version and (first or not is_needed) else ():
            if first is None or f"offers/{name}" != first.contributions[0].object:
                self._folder.remove(f"offers/{name}")
        if self._keep_all:
            return
        for number in numbers_in(self._folder, "versions", SUFFIX):
            if number not in needed and number < version:
                self._folder.remove(version_object(number))
        for number in numbers_in(self._folder, "momenta", SUFFIX):
            if number < version - fragments:
                self._folder.remove(momentum_object(number))
        for number in numbers_in(self._folder, "decisions", ".json"):
            if number <= version - _DECISIONS_KEPT:
                self._folder.remove(decision_object(number))
        _, counted = self._merged_and_late(version - self._waiting.max_staleness)
        for number in numbers_in(self._folder, "contributions", ""):
            place = f"contributions/{number:08d}"
            # Contributions that a merge of the newest versions needs stay.
            if number >= version - 1 - self._waiting.max_staleness:
                continue
            for name in self._folder.names(place):
                if number < kept or (island_of(name), number) in counted or REFUSED in name:
                    self._folder.remove(f"{place}/{name}")


class MergerThread:
    """A thread that runs a merger, or waits while another process merges in the folder.

    Errors in the thread are logged, and the merger begins again: only the method `stop` ends the
    thread.
    """

    def __init__(self, merger: Merger):
        self._merger = merger
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="merger", daemon=True)

    def start(self) -> None:
        """Starts the thread, unless it runs already."""
        if not self._thread.is_alive():
            self._thread.start()

    def stop(self) -> None:
        """Stops the merger, and waits until the thread has ended."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def says(self) -> str:
        """Returns in words what the merger waits for, or cannot do; "" if it works normally."""
        return " ".join(self._merger.says())

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._merger.run(self._stop.is_set, sleep=self._stop.wait)
                return
            except FolderTakenError:
                pass
            except Exception:
                logger.warning("The merger of this process begins again after", exc_info=True)
            self._stop.wait(leases.BEAT_SECONDS)
            self._merger.begin_anew()


def poll_seconds_of(folder: Folder) -> float:
    """Returns the default number of seconds between two looks into a folder."""
    return 0.2 if folder.is_local else 2.0
