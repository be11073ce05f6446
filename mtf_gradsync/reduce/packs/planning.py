"""Plans, from sizes alone, of which parts of which tensors make a pack."""

from __future__ import annotations

from typing import Callable, List, NamedTuple, Sequence


class Piece(NamedTuple):
    """The elements of the tensor at an index from `start` to before `stop`, in row-major order."""

    tensor: int
    start: int
    stop: int


#: A plan: the pieces of each pack. Each element of each tensor is in one pack, and the pieces of a
#: tensor are in order.
Packs = List[List[Piece]]
#: Makes a plan from the sizes of tensors in elements and the bytes of an element.
Planner = Callable[[Sequence[int], int], Packs]


def plan_buckets(
    num_bytes: Sequence[int], bucket_bytes: int, packed_bytes: int | None = None
) -> list[list[int]]:
    """Returns the indices of tensors in each bucket of at most bucket_bytes, filled first fit.

    A tensor that is larger than a bucket, or than packed_bytes, is alone in its bucket.
    """
    buckets: list[list[int]] = []
    rooms: list[int] = []
    for index, size in enumerate(num_bytes):
        fitting = None
        packed = bucket_bytes > 0 and (packed_bytes is None or size <= packed_bytes)
        if packed:
            fitting = next((i for i, room in enumerate(rooms) if size <= room), None)
        if fitting is None:
            buckets.append([index])
            # Less than the smallest tensor takes, so that nothing joins a tensor that is alone.
            rooms.append(bucket_bytes - size if packed else -1)
        else:
            buckets[fitting].append(index)
            rooms[fitting] -= size
    return buckets


def plan_small_groups(num_bytes: Sequence[int], max_bytes: int, max_group: int) -> list[list[int]]:
    """Returns the indices in groups: up to max_group of at most max_bytes each, others alone."""
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


def packs_of_groups(groups: Sequence[Sequence[int]], sizes: Sequence[int]) -> Packs:
    """Makes one pack of each group of indices, with all elements of its tensors."""
    return [[Piece(i, 0, sizes[i]) for i in group] for group in groups]


def plan_packs(sizes: Sequence[int], num_packs: int) -> Packs:
    """Returns packs of tensors of these numbers of elements, laid end to end; see `split_pack`."""
    return split_pack([Piece(index, 0, size) for index, size in enumerate(sizes)], num_packs)


def split_pack(pack: Sequence[Piece], parts: int) -> Packs:
    """Splits a pack evenly; the last part takes the rest. Empty parts are not returned."""
    share = sum(piece.stop - piece.start for piece in pack) // parts

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
