"""An island's reads and writes of the folder, which survive failures of the folder.

If a read or a write of the folder fails, this is logged with the name of the object (a file of the
folder), and tried again later. A folder that fails never ends training.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any, Callable, Mapping, TypeVar

import numpy as np

from mtf_gradsync.tools.islands import leases
from mtf_gradsync.tools.islands.changes import decoded
from mtf_gradsync.tools.islands.folder import Folder, FolderError
from mtf_gradsync.tools.islands.journal import Journal
from mtf_gradsync.tools.islands.leases import Lease, Reminders
from mtf_gradsync.tools.islands.objects import (
    REFUSED,
    ContributionFacts,
    Decision,
    IslandTotal,
    contribution_names,
    contribution_object,
    life_and_number,
    numbers_in,
    offer_object,
)
from mtf_gradsync.tools.islands.tensor_files import (
    SUFFIX,
    DamagedObjectError,
    OtherTensorsError,
    TensorSpec,
    tensor_object,
)
from mtf_gradsync.tools.islands.versions import MergeSettings, most_bytes, read_version

T = TypeVar("T")
logger = logging.getLogger(__name__)
# The least time between two looks for a lost offer or contribution of this island.
_LOOK_SECONDS = 2.0


class IslandError(RuntimeError):
    """The error of an island that cannot begin or be replayed."""


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
      reminders: logs failures and waits that last.
      lease: the lease of the island's name, which only one living process can hold.
      journal: the journal of this run of the process.
      number: the number of the last contribution, counted from 1 in each run of the process.
    """

    def __init__(
        self,
        folder: Folder,
        island: str,
        specs: Mapping[str, TensorSpec],
        poll_seconds: float,
        report: Callable[[], dict[str, Any]],
    ):
        self.folder, self._island, self._specs = folder, island, specs
        self._poll = poll_seconds
        self.reminders = Reminders(logger)
        self.lease = Lease(
            folder, "members", f"{island}@",
            lambda: {"says": self.reminders.said(), **report()}, replaces_own=True,
        )  # fmt: skip
        self._next_look = -float("inf")
        self._passed_over: set[tuple[int, str]] = set()  # damaged versions, with their marks
        self.number = 0  # of contributions
        self._next_try = -float("inf")
        self._looked_for_sent = -float("inf")
        self.journal = Journal(folder, island, self.reminders)

    def trying(self, key: str, work: Callable[[], T], otherwise: T) -> T:
        """Returns what a function returns, or another value if the folder fails while it runs.

        Args:
          key: a name of the kind of work. A failure is logged again from time to time, until work
            with the same key succeeds.
          work: the function, without arguments.
          otherwise: the value to return if the folder fails.
        """
        try:
            found = work()
        except FolderError as error:
            self.reminders.lasts(key, f"Island {self._island}: {error}; it is tried again")
            return otherwise
        self.reminders.over(key)
        return found

    # The island's name.

    def begin(self, seconds: float) -> None:
        """Takes the lease of the island's name, so that no other process is this island.

        If another process has the lease and may be dead, or if the folder fails, the method waits:
        at most `seconds`, or 40 seconds if that is longer. It raises IslandError if a living
        process has the lease, or if the folder still fails at the end of the wait.
        """
        until = time.monotonic() + max(seconds, 2.0 * leases.LIFE_SECONDS)
        while holder := self.trying("begin", self.lease.take, "?"):
            is_late, fails = time.monotonic() > until, holder == "?"
            if fails and is_late:
                raise IslandError(" ".join(self.reminders.said()))
            if not fails and (is_late or self.lease.has_changed()):
                raise IslandError(
                    f"The island {self._island!r} of {self.folder.url} is running already: "
                    f"{holder} uses its name. Each island needs a name of its own "
                    "(ElasticIslands.name, by default the last part of model_dir)."
                )
            if not fails:
                self.reminders.lasts("name", f"waiting whether {holder} still has the name of the "
                                      f"island {self._island}")  # fmt: skip
            time.sleep(min(self._poll, 0.2))
        self.reminders.over("name")
        assert self.lease.term is not None
        self.journal.life = self.lease.term

    def check_name(self) -> None:
        """Raises IslandError if another process has taken the island's name."""
        if not self.trying("name", self.lease.is_held, True):
            raise IslandError(
                f"Another process has taken the name of the island {self._island!r} of "
                f"{self.folder.url}, since this process wrote no heartbeats: this process ends."
            )

    # Versions.

    def newest(self, version: int | None) -> int | None:
        """Returns the number of the newest version in the folder, or `version` if none is newer.

        `version` is the number of a version, or None for no version. A version that was found
        damaged is ignored until its object in the folder changes. The method raises FolderError if
        the folder fails.
        """
        marks = self.folder.marks("versions")
        for number in sorted(_numbers(marks), reverse=True):
            if version is not None and number <= version:
                break
            if (number, _mark(marks, number)) not in self._passed_over:
                return number
        return version

    def look(self, version: int, at_once: bool = False) -> tuple[int, bool]:
        """Returns the newest version's number, and whether the merger is about to decide the next.

        The method looks into the folder at most every `poll_seconds`. For calls between two looks,
        and if the folder fails, the result is `version` and False.

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
        found = self.trying("versions", work, (version, False))
        # A folder that is slow or fails is asked less often, because training waits for it.
        self._next_look = now + max(self._poll, 20.0 * (time.monotonic() - began - 0.05))
        return found

    def load(
        self, newest: int, fragments: int, since: int
    ) -> tuple[dict[str, np.ndarray], Decision] | None:
        """Reads the variables that versions from `since` to `newest` changed.

        Args:
          newest: the number of the version to read.
          fragments: the number of sets of variables that versions change in turn.
          since: the first version whose changes are read.

        Returns:
          A dictionary from the names of these variables to their values as of `newest`, and the
          decision that made `newest`. None if the folder fails, or if a version is damaged; such a
          version is ignored from then on.

        Raises:
          OtherTensorsError: the versions are of another model's variables.
        """
        try:
            return self.trying(
                "version",
                lambda: read_version(self.folder, newest, fragments, self._specs, since),
                None,
            )
        except OtherTensorsError:
            raise
        except DamagedObjectError as error:
            logger.warning("%s; training goes on without it", error)
            nothing = dict[str, str]()
            marks = self.trying("versions", lambda: self.folder.marks("versions"), nothing)
            self._passed_over.add((newest, _mark(marks, newest)))
            return None

    def settings(self) -> MergeSettings:
        """Returns the folder's settings of versions, or the defaults if none can be read."""
        found = None
        with contextlib.suppress(DamagedObjectError):
            found = self.trying("settings", lambda: MergeSettings.of(self.folder), None)
        return found or MergeSettings()

    # Offers and contributions.

    def offer(self, facts: ContributionFacts, tensors: Mapping[str, np.ndarray]) -> None:
        """Offers this island's values for version 0; a later call replaces a lost or damaged offer.

        The method does nothing if this island's last offer is less than two seconds old.

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
            self.trying("offer", work, None)

    def contribute(
        self, facts: ContributionFacts, tensors: Mapping[str, np.ndarray], event: Mapping[str, Any]
    ) -> tuple[str, bool]:
        """Writes a contribution into the folder, after an event in the island's journal.

        The journal's event is written before the contribution. So the journal has an event for each
        contribution that is ever merged.

        Args:
          facts: the facts of the change, such as its version and tokens.
          tensors: the tensors in which the change is sent, by name.
          event: the fields of the journal's event.

        Returns:
          The name of the contribution's object, and whether it is surely there. After a failed
          write the object may exist all the same.
        """
        assert facts.version is not None
        self.number += 1
        name = contribution_object(facts.version, self._island, self.journal.life, self.number)
        _, data = tensor_object(facts, tensors)

        def work() -> bool:
            self.journal.write("contributed", must=True, object=name, **event)
            return self.folder.create(name, data)

        began = self._looked_for_sent = time.monotonic()
        is_there = self.trying("contribution", work, False)
        if not is_there:  # training waits for a folder that fails, so it is not asked at each step
            self._next_try = began + max(self._poll, 20.0 * (time.monotonic() - began))
        return name, is_there

    def may_try(self) -> bool:
        """Returns whether the island may contribute now; after a failure it has to wait a while."""
        return time.monotonic() >= self._next_try

    def fate(self, names: list[str], version: int, decision: Decision) -> str | None:
        """Returns which of this island's contributions to a version was merged.

        Args:
          names: the names of these contributions.
          version: the version from which their changes began.
          decision: the decision on a later version.

        Returns:
          The name of the contribution that was merged; "" if none was and none can be any more;
          None if one may still be merged.
        """
        last = decision.totals.get(self._island, IslandTotal()).last
        if last in names:
            return last
        return "" if decision.oldest > version else None

    def is_lost(self, name: str, version: int, at_once: bool = False) -> str:
        """Returns in words why a contribution can no longer be merged, or "" if it still can.

        The method looks into the folder at most every `poll_seconds`; for calls between two looks
        the result is "". The result is also "" if the folder has a version newer than `version`:
        the decision on the newer version says whether the contribution was merged.

        Args:
          name: the contribution's name.
          version: the version that it contributes to.
          at_once: whether to look now in any case.
        """
        now = time.monotonic()
        if now < self._looked_for_sent + max(self._poll, 0.0) and not at_once:
            return ""
        self._looked_for_sent = now
        place, last = name.rsplit("/", 1)
        names = self.trying("contribution", lambda: self.folder.names(place), None)
        if names is None or self.trying("versions", lambda: self.newest(version), None) != version:
            return ""  # a newer version will say whether it was merged
        if last.removesuffix(SUFFIX) + REFUSED in names:
            why = self.trying("refused", lambda: self._reason(name), "")
            return f"the merger refuses it: {why}"
        return "" if last in names else "it is gone"

    def _reason(self, name: str) -> str:
        with contextlib.suppress(DamagedObjectError):
            return self.folder.read_json(name.removesuffix(SUFFIX) + REFUSED, str) or ""
        return ""

    def outstanding(
        self, decision: Decision, specs: Mapping[str, TensorSpec]
    ) -> tuple[str, ContributionFacts, dict[str, np.ndarray]] | None:
        """Finds a contribution of an earlier run of this island's process that is not merged yet.

        Args:
          decision: the decision on the newest version. A later version can still merge the
            contribution.
          specs: a dictionary from the names of the variables that the next version changes to their
            shapes and dtypes.

        Returns:
          The contribution's name, its facts, and its change by name of the variable; None if there
          is none, or if the folder fails.
        """
        last = life_and_number(decision.totals.get(self._island, IslandTotal()).last)

        def work() -> tuple[str, ContributionFacts, dict[str, np.ndarray]] | None:
            for version in range(decision.version, decision.oldest - 1, -1):
                names = contribution_names(self.folder, version)
                name = names.get((self._island, version), "")
                if life_and_number(name) > last:
                    return self.contribution(name, specs)
            return None

        with contextlib.suppress(DamagedObjectError):
            return self.trying("contribution", work, None)
        return None

    def contribution(
        self, name: str, specs: Mapping[str, TensorSpec]
    ) -> tuple[str, ContributionFacts, dict[str, np.ndarray]] | None:
        """Reads a contribution; returns None if it is gone.

        Args:
          name: the name of the contribution's object.
          specs: a dictionary from the names of its variables to their shapes and dtypes.

        Returns:
          The name, the facts, and the change in float32 by name of the variable.

        Raises:
          DamagedObjectError: the object is damaged, or is for other variables.
        """
        stored = self.folder.load(name, kind=ContributionFacts, most=most_bytes(specs))
        return stored and (name, stored.facts, decoded(stored, specs))

    def waits(self, key: str, what: str, after: float = 0.0) -> None:
        """Logs what the island waits for, if it has waited long enough.

        Args:
          key: a name of the kind of wait; calls with the same key count as one wait.
          what: what the island waits for, in words.
          after: the seconds for which it must have waited before the first message.
        """
        self.reminders.lasts(key, f"Island {self._island}: {what}", after)


def _numbers(marks: Mapping[str, str]) -> list[int]:
    return [
        int(name[: -len(SUFFIX)])
        for name, mark in marks.items()
        if mark and name.endswith(SUFFIX) and name[: -len(SUFFIX)].isdigit() and len(name) == 20
    ]


def _mark(marks: Mapping[str, str], number: int) -> str:
    return marks.get(f"{number:08d}{SUFFIX}", "")
