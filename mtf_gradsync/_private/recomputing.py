"""Keeps the shards of a recomputed block apart, which Mesh-TF 0.1.21 ties together."""

from __future__ import annotations

from typing import Any

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync._private.patches import patch

# What Mesh-TF multiplies the gradient by: so small that nothing changes by it, but for a NaN.
_NOTHING = 1e-30


def recompute_each_shard_by_itself() -> None:
    """Makes `mtf.recompute_grad` wait for the gradient of each example alone, not for their sum.

    So that XLA does not merge a recomputation with the original, Mesh-TF adds next to nothing of
    the incoming gradient to what the block is recomputed from, but of its sum over all examples: an
    all-reduce for each block, by which a NaN of one shard reaches the gradients of all.
    """

    def each_shard_by_itself(unused_original: Any) -> Any:
        return _recompute

    patch(mtf.ops, "_recompute_grad_grad", each_shard_by_itself)


def _recompute(
    explicit_inputs: list[mtf.Tensor],
    all_inputs: list[mtf.Tensor],
    forward_operations: list[mtf.Operation],
    outputs: list[mtf.Tensor],
    output_grads: list[mtf.Tensor],
    control_dependencies: bool,
) -> list[mtf.Tensor | None]:
    """The gradient of `mtf.recompute_grad`, called as Mesh-TF calls its own."""
    given = {t: t for t in all_inputs}
    if control_dependencies:
        given.update(_after(output_grads[0], [t for t in explicit_inputs if t.dtype.is_floating]))
    operations, copies = all_inputs[0].graph.clone_operations(forward_operations, given)
    grads = mtf.ops.gradients(
        ys=[copies[t] for t in outputs],
        xs=[given[t] for t in all_inputs],
        grad_ys=output_grads,
        operations=operations,
    )
    for x, grad in zip(all_inputs, grads):
        if x.dtype.is_floating and grad is None:
            raise ValueError(f"mtf.recompute_grad: the block has no gradient by {x}.")
    return grads


def _after(grad: mtf.Tensor, tensors: list[mtf.Tensor]) -> dict[mtf.Tensor, mtf.Tensor]:
    """Makes those tensors wait for a gradient that have its first dimension, the examples.

    The others would wait for a sum over examples. Where none has it, those wait that have most
    dimensions in common with the gradient, and variables only if there are no others.
    """
    first = grad.shape.dims[:1]
    shared = {t: [d for d in grad.shape.dims if d in t.shape.dims] for t in tensors}
    made = [t for t in tensors if not isinstance(t.operation, mtf.Variable)] or tensors
    most = max((len(shared[t]) for t in made), default=0)
    waiting = [t for t in made if first and first[0] in shared[t]]
    waiting = waiting or [t for t in made if len(shared[t]) == most]
    nothing = grad * _NOTHING
    return {
        t: t + mtf.cast(mtf.reduce_sum(nothing, output_shape=mtf.Shape(shared[t])), t.dtype)
        for t in waiting
    }
