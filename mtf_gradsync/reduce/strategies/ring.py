"""Mesh-TensorFlow's own all-reduce, tensor by tensor."""

from __future__ import annotations

from typing import Any, Sequence

import gin

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.mesh.groups import ProcessorGroups
from mtf_gradsync.mesh.kind import is_simd
from mtf_gradsync.reduce.packs.packed import packed_all_reduce
from mtf_gradsync.reduce.strategy import Strategy
from mtf_gradsync.reduce.sums.algorithms import group_sum_dtype, ring
from mtf_gradsync.reduce.sums.one_level import all_reduce_fn


@gin.configurable(module="mtf_gradsync")
class RingAllReduce(Strategy):
    """Sums each tensor as Mesh-TensorFlow does without this package.

    On a placement mesh that is a ring in which every device talks to two neighbours; no link and
    no device carries more than the others. On a SIMD mesh it is one CrossReplicaSum a tensor.
    Unlike Mesh-TF's own, the ring adds up bfloat16 and float16 in float32.
    """

    def all_reduce(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups
    ) -> list[Any]:
        """See `Strategy.all_reduce`."""
        self.check(mesh_impl, groups)
        return packed_all_reduce(mesh_impl, values, groups, all_reduce_fn(mesh_impl, ring))

    def wire_dtype(self, mesh_impl: Any, dtype: tf.DType, groups: ProcessorGroups) -> tf.DType:
        """See `Strategy.wire_dtype`."""
        if is_simd(mesh_impl):
            return super().wire_dtype(mesh_impl, dtype, groups)
        return group_sum_dtype(ring, dtype)
