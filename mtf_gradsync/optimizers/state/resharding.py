"""Notes on how variables are read from other runs' checkpoints, and resharding of values."""

from __future__ import annotations

import math
from typing import NamedTuple, Sequence

import numpy as np

# The last part of an accumulator's name.
ACCUMULATOR = "gradient_accumulator"
# The collection of `StateNote`s in a tf graph. It is not exported, as its key is not a string.
STATE_COLLECTION = ("mtf_gradsync state",)


class StateNote(NamedTuple):
    """How a wrapper's variable is read from a checkpoint of another run.

    Attributes:
      name: the variable's name.
      num_shard_dims: how many of its first dims number the shards; 0 if shards share it.
      is_share: whether each shard's value is 1/num_shards of its own, as in the gradient of a mean
        over all shards.
      fill: the value for every shard if the checkpoint has other shards, a number or the name of a
        scalar variable; None for sums, which keep their total.
      start: the value if the checkpoint does not have the variable: a number, or the name of a
        variable of its shape or of a scalar.
      counter: the variable that counts additions, or None. A checkpoint without it has the sums of
        another wrapper.
      is_mean: whether every shard gets the mean over the shards if the checkpoint has others.
    """

    name: str
    num_shard_dims: int = 0
    is_share: bool = False
    fill: float | str | None = None
    start: float | str = 0
    counter: str | None = None
    is_mean: bool = False


def reshard(value: np.ndarray, num_shard_dims: int, new_shape: Sequence[int]) -> np.ndarray:
    """Distributes values of S shards over T shards, so that their sum stays the same.

    Shards are numbered in row-major order over the shard dims; the values of shard j go to shard
    j * T // S and are added up there. On fewer shards each one gets a contiguous group. On more,
    some shards get zeros and no value is changed, so that nothing is rounded.

    `value` has the shape `[shard dims...] + rest`, where a reduced sum has no shard dims, and
    `new_shape` has shard dims of any number and sizes and the same rest, or it is a ValueError. The
    dtype does not change.
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
