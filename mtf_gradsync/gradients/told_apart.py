"""Whether each shard's part of a gradient can be told apart."""

from __future__ import annotations

from typing import Any, Optional, Sequence

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.gradients.pending import Flow, Layout
from mtf_gradsync.mesh.axes import ReplicaAxes

MaybeGradients = Sequence[Optional[mtf.Tensor]]


def mixed_gradients(grads: MaybeGradients, axes: ReplicaAxes) -> dict[int, mtf.Operation]:
    """Finds gradients in which the shards' parts cannot be told apart.

    Args:
      grads: gradients of the variables' shapes; None is passed over.
      axes: the replica axes, of the mesh that the program will be lowered on.

    Returns:
      The position of each such gradient, and an operation that mixed the shards: it needed the sum
      over all of them, and is more than linear in it.
    """
    present = [g for g in grads if g is not None]
    if not present or axes.num_shards == 1:
        return {}

    flow = _flow(present, axes)
    found = {i: flow.mixes_shards(g) for i, g in enumerate(grads) if g is not None}
    return {i: operation for i, operation in found.items() if operation is not None}


def summed_elsewhere(grads: MaybeGradients, axes: ReplicaAxes) -> list[int]:
    """Finds gradients whose shards' parts take sums over other mesh axes than the replica axes.

    Args:
      grads: as for `mixed_gradients`.
      axes: likewise.

    Returns:
      The position of each gradient for which `per_shard` may make a sum of its size.
    """
    present = [g for g in grads if g is not None]
    if not present:
        return []
    flow = _flow(present, axes)
    if any(use.first for use in flow.uses.values()):
        return [i for i, g in enumerate(grads) if g is not None]
    beyond = {g for g in present if flow.axes.get(g, frozenset()) - set(axes.mesh_axes)}
    return [i for i, g in enumerate(grads) if g in beyond]


def pending_over_shards(grads: Sequence[mtf.Tensor], axes: ReplicaAxes) -> list[bool]:
    """For each gradient of its variable's shape whether it is still to be reduced over shards.

    Args:
      grads: gradients.
      axes: the replica axes, of the mesh that the program will be lowered on.
    """
    if not grads:
        return []
    flow = _flow(grads, axes)
    return [bool(flow.axes.get(g, frozenset()) & set(axes.mesh_axes)) for g in grads]


def _flow(grads: Sequence[mtf.Tensor], axes: ReplicaAxes) -> Flow:
    def axis_of(mesh: mtf.Mesh, dim: mtf.Dimension) -> int | None:
        del mesh
        return axes.layout.tensor_dimension_to_mesh_axis(dim, axes.mesh_shape)

    layout = Layout(axis_of, lambda mesh: frozenset(axes.mesh_axes))
    return Flow(grads[0].graph, grads, layout)


def check_told_apart(
    grads: MaybeGradients, axes: ReplicaAxes, names: Sequence[str] | None = None
) -> None:
    """Checks that each shard's part of gradients can be told apart.

    Args:
      grads: as for `mixed_gradients`.
      axes: likewise.
      names: what to call the gradients, by position; None takes their tensors' names.

    Raises:
      ValueError: names the gradients and the operations that mixed the shards.
    """
    mixed = mixed_gradients(grads, axes)
    if not mixed:
        return
    of_tensors: Sequence[Any] = grads
    lines = [
        f"{names[i] if names else f'gradient {i} ({of_tensors[i].name})'}: "
        f"{type(operation).__name__} {operation.name!r}"
        for i, operation in mixed.items()
    ]
    raise ValueError(
        "Each shard's own part cannot be told apart in some gradients, because an operation of the "
        "program needs the sum over all shards first and is not linear in it (a norm of all "
        "gradients, a product of two of them):\n  " + "\n  ".join(lines) + "\nDo that after the "
        "optimizer has taken the gradients (ClipByGlobalNormOptimizer clips their sum), or give "
        "accept_summed=True: each shard then counts for an equal share of them."
    )
