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

    On a placement mesh the algorithms are "add_n" (one device adds up a pack and the others read
    it; the devices take turns) and "ring" (Mesh-TF's). A SIMD mesh always uses the all-reduce of
    its compiler, with packs, or in one group without packs (see `FusedAllReduce`); a warning says
    so if an algorithm was given.

    One pack is TensorFlow 1's default, and the fastest where messages are slow. With "add_n" one
    device then does all the work: as many packs as processors spread it evenly.

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
        """Sets the algorithm and the way to pack: the first one below that is not 0.

        Args:
          algorithm: "add_n" or "ring"; None takes the mesh's own on a SIMD mesh, "add_n" elsewhere.
          num_packs: the number of equal packs that all tensors, laid end to end, are split into;
            the last one takes the rest.
          agg_small_grads_max_bytes: the largest tensor, in bytes per processor, that is packed with
            others; larger ones are not packed.
          agg_small_grads_max_group: most tensors in such a pack; 0 packs none.

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
        sum_fn = all_reduce_fn(mesh_impl, self._group_sum, one_group=not self.packer.packs_tensors)
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
    """Warns once that a SIMD mesh has no choice of algorithms."""
    warn_once(
        f"algorithm {algorithm} on SIMD",
        "algorithm=%r is for placement meshes; on a SIMD mesh the all-reduce of its compiler is "
        "used instead.",
        algorithm,
    )
