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
    """Where a session begins."""

    path: str | None = None  # the checkpoint to restore; None for initial values
    kept: tuple[str, ...] = ()  # all checkpoints of the run, from the oldest to the newest
    step: int = 0  # steps made before, where they were asked for
    new: tuple[str, ...] = ()  # variables that the checkpoint lacks: they begin as in a new run
    with_averages: bool = False  # whether to restore moving averages in place of the variables

    @contextlib.contextmanager
    def restorable(
        self, initial_values: Callable[[Sequence[str]], Mapping[str, Any]] = lambda names: {}
    ) -> Iterator[str | None]:
        """Yields the path of a checkpoint of all variables of the default graph, None in a new run.

        It is `path`, or that of a temporary copy, with averages in place of the variables or with
        the missing values, which `initial_values` returns by name. Raises NoAveragesError if there
        are no averages.
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
