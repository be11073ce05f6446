"""What usually makes an update depend on how it is divided."""

from __future__ import annotations

from typing import Mapping

_CLOSE = 1e-3
# The largest error of a sum in bfloat16 whose terms do not cancel, and the least that shows it.
_BFLOAT16 = (2.0**-12, 2.0**-5)


def name_of_factor(factor: float, numbers: Mapping[str, float]) -> str:
    """Returns what a factor is, of numbers by what they are; "" if it is none of them."""
    found = []
    for name, value in numbers.items():
        if value and abs(factor - value) < _CLOSE * value:
            found.append(name)
        elif value and abs(factor * value - 1) < _CLOSE:
            found.append(f"1 over {name}")
    return ", or ".join(found)


def cause_of(
    what: str,
    culprit: str,
    factor: float | None,
    of_factor: str,
    error: float,
) -> str:
    """Returns what usually is the cause of a difference; "" for no idea.

    Args:
      what: what differs.
      culprit: the wrapper, axis or change without which it does not.
      factor: the number that it is multiplied by, if it is one.
      of_factor: what that number is.
      error: how far it is.
    """
    kind = culprit.split("#")[0]
    joins_steps = "Accumulation" in kind or kind == "microbatch steps" or "SyncReplicas" in kind
    if what == "copies":
        return (
            "Processors hold copies of one slice that are not equal: something writes only some "
            "of them, such as an assignment of one device's variable."
        )
    if what == "value before the update":
        return (
            "It changes on steps that only accumulate: a decay, an average or an assignment of "
            "the program's own runs on every microbatch step. Do it in the inner optimizer."
        )
    if what == "loss":
        return (
            "Gradients are equal and the loss that is shown is not: shards or microbatches have "
            "losses of other weights, or it is the loss of one shard."
        )
    if factor is not None and "microbatch steps" in of_factor and factor > 1:
        return "Microbatch gradients are added and not averaged: average_aggregated_gradients=True."
    if factor is not None and factor > 1:
        return (
            "Gradients of shards or copies are added where the mean is meant, or are summed twice: "
            "reduction=SUM, a sum of the program's own before or after that of the wrapper, or a "
            "loss for each shard that is not divided by their number."
        )
    if factor is not None and 0 < factor < 1:
        return (
            "Something divides by it that was divided already: a mean over shards of gradients "
            "that shards have parts of, as of experts, or a learning rate or loss scaled for the "
            "number of shards."
        )
    if factor == 0:
        return "No gradient reaches it: a mask or a stop_gradient that depends on the division."
    if _BFLOAT16[0] < error < _BFLOAT16[1]:
        return (
            "The size of a rounding to bfloat16: a reduction in bfloat16 (reduce_dtype, a cast of "
            "gradients), or partial sums of a product that the mesh splits."
        )
    if joins_steps:
        return (
            "Steps are joined that are not alike: a mean of means where they have unequal tokens "
            "(give weights=), clipping by each microbatch's own norm (clip inside the "
            "accumulation), or examples that are dropped."
        )
    if kind == "CrossShardOptimizer":
        return (
            "Shards are joined that are not alike: a mean of means with unequal tokens (give "
            "weights=), or a variable with a dimension that is called like the batch's."
        )
    return (
        "It is no one factor: shards or microbatches have losses of unequal weight, examples are "
        "dropped, or a dimension is called like the batch's."
    )
