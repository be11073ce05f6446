"""A field that lies over the whole mesh, moved by hand at a rate from a placeholder."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf
from tests import harness
from tests.programs.compared import SHAPE, sums

LAYOUT = "nx:rows;ny:cols"
NX, NY, STEPS = mtf.Dimension("nx", 4), mtf.Dimension("ny", 4), 3
WEIGHT = 0.3
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


def expected(clip=None):
    field, gain, losses = np.linspace(-1, 1, 16).reshape(4, 4), 1.0, []
    for feed in feeds():
        smooth = field + WEIGHT * np.roll(field, 1, 0)
        difference = smooth * gain - feed["seen"].astype(np.float64)
        losses.append(np.mean(difference**2))
        outer = 2 * difference / difference.size
        of_field = gain * (outer + WEIGHT * np.roll(outer, -1, 0))
        of_gain = np.sum(outer * smooth)
        norm = np.sqrt(np.sum(of_field**2) + of_gain**2)
        factor = float(feed["rate"]) * (min(1.0, clip / norm) if clip else 1.0)
        field, gain = field - factor * of_field, gain - factor * of_gain
    return losses, {"field": field, "gain": gain}


AXES = gs.ReplicaAxes(SHAPE, LAYOUT, ("nx", "ny"))
# name -> the line, the wrapper, what it clips to, and groups of sums over rows.
LINES = {
    "no wrapper": (gs.sum_shards, lambda opt: opt, None, 1),
    "clip": (list, lambda opt: gs.ClipByGlobalNormOptimizer(opt, 0.3, axes=AXES), 0.3, 2),
    "loss scale": (list, lambda opt: gs.LossScaleOptimizer(opt, 64.0, axes=AXES), None, 3),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("no wrapper", "simd"),
        ("clip", "placement"),
        pytest.param("loss scale", "xla", marks=pytest.mark.xla),
    ],
)
def test_it_moves_as_in_numpy(name, kind):
    reduced, wrap, clip, groups = LINES[name]
    made = harness.built(kind, SHAPE, LAYOUT, build(reduced, wrap), feeds()[0])
    results = made.runs(feeds(), 2) if kind == "placement" else [made.run(feeds())]
    assert kind != "placement" or not made.races()
    if kind != "placement":
        assert len(sums(made)) == groups, sums(made)
    losses, variables = expected(clip)
    for result in results:
        np.testing.assert_allclose([x["loss"] for x in result.fetched], losses, rtol=TOLERANCE)
        for key, value in variables.items():
            np.testing.assert_allclose(
                result.variables[key], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=key
            )
            assert np.array_equal(result.variables[key], results[0].variables[key])
