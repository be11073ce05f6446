"""The ways to pack tensors that strategies offer."""

from __future__ import annotations

from typing import Sequence

from mtf_gradsync.reduce.checks import check_count
from mtf_gradsync.reduce.packs.planning import Packs, packs_of_groups, plan_packs, plan_small_groups


class Packer:
    """A `Planner` with the three ways of TensorFlow 1's all-reduce to pack tensors of a dtype."""

    def __init__(
        self,
        num_packs: int = 1,
        agg_small_grads_max_bytes: int = 0,
        agg_small_grads_max_group: int = 10,
    ):
        """Sets the way to pack, as `AllReduce` describes: the first argument that is not 0."""
        self.num_packs = check_count("num_packs", num_packs, "a number of packs")
        self.max_bytes = check_count(
            "agg_small_grads_max_bytes", agg_small_grads_max_bytes, "a number of bytes"
        )
        self.max_group = check_count(
            "agg_small_grads_max_group", agg_small_grads_max_group, "a number of tensors"
        )

    @property
    def packs_tensors(self) -> bool:
        """Whether it packs any tensors; otherwise each is alone."""
        return self.num_packs > 0 or (self.max_bytes > 0 and self.max_group > 0)

    def __call__(self, sizes: Sequence[int], itemsize: int) -> Packs:
        """Makes the plan for tensors of `sizes` elements of `itemsize` bytes."""
        if self.num_packs > 0:
            return plan_packs(sizes, self.num_packs)
        num_bytes = [size * itemsize for size in sizes]
        return packs_of_groups(plan_small_groups(num_bytes, self.max_bytes, self.max_group), sizes)
