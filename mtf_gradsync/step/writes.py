"""How slices of variables are written: one door; and variables with a value for each island."""

from __future__ import annotations

import functools
from typing import Any, Callable, Mapping, Sequence

from mtf_gradsync._common import warn_once
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import Reshaped, give_assign_fn, reassign
from mtf_gradsync.mesh.axes import is_simd
from mtf_gradsync.mesh.devices import check_writers, writers_of, writing
from mtf_gradsync.session import CURE
from mtf_gradsync.step.branch import Gate
from mtf_gradsync.step.later import build_later
from mtf_gradsync.step.plan import ControlInputs, PartLowering, PlanPart, StepPlan


class WriteInPlace(mtf.Operation):
    """Writes variables slice by slice, each from the same processor's slice of a value.

    It is for writes that Mesh-TensorFlow's own assignments cannot make.
    """

    def __init__(
        self,
        variables: Sequence[mtf.Variable],
        values: Sequence[mtf.Tensor],
        write: Callable[..., Any],
        name: str,
        scalars: Sequence[mtf.Tensor] = (),
    ):
        """Adds the operation; values are laid out like the variables.

        `write` makes the assignment of a value to a tf variable; it is given `scalars`, too.
        """
        super().__init__([*values, *scalars], name=name)
        self.variables, self._write = list(variables), write

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""

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
    """Writes several variables together, and returns what the writes make of each.

    Args:
      lowering: the lowering.
      variables: variables of one mesh.
      write: a function that is called once for each processor that writes anything, with the
        positions of the variables of which it writes a slice, with these slices, and with its
        slice of each of `values`. It returns a tensor for each of the slices.
      values: lists of one value for each processor.

    Returns:
      For each variable a `LaidOutTensor`. Processors that share a slice have the writer's tensor.
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
            with tf.device(device), tf.name_scope(f"write_{processor}"), writing():
                given = [x[processor] for x in values]
                made = write(own, [slices[i][processor] for i in own], given)
            for i, result in zip(own, made):
                results[i][processor] = result
    return [
        mesh_impl.LaidOutTensor([result[writer] for writer in of])
        for result, of in zip(results, writers)
    ]


# Where two of these write a variable, their order does not matter, if nothing comes between read
# and write. Mesh-TF's own functions (0.1.21) read, add and assign.
_COMMUTING = {mtf.assign_add_slice: tf.assign_add, mtf.assign_sub_slice: tf.assign_sub}


class WriteOrder(PlanPart):
    """The order of operations that write one variable."""

    def __init__(self) -> None:
        self._after: Mapping[mtf.Operation, tuple[mtf.Operation, ...]] = {}
        self._step_of: Mapping[mtf.Operation, object] = {}

    def put_after(self, operation: mtf.Operation, before: Sequence[mtf.Operation]) -> None:
        """Makes an operation run after others, which always run with it and are lowered before."""
        self._after = {**self._after, operation: (*self._after.get(operation, ()), *before)}

    def one_step(self, operations: Sequence[mtf.Operation]) -> None:
        """Notes that operations are one step, whose writes have an order."""
        self._step_of = {**self._step_of, **dict.fromkeys(operations, object())}

    def begin(self, lowering: mtf.Lowering) -> PartLowering:
        """See `PlanPart.begin`."""
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
        made = _WriteOrderLowering(lowering, contested) if contested else PartLowering()
        made.waits = {op: functools.partial(_lowered, ops) for op, ops in self._after.items()}
        return made


class _WriteOrderLowering(PartLowering):
    def __init__(
        self,
        lowering: mtf.Lowering,
        contested: Mapping[mtf.Variable, Sequence[mtf.Assign]],
    ):
        """`contested` are variables that several steps or operations of a program write."""
        self._lowering, self._contested = lowering, contested
        self._commuting = {
            op for some in contested.values() for op in some if op.assign_fn in _COMMUTING
        }

    def lower(self, operation: mtf.Operation) -> bool:
        """See `PartLowering.lower`."""
        if operation not in self._commuting:
            return False
        assign_fn = operation.assign_fn
        give_assign_fn(operation, functools.partial(_write_at_once, _COMMUTING[assign_fn]))
        operation.lower_itself(self._lowering)
        give_assign_fn(operation, assign_fn)
        return True

    def end(self) -> None:
        """See `PartLowering.end`."""
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
                            "either may come last: make one assignment of them, or make the value "
                            "of one wait for the other by mtf.depend.",
                            variable.name,
                            other.name,
                            one.name,
                        )


def _lowered(operations: Sequence[mtf.Operation], lowering: mtf.Lowering) -> list[tf.Operation]:
    return [lowering.operations[op] for op in operations]


def _write_at_once(write: Any, variable: mtf.Variable, slice_variable: Any, value: Any) -> Any:
    return write(slice_variable, tf.cast(value, variable.slice_dtype))


def is_before(first: tf.Operation, then: tf.Operation) -> bool:
    """Whether an operation of TensorFlow waits for another one, or is that one."""
    found, todo = {then}, [then]
    while todo and first not in found:
        op = todo.pop()
        new = {*(x.op for x in op.inputs), *op.control_inputs} - found
        found |= new
        todo += new
    return first in found


def write_in_order(operations: Sequence[mtf.Operation]) -> list[mtf.Operation]:
    """Makes assignments that run together write each variable one after the other.

    Their order is that of the graph. An assignment that has a variable several times becomes
    several. Returns all operations.
    """
    result = [one for op in operations for one in [*_first_writes(op), op]]
    writes = {op: list(op.variables) for op in result if isinstance(op, mtf.Assign)}
    if not writes:
        return result
    order = StepPlan.of(result[0].graph).part(WriteOrder)
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


def _first_writes(operation: mtf.Operation) -> list[mtf.Assign]:
    """Makes all but the last writes of an assignment to one variable assignments of their own."""
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


class OwnWrites(PlanPart):
    """Makes assignments without other order wait for all reads and for the sums before them.

    Their variables are read once, as those that a wrapper updates.
    """

    orders_updates = True

    def __init__(self) -> None:
        self._sums: tuple[tuple[mtf.Tensor, ...], ...] = ()

    @classmethod
    def wait_for(cls, sums: Sequence[mtf.Tensor]) -> None:
        """Makes a program's assignments wait for sums of one mesh; a branch waits by itself."""
        plan = StepPlan.of(sums[0].graph)
        if plan.is_in_branch:
            return
        plan.adopt()
        part = plan.part(cls)
        part._sums += (tuple(sums),)

    def begin(self, lowering: mtf.Lowering) -> PartLowering:
        """See `PlanPart.begin`."""
        plan = StepPlan.of(lowering.graph)
        made_by = {sums[0].operation: sums for sums in self._sums}
        meshes = {operation.mesh for operation in made_by}
        gates: dict[mtf.Mesh, list[Gate]] = {}
        waits: dict[mtf.Operation, ControlInputs] = {}
        for operation in lowering.graph.operations:
            if operation in made_by:
                gates.setdefault(operation.mesh, []).append(Gate(plan, made_by[operation]))
            elif isinstance(operation, mtf.Assign) and plan.is_free(operation):
                written = meshes.intersection(v.mesh for v in operation.variables)
                before = [gate for mesh, some in gates.items() if mesh in written for gate in some]
                if not written.issubset(gates):
                    # Without a sum before it, a write still waits for the reads.
                    before.append(Gate(plan, operation.inputs))
                if before:
                    waits[operation] = functools.partial(_barriers, tuple(before))
        part_lowering = PartLowering()
        part_lowering.waits = waits
        return part_lowering


def _barriers(gates: Sequence[Gate], lowering: mtf.Lowering) -> list[tf.Operation]:
    return [gate.barrier(lowering) for gate in gates]


def before_lowering(graph: mtf.Graph) -> None:
    """Builds steps that are still to be built, and orders what one assignment writes."""
    build_later(graph)
    for operation in list(graph.operations):
        variables = operation.variables if isinstance(operation, mtf.Assign) else ()
        if len(set(variables)) < len(variables):
            write_in_order([operation])
            StepPlan.of(graph).adopt()


def after_lowering(lowering: mtf.Lowering, first: int) -> None:
    """Raises a ValueError if a shared slice has several writers, and warns of writes without order.

    `first` is how many operations TensorFlow's graph had before the lowering.
    """
    check_writers(lowering.variables.values(), first)
    tf.add_to_collection(_LOWERINGS, lowering)
    plan = StepPlan.of_graph(lowering.graph)
    if plan is not None:
        plan.end(lowering)


# The collection of a tf graph's lowerings; it is not exported, as its key is no string.
_LOWERINGS = ("mtf_gradsync lowerings",)


def lowerings_of(graph: tf.Graph) -> list[mtf.Lowering]:
    """Returns the lowerings that were made in a graph of TensorFlow's."""
    return graph.get_collection(_LOWERINGS)


class Islands(PlanPart):
    """A graph's record of variables and their holders."""

    def __init__(self) -> None:
        self._held_by: dict[mtf.Variable, mtf.Variable] = {}

    def hold(self, variable: mtf.Variable, by: mtf.Variable) -> None:
        """Makes a variable's slices those of a holder; neither may be stacked with others.

        The holder has dimensions that number the islands before those of the variable.
        """
        self._held_by = {**self._held_by, variable: by}
        # Lowered first, as the variable is made of its slices.
        operations = variable.graph.operations
        operations.remove(by)
        operations.insert(0, by)
        if StepPlan.of(variable.graph).is_in_place(variable):
            StepPlan.of(variable.graph).write_in_place(by)

    def holder(self, variable: mtf.Variable) -> mtf.Variable | None:
        """Returns the holder of a variable; None if the islands share its value."""
        return self._held_by.get(variable)

    def begin(self, lowering: mtf.Lowering) -> PartLowering:
        """See `PlanPart.begin`."""
        return _IslandsLowering(lowering, self._held_by)


class _IslandsLowering(PartLowering):
    def __init__(self, lowering: mtf.Lowering, held_by: dict[mtf.Variable, mtf.Variable]):
        self._lowering, self._held_by = lowering, held_by

    def lower_variable(self, variable: mtf.Variable) -> bool:
        """See `PartLowering.lower_variable`."""
        holder = self._held_by.get(variable)
        if holder is None:
            return False
        lowering, mesh_impl = self._lowering, self._lowering.mesh_impl(variable)
        _check_no_refs(variable, lowering.variables[holder])
        shape = mesh_impl.slice_shape(variable.shape)
        slices = HeldSlices(variable, lowering.variables[holder], mesh_impl, shape)
        lowering.variables[variable] = slices
        value: Any = slices.laid_out_tensor
        if not StepPlan.of(lowering.graph).is_in_place(variable):
            held = lowering.tensors[holder.value].to_laid_out_tensor()
            value = mesh_impl.slicewise(lambda x: tf.reshape(x, shape), held)
        lowering.set_tensor_lowering(variable.value, value)
        return True


def _check_no_refs(variable: mtf.Variable, held: Any) -> None:
    # Measured: with momentum inside, values of about 1 are off by up to 0.4 after 20 steps.
    if any(x.dtype != x.dtype.base_dtype for x in held.laid_out_tensor.all_slices):
        raise ValueError(
            f"Islands of the mesh have values of their own of {variable.name!r}, but it is a "
            "TensorFlow ref variable: reads and writes of ref variables race, and islands would "
            f"train on wrong values. {CURE}"
        )


class HeldSlices:
    """A laid-out variable whose slices are its holder's, reshaped; the holder has the master."""

    def __init__(self, variable: mtf.Variable, held: Any, mesh_impl: Any, shape: list[int]):
        self._variable, self._held = variable, held
        slices = held.laid_out_tensor.tensor_list
        # Slices that processors share stay shared.
        self._seen = {id(x): Reshaped(x, shape) for x in slices}
        self.laid_out_tensor = mesh_impl.LaidOutTensor([self._seen[id(x)] for x in slices])
        self.writers = writers_of(held)
        with mtf.utils.outside_all_rewrites(), tf.control_dependencies(None):
            self.copy_master_to_slices = self.copy_slices_to_master = tf.no_op()

    def assign_to_slices(self, assign_fn: Callable[..., Any], values: Sequence[Any]) -> Any:
        """See Mesh-TF's laid-out variables."""

        def assign(_: Any, x: Any, value: Any) -> Any:
            return assign_fn(self._variable, self._seen[id(x)], value)

        return self._held.assign_to_slices(assign, values)
