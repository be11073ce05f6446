"""Finds the collectives in the text of an HLO module, and the loops and branches around each."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from typing import Iterator, NamedTuple

import numpy as np

#: The operations through which cores exchange data, as HLO calls them.
COLLECTIVES = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([^\s=]+) = ")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([^\s(]+) .*\{\s*$")
_SHAPE = re.compile(r"\b([a-z]+)(\d*)(?:e\d+m\d+\w*)?\[([\d,<= ]*)\]")
_CALLED = re.compile(
    r"\b(body|condition|true_computation|false_computation|branch_computations|calls|to_apply"
    r"|called_computations)=(\{[^}]*\}|%?[^\s,]+)"
)
_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{[\d,]*\},?)*)\}")


@dataclasses.dataclass(frozen=True)
class HloCollective:
    """One collective of a compiled program.

    Attributes:
      operation: what it is, as in "all-reduce"; one of `COLLECTIVES`.
      name: its name in the module.
      bytes_per_core: size of its operands on one core, as the program sees them (without the
        padding of the TPU's memory layout).
      groups: the cores that exchange data, group by group; empty for one group of all cores. For
        "collective-permute" the pairs of source and target.
      computation: the computation that it stands in.
      inside: what is around it, outermost first, as in ("branch true of cond.5",
        "body of while.7"); empty for what runs on every step.
    """

    operation: str
    name: str
    bytes_per_core: int
    groups: tuple[tuple[int, ...], ...]
    computation: str
    inside: tuple[str, ...]

    @property
    def is_conditional(self) -> bool:
        """Whether it stands in a branch, and so runs on some steps only."""
        return any(part.startswith("branch ") for part in self.inside)

    @property
    def is_in_loop(self) -> bool:
        """Whether it stands in a loop, and so may run many times in a step."""
        return any(not part.startswith("branch ") for part in self.inside)


class _Instruction(NamedTuple):
    name: str
    result: str
    operation: str
    operands: str
    attributes: str


def find_hlo_collectives(text: str) -> list[HloCollective]:
    """Lists the collectives that an HLO module runs.

    Args:
      text: the module as XLA prints it, before or after optimization.

    Returns:
      The collectives, in the order of the text within each computation, called computations at
      the place of the call. One whose computation is called from several places appears for each.

    Raises:
      ValueError: when the text holds no entry computation.
    """
    computations, entry = _read(text)
    return list(_walk(computations, entry, ()))


def _read(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    computations: dict[str, list[_Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        instruction = _instruction(line)
        if instruction is not None:
            if current is not None:
                current.append(instruction)
            continue
        header = _COMPUTATION.match(line)
        if header and not line.startswith("HloModule"):
            current = computations.setdefault(header.group(2), [])
            if header.group(1):
                entry = header.group(2)
    if not entry:
        raise ValueError(
            "The text holds no ENTRY computation; give an HLO module as XLA prints it "
            "(HloModule ..., ENTRY ...)."
        )
    return computations, entry


def _instruction(line: str) -> _Instruction | None:
    begin = _INSTRUCTION.match(line)
    if not begin:
        return None
    rest = line[begin.end() :]
    # A tuple's shape has blanks and parentheses of its own.
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    result, rest = rest[:end], rest[end:].lstrip()
    operation, parenthesis, _ = rest.partition("(")
    if not parenthesis:
        return None
    close = _closing(rest, len(operation))
    return _Instruction(
        begin.group(1), result, operation, rest[len(operation) + 1 : close], rest[close + 1 :]
    )


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at ``start`` closes."""
    depth = 0
    for i in range(start, len(text)):
        if text[i] == "(":
            depth += 1
        elif text[i] == ")":
            depth -= 1
            if not depth:
                return i
    return len(text)


def _walk(
    computations: dict[str, list[_Instruction]], name: str, inside: tuple[str, ...]
) -> Iterator[HloCollective]:
    instructions = computations.get(name, [])
    shapes = {i.name: i.result for i in instructions}
    for instruction in instructions:
        operation = instruction.operation
        if operation.endswith("-start"):  # its "-done" is not another one
            operation = operation[: -len("-start")]
        if operation in COLLECTIVES:
            yield HloCollective(
                operation=operation,
                name=instruction.name,
                bytes_per_core=_operand_bytes(instruction.operands, shapes),
                groups=_groups(instruction.attributes),
                computation=name,
                inside=inside,
            )
            continue  # what it calls is the sum of two numbers
        for role, called in _called(instruction):
            around = _around(instruction, role)
            yield from _walk(computations, called, inside + around)


def _called(instruction: _Instruction) -> Iterator[tuple[str, str]]:
    for kind, names in _CALLED.findall(instruction.attributes):
        for number, called in enumerate(names.strip("{}").split(",")):
            role = {"true_computation": "true", "false_computation": "false"}.get(kind, kind)
            yield (str(number) if kind == "branch_computations" else role), called.strip(" %")


def _around(instruction: _Instruction, role: str) -> tuple[str, ...]:
    if instruction.operation == "conditional":
        return (f"branch {role} of {instruction.name}",)
    if instruction.operation == "while":
        return (f"{role} of {instruction.name}",)
    return ()


def _operand_bytes(operands: str, shapes: dict[str, str]) -> int:
    total = 0
    for operand in _split_operands(operands):
        # Some printers give the operand's shape, others only its name.
        spelled = operand if "[" in operand else shapes.get(operand.strip(" %"), "")
        total += _shape_bytes(spelled)
    return total


def _split_operands(operands: str) -> list[str]:
    parts, depth, begin = [], 0, 0
    for i, character in enumerate(operands):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(operands[begin:i])
            begin = i + 1
    return [*parts, operands[begin:]]


def _shape_bytes(shape: str) -> int:
    total = 0
    for kind, bits, sizes in _SHAPE.findall(shape):
        count = math.prod(int(size) for size in re.findall(r"\d+", sizes))
        total += count if kind == "pred" else count * int(bits or 0) // 8
    return total


def _groups(attributes: str) -> tuple[tuple[int, ...], ...]:
    listed = _LISTED.search(attributes) or _PAIRS.search(attributes)
    if listed:
        groups = re.findall(r"\{([\d,]*)\}", listed.group(1))
        return tuple(tuple(int(c) for c in g.split(",") if c) for g in groups)
    iota = _IOTA.search(attributes)
    if not iota:
        return ()
    shape, reshape, order = (
        [int(n) for n in part.split(",")] if part else None for part in iota.groups()
    )
    cores = np.arange(math.prod(reshape)).reshape(reshape)
    cores = cores.transpose(order) if order else cores
    return tuple(tuple(int(c) for c in row) for row in cores.reshape(shape))


def bytes_by_operation(collectives: list[HloCollective]) -> dict[str, tuple[int, int]]:
    """Sums up collectives by operation.

    Args:
      collectives: what `find_hlo_collectives` returned.

    Returns:
      operation -> (how many, bytes per core), each counted once however often a loop runs it.
    """
    sums: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for collective in collectives:
        sums[collective.operation][0] += 1
        sums[collective.operation][1] += collective.bytes_per_core
    return {name: (count, size) for name, (count, size) in sums.items()}
