"""A field that lies over the whole mesh, moved by hand at a rate from a placeholder."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf
from tests import harness
from tests.programs.compared import SHAPE, sums

LAYOUT = "nx:rows;ny:cols"
NX, NY, STEPS = mtf.Dimension("nx", 4), mtf.Dimension("ny", 4), 3
WEIGHT, DECAY = 0.3, 0.5
TOLERANCE = STEPS * 16 * np.finfo(np.float32).eps
RATES = (0.1, 0.05, 0.2)


class ByHand:
    """What the program does with gradients, where a wrapper can stand around it."""

    def __init__(self, rate):
        self.rate = rate

    def apply_grads(self, grads, variables):
        return [mtf.assign(v, v.value - g * self.rate) for g, v in zip(grads, variables)]


def feeds():
    rng = np.random.RandomState(0)
    return [{"seen": rng.randn(4, 4).astype("f"), "rate": np.float32(r)} for r in RATES]


def with_nan(feed):
    """The same with a NaN on the last shard."""
    seen = feed["seen"].copy()
    seen[-1, -1] = np.nan
    return {**feed, "seen": seen}


def build(reduced, wrap):
    """The squared difference to what is seen, of a field with its neighbours and a gain."""

    def made(mesh, inputs):
        zeros = np.linspace(-1, 1, 16).reshape(4, 4)
        start = harness.tf.constant_initializer(zeros)
        field = mtf.get_variable(mesh, "field", mtf.Shape([NX, NY]), initializer=start)
        one = harness.tf.ones_initializer()
        gain = mtf.get_variable(mesh, "gain", mtf.Shape([]), initializer=one)
        seen = mtf.import_tf_tensor(mesh, inputs["seen"], mtf.Shape([NX, NY]))
        rate = mtf.import_tf_tensor(mesh, inputs["rate"], mtf.Shape([]))
        smooth = field + WEIGHT * mtf.shift(field, 1, NX, wrap=True)
        loss = mtf.reduce_mean(mtf.square(smooth * gain - seen))
        variables = [field.operation, gain.operation]
        grads = reduced(mtf.gradients([loss], [v.value for v in variables]))
        return wrap(ByHand(rate)).apply_grads(grads, variables), {"loss": loss}

    return made


def expected(clip=None, every=1):
    """Losses of each step, and the field and its gain after it."""
    field, gain, losses, values = np.linspace(-1, 1, 16).reshape(4, 4), 1.0, [], []
    total = [0.0, 0.0]
    for number, feed in enumerate(feeds(), 1):
        smooth = field + WEIGHT * np.roll(field, 1, 0)
        difference = smooth * gain - feed["seen"].astype(np.float64)
        losses.append(np.mean(difference**2))
        outer = 2 * difference / difference.size
        total[0] = total[0] + gain * (outer + WEIGHT * np.roll(outer, -1, 0))
        total[1] = total[1] + np.sum(outer * smooth)
        if number % every == 0:
            norm = np.sqrt(np.sum(total[0] ** 2) + total[1] ** 2)
            # The rate of the step that makes the update.
            factor = float(feed["rate"]) * (min(1.0, clip / norm) if clip else 1.0)
            field, gain, total = field - factor * total[0], gain - factor * total[1], [0.0, 0.0]
        values.append({"field": field, "gain": gain})
    return losses, values


def averaged(values):
    average = {"field": np.linspace(-1, 1, 16).reshape(4, 4), "gain": 1.0}
    for value in values:
        average = {k: DECAY * x + (1 - DECAY) * value[k] for k, x in average.items()}
    return {f"{k}/ExponentialMovingAverage": x for k, x in average.items()}


class Line(NamedTuple):
    """A line of the program.

    Attributes:
      groups: how many groups of sums over rows reach variables, in SIMD programs.
      wrap: makes the wrapper.
      reduced: what is done to gradients.
      clip: what their norm is clipped to.
      every: how many steps make an update.
      skips: whether it skips steps with a NaN.
      averages: whether it averages.
    """

    groups: int
    wrap: Callable[[Any], Any]
    reduced: Callable[[Any], Any] = list
    clip: float | None = None
    every: int = 1
    skips: bool = False
    averages: bool = False


AXES = gs.ReplicaAxes(SHAPE, LAYOUT, ("nx", "ny"))
LINES = {
    "no wrapper": Line(1, lambda opt: opt, gs.sum_shards),
    "clip": Line(2, lambda opt: gs.ClipByGlobalNormOptimizer(opt, 0.3, axes=AXES), clip=0.3),
    "loss scale": Line(3, lambda opt: gs.LossScaleOptimizer(opt, 64.0, axes=AXES), skips=True),
    "synced": Line(
        1,
        lambda opt: gs.GradientAccumulationOptimizer(opt, 3, accumulate="synced", axes=AXES),
        every=3,
    ),
    "averages": Line(
        1,
        lambda opt: gs.AverageOptimizer(gs.CrossShardOptimizer(opt), DECAY),
        averages=True,
    ),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("no wrapper", "simd"),
        ("clip", "placement"),
        ("synced", "placement"),
        ("averages", "simd"),
        ("loss scale", "placement"),
        pytest.param("loss scale", "xla", marks=pytest.mark.xla),
    ],
)
def test_it_moves_as_in_numpy(name, kind):
    line, given = LINES[name], feeds()
    if line.skips:
        given.insert(1, with_nan(given[0]))
    made = harness.built(kind, SHAPE, LAYOUT, build(line.reduced, line.wrap), given[0])
    if kind == "placement":
        assert not made.races()
        results = made.runs(given, 2)
    else:
        results = [made.run(given) for _ in range(2)]
        # A gain's gradient is all that crosses the mesh, beside squares and flags.
        found = sums(made)
        assert len(found) == line.groups, found
        assert max(found.values()) <= 8, found
    losses, values = expected(line.clip, line.every)
    variables = {**values[-1], **(averaged(values) if line.averages else {})}
    for result in results:
        got = [x["loss"] for x in result.fetched if np.isfinite(x["loss"])]
        np.testing.assert_allclose(got, losses, rtol=TOLERANCE)
        for key, value in variables.items():
            np.testing.assert_allclose(
                result.variables[key], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=key
            )
            assert np.array_equal(result.variables[key], results[0].variables[key])
