"""Training runs as islands: settings for gin, parts of the data, and a hook for sessions."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, NamedTuple

from mtf_gradsync.extension import check_whole_number, is_number, late_configurable, tf
from mtf_gradsync.tools.islands.changes import Form, Merge, MergeSettings, Weight
from mtf_gradsync.tools.islands.exchange import IslandError
from mtf_gradsync.tools.islands.folder import Folder
from mtf_gradsync.tools.islands.island import Follow, Island, Wait, check_island_name
from mtf_gradsync.tools.islands.merger import Quorum, Waiting

logger = logging.getLogger(__name__)


class DataPart(NamedTuple):
    """A part of a data set: every `parts`-th example, beginning with example `part` (from 0)."""

    part: int = 0
    parts: int = 1


ALL_DATA = DataPart()


def claim_part(folder: Folder, island: str, parts: int, claims: bool = True) -> DataPart:
    """Returns the part of the data that an island learns from, different for each island.

    An island claims the first part of the data that no other island has claimed. It writes its
    claim into the folder, so that the island has the same part after a restart. If there are more
    islands than parts, the last islands share parts with earlier ones, and a warning is logged.

    Args:
      folder: the folder of the islands.
      island: the island's name.
      parts: the number of parts that the data are divided into.
      claims: whether to claim a part if the island has none yet.

    Raises:
      ValueError: an argument makes no sense.
      IslandError: the island has no part yet, and `claims` is False.
    """
    check_island_name(island)
    check_whole_number("parts", parts, 1)
    if parts == 1:
        return ALL_DATA
    number = 0
    while True:
        name = f"parts/{number:05d}.json"
        if claims and folder.create_json(name, {"island": island}):
            break
        found = folder.read_json(name)
        if not claims and found is None:
            raise IslandError(
                f"{folder.url} does not say which part of the data the island {island!r} had."
            )
        if isinstance(found, dict) and found.get("island") == island:
            break
        number += 1
    if number >= parts:
        logger.warning(
            "%d islands have begun in %s, and the data have %d parts: %s learns from the same part "
            "as another. Give more (ElasticIslands.parts)", number + 1, folder.url, parts, island,
        )  # fmt: skip
    return DataPart(number % parts, parts)


@late_configurable(module="mtf_gradsync")
@dataclasses.dataclass(frozen=True)
class ElasticIslands:
    """The settings, bound by gin, that make a training run an island if they name a folder.

    Fields of `ElasticIslands` that are not listed below are explained at `Island`, `MergeSettings`
    and `Waiting`. The fields of `MergeSettings` and `Waiting` have an effect only if this run's
    process merges (`merge` is True).

    Attributes:
      folder: path or URL of the folder that all islands share; "" for a run that is no island.
      name: the island's name; default the name of the run's directory.
      parts: the number of parts that the data are divided into. This island learns from one part;
        see `claim_part`. If `parts` is 1, each island learns from all data. If the data set's
        function has no arguments for the part, the island reads all examples again and again, and
        uses every `parts`-th one. If `parts` is a prime number that does not divide the number of
        examples, the island uses each example at some time.
    """

    folder: str = ""
    name: str = ""
    inner_steps: int = 50
    wait: Wait = "grace"
    wait_seconds: float = 60.0
    begin_seconds: float = 600.0
    form: Form = "float32"
    follow: Follow = "version"
    replay: bool = False
    merge: bool = False
    keep_all: bool = False
    quorum: Quorum = 1
    min_grace: float = 1.0
    max_grace: float = 60.0
    max_staleness: int = 0
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.5
    nesterov: bool = True
    fragments: int = 1
    weight: Weight = "tokens"
    merge_rule: Merge = "mean"
    max_norm: float = 10.0
    parts: int = 17

    def part(self, name: str) -> DataPart:
        """Returns the part of the data that this run learns from: all data if it is no island.

        `name` is the island's name if the settings do not give one.
        """
        if not self.folder:
            return ALL_DATA
        return claim_part(Folder(self.folder), self.name or name, self.parts, not self.replay)

    def island(self, lowering: Any, name: str) -> Island | None:
        """Returns the island that this run is, or None if `folder` is "".

        Args:
          lowering: the mtf lowering of the training step.
          name: the island's name if the settings do not give one.

        Raises:
          ValueError: a field of the settings makes no sense.
        """
        if not self.folder:
            return None
        settings = MergeSettings(
            self.outer_learning_rate, self.outer_momentum, self.nesterov, self.fragments,
            self.weight, self.merge_rule, self.max_norm,
        )  # fmt: skip
        waiting = Waiting(self.quorum, self.min_grace, self.max_grace, self.max_staleness)
        return Island(
            self.folder, self.name or name, self.inner_steps, lowering=lowering, wait=self.wait,
            wait_seconds=self.wait_seconds, begin_seconds=self.begin_seconds, form=self.form,
            follow=self.follow, merge=self.merge, merge_settings=settings, waiting=waiting,
            keep_all=self.keep_all, replay=self.replay,
        )  # fmt: skip


class IslandHook(tf.train.SessionRunHook):
    """A hook that runs an `Island` in a monitored session, such as an Estimator's.

    Args:
      island: the island, made in the graph, with its lowering.
      tokens: the number of tokens (or another weight) of a step's loss: a number, or a tensor of
        the graph.
      model_dir: the directory in which the session writes its checkpoints and from which it
        restores them. Beside each checkpoint the hook saves the island's state, so that a restarted
        island still contributes what it had learned; see `Island.save`. None saves no state.
    """

    def __init__(self, island: Island, tokens: Any = 1.0, model_dir: str | None = None):
        self._island, self._tokens, self._model_dir = island, tokens, model_dir
        self._has_begun = False
        self._newest: str | None = None  # checkpoint that was seen

    def begin(self) -> None:
        self._step = tf.train.get_global_step()

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Lets the island begin again before the next step: a recovered session has older values.

        The arguments `session` and `coord` are those of every session hook; they are not used.
        """
        del session, coord
        self._has_begun = False

    def before_run(self, run_context: Any) -> Any:
        """Begins the island before the first step, after other hooks have restored variables.

        Before each later step the hook saves the island's state if there is a new checkpoint.
        `run_context` gives the session. The returned `SessionRunArgs` lets the step fetch the
        number of tokens, if this number is a tensor.
        """
        newest = self._new_checkpoint()
        if not self._has_begun:
            step = int(run_context.session.run(self._step)) if self._step is not None else 0
            is_restored = newest is not None and newest.endswith(f"-{step}")
            self._island.begin(run_context.session, step, newest if is_restored else None)
            self._has_begun = True
        elif newest:  # a checkpoint that was written after the exchange of the last step
            self._island.save(newest)
        fetched = None if is_number(self._tokens) else {"tokens": self._tokens}
        return tf.train.SessionRunArgs(fetched)

    def _new_checkpoint(self) -> str | None:
        """Returns the path of the newest checkpoint if the hook has not handled it yet; else None.

        If the island has not begun yet, the newest checkpoint is returned in any case.
        """
        if self._model_dir is None:
            return None
        before = self._newest if self._has_begun else None
        self._newest = tf.train.latest_checkpoint(self._model_dir)
        return self._newest if self._newest != before else None

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Lets the island contribute its change, or take merged values, if either is due.

        `run_context` gives the session. `run_values` has the step's number of tokens if this number
        is a tensor of the graph. `Island.after_step` does the work.
        """
        found = run_values.results
        tokens = float(found["tokens"]) if found else self._tokens
        self._island.after_step(run_context.session, tokens, self._new_checkpoint())

    def end(self, session: Any) -> None:
        """Contributes what the island has not contributed yet, at the end of the session."""
        if self._has_begun:
            newest = self._new_checkpoint()
            if newest:
                self._island.save(newest)
            self._island.finish(session)
