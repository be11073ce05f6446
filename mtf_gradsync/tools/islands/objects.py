"""The names of the objects in a folder of islands, and the schema of each.

settings.json                           how versions are made
versions/00000007.safetensors           values of version 7, and the decision that made it
versions/00000008.soon                  version 8 is about to be decided
momenta/00000007.safetensors            the outer momentum after version 7
decisions/00000007.json                 what version 7 is made of
contributions/00000007/NAME@3-1.safetensors   island NAME's change since version 7: the first
                                        contribution of the third run (life) of its process
contributions/00000007/NAME@3-1.refused why that change is not merged
offers/NAME.safetensors                 values that an island offers for version 0
merger/00000002.json, .beat, .left      which process merges; its heartbeats; that it has left
members/NAME@00000003.json, ...         the same for the process of an island
journal/NAME/00000003-000000.jsonl      what happened to an island in the third run of its process
damaged/                                damaged objects, moved away so that they can be made again
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from mtf_gradsync.tools.islands.folder import Folder
from mtf_gradsync.tools.islands.tensor_files import SUFFIX, DamagedObjectError

SETTINGS = "settings.json"
REFUSED = ".refused"
ISLAND_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NUMBERED = re.compile(r"(\d{8})(\..*)?")
_CONTRIBUTION = re.compile(
    rf"contributions/(\d{{8}})/({ISLAND_NAME.pattern})@(\d+)-(\d+){re.escape(SUFFIX)}"
)


class ContributionFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that an island sends with a contribution, or with an offer.

    An offer has an island's initial values. The merger makes version 0 from the offer of one
    island.

    Attributes:
      island: the island's name.
      version: the number of the version from which the change begins. It is None in an offer, which
        has values and no change.
      tokens: the number of tokens from which the change was learned.
      steps: the number of updates in the change.
      form: the format of the numbers in which the change is sent: "float32", "bfloat16", "int8" or
        "int4".
      counts: a dictionary from the names of the counters that schedules follow (global step,
        updates) to their values on the island.
    """

    island: str
    version: int | None = None
    tokens: float = 1.0
    steps: int = 0
    form: str = "float32"
    counts: dict[str, int] = {}


class Contribution(ContributionFacts, frozen=True, kw_only=True):
    """The merger's record, in a decision, of a contribution or of an offer (initial values).

    Attributes:
      object: the name of the object (a file of the folder) with the contribution or the offer.
      checksum: the checksum of that object.
      weight: the weight of the change in the mean.
      norm: the length of the change over all trained variables.
      scale: a factor for the change: 1, or less if the change is longer than
        `MergeSettings.max_norm` allows.
    """

    object: str
    checksum: str
    weight: float
    norm: float = 0.0
    scale: float = 1.0

    @property
    def pair(self) -> tuple[str, int]:
        """The island's name, and the number of the version from which its change begins.

        For an offer (initial values for version 0) this number is -1.
        """
        return self.island, -1 if self.version is None else self.version

    @classmethod
    def of(cls, facts: ContributionFacts, **more: Any) -> Contribution:
        """Makes the record of a contribution from the facts that the island sent with it.

        `facts` were sent by the island, and `more` are the other fields of the record, such as
        `object` and `checksum`.
        """
        return cls(**msgspec.structs.asdict(facts), **more)

    def scaled(self, scale: float) -> Contribution:
        """Returns a copy of this contribution with another `scale`, the factor for its change."""
        return msgspec.structs.replace(self, scale=scale)

    def __post_init__(self) -> None:
        """Checks that `object` is the name of a contribution, or of the offer of `island`.

        The names are those of files in the folder of islands. An offer has an island's initial
        values, from which version 0 can be made. For any other name the method raises ValueError.
        """
        if parsed_contribution(self.object) is None and self.object != offer_object(self.island):
            raise ValueError(f"{self.object!r} is no contribution")


class IslandTotal(msgspec.Struct, frozen=True):
    """The counts of what became of one island's contributions, up to a version.

    Attributes:
      merged: the number of merged contributions.
      tokens: the number of tokens in merged contributions.
      late: the number of contributions that came too late.
      refused: the number of contributions that were refused.
      last: the name of the contribution that was merged last; "" for none.
    """

    merged: int = 0
    tokens: float = 0.0
    late: int = 0
    refused: int = 0
    last: str = ""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The merger's decision on what a version is made of. It is written once, before the version.

    Attributes:
      version: the number of the version.
      contributions: the contributions that are merged, in this order.
      dropped: the contributions that came too late to be merged.
      refused: a dictionary from the names of refused contributions to the reasons.
      counts: the counters that schedules follow (global step, updates), as of the version.
      settings: the fields of `MergeSettings` with which the version is made.
      oldest: the number of a version. Contributions that begin from older versions are never merged
        from now on.
      keeps_all: whether no objects are removed, so that all versions can be replayed.
      totals: a dictionary from the names of islands to the `IslandTotal` of each: what became of
        its contributions, up to this version.
      time: when the decision was made, by the merger's clock, for people who read it.
      waited: how many seconds the merger waited after the first contribution.
      arrivals: a dictionary from the names of islands to numbers of seconds: from the arrival of
        the first contribution to the arrival of this island's contribution.
    """

    version: int
    contributions: list[Contribution]
    dropped: list[Contribution] = []
    refused: dict[str, str] = {}
    counts: dict[str, int] = {}
    settings: dict[str, Any] = {}
    oldest: int = 0
    keeps_all: bool = False
    totals: dict[str, IslandTotal] = {}
    time: float = 0.0
    waited: float = 0.0
    arrivals: dict[str, float] = {}

    def __post_init__(self) -> None:
        """Raises ValueError if the contributions have no weight, so that nothing is merged."""
        if self.version < 0 or not sum(one.weight for one in self.contributions) > 0.0:
            raise ValueError(
                f"Version {self.version} cannot be made: its {len(self.contributions)} "
                "contributions have no weight."
            )

    def with_totals_after(self, before: Decision | None) -> Decision:
        """Returns a copy of this decision in which `totals` is filled in.

        The new totals are those of `before`, plus the contributions that this decision merges,
        drops or refuses. `before` is the decision on the version before; None if there is none.
        """
        found = dict(before.totals) if before else {}

        def add(island: str, last: str = "", **more: Any) -> None:
            old = found.get(island, IslandTotal())
            new = {key: getattr(old, key) + value for key, value in more.items()}
            found[island] = msgspec.structs.replace(old, **new, last=last or old.last)

        for one in self.contributions if self.version else ():
            add(one.island, one.object, merged=1, tokens=one.tokens)
        for one in self.dropped:
            add(one.island, late=1)
        for name in self.refused:
            add(island_of(name), refused=1)
        return msgspec.structs.replace(self, totals=found)


class MadeBy(msgspec.Struct, frozen=True):
    """The decision on a version, as an object with the version's values or momenta contains it."""

    decision: Decision


def version_object(version: int) -> str:
    """Returns the name of the object with the values of a version."""
    return f"versions/{version:08d}{SUFFIX}"


def announcement_object(version: int) -> str:
    """Returns the name of the object by which the merger announces that it will soon decide.

    `version` is the number of the version on which the merger will decide.
    """
    return f"versions/{version:08d}.soon"


def momentum_object(version: int) -> str:
    """Returns the name of the object with the momenta of the outer step that made a version."""
    return f"momenta/{version:08d}{SUFFIX}"


def decision_object(version: int) -> str:
    """Returns the name of the object with the merger's decision on a version."""
    return f"decisions/{version:08d}.json"


def contribution_object(version: int, island: str, life: int, number: int) -> str:
    """Returns the name of the object with an island's contribution.

    Args:
      version: the version from which the island's change begins.
      island: the island's name.
      life: the number of the run of the island's process.
      number: the number of the contribution in that run.
    """
    return f"contributions/{version:08d}/{island}@{life}-{number}{SUFFIX}"


def parsed_contribution(name: str) -> tuple[int, str, int, int] | None:
    """Parses the name of a contribution's object; returns None for other names.

    The result has what `contribution_object` takes as arguments: the version, the island's name,
    the number of the run of the island's process, and the number of the contribution in that run.
    """
    found = _CONTRIBUTION.fullmatch(name)
    return found and (int(found[1]), found[2], int(found[3]), int(found[4]))


def contribution_order(name: str) -> tuple[int, int]:
    """Returns a key that sorts the contributions of one island by time.

    The key is a pair: the number of the run of the island's process, and the number of the
    contribution in that run. It is (0, 0) if `name` is not the name of a contribution's object.
    """
    parsed = parsed_contribution(name)
    return parsed[2:] if parsed else (0, 0)


def last_contributions(folder: Folder, version: int) -> dict[tuple[str, int], str]:
    """Returns the name of each island's last contribution that was made from a version.

    Contributions that the merger has refused do not count.

    Args:
      folder: the folder of the islands.
      version: the number of the version from which the islands' changes begin.

    Returns:
      A dictionary from pairs (island's name, `version`), as in `Contribution.pair`, to the names of
      the contributions' objects. It has no key for an island that has not contributed.
    """
    place = f"contributions/{version:08d}"
    names, found = set(folder.names(place)), dict[tuple[str, int], tuple[int, int, str]]()
    for name in names:
        parsed = parsed_contribution(f"{place}/{name}")
        if parsed and name.removesuffix(SUFFIX) + REFUSED not in names:
            _, island, life, number = parsed
            one = (life, number, f"{place}/{name}")
            found[island, version] = max(found.get((island, version), one), one)
    return {pair: one[2] for pair, one in sorted(found.items())}


def island_of(name: str) -> str:
    """Returns the name of the island that wrote a contribution, or an offer of initial values.

    `name` is the name of the contribution's or offer's object, with or without its subfolder.
    """
    return name.rsplit("/", 1)[-1].removesuffix(SUFFIX).rsplit("@", 1)[0]


def offer_object(island: str) -> str:
    """Returns the name of the object with an island's offer: its initial values for version 0."""
    return f"offers/{island}{SUFFIX}"


def numbers_in(folder: Folder, subfolder: str, ending: str) -> dict[int, str]:
    """Finds the objects in a subfolder whose names are a number and an ending.

    The result is a dictionary from the numbers, in ascending order, to the marks of the objects
    (see `Folder.marks`). `subfolder` is the name of the subfolder, such as "versions". `ending` is
    what follows the number in the objects' names, such as ".soon"; "" for names that are only a
    number.
    """
    marks = folder.marks(subfolder)
    found = ((_NUMBERED.fullmatch(name), marks[name]) for name in sorted(marks))
    return {int(one[1]): mark for one, mark in found if one and (one[2] or "") == ending}


def read_decision(folder: Folder, version: int) -> Decision | None:
    """Returns the decision on a version; None if there is none.

    The function raises DamagedObjectError if the decision's object (a file of the folder) is
    damaged, or holds the decision on another version.
    """
    name = decision_object(version)
    found = folder.read_json(name, Decision)
    if found is not None and found.version != version:
        raise DamagedObjectError(
            f"{name} in {folder.url} holds the decision on another version: {found.version}."
        )
    return found
