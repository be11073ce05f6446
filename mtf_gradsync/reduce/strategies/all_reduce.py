"""All-reduce by a named algorithm, in packs."""

from __future__ import annotations

from typing import Any, Sequence

import gin

from mtf_gradsync._private.libraries import tf
from mtf_gradsync._warn import warn_once
from mtf_gradsync.mesh.groups import ProcessorGroups
from mtf_gradsync.mesh.kind import is_simd
from mtf_gradsync.reduce.packs.packed import packed_all_reduce
from mtf_gradsync.reduce.packs.packer import Packer
from mtf_gradsync.reduce.strategy import Strategy
from mtf_gradsync.reduce.sums.algorithms import (
    ALGORITHMS,
    Algorithm,
    GroupSum,
    add_n,
    check_algorithm,
    group_sum_dtype,
)
from mtf_gradsync.reduce.sums.one_level import all_reduce_fn


@gin.configurable(module="mtf_gradsync")
class AllReduce(Strategy):
    """All-reduces packs of tensors by one algorithm.

    On a placement mesh the algorithms are "add_n" (one device adds a pack up and the others read
    it; the devices take turns from pack to pack) and "ring" (Mesh-TF's). A SIMD mesh has the one
    all-reduce of its compiler: packing means the same there, and naming an algorithm has no
    effect, which a warning says.

    One pack is TensorFlow 1's default, and right where every message is dear. With "add_n" it
    makes one device do all the work: as many packs as processors share it evenly.

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
        """Sets the algorithm and the way to pack; the first way not switched off counts.

        Args:
          algorithm: "add_n" or "ring"; None is the mesh's own on a SIMD mesh, "add_n" elsewhere.
          num_packs: lay all tensors end to end and split them evenly into so many packs, the
            last one taking the rest; 0 switches this off.
          agg_small_grads_max_bytes: put tensors of up to so many bytes per processor together,
            and leave the others alone; 0 switches this off.
          agg_small_grads_max_group: most tensors that are put together so; 0 switches this off.

        Raises:
          ValueError: there is no such algorithm, or a number is negative or not whole.
        """
        self.algorithm = None if algorithm is None else check_algorithm(algorithm)
        self.packer = Packer(num_packs, agg_small_grads_max_bytes, agg_small_grads_max_group)

    def all_reduce(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups
    ) -> list[Any]:
        """See `Strategy.all_reduce`."""
        self.check(mesh_impl, groups)
        if self.algorithm is not None and is_simd(mesh_impl):
            warn_algorithm_on_simd(self.algorithm)
        sum_fn = all_reduce_fn(mesh_impl, self._group_sum)
        return packed_all_reduce(mesh_impl, values, groups, sum_fn, self.packer)

    def wire_dtype(self, mesh_impl: Any, dtype: tf.DType, groups: ProcessorGroups) -> tf.DType:
        """See `Strategy.wire_dtype`."""
        if is_simd(mesh_impl):
            return super().wire_dtype(mesh_impl, dtype, groups)
        return group_sum_dtype(self._group_sum, dtype)

    @property
    def _group_sum(self) -> GroupSum:
        return add_n if self.algorithm is None else ALGORITHMS[self.algorithm]


def warn_algorithm_on_simd(algorithm: str) -> None:
    """Says once that a SIMD mesh has no choice of algorithms."""
    warn_once(
        f"algorithm {algorithm} on SIMD",
        "algorithm=%r is for placement meshes; on a SIMD mesh the all-reduce of its compiler is "
        "used instead.",
        algorithm,
    )
