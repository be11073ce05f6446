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
      operation: the kind of collective, as in "all-reduce"; one of `COLLECTIVES`. If the TPU
        compiler divides the update of a variable over cores, it fuses an all-reduce with other
        operations. An all-reduce whose result is only cut into parts is listed as "reduce-scatter".
        An all-reduce whose operands are made of parts is listed as "all-gather".
      name: the instruction's name in the module.
      bytes_per_core: bytes that one core gives to the collective, without the padding of the TPU's
        memory layout.
      groups: the groups of cores that exchange data; empty if all cores are one group. For a
        "collective-permute", each group is a pair: the core that sends and the core that receives.
      computation: the name of the computation that contains the collective.
      inside: the branches and loops around the collective, outermost first, as in
        ("branch true of cond.5", "body of while.7"); empty for a collective that runs once in every
        step.
      crosses_slices: whether the collective sends data between TPU slices, over the data center
        network. The compiler writes a sum over several TPU slices as a sum within each TPU slice, a
        transfer between TPU slices, and another collective within each TPU slice. For the transfer,
        `groups` is empty. In all other collectives, the cores of a group are in one TPU slice.
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
        """Whether the collective is inside a branch, and so runs in some steps only."""
        return any(part.startswith("branch ") for part in self.inside)

    @property
    def is_in_loop(self) -> bool:
        """Whether the collective is inside a loop, and so may run many times in a step."""
        return any(not part.startswith("branch ") for part in self.inside)


# The attribute that says what the runtime joining slices does with data sent to the host.
_TRANSFER = "_xla_megascale_transfer_type"


def find_hlo_collectives(module: bytes) -> list[HloCollective]:
    """Lists the collectives that an HLO module runs.

    Args:
      module: a serialized ``HloModuleProto``, before or after optimization.

    Returns:
      The collectives in the order in which they run, or, if the module has no schedule, in the
      module's order. A collective in a computation that is called several times is listed once for
      each call.

    Raises:
      ValueError: when `module` is no HLO module, or one that this TensorFlow cannot read.
    """
    return collectives_of(read_module(module))


def collectives_of(module: HloModule) -> list[HloCollective]:
    """Lists the collectives that a parsed HLO module runs.

    The collectives are in the order in which they run, or, if `module` has no schedule, in the
    module's order. A collective in a computation that is called several times is listed once for
    each call.
    """
    return list(_walk(module.entry, ()))


# The attribute that the TPU compiler gives the copies of a collective that it fuses with other
# operations: one where it starts, one with each operation meanwhile, and one where it is done.
_CHAIN = "chain_id"


def _walk(
    computation: Computation, inside: tuple[str, ...], yielded_ids: set[str] | None = None
) -> Iterator[HloCollective]:
    """Yields the collectives of a computation and of the computations that it calls, in order.

    `inside` are the branches and loops around the computation, outermost first, as in ("branch true
    of cond.5", "body of while.7").

    The TPU compiler may put copies of one collective into several fusions. The copies have the same
    id, and only the first copy is yielded. If the computation is a fusion, `yielded_ids` has the
    ids of the collectives that were yielded before. The function adds the ids of the collectives
    that it yields. If the computation is no fusion, `yielded_ids` is None.
    """
    is_fused = yielded_ids is not None
    yielded_ids = set() if yielded_ids is None else yielded_ids
    for instruction in computation.instructions:
        # An operation split into start and end counts once, at its start.
        if instruction.opcode.endswith(("-update", "-done")):
            continue
        attributes = instruction.proto.frontend_attributes.map
        crosses_slices = instruction.opcode == "send" and _TRANSFER in attributes
        groups: tuple[tuple[int, ...], ...] = ()
        if instruction.operation in COLLECTIVES:
            if _CHAIN in attributes:
                if attributes[_CHAIN] in yielded_ids:
                    continue
                yielded_ids.add(attributes[_CHAIN])
            operation, size = instruction.operation, sum(x.bytes for x in instruction.operands)
            if operation == "all-reduce" and is_fused:
                operation, size = _sent_by_fused_all_reduce(instruction, size)
            groups = core_groups(instruction.proto)
        elif crosses_slices:
            kind = attributes[_TRANSFER].lower().replace("_", "-")
            operation = kind if kind in COLLECTIVES else "collective-permute"
            size = instruction.operands[0].bytes
        else:
            # A collective calls only the sum of two numbers; other operations may call collectives.
            for called, around in zip(instruction.called, _branch_or_loop(instruction)):
                fused = yielded_ids if instruction.opcode == "fusion" else None
                yield from _walk(called, inside + around, fused)
            continue
        name, where = instruction.name, computation.name
        yield HloCollective(operation, name, size, groups, where, inside, crosses_slices)


# Operations that only pass on the numbers of their first operand.
_PASSED_ON = frozenset(("bitcast", "convert", "copy", "get-tuple-element", "reshape"))


def _sent_by_fused_all_reduce(all_reduce: Instruction, size: int) -> tuple[str, int]:
    """Returns the kind of collective that a fused all-reduce amounts to, and its bytes.

    `all_reduce` is the all-reduce, in a fusion with other operations. The returned kind is
    "reduce-scatter" if operations only cut parts out of the result of the all-reduce.
    The kind is "all-gather" if the operands of the all-reduce are parts that were written into
    arrays of zeros. In all other cases the kind is "all-reduce". The returned bytes are the bytes
    that a core gives to the collective. `size` is the number of bytes of the all-reduce's operands.
    """

    def only_slices(value: Instruction) -> bool:
        return bool(value.users) and all(
            only_slices(user) if user.opcode in _PASSED_ON else user.opcode == "dynamic-slice"
            for user, _ in value.users
        )

    def bytes_put_in(value: Instruction) -> int | None:
        """Returns how many bytes were written into zeros, or into a constant, to make `value`.

        The result is None if `value` was made in another way.
        """
        if value.opcode in _PASSED_ON:
            return bytes_put_in(value.operands[0])
        if value.opcode != "dynamic-update-slice":
            return None
        into, written = value.operands[:2]
        more = 0 if into.opcode in ("broadcast", "constant") else bytes_put_in(into)
        return None if more is None else more + written.bytes

    if only_slices(all_reduce):
        return "reduce-scatter", size
    parts = [bytes_put_in(operand) for operand in all_reduce.operands]
    if None in parts:
        return "all-reduce", size
    return "all-gather", sum(part for part in parts if part is not None)


def _branch_or_loop(instruction: Instruction) -> list[tuple[str, ...]]:
    """Returns, for each computation that an instruction calls, its role in a branch or loop.

    The result has a tuple for each of these computations. The tuple has one name, as in ("body of
    while.7",) or ("branch true of cond.5",). For a computation that is no branch and no part of a
    loop, the tuple is empty.
    """
    count = len(instruction.called)
    if instruction.opcode == "while":
        return [(f"{role} of {instruction.name}",) for role in ("body", "condition")]
    if instruction.opcode == "conditional":
        is_predicate = instruction.operands[0].is_predicate
        roles: Sequence[Any] = ("true", "false") if is_predicate else range(count)
        return [(f"branch {role} of {instruction.name}",) for role in roles]
    return [()] * count


def bytes_by_operation(collectives: Sequence[HloCollective]) -> dict[str, tuple[int, int]]:
    """Adds up collectives by their `operation`.

    Returns a dict. The keys are operations, as in "all-reduce". The values are pairs: how many
    collectives have the operation, and the sum of their bytes per core. A collective in a loop
    counts once.
    """
    sums: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for collective in collectives:
        sums[collective.operation][0] += 1
        sums[collective.operation][1] += collective.bytes_per_core
    return {name: (count, size) for name, (count, size) in sums.items()}
