"""Where a session begins: with initial values, or from a checkpoint."""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.optimizers.state.averaged import averaged_checkpoint
from mtf_gradsync.runtimes.checkpoints.initial import completed


class Start(NamedTuple):
    """Where a session begins.

    Attributes:
      path: the checkpoint to restore; None for initial values.
      kept: all checkpoints of the run, from the oldest to the newest.
      step: steps made before, where they were asked for.
      new: names of variables that the checkpoint lacks, and that begin as in a new run.
      with_averages: whether to restore moving averages in place of the variables.
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
        """Yields the path of a checkpoint that has all variables of the default graph.

        It is `path`, or a temporary copy with the missing values added; None for a run that begins.

        Args:
          initial_values: takes names of variables and returns their initial values by name.

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
