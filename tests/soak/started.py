"""A run under faults: its directory, and the processes that it is started as."""

from __future__ import annotations

import functools
import shutil
import time
from pathlib import Path
from typing import List, Sequence

import numpy as np

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes.starting import MANIFEST_FILE, find_damage
from tests.sessions import saved_variables
from tests.soak import settings
from tests.soak.child import Child
from tests.soak.prebuilt import prebuilt
from tests.soak.program import program


class Processes(List[Child]):
    """The processes of one start, process 0 first."""

    def sleep(self, seconds: float) -> None:
        """Waits, at most until the first has ended."""
        self[0].wait(seconds)

    def are_alive(self) -> bool:
        """Whether none has ended."""
        return all(child.poll() is None for child in self)

    def have_met(self, seconds: float) -> bool:
        """Waits until process 0 trains; whether it came to that."""
        end = time.monotonic() + seconds
        while "training " not in self[0].output():
            if self[0].poll() is not None or time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

    def wait_first(self, seconds: float) -> int | None:
        """Waits for the end of process 0."""
        return self[0].wait(seconds)

    def others_end(self, seconds: float, statuses: Sequence[int]) -> list[str]:
        """Waits for the ends of the others; says which did not end as they should."""
        return [
            f"process {i} ended with {child.status}: {child.errors()[-300:]}"
            for i, child in enumerate(self[1:], 1)
            if child.wait(seconds) not in statuses
        ]

    def all_end_well(self, seconds: float) -> tuple[str, ...]:
        """Waits for the ends of all; says which did not end well."""
        ends = [(i, child.wait(seconds), child) for i, child in enumerate(self)]
        self.kill_all()
        return tuple(
            f"process {i} ended with {status}: {child.errors()[-500:]}"
            for i, status, child in ends
            if status != 0
        )

    def kill_all(self) -> None:
        """Ends what still runs."""
        for child in self:
            child.kill()


class Run:
    """A run, from its first start to its last step.

    Attributes:
      runtime: what runs its steps.
      config: the name of its config.
      directory: its model directory.
      scratch: a directory for other things.
      usual_seconds: that it takes without faults.
      patience: seconds after which a start that should go well hangs.
    """

    def __init__(
        self,
        runtime: settings.Runtime,
        config: str,
        directory: Path,
        reference: Path | None = None,
        usual_seconds: float = 5.0,
    ):
        self.runtime, self.config = runtime, config
        self.scratch = directory
        self.directory = directory / "run"
        self.usual_seconds = usual_seconds
        self.patience = 60 + 20 * usual_seconds
        self._reference = reference
        self._starts = 0

    def start(self, fault: str = "null", *flags: str, config: str | None = None) -> Processes:
        """Starts it.

        Args:
          fault: inside process 0; see `tests.soak.injected`.
          *flags: more for each process.
          config: another one's name.
        """
        self._starts += 1
        # Not where the fault is in the graph.
        is_usual = "nan_in_shard" not in fault
        prepare = prebuilt(self.runtime.name, config or self.config) if is_usual else None
        children = []
        for number, own in enumerate(self.runtime.flags()):
            arguments = settings.command(
                self.runtime, config or self.config, [*own, *flags], self.directory
            )
            inside = fault if number == 0 else "null"
            children.append(
                Child(
                    functools.partial(program, inside, arguments, prepare),
                    self.scratch / f"{self._starts}.{number}",
                )
            )
        return Processes(children)

    def newest(self) -> str | None:
        """The name of the newest checkpoint as the state file has it."""
        try:
            path = tf.train.latest_checkpoint(str(self.directory))
        except ValueError:  # an emptied state file
            path = None
        return Path(path).name if path else None

    def first_step(self) -> int:
        """Where it would go on."""
        return int((self.newest() or "-0").rpartition("-")[2])

    def saves_to_come(self) -> int:
        """How many checkpoints it would still write."""
        return (settings.STEPS - self.first_step()) // settings.SAVE_EVERY

    def has_older(self, newest: str) -> bool:
        """Whether there is a whole checkpoint before one."""
        step = int(newest.rpartition("-")[2])
        return any(at < step for at in self.whole())

    def whole(self) -> dict[int, str]:
        """The checkpoints on disk that can be restored, by step."""
        paths = [str(path)[: -len(".index")] for path in self.directory.glob("model.ckpt-*.index")]
        found = {int(path.rpartition("-")[2]): path for path in paths}
        return {step: path for step, path in sorted(found.items()) if find_damage(path) is None}

    def contents(self) -> dict[str, bytes]:
        """All files of the directory."""
        return {
            str(path.relative_to(self.directory)): path.read_bytes()
            for path in self.directory.rglob("*")
            if path.is_file()
        }

    def is_noted(self, name: str) -> bool:
        """Whether the manifest knows a checkpoint."""
        manifest = self.directory / MANIFEST_FILE
        return manifest.exists() and f'"{name}"' in manifest.read_text(encoding="utf-8")

    def foreign(self, name: str) -> None:
        """Puts the last checkpoint of another config's run under a checkpoint's name."""
        assert self._reference is not None
        other = self._reference.parents[1] / settings.other_config(self.config) / "run"
        for path in other.glob(f"model.ckpt-{settings.STEPS}.*"):
            ending = path.name.partition(".ckpt-")[2].partition(".")[2]
            shutil.copy(path, self.directory / f"{name}.{ending}")

    def differs(self) -> str | None:
        """How its last variables differ from those of the run without faults; None if equal."""
        assert self._reference is not None
        last = f"model.ckpt-{settings.STEPS}"
        ours = saved_variables(self.directory / last)
        theirs = saved_variables(self._reference / last)
        if set(ours) != set(theirs):
            return f"other variables: {sorted(set(ours) ^ set(theirs))[:3]}"
        wrong = [n for n in sorted(ours) if ours[n].tobytes() != theirs[n].tobytes()]
        if wrong:
            worst = max(float(np.max(np.abs(ours[n] - theirs[n]))) for n in wrong)
            return f"{len(wrong)} variables differ, {wrong[0]} first, by {worst:g} at most"
        return None
