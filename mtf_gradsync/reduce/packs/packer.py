"""The choice between ways to pack that strategies offer their users."""

from __future__ import annotations

from typing import Sequence

from mtf_gradsync.reduce.checks import check_count
from mtf_gradsync.reduce.packs.planning import Packs, packs_of_whole, plan_packs, plan_small_groups


class Packer:
    """The three ways of TensorFlow 1's all-reduce to pack tensors; a `Planner`.

    Tensors of different dtypes are never in one pack: counts of packs are for each dtype.
    """

    def __init__(
        self,
        num_packs: int = 1,
        agg_small_grads_max_bytes: int = 0,
        agg_small_grads_max_group: int = 10,
    ):
        """Sets the way to pack. The first that is not switched off counts.

        Args:
          num_packs: lay all tensors end to end and split them evenly into so many packs, the
            last one taking the rest; 0 switches this off.
          agg_small_grads_max_bytes: put tensors of up to so many bytes per processor together,
            and leave the others alone; 0 switches this off.
          agg_small_grads_max_group: most tensors that are put together so; 0 switches this off.

        Raises:
          ValueError: an argument is negative or not a whole number.
        """
        self.num_packs = check_count("num_packs", num_packs, "a number of packs")
        self.max_bytes = check_count(
            "agg_small_grads_max_bytes", agg_small_grads_max_bytes, "a number of bytes"
        )
        self.max_group = check_count(
            "agg_small_grads_max_group", agg_small_grads_max_group, "a number of tensors"
        )

    def __call__(self, sizes: Sequence[int], itemsize: int) -> Packs:
        """The plan for tensors of `sizes` elements of `itemsize` bytes."""
        if self.num_packs > 0:
            return plan_packs(sizes, self.num_packs)
        num_bytes = [size * itemsize for size in sizes]
        return packs_of_whole(plan_small_groups(num_bytes, self.max_bytes, self.max_group), sizes)
