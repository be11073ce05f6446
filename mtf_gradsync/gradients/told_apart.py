"""Whether each shard's part of a gradient is recoverable."""

from __future__ import annotations

from typing import Optional, Sequence

from mtf_gradsync._names import some_lines
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.gradients.pending import Cause, Flow, Layout, Mixing, check_batch_dims
from mtf_gradsync.mesh.axes import ReplicaAxes

MaybeGradients = Sequence[Optional[mtf.Tensor]]

_ACCEPT = "give accept_summed=True: each shard then counts for an equal share of the gradient"
# What an operation does, and what to do about that.
_SAYS = {
    Cause.NEEDS_SUM: (
        "needs the sum over all shards first and is not linear in it (a norm of all gradients, a "
        "product of two of them, a broadcast of the sum to the batch)",
        "Do that after the optimizer has taken the gradients (ClipByGlobalNormOptimizer clips "
        f"their sum), or {_ACCEPT}",
    ),
    Cause.GATHERS: (
        "gathers what all shards hold, not by a sum (a reshape to dimensions that the layout does "
        "not split, a maximum over the batch, an operation of the program's own)",
        "Keep the dimension of the batch split there (a mixture of experts: let its groups be "
        f"split as the batch is), or {_ACCEPT}",
    ),
    Cause.DROPS_SUM: (
        "runs on each processor's slices alone, and its result lacks a dimension that they are "
        "split along, so that nobody sums it over the shards and each has another result",
        "Give the result that dimension, of the size of its mesh axis, and sum it by "
        "mtf.reduce_sum",
    ),
}


def mixed_gradients(grads: MaybeGradients, axes: ReplicaAxes) -> dict[int, Mixing]:
    """Finds gradients in which the shards' parts cannot be told apart.

    Args:
      grads: gradients of the variables' shapes; None is passed over.
      axes: the replica axes, of the mesh that the program will be lowered on.

    Returns:
      The position of each such gradient, and an operation that mixed the shards.

    Raises:
      ValueError: the batch is split over other axes.
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
    return Flow(grads[0].graph, grads, Layout.of(axes))


def check_told_apart(
    grads: MaybeGradients, axes: ReplicaAxes, names: Sequence[str] | None = None
) -> None:
    """Checks that each shard's part of gradients can be told apart.

    Args:
      grads: as for `mixed_gradients`.
      axes: likewise.
      names: what to call the gradients, by position; None takes their tensors' names.

    Raises:
      ValueError: names the gradients and the operations that mixed the shards, says what those
        do and what would help; or the batch is split over other axes.
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
        "Each shard's own part cannot be told apart in some gradients, because "
        + "\nOthers, because ".join(paragraphs)
    )
