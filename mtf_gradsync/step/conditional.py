"""Conditional work of a step: branches that some steps skip, and findings that are reported.

A `Conditional` runs the operations of a `Branch` on some steps; `values_after` reads variables
after the branch, whether it was run or skipped.

A watched operation (`Watched`) reports what it finds at the end of a step, such as a warning or an
error. A TPU program can neither fail nor print, and TensorFlow's errors can only be recognised by
their text. So a watched operation keeps its findings in variables. The sessions of this package
read these variables after each step (`SkipWatches`); other sessions need a hook (`WatchHook`).
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any, Callable, ContextManager, Iterator, Sequence

import numpy as np

from mtf_gradsync._common import map_by_key, some_of, warn_once
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import set_operation_outputs
from mtf_gradsync._private.tensorflow import control_flow_v1, replace_capture, set_attr
from mtf_gradsync.mesh.axes import is_simd
from mtf_gradsync.mesh.devices import check_writers, process_of, writing_shared_slices
from mtf_gradsync.step.plan import StepPlan, unstack_operations

if TYPE_CHECKING:
    from mtf_gradsync.step.writes import Gate


_logger = logging.getLogger("mtf_gradsync")
_NOT_INLINED = {"_noinline": True}


def can_call(lowering: mtf.Lowering) -> bool:
    """Returns whether branches of a lowering can be built as one call of a tf function each.

    A branch cannot be a call of a tf function in four cases: on SIMD meshes (a TPU program has no
    such calls), on meshes over several processes, with ref variables, and with TensorFlow 2.12,
    which inlines every function. In these cases the branch's operations are part of the graph
    itself. Steps that skip the branch are then slower than with a call.
    """
    processes = set()
    for mesh_impl in lowering.mesh_to_impl.values():
        for device in getattr(mesh_impl, "devices", None) or [None]:
            if not isinstance(device, str):  # a SIMD mesh, or devices chosen by a function
                return False
            processes.add(process_of(device))
    if len(processes) != 1 or not _takes_attributes():
        return False
    return not any(
        x.dtype != x.dtype.base_dtype
        for variable in lowering.variables.values()
        for x in variable.laid_out_tensor.all_slices
    )


def _takes_attributes() -> bool:
    try:
        tf.function(lambda: None, experimental_attributes=_NOT_INLINED)
    except (TypeError, ValueError):
        return False
    return True


def run_as_call(run: Callable[[], tf.Operation]) -> tf.Operation:
    """Builds a branch as one call of a tf function, and returns the operation that makes the call.

    `run` is called inside of the tf function. It makes the branch's operations, and returns an
    operation that waits for all of them.
    """

    def body() -> tf.Tensor:
        _copy_handles_and_constants(tf.get_default_graph())
        with tf.control_dependencies([run()]):
            return tf.constant(True)

    call = tf.function(body, autograph=False, experimental_attributes=_NOT_INLINED)().op
    # The session has optimized the function before it is called; a second time would take start-up
    # time, and regroup sums by options of its own.
    options = tf.ConfigProto()
    options.graph_options.rewrite_options.disable_meta_optimizer = True
    set_attr(call, "config_proto", tf.AttrValue(s=options.SerializeToString()))
    return call


def _copy_handles_and_constants(graph: tf.Graph) -> None:
    """Makes a function's graph copy variable handles and constants instead of capturing them."""
    copies: dict[tf.Operation, tf.Tensor] = {}

    def copy(tensor: tf.Tensor) -> tf.Tensor | None:
        op = tensor.op
        # A handle without a shared name is identified by the name of its operation.
        is_shared = op.type == "VarHandleOp" and bool(op.get_attr("shared_name"))
        if op.type != "Const" and not is_shared:
            return None
        if op not in copies:
            with tf.control_dependencies(None), tf.device(op.device):
                copies[op] = graph.create_op(
                    op.type,
                    [],
                    [x.dtype for x in op.outputs],
                    name=op.name,
                    attrs={k: v for k, v in op.node_def.attr.items() if not k.startswith("_")},
                ).outputs[0]
        return copies[op]

    replace_capture(graph, copy)


class Branch:
    """A set of operations that a `Conditional` runs on some steps only.

    The operations of a branch are those that are made inside of the context `opened()`.

    Attributes:
      plan: the plan of the graph.
      updates: the operations of the branch that operations outside of it may wait for.
    """

    def __init__(self, plan: StepPlan):
        self.plan = plan
        self.updates: list[mtf.Operation] = []

    def opened(self) -> ContextManager[None]:
        """Returns a context; mtf operations made inside belong to the branch, except variables.

        The graph must not have been lowered yet.
        """
        return self.plan.adding_to_branch(self)


class Conditional(mtf.Operation):
    """An operation that runs a branch on the steps on which a predicate is true.

    The predicate must have the same value on all processors. Operations outside of the branch may
    wait for those of its operations that are in `updates`. They all have the same lowered value,
    the tf operation of the conditional, so that whoever waits for one waits for the whole branch.
    """

    def __init__(
        self,
        predicate: mtf.Tensor,
        gate: Gate | None,
        branch: Branch,
        wait_for: Sequence[mtf.Operation],
        as_call: bool = True,
    ):
        """Adds the conditional.

        Args:
          predicate: a bool mtf scalar, the same on all processors; if true, the branch runs.
          gate: the gate that the conditional waits for, which is reached when all gradients exist
            and all variables are read. `gate` is None inside another branch.
          branch: the branch, whose operations have been made.
          wait_for: mtf operations that the conditional also waits for.
          as_call: whether the branch becomes one call of a function, if `can_call` is true, so that
            skipping it is cheap. The arguments of the call cost time on every step: a branch that
            takes all gradients and runs on most steps is faster without a call.
        """
        super().__init__([predicate], name="conditional")
        self._gate = gate
        self._branch = branch
        self._wait_for = list(wait_for)
        self._as_call = as_call

    @property
    def updates(self) -> list[mtf.Operation]:
        """The operations of the branch that operations outside of it may wait for."""
        return self._branch.updates

    def lower(self, lowering: mtf.Lowering) -> None:
        plan = self._branch.plan
        predicate = lowering.tensors[self.inputs[0]].to_laid_out_tensor().tensor_list[0]
        in_call = self._as_call and can_call(lowering)
        graph = tf.get_default_graph()

        def run() -> tf.Operation:
            with contextlib.ExitStack() as stack:
                stack.enter_context(plan.inside_branch(self._branch, lowering))
                stack.enter_context(_no_summaries())
                if in_call:
                    stack.enter_context(_read_variables_inside(lowering, self.updates))
                plan.lower_branch(self._branch, lowering)
                if tf.get_default_graph() is not graph:
                    check_writers(lowering.variables.values())
            return tf.group(*[lowering.operations[op] for op in self.updates])

        before = set(lowering.operations)
        waited_for = [lowering.operations[op] for op in self._wait_for]
        if self._gate is not None:
            waited_for.append(self._gate.barrier(lowering))
        with tf.control_dependencies(waited_for), control_flow_v1(), writing_shared_slices(
            only_calls=True
        ):
            done = tf.cond(predicate, lambda: run_as_call(run) if in_call else run(), tf.no_op)
        # This includes operations of inner branches, which nothing outside can wait for either.
        for op in [*lowering.operations]:
            if op not in before:
                lowering.operations[op] = done.op


@contextlib.contextmanager
def _read_variables_inside(
    lowering: mtf.Lowering, updates: Sequence[mtf.Operation]
) -> Iterator[None]:
    """Returns a context for building a branch as a function that reads variables itself.

    The function reads the variables that `updates`, the operations of the branch, assign. If it did
    not, the variables' values would be arguments of its call. An argument from another device costs
    a transfer even when the call is skipped. Reading the variables only in the function is safe,
    because nothing else writes them in the same step.
    """
    before = dict(lowering.tensors)
    assigned = dict.fromkeys(
        v for op in updates if isinstance(op, mtf.Assign) for v in op.variables
    )
    for variable in assigned:
        lowered = lowering.variables[variable].laid_out_tensor
        mesh_impl = lowering.mesh_impl(variable)
        dtype = variable.activation_dtype
        lowering.tensors[variable.value] = mesh_impl.slicewise(
            lambda x, dtype=dtype: tf.cast(tf.convert_to_tensor(x), dtype), lowered
        )
    for op in unstack_operations(lowering.graph):
        if op.inputs[0].operation in assigned:
            op.lower_itself(lowering)
    yield
    lowering.tensors.clear()
    lowering.tensors.update(before)


@contextlib.contextmanager
def _no_summaries() -> Iterator[None]:
    """Returns a context; scalar summaries made inside are removed at its end, with a warning.

    Summaries that are made in a branch have no value on steps that skip the branch, so that they
    cannot be written.
    """
    summaries = tf.get_collection_ref(mtf.utils.SCALAR_SUMMARIES_COLLECTION_KEY)
    before = len(summaries)
    yield
    if summaries[before:]:
        warn_once(
            "summaries in a branch",
            "The scalar summaries %s are not written, because they are made by an update that some "
            "steps skip. Make them outside of the optimizer.",
            some_of([name for name, _ in summaries[before:]]),
        )
        del summaries[before:]


class ValuesAfter(mtf.Operation):
    """Reads of variables after given operations have run, or their branch was skipped.

    The attribute `reads` is the list of these variables, which are all of one mesh.
    """

    def __init__(self, variables: Sequence[mtf.Variable], writes: Sequence[mtf.Operation]):
        super().__init__([], mesh=variables[0].mesh, name="values_after")
        set_operation_outputs(
            self,
            [
                mtf.Tensor(self, v.shape, v.slice_dtype, index=index)
                for index, v in enumerate(variables)
            ],
        )
        self.reads, self._writes = list(variables), list(writes)

    def lower(self, lowering: mtf.Lowering) -> None:
        # An operation of a branch is lowered to the whole conditional.
        with tf.control_dependencies([lowering.operations[op] for op in self._writes]):
            for variable, output in zip(self.reads, self.outputs):
                lowering.set_tensor_lowering(output, _current_value(variable, lowering))


def _current_value(variable: mtf.Variable, lowering: mtf.Lowering) -> Any:
    """Reads a variable's slices at this point of the lowering, and returns a `LaidOutTensor`.

    If Mesh-TF's autostack has stacked the variable, the slices are read from the stacked variable.
    """
    number = None
    holder = variable
    if variable not in lowering.variables:
        holder = next(
            v
            for v in lowering.variables
            if isinstance(v, mtf.StackedVariable)
            and v.mesh is variable.mesh
            and variable.name in v.original_names
        )
        number = holder.original_names.index(variable.name)

    def read(x: Any) -> tf.Tensor:
        return tf.convert_to_tensor(x) if number is None else tf.convert_to_tensor(x)[number]

    slices = lowering.variables[holder].laid_out_tensor
    return lowering.mesh_impl(variable).slicewise(read, slices)


def values_after(
    variables: Sequence[mtf.Variable], writes: Sequence[mtf.Operation]
) -> Sequence[mtf.Tensor]:
    """Returns the values that variables have after the operations `writes`.

    Returns an mtf tensor for each variable, of the variable's shape and of the dtype of its slices.
    On a step that skips the branch of the operations `writes`, these operations do not write, and
    the variables are read all the same. The operations have to be lowered before the returned
    tensors.
    """

    def of_one_mesh(_: Any, some: list[int]) -> Sequence[mtf.Tensor]:
        return ValuesAfter([variables[i] for i in some], writes).outputs

    return map_by_key([v.mesh for v in variables], of_one_mesh)


# Findings that are reported after a step.

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
        """Returns tf tensors with the counts after the step, in the order of `counts`."""
        return self._lowered(lowering, self.inputs[len(self._counts) :])

    def slices_of_records(self, lowering: mtf.Lowering) -> list[Any]:
        """Returns one of the (equal) slices of each variable in `records`, as a tf variable."""
        return _slices(lowering, self._records)

    def note_lowering(self, lowering: mtf.Lowering) -> None:
        """Records that this operation was lowered; a subclass's `lower` calls it."""
        self._slices.append((_slices(lowering, self._counts), self.slices_of_records(lowering)))
        self.needs_hook = is_simd(lowering.mesh_impl(self))
        if self.needs_hook and self.counts_are_readable:
            values = self._lowered(lowering, self.inputs)
            bits = [x if x.dtype == tf.int32 else tf.bitcast(x, tf.int32) for x in values]
            record = tf.concat([tf.reshape(x, [-1]) for x in bits], 0)
            tf.add_to_collection(WATCHED, (self, record.name))

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
        messages = [
            one
            for old, (now, records) in zip(before, read)
            if self._watched.is_due(old, now)
            for one in self._watched.find(old, now, records)
        ]
        return next(iter(sorted(messages, key=lambda one: not isinstance(one, Exception))), None)


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
        """Raises the error or logs the line that the watched operation has found, if any.

        TensorFlow's sessions call this method of a `tf.train.SessionRunHook` after each run.
        """
        del run_values
        found = self._watch.read_report(run_context.session) if self._watch else None
        if isinstance(found, Exception):
            raise found
        if found:
            _logger.warning("%s", found)
