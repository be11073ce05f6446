"""The file beside an island's checkpoint, which saves what the island has not contributed yet.

A checkpoint has the values of the island when the checkpoint was written. The island's change since
its last contribution is its values at that contribution minus the checkpoint's values. The file
beside the checkpoint has these earlier values, and the island's contributions that no version
contains yet.
"""

from __future__ import annotations

import logging
import os
from typing import NamedTuple, Sequence

import msgspec
import numpy as np

from mtf_gradsync.tools.islands.folder import Folder, FolderError
from mtf_gradsync.tools.islands.objects import contribution_order
from mtf_gradsync.tools.islands.tensor_files import DamagedObjectError, Specs, TensorSpec

logger = logging.getLogger(__name__)

_ENDING = ".island"
_BASE, _ROUNDED = "base", "rounded"  # parts of the tensors' names in the file


class Sent(NamedTuple):
    """The values and counts that an island had when it contributed; kept until that is merged.

    Attributes:
      version: the number of the version from which the change begins.
      values: a dictionary from the names of the contributed variables to the values that they had.
      counts: the counters that schedules follow (global step, updates).
      tokens: the number of tokens from which the change was learned.
      steps: the number of updates in the change.
      residual: earlier rounding errors, which were added to the change.
    """

    version: int
    values: dict[str, np.ndarray]
    counts: dict[str, int]
    tokens: float
    steps: int
    residual: dict[str, np.ndarray]


class _Attempt(msgspec.Struct, frozen=True):
    object: str
    version: int
    counts: dict[str, int]
    tokens: float
    steps: int


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of an island at a checkpoint, which say what it has learned since its version.

    Attributes:
      island: the island's name.
      life: the number of the run of the island's process: 1 for the first, and so on.
      number: the number of the last contribution in this run.
      events: the number of events that the journal has of this run.
      version: the number of the version that the island took last.
      counts: the counters that schedules follow (global step, updates), as they were before the
        updates that are not contributed yet.
      since: the number of updates since the last contribution.
      tokens: for each fragment (set of variables that are merged together), the tokens since its
        last contribution.
      waiting: the tokens of steps whose gradients are accumulated and in no update yet; None if
        that is unknown.
      is_sent: whether the last of `attempts` may still be merged.
      attempts: the names and counts of the contributions that the island has made from `version`.
    """

    island: str
    life: int
    number: int
    events: int
    version: int
    counts: dict[str, int]
    since: int
    tokens: list[float]
    waiting: float | None
    is_sent: bool
    attempts: list[_Attempt] = []


class SavedIsland(NamedTuple):
    """The content of the file beside an island's checkpoint.

    Attributes:
      learned: the island's counts.
      base: a dictionary from the names of variables to their values in the version that the island
        took last.
      residual: a dictionary from the names of variables to the rounding errors that are added to
        their next changes.
      attempts: a dictionary from the names of the contributions that the island has made from this
        version to what each of them contained.
    """

    learned: Learned
    base: dict[str, np.ndarray]
    residual: dict[str, np.ndarray]
    attempts: dict[str, Sent]

    @property
    def has_learned(self) -> bool:
        """Whether the island had learned anything that no version contains."""
        return self.learned.is_sent or any(self.learned.tokens)

    def is_uncontributed(
        self, contributed: Sequence[str], life: int, version: int, fragments: int
    ) -> bool:
        """Returns whether the island still has to contribute what it had learned by the checkpoint.

        The result is False if what the island had learned by the checkpoint is in a contribution
        that it made after the checkpoint. The result is also False if the file beside the
        checkpoint belongs to another folder.

        Args:
          contributed: the names of this island's newest contributions; "" stands for none.
          life: the number of the current run of the island's process.
          version: the number of the folder's newest version.
          fragments: the number of sets of variables that versions change in turn.
        """
        learned = self.learned
        later = [x for x in contributed if contribution_order(x) > (learned.life, learned.number)]
        if later:
            logger.info("What the checkpoint of %s has learned is in %s", learned.island, later[0])
        # Numbers of runs and versions only grow in a folder. If they are smaller now, the file
        # belongs to another folder.
        is_same = learned.life < life and learned.version <= version
        return is_same and not later and len(learned.tokens) == fragments

    def write(self, checkpoint: str, before: str | None) -> None:
        """Writes the file beside a checkpoint; removes the files of checkpoints that are gone.

        Args:
          checkpoint: the path of the checkpoint, such as "/run/model.ckpt-100".
          before: the path of the checkpoint before this one, or None. The file beside the earlier
            checkpoint stays: a process that is killed now has to begin from there.

        Raises:
          FolderError: the new file cannot be written.
        """
        tensors = {_BASE: self.base, _ROUNDED: self.residual}
        attempts = []
        for number, (name, sent) in enumerate(self.attempts.items()):
            attempts.append(_Attempt(name, sent.version, sent.counts, sent.tokens, sent.steps))
            tensors |= {f"{number}": sent.values, f"{number} {_ROUNDED}": sent.residual}
        learned = msgspec.structs.replace(self.learned, attempts=attempts)
        folder, name = _place(checkpoint)
        named = {f"{of}:{key}": x for of, some in tensors.items() for key, x in some.items()}
        folder.store(name, learned, named)
        # Remove the files of other steps whose checkpoints TensorFlow's Saver has removed.
        there, begin = folder.names(""), name.rpartition("-")[0]
        kept = {name, _place(before)[1]} if before else {name}
        for other in there:
            is_gone = f"{other.removesuffix(_ENDING)}.index" not in there
            is_own = other.endswith(_ENDING) and other.rpartition("-")[0] == begin
            if is_gone and is_own and other not in kept:
                folder.remove(other)

    @classmethod
    def read(cls, checkpoint: str) -> SavedIsland | None:
        """Reads the file beside a checkpoint; returns None if there is none.

        `checkpoint` is the checkpoint's path, such as "/run/model.ckpt-100". The method raises
        DamagedObjectError if the file beside the checkpoint is damaged.
        """
        folder, name = _place(checkpoint)
        found = folder.load(name, kind=Learned)
        if found is None:
            return None
        tensors: dict[str, dict[str, np.ndarray]] = {_BASE: {}, _ROUNDED: {}}
        for key, value in found.tensors.items():
            of, variable = key.split(":", 1)
            tensors.setdefault(of, {})[variable] = value
        attempts = {
            one.object: Sent(
                one.version, tensors.get(f"{number}", {}), one.counts, one.tokens, one.steps,
                tensors.get(f"{number} {_ROUNDED}", {}),
            )
            for number, one in enumerate(found.facts.attempts)
        }  # fmt: skip
        return cls(found.facts, tensors[_BASE], tensors[_ROUNDED], attempts)


def saved_beside(checkpoint: str, island: str, specs: Specs) -> SavedIsland | None:
    """Returns what an island saved beside a checkpoint, or None if it saved nothing usable.

    The result is None if there is no file beside the checkpoint, or if the file is another island's
    or has other variables. The result is also None if the file is damaged or cannot be read; then a
    warning is logged.

    Args:
      checkpoint: the checkpoint's path, such as "/run/model.ckpt-100".
      island: the island's name.
      specs: a dictionary from the names of the exchanged variables to their shapes and dtypes.
    """
    try:
        saved = SavedIsland.read(checkpoint)
    except (DamagedObjectError, FolderError) as error:
        logger.warning("Island %s: %s", island, error)
        return None
    if saved is None or saved.learned.island != island:
        return None
    is_same = {name: TensorSpec.of(value) for name, value in saved.base.items()} == specs
    return saved if is_same else None


def _place(checkpoint: str) -> tuple[Folder, str]:
    directory, name = os.path.split(checkpoint)
    return Folder(directory or "."), name + _ENDING
