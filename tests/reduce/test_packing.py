"""Planning and packing, for any shapes, dtypes and orders."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mtf_gradsync._tf_compat import tf
from mtf_gradsync.reduce import packing, planning

SIZES = st.lists(st.integers(0, 100), max_size=40)


@given(SIZES, st.integers(0, 120))
def test_plan_holds_every_tensor_once_in_order(sizes, bucket_bytes):
    buckets = planning.plan_buckets(sizes, bucket_bytes)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(sizes)))
    assert all(bucket == sorted(bucket) for bucket in buckets)


@given(SIZES, st.integers(0, 120))
def test_only_single_tensors_exceed_a_bucket(sizes, bucket_bytes):
    for bucket in planning.plan_buckets(sizes, bucket_bytes):
        assert len(bucket) == 1 or sum(sizes[i] for i in bucket) <= bucket_bytes


@given(SIZES, st.integers(1, 120))
def test_no_bucket_has_room_for_what_opened_a_later_one(sizes, bucket_bytes):
    buckets = planning.plan_buckets(sizes, bucket_bytes)
    for number, bucket in enumerate(buckets):
        filled = sum(sizes[i] for i in bucket)
        for later in buckets[number + 1 :]:
            assert filled + sizes[later[0]] > bucket_bytes


def test_large_tensors_go_alone_and_small_ones_fill_up():
    assert planning.plan_buckets([3, 50, 4, 4, 9, 3], 10) == [[0, 2, 5], [1], [3], [4]]
    assert planning.plan_buckets([100, 10] * 3, 100) == [[0], [1, 3, 5], [2], [4]]
    assert planning.plan_buckets([1, 2], 0) == [[0], [1]]
    assert planning.plan_buckets([], 10) == []


SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=8)


@settings(deadline=None, max_examples=50)
@given(SHAPES, st.sampled_from(["float32", "bfloat16", "float64", "int32"]))
def test_unpack_undoes_pack(shapes, dtype):
    with tf.Graph().as_default():
        dtype = tf.as_dtype(dtype)
        rng = np.random.RandomState(0)
        arrays = [np.asarray(rng.randn(*shape)).astype(dtype.as_numpy_dtype) for shape in shapes]
        packed = packing.pack([tf.constant(a) for a in arrays])
        with tf.Session() as session:
            flat, pieces = session.run([packed, packing.unpack(packed, shapes)])
    assert flat.size == sum(a.size for a in arrays)
    for piece, array in zip(pieces, arrays):
        assert piece.shape == array.shape
        assert piece.tobytes() == array.tobytes()
