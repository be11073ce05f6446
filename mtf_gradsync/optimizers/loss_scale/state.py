"""The state of a loss scale, and the rule by which it changes."""

from __future__ import annotations

from typing import Any, NamedTuple

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.optimizers.skips import now_waiting, waiting_state
from mtf_gradsync.optimizers.state.variables import scalar_state


class Rule(NamedTuple):
    """The rule by which a loss scale changes; see the arguments of `LossScaleOptimizer`."""

    is_dynamic: bool
    initial: float
    growth_steps: int
    multiplier: float
    lowest: float
    highest: float


class LossScaleState(NamedTuple):
    """Scalars: mtf variables, or their values after a step.

    Attributes:
      scale: float32, the loss scale; None if it is fixed.
      good_steps: int32, updates in a row with finite gradients since it changed; None if fixed.
      skipped: int32, steps skipped so far.
      waiting: int32, the number of these since the last update; None without a limit.
    """

    scale: Any
    good_steps: Any
    skipped: Any
    waiting: Any

    @property
    def present(self) -> list[Any]:
        """The fields that are not None."""
        return [x for x in self if x is not None]


def make_state(mesh: mtf.Mesh, name: str, rule: Rule, limit: int | None) -> LossScaleState:
    """Makes the variables, `<name>/<field>`, which checkpoints hold."""
    scale = good_steps = None
    if rule.is_dynamic:
        scale = scalar_state(mesh, f"{name}/scale", tf.float32, stacked=False, start=rule.initial)
        good_steps = scalar_state(mesh, f"{name}/good_steps", stacked=False)
    skipped = scalar_state(mesh, f"{name}/skipped", stacked=False)
    return LossScaleState(scale, good_steps, skipped, waiting_state(mesh, name, limit))


def after_step(before: LossScaleState, finite: mtf.Tensor, rule: Rule) -> LossScaleState:
    """Returns the variables' new values; `finite`, a boolean scalar, says if all gradients are."""

    def skipped(count: tf.Tensor, is_finite: tf.Tensor) -> tf.Tensor:
        return count + tf.cast(tf.logical_not(is_finite), tf.int32)

    def good_steps(count: tf.Tensor, is_finite: tf.Tensor) -> tf.Tensor:
        more = (count + 1) * tf.cast(is_finite, tf.int32)
        return more * tf.cast(more < rule.growth_steps, tf.int32)

    def scale(now: tf.Tensor, count: tf.Tensor, is_finite: tf.Tensor) -> tf.Tensor:
        # A scale beyond a limit, as after a change of limits, is set to the limit.
        lower = tf.maximum(now / rule.multiplier, rule.lowest)
        higher = tf.minimum(now * rule.multiplier, rule.highest)
        grows = count + 1 >= rule.growth_steps
        return tf.where_v2(is_finite, tf.where_v2(grows, higher, now), lower)

    count = mtf.cwise(skipped, [before.skipped.value, finite], tf.int32)
    waiting = before.waiting and now_waiting(before.waiting, mtf.cast(finite, tf.int32))
    if not rule.is_dynamic:
        return LossScaleState(None, None, count, waiting)
    good = before.good_steps.value
    return LossScaleState(
        mtf.cwise(scale, [before.scale.value, good, finite], tf.float32),
        mtf.cwise(good_steps, [good, finite], tf.int32),
        count,
        waiting,
    )
