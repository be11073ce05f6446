"""Operations of a step whose findings, such as warnings and errors, are reported after the step.

A TPU program can neither fail nor print, and TensorFlow's errors can only be recognised by their
text. So a watched operation (`Watched`) keeps its findings in variables. The sessions of this
package read these variables after each step (`StepWatches`); other sessions need a hook
(`WatchHook`).
"""

from __future__ import annotations

import logging
from typing import Any, Callable, Sequence

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.mesh.axes import is_simd
from mtf_gradsync.step.plan import StepPlan

_logger = logging.getLogger("mtf_gradsync")
#: The collection of pairs (`Watched`, name of its counts) of the SIMD programs of a tf graph. It is
#: not exported, as its key is not a string.
WATCHED = ("mtf_gradsync watched",)


class Watched(mtf.Operation):
    """An operation at the end of a step that leaves what it found in variables, to be reported.

    A subclass of `Watched` calls `note_lowering` when the operation is lowered. The variables that
    hold the findings are not split over processors.
    """

    def __init__(
        self,
        before: Sequence[mtf.Tensor],
        now: Sequence[mtf.Tensor],
        counts: Sequence[mtf.Variable],
        records: Sequence[mtf.Variable],
        name: str,
    ):
        """Adds the operation.

        Args:
          before: tensors with the values of `counts` before the step.
          now: tensors with the values of `counts` after the step, made outside of branches.
          counts: int32 or float32 variables whose change shows that there is something to report.
          records: variables with the details, which are read only if there is something to report.
          name: name of the operation.
        """
        super().__init__([*before, *now], name=name)
        # Whether the step, as it was lowered, does not print or raise the outcome itself.
        self.needs_hook = False
        # Values that are made in a branch cannot be read outside of it.
        self.counts_are_readable = not StepPlan.of(self.graph).is_in_branch
        self._counts, self._records = list(counts), list(records)
        # For each lowering a slice of each variable.
        self._slices: list[tuple[list[Any], list[Any]]] = []

    def counts_after_step(self, lowering: mtf.Lowering) -> list[tf.Tensor]:
        """Returns tf tensors with the counts after the step, in the order of the constructor."""
        return self._lowered(lowering, self.inputs[len(self._counts) :])

    def slices_of_records(self, lowering: mtf.Lowering) -> list[Any]:
        """Returns one slice, a tf variable, of each variable in `records`; its slices are equal."""
        return _slices(lowering, self._records)

    def note_lowering(self, lowering: mtf.Lowering) -> None:
        """Records that this operation was lowered; a subclass's `lower` calls it."""
        self._slices.append((_slices(lowering, self._counts), self.slices_of_records(lowering)))
        self.needs_hook = is_simd(lowering.mesh_impl(self))
        if self.needs_hook and self.counts_are_readable:
            values = self._lowered(lowering, self.inputs)
            bits = [x if x.dtype == tf.int32 else tf.bitcast(x, tf.int32) for x in values]
            told = tf.concat([tf.reshape(x, [-1]) for x in bits], 0)
            tf.add_to_collection(WATCHED, (self, told.name))

    def is_due(self, before: Sequence[Any] | None, now: Sequence[Any]) -> bool:
        """Returns whether there is something to report after a step; subclasses define it.

        `before` and `now` are the counts before and after the step, as numpy values in the order in
        which the constructor got them. `before` is None if they are not known.
        """
        raise NotImplementedError

    def find(
        self, before: Sequence[Any] | None, now: Sequence[Any], records: Sequence[Any]
    ) -> list[Any]:
        """Returns what to report after a step: strings to log and exceptions to raise.

        Subclasses define this method. `now` are the counts and `records` the records after the
        step, as numpy values. `before` are the counts before the step, or when they were last read;
        None if they are not known.
        """
        raise NotImplementedError

    def split_counts(self, bits: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns the counts before a step and those after it, as two lists of numpy values.

        `bits` is what the step has returned: one vector of int32, with the bits of all counts. A
        session of this package calls this method after the step. The returned counts have the
        dtypes of their variables.
        """
        sizes = [x.shape.size for x in self.inputs]
        parts = np.split(bits, np.cumsum(sizes)[:-1])
        parts = [x.view(y.dtype.as_numpy_dtype) for x, y in zip(parts, self.inputs)]
        return parts[: len(self._counts)], parts[len(self._counts) :]

    def watch(self) -> Watch:
        """Returns a `Watch`, which reads what this operation found in a session.

        The call adds operations to TensorFlow's graph, which read the counts and records.
        """
        with tf.control_dependencies(None):
            reads = [
                ([x.read_value() for x in counts], [x.read_value() for x in records])
                for counts, records in self._slices
            ]
        return Watch(reads, self)

    def _lowered(self, lowering: mtf.Lowering, tensors: Sequence[mtf.Tensor]) -> list[tf.Tensor]:
        return [lowering.tensors[x].to_laid_out_tensor().all_slices[0] for x in tensors]


def _slices(lowering: mtf.Lowering, variables: Sequence[mtf.Variable]) -> list[Any]:
    return [lowering.variables[v].laid_out_tensor.all_slices[0] for v in variables]


class Watch:
    """A reader of what a watched operation found in a session; `Watched.watch` makes it.

    Attributes:
      records: for each lowering of the operation, a list of tf tensors that read its records.
    """

    def __init__(self, reads: Sequence[tuple[Any, Any]], watched: Watched):
        self._reads, self._watched = reads, watched
        self._before: list[Any] = [None] * len(reads)

    @property
    def records(self) -> list[list[tf.Tensor]]:
        """For each lowering of the watched operation, tf tensors that read its records."""
        return [records for _, records in self._reads]

    def read_report(self, session: Any) -> Any:
        """Reads what the last step found; returns an exception to raise, a line to log, or None.

        `session` is the session that ran the step. If the step itself raised an error, the caller
        is to raise the returned exception in place of that error.
        """
        read = session.run(self._reads)
        before, self._before = self._before, [counts for counts, _ in read]
        told = [
            one
            for old, (now, records) in zip(before, read)
            if self._watched.is_due(old, now)
            for one in self._watched.find(old, now, records)
        ]
        return next(iter(sorted(told, key=lambda one: not isinstance(one, Exception))), None)


class WatchHook(tf.train.SessionRunHook):
    """A session hook that raises or logs, after each run, what a watched operation found.

    The hook does nothing in sessions of this package, which raise and log these findings
    themselves.
    """

    def __init__(self, find_watched: Callable[[], Watched | None]):
        """Makes a hook for the watched operation that `find_watched` returns.

        The function `find_watched` is called when the session begins, and returns None if there is
        no watched operation.
        """
        self._find_watched = find_watched
        self._watched: Any = None
        self._watch: Watch | None = None

    def begin(self) -> None:
        self._watched = self._find_watched()
        takes_it = self._watched is not None and self._watched.needs_hook
        self._watch = self._watched.watch() if takes_it else None

    def after_create_session(self, session: Any, coord: Any) -> None:
        del coord
        if getattr(session, "looks_at_steps", False) and self._watched.counts_are_readable:
            self._watch = None
        if self._watch:
            self._watch.read_report(session)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Raises the error or logs the line that the last run left, if there is one.

        See `tf.train.SessionRunHook.after_run`.
        """
        del run_values
        found = self._watch.read_report(run_context.session) if self._watch else None
        if isinstance(found, Exception):
            raise found
        if found:
            _logger.warning("%s", found)
