"""What wrappers say of their variables, and how what shards hold is laid out on other shards."""

from __future__ import annotations

import math
from typing import NamedTuple, Sequence

import numpy as np

# Where a tf graph keeps `StateNote`s. Keys that are no text are not exported.
STATE_COLLECTION = ("mtf_gradsync state",)


class StateNote(NamedTuple):
    """How a wrapper's variable is read from a checkpoint of another run.

    Attributes:
      name: its name.
      num_shard_dims: how many of its first dims number the shards; 0 for what is whole.
      is_share: whether each shard's value is 1/num_shards of what it stands for, as the gradient
        of a mean over all shards is.
      fill: what every shard gets where the checkpoint has other shards, a number or the name of a
        scalar variable; None for sums, which keep their total.
      start: what it begins with where the checkpoint does not have it, a number or the name of a
        variable of its shape or of a scalar.
      counter: the variable that counts what is in it, None for none. A checkpoint without that has
        the sums of another wrapper.
      is_mean: whether every shard gets the mean over the shards of a checkpoint that has others.
    """

    name: str
    num_shard_dims: int = 0
    is_share: bool = False
    fill: float | str | None = None
    start: float | str = 0
    counter: str | None = None
    is_mean: bool = False


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
