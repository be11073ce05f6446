"""Functions by which `GradientAccumulationOptimizer` decides which microbatch steps to skip."""

from __future__ import annotations

import inspect
from typing import Any, List, Sequence, Tuple

import gin

from mtf_gradsync._common import FLOAT32_MAX, check_number, check_whole_number, is_number
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients import global_norm, not_finite
from mtf_gradsync.optimizers.state.variables import Ring, named_state
from mtf_gradsync.reduce import Strategy

# A function of the gradients of a microbatch step, and of `reducer=` if it has such an argument; or
# an object with a method `decide`, if it keeps state (`skip_spikes`).
SkipFn = Any
# Pairs of a variable and its value after the step.
State = List[Tuple[mtf.Variable, mtf.Tensor]]


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
    over all shards' gradients, so that only a scalar is reduced. With reduced gradients it is the
    norm of the sum. This is at most sqrt(num_shards) times as large, and smaller if the shards'
    gradients cancel: choose max_norm for the way in which gradients accumulate.

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


@gin.configurable(module="mtf_gradsync")
class skip_spikes:
    """A rule that skips steps whose gradients far exceed the usual norm, or are not finite.

    A step is a spike if the norm of its gradients is more than `deviations` standard deviations
    above the mean of the last `window` norms. Norms of steps that the rule skips are not among
    these. In the first `window / 8` steps, but at least two, norms are collected, and only steps
    that are not finite are skipped. After as many spikes in a row the norms are taken for the new
    scale of the training: the mean then begins anew.

    With gradients per shard the norm is that of `skip_large_updates`. Islands of `OuterOptimizer`
    have norms of their own; a step that is a spike for one of them is skipped by all, and the
    others count its norm among theirs.

    State, by name of the wrapper, in checkpoints: `<name>/norms`, float32 `[window]`,
    `<name>/num_norms`, int32, how many norms were written, and `<name>/spikes_in_a_row`, int32.
    A run with another window goes on with the newest norms, unless it, or the run before it, has
    islands: these go on with the window that they had.

    Examples:
      >>> mesh = {"mesh_shape": "all:4", "layout": "batch:all"}
      >>> opt = gs.GradientAccumulationOptimizer(
      ...     mtf.optimize.SgdOptimizer(0.1), 8, should_skip_update_fn=gs.skip_spikes(), **mesh
      ... )
      >>> print(gs.describe(opt))
      every step  add up gradients on each shard; skip steps by skip_spikes  (GradientAcc...)
      every 8th   reduce over batch, 4 shards: fused                         (GradientAcc...)
                  update by Sgd
    """

    skips_not_finite = True

    def __init__(self, deviations: float = 6.0, window: int = 128):
        """Sets how far above the usual norms a spike is.

        Args:
          deviations: how many standard deviations above the mean a norm may be, greater than 0.
          window: the number of norms in the mean and the deviation, 8 or more.

        Raises:
          ValueError: an argument is out of range.
        """
        check_number("deviations", deviations, "greater than 0", above=True)
        self.deviations, self.window = float(deviations), check_whole_number("window", window)
        if window < 8:
            raise ValueError(f"window must be 8 or more, got {window!r}.")

    def decide(
        self, grads: Sequence[mtf.Tensor], reducer: Strategy, name: str
    ) -> tuple[mtf.Tensor, State]:
        """Returns whether to skip a step, and the new values of the state of the wrapper `name`."""
        norm = global_norm(grads, reducer)
        mesh, dim = norm.mesh, mtf.Dimension("spike_window", self.window)
        ring = Ring(f"{name}/norms", f"{name}/num_norms", self.window)
        norms = named_state(mesh, ring.values, mtf.Shape([dim]), tf.float32, ring=ring)
        num_norms = named_state(mesh, ring.num_values, ring=ring)
        in_a_row = named_state(mesh, f"{name}/spikes_in_a_row")
        few = max(2, self.window // 8)

        def step(now: tf.Tensor, kept: tf.Tensor, count: tf.Tensor, row: tf.Tensor) -> Any:
            now = tf.cast(now, tf.float32)
            # 1. The mean and deviation, relative to the mean, as squares of norms may overflow.
            places = tf.range(self.window)
            number = tf.cast(tf.maximum(tf.minimum(count, self.window), 1), tf.float32)
            is_kept = tf.cast(places < count, tf.float32)
            mean = tf.reduce_sum(is_kept * (kept / number))
            away = is_kept * (kept / tf.maximum(mean, 1e-30) - 1.0)
            deviation = tf.sqrt(tf.reduce_sum(tf.square(away)) / number)
            # 2. Whether the step is a spike. A NaN is not less than anything, a norm of 0 is.
            is_usual = now / tf.maximum(mean, 1e-30) <= 1.0 + self.deviations * deviation
            is_finite = now < float("inf")
            is_spike = tf.logical_and(count >= few, tf.logical_not(is_usual))
            row = tf.where_v2(is_spike, row + tf.cast(is_finite, tf.int32), 0)
            begins = tf.logical_and(row > few, is_finite)
            skip = tf.logical_or(
                tf.logical_not(is_finite), tf.logical_and(is_spike, tf.logical_not(begins))
            )
            # 3. The new state.
            counts = tf.logical_and(tf.logical_not(skip), now > 0)
            count = tf.where_v2(begins, 0, count)
            here = tf.logical_and(counts, tf.equal(places, tf.math.floormod(count, self.window)))
            # Once the window is full, only the position in it matters.
            count = tf.where_v2(count >= 2 * self.window, count - self.window, count)
            count += tf.cast(counts, tf.int32)
            return tf.where_v2(here, now, kept), count, tf.where_v2(begins, 0, row), skip

        state = [norms, num_norms, in_a_row]
        # Mesh-TF takes the shape of the first input for outputs that are to be scalars.
        inputs = [norm, *(v.value for v in state)]
        shapes = [*(v.shape for v in state), norm.shape]
        dtypes = [tf.float32, tf.int32, tf.int32, tf.bool]
        *new, skip = mtf.slicewise(step, inputs, shapes, dtypes, [], 0)
        return skip, list(zip(state, new))


def check_skip_fn(fn: Any) -> None:
    """Raises TypeError unless fn is None, a function, or has a method `decide`."""
    if isinstance(fn, type) or not (fn is None or callable(fn) or hasattr(fn, "decide")):
        raise TypeError(
            "should_skip_update_fn must be None or a function from a list of gradients to a "
            "boolean mtf scalar, such as mtf_gradsync.skip_not_finite, "
            "mtf_gradsync.skip_large_updates(100.0) or mtf_gradsync.skip_spikes(), got "
            f"{fn!r}."
        )


def says_skip(
    fn: SkipFn, grads: Sequence[mtf.Tensor], strategy: Strategy, name: str
) -> tuple[mtf.Tensor, State]:
    """Returns whether `fn` skips the microbatch step of `grads`, and its state after the step.

    `fn` is a should_skip_update_fn, checked. The state are pairs of a variable and its new value;
    the variables' names begin with `name`, the wrapper's name.
    """
    state: State = []
    if hasattr(fn, "decide"):
        skip, state = fn.decide(grads, strategy, name)
    else:
        takes_reducer = "reducer" in inspect.signature(fn).parameters
        skip = fn(grads, reducer=strategy) if takes_reducer else fn(grads)
    if not isinstance(skip, mtf.Tensor) or skip.dtype != tf.bool or skip.shape.ndims:
        raise ValueError(
            f"should_skip_update_fn {fn!r} must return a boolean mtf scalar, got {skip!r}."
        )
    return skip, state
