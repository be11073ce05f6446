"""Versions of the outer values and what they are made of: objects and their names.

What a version is depends on its decision and the objects that this names alone, not on when
anything arrived. The arithmetic is that of `changes`.
"""

from __future__ import annotations

from typing import Any, Iterator, Mapping, NamedTuple, Sequence, get_args

import numpy as np

from mtf_gradsync.extension import is_number
from mtf_gradsync.tools.islands.changes import (
    MEAN,
    Change,
    Merge,
    OuterStep,
    Weight,
    decoded,
    merged,
    wide,
)
from mtf_gradsync.tools.islands.folder import SUFFIX, DamagedObjectError, Folder, Spec, Stored

SETTINGS = "settings.json"


class MergeSettings(NamedTuple):
    """How versions are made. The first merger writes these into the folder; they do not change.

    Attributes:
      outer_learning_rate: of SGD on the outer values.
      outer_momentum: of SGD, 0 for none.
      nesterov: whether the momentum is Nesterov's.
      fragments: into how many sets the variables are cut, which take turns.
      weight: what a contribution weighs: its "tokens", or its tokens times its tokens per step
        ("tokens_per_step").
      merge: "mean" averages changes; "radial" averages directions and lengths of each variable's
        change apart.
      max_norm: how many times as long as usual a change may be; longer ones are scaled down. Usual
        is the median of the others' and of the island's own before. 0 is no limit.
    """

    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.5
    nesterov: bool = True
    fragments: int = 1
    weight: Weight = "tokens"
    merge: Merge = "mean"
    max_norm: float = 10.0

    def check(self) -> None:
        """Raises ValueError for a setting that makes no sense."""
        if not is_number(self.outer_learning_rate) or not 0.0 < self.outer_learning_rate < 10.0:
            raise ValueError(
                f"outer_learning_rate must be positive, got {self.outer_learning_rate!r}."
            )
        if not is_number(self.outer_momentum) or not 0.0 <= self.outer_momentum < 1.0:
            raise ValueError(f"outer_momentum must be in [0, 1), got {self.outer_momentum!r}.")
        if not isinstance(self.fragments, int) or self.fragments < 1:
            raise ValueError(
                f"fragments must be a whole number of at least 1, got {self.fragments!r}."
            )
        for name, kind in (("weight", Weight), ("merge", Merge)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(
                    f"{name} must be one of {', '.join(get_args(kind))}, got "
                    f"{getattr(self, name)!r}."
                )
        if not is_number(self.max_norm) or not (self.max_norm == 0.0 or self.max_norm > 1.0):
            raise ValueError(f"max_norm must be above 1, or 0 for none, got {self.max_norm!r}.")

    @property
    def outer_step(self) -> OuterStep:
        """How changes become a version."""
        return OuterStep(self.outer_learning_rate, self.outer_momentum, self.nesterov, self.merge)

    @classmethod
    def of(cls, folder: Folder) -> MergeSettings | None:
        """Returns the settings of a folder; None before a merger has begun there."""
        found = folder.read_json(SETTINGS)
        return None if found is None else cls(**found)


def version_object(version: int) -> str:
    """The name of the object with the values of a version."""
    return f"versions/{version:08d}{SUFFIX}"


def momentum_object(version: int) -> str:
    """The name of the object with the momentum after a version."""
    return f"momenta/{version:08d}{SUFFIX}"


def decision_object(version: int) -> str:
    """The name of the object that says what a version is made of."""
    return f"decisions/{version:08d}.json"


def contribution_object(version: int, island: str) -> str:
    """The name of an island's contribution to what follows a version."""
    return f"contributions/{version:08d}/{island}{SUFFIX}"


def offer_object(island: str) -> str:
    """The name of the initial values that an island offers."""
    return f"offers/{island}{SUFFIX}"


def member_object(island: str) -> str:
    """The name of the object that says that an island is there."""
    return f"members/{island}.json"


def counts_behind(
    before: Mapping[str, int], contributions: Sequence[Mapping[str, Any]]
) -> dict[str, int]:
    """Returns the counts that schedules go by, as of a version: those of who has come furthest."""
    found = dict(before)
    for one in contributions:
        for name, count in one["counts"].items():
            found[name] = max(found.get(name, 0), count)
    return found


def fragment_of(version: int, names: Sequence[str], fragments: int) -> list[str]:
    """The names of the variables that a version changes; all of them in version 0."""
    if version == 0:
        return sorted(names)
    turn = (version - 1) % fragments
    # What is averaged is dealt out by itself: each fragment has its share of both.
    means = sorted(name for name in names if name.startswith(MEAN))
    return sorted(set(names) - set(means))[turn::fragments] + means[turn::fragments]


def newest_version(folder: Folder) -> int | None:
    """Returns the number of the newest version whose values are there, or None."""
    names = [name for name in folder.names("versions") if name.endswith(SUFFIX)]
    return int(names[-1][: -len(SUFFIX)]) if names else None


def versions_that_make(version: int, fragments: int) -> list[int]:
    """The versions whose objects hold the newest values of all variables, in ascending order."""
    first = max(version - fragments + 1, 0)
    return (
        sorted({0, *range(first, version + 1)}) if first <= 1 else list(range(first, version + 1))
    )


def read_values(
    folder: Folder,
    version: int,
    fragments: int,
    specs: Mapping[str, Spec] | None = None,
    since: int = 0,
) -> dict[str, np.ndarray]:
    """Returns the values as of a version of the variables that versions have changed `since` one.

    Raises DamagedObjectError for an object that is damaged, foreign or gone.
    """
    values: dict[str, np.ndarray] = {}
    for number in versions_that_make(version, fragments):
        if number < since:
            continue
        wanted = specs
        if specs is not None:
            wanted = {name: specs[name] for name in fragment_of(number, list(specs), fragments)}
        found = folder.load(version_object(number), wanted)
        if found is None:
            raise DamagedObjectError(f"{version_object(number)} in {folder.url} is gone.")
        values.update(found.tensors)
    return values


def make_version(
    folder: Folder, decision: Mapping[str, Any], settings: MergeSettings
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Makes values and momenta of the version that a decision is about, from what it names.

    Raises DamagedObjectError for an object that is gone or is not what the decision names.
    """
    version = decision["version"]

    def load(name: str, expected: str) -> Stored:
        found = folder.load(name, expected=expected)
        if found is None:
            raise DamagedObjectError(
                f"{name} in {folder.url}, which {decision_object(version)} names, is gone."
            )
        return found

    if version == 0:
        (offer,) = decision["contributions"]
        tensors = load(offer["object"], offer["checksum"]).tensors
        return {name: wide(value) for name, value in tensors.items()}, {}
    before = read_values(folder, version - 1, settings.fragments)
    names = fragment_of(version, list(before), settings.fragments)
    momenta: dict[str, np.ndarray] = {}
    if settings.outer_momentum and version > settings.fragments:
        last = momentum_object(version - settings.fragments)
        found = folder.load(last)
        if found is None:
            raise DamagedObjectError(f"{last} in {folder.url} is gone.")
        momenta = found.tensors
    specs = {name: Spec.of(before[name]) for name in names}

    def changes() -> Iterator[Change]:
        for one in decision["contributions"]:
            stored = load(one["object"], one["checksum"])
            yield Change(one["weight"], one.get("scale", 1.0), decoded(stored, specs))

    values = {name: before[name] for name in names}
    return merged(values, momenta, changes(), settings.outer_step)
