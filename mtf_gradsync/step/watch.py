"""What a step cannot say itself: operations whose outcome a program asks for after the step.

A TPU program can neither fail nor print by itself, and an error of TensorFlow's is known by its
text only. A watched operation leaves what it found in variables, and a `Watch` reads them.
"""

from __future__ import annotations

import logging
from typing import Any, Callable, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.mesh.kind import is_simd

_logger = logging.getLogger("mtf_gradsync")


class Watch:
    """Says of a session what its last step has come to.

    Made by `Watched.watch`, while operations can still be added.
    """

    def __init__(
        self, reads: Sequence[Sequence[tf.Tensor]], find: Callable[[Any, Sequence[Any]], Any]
    ):
        self._reads, self._find = reads, find
        self._before: list[Any] = [None] * len(reads)

    def ask(self, session: Any) -> Any:
        """What to raise or log after a step, or in place of the error that it failed with.

        Args:
          session: what ran the step, a tf.Session or a session of `mtf_gradsync.simd`.

        Returns:
          An exception, a line for the log, or None.
        """
        before, self._before = self._before, session.run(self._reads)
        found = [self._find(old, new) for old, new in zip(before, self._before)]
        return next((one for one in found if one is not None), None)


class Watched(mtf.Operation):
    """An operation whose outcome variables hold after the step.

    Attributes:
      takes_a_hook: whether it was lowered where the step does not say the outcome by itself.
    """

    def __init__(self, inputs: Sequence[mtf.Tensor], variables: Sequence[mtf.Variable], name: str):
        """Adds the operation.

        Args:
          inputs: what it takes.
          variables: what `find` needs the values of; every processor holds them whole.
          name: name of the operation.
        """
        super().__init__(list(inputs), name=name)
        self.takes_a_hook = False
        self._variables = list(variables)
        # Of each lowering, a slice of each variable.
        self._slices: list[list[Any]] = []

    def note_lowering(self, lowering: mtf.Lowering) -> None:
        """Remembers where a lowering has the variables; for `lower`."""
        laid_out = [lowering.variables[v].laid_out_tensor for v in self._variables]
        self._slices.append([x.all_slices[0] for x in laid_out])
        self.takes_a_hook = is_simd(lowering.mesh_impl(self))

    def find(self, before: Sequence[Any] | None, now: Sequence[Any]) -> Any:
        """What the variables say of a step.

        Args:
          before: their values when they were read last; None at the first time.
          now: their values.

        Returns:
          As `Watch.ask`.
        """
        raise NotImplementedError

    def watch(self) -> Watch:
        """Adds to the default graph what reads the variables."""
        with tf.control_dependencies(None):
            return Watch([[x.read_value() for x in some] for some in self._slices], self.find)


class WatchHook(tf.train.SessionRunHook):
    """Asks a watched operation after each run of a session, where the step says nothing itself."""

    def __init__(self, find_watched: Callable[[], Watched | None]):
        """Remembers how to find the operation, None for none, once the session begins."""
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
        """Raises what is an error, and logs a line; see `tf.train.SessionRunHook.after_run`."""
        del run_values
        found = self._watch.ask(run_context.session) if self._watch else None
        if isinstance(found, Exception):
            raise found
        if found:
            _logger.warning("%s", found)
