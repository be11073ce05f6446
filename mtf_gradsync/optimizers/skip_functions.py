"""Functions by which `GradientAccumulationOptimizer` decides which microbatch steps to skip.

A step may be skipped because its gradients are not finite, because they are too large, or because
they or the loss far exceed the usual (`skip_spikes`).
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable, List, NamedTuple, Sequence, Tuple

import gin

from mtf_gradsync._common import FLOAT32_MAX, check_number, check_whole_number, elements, is_number
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients import global_norm, not_finite
from mtf_gradsync.gradients.clipping import unclipped
from mtf_gradsync.gradients.losses import losses_of_step
from mtf_gradsync.gradients.operations import on_mesh
from mtf_gradsync.optimizers.pipeline.forms import GradientSet
from mtf_gradsync.optimizers.state import Ring, named_state
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.step.plan import StepPlan

# A function of the gradients of a microbatch step, and of `reducer=` if it has such an argument; or
# an object with a method `decide`, if it keeps state (`skip_spikes`).
SkipFn = Any
# Pairs of a variable and its value after the step.
State = List[Tuple[mtf.Variable, mtf.Tensor]]
# A variable, the value that it gets if the step is taken, and the value if it is skipped.
_NewValue = Tuple[mtf.Variable, mtf.Tensor, mtf.Tensor]
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
    over all shards' gradients. To compute it, only a scalar is reduced, and no gradient. With
    reduced gradients the norm is that of the sum over shards. The norm of the sum is at most
    sqrt(num_shards) times the norm over all shards' gradients, and smaller if shards' gradients
    cancel each other. Choose max_norm for the way in which gradients accumulate.

    Examples:
      >>> opt = gs.GradientAccumulationOptimizer(
      ...     mtf.optimize.SgdOptimizer(0.1), 8, should_skip_update_fn=gs.skip_large_updates(10.0)
      ... )
      >>> print(gs.describe(opt))
      every step  ...; skip steps by skip_large_updates  (GradientAccumulationOptimizer)
      every 8th   update by Sgd

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
        # Not `mtf.greater`, which is false for a NaN. Infinity is skipped, whatever `max_norm` is.
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


# Spikes: steps that far exceed the usual.


class _Series(NamedTuple):
    """A series of values, norms of gradients or losses, by the last parts of its variables' names.

    Attributes:
      values: the variable with the last values.
      num_values: the variable that counts the values written.
      spikes_in_a_row: the variable that counts spikes in a row.
      without_data: the value in a step without data. Such a step is no spike, and its value is not
        kept.
      num_shards: the variable with the number of shards whose gradients each have a part in the
        values; None if values do not depend on this number.
    """

    values: str
    num_values: str
    spikes_in_a_row: str
    without_data: float
    num_shards: str | None = None


_SERIES = {
    "norm": _Series("norms", "num_norms", "spikes_in_a_row", 0.0, "norm_shards"),
    "loss": _Series("losses", "num_losses", "loss_spikes_in_a_row", -float("inf")),
}
# Of the mean: smaller deviations are those of rounding, where all values are equal.
_LEAST_DEVIATION = 1e-4
_LEAST_DEVIATION_OF = {tf.bfloat16: 2.0**-8, tf.float16: 2.0**-11}


@gin.configurable(module="mtf_gradsync")
class skip_spikes:
    """A rule that skips steps whose gradients or loss far exceed the usual, or are not finite.

    A step is a spike if the norm of its gradients is more than `deviations` standard deviations
    above the mean of the last `window` norms. Norms of skipped steps are not among these `window`
    norms. In the first `window / 8` steps (at least two), norms are only collected: a step is
    skipped only if its norm is not finite. After `window / 8` spikes in a row (at least two), high
    norms count as usual from then on, and the mean begins anew. A standard deviation of less than
    1e-4 of the mean counts as 1e-4 of the mean, so that rounding makes no spike (of losses in
    bfloat16 0.004, and in float16 0.0005).

    With `of="loss"` a spike is a step whose loss is far above the mean of the last losses. With
    `of=("norm", "loss")` norms and losses have a mean each, and a step is skipped if its norm or
    its loss is a spike.

    The norm is that of one microbatch step's gradients. If the gradients are per shard, the norm is
    the one that `skip_large_updates` uses. If a wrapper around the accumulation clips the
    gradients, the norm before the clip is taken. The loss is the one that `mtf.gradients` was given
    for the microbatch step, or the sum if there were several: a loss of the whole batch, without a
    loss scale.

    Each island of `OuterOptimizer` has means of its own, and norms of its own gradients; the loss
    is that of all islands. A step that is a spike for one island is skipped by all islands.

    Checkpoints have the state in variables that begin with the wrapper's name: `<name>/norms`,
    float32 `[window]`, `<name>/num_norms`, int32, the number of norms written,
    `<name>/spikes_in_a_row`, int32, and `<name>/norm_shards`, int32, the number of shards in a
    norm; for losses `<name>/losses`, `<name>/num_losses` and `<name>/loss_spikes_in_a_row`. A run
    with another window continues with the newest values. In a run with another number of islands
    the means begin anew, and so does the mean of norms if gradients are per shard and the run has
    another number of shards.

    Examples:
      >>> mesh = {"mesh_shape": "all:4", "layout": "batch:all"}
      >>> opt = gs.GradientAccumulationOptimizer(
      ...     mtf.optimize.SgdOptimizer(0.1), 8, should_skip_update_fn=gs.skip_spikes(), **mesh
      ... )
      >>> print(gs.describe(opt))
      every step  add up gradients on each shard; skip steps by skip_spikes  (GradientAcc...)
      every 8th   reduce over batch, 4 shards: fused                         (GradientAcc...)
                  update by Sgd

    References:
      OLMo-core's SkipStepOptimizer, which skips by the loss and by the norm.
    """

    skips_not_finite = True

    def __init__(
        self, deviations: float = 6.0, window: int = 128, of: str | Sequence[str] = "norm"
    ):
        """Sets how far above the usual values a spike is.

        Args:
          deviations: how many standard deviations above the mean a value may be, greater than 0.
          window: the number of values in the mean and the deviation, 8 or more.
          of: the values: "norm" for norms of gradients, "loss", or ("norm", "loss") for both. The
            loss is found by the gradients, so that `mtf.gradients` has to compute them from it.

        Raises:
          ValueError: an argument is out of range.
        """
        check_number("deviations", deviations, "greater than 0", above=True)
        self.deviations, self.window = float(deviations), check_whole_number("window", window)
        if window < 8:
            raise ValueError(f"window must be 8 or more, got {window!r}.")
        kinds = elements(of)
        self.of = (of,) if kinds is None else tuple(kinds)
        if not self.of or len(set(self.of)) < len(self.of) or not set(self.of) <= set(_SERIES):
            raise ValueError(f"of must be 'norm', 'loss' or ('norm', 'loss'), got {of!r}.")
        self.__name__ = "skip_spikes"
        if self.of != ("norm",):
            self.__name__ += f" of {' and '.join(self.of)}"

    def check(self, grads: Sequence[mtf.Tensor]) -> None:
        """Raises ValueError if this rule needs the loss, and gradients come from no loss."""
        if "loss" in self.of and not losses_of_step(grads):
            raise ValueError(
                f"skip_spikes(of={self.of!r}) does not find the loss: the gradients do not come "
                "from mtf.gradients of a loss, or they come from a loop of which the loss is no "
                "output. Compute them by opt.compute_gradients(loss), or give of='norm'."
            )

    def decide(
        self, given: GradientSet, received: GradientSet, strategy: Strategy, name: str
    ) -> tuple[mtf.Tensor, StateAfter]:
        """Returns whether to skip a step, and a function that makes the new state.

        Args:
          given: the gradients of the step, in the form in which the wrapper adds them up.
          received: these gradients as the wrapper received them.
          strategy: the wrapper's reduction strategy.
          name: the wrapper's name.

        Returns:
          Two values. The first is a boolean mtf scalar: whether the step is a spike or not finite.
          The second is a function. Its argument is a boolean mtf scalar, too: whether the step is
          skipped in the end (by this rule, or by another island). It returns pairs of a state
          variable and the variable's value after the step.
        """
        before_clip = [unclipped(g) for g in received.present]
        is_clipped = before_clip != received.present
        changes: list[_NewValue] = []
        skips = []
        for kind in self.of:
            series, least, num_shards = _SERIES[kind], _LEAST_DEVIATION, 1
            if kind == "norm":
                measured = before_clip if is_clipped else given.present
                value = global_norm(measured, strategy)
                # Gradients of shards' own copies have no more dimensions than their variables.
                owners = zip(measured, given.owners)
                num_shards = max(1, *(x.shape.size // v.shape.size for x, v in owners))
            else:
                value, least = _loss(received)
            value = mtf.cast(on_mesh(value, given.mesh), tf.float32)
            if received.weights is not None:
                value = mtf.cwise(
                    lambda x, weight, nothing=series.without_data: tf.where_v2(
                        weight > 0, x, nothing
                    ),
                    [value, on_mesh(received.weights.total, given.mesh)],
                )
            skip, new_values = self._check_newest(series, value, least, num_shards, name)
            skips.append(skip)
            changes += new_values
        if is_clipped or "norm" not in self.of:
            # Clipped gradients may be NaN, although their norm was finite before.
            skips.append(skip_not_finite(given.present, strategy))

        def after(skip: mtf.Tensor) -> State:
            def choose(x: tf.Tensor, y: tf.Tensor, skip: tf.Tensor) -> tf.Tensor:
                return tf.where_v2(skip, y, x)

            return [
                (variable, mtf.cwise(choose, [taken, skipped, skip], taken.dtype))
                for variable, taken, skipped in changes
            ]

        return functools.reduce(mtf.logical_or, skips), after

    def _check_newest(
        self, series: _Series, value: mtf.Tensor, least: float, num_shards: int, name: str
    ) -> tuple[mtf.Tensor, list[_NewValue]]:
        """Returns whether the newest value of a series is a spike or not finite, and the new state.

        `value` is the step's norm or loss, a float32 mtf scalar, `least` is the least deviation, as
        a part of the mean, and `name` is the wrapper's name. `num_shards` is the number of shards
        whose gradients each have a part in the value: if it is another one than in the step before,
        in a restart, the mean begins anew. The first result is a boolean mtf scalar. The second has
        the variables of the series, with their values after the step.
        """
        mesh, dim = value.mesh, mtf.Dimension("spike_window", self.window)
        ring = Ring(f"{name}/{series.values}", f"{name}/{series.num_values}", self.window)
        values = named_state(mesh, ring.values, mtf.Shape([dim]), tf.float32, ring=ring)
        num_values = named_state(mesh, ring.num_values, ring=ring)
        in_a_row = named_state(mesh, f"{name}/{series.spikes_in_a_row}", ring=ring)
        few = max(2, self.window // 8)
        count, more = num_values.value, []
        if series.num_shards is not None:
            shards = named_state(mesh, f"{name}/{series.num_shards}", start=num_shards)
            is_same = mtf.cast(mtf.equal(shards.value, num_shards), tf.int32)
            now = mtf.constant(mesh, num_shards, mtf.Shape([]), tf.int32)
            count, more = count * is_same, [(shards, now, shards.value)]

        def step(now: tf.Tensor, kept: tf.Tensor, count: tf.Tensor, row: tf.Tensor) -> Any:
            # 1. The mean and deviation, in units of the largest value, as squares may overflow.
            places = tf.range(self.window)
            number = tf.cast(tf.maximum(tf.minimum(count, self.window), 1), tf.float32)
            is_kept = tf.cast(places < count, tf.float32)
            unit = tf.maximum(tf.reduce_max(is_kept * tf.abs(kept)), 1e-30)
            mean = tf.reduce_sum(is_kept * (kept / unit)) / number
            deviation = tf.sqrt(tf.reduce_sum(is_kept * tf.square(kept / unit - mean)) / number)
            deviation = tf.maximum(deviation, least * tf.abs(mean))
            # 2. Whether the value is a spike. A NaN is not less than anything.
            has_data = tf.not_equal(now, series.without_data)
            is_finite = tf.logical_or(tf.math.is_finite(now), tf.logical_not(has_data))
            is_usual = now / unit <= mean + self.deviations * deviation
            is_spike = tf.logical_and(count >= few, tf.logical_not(is_usual))
            row = tf.where_v2(is_spike, row + tf.cast(is_finite, tf.int32), 0)
            begins = tf.logical_and(row > few, is_finite)
            skip = tf.logical_or(
                tf.logical_not(is_finite), tf.logical_and(is_spike, tf.logical_not(begins))
            )
            # 3. The state after the step if it is not skipped, and the spikes in a row if it is,
            # maybe for another reason.
            count = tf.where_v2(begins, 0, count)
            here = tf.logical_and(has_data, tf.equal(places, tf.math.floormod(count, self.window)))
            # Once the window is full, only the position in it matters.
            count = tf.where_v2(count >= 2 * self.window, count - self.window, count)
            count += tf.cast(has_data, tf.int32)
            return tf.where_v2(here, now, kept), count, tf.minimum(row, few), skip

        state = [values, num_values, in_a_row]
        # Mesh-TF takes the shape of the first input for outputs that are to be scalars.
        inputs = [value, values.value, count, in_a_row.value]
        shapes = [*(v.shape for v in state), value.shape]
        dtypes = [tf.float32, tf.int32, tf.int32, tf.bool]
        kept, count, row, skip = mtf.slicewise(step, inputs, shapes, dtypes, [], 0)
        none = mtf.zeros_like(row)
        return skip, [
            (values, kept, values.value),
            (num_values, count, num_values.value),
            (in_a_row, none, row),
            *more,
        ]


def _loss(received: GradientSet) -> tuple[mtf.Tensor, float]:
    """Returns the loss of the whole batch from which gradients come, and its least deviation.

    `received` are the gradients as the wrapper received them. The loss is a float32 mtf scalar; if
    the gradients come from several losses, it is the sum of the losses. The deviation is a part of
    the mean: what is less may be the rounding of a loss in a narrow dtype.
    """
    losses = losses_of_step(received.present)
    with StepPlan.of(received.graph).outside_of_branches():
        # Reduced here, on every step.
        values = [mtf.cwise(lambda x: tf.cast(x, tf.float32), [x], tf.float32) for x in losses]
        total = functools.reduce(
            mtf.add, [on_mesh(mtf.reduce_sum(x), received.mesh) for x in values]
        )
    return total, max(_LEAST_DEVIATION_OF.get(x.dtype, _LEAST_DEVIATION) for x in losses)
