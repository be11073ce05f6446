"""Functions that say which microbatch steps accumulation skips."""

from __future__ import annotations

import inspect
from typing import Any, Callable, Sequence

import gin

from mtf_gradsync._common import FLOAT32_MAX, check_number, is_number
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients import global_norm, not_finite
from mtf_gradsync.reduce import Strategy

# Called with the gradients of a microbatch step, and with `reducer=` if it has such an argument.
SkipFn = Callable[..., mtf.Tensor]


@gin.configurable(module="mtf_gradsync")
def skip_not_finite(grads: Sequence[mtf.Tensor], reducer: Strategy | None = None) -> mtf.Tensor:
    """Skips a microbatch step if a gradient of any shard has a NaN or an infinity.

    Args:
      grads: the gradients of the microbatch step, per shard or reduced.
      reducer: the wrapper's reduction strategy; None takes `FusedAllReduce()`.

    Returns:
      A boolean mtf scalar, the same on all processors.

    References:
      optax.skip_not_finite
    """
    return mtf.greater(not_finite(grads, reducer), 0.0)


skip_not_finite.skips_not_finite = True


@gin.configurable(module="mtf_gradsync")
class skip_large_updates:
    """Skips a microbatch step whose gradients are larger than a norm, or not finite.

    With gradients per shard (local accumulation) the norm is the square root of the sum of squares
    over all shards' gradients, so that only a scalar is reduced. The norm of the reduced gradient
    is at most sqrt(num_shards) times as large, and smaller where shards cancel: choose max_norm
    for the place where gradients accumulate.

    References:
      optax.skip_large_updates
    """

    skips_not_finite = True

    def __init__(self, max_norm: float):
        """Sets the norm.

        Args:
          max_norm: the largest norm of a step that is not skipped, greater than 0.

        Raises:
          ValueError: max_norm is not greater than 0.
        """
        limit = min(max_norm, FLOAT32_MAX) if is_number(max_norm) else max_norm
        check_number("max_norm", limit, "greater than 0", above=True)
        self.max_norm = max_norm

    def __call__(self, grads: Sequence[mtf.Tensor], reducer: Strategy | None = None) -> mtf.Tensor:
        """See `skip_not_finite`."""
        # Not "greater", as a NaN is to be skipped too, and infinity whatever the largest norm is.
        norm = global_norm(grads, reducer)
        most = min(self.max_norm, float(norm.dtype.max))
        return mtf.logical_not(mtf.less_equal(norm, most))


def check_skip_fn(fn: Any) -> None:
    """Raises TypeError if fn is neither None nor a function."""
    if fn is not None and (not callable(fn) or isinstance(fn, type)):
        raise TypeError(
            "should_skip_update_fn must be None or a function from a list of gradients to a "
            "boolean mtf scalar, such as mtf_gradsync.skip_not_finite or "
            f"mtf_gradsync.skip_large_updates(100.0), got {fn!r}."
        )


def says_skip(fn: SkipFn, grads: Sequence[mtf.Tensor], strategy: Strategy) -> mtf.Tensor:
    """Returns whether a checked function skips a microbatch step, a boolean mtf scalar."""
    takes_reducer = "reducer" in inspect.signature(fn).parameters
    skip = fn(grads, reducer=strategy) if takes_reducer else fn(grads)
    if not isinstance(skip, mtf.Tensor) or skip.dtype != tf.bool or skip.shape.ndims:
        raise ValueError(
            f"should_skip_update_fn {fn!r} must return a boolean mtf scalar, got {skip!r}."
        )
    return skip
