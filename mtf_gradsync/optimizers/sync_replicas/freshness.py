"""Which replicas contribute in a step: what their gradients hold, and what the program says."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients import shards_not_finite
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.reduce import Strategy


def check_of_replicas(name: str, kind: str, value: Any, axes: ReplicaAxes) -> None:
    """Checks an argument that has a value for each replica; creates nothing.

    Args:
      name: name of the argument.
      kind: what it has for each: "boolean" (or whole numbers, 0 for False) or "whole number".
      value: what was given, None for nothing.
      axes: the replica axes.

    Raises:
      TypeError: it is neither a tensor nor a list of that kind.
      ValueError: it does not have one entry for each replica.
    """
    if value is None:
        return
    dims = list(axes.shard_dims)
    # One after the other, or row by row.
    shapes = list(dict.fromkeys([(axes.num_shards,), tuple(d.size for d in dims)]))
    wanted = (
        f"{name} must have one {kind} for each of the {axes.num_shards} replicas: an mtf tensor "
        f"of shape {mtf.Shape(dims).to_string}, or a tf tensor, array or list of shape "
        + " or ".join(str(list(shape)) for shape in shapes)
    )
    if isinstance(value, (mtf.Tensor, tf.Tensor, tf.Variable)):
        shape, dtype = value.shape, value.dtype.base_dtype
    else:
        try:
            array = np.asarray(value)
            shape, dtype = tf.TensorShape(array.shape), tf.as_dtype(array.dtype)
        except (TypeError, ValueError, NotImplementedError):
            # Lists of several lengths, of tensors, or of what is no number.
            raise TypeError(f"{wanted}; got {value!r}.") from None
    if not (dtype.is_integer or (kind == "boolean" and dtype == tf.bool)):
        raise TypeError(f"{wanted}; got the dtype {dtype.name} of {value!r}.")
    if isinstance(value, mtf.Tensor):
        fits = set(shape.dims) == set(dims)
    else:
        fits = any(shape.is_compatible_with(x) for x in shapes)
    if not fits:
        raise ValueError(f"{wanted}; got the shape {shape} of {value!r}.")


def check_mesh(name: str, value: Any, mesh: mtf.Mesh) -> None:
    """Raises ValueError for an mtf tensor of another mesh."""
    if isinstance(value, mtf.Tensor) and value.mesh is not mesh:
        raise ValueError(
            f"{name}={value!r} is on another mesh than the variables that gradients are applied to."
        )


def steps_of_gradients(local_steps: Any, variable: mtf.Variable, axes: ReplicaAxes) -> mtf.Tensor:
    """The update step that each replica's gradient of this step is for.

    Args:
      local_steps: what `check_of_replicas` accepts.
      variable: `local_step` of `ReplicaState`, for None.
      axes: the replica axes.

    Returns:
      An int32 mtf tensor of the variable's shape, which every processor holds whole.
    """
    if local_steps is None:
        return variable.value
    return _on_mesh(local_steps, variable.mesh, mtf.Shape(list(axes.shard_dims)), variable.shape)


def fresh_replicas(
    shards: Sequence[mtf.Tensor],
    steps: mtf.Tensor,
    update_step: mtf.Variable,
    contributes: Any,
    axes: ReplicaAxes,
    strategy: Strategy,
) -> mtf.Tensor:
    """Which replicas contribute.

    Args:
      shards: gradients per shard, at least one.
      steps: the update step that each replica's are for, as `steps_of_gradients` returns it.
      update_step: updates made.
      contributes: what `check_of_replicas` accepts.
      axes: the replica axes.
      strategy: the reduction strategy.

    Returns:
      A boolean mtf tensor of shape `[shard dims...]`, each processor having its replica's.
    """
    bad = shards_not_finite(shards, axes, strategy)
    behind = mtf.broadcast(update_step.value, steps.shape) - steps
    # Each processor takes its own of what all of them have: nothing is sent over the mesh.
    behind = mtf.reshape(behind, bad.shape)
    fresh = mtf.logical_and(mtf.less_equal(bad, 0.0), mtf.less_equal(behind, 0))
    if contributes is None:
        return fresh
    mask = _on_mesh(contributes, bad.mesh, bad.shape, bad.shape)
    return mtf.logical_and(fresh, mtf.not_equal(mask, 0))


def _on_mesh(value: Any, mesh: mtf.Mesh, shape: mtf.Shape, to: mtf.Shape) -> mtf.Tensor:
    """An int32 for each replica: `[shard dims...]` is shape, and to has its sizes."""
    if isinstance(value, mtf.Tensor):
        whole_numbers = mtf.cast(value, tf.int32)
        if value.shape != shape:
            whole_numbers = mtf.transpose(whole_numbers, shape)
        return mtf.reshape(whole_numbers, to)
    return mtf.import_tf_tensor(mesh, tf.reshape(tf.cast(value, tf.int32), to.to_integer_list), to)
