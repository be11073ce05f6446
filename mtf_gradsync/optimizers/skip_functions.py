"""Functions by which `GradientAccumulationOptimizer` decides which microbatch steps to skip."""

from __future__ import annotations

import inspect
from typing import Any, Callable, List, Sequence, Tuple

import gin

from mtf_gradsync._common import FLOAT32_MAX, check_number, is_number
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients import global_norm, not_finite
from mtf_gradsync.optimizers.pipeline.forms import GradientSet
from mtf_gradsync.reduce import Strategy

# A function of the gradients of a microbatch step, and of `reducer=` if it has such an argument; or
# an object with a method `decide`, if it keeps state (`skip_spikes`).
SkipFn = Any
# Pairs of a variable and its value after the step.
State = List[Tuple[mtf.Variable, mtf.Tensor]]
# A function that makes the state after a step, from whether the step is skipped.
StateAfter = Callable[[mtf.Tensor], State]


@gin.configurable(module="mtf_gradsync")
def skip_not_finite(grads: Sequence[mtf.Tensor], reducer: Strategy | None = None) -> mtf.Tensor:
    """Returns whether a gradient of any shard has a NaN or an infinity: the step is then skipped.

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
    """A rule that skips steps whose gradients exceed a norm, or are not finite.

    With gradients per shard (accumulate="local") the norm is the square root of the sum of squares
    over all shards' gradients, so that only a scalar is reduced. With reduced gradients the norm is
    that of the sum over shards. The norm of the sum is at most sqrt(num_shards) times the norm over
    all shards' gradients, and smaller if these cancel each other. Choose max_norm for the way in
    which gradients accumulate.

    References:
      optax.skip_large_updates
    """

    skips_not_finite = True

    def __init__(self, max_norm: float):
        """Sets the largest norm.

        Args:
          max_norm: the largest norm of a step that is not skipped, greater than 0.

        Raises:
          ValueError: max_norm is not greater than 0.
        """
        limit = min(max_norm, FLOAT32_MAX) if is_number(max_norm) else max_norm
        check_number("max_norm", limit, "greater than 0", above=True)
        self.max_norm = max_norm

    def __call__(self, grads: Sequence[mtf.Tensor], reducer: Strategy | None = None) -> mtf.Tensor:
        # Not "greater", as a NaN is to be skipped too, and infinity whatever the largest norm is.
        norm = global_norm(grads, reducer)
        most = min(self.max_norm, float(norm.dtype.max))
        return mtf.logical_not(mtf.less_equal(norm, most))


def check_skip_fn(fn: Any) -> None:
    """Raises TypeError unless fn is None, a function, or has a method `decide`."""
    if isinstance(fn, type) or not (fn is None or callable(fn) or hasattr(fn, "decide")):
        raise TypeError(
            "should_skip_update_fn must be None or a function from a list of gradients to a "
            "boolean mtf scalar, such as mtf_gradsync.skip_not_finite, "
            "mtf_gradsync.skip_large_updates(100.0) or mtf_gradsync.skip_spikes(), got "
            f"{fn!r}."
        )


def call_skip_fn(
    fn: SkipFn, given: GradientSet, received: GradientSet, strategy: Strategy, name: str
) -> tuple[mtf.Tensor, StateAfter]:
    """Calls should_skip_update_fn: returns its decision, and a function that makes its new state.

    Args:
      fn: a should_skip_update_fn that has passed `check_skip_fn`.
      given: the gradients of the microbatch step.
      received: the gradients as the wrapper received them.
      strategy: the wrapper's reduction strategy.
      name: the wrapper's name, with which the names of the state's variables begin.

    Returns:
      Two values. The first is a boolean mtf scalar: whether `fn` skips the step. The second is a
      function. Its argument is a boolean mtf scalar, too: whether the step is skipped in the end
      (by `fn`, or by another island). It returns pairs of a state variable and the variable's value
      after the step; [] if `fn` keeps no state.
    """
    if hasattr(fn, "decide"):
        return fn.decide(given, received, strategy, name)
    takes_reducer = "reducer" in inspect.signature(fn).parameters
    grads = given.present
    skip = fn(grads, reducer=strategy) if takes_reducer else fn(grads)
    if not isinstance(skip, mtf.Tensor) or skip.dtype != tf.bool or skip.shape.ndims:
        raise ValueError(
            f"should_skip_update_fn {fn!r} must return a boolean mtf scalar, got {skip!r}."
        )
    return skip, lambda _: []
