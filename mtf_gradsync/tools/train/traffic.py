"""Lists what the cores exchange in the model, the gradients and the optimizer of a step."""

from __future__ import annotations

from typing import Callable, Iterable, NamedTuple

from mtf_gradsync.extension import mtf, tf, walk
from mtf_gradsync.runtimes import simd
from mtf_gradsync.runtimes.simd import CommunicationReport
from mtf_gradsync.runtimes.simd.collectives import list_step
from mtf_gradsync.tools.train.train_graph import TrainGraph

# The forward and backward pass, the sums that reduce gradients, and everything else.
MODEL, GRADIENTS, OPTIMIZER = "model", "gradients", "optimizer"
PARTS = (MODEL, GRADIENTS, OPTIMIZER)

# Operations that move a tensor, or a part of it, and keep its values.
_MOVES = frozenset({
    "Add", "AddN", "AddV2", "Cast", "ConcatV2", "Enter", "Exit", "ExpandDims", "Identity", "Merge",
    "NextIteration", "Pack", "Pad", "PadV2", "Reshape", "Slice", "Split", "SplitV", "Squeeze",
    "StridedSlice", "Switch", "Transpose", "Unpack",
})  # fmt: skip
_PASSES_HANDLES = frozenset({"Enter", "Identity", "Switch"})
# Operations that scale, clip or skip gradients before they are summed. No reduction is here, so
# that a norm or a mean of a gradient counts as the optimizer's.
_CHANGES = _MOVES | {"Mul", "Neg", "RealDiv", "Select", "SelectV2"}
_ACCUMULATES = "AssignAddVariableOp"


def part_of_each_collective(graph: TrainGraph, report: CommunicationReport) -> dict[str, str]:
    """Returns which part of a training step each collective belongs to, one of `PARTS`.

    `report` lists the collectives of the training step whose graph is `graph`. The result is a
    dictionary from the name of each row in `report` to its part of the step.
    """
    partial, reduced = [], []
    for grad in graph.gradients:
        lowered = graph.lowering.tensors[grad]
        if isinstance(lowered, mtf.LazyAllreduceSum):
            partial += lowered.laid_out_input.to_laid_out_tensor().tensor_list
        else:
            # Reduced in the backward pass already, because an operation there takes the sum.
            reduced += lowered.to_laid_out_tensor().tensor_list
    names = {row.name for row in report.rows}
    # A sum may be made in stages, of which each takes the result of the one before.
    sums = _reducing_operations(partial, names) | _operations_behind(
        reduced, lambda op: op.type in _MOVES
    )
    # Values that are summed together with gradients count as gradients.
    with_gradients = {row.together for row in report.rows if row.name in sums} - {""}
    sums |= {row.name for row in report.rows if row.together in with_gradients}
    model = _operations_behind([*partial, *reduced, graph.loss], lambda op: True)
    return {
        name: GRADIENTS if name in sums else MODEL if name in model else OPTIMIZER for name in names
    }


def _reducing_operations(tensors: Iterable[tf.Tensor], names: set[str]) -> set[str]:
    """Returns the names of the operations that reduce gradients.

    `tensors` are the cores' gradients before they are reduced, and `names` are the names of all
    collectives of the step. From `tensors`, the function follows operations that only move, scale
    or skip values, or accumulate them in a variable. The result has the names of the collectives
    that it reaches, and of the operations on the way.
    """

    def users(tensors: Iterable[tf.Tensor]) -> list[tf.Operation]:
        found = [op for tensor in tensors for op in tensor.consumers()]
        return [op for op in found if op.type in (*_CHANGES, _ACCUMULATES) or op.name in names]

    def users_of_results(op: tf.Operation) -> list[tf.Operation]:
        # What an accumulator holds is read where the sum is made.
        return users(_values_read(op.inputs[0]) if op.type == _ACCUMULATES else op.outputs)

    return {op.name for op in walk(users(tensors), users_of_results)}


def _values_read(handle: tf.Tensor) -> list[tf.Tensor]:
    """Returns the tensors that are read from a resource variable, also inside branches.

    `handle` is the tensor by which operations refer to the variable, or a copy of it in a branch.
    """
    while handle.op.type in _PASSES_HANDLES:
        handle = handle.op.inputs[0]

    def readers(op: tf.Operation) -> list[tf.Operation]:
        if op.type == "ReadVariableOp":
            return []
        found = [user for tensor in op.outputs for user in tensor.consumers()]
        return [x for x in found if x.type == "ReadVariableOp" or x.type in _PASSES_HANDLES]

    reads = [op for op in walk([handle.op], readers) if op.type == "ReadVariableOp"]
    return [value for op in reads for value in op.outputs]


def _operations_behind(
    tensors: Iterable[tf.Tensor], passes: Callable[[tf.Operation], bool]
) -> set[str]:
    """Returns the names of all operations from which `tensors` are computed.

    `passes` is called with each operation that is found. It returns whether the search goes on to
    the operations that make this operation's inputs.
    """

    def makers(op: tf.Operation) -> list[tf.Operation]:
        return [tensor.op for tensor in op.inputs] if passes(op) else []

    return {op.name for op in walk((tensor.op for tensor in tensors), makers)}


_PART_LABELS = dict(zip(PARTS, ("forward and backward", "gradients", "optimizer")))


class TrafficRow(NamedTuple):
    """All collectives of one kind over the same mesh axes, or all copies between devices.

    Attributes:
      operation: the kind of the collectives; "transfer" for copies.
      group: the mesh axes along which the collectives run.
      part: the part of the training step that the collectives belong to; "" if unknown.
      on_updates: whether only update steps have these collectives.
      operations: the number of the collectives.
      groups: the number of the collectives, where all sums of one group of sums count as one.
      bytes_per_core: the bytes that a core sends, or a device receives, in one update step.
    """

    operation: str
    group: str
    part: str
    on_updates: bool
    operations: int
    groups: int
    bytes_per_core: int


class Traffic(NamedTuple):
    """The bytes that a core exchanges in a training step.

    `every_step` is the number of bytes in each step, and `update_step` the number in a step that
    makes an update. `rows` lists the bytes by kind of collective and part of the step. `scalars`
    are totals by their names in summaries. `is_complete` is false if the update may be in functions
    of TensorFlow, which are not examined. If it is false, `scalars` is empty.
    """

    every_step: int
    update_step: int
    rows: list[TrafficRow]
    scalars: dict[str, float]
    is_complete: bool = True


def list_traffic(graph: TrainGraph, program: simd.Program | None) -> Traffic | None:
    """Lists the mesh traffic of a training step in the default graph, without running it.

    `graph` is the graph of the step, and `program` is its SIMD program, None on a placement mesh.
    Returns None if the totals of the traffic cannot be known, as on a mesh whose processors share a
    device.
    """
    (mesh_impl,) = graph.lowering.mesh_to_impl.values()
    place = mesh_impl if program is None else program
    report = list_step(place, [graph.loss, graph.step], graph.optimizers, graph.lowering)
    if report is None:
        return None
    parts = part_of_each_collective(graph, report) if program is not None else {}
    kinds: dict[tuple[str, str, str, bool], list[simd.CommunicationRow]] = {}
    for row in report.rows:
        part = _PART_LABELS.get(parts.get(row.name, ""), "")
        key = (row.operation, row.group, part, row.is_conditional)
        kinds.setdefault(key, []).append(row)
    rows = []
    for key, found in kinds.items():
        total = CommunicationReport(tuple(found)).update_step
        rows.append(TrafficRow(*key, total.operations, total.groups, total.bytes_per_core))
    return Traffic(
        report.every_step.bytes_per_core,
        report.update_step.bytes_per_core,
        sorted(rows, key=lambda row: -row.bytes_per_core),
        report.scalars(),
        report.is_complete,
    )
