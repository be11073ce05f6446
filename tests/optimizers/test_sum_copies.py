"""Sums within groups of shards, for variables of which every shard has a copy."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.optimizers.cross_shard import (
    SumCopies,
    check_group_assignment,
    check_groups_cover,
)
from tests import harness

EPS = np.finfo(np.float32).eps
D = 4
GROUPS = {
    "all": None,
    "contiguous": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "strided": [[0, 2, 4, 6], [1, 3, 5, 7]],
    "arbitrary": [[6, 0], [3, 1], [7, 4], [2, 5]],
    "single": [[i] for i in range(8)],
}


def reference(x, groups):
    """x: [shards, ...]."""
    x = x.astype(float)
    out = np.empty_like(x)
    for group in groups or [list(range(len(x)))]:
        out[group] = x[group].sum(0)
    return out


def group_sums(kind, mesh_shape, layout, dims, groups, x, dtype=tf.float32, **kwargs):
    """dims: dimensions of x, the ones named "s..." number the shards."""

    def build(mesh, inputs):
        tensor = mtf.import_tf_tensor(mesh, tf.cast(inputs["x"], dtype), mtf.Shape(dims))
        shard_dims = sorted((d for d in dims if d.name.startswith("s")), key=lambda d: d.name)
        out = SumCopies([tensor], [shard_dims], groups, gs.FusedAllReduce()).outputs[0]
        assert (out.shape, out.dtype) == (tensor.shape, tensor.dtype)
        return [], {"x": out}

    return harness.run(kind, mesh_shape, layout, build, [{"x": x}], **kwargs).fetched[0]["x"]


@pytest.mark.parametrize("groups", sorted(GROUPS))
def test_one_shard_a_processor(mesh_kind, groups):
    x = np.random.RandomState(0).randn(8, D).astype("f")
    dims = [mtf.Dimension("s", 8), mtf.Dimension("d", D)]
    out = group_sums(mesh_kind, "all:8", "s:all", dims, GROUPS[groups], x)
    np.testing.assert_allclose(out, reference(x, GROUPS[groups]), atol=8 * EPS * 4)


@pytest.mark.parametrize("groups", ["all", "strided", "arbitrary"])
def test_beside_a_model_axis_and_with_shuffled_cores(mesh_kind, groups):
    assignment = GROUPS[groups] and [[i for i in group if i < 4] for group in [[0, 2], [1, 3]]]
    if groups == "arbitrary":
        assignment = [[3, 0], [1, 2]]
    x = np.random.RandomState(0).randn(4, D).astype("f")
    dims = [mtf.Dimension("s", 4), mtf.Dimension("hidden", D)]
    shuffled = [3, 6, 0, 5, 7, 1, 4, 2] if mesh_kind == "simd" else None
    out = group_sums(
        mesh_kind,
        "rows:4;cols:2",
        "s:rows;hidden:cols",
        dims,
        assignment,
        x,
        logical_to_physical=shuffled,
    )
    np.testing.assert_allclose(out, reference(x, assignment), atol=8 * EPS * 4)


@pytest.mark.parametrize("groups", sorted(GROUPS))
@pytest.mark.parametrize(
    ("mesh_shape", "layout"), [("all:4", "s:all"), ("all:2", "s:all"), ("one:1", "")]
)
def test_several_shards_a_processor(mesh_kind, groups, mesh_shape, layout):
    x = np.random.RandomState(0).randn(D, 8, 2).astype("f")
    dims = [mtf.Dimension("d", D), mtf.Dimension("s", 8), mtf.Dimension("e", 2)]
    out = group_sums(mesh_kind, mesh_shape, layout, dims, GROUPS[groups], x)
    expected = np.moveaxis(reference(np.moveaxis(x, 1, 0), GROUPS[groups]), 0, 1)
    np.testing.assert_allclose(out, expected, atol=8 * EPS * 4)


@pytest.mark.parametrize("groups", ["all", "strided", "arbitrary"])
@pytest.mark.parametrize("sizes", [(2, 4), (4, 8)])
def test_shards_along_two_axes(mesh_kind, groups, sizes):
    assignment = GROUPS[groups]
    num = sizes[0] * sizes[1]
    if num == 32 and assignment:
        assignment = np.random.RandomState(1).permutation(32).reshape(4, 8).tolist()
    x = np.random.RandomState(0).randn(*sizes, 3).astype("f")
    dims = [mtf.Dimension("s0", sizes[0]), mtf.Dimension("s1", sizes[1]), mtf.Dimension("d", 3)]
    out = group_sums(mesh_kind, "a:2;b:4", "s0:a;s1:b", dims, assignment, x)
    expected = reference(x.reshape(num, 3), assignment).reshape(x.shape)
    np.testing.assert_allclose(out, expected, atol=32 * EPS * 4)


@pytest.mark.parametrize("mesh_shape", ["all:8", "all:4"])
def test_bfloat16(mesh_kind, mesh_shape):
    x = np.random.RandomState(0).randn(8, D).astype("f")
    dims = [mtf.Dimension("s", 8), mtf.Dimension("d", D)]
    out = group_sums(mesh_kind, mesh_shape, "s:all", dims, GROUPS["strided"], x, tf.bfloat16)
    rounded = x.astype(tf.bfloat16.as_numpy_dtype).astype(float)
    expected = reference(rounded, GROUPS["strided"])
    np.testing.assert_allclose(out.astype(float), expected, rtol=2**-8, atol=2**-8)


def test_empty_means_one_group_of_all():
    assert check_group_assignment(None) is None
    assert check_group_assignment([]) is None
    assert check_groups_cover([[1, 3], [2, 0]], 4) == 2
