"""Decides which replicas contribute in a step."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients import not_finite, shards_not_finite
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.reduce import Strategy


def check_of_replicas(name: str, kind: str, value: Any, axes: ReplicaAxes) -> None:
    """Raises TypeError or ValueError if an argument is not None and not a value for each replica.

    `kind` is "whole number", or "boolean", for which whole numbers are allowed, too (0 for False).
    """
    if value is None:
        return
    dims = list(axes.shard_dims)
    # A flat list, or with the sizes of the shard dims.
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
            # Lists of unequal lengths, of tensors, or of other objects than numbers.
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
            f"{name}={value!r} is on another mesh than the variables; give a tensor on their mesh."
        )


def steps_of_gradients(local_steps: Any, variable: mtf.Variable, axes: ReplicaAxes) -> mtf.Tensor:
    """Returns the update step that each replica's gradient of this step is for.

    It is an int32 mtf tensor of the shape of `variable` (`ReplicaState.local_step`), the same on
    every processor.
    """
    if local_steps is None:
        return variable.value
    return _on_mesh(local_steps, variable.mesh, mtf.Shape(list(axes.shard_dims)), variable.shape)


def fresh_replicas(
    own: Sequence[mtf.Tensor],
    reduced: Sequence[mtf.Tensor],
    steps: mtf.Tensor,
    update_step: mtf.Variable,
    contributes: Any,
    axes: ReplicaAxes,
    strategy: Strategy,
) -> mtf.Tensor:
    """Returns which replicas contribute: `[shard dims...]`, boolean, split over the replica axes.

    `own` are what each replica has computed, per shard, and `reduced` gradients of all replicas, in
    which a NaN drops all. `steps` is what `steps_of_gradients` returned.
    """
    dims = mtf.Shape(list(axes.shard_dims))
    # A processor has the whole of one, unless the layout splits it over a replica axis.
    split = [g for g in reduced if axes.free_shard_dims(g.shape) != axes.shard_dims]
    shards = [*own, *(g for g in reduced if g not in split)]
    found = [shards_not_finite(shards, axes, strategy)] if shards else []
    if split:
        found.append(mtf.broadcast(not_finite(split, strategy), dims))
    bad = mtf.add_n(found)
    behind = mtf.broadcast(update_step.value, steps.shape) - steps
    # Each processor takes its own slice of a tensor that all of them have: nothing is sent.
    behind = mtf.reshape(behind, bad.shape)
    fresh = mtf.logical_and(mtf.less_equal(bad, 0.0), mtf.less_equal(behind, 0))
    if contributes is None:
        return fresh
    mask = _on_mesh(contributes, bad.mesh, bad.shape, bad.shape)
    return mtf.logical_and(fresh, mtf.not_equal(mask, 0))


def _on_mesh(value: Any, mesh: mtf.Mesh, shape: mtf.Shape, to: mtf.Shape) -> mtf.Tensor:
    """Converts a value for each replica to an int32 mtf tensor of a shape."""
    if isinstance(value, mtf.Tensor):
        whole_numbers = mtf.cast(value, tf.int32)
        if value.shape != shape:
            whole_numbers = mtf.transpose(whole_numbers, shape)
        return mtf.reshape(whole_numbers, to)
    return mtf.import_tf_tensor(mesh, tf.reshape(tf.cast(value, tf.int32), to.to_integer_list), to)
