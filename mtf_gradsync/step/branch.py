"""Parts of a step: branches that some steps skip, late building, and values after both."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Callable, Iterator, Sequence

from mtf_gradsync._common import by_key, some_of, warn_once
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import give_outputs
from mtf_gradsync._private.tensorflow import control_flow_v1, replace_capture, set_attr
from mtf_gradsync.mesh.devices import check_writers, process_of, writing
from mtf_gradsync.step.plan import StandIn, StepPlan, unstackings

if TYPE_CHECKING:
    from mtf_gradsync.step.writes import Gate

_NOT_INLINED = {"_noinline": True}


def can_call(lowering: mtf.Lowering) -> bool:
    """Returns whether a branch on a mesh can be a call of a function.

    It cannot be on SIMD meshes (a TPU program has no such calls), on meshes over several processes,
    with ref variables, and on TensorFlow 2.12, which inlines every function. There its operations
    are part of the graph itself, which is slower on the steps that skip it.
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
    """Runs a branch as one call of a function; `run` makes its operations and returns the last."""

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
    """The operations made by a function, for a `Conditional` to run."""

    def __init__(self, plan: StepPlan, make: Callable[[], Sequence[mtf.Operation]] | None = None):
        self.plan = plan
        self.updates: list[mtf.Operation] = []  # what the function returned
        if make is not None:
            self.add(make)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Adds operations that are made inside the block to the branch; variables stay outside."""
        with self.plan.collecting(self):
            yield

    def add(self, make: Callable[[], Sequence[mtf.Operation]]) -> None:
        """Adds operations, made by a function, that run last. For graphs not lowered yet."""
        with self.opened():
            self.updates.extend(make())


class Conditional(mtf.Operation):
    """A branch that runs on steps where a predicate holds.

    The predicate must have the same value on all processors. In a lowering, each of the branch's
    updates is the one tf operation that runs the branch if it is due.
    """

    def __init__(
        self,
        predicate: mtf.Tensor,
        gate: Gate | None,
        branch: Branch,
        behind: Sequence[mtf.Operation],
        as_call: bool = True,
    ):
        """Adds the conditional, which waits for `gate` (None inside another branch) and `behind`.

        `as_call` makes skipping cheap, by one function call where `can_call`. Its arguments cost
        time on every step: a branch that takes all gradients and runs on most steps is faster
        without a call.
        """
        super().__init__([predicate], name="conditional")
        self._gate = gate
        self._branch = branch
        self._behind = list(behind)
        self._as_call = as_call

    @property
    def updates(self) -> list[mtf.Operation]:
        """The operations of the branch."""
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
                    stack.enter_context(_read_inside(lowering, self.updates))
                plan.lower_branch(self._branch, lowering)
                if tf.get_default_graph() is not graph:
                    check_writers(lowering.variables.values())
            return tf.group(*[lowering.operations[op] for op in self.updates])

        before = set(lowering.operations)
        waited_for = [lowering.operations[op] for op in self._behind]
        if self._gate is not None:
            waited_for.append(self._gate.barrier(lowering))
        with tf.control_dependencies(waited_for), control_flow_v1(), writing(only_calls=True):
            done = tf.cond(predicate, lambda: run_as_call(run) if in_call else run(), tf.no_op)
        # Those of inner branches, too: outside nothing can wait for these themselves.
        for op in [*lowering.operations]:
            if op not in before:
                lowering.operations[op] = done.op


@contextlib.contextmanager
def _read_inside(lowering: mtf.Lowering, updates: Sequence[mtf.Operation]) -> Iterator[None]:
    """Makes a call read the variables that it assigns, instead of taking their values.

    Nothing else writes them in this step, and a value from another device costs a transfer even
    when the call is skipped.
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
    for op in unstackings(lowering.graph):
        if op.inputs[0].operation in assigned:
            op.lower_itself(lowering)
    yield
    lowering.tensors.clear()
    lowering.tensors.update(before)


@contextlib.contextmanager
def _no_summaries() -> Iterator[None]:
    """Removes scalar summaries of a branch, which have no value on steps that skip it."""
    summaries = tf.get_collection_ref(mtf.utils.SCALAR_SUMMARIES_COLLECTION_KEY)
    before = len(summaries)
    yield
    if summaries[before:]:
        warn_once(
            "summaries in a branch",
            "The scalar summaries %s are not written: an update makes them that some steps skip. "
            "Make them outside of the optimizer.",
            some_of([name for name, _ in summaries[before:]]),
        )
        del summaries[before:]


class DeferredUpdate:
    """Operations that are built on demand, or when the graph is lowered; a subclass has `make`."""

    def __init__(self, plan: StepPlan):
        self.plan = plan
        self.stand_ins: list[StandIn] = []  # what callers got in place of the operations
        self._operations: list[mtf.Operation] | None = None
        plan.deferred += (self,)

    def make(self) -> list[mtf.Operation]:
        """Makes the operations; called once, unless they are undone."""
        raise NotImplementedError

    def build(self) -> list[mtf.Operation]:
        """Returns the operations, which the first call builds.

        In the graph they take the place of the last stand-in, or come after everything that they
        are computed from.
        """
        # An error may have undone them, with what was being built around them.
        if self._operations is None or self in self.plan.deferred:
            graph, waiting = self.plan.graph, self.plan.deferred
            before = set(graph.operations)
            self.plan.deferred = tuple(x for x in waiting if x is not self)
            try:
                self._operations = self.make()
            except BaseException:
                self.plan.deferred = waiting
                raise
            self._place(before)
        return self._operations

    def _place(self, before: set[mtf.Operation]) -> None:
        listed, own = self.plan.graph.operations, set(self.stand_ins)
        # What the step itself has put before others stays there.
        count = max((i for i, op in enumerate(listed, 1) if op in before), default=0)
        others, made = listed[:count], listed[count:]
        needed = {x.operation for op in made for x in op.inputs} | own
        end = max((i for i, op in enumerate(others, 1) if op in needed), default=0)
        first = [op for op in others[:end] if op not in own]
        listed[:] = first + made + self.stand_ins + others[end:]


class ValuesAfter(mtf.Operation):
    """Reads of variables of a mesh (`reads`) after operations, also a branch's."""

    def __init__(self, variables: Sequence[mtf.Variable], writes: Sequence[mtf.Operation]):
        super().__init__([], mesh=variables[0].mesh, name="values_after")
        give_outputs(
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
                lowering.set_tensor_lowering(output, _held(variable, lowering))


def _held(variable: mtf.Variable, lowering: mtf.Lowering) -> Any:
    """Reads the slices of a variable, which autostack may have stacked with others."""
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
    """Returns the values of variables after operations, whether or not their branch ran.

    `writes` are lowered before. The tensors have the variables' shapes, in the dtype of their
    slices.
    """

    def of_one_mesh(_: Any, some: list[int]) -> Sequence[mtf.Tensor]:
        return ValuesAfter([variables[i] for i in some], writes).outputs

    return by_key([v.mesh for v in variables], of_one_mesh)
