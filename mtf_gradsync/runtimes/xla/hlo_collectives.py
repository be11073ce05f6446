"""Lists the collectives of XLA's programs: their bytes, groups, branches and loops."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, Iterator, Sequence

from mtf_gradsync.runtimes.xla.hlo import (
    Computation,
    HloModule,
    Instruction,
    core_groups,
    read_module,
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
    """A collective of a compiled program.

    Attributes:
      operation: its kind, as in "all-reduce"; one of `COLLECTIVES`. Where the TPU compiler splits a
        weight update, it writes a fusion of an all-reduce with what cuts its result or joins its
        operands: that is a "reduce-scatter" or an "all-gather".
      name: its name in the module.
      bytes_per_core: bytes that one core puts in, without the padding of the TPU's memory layout.
      groups: the cores that exchange data, group by group; empty for one group of all cores. For
        "collective-permute" the pairs of source and target.
      computation: the name of the computation that contains it.
      inside: the branches and loops around it, outermost first, as in ("branch true of cond.5",
        "body of while.7"); empty for a collective that runs once on every step.
      crosses_slices: whether it is of cores at one place of all slices, over the data center
        network: the compiler writes a sum over several slices as one within each, a transfer
        between them, and one within each. Its `groups` are empty; other groups are of one slice.
    """

    operation: str
    name: str
    bytes_per_core: int
    groups: tuple[tuple[int, ...], ...]
    computation: str
    inside: tuple[str, ...]
    crosses_slices: bool = False

    @property
    def is_conditional(self) -> bool:
        """Whether it is inside a branch, and so runs on some steps only."""
        return any(part.startswith("branch ") for part in self.inside)

    @property
    def is_in_loop(self) -> bool:
        """Whether it is inside a loop, and so may run many times in a step."""
        return any(not part.startswith("branch ") for part in self.inside)


# What the runtime that joins slices does with what a program sends to the host.
_TRANSFER = "_xla_megascale_transfer_type"


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
    return collectives_of(read_module(module))


def collectives_of(module: HloModule) -> list[HloCollective]:
    """Lists the collectives that a parsed HLO module runs; see `find_hlo_collectives`."""
    return list(_walk(module.entry, ()))


def _walk(
    computation: Computation, inside: tuple[str, ...], is_fused: bool = False
) -> Iterator[HloCollective]:
    for instruction in computation.instructions:
        # An operation of a start and an end counts once, at its start.
        if instruction.opcode.endswith(("-update", "-done")):
            continue
        attributes = instruction.proto.frontend_attributes.map
        if instruction.operation in COLLECTIVES:
            operation, size = instruction.operation, sum(x.bytes for x in instruction.operands)
            if operation == "all-reduce" and is_fused:
                operation, size = _sent_by_fused_all_reduce(instruction, size)
            yield HloCollective(
                operation=operation,
                name=instruction.name,
                bytes_per_core=size,
                groups=core_groups(instruction.proto),
                computation=computation.name,
                inside=inside,
            )
        elif instruction.opcode == "send" and _TRANSFER in attributes:
            kind = attributes[_TRANSFER].lower().replace("_", "-")
            yield HloCollective(
                operation=kind if kind in COLLECTIVES else "collective-permute",
                name=instruction.name,
                bytes_per_core=instruction.operands[0].bytes,
                groups=(),
                computation=computation.name,
                inside=inside,
                crosses_slices=True,
            )
        else:
            # A collective calls only the sum of two numbers; other operations may call collectives.
            for called, around in zip(instruction.called, _around(instruction)):
                yield from _walk(called, inside + around, instruction.opcode == "fusion")


# They only pass on the numbers of their first operand.
_PASSED_ON = frozenset(("bitcast", "convert", "copy", "get-tuple-element", "reshape"))


def _sent_by_fused_all_reduce(all_reduce: Instruction, size: int) -> tuple[str, int]:
    """Returns the operation, and bytes put in, that a fused all-reduce amounts to."""

    def only_slices(value: Instruction) -> bool:
        return bool(value.users) and all(
            only_slices(user) if user.opcode in _PASSED_ON else user.opcode == "dynamic-slice"
            for user, _ in value.users
        )

    def put_in(value: Instruction) -> int | None:
        """Returns the bytes written into zeros; None if a value is made otherwise."""
        if value.opcode in _PASSED_ON:
            return put_in(value.operands[0])
        if value.opcode != "dynamic-update-slice":
            return None
        into, written = value.operands[:2]
        more = 0 if into.opcode in ("broadcast", "constant") else put_in(into)
        return None if more is None else more + written.bytes

    if only_slices(all_reduce):
        return "reduce-scatter", size
    parts = [put_in(operand) for operand in all_reduce.operands]
    if None in parts:
        return "all-reduce", size
    return "all-gather", sum(part for part in parts if part is not None)


def _around(instruction: Instruction) -> list[tuple[str, ...]]:
    """Returns, for each computation that an instruction calls, its branch's or loop's name."""
    count = len(instruction.called)
    if instruction.opcode == "while":
        return [(f"{role} of {instruction.name}",) for role in ("body", "condition")]
    if instruction.opcode == "conditional":
        is_predicate = instruction.operands[0].is_predicate
        roles: Sequence[Any] = ("true", "false") if is_predicate else range(count)
        return [(f"branch {role} of {instruction.name}",) for role in roles]
    return [()] * count


def bytes_by_operation(collectives: Sequence[HloCollective]) -> dict[str, tuple[int, int]]:
    """Returns operation -> (number of collectives, bytes per core); in a loop, they count once."""
    sums: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for collective in collectives:
        sums[collective.operation][0] += 1
        sums[collective.operation][1] += collective.bytes_per_core
    return {name: (count, size) for name, (count, size) in sums.items()}
