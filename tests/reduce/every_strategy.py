"""Sums by every strategy, over every set of mesh axes."""

import functools

import numpy as np

from mtf_gradsync import reduce
from mtf_gradsync._private.libraries import tf
from tests.reduce import on_mesh

STRATEGIES = {
    "fused": lambda: reduce.FusedAllReduce(),
    "one_device": lambda: reduce.ReductionToOneDevice(),
    "ring": lambda: reduce.RingAllReduce(),
    "one_pack": lambda: reduce.AllReduce(),
    "packs": lambda: reduce.AllReduce("add_n", num_packs=3),
    "levels": lambda: reduce.HierarchicalAllReduce(),
    "ring_levels": lambda: reduce.HierarchicalAllReduce("ring/ring", num_packs=2),
    "sharded_levels": lambda: reduce.HierarchicalAllReduce(
        [("ring", 1, 32), ("add_n/ring", 3, 1100), ("add_n/add_n", 4, -1)],
        agg_small_grads_max_bytes=1000,
    ),
    "small": lambda: reduce.AllReduce("add_n", 0, 100, 3),
    "best": lambda: reduce.BestAllReduce(),
    # All sums but those of gradients, which tests of their own have; low rank does the same.
    "quantized": lambda: reduce.QuantizedAllReduce(),
    # Sums that stand alone, in parts and all together.
    **{
        f"collective_{scope}": functools.partial(reduce.CollectiveAllReduce, scope)
        for scope in (1, 3, 32)
    },
}


SHAPES = [(), (1,), (3,), (64, 4), (0, 2), (2, 3, 5), (64, 4), (1031,)]


# Odd groups that no set of axes describes, on any mesh of 8.
GROUPS = [[0, 5, 6, 3], [7, 2, 1, 4]]


# Unit roundoff by dtype; SIMD sums float64 in float32.
UNIT = {"float32": 2.0**-24, "float64": 2.0**-53, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def arrays(dtype="float32", seed=0):
    rng = np.random.RandomState(seed)
    dtype = tf.as_dtype(dtype).as_numpy_dtype
    return [np.asarray(rng.randn(8, *shape) * 3).astype(dtype) for shape in SHAPES]


def check(kind, mesh_shape, data, results, groups, unit):
    """n summands make n - 1 roundings on the way of each, in levels or not.

    Narrow sums round once a level, which is less.
    """
    for x, out in zip(data, results):
        assert out.shape == x.shape
        assert out.dtype == x.dtype
        want = on_mesh.expected(mesh_shape, x, groups)
        size = on_mesh.expected(mesh_shape, np.abs(x.astype(float)), groups)
        assert (np.abs(out.astype(float) - want) <= unit * len(groups[0]) * size).all()
        for group in groups:
            assert len({out[p].tobytes() for p in group}) == 1
