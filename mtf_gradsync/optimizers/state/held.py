"""What variables hold after an operation has written them."""

from __future__ import annotations

from typing import Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients import StageOperation


class _HeldAfter(StageOperation):
    """What variables hold once an operation has run that may be part of a branch."""

    def __init__(self, variables: Sequence[mtf.Variable], after: mtf.Operation):
        values = [v.value for v in variables]
        super().__init__(values, [x.shape for x in values], "held_after")
        self._variables, self._after = list(variables), after

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        mesh_impl = lowering.mesh_impl(self)
        slices = [lowering.variables[v].laid_out_tensor for v in self._variables]
        # The operation of a branch is the whole conditional.
        with tf.control_dependencies([lowering.operations[self._after]]):
            held = [mesh_impl.slicewise(tf.convert_to_tensor, x) for x in slices]
        self.set_outputs(lowering, held)


def held_after(variables: Sequence[mtf.Variable], operation: mtf.Operation) -> Sequence[mtf.Tensor]:
    """What variables hold after an operation, whether or not the branch that it is part of ran.

    Args:
      variables: mesh variables of one dtype in all of their copies, none of them stacked with
        others.
      operation: what writes the last of them; lowered before.

    Returns:
      A tensor for each.
    """
    return _HeldAfter(variables, operation).outputs
