"""Orders an update's operations so that its sums over the mesh are reduced in groups.

An inner optimizer updates one variable after the other, and Mesh-TF reduces each sum (a mean of
squares, a norm) where it is first used: that makes hundreds of small messages for Adafactor. Here
operations are sorted by level, the number of reductions that they wait for, and the sums of one
level are reduced together.
"""

from __future__ import annotations

import types
from typing import Sequence

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.gradients.pending import Flow, Layout, PendingSums
from mtf_gradsync.gradients.pending.linear import is_product_or_sum
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.step import Plan


def group_sums(operations: Sequence[mtf.Operation], axes: ReplicaAxes, strategy: Strategy) -> None:
    """Moves operations to the end of their graph, so that independent sums are reduced together.

    Each of them comes after those that it depends on, and no other operation uses their outputs.
    """
    sums = [t for op in operations if is_product_or_sum(op) for t in op.outputs]
    graph = types.SimpleNamespace(operations=list(operations))
    flow = Flow(graph, (), Layout.of(axes, operations[0].mesh), sums)
    pending = [t for t in sums if t in flow.axes and not flow.is_derived(t)]
    level_of: dict[mtf.Operation, int] = {}
    for operation in operations:
        level = 0
        is_pending = any(t in flow.axes for t in operation.outputs)
        for source in operation.inputs:
            waits = source in flow.axes and (
                not is_pending or source in flow.forced.get(operation, ())
            )
            level = max(level, level_of.get(source.operation, 0) + waits)
        level_of[operation] = level
    # Mesh-TF runs assignments last in any case; they keep their order.
    last = max(level_of.values()) + 1
    order = sorted(operations, key=lambda op: last if isinstance(op, mtf.Assign) else level_of[op])
    Plan.of(operations[0].graph).arrange(order)
    if pending:
        PendingSums.want(pending, True, axes.batch_dims, strategy, are_sums=True)
