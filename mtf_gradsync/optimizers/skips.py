"""Skipped updates of wrappers: log lines, and an error if a training only skips updates.

A wrapper that skips steps makes a `Skips` for each step that it builds. On skipped steps a variable
records which gradients of which shards were not finite. A line in the log names these gradients for
the first skipped step, the second, the fourth and so on. There is also a line for the step at which
a loss scale reaches its smallest value. After more than `max_steps_without_update` steps in a row
without an update, an error names the gradients. On placement meshes the step itself prints the line
and raises the error. A SIMD program can do neither; the session that runs the program logs the line
and raises the error (`mtf_gradsync.step.conditional.Watched`).
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, Callable, Iterable, Sequence, Union

import numpy as np

from mtf_gradsync._common import check_whole_number
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.tensorflow import control_flow_v1
from mtf_gradsync.gradients.clipping import unclipped
from mtf_gradsync.gradients.measures import which_not_finite
from mtf_gradsync.gradients.operations import on_mesh
from mtf_gradsync.mesh.axes import ReplicaAxes, is_simd
from mtf_gradsync.optimizers.pipeline.forms import GradientSet
from mtf_gradsync.optimizers.state import named_state
from mtf_gradsync.optimizers.wrapper import StepAttribute, Wrapper
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.step.conditional import Watched, WatchHook, values_after

# Names of rows for no single shard: sums of finite gradients, and gradients reduced before.
_OF_SUM, _OF_ONE = "(sum over shards)", "(shard unknown)"

# The full list may be as long as the number of variables times the number of shards.
_MOST_NAMED = 8


class NoUpdateError(RuntimeError):
    """The error of a training in which too many steps in a row made no update.

    Attributes:
      limit: max_steps_without_update.
      replicas: the numbers, in row-major order, of shards or islands with a value that is not
        finite in the last skipped step. `SyncReplicasOptimizer` lists the replicas that did not
        contribute in the last step.
    """

    def __init__(self, limit: int, replicas: Iterable[int], text: str = ""):
        self.limit = limit
        self.replicas: list[int] = [int(replica) for replica in replicas]
        self._text = text or _no_update("", limit)
        super().__init__(limit, self.replicas, self._text)

    def __str__(self) -> str:
        return self._text


def _no_update(owner: str, limit: int) -> str:
    begin = f"{owner}: no" if owner else "No"
    return f"{begin} update for more than max_steps_without_update={limit} steps."


def check_limit(limit: Any, least: int = 1, why: str = "") -> int | None:
    """Checks the argument max_steps_without_update, and returns it; None means no limit.

    `limit` is the argument. Raises ValueError if it is no whole number of 1 or more, or is less
    than `least`, the number of steps from one update to the next. In the latter case the error ends
    with `why`, a clause on what needs so many steps.
    """
    if limit is None:
        return None
    limit = check_whole_number("max_steps_without_update", limit)
    if limit < least:
        raise ValueError(f"max_steps_without_update must be {least} or more, got {limit!r}: {why}.")
    return limit


def waiting_state(mesh: mtf.Mesh, name: str, limit: int | None) -> mtf.Variable | None:
    """Makes the variable `<name>/waiting`, the counter of steps in a row without an update.

    `mesh` is the variable's mesh, and `name` is the wrapper's name. `limit` is
    max_steps_without_update. If it is None, nothing is made, and the result is None.
    """
    return named_state(mesh, f"{name}/waiting") if limit else None


def waiting_after_step(waiting: mtf.Variable, updated: mtf.Tensor) -> mtf.Tensor:
    """Returns the value that the counter `waiting` gets in a step, an int32 mtf scalar.

    `waiting` counts the steps since the last update. `updated` is an int32 mtf scalar: 1 if the
    step makes an update, which sets the counter to 0; else 0, which adds one to it.
    """
    return (waiting.value + 1) * (1 - on_mesh(updated, waiting.mesh))


def names_of_rows(axes: ReplicaAxes | None) -> list[str]:
    """Returns names for the rows of the matrix of flags that `Skips.report` records.

    The names are for `Skips.rows`. There is a row for each shard. Then there is a row for
    sums that are not finite although all of their terms are finite. The last row is for gradients
    of which it is not known whether each shard's own gradient is finite. If `axes`, the replica
    axes, are None, there is only the last row.
    """
    if axes is None:
        return [_OF_ONE]
    return [*(f"(shard {number})" for number in range(axes.num_shards)), _OF_SUM, _OF_ONE]


def not_finite_flags(
    given: GradientSet,
    sums: GradientSet,
    axes: ReplicaAxes | None,
    strategy: Strategy,
    of_shards_only: bool = True,
) -> list[mtf.Tensor]:
    """Returns flags for `Skips.report`: which gradients of which shards are not finite.

    Of clipped gradients the values before the clip are checked, because clipping turns one NaN into
    NaNs in all gradients.

    Args:
      given: gradients in any form. Each shard's gradient is checked, if it can be read from them.
      sums: the same gradients in the form in which the wrapper checks them.
      axes: the replica axes; None if they are not known.
      strategy: the reduction strategy for the flags.
      of_shards_only: whether a reduced gradient gets the flag -1 (not known) for all shards. If
        False, a reduced gradient counts as the gradient of each shard.

    Returns:
      A list of two tensors: `[shards..., gradients]` for `given`, and `[gradients]` for `sums`. If
      `axes` is None, the list has only the second tensor. A flag is greater than 0 if an entry of
      the gradient is not finite.
    """
    given, of_shards = given.unreduced or given, []
    if axes:
        of_shards.append(
            which_not_finite(given.present, axes, strategy, of_shards_only, shared=-1.0)
        )
    return [*of_shards, which_not_finite([unclipped(g) for g in sums.present], None, strategy)]


@dataclasses.dataclass(eq=False)
class Skips:
    """The log lines and the error of a wrapper that skips steps, in a step that is being built.

    On a skipped step a matrix of flags is recorded. It has a row for each shard and a column for
    each gradient; a flag is greater than 0 if this shard's gradient is not finite. (In DiLoCo a row
    is an island, and a column one of its variables, slots or the loss.) The messages name the
    gradients and shards with a flag greater than 0.

    Attributes:
      owner: the wrapper's name.
      names: the names of the matrix's columns: those of the variables.
      rows: the names of the matrix's rows, such as "(shard 0)". The first rows are the shards or
        islands, in order.
      line: the text that a log line has between the wrapper's name and the names of gradients that
        are not finite.
      none: the text that a log line has in the place of the names if no flag is greater than 0.
      last: the beginning of the error's sentence about the last skipped step; names of gradients
        follow it.
      only_rows: whether a log line has the numbers of the rows that have a flag greater than 0, in
        place of names of gradients.
      counts: a list of one variable that counts skipped steps: a scalar, or a count for each shard
        or island. () if no line is to be logged.
      waiting: variables that count the steps in a row without an update: a list of one variable
        with this number, or of two variables whose difference (the first minus the second) is this
        number. () if nothing counts these steps, or there is no limit.
      limit: max_steps_without_update, or None.
      scales: a list of the variable of the loss scale; () without a loss scale that changes.
      lowest_scale: the smallest value of the scale. Messages mention it if the scale has it.
      missed: a list of a variable with the number of steps in a row that each replica has missed.
        The error then lists the replicas that missed the last step. () for no such list.
      watched: the operation that checks the limit at the end of the step; None before `end_of_step`
        makes it.
    """

    owner: str
    names: Sequence[str]
    rows: Sequence[str]
    line: str = ""
    none: str = ""
    last: str = "Not finite in the last step that was skipped:"
    only_rows: bool = False
    counts: Sequence[mtf.Variable] = ()
    waiting: Sequence[mtf.Variable] = ()
    limit: int | None = None
    scales: Sequence[mtf.Variable] = ()
    lowest_scale: float = 0.0
    missed: Sequence[mtf.Variable] = ()
    watched: Watched | None = None

    def __post_init__(self) -> None:
        self.mesh = next(v.mesh for v in (*self.counts, *self.waiting))
        self.waiting = self.waiting if self.limit else ()
        dims = [mtf.Dimension("rows", len(self.rows)), mtf.Dimension("of", len(self.names))]
        shape = mtf.anonymous_shape(mtf.Shape(dims))
        self.record = named_state(
            self.mesh, f"{self.owner}/not_finite", shape, tf.float32, checkpointed=False
        )

    def report(
        self, found: Sequence[mtf.Tensor], now: Sequence[mtf.Tensor] = ()
    ) -> list[mtf.Operation]:
        """Makes the operation that records flags and, on placement meshes, prints a log line.

        The result is a list of this operation. The caller has to put it into a branch that only
        skipped steps run.

        Args:
          found: one or two tensors of flags, the same on all processors. The first has the shape
            `[shards..., gradients]`. A flag is greater than 0 if the shard's gradient is not
            finite, and less than 0 if that is not known. The second, `[gradients]`, has the flags
            of sums over the shards. They are recorded in two more rows below those of the shards:
            one for sums that are not finite although each shard's gradient is finite, and one for
            sums for which the flags of shards are not known. If there is a single tensor, it may
            also be `[gradients]`, one row.
          now: the value that the variable in `counts` has after the step, and that of the loss
            scale if there is one. Empty if no line is to be logged.
        """
        found, now = ([on_mesh(x, self.mesh) for x in some] for some in (found, now))
        return [_RecordFlags(self, found, now)]

    def end_of_step(self, operations: Sequence[mtf.Operation]) -> list[mtf.Operation]:
        """Makes the operation that checks the limit at the end of a step; returns a list of it.

        The operation reads the counters after `operations`, which are all other operations of the
        step.
        """
        self.watched = _CheckLimit(self, operations)
        return [self.watched]

    # Texts, as operations of TensorFlow; `_run_on_host` runs them if the step cannot.

    def log_line(self, now: tf.Tensor, found: tf.Tensor, scale: Any) -> tf.Tensor:
        """Returns the line that the log gets on a skipped step, a tf string.

        The line names the gradients that were not finite, and says how many steps were skipped.

        Args:
          now: the number of steps skipped so far, this step included: a scalar, or a number for
            each shard or island, of which the largest is shown.
          found: the flags that `report` has recorded: a row for each shard, and a column for each
            gradient. A flag is greater than 0 if the gradient is not finite.
          scale: the value of the loss scale after the step; None without a scale.
        """
        if self.only_rows:
            named = _joined(_rows(tf.reduce_max(found, 1)))
        else:
            named = self._names_of_marked(found)
            named = tf.where_v2(tf.equal(named, ""), self.none, named)
        total = tf.reduce_max(now)
        parts = [f"{self.owner}: {self.line} ", named, "."]
        next_line = "; the next line is at twice as many."
        ends = tf.where_v2(tf.equal(tf.bitwise.bitwise_and(total, total - 1), 0), next_line, ".")
        so_far = tf.strings.join([" ", tf.as_string(total), " skipped so far", ends])
        parts.append(tf.where_v2(total > 1, so_far, ""))
        return tf.strings.join([*parts, *self._smallest_scale_note(scale)])

    def error_text(self, found: tf.Tensor, scale: Any, missed: tf.Tensor | None) -> tf.Tensor:
        """Returns the text of a `NoUpdateError`, a tf string.

        Args:
          found: the flags that `report` recorded in the last skipped step: a row for each shard,
            and a column for each gradient. A flag is greater than 0 if the gradient is not finite.
          scale: the value of the loss scale after the step; None without a scale.
          missed: for each replica the number of steps in a row that it has missed; None if the
            error lists no replicas.
        """
        assert self.limit is not None  # or there would be no error
        named = self._names_of_marked(found)
        sentence = tf.strings.join([f" {self.last} ", named, "."])
        parts = [_no_update(self.owner, self.limit)]
        parts.append(tf.where_v2(tf.equal(named, ""), "", sentence))
        parts += self._smallest_scale_note(scale)
        if missed is not None:
            text = " These replicas (shards, row by row) did not contribute in the last step: ["
            parts += [text, _joined(_rows(tf.reshape(missed, [-1]))), "]."]
        return tf.strings.join(parts)

    def _smallest_scale_note(self, scale: Any) -> list[tf.Tensor]:
        """Returns a sentence for messages if the loss scale is at its smallest value, in a list.

        `scale` is the value of the scale. The sentence is a tf string, which is "" if the value is
        greater than the smallest one. The list is empty without a loss scale.
        """
        if not self.scales:
            return []
        text = f" The scale cannot go below min_scale={self.lowest_scale:g}, where it is now."
        return [tf.where_v2(scale <= self.lowest_scale, text, "")]

    def _names_of_marked(self, found: tf.Tensor) -> tf.Tensor:
        """Returns text that names the gradients and shards whose flag is greater than 0.

        `found` has the flags, a row for each shard and a column for each gradient. The text is a tf
        string such as "w (shard 0), w (shard 3)": at most 8 names, and the number of further ones.
        It is "" if no flag is greater than 0.
        """
        where = tf.where_v2(found > 0)
        some, more = where[:_MOST_NAMED], tf.shape(where)[0] - _MOST_NAMED
        names, rows = list(self.names), list(self.rows)
        lines = tf.strings.join(
            [tf.gather(names, some[:, 1]), tf.gather(rows, some[:, 0])], separator=" "
        )
        rest = tf.where_v2(more > 0, tf.strings.format(" and {} more", more), "")
        return tf.strings.join([_joined(lines), rest])


def _run_on_host(make: Callable[..., tf.Tensor], *values: Any) -> str:
    """Runs a function that makes a tf string on the host, and returns the string.

    `make` is the function. It gets a tf constant for each of `values` (numbers or arrays), and None
    for each that is None.
    """
    with tf.Graph().as_default():
        text = make(*(x if x is None else tf.constant(x) for x in values))
        with tf.Session(config=tf.ConfigProto(device_count={"GPU": 0})) as session:
            return session.run(text).decode()


def _passes_a_power_of_two(before: Any, now: Any, bits: Any) -> Any:
    # The highest bit of the later count is no bit of the earlier one.
    xor = bits.bitwise_xor if bits is np else bits.bitwise.bitwise_xor
    return xor(before, now) > before


def _rows(flags: tf.Tensor) -> tf.Tensor:
    return tf.as_string(tf.reshape(tf.where_v2(flags > 0), [-1]))


def _joined(strings: tf.Tensor) -> tf.Tensor:
    return tf.strings.reduce_join(strings, separator=", ")


class _RecordFlags(mtf.Operation):
    """The operation that records flags of a skipped step, and on placement meshes prints a line."""

    def __init__(self, skips: Skips, found: Sequence[mtf.Tensor], now: Sequence[mtf.Tensor]):
        super().__init__([*found, *now], name="report_skipped")
        self._skips, self._num_found = skips, len(found)

    def lower(self, lowering: mtf.Lowering) -> None:
        skips = self._skips
        laid_out = [lowering.tensors[x].to_laid_out_tensor() for x in self.inputs]
        found, now = laid_out[: self._num_found], laid_out[self._num_found :]
        count = len(skips.names)

        def together(*found: tf.Tensor) -> tf.Tensor:
            rows, *of_sums = (tf.reshape(x, [-1, count]) for x in found)
            for total in of_sums:
                # Sums only if no shard's gradient explains them.
                known = tf.reduce_min(rows, 0, keepdims=True) >= 0
                explained = tf.reduce_max(rows, 0, keepdims=True) > 0
                total = tf.where_v2(explained, 0.0, total)
                each = tf.where_v2(known, total, 0.0), tf.where_v2(known, 0.0, total)
                rows = tf.concat([rows, *each], 0)
            return rows

        flags = lowering.mesh_impl(self).slicewise(together, *found).to_laid_out_tensor()
        record = lowering.variables[skips.record]
        done = [record.assign_to_slices(lambda _, x, new: tf.assign(x, new), flags.all_slices)]
        if skips.counts and not is_simd(lowering.mesh_impl(self)):
            variables = [*skips.counts, *skips.scales]
            before = [lowering.tensors[v.value].to_laid_out_tensor() for v in variables]
            first = [[x.all_slices[0] for x in some] for some in (before, now)]
            done.append(self._print(flags.all_slices[0], *first))
        lowering.operations[self] = tf.group(*done)

    def _print(
        self, found: tf.Tensor, values_before: list[tf.Tensor], values_now: list[tf.Tensor]
    ) -> tf.Operation:
        (before, *scale_before), (now, *scale) = values_before, values_now
        due = tf.reduce_any(_passes_a_power_of_two(before, now, tf))
        if scale:
            lowest = self._skips.lowest_scale
            due = tf.logical_or(due, tf.logical_and(scale_before[0] > lowest, scale[0] <= lowest))

        def print_line() -> tf.Operation:
            line = self._skips.log_line(now, found, scale[0] if scale else None)
            return tf.print(line, output_stream=sys.stderr)

        with control_flow_v1():
            return tf.cond(due, lambda: tf.group(print_line()), tf.no_op)


class _CheckLimit(Watched):
    """The operation that raises `NoUpdateError` after too many steps without an update.

    On a placement mesh this operation makes the step fail, after all of the step's writes; lines of
    the log are printed by another operation (`_RecordFlags`). In SIMD programs a session or a hook
    raises the error and logs the lines.
    """

    def __init__(self, skips: Skips, step: Sequence[mtf.Operation]):
        # Their values show whether a step has something to report.
        variables = [*skips.counts, *skips.waiting, *skips.scales]
        before = [v.value for v in variables]
        now = [mtf.anonymize(x) for x in values_after(variables, step)]
        records = [skips.record, *skips.scales, *skips.missed]
        super().__init__(before, now, variables, records, "max_steps_without_update")
        self._skips, self._step = skips, list(step)

    def lower(self, lowering: mtf.Lowering) -> None:
        self.note_lowering(lowering)
        limit = self._skips.limit
        if self.needs_hook or limit is None:
            lowering.operations[self] = tf.no_op()
            return
        steps = self._steps_without(self.counts_after_step(lowering))
        records = self.slices_of_records(lowering)

        def fail() -> tf.Operation:
            unpacked = self._unpack_records([tf.convert_to_tensor(x) for x in records])
            text = self._skips.error_text(*unpacked)
            return tf.raw_ops.Assert(condition=False, data=[text])

        # A step fails after all of its writes, so that accumulators and counts agree.
        with tf.control_dependencies([lowering.operations[op] for op in self._step]):
            with control_flow_v1():
                done = tf.cond(tf.less_equal(steps, limit), tf.no_op, lambda: tf.group(fail()))
        lowering.operations[self] = done.op

    def _unpack_records(self, records: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Splits `records` into the values of three variables: flags, loss scale, missed steps.

        The flags say why the last skipped step was skipped. The missed steps are, for each replica,
        the number of steps in a row that it has missed.

        Args:
          records: the values of these three variables, in this order, as slices or as arrays from a
            session. The loss scale is left out if the wrapper has none, and the missed steps are if
            the wrapper does not count them.

        Returns:
          Three values: the flags, the loss scale, and the missed steps. A value that `records`
          does not have is None.
        """
        skips, (found, *more) = self._skips, records
        scale = more[0] if skips.scales else None
        return found, scale, more[-1] if skips.missed else None

    def _steps_without(self, now: Sequence[Any]) -> Any:
        skips = self._skips
        first, *second = now[len(skips.counts) : len(skips.counts) + len(skips.waiting)]
        return first - second[0] if second else first

    def _is_over(self, now: Sequence[Any]) -> bool:
        limit = self._skips.limit
        return limit is not None and bool(self._steps_without(now) > limit)

    def _is_logged(self, before: Sequence[Any] | None, now: Sequence[Any]) -> bool:
        """Returns whether a step is to be logged: not every skipped step is.

        A step is logged in which a count of skipped steps reached or passed a power of two, or the
        loss scale reached its smallest value. `before` and `now` are the values of the watched
        variables before the step and after it. If `before` is None (not known), the result
        is false.
        """
        skips = self._skips
        if before is None:
            return False
        if skips.scales and before[-1] > skips.lowest_scale >= now[-1]:
            return True
        return bool(skips.counts) and bool(np.any(_passes_a_power_of_two(before[0], now[0], np)))

    def is_due(self, before: Sequence[Any] | None, now: Sequence[Any]) -> bool:
        return self._is_over(now) or self._is_logged(before, now)

    def find(
        self, before: Sequence[Any] | None, now: Sequence[Any], records: Sequence[Any]
    ) -> list[Any]:
        skips, (found, scale, missed) = self._skips, self._unpack_records(records)
        messages: list[Any] = []
        if self._is_logged(before, now):
            messages.append(_run_on_host(skips.log_line, now[0], found, scale))
        if skips.limit is not None and self._is_over(now):
            # Rows of shards or islands with a flag, or the replicas that missed.
            rows = skips.rows
            flags = np.asarray(found).max(1) if missed is None else np.reshape(missed, -1)
            flagged = np.flatnonzero(flags > 0)
            replicas = [row for row in flagged if rows[row] not in (_OF_SUM, _OF_ONE)]
            text = _run_on_host(skips.error_text, found, scale, missed)
            messages.append(NoUpdateError(skips.limit, replicas, text))
        return messages


class ReportsSkips(Wrapper):
    """A wrapper that skips some steps, and logs them: in the step, by the session, or by a hook.

    Attributes:
      state: the wrapper's mesh variables, a NamedTuple, in which a variable that is not needed is
        None. The attribute is None before gradients were applied.
    """

    state = StepAttribute[Any](None)
    _now = StepAttribute[Any](None)  # the values of `state` after a step
    _skips = StepAttribute[Union[Skips, None]](None)

    def variables(self) -> list[mtf.Variable]:
        """Returns all variables of the stack: the inner optimizer's, then the wrapper's."""
        return super().variables() + [v for v in self.state or () if v is not None]

    def _set_step_attributes(self, state: Any, now: Any, skips: Skips | None) -> None:
        """Sets this wrapper's attributes that describe a step, once the step is built.

        `state` are the wrapper's mesh variables, `now` are their values after the step (None if
        they are not known), and `skips` has the messages of the step (None if it skips nothing).
        """
        self.state, self._now, self._skips = state, now, skips

    @property
    def skip_report(self) -> Watched | None:
        """The operation by which sessions find what to log; None before gradients were applied."""
        return self._skips.watched if self._skips else None

    @property
    def steps_without_update(self) -> Watched | None:
        """The operation that raises `NoUpdateError` after too many steps without an update.

        `max_steps_without_update` of the wrapper says how many are too many. The operation is None
        if the wrapper was given no such limit, or before gradients were applied.
        """
        return self._skips.watched if self._skips and self._skips.limit else None

    def make_session_run_hook(self) -> WatchHook:
        """Returns a session hook that logs skipped steps and raises `NoUpdateError`, for TPUs.

        On other devices than TPUs the hook does nothing. On placement meshes the step itself prints
        the log line and fails. With CPU replicas and XLA devices the session logs the line and
        raises the error. The hook's `begin` raises ValueError if no gradients were applied before.
        """

        def skip_report() -> Watched | None:
            self._check_applied("its hook is used")
            return self.skip_report

        return WatchHook(skip_report)
