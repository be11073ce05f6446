"""Lists the collectives of an HLO module, with the loops and branches around each."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, Iterator, Sequence

from mtf_gradsync.xla.hlo import (
    groups_of,
    instructions_of,
    is_predicate,
    read_module,
    shape_bytes,
)

#: The operations through which cores exchange data, as HLO calls them.
COLLECTIVES = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclasses.dataclass(frozen=True)
class HloCollective:
    """One collective of a compiled program.

    Attributes:
      operation: its kind, as in "all-reduce"; one of `COLLECTIVES`.
      name: its name in the module.
      bytes_per_core: bytes of its operands on one core, without the padding of the TPU's memory
        layout.
      groups: the cores that exchange data, group by group; empty for one group of all cores. For
        "collective-permute" the pairs of source and target.
      computation: the name of the computation that contains it.
      inside: the branches and loops around it, outermost first, as in ("branch true of cond.5",
        "body of while.7"); empty for a collective that runs once on every step.
    """

    operation: str
    name: str
    bytes_per_core: int
    groups: tuple[tuple[int, ...], ...]
    computation: str
    inside: tuple[str, ...]

    @property
    def is_conditional(self) -> bool:
        """Whether it is inside a branch, and so runs on some steps only."""
        return any(part.startswith("branch ") for part in self.inside)

    @property
    def is_in_loop(self) -> bool:
        """Whether it is inside a loop, and so may run many times in a step."""
        return any(not part.startswith("branch ") for part in self.inside)


def find_hlo_collectives(module: bytes) -> list[HloCollective]:
    """Lists the collectives that an HLO module runs.

    Args:
      module: a serialized ``HloModuleProto``, before or after optimization.

    Returns:
      The collectives in the order in which they run; where the module has no schedule, in the
      module's order. A collective in a computation that is called from several places appears once
      for each call.

    Raises:
      ValueError: when `module` is no HLO module, or one that this TensorFlow cannot read.
    """
    proto = read_module(module)
    computations = {computation.id: computation for computation in proto.computations}
    return list(_walk(proto, computations, proto.entry_computation_id, ()))


def _walk(
    module: Any, computations: dict[int, Any], entry: int, inside: tuple[str, ...]
) -> Iterator[HloCollective]:
    computation = computations[entry]
    shapes = {instruction.id: instruction.shape for instruction in computation.instructions}
    for instruction in instructions_of(module, computation):
        # An operation of a start and an end counts once, at its start.
        operation = _without(instruction.opcode, "-start")
        if operation in COLLECTIVES:
            yield HloCollective(
                operation=operation,
                name=instruction.name,
                bytes_per_core=sum(shape_bytes(shapes[i]) for i in instruction.operand_ids),
                groups=groups_of(instruction),
                computation=computation.name,
                inside=inside,
            )
        elif not instruction.opcode.endswith(("-update", "-done")):
            # A collective calls only the sum of two numbers; other operations may call collectives.
            called = instruction.called_computation_ids
            for called_id, around in zip(called, _around(instruction, shapes)):
                yield from _walk(module, computations, called_id, inside + around)


def _without(text: str, end: str) -> str:
    return text[: -len(end)] if text.endswith(end) else text


def _around(instruction: Any, shapes: dict[int, Any]) -> list[tuple[str, ...]]:
    """Names of the branch or loop that each computation called by an instruction is in."""
    called = instruction.called_computation_ids
    if instruction.opcode == "while":
        return [(f"{role} of {instruction.name}",) for role in ("body", "condition")]
    if instruction.opcode == "conditional":
        roles: Sequence[Any] = range(len(called))
        if is_predicate(shapes[instruction.operand_ids[0]]):
            roles = ("true", "false")
        return [(f"branch {role} of {instruction.name}",) for role in roles]
    return [()] * len(called)


def bytes_by_operation(collectives: Sequence[HloCollective]) -> dict[str, tuple[int, int]]:
    """Returns operation -> (number of collectives, bytes per core); in a loop, they count once."""
    sums: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for collective in collectives:
        sums[collective.operation][0] += 1
        sums[collective.operation][1] += collective.bytes_per_core
    return {name: (count, size) for name, (count, size) in sums.items()}
