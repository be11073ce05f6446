"""Packing, for any shapes, dtypes and orders."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mtf_gradsync import reduce
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.reduce.packs import packed, packer, packing, planning
from tests.reduce import on_mesh

DTYPES = ["float32", "bfloat16", "float16", "float64", "int8", "int32", "int64", "complex64"]
SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=8)


@settings(max_examples=50)
@given(SHAPES, st.sampled_from(DTYPES))
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


PLANNERS = {
    "buckets": lambda n: (
        lambda sizes, itemsize: planning.packs_of_groups(
            planning.plan_buckets([s * itemsize for s in sizes], 30 * n), sizes
        )
    ),
    "packs": lambda n: packer.Packer(n),
    "small": lambda n: packer.Packer(0, 60, n),
    "shards": lambda n: (
        lambda sizes, itemsize: [
            part for p in planning.plan_packs(sizes, 2) for part in planning.split_pack(p, n)
        ]
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
        return packed.packed_all_reduce(impl, values, groups, keep, PLANNERS[name](number))

    for x, out in zip(data, on_mesh.run("placement", "all:2", data, make)):
        assert out.shape == x.shape
        assert out.dtype == x.dtype
        assert out.tobytes() == x.tobytes()
    assert sum(tf.TensorShape(p.slice_shape).num_elements() for p in packs) == sum(
        x[0].size for x in data
    )
