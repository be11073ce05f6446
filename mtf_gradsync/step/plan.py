"""The plan of an mtf graph, which decides how and in which order operations are lowered.

Wrappers tell the plan, in any order, which operations wait for others, which variables are written
in place, and which operations some steps skip. When the graph is lowered, the plan lowers every
operation (see `Planned`). No other code changes how operations are lowered, rearranges the graph's
list of operations, or keeps its own records of graphs.

The plan follows these rules:

- All variables are lowered first. Each variable is read at this point, once for the whole step, and
  all later operations use the value that was read. There are two exceptions: variables that a
  wrapper writes in place, and variables that the program itself assigns, if its assignments do not
  wait for all reads (as `ProgramWrites` makes them). Each operation that uses a variable of these
  two kinds reads it again, as in Mesh-TF without this package.
- An operation that waits for others is lowered with control dependencies on their tf operations.
- The operations of a branch keep their positions in the graph's list, but are not lowered at these
  positions: the conditional of the branch lowers them, in order.
- Extensions (`PlanExtension`) may lower operations in their own way.
- If a wrapper raises an error while it builds its update, the graph and the plan become what they
  were before. A lowering does not change the plan, so that a graph can be lowered again.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from typing import Any, Callable, ContextManager, Iterator, Mapping, Sequence, TypeVar

from mtf_gradsync._common import replaced
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import loop_body, loop_condition, reduced_value
from mtf_gradsync._private.tensorflow import forget_closed_scopes

ControlInputs = Callable[[mtf.Lowering], Sequence[tf.Operation]]
# The attribute of a lowering for its `LoweringState`.
_LOWERED = "mtf_gradsync_lowered"


class Planned:
    """A mixin that is added to the class of every operation of a graph, so that the plan lowers it.

    Only the class of an operation changes: Mesh-TF's rewriting (autostack, combined assignments)
    and the program see the same objects as before. The plan also lowers copies of operations, such
    as those that `mtf.recompute_grad` makes.
    """

    graph: mtf.Graph

    def lower(self, lowering: mtf.Lowering) -> None:
        """Lowers the operation by the plan of its graph; Mesh-TF calls this method."""
        vars(self.graph)[PLAN].lower(self, lowering)

    def lower_itself(self, lowering: mtf.Lowering) -> None:
        """Lowers the operation as it would be lowered without a plan."""
        super().lower(lowering)  # type: ignore[misc]  # of the class that it is mixed into


# Where a graph keeps its plan.
PLAN = "mtf_gradsync_plan"


@functools.lru_cache(maxsize=None)
def _planned(cls: type) -> type:
    # The subclass has the same name, because Mesh-TF counts operations by their classes' names.
    members = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    return type(cls.__name__, (Planned, cls), members)


def flat(operations: Sequence[Any]) -> list[mtf.Operation]:
    """Returns a list of `operations` and of all operations inside of loops among them.

    The list is in the order of lowering: the operations inside of a loop come before the loop.
    """
    found: list[mtf.Operation] = []
    for operation in operations:
        if isinstance(operation, mtf.WhileLoopOperation):
            found += flat(loop_condition(operation).operations)
            found += flat(loop_body(operation).operations)
        found.append(operation)
    return found


class StandIn(mtf.Operation):
    """An operation that callers get in place of an update's operations, which are built later.

    The argument `update` is the `DeferredUpdate` that is built later.
    """

    def __init__(self, update: Any, mesh: mtf.Mesh, name: str):
        super().__init__([], mesh=mesh, name=name)
        self.update = update

    def lower(self, lowering: mtf.Lowering) -> None:
        first = self.update.stand_ins[0]
        if first not in lowering.operations:
            done = [lowering.operations[op] for op in self.update.build()]
            lowering.operations[first] = tf.group(*done)
        lowering.operations[self] = lowering.operations[first]


def resolve_stand_ins(operations: Sequence[mtf.Operation]) -> list[mtf.Operation]:
    """Returns `operations`, each once, with every `StandIn` replaced by its update's operations.

    An update that is not built yet is built by this call.
    """
    result: dict[mtf.Operation, None] = {}
    for operation in operations:
        is_stand_in = isinstance(operation, StandIn)
        result.update(dict.fromkeys(operation.update.build() if is_stand_in else [operation]))
    return list(result)


class ExtensionLowering:
    """The state and the work of a `PlanExtension` in one lowering; this base class does nothing."""

    # For operations that wait for others: functions that return the tf operations to wait for.
    waits: Mapping[mtf.Operation, Callable[[mtf.Lowering], Sequence[tf.Operation]]] = {}

    def lower(self, operation: mtf.Operation) -> bool:
        """Lowers an operation in the extension's own way, and returns True.

        A subclass that leaves the operation to other extensions, or to the plan, does nothing and
        returns False. The plan calls this method for every operation, also for those inside of
        loops.
        """
        del operation
        return False

    def lower_variable(self, variable: mtf.Variable) -> bool:
        """Lowers a variable in the extension's own way, and returns True.

        A subclass that leaves the variable to other extensions, or to the plan, does nothing and
        returns False.
        """
        del variable
        return False

    def inside_branch(self) -> ContextManager[None]:
        """Returns a context; the plan lowers the operations of a branch inside of it."""
        return contextlib.nullcontext()

    def end(self) -> None:
        """Is called when all operations have been lowered, for what a subclass has left to do."""


class PlanExtension:
    """A base class of what wrappers keep in a plan, and of their own ways to lower operations.

    Subclasses of `PlanExtension` set their attributes to new values and never change a value in
    place. So the plan can undo changes after an error by going back to shallow copies.

    Attributes:
      orders_updates: whether the extension makes the program's own assignments wait for reads.
    """

    orders_updates = False

    def begin(self, lowering: mtf.Lowering) -> ExtensionLowering | None:
        """Returns the extension's `ExtensionLowering` for a lowering that begins; None for no work.

        The plan calls this method once for each lowering, when the graph has all of its operations.
        """
        del lowering
        return None


class LoweringState:
    """The state that a plan keeps for one lowering."""

    def __init__(self, scope: str):
        self.scope = scope  # the name scope that operations are lowered in
        self.branch: Any = None  # the branch that is being lowered
        self.extensions: list[ExtensionLowering] = []
        self.early: set[mtf.Operation] = set()  # operations lowered before their place in the list
        self.reads: dict[mtf.Mesh, list[mtf.Tensor]] = {}  # variables' values that are read once
        self.barriers: dict[Any, tf.Operation] = {}  # gate -> the operation that waits for it

    @contextlib.contextmanager
    def name_scope(self, name: str) -> Iterator[None]:
        """Returns a context with the name scope that Mesh-TF opens for an operation `name`."""
        with tf.name_scope(self.scope + "/" if self.scope else None):
            with tf.name_scope(name):
                yield


_Extension = TypeVar("_Extension", bound=PlanExtension)


class StepPlan:
    """The plan of an mtf graph; see the module's docstring.

    Attributes:
      graph: the graph.
      deferred: updates of the graph that are still to be built (see `DeferredUpdate`).
      open_branch: the branch that is being built; None if none is.
      islands: the islands (`IslandAxes`) inside of which an update is being built; None if there
        are none.
    """

    def __init__(self, graph: mtf.Graph):
        """Makes an empty plan; only `StepPlan.of` calls this."""
        self.graph = graph
        self.deferred: tuple[Any, ...] = ()
        self._waits: dict[mtf.Operation, tuple[ControlInputs, ...]] = {}
        self._branch_of: dict[mtf.Operation, Any] = {}
        self.open_branch: Any = None
        # The graph's operations before the outermost open branch.
        self._before_branches: set[mtf.Operation] = set()
        self._is_gating = False
        self.islands: Any = None
        self._in_place: dict[mtf.Variable, None] = {}
        self._states: dict[str, tuple[Any, Any]] = {}
        self._extensions: dict[type, Any] = {}

    @classmethod
    def of(cls, graph: mtf.Graph) -> StepPlan:
        """Returns the plan of a graph; makes one on the first call."""
        plan = cls.of_graph(graph)
        if plan is None:
            plan = vars(graph)[PLAN] = cls(graph)
        return plan

    @staticmethod
    def of_graph(graph: mtf.Graph) -> StepPlan | None:
        """Returns the plan of a graph; None if it has none yet."""
        return vars(graph).get(PLAN)

    # What wrappers want.

    def wait(self, operations: Sequence[mtf.Operation], control_inputs: ControlInputs) -> None:
        """Makes mtf operations run only after the tf operations that `control_inputs` returns.

        The mtf operations must not be lowered yet. The function `control_inputs` is called with the
        lowering when one of `operations` is lowered, and returns the tf operations to wait for.
        """
        self.adopt()
        for operation in operations:
            self._waits[operation] = (*self._waits.get(operation, ()), control_inputs)

    def write_in_place(self, variable: mtf.Variable) -> None:
        """Declares that a wrapper writes a variable in place.

        All other variables are read once, at the start of the step. A variable that is written in
        place is not: if a value that was read at the start were still in use, TensorFlow would copy
        the variable in order to add to it. Code that reads the variable has to order reads and
        writes itself.
        """
        self._in_place[variable] = None

    def is_written_in_place(self, variable: mtf.Variable) -> bool:
        """Returns whether `write_in_place` was called for a variable."""
        return variable in self._in_place

    @property
    def is_in_branch(self) -> bool:
        """Whether a branch is being built.

        Operations inside of a branch need not wait for a gate themselves, because the branch waits.
        """
        return self.open_branch is not None

    @contextlib.contextmanager
    def adding_to_branch(self, branch: Any) -> Iterator[None]:
        """Returns a context; mtf operations made inside belong to `branch`, except variables.

        `branch` is a `Branch`. As long as the context is open, the attribute `open_branch` has
        this value.
        """
        self.adopt()
        before = set(self.graph.operations)
        if not self.is_in_branch:
            self._before_branches = before
        with replaced(vars(self), {"open_branch": branch}):
            yield
        for operation in self.graph.operations:
            if operation not in before and not isinstance(operation, mtf.Variable):
                self._branch_of.setdefault(operation, branch)

    @contextlib.contextmanager
    def outside_of_branches(self, inputs: Sequence[mtf.Tensor] = ()) -> Iterator[None]:
        """Returns a context; operations made inside run on every step, even if a branch is open.

        `inputs` are the tensors that the operations use. If one of them was made in the open
        branch, and is no variable, the operations stay in the branch.
        """
        known = self._before_branches
        is_free = all(isinstance(x.operation, mtf.Variable) or x.operation in known for x in inputs)
        if not self.is_in_branch or not is_free:
            yield
            return
        before = set(self.graph.operations)
        with replaced(vars(self), {"open_branch": None}):
            yield
        made = [op for op in self.graph.operations if op not in before]
        self._before_branches = known.union(made)
        self._branch_of.update(dict.fromkeys(made))

    def waits_for_nothing(self, operation: mtf.Operation) -> bool:
        """Returns whether an operation is in no branch, and waits for no other operations.

        An operation waits for other operations if the method `wait` was called for it.
        """
        return operation not in self._waits and self._branch_of.get(operation) is None

    @property
    def orders_updates(self) -> bool:
        """Whether the graph has updates that wait for a gate or for sums, or are in a branch."""
        gated = bool(self._waits or any(self._branch_of.values()))
        return gated or any(extension.orders_updates for extension in self._extensions.values())

    @property
    def needs_no_gate(self) -> bool:
        """Whether operations that are built now need no gate.

        Operations need no gate in a branch and inside of the context `gating`, because the branch,
        or the caller of `gating`, makes them wait.
        """
        return self.is_in_branch or self._is_gating

    def gating(self) -> ContextManager[None]:
        """Returns a context that says that operations built inside need no gate of their own.

        When the context has ended, the caller makes the operations that were built inside wait for
        a gate.
        """
        return replaced(vars(self), {"_is_gating": True})

    def inside_islands(self, islands: Any) -> ContextManager[None]:
        """Returns a context for building updates inside of islands.

        `islands` says how an `OuterOptimizer` divides the mesh (`IslandAxes`). As long as the
        context is open, the attribute `islands` has this value. If `islands` is None, the attribute
        keeps the value that it has.
        """
        return replaced(vars(self), {"islands": islands or self.islands})

    def move_to_end(self, operations: Sequence[mtf.Operation]) -> None:
        """Moves operations to the end of the graph's list, in the given order.

        No other operations may use the outputs of the operations that are moved.
        """
        moved = set(operations)
        listed = self.graph.operations
        listed[:] = [op for op in listed if op not in moved] + list(operations)

    def state(self, owner: Any, name: str, make: Callable[[], Any]) -> Any:
        """Returns the state that a wrapper keeps in this graph, any object that `make` returns.

        `make` is called only on the first call for a wrapper. `owner` is the wrapper, and `name` is
        the wrapper's name, with which the names of its variables begin. Raises a ValueError if
        another wrapper of this name has state in the graph.
        """
        other, state = self._states.get(name, (lambda: None, None))
        if other() is owner:
            return state
        if other() is not None:
            raise ValueError(
                f"Two {type(owner).__name__}s named {name!r} in one graph would share their "
                "counters; give each a name= of its own."
            )
        state = make()
        self._states[name] = (weakref.ref(owner), state)
        return state

    def extension(self, kind: type[_Extension]) -> _Extension:
        """Returns the plan's `PlanExtension` of the class `kind`; makes it on the first call."""
        if kind not in self._extensions:
            self._extensions[kind] = kind()
        return self._extensions[kind]

    def known_extension(self, kind: type[_Extension]) -> _Extension | None:
        """Returns the plan's `PlanExtension` of the class `kind`; None if it was not made yet.

        The method `extension` makes such an object; this method makes none.
        """
        return self._extensions.get(kind)

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Returns a context; if an error leaves it, changes of the mtf graph and plan are undone.

        Operations that were added to the TensorFlow graph before the error stay in this graph, but
        no mesh operation uses them.
        """
        graph = self.graph
        lists = (graph.operations, graph.all_variables, graph.trainable_variables)
        before = [list(items) for items in lists]
        names = dict(graph.name_to_variable)
        wanted = {k: copy.copy(v) for k, v in vars(self).items() if k != "graph"}
        wanted["_extensions"] = {kind: copy.copy(one) for kind, one in self._extensions.items()}
        try:
            yield
        except BaseException:
            # Looked up again: Mesh-TF 0.1.21 replaces the list of operations when it combines
            # assignments.
            lists = (graph.operations, graph.all_variables, graph.trainable_variables)
            for items, old in zip(lists, before):
                items[:] = old
            graph.name_to_variable.clear()
            graph.name_to_variable.update(names)
            vars(self).update(wanted)
            raise

    # The lowering.

    def build_deferred(self) -> None:
        """Builds all deferred updates of the graph that are still to be built."""
        while self.deferred:
            self.deferred[0].build()

    def adopt(self) -> list[mtf.Operation]:
        """Makes this plan lower all operations of the graph; returns those that are new to it."""
        new = [op for op in flat(self.graph.operations) if not isinstance(op, Planned)]
        for operation in new:
            operation.__class__ = _planned(operation.__class__)
        return new

    def lowering_state(self, lowering: mtf.Lowering) -> LoweringState:
        """Returns the plan's state for a lowering; raises ValueError before the lowering begins."""
        if not self.has_lowered(lowering):
            raise ValueError(
                "A wrapper's operation is lowered before the wrapper has made its whole update. A "
                "program must not lower each operation right after making it: make the whole step, "
                "apply_grads(...) included, and then mtf.Lowering(graph, ...)."
            )
        return vars(lowering)[_LOWERED]

    def has_lowered(self, lowering: mtf.Lowering) -> bool:
        """Returns whether the plan has begun to lower operations for a lowering."""
        return _LOWERED in vars(lowering)

    def end(self, lowering: mtf.Lowering) -> None:
        """Ends a lowering: calls `end` of all extensions, if the plan lowered any operations."""
        if self.has_lowered(lowering):
            for extension in self.lowering_state(lowering).extensions:
                extension.end()

    def members(self, branch: Any) -> list[mtf.Operation]:
        """Returns the mtf operations that belong to a `Branch`, in the order of lowering."""
        return [op for op in self.graph.operations if self._branch_of.get(op) is branch]

    def lower_branch(self, branch: Any, lowering: mtf.Lowering) -> None:
        """Lowers the operations of a `Branch`, in order; call it in the context `inside_branch`."""
        for operation in self.members(branch):
            with tf.name_scope(operation.name):
                operation.lower(lowering)

    def lower(self, operation: mtf.Operation, lowering: mtf.Lowering) -> None:
        """Lowers an operation by the plan's rules; called by the operation itself."""
        lowered = vars(lowering).get(_LOWERED) or self._begin(operation, lowering)
        branch = self._branch_of.get(operation)
        if operation in lowered.early or (branch is not None and branch is not lowered.branch):
            return
        of_extensions = [x.waits[operation] for x in lowered.extensions if operation in x.waits]
        finds = [*self._waits.get(operation, ()), *of_extensions]
        waits = [op for find in finds for op in find(lowering)]
        with tf.control_dependencies(waits) if waits else contextlib.nullcontext():
            for extension in lowered.extensions:
                if extension.lower(operation):
                    return
            operation.lower_itself(lowering)

    @contextlib.contextmanager
    def inside_branch(self, branch: Any, lowering: mtf.Lowering) -> Iterator[None]:
        """Returns a context in which the operations of `branch` can be lowered."""
        lowered = self.lowering_state(lowering)
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(vars(lowered), {"branch": branch}))
            stack.enter_context(keep_sums_pending_outside(lowering))
            for extension in lowered.extensions:
                stack.enter_context(extension.inside_branch())
            yield

    def _begin(self, first: mtf.Operation, lowering: mtf.Lowering) -> LoweringState:
        lowered = vars(lowering)[_LOWERED] = LoweringState(scope_around(first))
        self._give_stacks_to_branches(self.adopt())
        forget_closed_scopes()
        begun = [extension.begin(lowering) for extension in self._extensions.values()]
        lowered.extensions = [one for one in begun if one is not None]
        scope, zeros = tf.get_variable_scope(), _shared_zeros()
        with tf.variable_scope(scope, initializer=zeros, auxiliary_name_scope=False):
            self._lower_variables(lowering, lowered)
        return lowered

    def _give_stacks_to_branches(self, new: Sequence[mtf.Operation]) -> None:
        """Adds each operation that autostack made to the branch that uses the operation's outputs.

        Right before the assignment of a stacked variable, autostack makes an operation that stacks
        the assigned values. `new` are the graph's operations that were made after the last call of
        `adopt`, autostack's among them.
        """
        fresh = set(new)
        wanted: dict[mtf.Tensor, Any] = {}
        for operation in reversed(self.graph.operations):
            branch = self._branch_of.get(operation)
            is_free = operation not in self._branch_of and not unstacks_variable(operation)
            feeds = operation in fresh and is_free
            if feeds and not isinstance(operation, mtf.Variable):
                branch = next((wanted[t] for t in operation.outputs if t in wanted), None)
                if branch is not None:
                    self._branch_of[operation] = branch
            if branch is not None:
                wanted.update((t, branch) for t in operation.inputs)

    def _lower_variables(self, lowering: mtf.Lowering, lowered: LoweringState) -> None:
        several_reads = {*self._in_place, *self._assigned_by_program(lowered)}
        for operation in list(self.graph.operations):
            is_variable = isinstance(operation, mtf.Variable)
            if not is_variable and not unstacks_variable(operation):
                continue
            if operation not in lowering.variables:  # Mesh-TF may have lowered a stacked one
                lowered.early.add(operation)
                with lowered.name_scope(operation.name):
                    if not any(
                        extension.lower_variable(operation) for extension in lowered.extensions
                    ):
                        operation.lower_itself(lowering)
            if isinstance(operation, mtf.StackedVariable) or operation in several_reads:
                continue
            if is_variable:
                with lowered.name_scope(operation.name), tf.name_scope("read_once"):
                    _read_once(operation, lowering)
            lowered.reads.setdefault(operation.mesh, []).extend(operation.outputs)

    def _assigned_by_program(self, lowered: LoweringState) -> set[mtf.Variable]:
        """Returns the variables that assignments write without waiting, outside of branches.

        Such assignments are the program's own: neither the plan nor one of its extensions makes
        them wait for anything.
        """
        waiting = {operation for extension in lowered.extensions for operation in extension.waits}
        return {
            variable
            for operation in flat(self.graph.operations)
            if isinstance(operation, mtf.Assign)
            and self.waits_for_nothing(operation)
            and operation not in waiting
            for variable in operation.variables
        }


def unstacks_variable(operation: mtf.Operation) -> bool:
    """Returns whether an operation unstacks a variable that Mesh-TF's autostack has stacked."""
    return isinstance(operation, mtf.UnstackOperation) and isinstance(
        operation.inputs[0].operation, mtf.StackedVariable
    )


def unstack_operations(graph: mtf.Graph) -> list[mtf.Operation]:
    """Returns a graph's operations that unstack variables; Mesh-TF's autostack makes them."""
    return [operation for operation in graph.operations if unstacks_variable(operation)]


def _read_once(variable: mtf.Variable, lowering: mtf.Lowering) -> None:
    """Reads a variable, and makes this read the lowered value that all operations share.

    Without this function each operation reads the variable again, before or after the variable is
    assigned (see docs/races.md), because Mesh-TF 0.1.21 lowers a variable to the variable object.
    On a SIMD mesh the lowered value is a tensor already, and stays as it is.
    """
    lowered = lowering.tensors[variable.value].to_laid_out_tensor()
    if not all(isinstance(x, tf.Tensor) for x in lowered.tensor_list):
        value = lowering.mesh_impl(variable).slicewise(tf.convert_to_tensor, lowered)
        lowering.set_tensor_lowering(variable.value, value)


def keep_sums_pending_outside(lowering: mtf.Lowering) -> ContextManager[None]:
    """Returns a context for lowering a branch, at whose end sums reduced inside are pending again.

    The context is for sums that Mesh-TF itself leaves pending. Operations after the branch cannot
    use a sum that was reduced in the branch, because the branch may be skipped. So operations after
    the branch reduce the sum again.
    """
    copies = {
        tensor: mtf.LazyAllreduceSum(
            lazy.mesh_impl, lazy.laid_out_input, lazy.mesh_axes, lazy.add_counter_fn
        )
        for tensor, lazy in lowering.tensors.items()
        if type(lazy) is mtf.LazyAllreduceSum and reduced_value(lazy) is None
    }
    return replaced(lowering.tensors, copies)


def _shared_zeros() -> Callable[..., tf.Tensor]:
    """Returns an initializer of slices that makes one tensor for all slices of a shape and dtype.

    The initializers of slices never run, because slices get their values as copies of masters. But
    if a scope has no initializer, TensorFlow makes operations for a random initial value of each
    slice. These would be a fifth of all operations on a placement mesh.
    """
    made: dict[Any, tf.Tensor] = {}

    def zeros(shape: Sequence[int], dtype: tf.DType, **_: Any) -> tf.Tensor:
        key = (*shape, dtype)
        if key not in made:
            made[key] = tf.zeros(shape, dtype)
        return made[key]

    return zeros


def scope_around(operation: mtf.Operation) -> str:
    """Returns the name scope around that of `operation`; "" if there is none.

    Call this function while Mesh-TF lowers the operation. Mesh-TF has then opened a name scope for
    the operation, and this function returns the scope in which it has opened it.
    """
    inner = tf.get_default_graph().get_name_scope().split("/")
    # A name with slashes opens nested scopes, of which the last may have a number added.
    return "/".join(inner[: -(operation.name.count("/") + 1)])
