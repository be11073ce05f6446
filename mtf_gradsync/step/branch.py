"""Branches of a step and gates: what runs, or has an effect, in some steps only; step counts."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, Sequence

from mtf_gradsync._common import some_of, warn_once
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.tensorflow import control_flow_v1, replace_capture, set_attr
from mtf_gradsync.mesh.devices import check_writers, process_of, writing
from mtf_gradsync.session import CURE, ref_variables_explained
from mtf_gradsync.step.later import built
from mtf_gradsync.step.plan import StepPlan, unstackings


class Gate:
    """A point of a step, after some tensors and the reads of all variables of their meshes."""

    def __init__(self, plan: StepPlan, tensors: Sequence[mtf.Tensor]):
        self._plan = plan
        self._tensors = list(tensors)

    def hold(self, operations: Sequence[mtf.Operation]) -> None:
        """Makes operations wait for the gate."""
        self._plan.wait(operations, lambda lowering: [self.barrier(lowering)])

    def barrier(self, lowering: mtf.Lowering) -> tf.Operation:
        """Returns the tf operation that follows the gate's tensors; for calls outside branches."""
        barriers = self._plan.lowered(lowering).barriers
        if self not in barriers:
            barriers[self] = self._make(lowering)
        return barriers[self]

    def _make(self, lowering: mtf.Lowering) -> tf.Operation:
        _warn_of_ref_variables(lowering)
        lowered = self._plan.lowered(lowering)
        meshes = dict.fromkeys(t.mesh for t in self._tensors)
        tensors = [*self._tensors, *(t for m in meshes for t in lowered.reads.get(m, ()))]
        laid_out = [lowering.tensors[t].to_laid_out_tensor() for t in tensors]
        slices = [x for one in laid_out for x in one.tensor_list]
        # One operation on each device first, so that there are few edges between devices.
        by_device: dict[str, list[tf.Operation]] = {}
        for op in dict.fromkeys(x.op for x in slices):
            by_device.setdefault(op.device, []).append(op)
        with lowered.name_scope("gate"):
            reached = []
            for device, ops in by_device.items():
                with tf.device(device):
                    reached.append(tf.group(*ops))
            with tf.device(next(iter(by_device), "")):
                return tf.group(*reached)


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


def gated_update(
    make_update: Callable[[], Sequence[mtf.Operation]], grads: Sequence[Any]
) -> list[mtf.Operation]:
    """Builds an update that writes only after all gradients exist and all variables are read.

    Inside another update or a branch, it waits with that; without a gradient, for nothing. The
    update may create variables (slots).
    """
    present = [g for g in grads if g is not None]
    if not present:
        return list(make_update())
    plan = StepPlan.of(present[0].graph)
    if plan.is_held:
        return list(make_update())
    with plan.gating():
        operations = list(make_update())
    Gate(plan, present).hold(operations)
    return operations


class AdvanceStep(mtf.Operation):
    """Adds to a step counter that is a tf variable, after the update."""

    def __init__(
        self,
        mesh: mtf.Mesh,
        step: Any,
        update: Sequence[mtf.Operation],
        name: str,
        amount: mtf.Tensor | None = None,
    ):
        super().__init__([] if amount is None else [amount], mesh=mesh, name=name)
        self._step = step
        self._update = list(update)

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        done = [lowering.operations[op] for op in self._update]
        dtype = self._step.dtype.base_dtype
        with tf.control_dependencies(done):
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
    """Makes an operation that adds one, or an amount, to a step counter after an update.

    The counter is an mtf variable (or its value), or a tf variable, of an integer or float type;
    the amount is the same on every processor.
    """
    if isinstance(step, (mtf.Variable, mtf.Tensor)):
        value = step.value if isinstance(step, mtf.Variable) else step
        one = mtf.constant(value.mesh, 1, mtf.Shape([]), value.dtype)
        if amount is not None:
            one = mtf.cast(amount, value.dtype)
        count = mtf.assign(step, value + one, name=name)
        before = list(update)
        StepPlan.of(value.graph).wait(
            [count], lambda lowering: [lowering.operations[op] for op in before]
        )
        return count
    return AdvanceStep(mesh, step, update, name, amount)


def is_advanced(update: Sequence[mtf.Operation]) -> bool:
    """Whether one of some operations advances a tf step counter, made by `advance_step`."""
    return any(isinstance(op, AdvanceStep) for op in built(update))


_NOT_INLINED = {"_noinline": True}


def can_call(lowering: mtf.Lowering) -> bool:
    """Whether a branch can be a function over the devices of a mesh.

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
    """The operations that a function makes, for a `Conditional` to run."""

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
        """Adds operations that a function makes; they run last. For graphs not lowered yet."""
        with self.opened():
            self.updates.extend(make())


class Conditional(mtf.Operation):
    """Runs a branch on steps where a predicate holds.

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
        time on every step, so a branch that takes all gradients and runs on most steps is faster
        without.
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
        """See `mtf.Operation.lower`."""
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
    """Reads the variables that updates assign inside a call, instead of passing values to it.

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
