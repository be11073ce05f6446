"""Runs one mtf program on a placement mesh, as a SIMD program, or on one processor."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, NamedTuple, Sequence, Tuple

import numpy as np

from mtf_gradsync import session_config, simd
from mtf_gradsync._private.libraries import mtf, tf

ONE = ("one:1", "")
# Mesh, layout and batch dimensions; the model below splits "hidden" where it can.
MESHES = {
    "8": ("all:8", "batch:all", ("batch",)),
    "4x2": ("rows:4;cols:2", "batch:rows;hidden:cols", ("batch",)),
    "2x2x2": ("a:2;b:2;c:2", "outer:a;batch:b;hidden:c", ("outer", "batch")),
}

# A core order of a SIMD mesh that no symmetry of the mesh explains.
SHUFFLED = [3, 6, 0, 5, 7, 1, 4, 2]

Build = Callable[[mtf.Mesh, Dict[str, tf.Tensor]], Tuple[Sequence[Any], Dict[str, mtf.Tensor]]]


class Result(NamedTuple):
    """What a run left behind.

    Attributes:
      fetched: for each step the values of the fetches.
      variables: master variables after the last step.
      graph: the tf graph.
      lowering: the mtf lowering.
    """

    fetched: list[dict[str, np.ndarray]]
    variables: dict[str, np.ndarray]
    graph: tf.Graph
    lowering: mtf.Lowering


def placement(mesh_shape: Any, layout: Any) -> mtf.placement_mesh_impl.PlacementMeshImpl:
    """A placement mesh over as many virtual CPU devices as it has processors."""
    shape = mtf.convert_to_shape(mesh_shape)
    devices = [f"/device:CPU:{i}" for i in range(shape.size)]
    return mtf.placement_mesh_impl.PlacementMeshImpl(
        shape, mtf.convert_to_layout_rules(layout), devices
    )


def run(
    kind: str,
    mesh_shape: Any,
    layout: Any,
    build: Build,
    feeds: Sequence[dict[str, np.ndarray]],
    autostack: bool = True,
    logical_to_physical: Sequence[int] | None = None,
    repeats: int = 1,
) -> Any:
    """Builds a program in a graph of its own and runs one step for each feed.

    Args:
      kind: "placement" or "simd".
      mesh_shape: shape of the mesh.
      layout: its layout.
      build: called with the mesh and a placeholder for each input; returns the mtf operations to
        run and the mtf tensors to fetch.
      feeds: inputs by name, one dictionary a step.
      autostack: as for `mtf.Lowering`.
      logical_to_physical: core order of a SIMD mesh.
      repeats: run the whole session that often, and return a list of results.

    Returns:
      A `Result`, or a list of them if repeats is not 1.
    """
    results = []
    with tf.Graph().as_default() as tf_graph:
        tf.set_random_seed(1)
        inputs = {
            name: tf.placeholder(tf.as_dtype(value.dtype), value.shape, name=name)
            for name, value in feeds[0].items()
        }
        if kind == "simd":
            block = simd.tpu_program(mesh_shape, layout, logical_to_physical=logical_to_physical)
        else:
            block = contextlib.nullcontext()
        with block as program:
            mesh_impl = program.mesh_impl if program else placement(mesh_shape, layout)
            graph = mtf.Graph()
            mesh = mtf.Mesh(graph, "mesh")
            operations, fetches = build(mesh, inputs)
            # Only tensors that are not split can leave a SIMD program.
            fetches = {name: mtf.anonymize(t) for name, t in fetches.items()}
            lowering = mtf.Lowering(graph, {mesh: mesh_impl}, autostack=autostack)
            fetched = {name: lowering.export_to_tf_tensor(t) for name, t in fetches.items()}
            updates = [lowering.lowered_operation(op) for op in operations]
        if program is None:
            restore, collect = lowering.copy_masters_to_slices(), lowering.copy_slices_to_masters()
            init = [tf.global_variables_initializer(), tf.local_variables_initializer()]
        masters = {v.op.name: v for v in tf.global_variables()}
        for _ in range(repeats):
            if program:
                session_block = program.session(lowering)
            else:
                size = mtf.convert_to_shape(mesh_shape).size
                session_block = tf.Session(config=session_config(num_cpu_devices=size))
            with session_block as session:
                if program is None:
                    session.run(init)
                    session.run(restore)
                steps = []
                for feed in feeds:
                    feed = {inputs[name]: value for name, value in feed.items()}
                    steps.append(session.run([fetched, updates], feed)[0])
                if program is None:
                    session.run(collect)
                    values = session.run(masters)
                else:
                    values = session.variables()
            results.append(Result(steps, values, tf_graph, lowering))
    return results[0] if repeats == 1 else results
