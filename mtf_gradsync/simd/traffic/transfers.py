"""Lists what a placement mesh copies between devices, in the same report as collectives."""

from __future__ import annotations

import collections
import math
from typing import Any, NamedTuple, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.mesh.devices import process_of
from mtf_gradsync.mesh.text import mesh_text
from mtf_gradsync.simd.graph.facts import Branch, Context, GraphFacts, Loop
from mtf_gradsync.simd.graph.loops import turns_in
from mtf_gradsync.simd.traffic.report import CommunicationReport, CommunicationRow

# Operations that call functions, whose content is not listed.
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")


def has_calls(graph: tf.Graph) -> bool:
    """Returns whether a graph calls functions, in which copies are not listed.

    An update that is not always due may be such a call.
    """
    return any(operation.type in _CALLS for operation in graph.get_operations())


def list_transfers(fetches: Sequence[Any], mesh_impl: Any) -> CommunicationReport:
    """Lists the copies between the devices of a placement mesh.

    A tensor is copied once to each device that uses it. Copies from and to devices outside the
    mesh (the host's inputs, master variables) are not listed, nor what TensorFlow would place
    differently from what the graph asks for.

    Args:
      fetches: the tensors and operations of one step, as for ``session.run``; what they do not
        need is not counted.
      mesh_impl: the ``PlacementMeshImpl`` that the graph was lowered with; its devices have to be
        different from each other.

    Returns:
      The report: one row for each name scope, dtype, loop or branch, and set of mesh axes along
      which source and target differ.

    Raises:
      ValueError: when there are no fetches, or two cores of the mesh share one device string.
    """
    operations = _operations(fetches, "list_transfers")
    devices = {_canonical(device): core for core, device in enumerate(mesh_impl.devices)}
    if len(devices) != mesh_impl.size:
        raise ValueError(
            f"list_transfers needs a device of its own for each of the {mesh_impl.size} cores, "
            f"got {list(mesh_impl.devices)}."
        )
    facts = GraphFacts(operations[0].graph.as_graph_def())
    copies: dict[tuple[Any, ...], list[tf.Tensor]] = collections.defaultdict(list)
    seen: set[tuple[str, str]] = set()
    for operation in _needed(operations):
        for tensor in operation.inputs:
            source, target = _canonical(tensor.op.device), _canonical(operation.device)
            if source == target or source not in devices or target not in devices:
                continue
            if (tensor.name, target) in seen or tensor.dtype == tf.resource:
                continue
            seen.add((tensor.name, target))
            scope = operation.name.rpartition("/")[0] or operation.name
            axes = _axes_between(mesh_impl, devices[source], devices[target])
            context = facts.context[operation.name]
            copies[scope, tensor.dtype.name, axes, context].append(tensor)
    rows = [_row(facts, key, tensors, mesh_impl.size) for key, tensors in copies.items()]
    return CommunicationReport(tuple(rows), mesh_text(mesh_impl.shape))


class ProcessTransfers(NamedTuple):
    """The messages between processes in a step.

    Attributes:
      tensors: messages that carry a tensor.
      bytes: size of these tensors; None where a shape is unknown.
      signals: messages without content, from operations that others wait for.
    """

    tensors: int
    bytes: int | None
    signals: int


def count_process_transfers(fetches: Sequence[Any]) -> ProcessTransfers:
    """Counts what a step sends between the processes of a cluster.

    TensorFlow sends a tensor once to each process that uses it, on however many devices. What
    stands in a loop counts once; what stands in branches counts whether they are taken or not.
    Not counted: to and from operations that are on no certain process, which TensorFlow places
    (usually with the session's master); what a collective operation sends by itself; and the
    fetched values on their way to the client.

    Args:
      fetches: the tensors and operations of one step, as for ``session.run``.

    Returns:
      The counts. What Grappler adds or removes is not in them.

    Raises:
      ValueError: when there are no fetches.
    """
    tensors: dict[tuple[str, Any], tf.Tensor] = {}
    signals = set()
    for operation in _needed(_operations(fetches, "count_process_transfers")):
        target = _certain_process(operation)
        for tensor in operation.inputs:
            if _is_sent(tensor.op, target) and tensor.dtype != tf.resource:
                tensors[tensor.name, target] = tensor
        for before in operation.control_inputs:
            if _is_sent(before, target):
                signals.add((before.name, target))
    known = all(x.shape.is_fully_defined() for x in tensors.values())
    return ProcessTransfers(
        tensors=len(tensors),
        bytes=sum(x.shape.num_elements() * x.dtype.size for x in tensors.values())
        if known
        else None,
        signals=len(signals),
    )


def _is_sent(source: tf.Operation, target: Any) -> bool:
    return target is not None and _certain_process(source) not in (None, target)


def _certain_process(operation: tf.Operation) -> Any:
    process = process_of(operation.device or "")
    return None if process[-1] is None else process


def _operations(fetches: Sequence[Any], caller: str) -> list[tf.Operation]:
    operations = [getattr(fetch, "op", fetch) for fetch in tf.nest.flatten(fetches)]
    if not operations:
        raise ValueError(f"{caller} needs the tensors and operations of a step, got none.")
    return operations


def _canonical(device: str) -> str:
    return tf.DeviceSpec.from_string(device or "").to_string()


def _needed(operations: Sequence[tf.Operation]) -> list[tf.Operation]:
    """Returns all operations that some need, themselves included, in order of creation."""
    graph_order = {op.name: i for i, op in enumerate(operations[0].graph.get_operations())}
    needed: dict[str, tf.Operation] = {}
    pending = list(operations)
    while pending:
        operation = pending.pop()
        if operation.name not in needed:
            needed[operation.name] = operation
            pending += [tensor.op for tensor in operation.inputs]
            pending += operation.control_inputs
    return sorted(needed.values(), key=lambda op: graph_order[op.name])


def _axes_between(mesh_impl: Any, source: int, target: int) -> str:
    """Returns the mesh axes along which two cores differ, joined by "+"."""
    pairs = zip(
        mesh_impl.shape.dims,
        mtf.pnum_to_processor_coordinates(mesh_impl.shape, source),
        mtf.pnum_to_processor_coordinates(mesh_impl.shape, target),
    )
    return "+".join(dim.name for dim, a, b in pairs if a != b)


def _row(
    facts: GraphFacts, key: tuple[str, str, str, Context], tensors: list[tf.Tensor], cores: int
) -> CommunicationRow:
    scope, dtype, axes, context = key
    known = all(t.shape.is_fully_defined() for t in tensors)
    total = sum(t.shape.num_elements() * t.dtype.size for t in tensors) if known else None
    return CommunicationRow(
        operation="transfer",
        name=f"{scope}/transfer",
        dtype=dtype,
        shape=None,
        bytes_per_core=None if total is None else math.ceil(total / cores),
        group=axes,
        loops=tuple(c.frame for c in context if isinstance(c, Loop)),
        turns=turns_in(facts, context),
        branches=tuple((c.predicate, c.taken) for c in context if isinstance(c, Branch)),
    )
