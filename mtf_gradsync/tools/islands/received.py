"""The contributions and offers that a merger has read; each is checked once and then cached."""

from __future__ import annotations

import collections
import logging
from typing import Callable, Sequence

import numpy as np

from mtf_gradsync.extension import is_number, some_of
from mtf_gradsync.tools.islands.changes import Length, MergeSettings, decoded, weight_of, wide
from mtf_gradsync.tools.islands.folder import Folder, FolderError
from mtf_gradsync.tools.islands.leases import Reminders
from mtf_gradsync.tools.islands.objects import (
    REFUSED,
    Contribution,
    ContributionFacts,
    offer_object,
    parsed_contribution,
)
from mtf_gradsync.tools.islands.tensor_files import (
    SUFFIX,
    DamagedObjectError,
    Specs,
    Stored,
    TensorSpec,
    checksum,
)
from mtf_gradsync.tools.islands.versions import MergedState, fragment_of, most_bytes

logger = logging.getLogger(__name__)


class ReceivedContributions:
    """A cache of the contributions that a merger has read, and of those that it has refused.

    Attributes:
      arrived: a dictionary from pairs (island's name, version) to the seconds, by this process's
        clock, at which the contribution was first read.
      refused: a dictionary from the names of contributions that were refused since the last
        decision to the reasons.
    """

    def __init__(self, folder: Folder, clock: Callable[[], float], reminders: Reminders):
        self._folder, self._clock, self._reminders = folder, clock, reminders
        # (name, mark of the object) -> its record, or None if it is refused.
        self._records: dict[tuple[str, str], Contribution | None] = {}
        self._warned_of: set[tuple[str, ...]] = set()  # islands of which a warning was logged
        self.arrived: dict[tuple[str, int], float] = {}
        self.refused: dict[str, str] = {}

    def clear(self) -> None:
        """Removes all contributions from the cache, so that they are read and checked again."""
        self._records = {}

    def forget_before(self, version: int) -> None:
        """Removes from the cache contributions that begin from versions older than `version`."""
        records = self._records.items()
        self._records = {key: x for key, x in records if not x or x.pair[1] >= version}
        self.arrived = {key: x for key, x in self.arrived.items() if key[1] >= version}

    def checked_record(
        self, before: MergedState | None, settings: MergeSettings, name: str
    ) -> Contribution | None:
        """Reads and checks a contribution or an offer; returns its record for a decision.

        An offer has an island's initial values, from which version 0 can be made. If a contribution
        is wrong, it is refused: an object (a file of the folder) with the reason is written beside
        it. The result is None if the contribution or offer is gone, is refused, or cannot be read
        now.

        Args:
          before: the values and momenta as of the newest version, which say what variables a
            contribution must have; None if there is no version yet.
          settings: the settings of versions, which say how contributions are weighted.
          name: the name of the object with the contribution or the offer.
        """
        key = (name, self._mark_of(name))
        if key not in self._records:
            try:
                specs = _specs_of(name, before, settings)
                most = most_bytes(specs) if specs else None
                stored = self._folder.load(name, kind=ContributionFacts, most=most)
                if stored is None:
                    return None
                found = _check_and_describe(name, stored, specs, settings)
            except DamagedObjectError as error:
                self._refuse(name, str(error))
                found = None
            except FolderError as error:
                self._reminders.remind(name, f"Merger: {error}; it is tried again")
                return None
            self._reminders.end(name)
            self._records[key] = found
            if found and found.version is not None:
                self.arrived.setdefault(found.pair, self._clock())
        return self._records[key]

    def _mark_of(self, name: str) -> str:
        # The name of a contribution is used only once. An offer may be replaced under its name.
        place, last = name.rsplit("/", 1)
        return "" if parsed_contribution(name) else self._folder.marks(place).get(last, "")

    def _refuse(self, name: str, reason: str) -> None:
        """Refuses a contribution: writes the reason into an object beside it, and logs the reason.

        The island that made the contribution reads the object with the reason, and contributes the
        change again. `name` is the name of the object with the contribution.
        """
        logger.warning("%s", reason)
        self.refused[name] = reason
        self._folder.create_json(name.removesuffix(SUFFIX) + REFUSED, reason)

    def warn_of_equal_changes(self, contributions: Sequence[Contribution]) -> None:
        """Warns if several islands have contributed identical changes.

        Islands with identical changes seem to learn from the same data. `contributions` are the
        contributions that are merged into one version. For the same islands the warning is logged
        only once.
        """
        lengths = collections.defaultdict(list)
        for one in contributions:
            lengths[one.norm].append(one)
        for norm, some in lengths.items():
            islands = tuple(one.island for one in some)
            if not norm or len(some) < 2 or islands in self._warned_of:
                continue
            try:
                found = [self._folder.load(one.object, kind=ContributionFacts) for one in some]
            except (DamagedObjectError, FolderError):
                continue  # merging reports the error
            digests = [checksum({}, stored.tensors) if stored else None for stored in found]
            if len(set(digests)) == 1 and digests[0]:
                self._warned_of.add(islands)
                logger.warning(
                    "The changes of %s have equal bits: do these islands learn from the same data? "
                    "Give each a part of its own (claim_part, ElasticIslands.parts)",
                    some_of(sorted(islands), 5),
                )


def _specs_of(
    name: str, before: MergedState | None, settings: MergeSettings
) -> dict[str, TensorSpec] | None:
    """Returns the shapes and dtypes of the variables that a contribution or offer must have.

    Args:
      name: the name of the contribution's or offer's object.
      before: the values and momenta as of the newest version; None if there is no version yet.
      settings: the settings of versions, which say which variables a version changes.

    Returns:
      A dictionary from the names of the variables to their shapes and dtypes; None for an offer
      (initial values for version 0), which may have any variables.
    """
    parsed = parsed_contribution(name)
    if parsed is None or before is None:
        return None
    values = before.values
    names = fragment_of(parsed[0] + 1, list(values), settings.fragments)
    return {key: TensorSpec.of(values[key]) for key in names}


def _check_and_describe(
    name: str, stored: Stored, specs: Specs | None, settings: MergeSettings
) -> Contribution:
    """Checks a contribution or an offer that was read; returns its record for a decision.

    An offer has an island's initial values, from which version 0 can be made.

    Args:
      name: the name of the object (a file of the folder) with the contribution or the offer.
      stored: the content of this object.
      specs: a dictionary from the names of variables to the shapes and dtypes that they must have.
        It is None for an offer, which may have any variables.
      settings: the settings of versions, which say how contributions are weighted.

    Raises:
      DamagedObjectError: the contribution is another island's or version's than its name says, has
        no tokens, is for other variables, or has values that are not finite.
    """
    facts: ContributionFacts = stored.facts
    parsed = parsed_contribution(name)
    is_own = offer_object(facts.island) == name and facts.version is None
    if not is_own and (parsed is None or parsed[:2] != (facts.version, facts.island)):
        raise DamagedObjectError(
            f"{name} holds another object: of the island {facts.island!r}, version "
            f"{facts.version!r}"
        )
    if not is_number(facts.tokens) or not 0.0 < facts.tokens < float("inf"):
        raise DamagedObjectError(f"{name} is of {facts.tokens!r} tokens")
    for key, value in stored.tensors.items():
        if value.dtype.kind not in "iu" and not np.isfinite(wide(value)).all():
            raise DamagedObjectError(f"{name} has a NaN or an infinity in {key!r}")
    norm = Length.of(decoded(stored, specs), facts.steps).norm if specs is not None else 0.0
    return Contribution.of(
        facts,
        object=name,
        checksum=stored.checksum,
        weight=weight_of(facts.tokens, facts.steps, settings.weight),
        norm=norm,
    )
