"""Training steps that the tests of this folder look into, and what TensorFlow makes of them."""

from __future__ import annotations

from typing import Any, Callable, Iterable

from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models


def lowered(
    make_optimizer: Callable[[], Any],
    mesh_shape: str = "all:2",
    layout: str = "batch:all",
    autostack: bool = True,
) -> tuple[mtf.Graph, mtf.Lowering, list[tf.Operation]]:
    """Builds the model's training step; returns graph, lowering and the lowered update."""
    inputs = {k: tf.constant(v) for k, v in models.mlp_batches(1)[0].items()}
    graph = mtf.Graph()
    operations, _ = models.train(make_optimizer)(mtf.Mesh(graph, "mesh"), inputs)
    mesh = graph.operations[0].mesh
    lowering = mtf.Lowering(graph, {mesh: harness.placement(mesh_shape, layout)}, autostack)
    return graph, lowering, [lowering.lowered_operation(op) for op in operations]


def ancestors(ops: Iterable[tf.Operation]) -> set[tf.Operation]:
    """All operations that must have run before any of `ops` starts."""
    seen, todo = set(), list(ops)
    while todo:
        op = todo.pop()
        for before in [t.op for t in op.inputs] + list(op.control_inputs):
            if before not in seen:
                seen.add(before)
                todo.append(before)
    return seen


def of_type(graph: tf.Graph, *kinds: str) -> list[tf.Operation]:
    return [op for op in graph.get_operations() if op.type in kinds]
