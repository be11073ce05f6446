"""An island's reads and writes of the folder, which survive failures of the folder.

If a read or a write fails, the failure is logged with the name of the object (a file of the
folder), and the read or write is tried again later. A folder that fails never ends training.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any, Callable, Mapping, NamedTuple, TypeVar

import numpy as np

from mtf_gradsync.tools.islands import leases
from mtf_gradsync.tools.islands.changes import MergeSettings, decoded
from mtf_gradsync.tools.islands.folder import Folder, FolderError
from mtf_gradsync.tools.islands.journal import Journal
from mtf_gradsync.tools.islands.leases import Lease, Reminders
from mtf_gradsync.tools.islands.objects import (
    REFUSED,
    ContributionFacts,
    Decision,
    IslandTotal,
    contribution_object,
    contribution_order,
    last_contributions,
    numbers_in,
    offer_object,
)
from mtf_gradsync.tools.islands.tensor_files import (
    SUFFIX,
    Arrays,
    DamagedObjectError,
    OtherTensorsError,
    Specs,
    tensor_object,
)
from mtf_gradsync.tools.islands.versions import ReadVersion, most_bytes, read_version

T = TypeVar("T")
logger = logging.getLogger(__name__)
# The least time between two looks for a lost offer or contribution of this island.
_LOOK_SECONDS = 2.0


class IslandError(RuntimeError):
    """The error of an island that cannot begin, or cannot repeat an earlier run."""


class Unmerged(NamedTuple):
    """A contribution that may still be merged: its object's name, its facts, and its change.

    The change is a dictionary from the names of variables to float32 arrays.
    """

    name: str
    facts: ContributionFacts
    change: dict[str, np.ndarray]


class Exchange:
    """One island's access to the objects of the folder, during one run of its process.

    A merger makes versions one after the other. Each version holds values of variables that are
    merged from the islands' contributions.

    Args:
      folder: the folder of the islands.
      island: the island's name.
      specs: a dictionary from the names of variables to their shapes and dtypes in versions.
      poll_seconds: the least time between two looks into the folder.
      report: a function that returns a dictionary of the island's "version" and "step", which its
        heartbeats contain.

    Attributes:
      reminders: a logger of failures, and of waits that last long.
      lease: the lease of the island's name, which only one living process can hold.
      journal: the journal of this run of the process.
      number: the number of the last contribution, counted from 1 in each run of the process.
    """

    def __init__(
        self,
        folder: Folder,
        island: str,
        specs: Specs,
        poll_seconds: float,
        report: Callable[[], dict[str, Any]],
    ):
        self.folder, self._island, self._specs = folder, island, specs
        self._poll = poll_seconds
        self.reminders = Reminders(logger)
        self.lease = Lease(
            folder, "members", f"{island}@",
            lambda: {"says": self.reminders.messages(), **report()}, replaces_own=True,
        )  # fmt: skip
        self._next_look = -float("inf")
        self._damaged_versions: set[tuple[int, str]] = set()  # damaged versions, with their marks
        self.number = 0  # of contributions
        self._next_try = -float("inf")
        self._looked_for_sent = -float("inf")
        self.journal = Journal(folder, island, self.reminders)

    def run_or_default(self, key: str, work: Callable[[], T], default: T) -> T:
        """Calls a function that uses the folder; returns its result, or `default` if this fails.

        Args:
          key: a name of the kind of work, such as "offer" (writing initial values for version 0). A
            failure is logged again from time to time, until a call with the same key succeeds.
          work: the function to call, without arguments.
          default: the value to return if `work` raises FolderError.
        """
        try:
            found = work()
        except FolderError as error:
            self.reminders.remind(key, f"Island {self._island}: {error}; it is tried again")
            return default
        self.reminders.end(key)
        return found

    # The island's name.

    def take_name(self, seconds: float) -> None:
        """Takes the lease of the island's name, so that no other process can be this island.

        The method waits if another process has the lease and may be dead, or if the folder fails.
        The longest wait is `seconds` or 40 seconds, whichever is longer. The method raises
        IslandError if a living process has the lease, or if the folder still fails at the end of
        the wait.
        """
        until = time.monotonic() + max(seconds, 2.0 * leases.LIFE_SECONDS)
        while holder := self.run_or_default("begin", self.lease.take, "?"):
            is_late, fails = time.monotonic() > until, holder == "?"
            if fails and is_late:
                raise IslandError(" ".join(self.reminders.messages()))
            if not fails and (is_late or self.lease.has_new_heartbeat()):
                raise IslandError(
                    f"The island {self._island!r} of {self.folder.url} is running already: "
                    f"{holder} uses its name. Each island needs a name of its own "
                    "(ElasticIslands.name, by default the last part of model_dir)."
                )
            if not fails:
                self.reminders.remind("name", f"waiting whether {holder} still has the name of the "
                                      f"island {self._island}")  # fmt: skip
            time.sleep(min(self._poll, 0.2))
        self.reminders.end("name")
        assert self.lease.term is not None
        self.journal.life = self.lease.term

    def check_name(self) -> None:
        """Raises IslandError if another process has taken the island's name."""
        if not self.run_or_default("name", self.lease.is_held, True):
            raise IslandError(
                f"Another process has taken the name of the island {self._island!r} of "
                f"{self.folder.url}, because this process wrote no heartbeats for a "
                "while. This process ends."
            )

    # Versions.

    def newest(self, version: int | None) -> int | None:
        """Returns the number of the newest version in the folder, or `version` if none is newer.

        `version` is the number of a version, or None for no version. A version that was found
        damaged is ignored until its object in the folder changes. The method raises FolderError if
        the folder fails.
        """
        for number, mark in reversed(numbers_in(self.folder, "versions", SUFFIX).items()):
            if version is not None and number <= version:
                break
            if mark and (number, mark) not in self._damaged_versions:
                return number
        return version

    def look_for_version(self, version: int, at_once: bool = False) -> tuple[int, bool]:
        """Returns the newest version's number, and whether the merger will soon decide on the next.

        The method looks into the folder at most every `poll_seconds`. For calls between two looks,
        and if the folder fails, the result is (`version`, False).

        Args:
          version: the number of the version that the island has.
          at_once: whether to look now in any case.
        """
        now = time.monotonic()
        if now < self._next_look and not at_once:
            return version, False

        def work() -> tuple[int, bool]:
            newest = self.newest(version)
            is_soon = newest == version and version + 1 in numbers_in(
                self.folder, "versions", ".soon"
            )
            return newest or 0, is_soon

        began = time.monotonic()
        found = self.run_or_default("versions", work, (version, False))
        # A folder that is slow or fails is asked less often, because training waits for it.
        self._next_look = now + max(self._poll, 20.0 * (time.monotonic() - began - 0.05))
        return found

    def read_values(self, newest: int, fragments: int, since: int) -> ReadVersion | None:
        """Reads the variables that versions from `since` to `newest` changed.

        Args:
          newest: the number of the version to read.
          fragments: the number of sets of variables that versions change in turn.
          since: the number of the first version whose variables are read; 0 reads all variables.

        Returns:
          The values of these variables as of `newest`, and the decision that made `newest`. None if
          the folder fails, or if `newest` is damaged; a damaged version is ignored from then on.

        Raises:
          OtherTensorsError: the versions are of another model's variables.
        """
        try:
            return self.run_or_default(
                "version",
                lambda: read_version(self.folder, newest, fragments, self._specs, since),
                None,
            )
        except OtherTensorsError:
            raise
        except DamagedObjectError as error:
            logger.warning("%s; training goes on without it", error)
            marks = self.run_or_default(
                "versions", lambda: numbers_in(self.folder, "versions", SUFFIX), dict[int, str]()
            )
            self._damaged_versions.add((newest, marks.get(newest, "")))
            return None

    def settings(self) -> MergeSettings:
        """Returns the folder's settings of versions, or the defaults if none can be read."""
        found = None
        with contextlib.suppress(DamagedObjectError):
            found = self.run_or_default("settings", lambda: MergeSettings.of(self.folder), None)
        return found or MergeSettings()

    # Offers and contributions.

    def offer(self, facts: ContributionFacts, tensors: Arrays) -> None:
        """Writes an offer, this island's values, into the folder; version 0 can be made of it.

        If the folder has a good offer of this island already, that offer stays. If the earlier
        offer was lost, damaged or refused, it is written again. A call within two seconds after an
        earlier one does nothing.

        Args:
          facts: the facts that are sent with the values.
          tensors: a dictionary from the names of variables to their values.
        """
        name = offer_object(self._island)
        refused = name.removesuffix(SUFFIX) + REFUSED
        checksum, data = tensor_object(facts, tensors)

        def is_there() -> bool:
            try:
                found = self.folder.load(name, expected=checksum, kind=ContributionFacts)
            except DamagedObjectError:
                return False
            return found is not None

        def work() -> None:
            # A good offer stays: the merger may just have decided on it, and the folder may fail
            # before it has the offer again.
            is_refused = self.folder.read(refused) is not None
            if not self.folder.create(name, data) and (is_refused or not is_there()):
                self.folder.set_aside(name)
                self.folder.remove(refused)
                self.folder.create(name, data)

        if time.monotonic() > self._looked_for_sent + _LOOK_SECONDS:
            self._looked_for_sent = time.monotonic()
            self.run_or_default("offer", work, None)

    def contribute(
        self, facts: ContributionFacts, tensors: Arrays, event: Mapping[str, Any]
    ) -> tuple[str, bool]:
        """Writes an event into the island's journal, and then a contribution into the folder.

        As the event is written first, the journal has an event for each contribution that is ever
        merged.

        Args:
          facts: the facts of the change, such as its version and tokens.
          tensors: the tensors in which the change is sent, by name.
          event: the fields of the journal's event.

        Returns:
          The name of the contribution's object, and whether the object is surely in the folder. If
          the second value is False, the write has failed; the object may exist all the same.
        """
        assert facts.version is not None
        self.number += 1
        name = contribution_object(facts.version, self._island, self.journal.life, self.number)
        _, data = tensor_object(facts, tensors)

        def work() -> bool:
            self.journal.write("contributed", must_succeed=True, object=name, **event)
            return self.folder.create(name, data)

        began = self._looked_for_sent = time.monotonic()
        is_there = self.run_or_default("contribution", work, False)
        if not is_there:  # training waits for a folder that fails, so it is not asked at each step
            self._next_try = began + max(self._poll, 20.0 * (time.monotonic() - began))
        return name, is_there

    def may_contribute(self) -> bool:
        """Returns whether the island may contribute now; after a failure it has to wait a while."""
        return time.monotonic() >= self._next_try

    def merged_contribution(self, names: list[str], version: int, decision: Decision) -> str | None:
        """Returns which of several contributions of this island the merger has merged.

        Args:
          names: the names of the contributions, which were all made from the same version.
          version: the number of this version.
          decision: the decision on a later version.

        Returns:
          The name of the contribution that was merged; "" if none of them was merged and none can
          be merged any more; None if one of them may still be merged.
        """
        last = decision.totals.get(self._island, IslandTotal()).last
        if last in names:
            return last
        return "" if decision.oldest > version else None

    def why_lost(self, name: str, version: int) -> str:
        """Returns in words why a contribution cannot be merged: it was refused, or it is gone.

        The result is "" if the contribution may still be merged. The method looks into the folder
        at most every `poll_seconds`; for calls between two looks the result is "". The result is
        also "" if the folder has a version newer than `version`: the decision on the newer version
        says whether the contribution was merged.

        Args:
          name: the contribution's name.
          version: the number of the version from which the contribution was made.
        """
        now = time.monotonic()
        if now < self._looked_for_sent + self._poll:
            return ""
        self._looked_for_sent = now
        place, last = name.rsplit("/", 1)
        names = self.run_or_default("contribution", lambda: self.folder.names(place), None)
        newest = self.run_or_default("versions", lambda: self.newest(version), None)
        if names is None or newest != version:
            return ""  # a newer version will say whether it was merged
        if last.removesuffix(SUFFIX) + REFUSED in names:
            why = self.run_or_default("refused", lambda: self._reason(name), "")
            return f"the merger refuses it: {why}"
        return "" if last in names else "it is gone"

    def _reason(self, name: str) -> str:
        with contextlib.suppress(DamagedObjectError):
            return self.folder.read_json(name.removesuffix(SUFFIX) + REFUSED, str) or ""
        return ""

    def find_unmerged(self, decision: Decision, specs: Specs) -> Unmerged | None:
        """Finds a contribution of an earlier run of this island's process that may still be merged.

        Args:
          decision: the decision on the newest version, which says what was merged so far.
          specs: a dictionary from the names of the variables that the next version changes to their
            shapes and dtypes.

        Returns:
          The contribution. None if no contribution of an earlier run may still be merged, or if the
          folder fails.
        """
        last = contribution_order(decision.totals.get(self._island, IslandTotal()).last)

        def work() -> Unmerged | None:
            for version in range(decision.version, decision.oldest - 1, -1):
                names = last_contributions(self.folder, version)
                name = names.get((self._island, version), "")
                if contribution_order(name) > last:
                    return self.read_contribution(name, specs)
            return None

        with contextlib.suppress(DamagedObjectError):
            return self.run_or_default("contribution", work, None)
        return None

    def read_contribution(self, name: str, specs: Specs) -> Unmerged | None:
        """Reads a contribution; returns None if it is gone.

        Args:
          name: the name of the contribution's object.
          specs: a dictionary from the names of the contribution's variables to their shapes and
            dtypes.

        Raises:
          DamagedObjectError: the object is damaged, or is for other variables.
        """
        stored = self.folder.load(name, kind=ContributionFacts, most=most_bytes(specs))
        return stored and Unmerged(name, stored.facts, decoded(stored, specs))

    def log_wait(self, key: str, message: str, after: float = 0.0) -> None:
        """Logs what the island waits for, if it has waited for `after` seconds.

        Call `log_wait` again and again while the island waits.

        Args:
          key: a name of the kind of wait; calls with the same key count as one wait.
          message: what the island waits for, in words.
          after: the seconds from the first call to the first message in the log.
        """
        self.reminders.remind(key, f"Island {self._island}: {message}", after)
