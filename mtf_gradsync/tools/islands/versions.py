"""Versions of the outer values (the values merged from all islands): making and reading them.

A version is computed from its decision (the merger's record of which contributions make it) and
from the contributions that the decision names. The version does not depend on when contributions
arrived, so that it can be made again with the same bits. The arithmetic is in module `changes`.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Callable, Iterator, Mapping, NamedTuple, Sequence

import numpy as np

from mtf_gradsync.tools.islands.changes import (
    MEAN,
    Change,
    MergeSettings,
    decoded,
    make_outer_step,
    wide,
)
from mtf_gradsync.tools.islands.folder import JSON_BYTES, Folder
from mtf_gradsync.tools.islands.objects import (
    Contribution,
    ContributionFacts,
    Decision,
    MadeBy,
    decision_object,
    momentum_object,
    numbers_in,
    read_decision,
    version_object,
)
from mtf_gradsync.tools.islands.tensor_files import (
    SUFFIX,
    DamagedObjectError,
    Specs,
    Stored,
    TensorSpec,
    checksum,
)

logger = logging.getLogger(__name__)


def counters_of_version(
    before: Mapping[str, int], contributions: Sequence[Contribution]
) -> dict[str, int]:
    """Returns the counters of a version: for each, the largest value in any contribution.

    The counters are those that schedules follow: the global step, and counts of updates. A counter
    never becomes smaller than in the version before.

    Args:
      before: a dictionary from the names of counters to their values in the version before.
      contributions: the contributions that are merged into the version.

    Returns:
      A dictionary from the names of counters to their values in the version.
    """
    found = dict(before)
    for one in contributions:
        for name, count in one.counts.items():
            found[name] = max(found.get(name, 0), count)
    return found


def fragment_of(version: int, names: Sequence[str], fragments: int) -> list[str]:
    """Returns the names of the variables that a version changes, out of the names of all variables.

    Version 0 changes all variables. For later versions, the variables are divided into `fragments`
    sets. Each later version changes one set; the sets take turns.

    Examples:
      >>> [fragment_of(version, ["a", "b", "c"], fragments=2) for version in (0, 1, 2)]
      [['a', 'b', 'c'], ['a', 'c'], ['b']]
    """
    if version == 0:
        return sorted(names)
    turn = (version - 1) % fragments
    # Averaged and trained variables are dealt out separately, so each fragment has some of both.
    means = sorted(name for name in names if name.startswith(MEAN))
    return sorted(set(names) - set(means))[turn::fragments] + means[turn::fragments]


def newest_version(folder: Folder) -> int | None:
    """Returns the number of the newest version of the values in a folder; None if there is none."""
    return max(numbers_in(folder, "versions", SUFFIX), default=None)


def versions_that_make(version: int, fragments: int) -> list[int]:
    """Returns the numbers of the versions whose objects together hold all values as of `version`.

    Each version changes one of `fragments` sets of variables, and the sets take turns. So as many
    versions as there are sets together hold all values; at the beginning fewer versions do.

    Examples:
      >>> versions_that_make(5, fragments=2)
      [4, 5]
    """
    return list(range(max(version - fragments + 1, 0), version + 1))


class ReadVersion(NamedTuple):
    """Variables that were read from a folder's versions.

    Attributes:
      values: a dictionary from the names of the variables to their values as of the newest of these
        versions.
      decision: the decision that made the newest of these versions.
    """

    values: dict[str, np.ndarray]
    decision: Decision


def read_version(
    folder: Folder, version: int, fragments: int, specs: Specs | None = None, since: int = 0
) -> ReadVersion:
    """Reads the variables that versions from `since` to `version` changed, and the decision.

    Args:
      folder: the folder of the islands.
      version: the number of the version.
      fragments: the number of sets of variables that versions change in turn.
      specs: shapes and dtypes that the variables must have, by name; None accepts any.
      since: the number of the first version whose variables are returned; 0 returns all variables.

    Raises:
      DamagedObjectError: an object is damaged, gone, or not written by a merger.
    """
    values: dict[str, np.ndarray] = {}
    decision: Decision | None = None
    for number in versions_that_make(version, fragments):
        if number < since:
            continue
        wanted = specs
        if specs is not None:
            wanted = {name: specs[name] for name in fragment_of(number, list(specs), fragments)}
        name = version_object(number)
        found = folder.load(name, wanted, kind=MadeBy)
        if found is None:
            raise DamagedObjectError(f"{name} in {folder.url} is gone.")
        values.update(found.tensors)
        decision = found.facts.decision
        if decision.version != number:
            raise DamagedObjectError(
                f"{name} in {folder.url} holds another version: {decision.version}."
            )
    assert decision is not None
    return ReadVersion(values, decision)


def read_values(folder: Folder, version: int, fragments: int) -> dict[str, np.ndarray]:
    """Returns a dictionary from the names of all variables to their values as of a version.

    Args:
      folder: the folder of the islands.
      version: the number of the version.
      fragments: the number of sets of variables that versions change in turn.

    Raises:
      DamagedObjectError: an object is damaged, gone, or not written by a merger.
    """
    return read_version(folder, version, fragments).values


class MergedState(NamedTuple):
    """The values of all variables as of a version, and the momenta of the outer step.

    Attributes:
      version: the version's number.
      values: a dictionary from the names of all variables to their values.
      momenta: a dictionary from names to momenta of the outer step, for variables that have one.
    """

    version: int
    values: dict[str, np.ndarray]
    momenta: dict[str, np.ndarray]

    def changed_part(self, settings: MergeSettings) -> MergedState:
        """Returns the values and momenta of only those variables that the version changed.

        The version's objects in the folder hold these values and momenta. `settings` are the
        settings of the folder; their field `fragments` says which variables a version changes.
        """
        names = fragment_of(self.version, list(self.values), settings.fragments)
        momenta = {name: self.momenta[name] for name in names if name in self.momenta}
        return MergedState(self.version, {name: self.values[name] for name in names}, momenta)


def read_state(folder: Folder, version: int, settings: MergeSettings) -> MergedState:
    """Returns the values and momenta as of a version, for making the next one.

    `settings` are the settings with which the folder's versions are made. The function raises
    DamagedObjectError if an object (a file of the folder) with values or momenta is damaged, gone,
    or not written by a merger.
    """
    values = read_values(folder, version, settings.fragments)
    momenta: dict[str, np.ndarray] = {}
    for number in versions_that_make(version, settings.fragments):
        if number and settings.outer_momentum:
            found = folder.load(momentum_object(number), kind=MadeBy)
            if found is None:
                raise DamagedObjectError(f"{momentum_object(number)} in {folder.url} is gone.")
            momenta.update(found.tensors)
    return MergedState(version, values, momenta)


def make_version(folder: Folder, decision: Decision, before: MergedState | None) -> MergedState:
    """Computes a version from the version before it and the contributions in its decision.

    If a variable's new value would not be finite, the variable keeps its old value, and its
    momentum becomes 0. The function writes nothing into the folder.

    Args:
      folder: the folder of the islands, from which the contributions are read.
      decision: the decision on the version.
      before: the values and momenta as of the version before. None for version 0, which has the
        values of the offer that the decision names.

    Returns:
      The values and momenta of all variables as of the version.

    Raises:
      DamagedObjectError: a contribution is gone, or is not the one that the decision names.
    """
    name = decision_object(decision.version)
    settings = MergeSettings.from_dict(decision.settings, f"Those of {name} in {folder.url}")

    def load(one: Contribution, specs: Specs | None) -> Stored:
        most = None if specs is None else most_bytes(specs)
        found = folder.load(one.object, expected=one.checksum, kind=ContributionFacts, most=most)
        if found is None:
            raise DamagedObjectError(
                f"{name} names the contribution {one.object}, which is gone from {folder.url}."
            )
        return found

    if before is None:
        tensors = load(decision.contributions[0], None).tensors
        return MergedState(decision.version, {key: wide(x) for key, x in tensors.items()}, {})
    names = fragment_of(decision.version, list(before.values), settings.fragments)
    specs = {name: TensorSpec.of(before.values[name]) for name in names}

    def changes() -> Iterator[Change]:
        for one in decision.contributions:
            yield Change(one.weight, one.scale, decoded(load(one, specs), specs))

    with np.errstate(over="ignore", invalid="ignore"):  # the warning below reports overflows
        values, momenta = make_outer_step(
            {name: before.values[name] for name in names},
            {name: before.momenta[name] for name in names if name in before.momenta},
            changes(),
            settings,
        )
    for key in names:
        if not (np.isfinite(values[key]).all() and np.isfinite(momenta.get(key, 0.0)).all()):
            logger.warning(
                "%s of version %d would not be finite: it keeps the values of before, without "
                "momentum", key, decision.version,
            )  # fmt: skip
            values[key] = before.values[key]
            momenta.update({key: np.zeros_like(momenta[key])} if key in momenta else {})
    return MergedState(decision.version, {**before.values, **values}, {**before.momenta, **momenta})


def most_bytes(specs: Specs) -> int:
    """Returns the largest allowed size, in bytes, of a contribution.

    `specs` are the shapes and dtypes of the variables in the contribution, by name.
    """
    return sum(2 * spec.nbytes for spec in specs.values()) + JSON_BYTES


def replay(
    folder: Folder, on_version: Callable[[int, bool], None] = lambda version, is_equal: None
) -> list[int]:
    """Makes every version again from its contributions, and compares it with the stored version.

    The function only reads the folder.

    Args:
      folder: the folder of the islands.
      on_version: a function that is called after each version with two arguments: the version's
        number, and whether its bits are equal to the stored ones.

    Returns:
      The numbers of the versions whose stored bits differ.

    Raises:
      DamagedObjectError: there are no versions, or contributions of a version are gone because the
        merger ran without `keep_all`.
    """
    newest, state, wrong = newest_version(folder), None, list[int]()
    if newest is None:
        raise DamagedObjectError(f"{folder.url} has no versions yet: no merger has begun there.")
    for version in range(newest + 1):
        decision = read_decision(folder, version)
        if decision is None:
            raise DamagedObjectError(
                f"{decision_object(version)} in {folder.url} is gone. All versions can be replayed "
                "only if the merger has kept all objects (--keep_all, ElasticIslands.keep_all)."
            )
        state = make_version(folder, decision, state)
        made = state.changed_part(MergeSettings(**decision.settings))
        is_equal = True
        for name, tensors in (
            (version_object(version), made.values),
            (momentum_object(version), made.momenta),
        ):
            if tensors:
                stored = None
                with contextlib.suppress(DamagedObjectError):
                    stored = folder.load(name, kind=MadeBy)
                found = checksum(MadeBy(decision), tensors)
                is_equal &= stored is not None and stored.checksum == found
        if not is_equal:
            wrong.append(version)
        on_version(version, is_equal)
    return wrong


def export_version(
    folder: Folder, directory: str | os.PathLike[str], version: int | None = None
) -> str:
    """Writes a version's values as a checkpoint, which `train`, Estimator and Saver can restore.

    The checkpoint has the variables that islands exchange, and the global step. It has no slots: a
    program that restores it gives the slots their initial values.

    Args:
      folder: the folder of the islands.
      directory: the directory of the new checkpoint.
      version: the version's number; None for the newest.

    Returns:
      The path of the checkpoint.

    Raises:
      DamagedObjectError: the folder has no version, or not the version `version`, or it cannot be
        read.
    """
    # Here, so that a merger does not load TensorFlow.
    from mtf_gradsync.extension import tf
    from mtf_gradsync.runtimes._common import write_text
    from mtf_gradsync.runtimes.checkpoints import write_changed

    number = newest_version(folder) if version is None else version
    settings = MergeSettings.of(folder)
    if number is None or settings is None:
        raise DamagedObjectError(f"{folder.url} has no versions yet: no merger has begun there.")
    values, decision = read_version(folder, number, settings.fragments)
    step = decision.counts.get("step", 0)
    plain = {name.removeprefix(MEAN): value for name, value in values.items()}
    Path(directory).mkdir(parents=True, exist_ok=True)
    path = os.path.join(directory, f"model.ckpt-{step}")
    write_changed(None, path, {"global_step": np.array(step, np.int64), **plain})
    # `tf.train.update_checkpoint_state` would print that it is deprecated.
    state = tf.train.generate_checkpoint_state_proto(os.fspath(directory), path)
    write_text(Path(directory, "checkpoint"), str(state))
    return path
