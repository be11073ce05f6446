"""The order of an update's operations in which its sums over the mesh are made together.

An inner optimizer updates one variable after the other, and Mesh-TF makes each sum (a mean of
squares, a norm) where it is first used: hundreds of small ones for Adafactor. Here all operations
that need no sum come first, for all variables; then those that need sums of the former; and so on.
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


def sum_together(
    operations: Sequence[mtf.Operation], axes: ReplicaAxes, strategy: Strategy
) -> None:
    """Makes sums over the mesh cross it together that do not need each other.

    Args:
      operations: of one graph, each after what it needs, with all uses of what they make.
      axes: the replica axes.
      strategy: how the sums cross.
    """
    sums = [t for op in operations if is_product_or_sum(op) for t in op.outputs]
    graph = types.SimpleNamespace(operations=list(operations))
    flow = Flow(graph, (), Layout.of(axes), sums)
    pending = [t for t in sums if t in flow.axes and not flow.is_derived(t)]
    wave: dict[mtf.Tensor, int] = {}
    wave_of: dict[mtf.Operation, int] = {}
    for operation in operations:
        own = 0
        carries = any(t in flow.axes for t in operation.outputs)
        for source in operation.inputs:
            waits = source in flow.axes and (
                not carries or source in flow.forced.get(operation, ())
            )
            own = max(own, wave.get(source, 0) + waits)
        wave_of[operation] = own
        wave.update((t, own) for t in operation.outputs)
    last = max(wave_of.values()) + 1
    # Assignments are made last in any case, and keep the place that Mesh-TF gives them.
    order = sorted(operations, key=lambda op: last if isinstance(op, mtf.Assign) else wave_of[op])
    Plan.of(operations[0].graph).arrange(order)
    if pending:
        PendingSums.want(pending, True, axes.batch_dims, strategy, are_sums=True)
