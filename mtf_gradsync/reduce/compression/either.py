"""Runs one of two reductions, by a condition that is known when a step runs."""

from __future__ import annotations

from typing import Any, Callable, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.tensorflow import control_flow_v1
from mtf_gradsync.mesh.kind import is_simd


def either(
    mesh_impl: Any,
    predicate: tf.Tensor,
    if_true: Callable[[], Sequence[Any]],
    if_false: Callable[[], Sequence[Any]],
) -> list[Any]:
    """Returns the `LaidOutTensor`s of one of two functions; the other sends nothing in that step.

    The boolean `predicate`, a scalar, has to be the same on all processors. Both functions return
    values of the same shapes and dtypes. On a placement mesh each slice is on its processor's
    device.
    """

    def slices(make: Callable[[], Sequence[Any]]) -> list[tf.Tensor]:
        if is_simd(mesh_impl):
            return [tf.identity(x.one_slice) for x in make()]
        return [
            one
            for x in make()
            for one in mtf.parallel(mesh_impl.devices, tf.identity, x.tensor_list)
        ]

    def place(operation: tf.Operation) -> str:
        # TensorFlow would place the merge of the branches on any device.
        joins = operation.type == "Merge" and not operation.device
        return operation.inputs[0].device if joins else operation.device

    with control_flow_v1(), tf.device(place):
        flat = tf.cond(predicate, lambda: slices(if_true), lambda: slices(if_false))
    each = 1 if is_simd(mesh_impl) else mesh_impl.size
    return [
        mesh_impl.LaidOutTensor(list(flat[start : start + each]))
        for start in range(0, len(flat), each)
    ]
