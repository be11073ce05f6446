"""Zeros in place of gradients that are left out, NaNs included."""

from __future__ import annotations

from typing import Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients import StageOperation


def zeros_where(skip: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Zeros if skip is true, even in place of NaNs."""
    return tf.where_v2(skip, tf.zeros_like(x), x)


class LeaveOut(StageOperation):
    """Zeros in place of gradients where they are left out: everywhere, or shard by shard."""

    def __init__(self, grads: Sequence[mtf.Tensor], skip: mtf.Tensor):
        shapes, dtypes = [g.shape for g in grads], [g.dtype for g in grads]
        super().__init__([*grads, skip], shapes, "leave_out", dtypes)

    @classmethod
    def apply(cls, grads: Sequence[mtf.Tensor | None], skip: mtf.Tensor) -> list[mtf.Tensor | None]:
        """The gradients with zeros, None where they are None.

        Args:
          grads: gradients; per shard where skip has shard dims.
          skip: boolean, a scalar or of shape `[shard dims...]`, one shard a processor.

        Returns:
          Tensors of the shapes and dtypes of grads.
        """
        outputs = iter(cls([g for g in grads if g is not None], skip).outputs)
        return [None if g is None else next(outputs) for g in grads]

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        mesh_impl = lowering.mesh_impl(self)
        *grads, skip = (lowering.tensors[x].to_laid_out_tensor() for x in self.inputs)
        skip = mesh_impl.slicewise(lambda x: tf.reshape(x, []), skip)

        self.set_outputs(lowering, [mesh_impl.slicewise(zeros_where, skip, g) for g in grads])
