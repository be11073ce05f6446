"""Raises a helpful error where a program gives a mesh tensor to TensorFlow."""

from __future__ import annotations

from typing import Any, NoReturn

from mtf_gradsync._private.libraries import mtf, tf


def explain_mesh_tensors_to_tensorflow() -> None:
    """Makes TensorFlow's operations raise an error for mesh tensors that says what to use instead.

    It is a TypeError as before, so that ``tf_tensor * mesh_tensor`` still is a product on the mesh.
    """
    tf.register_tensor_conversion_function((mtf.Tensor, mtf.Variable), _refuse)


def _refuse(x: Any, dtype: Any = None, name: Any = None, as_ref: bool = False) -> NoReturn:
    del dtype, name, as_ref
    raise TypeError(
        f"An operation of TensorFlow cannot take {x!r}, which belongs to Mesh-TensorFlow: it has "
        "no value before it is lowered. Use what does the same on the mesh: mtf.reduce_sum and "
        "the like for operations, gs.clip_by_global_norm in place of tf.clip_by_global_norm, of "
        "a list of one gradient in place of tf.clip_by_norm, and gs.MeshOptimizer(optimizer) in "
        "place of an optimizer of tf.compat.v1.train. After the lowering, its value is "
        "lowering.export_to_tf_tensor(tensor)."
    )
