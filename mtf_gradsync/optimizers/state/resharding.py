"""Lays out what shards hold on another number of shards."""

from __future__ import annotations

import math
from typing import Sequence

import numpy as np


def reshard(value: np.ndarray, num_shard_dims: int, new_shape: Sequence[int]) -> np.ndarray:
    """Lays values of S shards out over T shards, so that their sum stays the same.

    Shards are numbered in row-major order over the shard dims; the values of shard j go to shard
    j * T // S and are added up there. On fewer shards each one gets a contiguous group. On more,
    some shards get zeros and no value is changed, so that nothing is rounded.

    Args:
      value: array of shape `[shard dims...] + rest`.
      num_shard_dims: how many dims of value number the shards; 0 for a sum that is whole.
      new_shape: the shape to bring it to: shard dims of any number and sizes, and the same rest.

    Returns:
      An array of shape new_shape and of the dtype of value.

    Raises:
      ValueError: value does not have the rest that new_shape ends with.
    """
    value, new_shape = np.asarray(value), tuple(new_shape)
    rest = value.shape[num_shard_dims:]
    num_new_dims = len(new_shape) - len(rest)
    if (
        not 0 <= num_shard_dims <= value.ndim
        or num_new_dims < 0
        or new_shape[num_new_dims:] != rest
    ):
        raise ValueError(
            f"value has shape {value.shape}, of which {num_shard_dims} dims number the shards; "
            f"new_shape must end with the others, {rest}, got {new_shape}."
        )
    old_shards = math.prod(value.shape[:num_shard_dims])
    new_shards = math.prod(new_shape[:num_new_dims])
    # 2-byte floats are added up in float32, as on the mesh.
    narrow = value.dtype.itemsize < 4
    parts = value.reshape((old_shards, *rest))
    result = np.zeros((new_shards, *rest), np.float32 if narrow else value.dtype)
    for shard in range(old_shards):
        result[shard * new_shards // old_shards] += parts[shard].astype(result.dtype, copy=False)
    return result.astype(value.dtype, copy=False).reshape(new_shape)
