"""Reads XLA's programs: computations, instructions, sizes of values, groups of cores, aliases."""

from __future__ import annotations

import collections
import functools
import math
import re
from typing import Any, Iterator, Sequence

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from mtf_gradsync.extension import tf
from mtf_gradsync.runtimes._private.tensorflow import hlo_module, xla_element_types

_PACKAGE = "mtf_gradsync.xla"
_INT64 = descriptor_pb2.FieldDescriptorProto.TYPE_INT64
_BYTES = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES

# Message -> its fields: name, number, type or message, and whether it is repeated.
_MESSAGES: dict[str, list[tuple[str, int, Any, bool]]] = {
    "Group": [("replica_ids", 1, _INT64, True)],
    "Iota": [
        ("num_groups", 1, _INT64, False),
        ("group_size", 2, _INT64, False),
        ("reshape_dims", 3, _INT64, True),
        ("transpose_perm", 4, _INT64, True),
    ],
    "DeviceList": [("groups", 1, "Group", True), ("iota", 2, "Iota", False)],
    "Instruction": [
        ("groups", 49, "Group", True),
        ("devices", 87, "DeviceList", False),
        ("iota", 92, "Iota", False),
        ("mesh_axes", 93, _BYTES, False),
    ],
}


def core_groups(instruction: Any) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of cores of a collective, as core numbers; () if all cores are one group.

    `instruction` is the collective's ``HloInstructionProto``. If the collective is a permutation,
    each of the groups is a pair: the core that sends and the core that receives. Raises a
    ValueError if the instruction describes the groups by axes of a mesh, and not by core numbers.
    """
    if instruction.source_target_pairs:
        return tuple((pair.source, pair.target) for pair in instruction.source_target_pairs)
    read = _instruction_class().FromString(instruction.SerializeToString())
    for groups, iota in ((read.groups, read.iota), (read.devices.groups, read.devices.iota)):
        if groups:
            return tuple(tuple(group.replica_ids) for group in groups)
        if iota.num_groups:
            return _iota_groups(iota)
    if read.HasField("mesh_axes"):
        raise ValueError(
            f"{instruction.opcode} {instruction.name!r}: Groups that are named by mesh axes cannot "
            f"be read: {read.mesh_axes!r}."
        )
    return ()


def _iota_groups(iota: Any) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of core numbers that HLO's short form of groups describes.

    `iota` is the protobuf message with the short form. The message says how to reshape and
    transpose the range of all core numbers, and how to cut the result into groups of equal size.
    """
    sizes: Sequence[int] = iota.reshape_dims
    cores = np.arange(math.prod(sizes)).reshape(sizes).transpose(iota.transpose_perm)
    return tuple(map(tuple, cores.reshape(iota.num_groups, iota.group_size).tolist()))


@functools.lru_cache(maxsize=None)
def _instruction_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name="mtf_gradsync/groups.proto", package=_PACKAGE, syntax="proto2"
    )
    for name, fields in _MESSAGES.items():
        made = file.message_type.add(name=name)
        for field, number, kind, repeated in fields:
            entry = made.field.add(name=field, number=number)
            entry.label = entry.LABEL_REPEATED if repeated else entry.LABEL_OPTIONAL
            if isinstance(kind, str):
                entry.type, entry.type_name = entry.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                entry.type = kind
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = pool.FindMessageTypeByName(f"{_PACKAGE}.Instruction")
    if hasattr(message_factory, "GetMessageClass"):
        return message_factory.GetMessageClass(found)
    return message_factory.MessageFactory(pool).GetPrototype(found)  # protobuf before 4.22


# The bits of an element for those of XLA's types whose names do not say it, as "BF16" does.
_BITS = {"TOKEN": 0, "OPAQUE_TYPE": 0, "PRED": 8}


class Instruction:
    """An instruction of a program; `proto` is XLA's ``HloInstructionProto``."""

    def __init__(self, proto: Any, computation: Computation):
        self.proto = proto
        self.name: str = proto.name
        self.opcode: str = proto.opcode
        self.shape = proto.shape
        self._computation = computation

    @property
    def operation(self) -> str:
        """The kind of the instruction; "all-reduce-start" counts as "all-reduce", and so on."""
        return re.sub("-(start|done|update)$", "", self.opcode)

    @functools.cached_property
    def operands(self) -> list[Instruction]:
        """The instructions that compute this instruction's operands."""
        return [self._computation.by_id[i] for i in self.proto.operand_ids]

    @property
    def users(self) -> list[tuple[Instruction, int]]:
        """The instructions that use this instruction's value, as (user, operand number) pairs.

        An operand number says which operand of the user this instruction's value is. Operands are
        counted from 0.
        """
        return self._computation.users[self.proto.id]

    @property
    def called(self) -> list[Computation]:
        """The computations that the instruction calls, as fusions, loops, branches and calls do."""
        return [self._computation.module.computations[i] for i in self.proto.called_computation_ids]

    @property
    def is_predicate(self) -> bool:
        """Whether the instruction's value is boolean."""
        return _type_name(self.shape) == "PRED"

    @property
    def bytes(self) -> int:
        """The bytes of the instruction's value, without the padding of a device's memory layout."""
        return shape_bytes(self.shape)


class Computation:
    """A computation of a program. Its instructions are in the schedule's order, if there is one."""

    def __init__(self, proto: Any, module: HloModule):
        self.name: str = proto.name
        self.module = module
        self.by_id = {one.id: Instruction(one, self) for one in proto.instructions}
        self.root = self.by_id.get(proto.root_id)
        scheduled = module.proto.schedule.sequences
        self.instructions = list(self.by_id.values())
        if proto.id in scheduled:
            self.instructions = [self.by_id[i] for i in scheduled[proto.id].instruction_ids]

    @functools.cached_property
    def users(self) -> dict[int, list[tuple[Instruction, int]]]:
        """For the id of each instruction whose value is used, its (user, operand number) pairs.

        A pair says which instruction uses the value, and as which of its operands, from 0.
        """
        found = collections.defaultdict(list)
        for instruction in self.by_id.values():
            for number, operand in enumerate(instruction.proto.operand_ids):
                found[operand].append((instruction, number))
        return found

    def parameter(self, number: int) -> Instruction:
        """Returns the instruction that stands for the computation's parameter `number`, from 0."""
        return next(
            one
            for one in self.instructions
            if one.opcode == "parameter" and one.proto.parameter_number == number
        )


class HloModule:
    """A program of XLA; `proto` is its ``HloModuleProto``."""

    def __init__(self, proto: Any):
        self.proto = proto
        self.computations = {one.id: Computation(one, self) for one in proto.computations}

    @property
    def entry(self) -> Computation:
        """The computation that a run of the program begins with."""
        return self.computations[self.proto.entry_computation_id]

    @property
    def instructions(self) -> Iterator[Instruction]:
        """The instructions of all computations."""
        return (one for c in self.computations.values() for one in c.instructions)

    @property
    def aliases(self) -> dict[int, int]:
        """For each result that is written over a parameter, the parameter's number.

        The result is a dict whose keys are the numbers of the program's results, in order. Raises a
        ValueError if only a part of a result is written over a parameter, or a result over only a
        part of a parameter.
        """
        found = {}
        for entry in self.proto.input_output_alias.entries:
            if len(entry.output_shape_index) != 1 or entry.parameter_shape_index:
                raise ValueError(
                    f"An alias must be of one result and one parameter, not of parts; got {entry}"
                )
            found[entry.output_shape_index[0]] = entry.parameter_number
        return dict(sorted(found.items()))


def read_module(serialized: bytes) -> HloModule:
    """Reads a serialized ``HloModuleProto``; raises a ValueError if it is something else."""
    try:
        module = HloModule(hlo_module(serialized))
    except message.DecodeError as error:
        raise ValueError(f"Give a serialized HloModuleProto; this is none: {error}") from error
    if module.proto.entry_computation_id not in module.computations:
        raise ValueError(
            f"The HloModuleProto {module.proto.name!r} has no entry computation; give a whole "
            "module, as XLA serializes it."
        )
    return module


def shape_bytes(shape: Any) -> int:
    """Returns how many bytes a value has, without the padding of a device's memory layout.

    `shape` is XLA's ``ShapeProto`` of the value. If the value is a tuple, the bytes of all its
    parts are added up. A dimension of dynamic size counts with its upper bound. Raises a ValueError
    if it is not known how many bytes an element has.
    """
    if _type_name(shape) == "TUPLE":
        return sum(shape_bytes(part) for part in shape.tuple_shapes)
    return math.prod(shape.dimensions) * _bits_of(shape) // 8


def stored_bytes(shape: Any) -> int:
    """Returns how many bytes an array takes in a device's memory, with the padding of its tiles.

    `shape` is XLA's ``ShapeProto`` of the array, with a layout. Raises a ValueError if it is not
    known how many bytes an element has.
    """
    layout = shape.layout
    stored = [shape.dimensions[i] for i in reversed(layout.minor_to_major)]
    for tile in layout.tiles[:1]:
        # The last dimensions of an array make the tiles.
        for i, size in zip(reversed(range(len(stored))), reversed(tile.dimensions)):
            stored[i] = math.ceil(stored[i] / size) * size
    return math.prod(stored) * _bits_of(shape) // 8


def _bits_of(shape: Any) -> int:
    name = _type_name(shape)
    number = re.match(r"[A-Z]+(\d+)", name)
    bits = int(number[1]) if number else _BITS.get(name)
    if bits is None:
        raise ValueError(
            f"XLA's element type {name or shape.element_type} is of unknown size to this version "
            f"of mtf_gradsync with TensorFlow {tf.__version__}."
        )
    return bits


def _type_name(shape: Any) -> str:
    """Returns XLA's name of a value's element type, as in "F32"; "" if this TensorFlow has none.

    `shape` is XLA's ``ShapeProto`` of the value.
    """
    return _type_names().get(shape.element_type, "")


@functools.lru_cache(maxsize=None)
def _type_names() -> dict[int, str]:
    return {number: name for name, number in xla_element_types().items()}
