"""Operations whose outcome a program reads after the step.

A TPU program can neither fail nor print, and TensorFlow's errors can only be recognised by their
text. A watched operation writes its findings to variables, and a `Watch` reads them.
"""

from __future__ import annotations

import logging
from typing import Any, Callable, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.mesh.kind import is_simd

_logger = logging.getLogger("mtf_gradsync")


class Watch:
    """Reads the outcome of a session's last step; made by `Watched.watch`."""

    def __init__(
        self, reads: Sequence[Sequence[tf.Tensor]], find: Callable[[Any, Sequence[Any]], Any]
    ):
        self._reads, self._find = reads, find
        self._before: list[Any] = [None] * len(reads)

    def ask(self, session: Any) -> Any:
        """Returns an exception to raise or a line to log after a step of a session, or None.

        Where the step raised an error, the exception takes its place.
        """
        before, self._before = self._before, session.run(self._reads)
        found = [self._find(old, new) for old, new in zip(before, self._before)]
        return next((one for one in found if one is not None), None)


class Watched(mtf.Operation):
    """An operation that leaves its outcome in variables."""

    def __init__(self, inputs: Sequence[mtf.Tensor], variables: Sequence[mtf.Variable], name: str):
        """Adds the operation; `variables`, not split over processors, are those for `find`."""
        super().__init__(list(inputs), name=name)
        # Whether the step, as it was lowered, does not print or raise the outcome itself.
        self.takes_a_hook = False
        self._variables = list(variables)
        # For each lowering a slice of each variable.
        self._slices: list[list[Any]] = []

    def note_lowering(self, lowering: mtf.Lowering) -> None:
        """Records a lowering's slices of the variables; `lower` calls it."""
        laid_out = [lowering.variables[v].laid_out_tensor for v in self._variables]
        self._slices.append([x.all_slices[0] for x in laid_out])
        self.takes_a_hook = is_simd(lowering.mesh_impl(self))

    def find(self, before: Sequence[Any] | None, now: Sequence[Any]) -> Any:
        """Returns what to raise or log, as `Watch.ask` does, by the variables' values after a step.

        `before` are their values when they were last read; None at the first time.
        """
        raise NotImplementedError

    def watch(self) -> Watch:
        """Adds operations that read the variables to the default graph."""
        with tf.control_dependencies(None):
            return Watch([[x.read_value() for x in some] for some in self._slices], self.find)


class WatchHook(tf.train.SessionRunHook):
    """Raises or logs the outcome of a watched operation after each run of a session."""

    def __init__(self, find_watched: Callable[[], Watched | None]):
        """Sets the function that finds the operation, or None, once the session begins."""
        self._find_watched = find_watched
        self._watch: Watch | None = None

    def begin(self) -> None:
        """See `tf.train.SessionRunHook.begin`."""
        watched = self._find_watched()
        self._watch = watched.watch() if watched and watched.takes_a_hook else None

    def after_create_session(self, session: Any, coord: Any) -> None:
        """See `tf.train.SessionRunHook.after_create_session`."""
        del coord
        if self._watch:
            self._watch.ask(session)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Raises an error, or logs a line; see `tf.train.SessionRunHook.after_run`."""
        del run_values
        found = self._watch.ask(run_context.session) if self._watch else None
        if isinstance(found, Exception):
            raise found
        if found:
            _logger.warning("%s", found)
