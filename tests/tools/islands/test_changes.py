"""The arithmetic of changes: their weights, lengths, forms, and the outer step, in float64."""

import itertools

import numpy as np
import pytest

from mtf_gradsync.islands import DamagedObjectError, Waiting
from mtf_gradsync.tools.islands.changes import (
    FORMS,
    Change,
    Length,
    MergeSettings,
    decoded,
    encoded,
    make_outer_step,
    scale_of,
)
from mtf_gradsync.tools.islands.objects import ContributionFacts
from mtf_gradsync.tools.islands.tensor_files import Stored, TensorSpec
from tests.tools.islands.toy import PLAIN, begun, merge


def arrays(seed, scale=1.0):
    rng = np.random.RandomState(seed)
    shapes = {"w": (5, 7), "b": (), "mean:m": (3,)}
    return {k: np.asarray(rng.randn(*s) * scale, np.float32) for k, s in shapes.items()}


def in_numpy(values, momenta, changes, step):
    """The outer step as its papers write it, in float64."""
    weights = np.array([c.weight for c in changes], np.float64)
    weights /= weights.sum()
    new, velocities = {}, {}
    for name, value in values.items():
        parts = [c.tensors[name].astype(np.float64) for c in changes]
        if name.startswith("mean:"):
            new[name] = value - sum(w * p for w, p in zip(weights, parts))
            continue
        parts = [c.scale * p for c, p in zip(changes, parts)]
        gradient = sum(w * p for w, p in zip(weights, parts))
        if step.merge == "radial":
            lengths = [np.sqrt((p**2).sum()) for p in parts]
            direction = sum(w * p / n for w, p, n in zip(weights, parts, lengths) if n)
            length = np.sqrt((direction**2).sum())
            mean = sum(w * n for w, n in zip(weights, lengths))
            gradient = mean * direction / length if length else np.zeros_like(gradient)
        velocity = step.outer_momentum * momenta.get(name, 0.0) + gradient
        move = gradient + step.outer_momentum * velocity if step.nesterov else velocity
        new[name], velocities[name] = value - step.outer_learning_rate * move, velocity
    return new, velocities


@pytest.mark.parametrize("merge_rule", ["mean", "radial"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_the_outer_step_is_that_of_numpy(merge_rule, nesterov):
    step = MergeSettings(0.7, 0.5, nesterov, merge=merge_rule)
    changes = [Change(3.0, 1.0, arrays(1)), Change(1.0, 0.25, arrays(2, 9.0))]
    changes.append(Change(2.0, 1.0, {k: np.zeros_like(v) for k, v in arrays(3).items()}))
    values, momenta = arrays(4), {k: v for k, v in arrays(5).items() if k[:5] != "mean:"}
    found, velocities = make_outer_step(values, momenta, iter(changes), step)
    expected, expected_velocities = in_numpy(values, momenta, changes, step)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=2**-22)
    assert set(velocities) == {"w", "b"}
    for name, value in velocities.items():
        np.testing.assert_allclose(value, expected_velocities[name], rtol=0, atol=2**-20)


def test_one_island_alone_is_the_same_by_both_rules():
    values, change = arrays(1), arrays(2)
    by_rule = [
        make_outer_step(
            values, {}, iter([Change(2.0, 1.0, change)]), MergeSettings(1.0, 0.0, merge=rule)
        )[0]
        for rule in ("mean", "radial")
    ]
    for name in values:
        np.testing.assert_allclose(by_rule[0][name], by_rule[1][name], rtol=0, atol=2**-22)


def test_directions_that_cancel_have_no_length():
    change = arrays(2)
    changes = [Change(1.0, 1.0, change), Change(1.0, 1.0, {k: -v for k, v in change.items()})]
    settings = MergeSettings(1.0, 0.0, merge="radial")
    found, _ = make_outer_step(arrays(1), {}, iter(changes), settings)
    for name, value in found.items():
        np.testing.assert_array_equal(value, arrays(1)[name])


def test_a_folder_weighs_as_its_settings_say(folder):
    settings = PLAIN._replace(weight="tokens_per_step")
    one, two = begun(folder, ["one", "two"], settings)
    one.steps(2, 1.0, tokens=3.0)
    two.steps(2, 5.0, tokens=1.0)
    (decision,) = merge(folder, 1, settings, Waiting(quorum=2))
    assert [c.weight for c in decision.contributions] == [18.0, 2.0]
    for toy in (one, two):
        toy.island._wait_and_take(toy.session, 0.0)
        assert toy.b == pytest.approx(2.0 - (18.0 * 2.0 + 2.0 * 10.0) / 20.0, abs=1e-6)


@pytest.mark.parametrize(
    ("norm", "others", "expected"),
    [
        (1e12, [Length(5.0, 10.0)], 50.0 / 1e12),
        (49.0, [Length(5.0, 10.0)], 1.0),
        (100.0, [Length(4.0, 10.0), Length(5.0, 10.0), Length(1e9, 10.0)], 0.5),
        # One step is a tenth of ten.
        (100.0, [Length(2.0, 1.0)], 1.0),
        (1e12, [], 1.0),
        (1e12, [Length(0.0, 10.0)], 1.0),
        (0.0, [Length(5.0, 10.0)], 1.0),
    ],
)
def test_a_change_that_is_too_long_is_scaled(norm, others, expected):
    assert scale_of(Length(norm, 10.0), others, 10.0) == pytest.approx(expected)
    assert scale_of(Length(norm, 10.0), others, 0.0) == 1.0


def test_the_length_of_a_change_is_over_what_is_trained():
    change = arrays(1)
    squares = sum((v.astype(np.float64) ** 2).sum() for k, v in change.items() if k[0] != "m")
    assert Length.of(change, 3) == pytest.approx((np.sqrt(squares), 3.0))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1000])
def test_forms(form, size):
    value = np.random.RandomState(size).randn(size).astype("f")
    value[:1] = -30.0  # the longest of its block
    sent, errors = encoded({"w": value}, form)
    stored = Stored(ContributionFacts(form=form, island="a"), sent, "")
    back = decoded(stored, {"w": TensorSpec.of(value)})["w"]
    if form == "float32":
        np.testing.assert_array_equal(back, value)
        return
    np.testing.assert_allclose(back + errors["w"], value, rtol=2**-23)
    # Half a unit of the largest number of a block.
    half = {"bfloat16": 2**-9, "int8": 0.5 / 127, "int4": 0.5 / 7}[form]
    assert np.abs(errors["w"]).max(initial=0.0) <= half * np.abs(value).max(initial=0.0) * 1.001
    whole = sum(x.nbytes for x in sent.values())
    blocks = {"bfloat16": 2 * size, "int8": -(-size // 256) * 260, "int4": -(-size // 64) * 36}
    assert whole == blocks[form]


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_blocks_of_another_shape_are_refused(form):
    sent, _ = encoded({"w": np.ones(100, "f")}, form)
    spec = {"w": TensorSpec((100,), "float32")}
    for name, cut in itertools.product(sent, (lambda x: x[:-1], lambda x: np.stack([x, x]))):
        damaged = {**sent, name: cut(sent[name])}
        with pytest.raises(DamagedObjectError, match="The change of 'w' has the shape"):
            decoded(Stored(ContributionFacts(form=form, island="a"), damaged, ""), spec)
