"""The gradient noise scale: up to which size a larger batch saves steps."""

from __future__ import annotations

import contextlib
import math
from typing import Any, NamedTuple, Sequence

import gin

from mtf_gradsync._numbers import is_number
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.optimizers.pipeline import Reduced
from mtf_gradsync.optimizers.report.norms import norm_of_reduced, norms_of_shards
from mtf_gradsync.optimizers.state.variables import scalar_state
from mtf_gradsync.optimizers.wrapper import Wrapper
from mtf_gradsync.step import Gate, Plan, values_after


class NoiseScale(NamedTuple):
    """The gradient noise scale of a training step.

    Attributes:
      value: float32 mtf scalar, in the unit of the batch size, after the step that it is fetched
        with. NaN before the first step.
      updates: mtf operations to run with the optimizer's own, which update the moving averages.
        None if the optimizer's operations include them.
    """

    value: mtf.Tensor
    updates: list[mtf.Operation]


@gin.configurable(module="mtf_gradsync")
def gradient_noise_scale(
    opt: Wrapper,
    batch_size: float,
    decay: float = 0.99,
    axes: ReplicaAxes | None = None,
    name: str = "gradient_noise_scale",
) -> NoiseScale:
    """Estimates the simple noise scale, tr(Sigma) / |G|^2, from the shards' gradients.

    Above about this batch size a larger batch saves few steps. The mean squared norm of the shards'
    gradients (of batch_size / num_shards examples each) is compared with that of their mean (of
    batch_size examples); the estimate is the ratio of two moving averages. It costs a pass over the
    gradients for each norm, and reduces one number for each shard; the sums of gradients are those
    of the optimizer. A step with gradients that are not finite does not count.

    Call it once, after gradients were applied and before the graph is lowered. State, in
    checkpoints: `<name>/trace` and `<name>/squared_norm`.

    Args:
      opt: a wrapper that has applied gradients, of a loss that is a mean or a sum over a batch that
        is split equally.
      batch_size: the number of examples (or another unit, which is then that of the noise scale) in
        the gradients that the optimizer reduces at once: a global batch, or with local accumulation
        all microbatches of an update.
      decay: decay of the moving averages, at least 0 and less than 1.
      axes: the replica axes, if no wrapper was given them; None takes those of the mesh that the
        program has made for this graph.
      name: prefix of the variables' names.

    Returns:
      The noise scale.

    Raises:
      TypeError: opt is not a wrapper.
      ValueError: an argument is out of range; gradients were not applied before, or were not summed
        over several shards, or shards are mixed or skipped.

    References:
      McCandlish et al., "An empirical model of large-batch training", 2018, appendix A.1
    """
    if not is_number(batch_size) or not (math.isfinite(batch_size) and batch_size > 0):
        raise ValueError(f"batch_size must be finite and greater than 0, got {batch_size!r}.")
    if not is_number(decay) or not 0 <= decay < 1:
        raise ValueError(f"decay must be at least 0 and less than 1, got {decay!r}.")
    reduced, axes = _what_was_reduced(opt, axes)
    branch, mesh = reduced.branch, reduced.sums[0].mesh
    plan = Plan.of(mesh.graph)
    with plan.undone_on_error():
        averages = [
            scalar_state(mesh, f"{name}/{field}", tf.float32, stacked=False)
            for field in ("trace", "squared_norm")
        ]
        with branch.opened() if branch else contextlib.nullcontext():
            own, clipped = norms_of_shards(reduced.parts, axes, reduced.strategy)
            parts = own if clipped is None else clipped
            if parts is None:
                raise ValueError(
                    f"gradient_noise_scale cannot compare per-shard gradients of {opt!r}, which "
                    "are not recoverable without sums of the size of gradients."
                )
            total = norm_of_reduced(reduced.sums, reduced.strategy)
            estimates = _estimates(parts, total, axes.num_shards, batch_size)
            made = [
                mtf.assign(average, _moved(average.value, new, estimates, decay))
                for average, new in zip(averages, estimates)
            ]
        if branch is None:
            Gate(plan, estimates).hold(made)
        else:
            branch.updates.extend(made)
        trace, squared_norm = values_after(averages, made)
        # Before the first step this is 0 / 0, a NaN.
        value = mtf.cwise(tf.divide, [trace, squared_norm])
    return NoiseScale(value, made if branch is None else [])


def _what_was_reduced(opt: Any, axes: ReplicaAxes | None) -> tuple[Reduced, ReplicaAxes]:
    """Finds the first reduction over shards of the step that a stack has built."""
    if not isinstance(opt, Wrapper):
        raise TypeError(
            f"gradient_noise_scale needs a wrapper that reduces gradients, got {opt!r}: wrap it, "
            "CrossShardOptimizer(opt)."
        )
    if opt.step is None:
        raise ValueError(f"Apply gradients by {opt!r} before you call gradient_noise_scale.")
    if opt.times_applied > 1:
        raise ValueError(
            f"gradient_noise_scale needs one call of apply_grads, got {opt.times_applied} in this "
            "graph; give apply_grads all variables at once."
        )
    wrappers = opt._wrappers()
    skips = next((w for w in wrappers if w.traits.skips_shards), None)
    if skips is not None:
        raise ValueError(
            f"{type(skips).__name__} skips gradients of some replicas on some steps, so that norms "
            "before and after its sum are not of one batch: gradient_noise_scale needs another "
            "wrapper."
        )
    if opt.step.received and len({g.mesh for g in opt.step.received[0].present}) > 1:
        raise ValueError(
            "gradient_noise_scale compares the shards of one mesh, but the gradients are on "
            "several meshes: use a wrapper for the variables of each mesh."
        )
    axes = axes or opt.axes_now(opt.step.received[0].present)
    steps = [w.step for w in wrappers if w.step is not None]
    reduced = next((s.reduced for s in steps if s.reduced is not None), None)
    if axes is None or axes.num_shards == 1 or reduced is None:
        what = (
            "are on one shard" if axes and axes.num_shards == 1 else "were not summed over shards"
        )
        raise ValueError(
            f"The gradients {what}, but gradient_noise_scale compares several shards. Give axes= "
            "if there are several."
        )
    return reduced, axes


def _estimates(
    parts: mtf.Tensor, total: mtf.Tensor, num_shards: int, batch_size: float
) -> list[mtf.Tensor]:
    """Returns unbiased estimates of tr(Sigma) and |G|^2 by one step, two scalars.

    `parts`, `[shards...]`, are norms of each shard's term of the sum; `total` is the sum's norm.
    """
    small, big = batch_size / num_shards, batch_size
    # A shard's own gradient is num_shards times its term.
    of_shards = mtf.reduce_mean(mtf.square(mtf.cast(parts, tf.float32))) * num_shards**2
    of_sum = mtf.square(mtf.cast(total, tf.float32))
    trace = (of_shards - of_sum) * (1 / (1 / small - 1 / big))
    squared_norm = (of_sum * big - of_shards * small) * (1 / (big - small))
    return [trace, squared_norm]


def _moved(
    average: mtf.Tensor, new: mtf.Tensor, estimates: Sequence[mtf.Tensor], decay: float
) -> mtf.Tensor:
    """Updates a moving average that begins at 0; the bias cancels out in the ratio of two."""

    def move(average: tf.Tensor, new: tf.Tensor, *estimates: tf.Tensor) -> tf.Tensor:
        counts = tf.reduce_all(tf.math.is_finite(tf.stack(estimates)))
        return tf.where_v2(counts, average * decay + new * (1 - decay), average)

    return mtf.cwise(move, [average, new, *estimates])
