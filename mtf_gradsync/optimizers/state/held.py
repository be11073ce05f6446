"""What variables hold after operations have written them."""

from __future__ import annotations

from typing import Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients import StageOperation


class _HeldAfter(StageOperation):
    """What variables hold once operations have run that may be part of a branch."""

    def __init__(self, variables: Sequence[mtf.Variable], writes: Sequence[mtf.Operation]):
        values = [v.value for v in variables]
        super().__init__(values, [x.shape for x in values], "held_after")
        self._variables, self._writes = list(variables), list(writes)

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        mesh_impl = lowering.mesh_impl(self)
        slices = [lowering.variables[v].laid_out_tensor for v in self._variables]
        # The operation of a branch is the whole conditional.
        with tf.control_dependencies([lowering.operations[op] for op in self._writes]):
            held = [mesh_impl.slicewise(tf.convert_to_tensor, x) for x in slices]
        self.set_outputs(lowering, held)


def held_after(
    variables: Sequence[mtf.Variable], writes: Sequence[mtf.Operation]
) -> Sequence[mtf.Tensor]:
    """What variables hold after operations, whether or not the branch that they are part of ran.

    Args:
      variables: mesh variables of one dtype in all of their copies, none of them stacked with
        others.
      writes: what writes them; lowered before.

    Returns:
      A tensor for each.
    """
    return _HeldAfter(variables, writes).outputs
