"""Writes of variables: how slices are written, what writes wait for, and in which order."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterator, Mapping, Sequence

from mtf_gradsync._common import counted, grouped, walk, warn_once
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import reassign, set_assign_fn
from mtf_gradsync.mesh.axes import is_simd
from mtf_gradsync.mesh.devices import check_writers, writers_of, writing_shared_slices
from mtf_gradsync.step.plan import (
    ControlInputs,
    ExtensionLowering,
    PlanExtension,
    StepPlan,
    resolve_stand_ins,
)


class Gate:
    """A point of a step that writes wait for.

    The gate is reached when the tensors that it was made with have been computed, and all variables
    on the meshes of these tensors have been read.
    """

    def __init__(self, plan: StepPlan, tensors: Sequence[mtf.Tensor]):
        self._plan = plan
        self._tensors = list(tensors)

    def hold(self, operations: Sequence[mtf.Operation]) -> None:
        """Makes mtf operations run only after the gate is reached; they must not be lowered yet."""
        self._plan.wait(operations, lambda lowering: [self.barrier(lowering)])

    def barrier(self, lowering: mtf.Lowering) -> tf.Operation:
        """Returns a tf operation that runs when the gate is reached; call it outside branches."""
        barriers = self._plan.lowering_state(lowering).barriers
        if self not in barriers:
            barriers[self] = self._make(lowering)
        return barriers[self]

    def _make(self, lowering: mtf.Lowering) -> tf.Operation:
        _warn_of_ref_variables(lowering)
        lowered = self._plan.lowering_state(lowering)
        meshes = dict.fromkeys(t.mesh for t in self._tensors)
        tensors = [*self._tensors, *(t for m in meshes for t in lowered.reads.get(m, ()))]
        laid_out = [lowering.tensors[t].to_laid_out_tensor() for t in tensors]
        slices = [x for one in laid_out for x in one.tensor_list]
        # One operation on each device first, so that there are few edges between devices.
        made_by = list(dict.fromkeys(x.op for x in slices))
        by_device = grouped(made_by, [op.device for op in made_by])
        with lowered.name_scope("gate"):
            reached = []
            for device, ops in by_device.items():
                with tf.device(device):
                    reached.append(tf.group(*ops))
            with tf.device(next(iter(by_device), "")):
                return tf.group(*reached)


def gated_update(
    make_update: Callable[[], Sequence[mtf.Operation]], grads: Sequence[Any]
) -> list[mtf.Operation]:
    """Builds an update that writes only when all gradients exist and all variables are read.

    `make_update` makes the mtf operations of the update and returns those that write. It may create
    variables (slots). The writing operations are returned. They wait for the gradients `grads`, and
    for the reads of all variables. Inside another gated update, or inside a branch, they need not
    wait themselves, because the other update or the branch waits. If all gradients are None, the
    writing operations wait for nothing.
    """
    present = [g for g in grads if g is not None]
    if not present:
        return list(make_update())
    plan = StepPlan.of(present[0].graph)
    if plan.needs_no_gate:
        return list(make_update())
    with plan.gating():
        operations = list(make_update())
    Gate(plan, present).hold(operations)
    return operations


class WriteInPlace(mtf.Operation):
    """A write of variables in which each processor's slice gets that processor's slice of a value.

    The operation is for writes that Mesh-TensorFlow's own assignments cannot make.
    """

    def __init__(
        self,
        variables: Sequence[mtf.Variable],
        values: Sequence[mtf.Tensor],
        write: Callable[..., Any],
        name: str,
        scalars: Sequence[mtf.Tensor] = (),
    ):
        """Adds the operation.

        Args:
          variables: the variables to write.
          values: a tensor for each variable, which the layout splits as it splits the variable.
          write: a function that is called with a tf variable (a processor's slice of a variable),
            the processor's slice of the value, and the values of all `scalars`. It returns the tf
            operation that writes the slice.
          name: name of the operation.
          scalars: mtf scalars.
        """
        super().__init__([*values, *scalars], name=name)
        self.variables, self._write = list(variables), write

    def lower(self, lowering: mtf.Lowering) -> None:

        def write(variable: Any, slice_variable: Any, given: tuple[tf.Tensor, ...]) -> Any:
            return self._write(slice_variable, *given)

        slices = [lowering.tensors[x].to_laid_out_tensor().all_slices for x in self.inputs]
        scalars = slices[len(self.variables) :]
        writes = [
            lowering.variables[variable].assign_to_slices(write, list(zip(value, *scalars)))
            for variable, value in zip(self.variables, slices)
        ]
        lowering.operations[self] = tf.group(*writes)


def write_slices(
    lowering: mtf.Lowering,
    variables: Sequence[mtf.Variable],
    write: Callable[[list[int], list[Any], list[Any]], Sequence[tf.Tensor]],
    values: Sequence[Any],
) -> list[Any]:
    """Writes the slices of several variables, all slices of a processor by one call of a function.

    Args:
      lowering: the lowering.
      variables: variables of one mesh.
      write: a function that is called once for each processor that writes slices (of the processors
        that share a slice, one writes the slice). Its arguments are the positions of the variables
        whose slices the processor writes, these slices, and the processor's item of each of
        `values`. The function returns a tensor for each of the slices.
      values: lists with one item for each processor.

    Returns:
      For each variable a `LaidOutTensor` of the tensors that `write` returned. Processors that
      share a slice have the tensor of the processor that wrote the slice.
    """
    mesh_impl = lowering.mesh_impl(variables[0])
    laid_out = [lowering.variables[v] for v in variables]
    slices = [x.laid_out_tensor.all_slices for x in laid_out]
    writers = [writers_of(x) for x in laid_out]
    count = len(slices[0])
    results: list[list[Any]] = [[None] * count for _ in variables]
    for processor in range(count):
        own = [i for i, of in enumerate(writers) if of[processor] == processor]
        if own:
            device = "" if is_simd(mesh_impl) else mesh_impl.devices[processor]
            with tf.device(device), tf.name_scope(f"write_{processor}"), writing_shared_slices():
                given = [x[processor] for x in values]
                made = write(own, [slices[i][processor] for i in own], given)
            for i, result in zip(own, made):
                results[i][processor] = result
    return [
        mesh_impl.LaidOutTensor([result[writer] for writer in of])
        for result, of in zip(results, writers)
    ]


# If two assignments of these kinds write a variable, their order does not matter, provided that
# each adds atomically. Mesh-TF's own functions (0.1.21) do not: they read, add and assign.
_COMMUTING = {mtf.assign_add_slice: tf.assign_add, mtf.assign_sub_slice: tf.assign_sub}


class WriteOrder(PlanExtension):
    """A graph's record of the order of operations that write the same variable.

    If two writes of a variable have no order, a warning is logged.
    """

    def __init__(self) -> None:
        self._after: Mapping[mtf.Operation, tuple[mtf.Operation, ...]] = {}
        self._step_of: Mapping[mtf.Operation, object] = {}

    def put_after(self, operation: mtf.Operation, before: Sequence[mtf.Operation]) -> None:
        """Makes an operation run after the operations `before`.

        Whenever a step runs `operation`, it runs the operations `before`, too. The operations
        `before` have to be lowered before `operation` is lowered.
        """
        self._after = {**self._after, operation: (*self._after.get(operation, ()), *before)}

    def declare_one_update(self, operations: Sequence[mtf.Operation]) -> None:
        """Declares that operations belong to one update, which orders their writes itself."""
        self._step_of = {**self._step_of, **dict.fromkeys(operations, object())}

    def begin(self, lowering: mtf.Lowering) -> ExtensionLowering | None:
        writers: dict[mtf.Variable, list[mtf.Assign]] = {}
        for operation in lowering.graph.operations:
            if isinstance(operation, mtf.Assign) and not is_simd(lowering.mesh_impl(operation)):
                for variable in operation.variables:
                    writers.setdefault(variable, []).append(operation)
        contested = {
            variable: some
            for variable, some in writers.items()
            if len({self._step_of.get(op, op) for op in some}) > 1
        }
        if not contested and not self._after:
            return None
        made = _WriteOrderLowering(lowering, contested) if contested else ExtensionLowering()
        made.waits = {op: functools.partial(_lowered, ops) for op, ops in self._after.items()}
        return made


class _WriteOrderLowering(ExtensionLowering):
    def __init__(
        self,
        lowering: mtf.Lowering,
        contested: Mapping[mtf.Variable, Sequence[mtf.Assign]],
    ):
        """Takes part in one lowering of the graph: orders the writes of contested variables.

        `lowering` is Mesh-TF's lowering. `contested` has the variables that several updates write,
        each with all operations that write it.
        """
        self._lowering, self._contested = lowering, contested
        self._commuting = {
            op for some in contested.values() for op in some if op.assign_fn in _COMMUTING
        }

    def lower(self, operation: mtf.Operation) -> bool:
        if operation not in self._commuting:
            return False
        assign_fn = operation.assign_fn
        set_assign_fn(operation, functools.partial(_write_at_once, _COMMUTING[assign_fn]))
        operation.lower_itself(self._lowering)
        set_assign_fn(operation, assign_fn)
        return True

    def end(self) -> None:
        lowered = self._lowering.operations
        for variable, operations in self._contested.items():
            for number, one in enumerate(operations):
                for other in operations[:number]:
                    if {one, other} <= self._commuting:
                        continue
                    pair = lowered[one], lowered[other]
                    if not (is_before(*pair) or is_before(*reversed(pair))):
                        warn_once(
                            "writes without an order",
                            "Variable %r is assigned by %r and by %r. In a session.run of both, "
                            "either may write last: make one assignment of the two, or make the "
                            "value of one wait for the other by mtf.depend.",
                            variable.name,
                            other.name,
                            one.name,
                        )


def _lowered(operations: Sequence[mtf.Operation], lowering: mtf.Lowering) -> list[tf.Operation]:
    return [lowering.operations[op] for op in operations]


def _write_at_once(write: Any, variable: mtf.Variable, slice_variable: Any, value: Any) -> Any:
    return write(slice_variable, tf.cast(value, variable.slice_dtype))


def is_before(first: tf.Operation, then: tf.Operation) -> bool:
    """Returns whether the tf operation `then` runs after `first`, or is `first` itself.

    `then` runs after `first` if a chain of inputs and control inputs leads from `then` back to
    `first`.
    """
    return first in walk([then], lambda op: [*(x.op for x in op.inputs), *op.control_inputs])


def write_in_order(operations: Sequence[mtf.Operation]) -> list[mtf.Operation]:
    """Orders assignments that run together, so that writes of the same variable do not race.

    The assignments write in the order that they have in the graph. An assignment that writes a
    variable several times is split into several assignments. Returns `operations` and these new
    assignments. If a variable is written several times, the returned list has the graph's order.
    """
    result = [one for op in operations for one in [*_split_off_earlier_writes(op), op]]
    writes = {op: list(op.variables) for op in result if isinstance(op, mtf.Assign)}
    if not writes:
        return result
    order = StepPlan.of(result[0].graph).extension(WriteOrder)
    several = sum(map(len, writes.values())) > len({v for some in writes.values() for v in some})
    if several:
        position = {op: number for number, op in enumerate(result[0].graph.operations)}
        result.sort(key=lambda op: position.get(op, -1))
    last: dict[mtf.Variable, mtf.Operation] = {}
    for op in result:
        before = dict.fromkeys(last[v] for v in writes.get(op, ()) if v in last)
        if before:
            order.put_after(op, list(before))
        last.update(dict.fromkeys(writes.get(op, ()), op))
    return result


def _split_off_earlier_writes(operation: mtf.Operation) -> list[mtf.Assign]:
    """Splits an assignment that writes a variable several times; the last write stays in it.

    The earlier writes become new assignments, which are returned in the order in which they have
    to write. The graph lists them right before `operation`. The result is empty if each variable is
    written once, or if `operation` is no assignment.
    """
    if not isinstance(operation, mtf.Assign):
        return []
    pairs = list(zip(operation.variables, operation.inputs))
    rounds: list[dict[mtf.Variable, mtf.Tensor]] = [{}]
    for variable, value in reversed(pairs):
        free = next((some for some in rounds if variable not in some), None)
        if free is None:
            rounds.append(free := {})
        free[variable] = value
    last, *others = ({v: some[v] for v in reversed(some)} for some in rounds)
    if not others:
        return []
    reassign(operation, list(last), list(last.values()))
    made = [
        mtf.Assign(list(some), list(some.values()), operation.assign_fn, operation.name)
        for some in reversed(others)
    ]
    listed = operation.graph.operations
    del listed[-len(made) :]
    index = listed.index(operation)
    listed[index:index] = made
    return made


class ProgramWrites(PlanExtension):
    """The plan extension that makes a program's own assignments wait.

    The assignments wait for all reads of variables, and for the sums of gradients that were made
    before these assignments. The assigned variables are read once in a step, like variables that a
    wrapper assigns.
    """

    orders_updates = True

    def __init__(self) -> None:
        self._sums: tuple[tuple[mtf.Tensor, ...], ...] = ()

    @classmethod
    def wait_for(cls, sums: Sequence[mtf.Tensor]) -> None:
        """Makes the program's assignments on a mesh wait for `sums`, tensors of this mesh.

        Only assignments wait that the program makes after the tensors `sums`. If a branch is being
        built, the call does nothing, because the branch itself waits.
        """
        plan = StepPlan.of(sums[0].graph)
        if plan.is_in_branch:
            return
        plan.adopt()
        writes = plan.extension(cls)
        writes._sums += (tuple(sums),)

    def begin(self, lowering: mtf.Lowering) -> ExtensionLowering:
        plan = StepPlan.of(lowering.graph)
        made_by = {sums[0].operation: sums for sums in self._sums}
        meshes = {operation.mesh for operation in made_by}
        gates: dict[mtf.Mesh, list[Gate]] = {}
        waits: dict[mtf.Operation, ControlInputs] = {}
        for operation in lowering.graph.operations:
            if operation in made_by:
                gates.setdefault(operation.mesh, []).append(Gate(plan, made_by[operation]))
            elif isinstance(operation, mtf.Assign) and plan.waits_for_nothing(operation):
                written = meshes.intersection(v.mesh for v in operation.variables)
                before = [gate for mesh, some in gates.items() if mesh in written for gate in some]
                if not written.issubset(gates):
                    # Without a sum before it, a write still waits for the reads.
                    before.append(Gate(plan, operation.inputs))
                if before:
                    waits[operation] = functools.partial(_barriers, before)
        extension_lowering = ExtensionLowering()
        extension_lowering.waits = waits
        return extension_lowering


class AdvanceStep(mtf.Operation):
    """An addition to a step counter that is a tf variable, made after an update.

    The operation adds one to the counter, or a given amount.
    """

    def __init__(self, mesh: mtf.Mesh, step: Any, name: str, amount: mtf.Tensor | None = None):
        super().__init__([] if amount is None else [amount], mesh=mesh, name=name)
        self._step = step

    def lower(self, lowering: mtf.Lowering) -> None:
        dtype = self._step.dtype.base_dtype
        one = tf.constant(1, dtype)
        if self.inputs:
            amount = lowering.tensors[self.inputs[0]].to_laid_out_tensor().all_slices[0]
            one = tf.cast(amount, dtype)
        with ref_variables_explained():
            lowering.operations[self] = tf.assign_add(self._step, one).op


def advance_step(
    mesh: mtf.Mesh,
    step: Any,
    update: Sequence[mtf.Operation],
    name: str,
    amount: mtf.Tensor | None = None,
) -> mtf.Operation:
    """Returns an mtf operation that adds one, or `amount`, to a step counter after an update.

    Args:
      mesh: a mesh of the program.
      step: the counter: an mtf variable (or its value) or a tf variable, of an integer or float
        dtype.
      update: the operations of the update, which are lowered before the returned operation.
      name: name of the returned operation.
      amount: an mtf scalar, the same on every processor; None adds one.
    """
    if isinstance(step, (mtf.Variable, mtf.Tensor)):
        value = step.value if isinstance(step, mtf.Variable) else step
        one = mtf.constant(value.mesh, 1, mtf.Shape([]), value.dtype)
        if amount is not None:
            one = mtf.cast(amount, value.dtype)
        count = mtf.assign(step, value + one, name=name)
    else:
        count = AdvanceStep(mesh, step, name, amount)
    StepPlan.of(count.graph).wait([count], functools.partial(_lowered, list(update)))
    return count


def is_advanced(update: Sequence[mtf.Operation]) -> bool:
    """Returns whether one of the operations advances a step counter that is a tf variable.

    An operation advances a step counter if `advance_step` made the operation. If updates among
    `update` are not built yet, this call builds them.
    """
    return any(isinstance(op, AdvanceStep) for op in resolve_stand_ins(update))


def _barriers(gates: Sequence[Gate], lowering: mtf.Lowering) -> list[tf.Operation]:
    return [gate.barrier(lowering) for gate in gates]


def complete_graph(graph: mtf.Graph) -> None:
    """Completes a graph; called before each lowering, and before Mesh-TF stacks variables.

    Updates of the graph that are not built yet are built, and assignments that write a variable
    several times are split.
    """
    plan = StepPlan.of_graph(graph)
    if plan is not None:
        plan.build_deferred()
    for operation in list(graph.operations):
        variables = operation.variables if isinstance(operation, mtf.Assign) else ()
        if len(set(variables)) < len(variables):
            write_in_order([operation])
            StepPlan.of(graph).adopt()


def finish_lowering(lowering: mtf.Lowering, first: int) -> None:
    """Checks a lowering, and records it in TensorFlow's graph; called at the end of each lowering.

    Raises ValueError if a variable's slice that processors share may be written several times, and
    warns of writes of a variable that have no order. `first` is how many operations TensorFlow's
    graph had before the lowering.
    """
    check_writers(lowering.variables.values(), first)
    tf.add_to_collection(_LOWERINGS, lowering)
    plan = StepPlan.of_graph(lowering.graph)
    if plan is not None:
        plan.end(lowering)


# The collection of a tf graph's lowerings; it is not exported, as its key is no string.
_LOWERINGS = ("mtf_gradsync lowerings",)


def lowerings_of(graph: tf.Graph) -> list[mtf.Lowering]:
    """Returns the lowerings that were made in a TensorFlow graph, the first one first."""
    return graph.get_collection(_LOWERINGS)


# Ref variables: writes of these race with reads.

#: What a program has to do to get resource variables instead of ref variables, for errors.
CURE = (
    "Call tf.compat.v1.enable_resource_variables() at the start of the program, after "
    "tf.compat.v1.disable_v2_behavior(), because that function turns resource variables off."
)


class RefVariablesError(NotImplementedError):
    """TensorFlow's error that a TPU program cannot have ref variables, with a remedy."""


def _warn_of_ref_variables(lowering: mtf.Lowering) -> None:
    for variable, laid_out in lowering.variables.items():
        for x in laid_out.laid_out_tensor.all_slices:
            if x.dtype != x.dtype.base_dtype:
                warn_once(
                    "ref variables",
                    "Variable %s is a TensorFlow ref variable: reads and writes of ref variables "
                    "race on a mesh, and training can go wrong silently. %s",
                    variable.name,
                    CURE,
                )
                return


@contextlib.contextmanager
def ref_variables_explained() -> Iterator[None]:
    """Returns a context that adds a remedy to TensorFlow's errors about ref variables.

    TensorFlow raises a NotImplementedError when a TPU program with ref variables is built. In the
    context, this error becomes a `RefVariablesError`, whose text names the variables and says what
    to call.
    """
    try:
        yield
    except RefVariablesError:
        raise
    except NotImplementedError as error:
        variables = tf.global_variables()
        refs = [v.op.name for v in variables if v.dtype != v.dtype.base_dtype]
        if not refs:
            raise
        raise RefVariablesError(
            f"{error}. The graph has ref variables, {counted(refs, 'variable')}. {CURE}"
        ) from error
