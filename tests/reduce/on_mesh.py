"""Runs reductions of one array a processor, without a model around them."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, Callable, Sequence

import numpy as np

from mtf_gradsync import reduce, session_config, simd
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness

MESHES = {name: mesh[0] for name, mesh in harness.MESHES.items()}


def run(
    kind: str,
    mesh_shape: str,
    arrays: Sequence[np.ndarray],
    make: Callable[[Any, list], Any],
    runs: int = 1,
    logical_to_physical: Sequence[int] | None = None,
    devices: Sequence[str] | None = None,
    target: str = "",
) -> Any:
    """Lays arrays out on a mesh and gives back what a function makes of them.

    Args:
      kind: "placement" or "simd".
      mesh_shape: Mesh-TF's mesh shape.
      arrays: of shape [processors, ...]; processor p gets arrays[i][p].
      make: called with the mesh implementation and the list of `LaidOutTensor`s; returns a list
        of `LaidOutTensor`s.
      runs: how often the session runs.
      logical_to_physical: core order of a SIMD mesh.
      devices: of a placement mesh; None is one CPU device a processor.
      target: the server to run on.

    Returns:
      For each run a list of arrays of shape [processors, ...]; the first of them for one run.
    """
    shape = mtf.convert_to_shape(mesh_shape)
    order = list(logical_to_physical or range(shape.size))
    with tf.Graph().as_default():
        if kind == "simd":
            inputs = [[tf.constant(a[order.index(p)]) for p in range(shape.size)] for a in arrays]
            with simd.tpu_program(mesh_shape, "", logical_to_physical=order) as program:
                impl = program.mesh_impl
                values = [impl.LaidOutTensor([program.per_replica(x)]) for x in inputs]
                slices = [tf.identity(x.one_slice) for x in make(impl, values)]
            block = program.session()
        else:
            impl = harness.placement(mesh_shape, "")
            if devices is not None:
                impl = mtf.placement_mesh_impl.PlacementMeshImpl(shape, impl.layout_rules, devices)
            values = []
            for a in arrays:
                tensors = []
                for x, device in zip(a, impl.devices):
                    with tf.device(device):
                        tensors.append(tf.constant(x))
                values.append(impl.LaidOutTensor(tensors))
            slices = [x.tensor_list for x in make(impl, values)]
            config = session_config(num_cpu_devices=shape.size)
            # Constants are inputs here: folding them would leave nothing to test.
            config.graph_options.rewrite_options.disable_meta_optimizer = True
            block = tf.Session(target, config=config)
        results = []
        with block as session:
            for _ in range(runs):
                if kind == "simd":
                    by_core = session.run(slices, per_replica=True) if slices else []
                    results.append([np.stack([x[p] for p in order]) for x in by_core])
                else:
                    results.append([np.stack(x) for x in session.run(slices)])
    return results[0] if runs == 1 else results


def sums(
    strategy: reduce.GradientReducer,
    axes: Sequence[int] = (0,),
    groups: Sequence[Sequence[int]] | None = None,
) -> Callable[[Any, list], list]:
    """For `run`: sums by a strategy, over mesh axes or over groups of processors."""

    def make(impl: Any, values: list) -> list:
        along = reduce.ProcessorGroups.along
        chosen = reduce.ProcessorGroups(groups) if groups else along(impl, axes)
        return strategy.all_reduce(impl, values, chosen)

    return make


@contextlib.contextmanager
def graph_of(mesh_shape: str, shapes: Sequence[Any], dtype: Any = tf.float32):
    """A placement mesh, values on it, and the graph, to look at without running anything."""
    impl = harness.placement(mesh_shape, "")
    with tf.Graph().as_default() as graph:
        values = [
            impl.LaidOutTensor([tf.placeholder(dtype, shape) for _ in range(impl.size)])
            for shape in shapes
        ]
        yield impl, values, graph


def subsets(mesh_shape: str) -> list[tuple[int, ...]]:
    """Every set of mesh axes that is not empty."""
    axes = range(mtf.convert_to_shape(mesh_shape).ndims)
    return [s for size in axes for s in itertools.combinations(axes, size + 1)]


def expected(mesh_shape: str, array: np.ndarray, groups: Sequence[Sequence[int]]) -> np.ndarray:
    """Sums over groups in float64, for each processor."""
    result = np.empty(array.shape, np.float64)
    for group in groups:
        result[list(group)] = array[list(group)].astype(np.float64).sum(0)
    return result
