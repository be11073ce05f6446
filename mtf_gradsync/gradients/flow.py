"""Finds the sums over the mesh that may stay pending (not yet reduced) up to the gradients.

A gradient becomes a sum over the batch at the first operation of the backward pass whose result has
no batch dimension. In an ordinary model, the operations that compute the gradient from this sum are
linear in the sum, with factors that are the same on all shards. So these operations can run on each
processor's part of the sum, and the parts can be added up afterwards.
"""

from __future__ import annotations

import enum
import functools
import logging
from collections import Counter
from typing import Any, Callable, Collection, Iterable, NamedTuple, Sequence

import numpy as np

from mtf_gradsync._common import walk
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import (
    custom_gradient_results,
    loop_body,
    output_gradients,
    reduction_kind,
    slice_function,
)
from mtf_gradsync._private.tensorflow import trace_function
from mtf_gradsync.gradients.layout import IDENTITIES, Axes, Layout
from mtf_gradsync.gradients.operations import GradientOperation
from mtf_gradsync.step.plan import flat

_logger = logging.getLogger("mtf_gradsync")


class Use(NamedTuple):
    """The way in which an operation computes pending results from pending (not reduced) inputs.

    Attributes:
      positions: the positions of some inputs. The operation is linear in these inputs together. The
        operation's other inputs are factors.
      axes: the mesh axes that the operation's outputs stay pending over because its inputs are
        pending over them.
      first: the mesh axes over which pending inputs are reduced before the operation, because one
        of the operation's inputs or outputs is split over them. None of them is a replica axis.
      summed_axes: the mesh axes that the operation itself sums over.
      is_smaller: whether the operation's result has fewer bytes than the pending sums that it is
        computed from. Sums that other operations read, too, are not counted. If true, the result is
        reduced in place of the sums.
    """

    positions: tuple[int, ...]
    axes: Axes
    first: Axes
    summed_axes: Axes
    is_smaller: bool = False

    @property
    def reduces_results(self) -> bool:
        """Whether the operation's results are themselves summed over the mesh once they are needed.

        If false, the operation's inputs are reduced, and its results are computed from the reduced
        inputs.
        """
        return (bool(self.summed_axes) or self.is_smaller) and not self.first


class Cause(enum.Enum):
    """A reason why a tensor is not a sum of one term per shard."""

    #: An operation needs the sum over the shards and is not linear in it.
    NEEDS_SUM = enum.auto()
    #: An operation gathers values of all shards without a sum.
    GATHERS = enum.auto()
    #: An operation on slices drops a dimension that the shards split, and nothing sums over it.
    DROPS_SUM = enum.auto()
    #: The result is split over an axis of the batch, and a slice is not of one shard's data alone.
    SPLIT = enum.auto()


class Mixing(NamedTuple):
    """An operation that mixes shards' data, so that per-shard gradients are lost, and the cause."""

    operation: mtf.Operation
    cause: Cause


class Flow:
    """A forecast of which operations keep sums pending (not yet reduced), up to target tensors.

    The forecast follows the operations that compute the target tensors, back to tensors that are
    split by shard, so that each shard holds its own data. Other operations that read a pending sum
    found on the way are also followed, to find out whether their results are used. Mesh-TF makes
    the gradients of all inputs of an operation, also those that nothing uses. A sum is to be
    reduced for an operation only if the operation's result is used.

    Attributes:
      operations: the operations that the forecast follows.
      axes: pending tensor -> the mesh axes that it is pending over.
      uses: operation -> how it keeps sums pending; only operations that can keep sums pending are
        keys.
      forced: operation -> the pending inputs that have to be reduced before the operation runs.
      reduced: operation -> the mesh axes that it sums over, if this sum cannot stay pending. The
        reason is that a loop carries the sum, or that the operation's result is split over one of
        these axes.
      broadcast: einsums that first sum and then broadcast the sum to new dimensions.
      carried: tensors that loops carry into their next iteration; these have to be reduced.
    """

    def __init__(
        self,
        graph: mtf.Graph,
        targets: Collection[mtf.Tensor],
        layout: Layout,
        sums: Iterable[mtf.Tensor] = (),
    ):
        """Follows the operations that compute the targets, usually gradients, and `sums`.

        Tensors that the layout splits so that each shard has a slice of its own are usually not
        followed: they count as data of the shards. The tensors `sums` are followed even if they are
        split in this way. Thus their sums over other mesh axes can stay pending, and be reduced
        together.
        """
        self._layout = layout
        # Whether the layout splits a tensor over the shards.
        self._is_split = functools.lru_cache(maxsize=None)(layout.is_split_over_shards)
        self.axes: dict[mtf.Tensor, Axes] = {}
        self.uses: dict[mtf.Operation, Use] = {}
        self.forced: dict[mtf.Operation, list[mtf.Tensor]] = {}
        self.reduced: dict[mtf.Operation, Axes] = {}
        self.broadcast: set[mtf.Operation] = set()
        self.operations = {op for t in (*targets, *sums) for op in self.operations_before(t)}
        self.operations.update(t.operation for t in sums)
        used = Counter(t for op in self.operations for t in set(op.inputs))
        in_order = flat(graph.operations)
        self.carried = _carried_by_loops(in_order)
        for operation in in_order:
            if operation in self.operations or self._is_made_of_pending(operation):
                self.operations.add(operation)
                self._follow(operation)
        # A sum that something else uses as well has to be reduced for that use anyway.
        used.update([*dict.fromkeys(targets), *(t for ts in self.forced.values() for t in ts)])
        for op in (t.operation for t in targets if self._is_smaller_than_its_sums(t, used)):
            self.uses[op] = self.uses[op]._replace(is_smaller=True)

    # Which operations compute a tensor.

    def _sources(self, tensor: mtf.Tensor) -> list[mtf.Tensor]:
        """Returns the tensors that a tensor is directly computed from.

        The result is empty for a variable, and for a tensor that the layout splits over the shards.
        """
        operation = tensor.operation
        if self._is_split(tensor) or isinstance(operation, mtf.Variable):
            return []
        if isinstance(operation, IDENTITIES):
            return [_inputs_passed_on(operation)[operation.outputs.index(tensor)]]
        if isinstance(operation, mtf.WhileLoopOperation):
            if tensor not in operation.outputs:  # a loop's variable, seen from inside
                return []
            number = operation.outputs.index(tensor)
            before = operation.inputs[number : number + 1]
            return [loop_body(operation).outputs[number], *before]
        return operation.inputs

    def _tensors_before(self, target: mtf.Tensor) -> list[mtf.Tensor]:
        """Returns a tensor and all that it is computed from, directly or indirectly.

        The walk back ends at tensors that the layout splits over the shards; these are left out.
        """
        return [t for t in walk([target], self._sources) if not self._is_split(t)]

    def operations_before(self, target: mtf.Tensor) -> list[mtf.Operation]:
        """Returns the operations that a tensor is computed by, directly or indirectly.

        The walk back ends at tensors that the layout splits over the shards; the operations that
        make these are left out.
        """
        return list(dict.fromkeys(t.operation for t in self._tensors_before(target)))

    def _is_made_of_pending(self, operation: mtf.Operation) -> bool:
        return any(t in self.axes for t in operation.inputs) and not any(
            self._is_split(t) for t in operation.outputs
        )

    # Which sums stay pending.

    def _follow(self, operation: mtf.Operation) -> None:
        outputs = operation.outputs
        if isinstance(operation, mtf.WhileLoopOperation):
            # Sums over the iterations of a loop stay pending (Mesh-TF's accumulators).
            self._give(outputs, loop_body(operation).outputs)
            return
        own = self._summed_axes(operation)
        pending = {i: self.axes[t] for i, t in enumerate(operation.inputs) if t in self.axes}
        late = own and own & Axes().union(*map(self._layout.split, outputs))
        if late or self.carried.intersection(outputs):
            self._force(operation, own)
            return
        if isinstance(operation, IDENTITIES):
            self._give(outputs, _inputs_passed_on(operation))
            return
        if pending and self._mesh_tf_delays(operation, pending):
            self._give(outputs, [operation.inputs[0]] * len(outputs))
            return
        use = self._use(operation, pending, own) if pending else None
        if use is not None:
            self.uses[operation] = use
            own = own | use.axes
        elif pending and not getattr(operation, "takes_pending", False):
            self._force(operation, Axes())
        if own:
            self.axes.update((t, own) for t in outputs)
            if (use is None or use.reduces_results) and sums_before_broadcast(
                operation
            ) is not None:
                self.broadcast.add(operation)

    def _force(self, operation: mtf.Operation, own: Axes) -> None:
        pending = [t for t in operation.inputs if t in self.axes]
        if pending:
            self.forced[operation] = pending
        if own:
            self.reduced[operation] = own

    def _give(self, outputs: list[mtf.Tensor], sources: list[mtf.Tensor]) -> None:
        self.axes.update((o, self.axes[s]) for o, s in zip(outputs, sources) if s in self.axes)

    def _summed_axes(self, operation: mtf.Operation) -> Axes:
        """Returns the mesh axes that an operation itself sums over; an empty set if none."""
        if not is_product_or_sum(operation):
            return Axes()
        kept = {d for t in operation.outputs for d in t.shape.dims}
        summed = {d for t in operation.inputs for d in t.shape.dims} - kept
        return Axes({self._layout.axis_of(operation.mesh, d) for d in summed} - {None})

    def _mesh_tf_delays(self, operation: mtf.Operation, pending: dict[int, Axes]) -> bool:
        """Returns whether Mesh-TF, without this package, leaves an operation's result pending.

        `pending` has the positions of pending inputs, each with the mesh axes that the input is
        pending over.
        """
        inputs = operation.inputs
        if any(self.is_derived(t) for t in inputs) or len(pending) != len(inputs):
            return False
        if isinstance(operation, mtf.ReshapeOperation):
            sizes = self._layout.sizes_before_axes  # equal if the reshape moves no data
            return sizes(inputs[0]) == sizes(operation.outputs[0])
        return (
            isinstance(operation, mtf.AddOperation)
            and len(set(pending.values())) == 1
            and all(t.shape == operation.outputs[0].shape for t in inputs)
        )

    def _use(self, operation: mtf.Operation, pending: dict[int, Axes], own: Axes) -> Use | None:
        axes = Axes().union(*pending.values())
        tensors = [*operation.inputs, *operation.outputs]
        # If a tensor is split along a mesh axis, processors along the axis need the reduced sum.
        first = axes & Axes().union(*[self._layout.split(t) for t in tensors])
        if first & self._layout.replica_axes(operation.mesh):
            return None
        positions = linear_positions(operation, pending) if axes - first or own else None
        # Integers cannot be divided into equal shares.
        if positions is None or any(operation.inputs[i].dtype.is_integer for i in positions):
            return None
        return Use(positions, axes - first, first, own)

    def _is_smaller_than_its_sums(self, target: mtf.Tensor, used: Counter[mtf.Tensor]) -> bool:
        """Returns whether reducing a target sends less than reducing the sums that it comes from.

        The bytes of the target are compared with the bytes of the sums. A sum that another
        operation reads, too, is left out, because it may have to be reduced for that operation in
        any case. `used` has for each tensor the number of operations that read it.

        The result is false if one of the sums is pending over other mesh axes than the target. It
        is also false if a sum is cast to a narrower dtype on the way to the target, because the sum
        is then reduced in its own, more precise dtype.
        """
        operation, left = target.operation, target.shape.size * target.dtype.size
        is_sum = operation not in self.uses or operation in self.broadcast
        todo = [] if is_sum or len(operation.outputs) > 1 else [target]
        while todo:
            tensor = todo.pop()
            for source in dict.fromkeys(tensor.operation.inputs):
                # A sum that is cast to a narrower dtype is reduced in its own, for its precision.
                is_rounded = source in self.axes and source.dtype.size > tensor.dtype.size
                if is_rounded or self.axes.get(source, self.axes[target]) != self.axes[target]:
                    return False
                is_shared = used[source] > 1 or len(source.operation.outputs) > 1
                if source not in self.axes or is_shared:
                    continue
                if source.operation in self.uses and self.is_derived(source):
                    todo.append(source)
                elif self._layout.split(source) <= self._layout.split(target):
                    left -= source.shape.size * source.dtype.size
        return left < 0

    # What the forecast says about tensors.

    def keeps_pending(self, operation: mtf.Operation) -> bool:
        """Returns whether an operation's results stay pending if its inputs do; False for loops."""
        if operation in self.uses:
            return True
        is_loop = isinstance(operation, (mtf.WhileLoopOperation, mtf.CustomGradientOperation))
        return not is_loop and all(
            self.axes.get(t) == self.axes[operation.outputs[0]] for t in operation.inputs
        )

    def is_derived(self, tensor: mtf.Tensor) -> bool:
        """Returns whether a pending tensor is computed from other sums once these are reduced.

        For a derived tensor, the pending sums that it is computed from are reduced, and the reduced
        tensor is computed from the reduced sums. For any other pending tensor, the parts of the
        tensor itself are added up.
        """
        use = self.uses.get(tensor.operation)
        return (use is not None and not use.reduces_results) or tensor.operation in self.broadcast

    def sums_to_reduce(self, targets: Iterable[mtf.Tensor], reduced: bool) -> list[mtf.Tensor]:
        """Returns the pending sums that have to be reduced before `targets` can be used.

        Each sum is listed once. If `reduced` is true, the tensors `targets` are needed reduced. If
        `reduced` is false, the targets may stay pending, and the only sums returned are those that
        some operation before a target needs reduced.
        """
        found: dict[mtf.Tensor, None] = {}
        seen: set[tuple[mtf.Tensor, bool]] = set()
        todo = [(t, reduced) for t in targets]
        while todo:
            tensor, needed = todo.pop()
            if (tensor, needed) in seen or tensor.operation not in self.operations:
                continue
            seen.add((tensor, needed))
            operation = tensor.operation
            derived = self.is_derived(tensor) and operation not in self.broadcast
            passed = needed and (derived or isinstance(operation, IDENTITIES))
            if (needed and tensor in self.axes and not passed) or operation in self.reduced:
                found[tensor] = None
            forced = self.forced.get(operation, ())
            todo += [(source, passed or source in forced) for source in self._sources(tensor)]
        return list(found)

    def mixes_shards(
        self, target: mtf.Tensor, causes: Collection[Cause] = frozenset(Cause)
    ) -> Mixing | None:
        """Returns an operation before `target` that mixes shards' data other than by a sum.

        The returned `Mixing` has the operation, and the cause of the mixing. Only operations whose
        cause is one of `causes` are looked for. The result is None if there is no such operation.
        """
        replica_axes = self._layout.replica_axes
        for tensor in self._tensors_before(target):
            operation = tensor.operation
            forced = [self.axes[t] & replica_axes(t.mesh) for t in self.forced.get(operation, ())]
            own = self.reduced.get(operation, Axes()) & replica_axes(operation.mesh)
            cause = None
            if Axes().union(own, *forced):
                cause = Cause.NEEDS_SUM
            elif self._gathers(tensor):
                cause = Cause.DROPS_SUM if runs_on_slices(operation) else Cause.GATHERS
                if isinstance(operation, mtf.AddOperation):
                    cause = Cause.SPLIT  # one of the terms is not the shards' own
            if cause is not None and cause in causes:
                return Mixing(operation, cause)
        return None

    def missing_sums(
        self, targets: Sequence[mtf.Tensor]
    ) -> dict[mtf.Operation, tuple[Cause, mtf.Tensor]]:
        """Returns operations after which a sum over the shards may be missing.

        A sum is missing if an operation drops or gathers a dimension that the shards split, and the
        program does not add up the shards' values. `targets` are gradients.

        The keys of the returned dictionary are the operations. The value of an operation is a pair.
        The first element is the cause: `Cause.DROPS_SUM` if the operation drops a dimension that
        the shards split, and `Cause.GATHERS` if it gathers values of all shards. The second element
        is one of the targets, which is computed by this operation and needs the sum. Operations of
        Mesh-TF that gather values of all shards are not in the dictionary, because they communicate
        by themselves.
        """
        found: dict[mtf.Operation, tuple[Cause, mtf.Tensor]] = {}
        if any(self._gathers(t) for operation in self.operations for t in operation.outputs):
            for target in targets:
                mixing = self.mixes_shards(target, (Cause.DROPS_SUM, Cause.GATHERS))
                if mixing is not None and _is_suspect(mixing.operation, mixing.cause):
                    found.setdefault(mixing.operation, (mixing.cause, target))
        return found

    def _gathers(self, tensor: mtf.Tensor) -> bool:
        """Returns whether a tensor has values of all shards that were gathered and not summed.

        The operation that makes a gathered tensor has inputs that are split by shard, and the
        tensor itself is not split by shard.
        """
        operation = tensor.operation
        is_loop = isinstance(operation, mtf.WhileLoopOperation)
        if is_loop or isinstance(operation, IDENTITIES) or is_product_or_sum(operation):
            return False
        if is_between_meshes(operation):
            return True  # the shards of one mesh are not those of the other
        split = Axes().union(*[self._layout.split_over_shards(t) for t in operation.inputs])
        return bool(split - self._layout.split_over_shards(tensor))


def is_between_meshes(operation: mtf.Operation) -> bool:
    """Returns whether an operation's inputs and outputs are on different meshes."""
    return any(t.mesh is not operation.mesh for t in operation.inputs)


def _is_suspect(operation: mtf.Operation, cause: Cause) -> bool:
    if is_between_meshes(operation):
        return False  # it communicates by itself, in a way that the dimensions do not show
    of_mesh_tf = type(operation).__module__.startswith("mesh_tensorflow")
    is_own = not of_mesh_tf and not isinstance(operation, GradientOperation)
    return cause is Cause.DROPS_SUM or is_own


def _carried_by_loops(operations: Iterable[mtf.Operation]) -> set[mtf.Tensor]:
    """Returns the tensors that loops carry into the next iteration, which must be reduced."""
    return {
        tensor
        for operation in operations
        if isinstance(operation, mtf.WhileLoopOperation)
        for tensor in loop_body(operation).outputs[: len(operation.inputs)]
    }


def _inputs_passed_on(operation: mtf.Operation) -> list[mtf.Tensor]:
    """Returns, for each output of `operation`, the tensor whose value this output has.

    `operation` must be one of `IDENTITIES`.
    """
    if isinstance(operation, mtf.CustomGradientOperation):
        return custom_gradient_results(operation)
    return operation.inputs


# What operations of Mesh-TF do with sums.

# Linear in all of their inputs together: each output is a sum of terms of one input each.
_JOINTLY = (
    mtf.AddOperation,
    mtf.BroadcastOperation,
    mtf.ConcatOperation,
    mtf.Depend,
    mtf.PadOperation,
    mtf.ReshapeOperation,
    mtf.ScalarAddOperation,  # its scalar is divided equally among the terms
    mtf.ScalarMultiplyOperation,
    mtf.ShiftOperation,
    mtf.SliceOperation,
    mtf.SplitOperation,
    mtf.StackOperation,
    mtf.UnstackOperation,
)
# Products: linear in each of their inputs while the others are factors.
_IN_EACH = (
    mtf.EinsumOperation,
    mtf.Conv2dOperation,
    mtf.Conv3dOperation,
    mtf.Conv2dTransposeOperation,
    mtf.Conv3dTransposeOperation,
    mtf.Conv2or3dBackpropInputOperation,
    mtf.Conv2or3dBackpropFilterOperation,
)


def is_product_or_sum(operation: mtf.Operation) -> bool:
    """Returns whether an operation sums over the dimensions that its outputs lack."""
    if isinstance(operation, mtf.ReduceOperation):
        return reduction_kind(operation) == "SUM"
    return isinstance(operation, _IN_EACH)


def runs_on_slices(operation: mtf.Operation) -> bool:
    """Returns whether an operation runs on each processor's slices, without communication."""
    return isinstance(
        operation,
        (mtf.SlicewiseOperation, mtf.GenericGradOperation, mtf.BinaryOpWithBroadcasting),
    )


def sums_before_broadcast(operation: mtf.Operation) -> mtf.Shape | None:
    """Returns the shape of an einsum's sum before the einsum broadcasts it to new dimensions.

    The result is None for operations that are no einsums, and for einsums without new output
    dimensions.
    """
    if not isinstance(operation, mtf.EinsumOperation):
        return None
    known = {d for t in operation.inputs for d in t.shape.dims}
    (output,) = operation.outputs
    kept = [d for d in output.shape.dims if d in known]
    return mtf.Shape(kept) if kept != output.shape.dims else None


def linear_positions(operation: mtf.Operation, pending: Collection[int]) -> tuple[int, ...] | None:
    """Returns the positions of inputs that, taken together, an operation is linear in; or None.

    `pending` has the positions of the pending inputs, at least one. The result has these positions.
    It also has the positions of inputs that the operation is linear in only together with the
    pending inputs, such as the other terms of a sum. The result is None if the operation is not
    known to be linear in its pending inputs.
    """
    inputs = operation.inputs
    if isinstance(operation, _IN_EACH):
        return tuple(pending) if len(pending) == 1 else None
    if isinstance(operation, mtf.GenericGradOperation):
        found = range(len(inputs))[-len(output_gradients(operation)) :]
    elif isinstance(operation, mtf.ReduceOperation):
        found = range(1 if reduction_kind(operation) == "SUM" else 0)
    elif isinstance(operation, mtf.PoolBackPropOperation):
        found = range(2, 3)
    elif isinstance(operation, _JOINTLY):
        found = range(len(inputs))
    elif isinstance(operation, (mtf.SlicewiseOperation, mtf.BinaryOpWithBroadcasting)):
        return _of_function(operation, pending)
    else:
        return None
    return tuple(found) if set(found).issuperset(pending) else None


def _of_function(operation: mtf.Operation, pending: Collection[int]) -> tuple[int, ...] | None:
    shapes = [x.shape for x in operation.inputs]
    if isinstance(operation, mtf.BinaryOpWithBroadcasting):
        # The function gets slices that were broadcast to the output's shape.
        shapes = [operation.outputs[0].shape] * 2
    specs = [(s.to_integer_list, x.dtype) for s, x in zip(shapes, operation.inputs)]
    floating = [i for i, x in enumerate(operation.inputs) if x.dtype.is_floating]
    # The fewest inputs first: the others may be factors.
    for found in (tuple(sorted(pending)), tuple(floating)):
        if set(found).issuperset(pending) and linear_arguments(
            slice_function(operation), specs, found
        ):
            return found
    return None


# What operations of TensorFlow are linear in.

# Linear in the first input; others are shapes, axes, divisors and the like.
_FIRST = frozenset({
    "BroadcastTo", "Cast", "Conj", "Cumsum", "Div", "DivNoNan", "ExpandDims", "GatherNd",
    "GatherV2", "Identity", "MatrixDiagV3", "Mean", "MirrorPad", "Neg", "Pad", "RealDiv", "Reshape",
    "ReverseV2", "Roll", "Slice", "Snapshot", "SplitV", "Squeeze", "StopGradient", "StridedSlice",
    "Sum", "Tile", "Transpose", "Unpack",
})  # fmt: skip
# The inputs that an operation is linear in together.
_TOGETHER = {
    **dict.fromkeys(_FIRST, slice(1)),
    "Split": slice(1, 2),
    **dict.fromkeys(("Add", "AddN", "AddV2", "Pack", "Sub"), slice(None)),
    "ConcatV2": slice(-1),  # the last is an axis
    **dict.fromkeys(("Select", "SelectV2"), slice(1, None)),
}
# Linear in each input by itself.
_PRODUCTS = frozenset({
    "BatchMatMul", "BatchMatMulV2", "Conv2D", "Conv2DBackpropFilter", "Conv2DBackpropInput",
    "Conv3D", "Einsum", "MatMul", "Mul", "MulNoNan",
})  # fmt: skip
# Stateful for TensorFlow, but with the same result on all processors.
_REPEATABLE = frozenset({"ReadVariableOp", "VarHandleOp"})


class _Dependence(enum.Enum):
    """A tensor's dependence on a function's arguments: none, linear, or (if it is zero) both."""

    SHARED = enum.auto()
    LINEAR = enum.auto()
    ZERO = enum.auto()  # both of the others


def linear_arguments(
    fn: Callable[..., Any],
    specs: Sequence[tuple[Sequence[int], tf.DType]],
    arguments: Sequence[int],
) -> bool:
    """Returns whether a function is known to be linear in some arguments, taken together.

    The function takes tf tensors of the shapes and dtypes in `specs`; `arguments` has the positions
    of the arguments in question. The function is called once, in a graph of its own. The check
    knows only TensorFlow's simplest operations, so that it returns False for some linear functions.
    """
    try:
        traced = trace_function(fn, [tf.TensorSpec(shape, dtype) for shape, dtype in specs])
    except Exception as error:  # a user's function, which may not run in another graph
        _logger.debug("%r could not be traced, and counts as not linear: %s", fn, error)
        return False
    terms: dict[str, _Dependence | None] = {
        x.name: _Dependence.LINEAR if i in arguments else _Dependence.SHARED
        for i, x in enumerate(traced.inputs)
    }
    terms.update((inner.name, _Dependence.SHARED) for _, inner in traced.captures)
    for op in traced.operations:
        if any(x.name in terms for x in op.outputs):
            continue
        term = _dependence_of(op, [terms.get(x.name) for x in op.inputs])
        terms.update((x.name, term) for x in op.outputs)
    return all(terms.get(x.name) in (_Dependence.LINEAR, _Dependence.ZERO) for x in traced.outputs)


def _dependence_of(op: tf.Operation, inputs: Sequence[_Dependence | None]) -> _Dependence | None:
    """Returns how a tf operation's results depend on the arguments of a traced function.

    `inputs` has the dependence of each input of the operation. None, in `inputs` and as the result,
    means that the dependence is not known, or is of a kind that `_Dependence` lacks.
    """
    if None in inputs or (op.op_def.is_stateful and op.type not in _REPEATABLE):
        return None  # each processor would draw random numbers of its own
    if op.type == "ZerosLike" or (
        op.type == "Const" and not np.any(tf.make_ndarray(op.get_attr("value")))
    ):
        return _Dependence.ZERO
    linear = [i for i, term in enumerate(inputs) if term is _Dependence.LINEAR]
    if not linear:
        return _Dependence.SHARED
    if op.type in _PRODUCTS:
        return _Dependence.LINEAR if len(linear) == 1 else None
    if op.type == "Cast" and not all(x.dtype.is_floating for x in (*op.inputs, *op.outputs)):
        return None
    together = range(len(inputs))[_TOGETHER.get(op.type, slice(0))]
    fits = set(linear).issubset(together) and all(
        inputs[i] is not _Dependence.SHARED for i in together
    )
    return _Dependence.LINEAR if fits else None
