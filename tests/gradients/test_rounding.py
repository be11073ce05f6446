"""Rounding by chance: how often up, which bits, and what is kept."""

import numpy as np
import pytest

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients import rounding
from tests import harness

BFLOAT16 = mtf.VariableDType(tf.bfloat16, tf.bfloat16, tf.bfloat16)


def float32_of_bits(*bits):
    return np.array(bits, np.uint32).view(np.float32)


def rounded(values, bits):
    with tf.Graph().as_default(), tf.Session() as session:
        x = tf.constant(np.asarray(values, np.float32))
        return session.run(rounding.round_by_bits(x, tf.constant(bits, tf.uint32, x.shape)))


def test_up_as_often_as_the_next_number_is_near():
    """Of all 2**16 bits, as many round up as the value is of 2**16 parts above the lower number."""
    with tf.Graph().as_default(), tf.Session() as session:
        for above in (0, 1, 0x4000, 0xFFFF):
            for sign in (0, 0x80000000):
                x = float32_of_bits(sign + 0x3F800000 + above)
                all_bits = tf.range(2**16)
                found = rounding.round_by_bits(tf.fill([2**16], x[0]), tf.cast(all_bits, tf.uint32))
                magnitude = np.abs(session.run(tf.cast(found, tf.float32)))
                assert np.sum(magnitude == 1.0 + 2.0**-7) == above
                assert np.sum(magnitude == 1.0) == 2**16 - above


@pytest.mark.parametrize("bits", [0, 0x8000, 0xFFFF])
def test_what_is_not_finite_is_kept_and_what_overflows_is_rounded_to_nearest(bits):
    largest = float(tf.bfloat16.max)
    kept = rounded([np.inf, -np.inf, 0.0, -0.0, largest, -largest, 1.5], bits).astype("f")
    np.testing.assert_array_equal(kept, [np.inf, -np.inf, 0.0, -0.0, largest, -largest, 1.5])
    np.testing.assert_array_equal(np.signbit(kept), [False, True, False, True, False, True, False])
    # Quiet, signalling, and the one whose bits overflow.
    nans = float32_of_bits(0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF)
    assert np.isnan(rounded(nans, bits).astype("f")).all()
    half_way = float32_of_bits(0x7F7F7FFF, 0x7F7F8000, 0xFF7F8000)
    np.testing.assert_array_equal(rounded(half_way, bits).astype("f"), [largest, np.inf, -np.inf])


def test_numbers_near_zero_are_rounded_as_others():
    denormals = float32_of_bits(0x00000001, 0x00010001, 0x8001FFFF)
    for bits, expected in ((0, (0, 1, 0x8001)), (0xFFFF, (1, 2, 0x8002))):
        assert tuple(rounded(denormals, bits).view(np.uint16)) == expected


def drawn(counts, key=1, size=2**13):
    with tf.Graph().as_default(), tf.Session() as session:
        count = tf.placeholder(tf.int32, [])
        bits = rounding._random_bits(
            [size], [1], 0, count, rounding.hash_of_name(f"variable_{key}")
        )
        return np.stack([session.run(bits, {count: n}) for n in counts])


def test_bits_look_independent():
    """Of elements, of updates, and of variables: each correlation is within 5 standard errors."""
    bits, others = drawn(range(128)), drawn(range(128), key=2)
    assert bits.max() < 2**16
    x, y = ((b / 2**16 - 0.5) * 12**0.5 for b in (bits, others))
    pairs = [(x[:, :-k], x[:, k:]) for k in (1, 2, 3, 16, 128, 1024)]
    pairs += [(x[:-k], x[k:]) for k in (1, 2, 3, 16)]
    pairs += [(x[:-1, :-k], x[1:, k:]) for k in (1, 2, 3)]
    for first, second in [*pairs, (x, y), (x, np.ones_like(x))]:
        assert abs(np.mean(first * second)) * first.size**0.5 < 5
    # In each of 256 bins, and as means of each element and update.
    counts = np.bincount((bits.reshape(-1) >> 8).astype(int), minlength=256)
    expected = bits.size / 256
    assert np.sum((counts - expected) ** 2 / expected) < 255 + 5 * 510**0.5
    for means in (x.mean(0) * 128**0.5, x.mean(1) * 2**6.5):
        assert np.abs(means).max() < 5
        assert abs(means.var() - 1) < 5 * (2 / means.size) ** 0.5


def test_no_update_has_the_bits_of_another_one_moved_along():
    first, second = drawn([3, 4])
    found = set(first[:-3] + 2**16 * first[1:-2] + 2**32 * first[2:-1].astype(np.int64))
    assert found.isdisjoint(second[:-3] + 2**16 * second[1:-2] + 2**32 * second[2:-1].astype("q"))


@pytest.mark.parametrize("kind", ["placement", "shared", "simd"])
@pytest.mark.parametrize("layout", ["", "a:rows", "b:cols", "a:rows;b:cols", "c:rows;a:cols"])
def test_slices_have_the_bits_of_the_whole(kind, layout):
    """However the mesh splits a variable, on all copies."""
    values = np.random.RandomState(0).randn(4, 6, 2).astype("f")

    def build(mesh, inputs):
        shape = mtf.Shape([mtf.Dimension(*d) for d in (("a", 4), ("b", 6), ("c", 2))])
        w = mtf.get_variable(mesh, "w", shape, BFLOAT16, initializer=tf.zeros_initializer())
        value = mtf.import_tf_tensor(mesh, inputs["value"], shape)
        count = mtf.constant(mesh, 7, mtf.Shape([]), tf.int32)
        return [rounding.assign(w.operation, value, count)], {}

    built = harness.built(kind, "rows:2;cols:2", layout, build, {"value": values}, may_race=True)
    found = built.run([{"value": values}]).variables["w"]
    with tf.Graph().as_default(), tf.Session() as session:
        bits = rounding._random_bits([48], [1], 0, tf.constant(7), rounding.hash_of_name("w"))
        whole = session.run(rounding.round_by_bits(tf.constant(values.reshape(-1)), bits))
    np.testing.assert_array_equal(found.astype("f"), whole.reshape(4, 6, 2).astype("f"))


def test_another_variable_another_update_and_another_element_have_other_bits():
    assert (drawn([1])[0] != drawn([2])[0]).mean() > 0.99
    assert (drawn([1])[0] != drawn([1], key=2)[0]).mean() > 0.99
    # Counts go on beyond those of int32, and elements beyond those of uint32.
    assert len(set(drawn([-(2**31), -1, 0, 2**31 - 1])[:, 0])) == 4


@pytest.mark.parametrize("rounding_", ["up", None, 1, True])
def test_wrong_rounding_is_refused(rounding_):
    with pytest.raises(ValueError, match="rounding must be 'nearest' or 'stochastic', got"):
        rounding.check_rounding(rounding_)
