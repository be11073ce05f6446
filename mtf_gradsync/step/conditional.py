"""Work that a step does only when it is due: skipped otherwise, not masked out."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._warn import warn_once
from mtf_gradsync.step.as_call import can_call, run_as_call
from mtf_gradsync.step.gate import Gate, ungated


class Branch:
    """The operations of a conditional, taken out of the graph's own list.

    Variables stay in the graph, and so do assignments: Mesh-TF's autostack has to find them
    there. What is assigned is lowered inside the branch all the same.

    Attributes:
      operations: what computes, in order.
      updates: the assignments and other operations that the branch returned.
    """

    def __init__(self, graph: mtf.Graph, make: Callable[[], Sequence[mtf.Operation]]):
        start = len(graph.operations)
        with ungated(graph):
            self.updates = list(make())
        # Mesh-TF's combine_assignments makes a new list of the operations.
        operations = graph.operations
        made = operations[start:]
        stay = set(self.updates)
        self.operations = [op for op in made if not isinstance(op, mtf.Variable) and op not in stay]
        del operations[start:]
        operations += [op for op in made if isinstance(op, mtf.Variable) or op in stay]


class Conditional(mtf.Operation):
    """Runs a branch when it is due; the operations of the branch are its updates.

    All processors must decide alike: the predicate has the same value everywhere. The updates of
    the branch, looked up in the lowering, are one tf operation, which runs the branch if it is
    due.
    """

    def __init__(
        self,
        predicate: mtf.Tensor,
        gate: Gate,
        branch: Branch,
        behind: Sequence[mtf.Operation],
        as_call: bool = True,
    ):
        """Adds the conditional, behind the variables that its branch made.

        Args:
          predicate: a boolean mtf scalar.
          gate: the point of the step to wait for.
          branch: what to run where the predicate holds.
          behind: operations of the step to wait for, too.
          as_call: whether skipping the branch is to be cheap, by one call where that can be. A
            call costs what it is handed on every step, so a branch that takes all gradients and
            runs on most steps is better off without.
        """
        super().__init__([predicate], name="conditional")
        self._gate = gate
        self._branch = branch
        self._behind = list(behind)
        self._as_call = as_call
        # Its updates stand in the graph's list already; what they are made of is lowered here.
        operations = self.graph.operations
        operations.pop()
        updates = set(branch.updates)
        first = next((i for i, op in enumerate(operations) if op in updates), len(operations))
        operations.insert(first, self)

    @property
    def updates(self) -> list[mtf.Operation]:
        """The operations of the branch."""
        return self._branch.updates

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        predicate = lowering.tensors[self.inputs[0]].to_laid_out_tensor().tensor_list[0]
        later = self.graph.operations[self.graph.operations.index(self) + 1 :]
        feeding = _feeding(later, self.updates)
        in_call = self._as_call and can_call(lowering)

        def run() -> tf.Operation:
            with contextlib.ExitStack() as stack:
                stack.enter_context(_PendingOutside(lowering))
                stack.enter_context(_no_summaries())
                if in_call:
                    stack.enter_context(_read_inside(lowering, self.updates))
                for op in [*self._branch.operations, *feeding, *self.updates]:
                    with tf.name_scope(op.name):
                        op.lower(lowering)
            return tf.group(*[lowering.operations[op] for op in self.updates])

        waited_for = [lowering.operations[op] for op in self._behind]
        with tf.control_dependencies([self._gate.barrier(lowering), *waited_for]):
            done = tf.cond(predicate, lambda: run_as_call(run) if in_call else run(), tf.no_op)
        for op in self.updates:
            lowering.operations[op] = done.op
        for op in [*feeding, *self.updates]:
            _skip_once(op, lowering)


@contextlib.contextmanager
def _read_inside(lowering: mtf.Lowering, updates: Sequence[mtf.Operation]) -> Iterator[None]:
    """Reads the variables that updates assign within a call, instead of handing the values in.

    Nothing else writes them in this step, and a value that is handed in from another device
    costs a transfer even when the call is not made.
    """
    before = dict(lowering.tensors)
    assigned = {v for op in updates if isinstance(op, mtf.Assign) for v in op.variables}
    for variable in assigned:
        lowered = lowering.variables[variable].laid_out_tensor
        mesh_impl = lowering.mesh_impl(variable)
        dtype = variable.activation_dtype
        value = mesh_impl.slicewise(
            lambda x, dtype=dtype: tf.cast(tf.convert_to_tensor(x), dtype), lowered
        )
        lowering.tensors[variable.value] = value
        # Autostack takes stacked variables apart right behind them.
        if isinstance(variable, mtf.StackedVariable):
            for op in variable.graph.operations:
                if isinstance(op, mtf.UnstackOperation) and op.inputs[0] is variable.value:
                    op.lower(lowering)
    yield
    lowering.tensors.clear()
    lowering.tensors.update(before)


def _feeding(behind: Sequence[mtf.Operation], updates: Sequence[mtf.Operation]) -> list[Any]:
    """Operations that stand behind the conditional only to feed its updates.

    Autostack puts the values that a stacked variable is assigned together by operations of its
    own, right before the assignment.
    """
    wanted = {t for op in updates for t in op.inputs}
    own = set(updates)
    feeding: list[mtf.Operation] = []
    for op in reversed(behind):
        if op not in own and wanted.intersection(op.outputs):
            feeding.insert(0, op)
            wanted.update(op.inputs)
    return feeding


def _skip_once(op: mtf.Operation, lowering: mtf.Lowering) -> None:
    """Makes the graph's walk pass over an operation that was lowered already."""
    lower = op.lower

    def lower_elsewhere(other: mtf.Lowering) -> None:
        if other is not lowering:
            lower(other)

    op.lower = lower_elsewhere


@contextlib.contextmanager
def _no_summaries() -> Iterator[None]:
    """Leaves out scalar summaries of a branch: on the steps that skip it they have no value."""
    summaries = tf.get_collection_ref(mtf.utils.SCALAR_SUMMARIES_COLLECTION_KEY)
    before = len(summaries)
    yield
    if summaries[before:]:
        warn_once(
            "summaries in a branch",
            "The scalar summaries %s are made by an update that runs on some steps only; they are "
            "left out.",
            [name for name, _ in summaries[before:]],
        )
        del summaries[before:]


class _PendingOutside:
    """Keeps all-reduces that run inside a branch from being taken for ones outside.

    A pending sum caches its all-reduce; one that ran in a branch has no value for readers
    outside, or in the other branch.
    """

    def __init__(self, lowering: mtf.Lowering):
        self._lowering = lowering

    def __enter__(self) -> None:
        self._before = {
            tensor: lowered
            for tensor, lowered in self._lowering.tensors.items()
            if isinstance(lowered, mtf.LazyAllreduceSum) and lowered._reduced is None
        }
        for tensor, lazy in self._before.items():
            self._lowering.tensors[tensor] = mtf.LazyAllreduceSum(
                lazy.mesh_impl, lazy.laid_out_input, lazy.mesh_axes, lazy.add_counter_fn
            )

    def __exit__(self, *_: Any) -> None:
        self._lowering.tensors.update(self._before)
