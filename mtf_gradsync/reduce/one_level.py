"""Strategies that sum a whole group at once, with TensorFlow 1's settings or as Mesh-TF does."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import gin

from mtf_gradsync._common import check_whole_number, warn_once
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.mesh.axes import ProcessorGroups, is_simd
from mtf_gradsync.mesh.devices import canonical_device, place_of
from mtf_gradsync.reduce.strategy import OneLevel
from mtf_gradsync.reduce.sums import (
    ALGORITHMS,
    Algorithm,
    GroupSum,
    Packs,
    Piece,
    Planner,
    add_n,
    check_algorithm,
    packs_of_groups,
    plan_unpacked,
    ring,
    sum_on_one_device,
)


@gin.configurable(module="mtf_gradsync")
class AllReduce(OneLevel):
    """A strategy that sums packs of tensors by one algorithm.

    On a placement mesh there are two algorithms. With "add_n" one device adds up a pack, and all
    others read the sum; for each pack the next device adds up. "ring" is Mesh-TF's algorithm. A
    SIMD mesh always uses the all-reduce of its compiler, and a warning says so if an algorithm was
    given. If nothing is packed, the compiler gets all sums as one group of sums.

    One pack is TensorFlow 1's default, and the fastest choice if messages are slow. With one pack
    and "add_n", one device does all the work. As many packs as processors spread the work evenly.

    References:
      TensorFlow 1's `AllReduceCrossTowerOps`, whose arguments these are; its algorithms are for
      GPUs.
    """

    def __init__(
        self,
        algorithm: Algorithm | None = None,
        num_packs: int = 1,
        agg_small_grads_max_bytes: int = 0,
        agg_small_grads_max_group: int = 10,
    ):
        """Sets the algorithm, and how tensors are packed: into num_packs packs, or in small groups.

        Args:
          algorithm: "add_n" or "ring". None takes the compiler's all-reduce on a SIMD mesh, and
            "add_n" elsewhere.
          num_packs: the number of equal packs that all tensors, laid end to end, are split into.
            The last pack takes the elements that are left over.
          agg_small_grads_max_bytes: used if num_packs is 0: the size of the largest tensor that is
            packed with others, in bytes per processor.
          agg_small_grads_max_group: the largest number of tensors in a pack of small tensors; 0
            packs none.

        Raises:
          ValueError: there is no such algorithm, or a number is negative or not whole.
        """
        self.algorithm = None if algorithm is None else check_algorithm(algorithm)
        self.packer = Packer(num_packs, agg_small_grads_max_bytes, agg_small_grads_max_group)

    def _group_sum(self, mesh_impl: Any) -> GroupSum:
        if self.algorithm is not None and is_simd(mesh_impl):
            warn_algorithm_on_simd(self.algorithm)
        return add_n if self.algorithm is None else ALGORITHMS[self.algorithm]

    def _planner(self, mesh_impl: Any) -> Planner:
        return self.packer if self.packer.packs_tensors else plan_unpacked


def warn_algorithm_on_simd(algorithm: str) -> None:
    """Logs, once per `algorithm`, a warning that a SIMD mesh uses its compiler's all-reduce."""
    warn_once(
        f"algorithm {algorithm} on SIMD",
        "algorithm=%r is for placement meshes; on a SIMD mesh the all-reduce of its compiler is "
        "used instead.",
        algorithm,
    )


@gin.configurable(module="mtf_gradsync")
class RingAllReduce(OneLevel):
    """A strategy that sums each tensor as Mesh-TensorFlow does without this package.

    On a placement mesh the devices form a ring. Each device exchanges messages with its two
    neighbours, and all links and devices have the same load. On a SIMD mesh each tensor has its own
    CrossReplicaSum. Unlike Mesh-TF's own ring, this strategy adds up bfloat16 and float16 in
    float32.
    """

    def __init__(self) -> None:
        """Makes a strategy without arguments."""
        # Without a constructor, gin would accept bindings of any arguments.
        super().__init__()

    def _group_sum(self, mesh_impl: Any) -> GroupSum:
        return ring


@gin.configurable(module="mtf_gradsync")
class ReductionToOneDevice(OneLevel):
    """A strategy that adds up each tensor on one device, from which other devices read the sum.

    On a SIMD mesh each tensor is summed by the mesh's all-reduce instead, with a warning.

    References:
      TensorFlow 1's `ReductionToOneDeviceCrossTowerOps`, whose arguments these are.
    """

    def __init__(
        self,
        reduce_to_device: str | None = None,
        accumulation_fn: Callable[[Sequence[tf.Tensor]], tf.Tensor] = tf.add_n,
    ):
        """Sets the device and the function that adds up.

        Args:
          reduce_to_device: one of the mesh's devices, such as "/device:GPU:0", which adds up for
            every group of processors. None lets the devices of a group take turns.
          accumulation_fn: a function that adds up a list of tensors of one shape and dtype. It gets
            bfloat16 and float16 values as float32. For equal inputs it must give equal bits, as a
            function does that returns tf.add_n(...) directly.

        Raises:
          ValueError: reduce_to_device is not a device string.
          TypeError: accumulation_fn is not callable.
        """
        if reduce_to_device is not None:
            canonical_device(reduce_to_device, "reduce_to_device")
        if not callable(accumulation_fn):
            raise TypeError(
                f"accumulation_fn must be a function of a list of tensors, such as tf.add_n, got "
                f"{accumulation_fn!r}."
            )
        self.reduce_to_device = reduce_to_device
        self.accumulation_fn = accumulation_fn

    def _group_sum(self, mesh_impl: Any) -> GroupSum:
        if is_simd(mesh_impl):
            warn_once(
                "one device on SIMD",
                "ReductionToOneDevice: a SIMD mesh runs one program on all cores and cannot sum "
                "on one of them; its own all-reduce is used instead.",
            )
            return add_n
        device = None if self.reduce_to_device is None else self._device_on(mesh_impl)

        def group_sum(slices: Sequence[Any], devices: Sequence[str], root: int) -> list[Any]:
            total = sum_on_one_device(slices, device or devices[root], self.accumulation_fn)
            return [total] * len(slices)

        return group_sum

    def check(self, mesh_impl: Any, groups: ProcessorGroups) -> None:
        """Raises an error if this strategy cannot sum over `groups` on this mesh.

        Raises:
          TypeError: mesh_impl is not a mesh, or groups is not a `ProcessorGroups`.
          ValueError: the groups are not of this mesh, or reduce_to_device is not on the placement
            mesh.
        """
        super().check(mesh_impl, groups)
        if self.reduce_to_device is not None and not is_simd(mesh_impl):
            self._device_on(mesh_impl)

    def _device_on(self, mesh_impl: Any) -> str:
        assert self.reduce_to_device is not None  # checked by the callers
        wanted = place_of(self.reduce_to_device)
        for device in mesh_impl.devices:
            if device and place_of(device) == wanted:
                return device
        raise ValueError(
            f"reduce_to_device must be on the mesh, got {self.reduce_to_device!r}; the mesh has "
            f"the devices {list(mesh_impl.devices)}."
        )


# The ways in which TensorFlow 1's all-reduce packs tensors of one dtype.


def plan_small_groups(num_bytes: Sequence[int], max_bytes: int, max_group: int) -> list[list[int]]:
    """Returns groups of tensors, as lists of indices, of up to `max_group` tensors each.

    `num_bytes` has the size of each tensor. A tensor of more than `max_bytes` is alone in its
    group. All other tensors fill one group after another, in order. If `max_bytes` or `max_group`
    is 0, each tensor is alone in its group.
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
    """Returns `num_packs` equal packs, into which all tensors, laid end to end, are split.

    `sizes` has the number of elements of each tensor. The last pack takes the elements that are
    left over. If there are fewer elements than packs, there is one pack.
    """
    return split_pack([Piece(index, 0, size) for index, size in enumerate(sizes)], num_packs)


def split_pack(pack: Sequence[Piece], parts: int) -> Packs:
    """Splits a pack into `parts` packs of equal numbers of elements; returns the new packs.

    The pieces of `pack` are laid end to end and split where necessary. The last of the new packs
    takes the elements that are left over. A pack of fewer elements than `parts` stays whole, as in
    TensorFlow 1.
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
    """A `Planner` that packs tensors as TensorFlow 1's all-reduce does.

    A `Packer` makes a given number of equal packs, or packs of small tensors, or packs nothing.
    """

    def __init__(
        self,
        num_packs: int = 1,
        agg_small_grads_max_bytes: int = 0,
        agg_small_grads_max_group: int = 10,
    ):
        """Sets how tensors are packed.

        Args:
          num_packs: the number of equal packs that all tensors, laid end to end, are split into. 0
            packs only small tensors.
          agg_small_grads_max_bytes: used if num_packs is 0: the size of the largest tensor that is
            packed with others, in bytes per processor.
          agg_small_grads_max_group: the largest number of tensors in a pack of small tensors; 0
            packs none.
        """
        max_bytes, max_group = agg_small_grads_max_bytes, agg_small_grads_max_group
        self.num_packs = check_whole_number("num_packs", num_packs, 0)
        self.max_bytes = check_whole_number("agg_small_grads_max_bytes", max_bytes, 0, most=None)
        self.max_group = check_whole_number("agg_small_grads_max_group", max_group, 0)

    @property
    def packs_tensors(self) -> bool:
        """Whether tensors may share a pack; if false, each is alone."""
        return self.num_packs > 0 or (self.max_bytes > 0 and self.max_group > 0)

    def __call__(self, sizes: Sequence[int], itemsize: int) -> Packs:
        """Returns the packs of tensors of one dtype: a list of packs, each a list of `Piece`s.

        `sizes` has the number of elements of each tensor, and `itemsize` is the number of bytes of
        an element.
        """
        if self.num_packs > 0:
            return plan_packs(sizes, self.num_packs)
        num_bytes = [size * itemsize for size in sizes]
        return packs_of_groups(plan_small_groups(num_bytes, self.max_bytes, self.max_group), sizes)
