"""Plans of what crosses the mesh together, for any sizes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mtf_gradsync import reduce
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.reduce.one_level import Packer, plan_packs, plan_small_groups, split_pack
from mtf_gradsync.reduce.sums import (
    pack,
    packed_all_reduce,
    packs_of_groups,
    plan_buckets,
    unpack,
)
from tests.reduce import on_mesh

SIZES = st.lists(st.integers(0, 100), max_size=40)


@given(SIZES, st.integers(0, 120))
def test_plan_holds_every_tensor_once_in_order(sizes, bucket_bytes):
    buckets = plan_buckets(sizes, bucket_bytes)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(sizes)))
    assert all(bucket == sorted(bucket) for bucket in buckets)


@given(SIZES, st.integers(0, 120))
def test_only_single_tensors_exceed_a_bucket(sizes, bucket_bytes):
    for bucket in plan_buckets(sizes, bucket_bytes):
        assert len(bucket) == 1 or sum(sizes[i] for i in bucket) <= bucket_bytes


@given(SIZES, st.integers(1, 120))
def test_no_bucket_has_room_for_what_opened_a_later_one(sizes, bucket_bytes):
    buckets = plan_buckets(sizes, bucket_bytes)
    for number, bucket in enumerate(buckets):
        filled = sum(sizes[i] for i in bucket)
        for later in buckets[number + 1 :]:
            assert filled + sizes[later[0]] > bucket_bytes


def test_large_tensors_go_alone_and_small_ones_fill_up():
    assert plan_buckets([3, 50, 4, 4, 9, 3], 10) == [[0, 2, 5], [1], [3], [4]]
    assert plan_buckets([100, 10] * 3, 100) == [[0], [1, 3, 5], [2], [4]]
    assert plan_buckets([1, 2], 0) == [[0], [1]]
    assert plan_buckets([], 10) == []


@given(SIZES, st.integers(0, 120), st.integers(0, 60))
def test_what_is_too_large_to_pack_shares_no_bucket(sizes, bucket_bytes, packed_bytes):
    buckets = plan_buckets(sizes, bucket_bytes, packed_bytes)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(sizes)))
    for bucket in buckets:
        assert len(bucket) == 1 or max(sizes[i] for i in bucket) <= packed_bytes
    small = [i for i, size in enumerate(sizes) if size <= packed_bytes]
    together = plan_buckets([sizes[i] for i in small], bucket_bytes)
    ours = [bucket for bucket in buckets if bucket[0] in small]
    assert ours == [[small[i] for i in bucket] for bucket in together]


@given(SIZES, st.integers(0, 120), st.integers(0, 5))
def test_small_groups_hold_every_tensor_once_in_order(sizes, max_bytes, max_group):
    groups = plan_small_groups(sizes, max_bytes, max_group)
    assert sorted(i for group in groups for i in group) == list(range(len(sizes)))
    assert all(group == sorted(group) for group in groups)
    for group in groups:
        assert len(group) <= max(max_group, 1)
        assert len(group) == 1 or all(sizes[i] <= max_bytes for i in group)
    small = sum(size <= max_bytes for size in sizes)
    if max_bytes and max_group:
        assert len(groups) == len(sizes) - small + -(-small // max_group)


def test_small_tensors_go_together_across_large_ones():
    assert plan_small_groups([3, 9, 3, 4, 9, 1], 4, 2) == [[0, 2], [1], [3, 5], [4]]


@given(SIZES, st.integers(1, 12))
def test_packs_are_even_and_the_last_takes_the_rest(sizes, num_packs):
    packs = plan_packs(sizes, num_packs)
    share = sum(sizes) // num_packs
    lengths = [sum(piece.stop - piece.start for piece in pack) for pack in packs]
    if share:
        assert lengths == [share] * (num_packs - 1) + [sum(sizes) - share * (num_packs - 1)]
    else:
        assert lengths == [sum(sizes)] * bool(sizes)


@given(SIZES, st.integers(1, 12), st.integers(1, 4))
def test_pieces_cover_every_tensor_in_order(sizes, num_packs, parts):
    packs = plan_packs(sizes, num_packs)
    packs = [part for one in packs for part in split_pack(one, parts)]
    covered = [[] for _ in sizes]
    for piece in [piece for one in packs for piece in one]:
        covered[piece.tensor].append((piece.start, piece.stop))
    for size, ranges in zip(sizes, covered):
        assert ranges, "an empty tensor is in a pack, too"
        assert [start for start, _ in ranges] == [0, *[stop for _, stop in ranges[:-1]]]
        assert ranges[-1][1] == size
        assert size == 0 or all(start < stop for start, stop in ranges)


def test_packs_cut_where_the_sizes_say():
    assert plan_packs([3, 0, 4], 2) == [[(0, 0, 3)], [(1, 0, 0), (2, 0, 4)]]
    assert plan_packs([10], 3) == [[(0, 0, 3)], [(0, 3, 6)], [(0, 6, 10)]]
    assert plan_packs([1, 1], 3) == [[(0, 0, 1), (1, 0, 1)]]
    # More packs than elements are one, and take no memory.
    assert plan_packs([1, 1], 2**31 - 1) == [[(0, 0, 1), (1, 0, 1)]]


DTYPES = ["float32", "bfloat16", "float16", "float64", "int8", "int32", "int64", "complex64"]
SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=8)


@settings(max_examples=50)
@given(SHAPES, st.sampled_from(DTYPES))
def test_unpack_undoes_pack(shapes, dtype):
    with tf.Graph().as_default():
        dtype = tf.as_dtype(dtype)
        rng = np.random.RandomState(0)
        arrays = [np.asarray(rng.randn(*shape)).astype(dtype.as_numpy_dtype) for shape in shapes]
        packs = pack([tf.constant(a) for a in arrays])
        with tf.Session() as session:
            flat, pieces = session.run([packs, unpack(packs, shapes)])
    assert flat.size == sum(a.size for a in arrays)
    for piece, array in zip(pieces, arrays):
        assert piece.shape == array.shape
        assert piece.tobytes() == array.tobytes()


PLANNERS = {
    "buckets": lambda n: (
        lambda sizes, itemsize: packs_of_groups(
            plan_buckets([s * itemsize for s in sizes], 30 * n), sizes
        )
    ),
    "packs": lambda n: Packer(n),
    "small": lambda n: Packer(0, 60, n),
    "shards": lambda n: (
        lambda sizes, itemsize: [part for p in plan_packs(sizes, 2) for part in split_pack(p, n)]
    ),
}


@settings(max_examples=60)
@given(
    SHAPES,
    st.lists(st.sampled_from(DTYPES), min_size=8, max_size=8),
    st.sampled_from(sorted(PLANNERS)),
    st.integers(1, 7),
)
def test_packs_that_are_not_summed_come_back_to_the_bit(shapes, dtypes, name, number):
    rng = np.random.RandomState(0)
    data = [
        np.asarray(rng.randn(2, *shape) * 100).astype(tf.as_dtype(dtype).as_numpy_dtype)
        for shape, dtype in zip(shapes, dtypes)
    ]
    packs = []

    def make(impl, values):
        def keep(values, groups, turns):
            packs.extend(values)
            return values

        groups = reduce.ProcessorGroups.along(impl, [0])
        return packed_all_reduce(impl, values, groups, keep, PLANNERS[name](number))

    for x, out in zip(data, on_mesh.run("placement", "all:2", data, make)):
        assert out.shape == x.shape
        assert out.dtype == x.dtype
        assert out.tobytes() == x.tobytes()
    assert sum(tf.TensorShape(p.slice_shape).num_elements() for p in packs) == sum(
        x[0].size for x in data
    )
