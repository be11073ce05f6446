"""What wrappers say of their variables, so that checkpoints of other runs can be read."""

from __future__ import annotations

from typing import NamedTuple

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
    """

    name: str
    num_shard_dims: int = 0
    is_share: bool = False
    fill: float | str | None = None
    start: float | str = 0
    counter: str | None = None
