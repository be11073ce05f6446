"""What is called before Mesh-TensorFlow lowers a graph, and lowered values on other meshes."""

from __future__ import annotations

import functools
from typing import Any, Callable

from mtf_gradsync._private.libraries import mtf

_IS_OURS = "mtf_gradsync_is_called_before"


def call_before_lowering(call: Callable[[mtf.Graph], None]) -> None:
    """Makes every lowering and `mtf.Graph.rewrite_stack_variables` call a function first.

    The function gets the graph, and may add to it.
    """
    lower, rewrite = mtf.Lowering.__init__, mtf.Graph.rewrite_stack_variables
    # The latter is wrapped by gin, too.
    if hasattr(lower, _IS_OURS):
        return

    @functools.wraps(lower)
    def call_and_lower(self: mtf.Lowering, graph: mtf.Graph, *args: Any, **kwargs: Any) -> None:
        call(graph)
        lower(self, graph, *args, **kwargs)

    @functools.wraps(rewrite)
    def call_and_rewrite(self: mtf.Graph, *args: Any, **kwargs: Any) -> None:
        call(self)
        rewrite(self, *args, **kwargs)

    setattr(call_and_lower, _IS_OURS, True)
    mtf.Lowering.__init__ = call_and_lower
    mtf.Graph.rewrite_stack_variables = call_and_rewrite


def keep_apart_when_combined(kind: type) -> None:
    """Makes `mtf.Graph.combine_assignments` pass operations of a kind on as they are."""
    combine = mtf.Graph.combine_assignments
    if hasattr(combine, "__wrapped__"):
        return

    @functools.wraps(combine)
    def combine_others(self: mtf.Graph, assignments: list[mtf.Operation]) -> list[mtf.Operation]:
        apart = [op for op in assignments if isinstance(op, kind)]
        if not apart:
            return combine(self, assignments)
        return combine(self, [op for op in assignments if not isinstance(op, kind)]) + apart

    mtf.Graph.combine_assignments = combine_others


def lowered_on(lowering: mtf.Lowering, x: mtf.Tensor, mesh: mtf.Mesh) -> Any:
    """Returns the `LaidOutTensor` of a tensor on another mesh; its own mesh must not split it."""
    value = lowering.tensors[x].to_laid_out_tensor()
    if x.mesh is mesh:
        return value
    own, other = lowering.mesh_impl(x), lowering.mesh_impl(mesh)
    slices = list(value.tensor_list)
    if not isinstance(other, mtf.simd_mesh_impl.SimdMeshImpl):
        on_device = dict(zip(own.devices, slices))
        slices = [on_device.get(device, slices[0]) for device in other.devices]
    return other.LaidOutTensor(slices)
