"""What a difference comes from: what in a model depends on its division, and usual faults."""

from __future__ import annotations

from typing import Mapping, NamedTuple, Sequence

from mtf_gradsync.extension import mtf
from mtf_gradsync.tools.verification.comparing import behind


class Dependence(NamedTuple):
    """Something in a model that depends on how it is divided.

    Attributes:
      text: what it is, and what would do.
      by_steps: whether it depends only on which examples are in one step, and not on the mesh.
      is_random: whether it is random numbers.
    """

    text: str
    by_steps: bool = False
    is_random: bool = False


def dependences(losses: Sequence[mtf.Tensor], batch_dims: Sequence[str]) -> list[Dependence]:
    """Returns what in the models behind losses depends on how they are divided."""
    there = behind(losses)
    forward = [op for graph in {x.graph for x in losses} for op in graph.operations if op in there]
    found = []
    names = [op.name for op in forward if isinstance(op, mtf.ops.RandomOperation)]
    if names:
        found.append(
            Dependence(
                f"random numbers are drawn for each shard and microbatch ({_some(names)}); take "
                "them out by without dropout or random",
                is_random=True,
            )
        )
    dims = {d.name for op in forward for x in op.outputs for d in x.shape.dims}
    capacity = sorted(name for name in dims if "capacity" in name)
    if capacity:
        found.append(
            Dependence(
                f"experts take a number of examples of each group ({', '.join(capacity)}), and "
                "what is beyond it depends on the groups"
            )
        )
    statistics = _statistics(forward, batch_dims)
    if statistics:
        found.append(
            Dependence(
                f"statistics of the batch come back to its examples ({_some(statistics)}), and a "
                "microbatch has others",
                by_steps=True,
            )
        )
    return found


def _statistics(forward: Sequence[mtf.Operation], batch_dims: Sequence[str]) -> list[str]:
    """Returns operations in which something summed over the batch meets the examples again."""
    summed: dict[mtf.Tensor, bool] = {}

    def has_batch(x: mtf.Tensor) -> bool:
        return any(d.name in batch_dims for d in x.shape.dims)

    found = []
    for op in forward:
        from_sums = any(summed.get(x, False) and not has_batch(x) for x in op.inputs)
        for out in op.outputs:
            falls = any(has_batch(x) for x in op.inputs) and not has_batch(out)
            summed[out] = falls or any(summed.get(x, False) for x in op.inputs)
            if from_sums and has_batch(out) and any(has_batch(x) for x in op.inputs):
                found.append(op.name)
    return found


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(list(dict.fromkeys(names))[:3])
    return shown if len(names) <= 3 else f"{shown}, and {len(names) - 3} more"


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
