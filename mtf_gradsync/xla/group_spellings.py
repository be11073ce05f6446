"""Reads groups of cores in the spellings of every version of XLA.

Versions of XLA since 2024 list the cores of a collective in fields that TensorFlow's own copy of
``HloInstructionProto`` may be too old to know. Protocol buffers keep unknown fields as received;
the messages here have those fields alone, under the numbers that XLA gave them.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Sequence

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

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


def groups_in(instruction: bytes) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of cores in a serialized instruction; empty for one group of all."""
    read = _instruction_class().FromString(instruction)
    for groups, iota in ((read.groups, read.iota), (read.devices.groups, read.devices.iota)):
        if groups:
            return tuple(tuple(group.replica_ids) for group in groups)
        if iota.num_groups:
            return _iota_groups(iota)
    if read.HasField("mesh_axes"):
        raise ValueError(f"Groups that are named by mesh axes cannot be read: {read.mesh_axes!r}")
    return ()


def _iota_groups(iota: Any) -> tuple[tuple[int, ...], ...]:
    """Returns groups spelled as a range of numbers, reshaped and transposed."""
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
