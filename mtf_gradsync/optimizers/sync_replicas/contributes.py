"""Which replicas the caller lets contribute: the mask as it is given, and on the mesh."""

from __future__ import annotations

from typing import Any

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.mesh.axes import ReplicaAxes


def check_contributes(contributes: Any, axes: ReplicaAxes) -> None:
    """Checks a mask of replicas; creates nothing.

    Args:
      contributes: the argument of SyncReplicasOptimizer.
      axes: the replica axes.

    Raises:
      TypeError: it is neither a tensor nor a list of booleans (or of whole numbers, 0 for False).
      ValueError: it does not have one entry for each replica.
    """
    if contributes is None:
        return
    dims = list(axes.shard_dims)
    wanted = (
        f"contributes must have one boolean for each of the {axes.num_shards} replicas: an mtf "
        f"tensor of shape {mtf.Shape(dims).to_string}, or a tf tensor, array or list of shape "
        f"[{axes.num_shards}]"
    )
    if isinstance(contributes, mtf.Tensor):
        if contributes.dtype != tf.bool:
            raise TypeError(f"{wanted}; got the dtype {contributes.dtype} of {contributes!r}.")
        if set(contributes.shape.dims) != set(dims):
            raise ValueError(f"{wanted}; got {contributes!r}.")
        return
    if isinstance(contributes, (tf.Tensor, tf.Variable)):
        shape, dtype = contributes.shape, contributes.dtype.base_dtype
    else:
        try:
            value = np.asarray(contributes)
            shape, dtype = tf.TensorShape(value.shape), tf.as_dtype(value.dtype)
        except (TypeError, ValueError, NotImplementedError):
            # Lists of several lengths, of tensors, or of what is no number.
            raise TypeError(f"{wanted}; got {contributes!r}.") from None
    if dtype != tf.bool and not dtype.is_integer:
        raise TypeError(f"{wanted}; got the dtype {dtype.name} of {contributes!r}.")
    shapes = ([axes.num_shards], [d.size for d in dims])
    if not any(shape.is_compatible_with(x) for x in shapes):
        raise ValueError(f"{wanted}; got the shape {shape} of {contributes!r}.")


def mask_on_mesh(contributes: Any, mesh: mtf.Mesh, shape: mtf.Shape) -> mtf.Tensor:
    """The mask as a boolean mtf tensor.

    Args:
      contributes: what `check_contributes` accepts, not None.
      mesh: the mesh.
      shape: `[shard dims...]`.

    Returns:
      An mtf tensor; of the shape where it was not one before.
    """
    if isinstance(contributes, mtf.Tensor):
        return contributes
    mask = tf.reshape(tf.cast(contributes, tf.int32), shape.to_integer_list)
    return mtf.not_equal(mtf.import_tf_tensor(mesh, mask, shape), 0)
