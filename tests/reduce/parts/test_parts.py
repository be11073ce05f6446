"""Each processor gets its part of a sum, and parts are put together again."""

import numpy as np
import pytest

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.mesh import topology
from mtf_gradsync.reduce import FusedAllReduce, ProcessorGroups
from mtf_gradsync.reduce.parts.all_gather import all_gather
from mtf_gradsync.reduce.parts.cuts import Cut
from tests.reduce import on_mesh

# The first fills a tile of a TPU's memory and more.
SHAPES = [(8, 600), (3, 4), (4,)]
# Mesh, axes that are summed over, and how each value is cut.
CASES = [
    ("4x2", [0], [[Cut(0, 0)], [Cut(0, 1)], [Cut(0, 0)]]),
    ("4x2", [0, 1], [[Cut(0, 0), Cut(1, 1)], [Cut(0, 1)], [Cut(0, 0)]]),
    ("2x2x2", [0, 2], [[Cut(0, 1), Cut(2, 0)], [Cut(2, 1)], [Cut(0, 0)]]),
]


@pytest.mark.parametrize("kind", ["placement", "own memories", "simd"])
@pytest.mark.parametrize(("mesh", "axes", "cuts"), CASES)
def test_parts_of_sums_and_back(kind, mesh, axes, cuts, monkeypatch):
    shape = mtf.convert_to_shape(on_mesh.MESHES[mesh])
    rng = np.random.RandomState(0)
    # Whole numbers: their sums are exact in any order.
    arrays = [rng.randint(-9, 9, (shape.size, *s)).astype("f") for s in SHAPES]
    if kind == "own memories":
        monkeypatch.setattr(topology, "_memory", lambda device: device)

    def make(mesh_impl, values):
        groups = ProcessorGroups.along(mesh_impl, axes)
        parts = FusedAllReduce().reduce_scatter(mesh_impl, values, groups, cuts)
        return [*parts, *all_gather(mesh_impl, parts, cuts, 2**20)]

    where = "simd" if kind == "simd" else "placement"
    results = on_mesh.run(where, on_mesh.MESHES[mesh], arrays, make)
    parts, wholes = results[: len(SHAPES)], results[len(SHAPES) :]
    for array, cut, part, whole in zip(arrays, cuts, parts, wholes):
        for p in range(shape.size):
            at = mtf.pnum_to_processor_coordinates(shape, p)
            group = [
                q
                for q in range(shape.size)
                if all(
                    a == b or i in axes
                    for i, (a, b) in enumerate(zip(at, mtf.pnum_to_processor_coordinates(shape, q)))
                )
            ]
            total = array[group].sum(0)
            expected = total
            for axis, tensor_axis in cut:
                expected = np.split(expected, shape.dims[axis].size, tensor_axis)[at[axis]]
            np.testing.assert_array_equal(part[p], expected)
            np.testing.assert_array_equal(whole[p], total)
