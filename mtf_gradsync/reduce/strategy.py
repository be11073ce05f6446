"""What a reduction strategy is: sums of laid-out tensors over groups of processors."""

from __future__ import annotations

import abc
from typing import Any, Sequence

from mtf_gradsync._tf_compat import tf
from mtf_gradsync.reduce.groups import ProcessorGroups
from mtf_gradsync.reduce.sums import is_simd, simd_wire_dtype


class Strategy(abc.ABC):
    """How sums cross the mesh. Strategies hold settings only and can be shared by wrappers."""

    @abc.abstractmethod
    def all_reduce(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups
    ) -> list[Any]:
        """Sums each tensor over each group of processors and leaves the sum on all of them.

        Args:
          mesh_impl: an `mtf.MeshImpl`, placement or SIMD.
          values: `LaidOutTensor`s of any shapes and dtypes; one slice a processor (SIMD: one
            slice that stands for all).
          groups: the processors that sum with each other.

        Returns:
          `LaidOutTensor`s with the shapes and dtypes of `values`, in the same order.
        """

    def wire_dtype(self, mesh_impl: Any, dtype: tf.DType, groups: ProcessorGroups) -> tf.DType:
        """The dtype in which values of a dtype cross the mesh, the narrowest where levels differ.

        Args:
          mesh_impl: the mesh.
          dtype: of the values.
          groups: the processors that sum with each other.

        Returns:
          The dtype of the messages.
        """
        return simd_wire_dtype(mesh_impl, dtype, groups) if is_simd(mesh_impl) else dtype


def check_strategy(reducer: Any) -> Any:
    """Returns reducer, or raises TypeError if it is no strategy."""
    if isinstance(reducer, type) or not callable(getattr(reducer, "all_reduce", None)):
        raise TypeError(
            "reducer must be a reduction strategy such as mtf_gradsync.reduce.FusedAllReduce(), "
            f"got {reducer!r}."
        )
    return reducer
