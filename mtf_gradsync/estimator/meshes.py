"""Makes the mesh of a model_fn: over the cores of a TPU program, or over devices."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.mesh.axes import LayoutLike, MeshShapeLike
from mtf_gradsync.reduce import placement_mesh_impl

# Bytes that the first host keeps free for each core's programs.
_PROGRAM_BYTES = 300_000_000


class ModelMesh(NamedTuple):
    """The mesh that a model is lowered on, and for a SIMD program the placer of its masters."""

    impl: mtf.MeshImpl
    variable_placer: Any
    is_simd: bool


def model_mesh(
    mesh_shape: MeshShapeLike,
    layout: LayoutLike,
    context: Any = None,
    devices: Sequence[str] | None = None,
) -> ModelMesh:
    """Makes the mesh of a model_fn.

    `context` is what TPUEstimator, or a program of `mtf_gradsync.simd`, puts into
    ``params["context"]``; None for a placement mesh, on `devices` or on virtual CPU devices.
    """
    shape = mtf.convert_to_shape(mesh_shape)
    layout = mtf.convert_to_layout_rules(layout)
    if context is None:
        devices = devices or [f"/device:CPU:{number}" for number in range(shape.size)]
        return ModelMesh(placement_mesh_impl(shape, layout, list(devices)), None, False)
    if shape.size != context.num_replicas:
        raise ValueError(
            f"The mesh {shape.to_string} has {shape.size} processors, and the program runs on "
            f"{context.num_replicas} cores: give mesh_shape as many processors as there are cores."
        )
    hosts = [
        context.tpu_host_placement_function(host_id=number) for number in range(context.num_hosts)
    ]
    in_use = [_PROGRAM_BYTES * context.num_replicas] + [0] * (len(hosts) - 1)
    physical = [int(size) for size in context.device_assignment.topology.mesh_shape]
    if len(physical) == 4:
        physical = mtf.simd_mesh_impl.physical_shape_3d_from_topology_proto_4d(physical)
    order = mtf.simd_mesh_impl.auto_logical_to_physical_tpu(
        shape.to_integer_list, physical, device_assignment=context.device_assignment
    )
    impl = mtf.simd_mesh_impl.SimdMeshImpl(
        shape,
        layout,
        [""] * shape.size,
        context.device_assignment,
        logical_to_physical=order,
    )
    return ModelMesh(impl, mtf.utils.BalancedVariablePlacer(hosts, in_use), True)


def outside_programs() -> Any:
    """Returns a context manager for operations outside of the TPU program that is being built."""
    return tf.control_dependencies(None)
