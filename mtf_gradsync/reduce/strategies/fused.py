"""The default strategy: gradients are reduced together."""

from __future__ import annotations

from typing import Any, Sequence

import gin

from mtf_gradsync.mesh.groups import ProcessorGroups
from mtf_gradsync.mesh.kind import is_simd
from mtf_gradsync.reduce.checks import check_count, check_values
from mtf_gradsync.reduce.packs.packed import packed_all_reduce
from mtf_gradsync.reduce.packs.planning import Packs, packs_of_groups, plan_buckets
from mtf_gradsync.reduce.parts.cuts import Cuts, one_memory
from mtf_gradsync.reduce.parts.reduce_scatter import SIMD_BUCKET_BYTES, reduce_scatter
from mtf_gradsync.reduce.strategy import Strategy
from mtf_gradsync.reduce.sums.one_level import all_reduce_fn

# Measured by `python -m benchmarks.bucket_size` and `benchmarks.reductions`: between CPU devices of
# one process a sum sends no bytes but packing copies twice, so only tensors that cost less to copy
# than to launch are packed; a bucket has room for at least four.
PLACEMENT_BUCKET_BYTES = 64 * 1024
PLACEMENT_PACKED_BYTES = 16 * 1024


@gin.configurable(module="mtf_gradsync")
class FusedAllReduce(Strategy):
    """Reduces tensors together: in one group on SIMD meshes, in buckets on placement meshes.

    On a SIMD mesh each tensor has a CrossReplicaSum of its own, and those of one call are marked as
    one group. The compilers of TPUs and GPUs combine them without copies; for CPUs the package
    packs them when it compiles the program. With a size given, and on placement meshes, tensors of
    one dtype are packed into buckets: on a SIMD mesh each bucket is one CrossReplicaSum, on a
    placement mesh one device adds it up, the devices taking turns.
    """

    def __init__(self, bucket_bytes: int | None = None, packed_bytes: int | None = None):
        """Sets the size of buckets.

        Args:
          bucket_bytes: most bytes per processor in a bucket of several tensors; larger tensors are
            alone, and 0 packs nothing. None takes a default: measured on a placement mesh, 32 MiB
            on a SIMD mesh if packed_bytes is given; otherwise a SIMD mesh has no buckets but one
            group.
          packed_bytes: the largest tensor, in bytes per processor, that shares a bucket. None
            packs all that fit if bucket_bytes is given, else takes a measured default on a
            placement mesh.

        Raises:
          ValueError: a number is negative or not whole.
        """
        what = "a number of bytes, or None for a default"
        for argument, value in (("bucket_bytes", bucket_bytes), ("packed_bytes", packed_bytes)):
            if value is not None:
                check_count(argument, value, what)
        self.bucket_bytes = bucket_bytes
        self.packed_bytes = packed_bytes

    def all_reduce(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups
    ) -> list[Any]:
        """See `Strategy.all_reduce`."""
        self.check(mesh_impl, groups)
        bucket_bytes, packed_bytes = self.bucket_bytes, self.packed_bytes
        if is_simd(mesh_impl) and bucket_bytes is None and packed_bytes is None:
            return packed_all_reduce(mesh_impl, values, groups, all_reduce_fn(mesh_impl))
        if bucket_bytes is None:
            bucket_bytes = SIMD_BUCKET_BYTES if is_simd(mesh_impl) else PLACEMENT_BUCKET_BYTES
            if packed_bytes is None and not is_simd(mesh_impl):
                packed_bytes = PLACEMENT_PACKED_BYTES

        def buckets(sizes: Sequence[int], itemsize: int) -> Packs:
            num_bytes = [size * itemsize for size in sizes]
            return packs_of_groups(plan_buckets(num_bytes, bucket_bytes, packed_bytes), sizes)

        sum_fn = all_reduce_fn(mesh_impl, one_group=False)
        return packed_all_reduce(mesh_impl, values, groups, sum_fn, buckets)

    def reduce_scatter(
        self,
        mesh_impl: Any,
        values: Sequence[Any],
        groups: ProcessorGroups,
        cuts: Sequence[Cuts],
    ) -> list[Any]:
        """See `Strategy.reduce_scatter`.

        Where devices of a placement mesh have one memory, one device sums and cuts; otherwise each
        device adds up its own part, in buckets for which packed_bytes does not count.
        """
        self.check(mesh_impl, groups)
        check_values(values)
        if is_simd(mesh_impl) or one_memory(mesh_impl):
            return super().reduce_scatter(mesh_impl, values, groups, cuts)
        bucket_bytes = PLACEMENT_BUCKET_BYTES if self.bucket_bytes is None else self.bucket_bytes
        return reduce_scatter(mesh_impl, values, groups, cuts, bucket_bytes)
