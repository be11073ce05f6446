"""Checks whether per-shard gradients are recoverable from gradients."""

from __future__ import annotations

from typing import Sequence

from mtf_gradsync._names import some_lines
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.gradients.checks import MaybeGradients
from mtf_gradsync.gradients.pending import Cause, Flow, Layout, Mixing, check_batch_dims
from mtf_gradsync.mesh.axes import ReplicaAxes

_ACCEPT = "give accept_summed=True to take an equal share of the gradient for each shard"
# For each cause what the operation does, and how to avoid it.
_SAYS = {
    Cause.NEEDS_SUM: (
        "needs the sum over all shards and is not linear in it (a norm of all gradients, a "
        "product of two gradients, a broadcast of the sum to the batch)",
        "Do that inside the optimizer (ClipByGlobalNormOptimizer clips the reduced gradients), "
        f"or {_ACCEPT}",
    ),
    Cause.GATHERS: (
        "gathers the values of all shards without a sum (a reshape to dimensions that the layout "
        "does not split, a maximum over the batch, an operation of the program's own)",
        "Keep the dimension of the batch split there (in a mixture of experts, split its groups "
        f"as the batch is split), or {_ACCEPT}",
    ),
    Cause.DROPS_SUM: (
        "runs on each processor's slices alone and drops a dimension that they are split along, "
        "so that each shard has another result, and nothing sums them",
        "Give the result that dimension, of the size of its mesh axis, and sum over it with "
        "mtf.reduce_sum",
    ),
}


def mixed_gradients(grads: MaybeGradients, axes: ReplicaAxes) -> dict[int, Mixing]:
    """Returns, by the position of each gradient that mixes shards, an operation that mixed them.

    The gradients have no shard dims. The axes are of the mesh that the program will be lowered on;
    a batch that is split over others is a ValueError.
    """
    present = [g for g in grads if g is not None]
    if not present:
        return {}
    check_batch_dims(present, axes)
    if axes.num_shards == 1:
        return {}
    flow = _flow(present, axes)
    found = {i: flow.mixes_shards(g) for i, g in enumerate(grads) if g is not None}
    return {i: mixing for i, mixing in found.items() if mixing is not None}


def summed_elsewhere(grads: MaybeGradients, axes: ReplicaAxes) -> list[int]:
    """Returns the positions of gradients for which `per_shard` may make a sum of their size.

    It reduces these over axes other than the replica axes.
    """
    present = [g for g in grads if g is not None]
    if not present:
        return []
    flow = _flow(present, axes)
    sums_first = any(use.first for use in flow.uses.values())
    replica_axes = set(axes.mesh_axes)
    found = {g for g in present if sums_first or flow.axes.get(g, frozenset()) - replica_axes}
    return [i for i, g in enumerate(grads) if g in found]


def pending_over_shards(grads: Sequence[mtf.Tensor], axes: ReplicaAxes) -> list[bool]:
    """Returns for each gradient without shard dims whether it is pending over a replica axis."""
    if not grads:
        return []
    flow = _flow(grads, axes)
    return [bool(flow.axes.get(g, frozenset()) & set(axes.mesh_axes)) for g in grads]


def _flow(grads: Sequence[mtf.Tensor], axes: ReplicaAxes) -> Flow:
    return Flow(grads[0].graph, grads, Layout.of(axes, grads[0].mesh))


def check_recoverable(
    grads: MaybeGradients, axes: ReplicaAxes, names: Sequence[str] | None = None
) -> None:
    """Raises ValueError unless per-shard gradients are recoverable; see `mixed_gradients`.

    The error names the gradients, by `names` or by their tensors, and the operations, and says what
    helps.
    """
    mixed = mixed_gradients(grads, axes)
    if not mixed:
        return
    paragraphs = []
    for cause in dict.fromkeys(mixing.cause for mixing in mixed.values()):
        lines = []
        for i, (operation, why) in mixed.items():
            grad = grads[i]
            if why is cause and grad is not None:
                name = names[i] if names else f"gradient {i} ({grad.name})"
                lines.append(f"\n  {name}: {type(operation).__name__} {operation.name!r}")
        what, cure = _SAYS[cause]
        paragraphs.append(f"an operation {what}:{some_lines(lines)}\n{cure}.")
    raise ValueError(
        "Per-shard gradients are not recoverable from some gradients, because "
        + "\nThey are not recoverable from others, because ".join(paragraphs)
    )
