"""The three ways in which TensorFlow 1's all-reduce packs tensors of one dtype into messages."""

from __future__ import annotations

from typing import Sequence

from mtf_gradsync._common import check_whole_number
from mtf_gradsync.reduce.sums import Packs, Piece, packs_of_groups


def plan_small_groups(num_bytes: Sequence[int], max_bytes: int, max_group: int) -> list[list[int]]:
    """Returns the indices of tensors in groups of up to max_group tensors.

    A tensor of more than max_bytes is alone in its group.
    """
    groups: list[list[int]] = []
    filling: list[int] = []
    for index, size in enumerate(num_bytes):
        if max_bytes <= 0 or max_group <= 0 or size > max_bytes:
            groups.append([index])
            continue
        if not filling or len(filling) == max_group:
            filling = []
            groups.append(filling)
        filling.append(index)
    return groups


def plan_packs(sizes: Sequence[int], num_packs: int) -> Packs:
    """Returns num_packs equal packs of tensors that are laid end to end; see `split_pack`.

    `sizes` has the number of elements of each tensor.
    """
    return split_pack([Piece(index, 0, size) for index, size in enumerate(sizes)], num_packs)


def split_pack(pack: Sequence[Piece], parts: int) -> Packs:
    """Splits a pack into equal parts; the last one takes the rest. Leaves out empty parts.

    A pack of fewer elements than parts stays whole, as in TensorFlow 1.
    """
    share = sum(piece.stop - piece.start for piece in pack) // parts
    parts = parts if share else 1

    def part_of(position: int) -> int:
        return min(position // share, parts - 1) if share else parts - 1

    result: Packs = [[] for _ in range(parts)]
    offset = 0
    for tensor, start, stop in pack:
        end = offset + stop - start
        # A piece without elements is in one part, too.
        for part in range(part_of(offset), part_of(max(offset, end - 1)) + 1):
            low = max(offset, part * share)
            high = end if part == parts - 1 else min(end, (part + 1) * share)
            result[part].append(Piece(tensor, start + low - offset, start + high - offset))
        offset = end
    return [part for part in result if part]


class Packer:
    """A `Planner` that packs tensors in one of the three ways of TensorFlow 1's all-reduce."""

    def __init__(
        self,
        num_packs: int = 1,
        agg_small_grads_max_bytes: int = 0,
        agg_small_grads_max_group: int = 10,
    ):
        """Sets the way to pack; the arguments are those of `AllReduce`."""
        max_bytes, max_group = agg_small_grads_max_bytes, agg_small_grads_max_group
        self.num_packs = check_whole_number("num_packs", num_packs, 0)
        self.max_bytes = check_whole_number("agg_small_grads_max_bytes", max_bytes, 0, most=None)
        self.max_group = check_whole_number("agg_small_grads_max_group", max_group, 0)

    @property
    def packs_tensors(self) -> bool:
        """Whether tensors may share a pack; if false, each is alone."""
        return self.num_packs > 0 or (self.max_bytes > 0 and self.max_group > 0)

    def __call__(self, sizes: Sequence[int], itemsize: int) -> Packs:
        """Returns packs of tensors that have `sizes` elements of `itemsize` bytes each."""
        if self.num_packs > 0:
            return plan_packs(sizes, self.num_packs)
        num_bytes = [size * itemsize for size in sizes]
        return packs_of_groups(plan_small_groups(num_bytes, self.max_bytes, self.max_group), sizes)
