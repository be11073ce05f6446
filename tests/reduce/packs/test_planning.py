"""Plans of what crosses the mesh together, for any sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtf_gradsync import reduce
from mtf_gradsync.reduce.packs import planning

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


@given(SIZES, st.integers(0, 120), st.integers(0, 60))
def test_what_is_too_large_to_pack_shares_no_bucket(sizes, bucket_bytes, packed_bytes):
    buckets = planning.plan_buckets(sizes, bucket_bytes, packed_bytes)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(sizes)))
    for bucket in buckets:
        assert len(bucket) == 1 or max(sizes[i] for i in bucket) <= packed_bytes
    small = [i for i, size in enumerate(sizes) if size <= packed_bytes]
    together = planning.plan_buckets([sizes[i] for i in small], bucket_bytes)
    ours = [bucket for bucket in buckets if bucket[0] in small]
    assert ours == [[small[i] for i in bucket] for bucket in together]


@given(SIZES, st.integers(0, 120), st.integers(0, 5))
def test_small_groups_hold_every_tensor_once_in_order(sizes, max_bytes, max_group):
    groups = planning.plan_small_groups(sizes, max_bytes, max_group)
    assert sorted(i for group in groups for i in group) == list(range(len(sizes)))
    assert all(group == sorted(group) for group in groups)
    for group in groups:
        assert len(group) <= max(max_group, 1)
        assert len(group) == 1 or all(sizes[i] <= max_bytes for i in group)
    small = sum(size <= max_bytes for size in sizes)
    if max_bytes and max_group:
        assert len(groups) == len(sizes) - small + -(-small // max_group)


def test_small_tensors_go_together_across_large_ones():
    assert planning.plan_small_groups([3, 9, 3, 4, 9, 1], 4, 2) == [[0, 2], [1], [3, 5], [4]]


@given(SIZES, st.integers(1, 12))
def test_packs_are_even_and_the_last_takes_the_rest(sizes, num_packs):
    packs = planning.plan_packs(sizes, num_packs)
    share = sum(sizes) // num_packs
    lengths = [sum(piece.stop - piece.start for piece in pack) for pack in packs]
    if share:
        assert lengths == [share] * (num_packs - 1) + [sum(sizes) - share * (num_packs - 1)]
    else:
        assert lengths == [sum(sizes)] * bool(sizes)


@given(SIZES, st.integers(1, 12), st.integers(1, 4))
def test_pieces_cover_every_tensor_in_order(sizes, num_packs, parts):
    packs = planning.plan_packs(sizes, num_packs)
    packs = [part for pack in packs for part in planning.split_pack(pack, parts)]
    covered = [[] for _ in sizes]
    for piece in [piece for pack in packs for piece in pack]:
        covered[piece.tensor].append((piece.start, piece.stop))
    for size, ranges in zip(sizes, covered):
        assert ranges, "an empty tensor is in a pack, too"
        assert [start for start, _ in ranges] == [0, *[stop for _, stop in ranges[:-1]]]
        assert ranges[-1][1] == size
        assert size == 0 or all(start < stop for start, stop in ranges)


def test_packs_cut_where_the_sizes_say():
    assert planning.plan_packs([3, 0, 4], 2) == [[(0, 0, 3)], [(1, 0, 0), (2, 0, 4)]]
    assert planning.plan_packs([10], 3) == [[(0, 0, 3)], [(0, 3, 6)], [(0, 6, 10)]]
    assert planning.plan_packs([1, 1], 3) == [[(0, 0, 1), (1, 0, 1)]]


@pytest.mark.parametrize(
    "argument", ["num_packs", "agg_small_grads_max_bytes", "agg_small_grads_max_group"]
)
@pytest.mark.parametrize("value", [-1, 1.5, "2", None, True])
def test_bad_packers(argument, value):
    with pytest.raises(ValueError, match=argument):
        reduce.AllReduce(**{argument: value})
