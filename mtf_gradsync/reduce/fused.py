"""The default strategy: small tensors cross the mesh together in buckets."""

from __future__ import annotations

import collections
from typing import Any, Sequence

import gin

from mtf_gradsync._tf_compat import mtf, tf
from mtf_gradsync.reduce import packing
from mtf_gradsync.reduce.all_reduce import all_reduce_fn, is_simd
from mtf_gradsync.reduce.groups import ProcessorGroups
from mtf_gradsync.reduce.strategy import Strategy

# Measured by `python -m benchmarks.bucket_size`: between CPU devices of one process a sum moves
# no bytes but a packed one is copied twice, so only tensors that cost less to copy than to
# launch are packed.
PLACEMENT_BUCKET_BYTES = 64 * 1024
# On TPU every collective pays a latency, while packing costs one copy in HBM; the bucket bounds
# the extra memory.
SIMD_BUCKET_BYTES = 32 * 1024 * 1024


@gin.configurable(module="mtf_gradsync")
class FusedAllReduce(Strategy):
    """Packs tensors of one dtype into buckets and sums each bucket at once.

    On a SIMD mesh each bucket is one CrossReplicaSum. On a placement mesh each bucket is added
    up on one device, the devices taking turns.
    """

    def __init__(self, bucket_bytes: int | None = None):
        """Sets the size of buckets.

        Args:
          bucket_bytes: most bytes per processor that a bucket of several tensors holds; larger
            tensors go alone, 0 packs nothing. None takes a default measured for the kind of
            mesh.

        Raises:
          ValueError: bucket_bytes is negative or not a whole number.
        """
        if bucket_bytes is not None and (
            isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 0
        ):
            raise ValueError(
                f"bucket_bytes must be None or a number of bytes of 0 or more, got "
                f"{bucket_bytes!r}."
            )
        self.bucket_bytes = bucket_bytes

    def all_reduce(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups
    ) -> list[Any]:
        """See `Strategy.all_reduce`."""
        results: list[Any] = list(values)
        if groups.group_size == 1:
            return results
        bucket_bytes = self.bucket_bytes
        if bucket_bytes is None:
            bucket_bytes = SIMD_BUCKET_BYTES if is_simd(mesh_impl) else PLACEMENT_BUCKET_BYTES
        by_dtype: dict[tf.DType, list[int]] = collections.OrderedDict()
        for index, value in enumerate(values):
            # The sum of nothing is nothing, and collectives refuse empty tensors.
            if mtf.list_product(value.slice_shape) > 0:
                by_dtype.setdefault(value.tensor_list[0].dtype, []).append(index)
        all_reduce = all_reduce_fn(mesh_impl)
        turn = 0
        for dtype, indices in by_dtype.items():
            # Neighbours of one shape are packed without being made flat.
            indices.sort(key=lambda i: tuple(values[i].slice_shape))
            num_bytes = [mtf.list_product(values[i].slice_shape) * dtype.size for i in indices]
            for bucket in packing.plan_buckets(num_bytes, bucket_bytes):
                members = [indices[i] for i in bucket]
                if len(members) == 1:
                    summed = (all_reduce(values[members[0]], groups, turn),)
                else:
                    shapes = [values[i].slice_shape for i in members]
                    packed = mesh_impl.slicewise(
                        lambda *slices: packing.pack(slices), *[values[i] for i in members]
                    )
                    total = all_reduce(packed, groups, turn)
                    summed = mesh_impl.slicewise(
                        lambda x, shapes=shapes: packing.unpack(x, shapes), total
                    )
                for index, value in zip(members, summed):
                    results[index] = value
                turn += 1
        return results
