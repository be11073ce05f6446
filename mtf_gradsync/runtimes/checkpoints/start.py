"""What a session begins with: initial values, or a checkpoint of whatever run."""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.optimizers.state.averaged import averaged_checkpoint
from mtf_gradsync.runtimes.checkpoints.initial import completed


class Start(NamedTuple):
    """What a session begins with.

    Attributes:
      path: the checkpoint that is restored; None for initial values.
      kept: all checkpoints of the run, from the oldest to the newest.
      step: steps made before, where they were asked for.
      new: names of variables that the checkpoint does not have, and that begin as in a new run.
      with_averages: whether moving averages are restored in place of the variables.
    """

    path: str | None = None
    kept: tuple[str, ...] = ()
    step: int = 0
    new: tuple[str, ...] = ()
    with_averages: bool = False

    @contextlib.contextmanager
    def restorable(
        self, initial_values: Callable[[Sequence[str]], Mapping[str, Any]] = lambda names: {}
    ) -> Iterator[str | None]:
        """Gives a checkpoint that has all variables of the default graph.

        Args:
          initial_values: gives those of variables, by name.

        Yields:
          The path; None for a run that begins.

        Raises:
          NoAveragesError: if averages are to be restored, and the checkpoint has none.
        """
        if not self.path:
            yield None
        elif self.with_averages:
            with averaged_checkpoint(self.path, tf.global_variables()) as path:
                yield path
        elif self.new:
            path = completed(self.path, initial_values(self.new))
            try:
                yield path
            finally:
                shutil.rmtree(os.path.dirname(path))
        else:
            yield self.path
