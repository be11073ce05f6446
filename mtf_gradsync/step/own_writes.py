"""Orders a program's own assignments, where gradients are reduced without a wrapper."""

from __future__ import annotations

import functools
from typing import Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.step.gate import Gate
from mtf_gradsync.step.part import Part, PartLowering
from mtf_gradsync.step.plan import ControlInputs, Plan


class OwnWrites(Part):
    """Makes assignments without other order wait for all reads and for the sums before them.

    Their variables are read once, as those that a wrapper updates.
    """

    def __init__(self) -> None:
        self._sums: tuple[tuple[mtf.Tensor, ...], ...] = ()

    @classmethod
    def wait_for(cls, sums: Sequence[mtf.Tensor]) -> None:
        """Makes a program's assignments wait for sums of one mesh; a branch waits by itself."""
        plan = Plan.of(sums[0].graph)
        if plan.is_in_branch:
            return
        plan.adopt()
        part = plan.part(cls)
        part._sums += (tuple(sums),)

    def begin(self, lowering: mtf.Lowering) -> PartLowering:
        """See `Part.begin`."""
        plan = Plan.of(lowering.graph)
        made_by = {sums[0].operation: sums for sums in self._sums}
        meshes = {operation.mesh for operation in made_by}
        gates: dict[mtf.Mesh, list[Gate]] = {}
        waits: dict[mtf.Operation, ControlInputs] = {}
        for operation in lowering.graph.operations:
            if operation in made_by:
                gates.setdefault(operation.mesh, []).append(Gate(plan, made_by[operation]))
            elif isinstance(operation, mtf.Assign) and plan.is_free(operation):
                written = meshes.intersection(v.mesh for v in operation.variables)
                before = [gate for mesh, some in gates.items() if mesh in written for gate in some]
                if not written.issubset(gates):
                    # Without a sum before it, a write still waits for the reads.
                    before.append(Gate(plan, operation.inputs))
                if before:
                    waits[operation] = functools.partial(_barriers, tuple(before))
        part_lowering = PartLowering()
        part_lowering.waits = waits
        return part_lowering


def _barriers(gates: Sequence[Gate], lowering: mtf.Lowering) -> list[tf.Operation]:
    return [gate.barrier(lowering) for gate in gates]
