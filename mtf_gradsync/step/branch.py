"""Branches of operations that some steps skip, updates that are built late, and later reads."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Callable, ContextManager, Iterator, Sequence

from mtf_gradsync._common import map_by_key, some_of, warn_once
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import set_operation_outputs
from mtf_gradsync._private.tensorflow import control_flow_v1, replace_capture, set_attr
from mtf_gradsync.mesh.devices import check_writers, process_of, writing_shared_slices
from mtf_gradsync.step.plan import StandIn, StepPlan, unstack_operations

if TYPE_CHECKING:
    from mtf_gradsync.step.writes import Gate

_NOT_INLINED = {"_noinline": True}


def can_call(lowering: mtf.Lowering) -> bool:
    """Returns whether branches of a lowering can be built as one call of a tf function each.

    A branch cannot be a call of a tf function on SIMD meshes (a TPU program has no such calls), on
    meshes over several processes, with ref variables, or with TensorFlow 2.12, which inlines every
    function. In these cases the branch's operations are part of the graph itself, so that steps
    that skip the branch are slower.
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

    The operations of a branch are made by functions that are called while the branch is open.

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

    The predicate must have the same value on all processors. Each of the branch's operations that
    others may wait for (`updates`) is lowered to the same tf operation, the conditional itself.
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
          as_call: whether the branch becomes one function call (if `can_call`), so that skipping it
            is cheap. The arguments of the call cost time on every step: a branch that takes all
            gradients and runs on most steps is faster without a call.
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
                    stack.enter_context(_read_inside(lowering, self.updates))
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
def _read_inside(lowering: mtf.Lowering, updates: Sequence[mtf.Operation]) -> Iterator[None]:
    """Returns a context for building a branch as a function that reads variables itself.

    The function reads the variables that `updates`, the operations of the branch, assign. If it did
    not, the variables' values would be arguments of its call, and a value from another device costs
    a transfer even when the call is skipped. Reading late is safe, because nothing else writes
    these variables in the same step.
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
    """Returns a context; scalar summaries made inside are removed, with a warning.

    The summaries of a branch have no value on steps that skip the branch.
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


class DeferredUpdate:
    """A wrapper's update that is built later: when it is asked for, or when the graph is lowered.

    Subclasses define `make`.
    """

    def __init__(self, plan: StepPlan):
        self.plan = plan
        self.stand_ins: list[StandIn] = []  # what callers got in place of the operations
        self._operations: list[mtf.Operation] | None = None
        plan.deferred += (self,)

    def make(self) -> list[mtf.Operation]:
        """Makes and returns the mtf operations of the update; subclasses define it.

        `build` calls this method once, or again if an error has undone the operations.
        """
        raise NotImplementedError

    def build(self) -> list[mtf.Operation]:
        """Returns the mtf operations of the update; the first call makes them.

        The operations are put in the graph's list of operations at the position of the last
        stand-in (what callers got in place of the operations), but in any case after all operations
        that they are computed from.
        """
        # An error may have undone the operations, together with what was being built around them.
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
        # Operations that the update itself has put before others stay there.
        count = max((i for i, op in enumerate(listed, 1) if op in before), default=0)
        others, made = listed[:count], listed[count:]
        needed = {x.operation for op in made for x in op.inputs} | own
        end = max((i for i, op in enumerate(others, 1) if op in needed), default=0)
        first = [op for op in others[:end] if op not in own]
        listed[:] = first + made + self.stand_ins + others[end:]


class ValuesAfter(mtf.Operation):
    """Reads of variables after given operations have run, or their branch was skipped.

    `reads` are the variables, all of one mesh.
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

    If Mesh-TF's autostack has stacked the variable, its part of the stacked variable is returned.
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
    If the operations `writes` belong to a branch that a step skips, the values are unchanged. The
    operations have to be lowered before the returned tensors.
    """

    def of_one_mesh(_: Any, some: list[int]) -> Sequence[mtf.Tensor]:
        return ValuesAfter([variables[i] for i in some], writes).outputs

    return map_by_key([v.mesh for v in variables], of_one_mesh)
