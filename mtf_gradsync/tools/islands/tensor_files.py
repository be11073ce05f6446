"""Files of tensors and facts, written by `safetensors` and checked when they are read.

A file of tensors holds arrays by name, and facts such as the island's name, as a value that JSON
can hold. The file contains numbers and text, and no code. It also contains the SHA-256 of its
content. The size, the schema, the shapes and the checksum of a file are checked before it is used.
"""

from __future__ import annotations

import collections
import hashlib
import json
from typing import Any, Mapping, NamedTuple

import numpy as np

from mtf_gradsync.runtimes._common import install_extra

try:
    import msgspec
except ImportError as error:
    raise ImportError(
        f"Islands need msgspec: {install_extra('islands')}", name="msgspec"
    ) from error

Arrays = Mapping[str, np.ndarray]  # by the names of variables, if nothing else is said
SUFFIX = ".safetensors"
_TEXT, _BFLOAT16 = "mtf_gradsync", "bfloat16"  # keys in the metadata of a file of tensors
# The names of dtypes in safetensors, and numpy's.
_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "I64": "int64", "I32": "int32",
          "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16",
          "U8": "uint8", "BOOL": "bool"}  # fmt: skip


class DamagedObjectError(ValueError):
    """The error of an object that is damaged, or holds something else than its name says."""


class OtherTensorsError(DamagedObjectError):
    """The error of an object whose tensors differ from the program's in name, shape or dtype."""


class TensorSpec(NamedTuple):
    """The shape and dtype of a tensor, in a form that JSON can hold.

    `dtype` is the name of a numpy dtype, or "bfloat16".
    """

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, value: np.ndarray) -> TensorSpec:
        """Returns the shape and dtype of an array."""
        return cls(tuple(map(int, value.shape)), str(value.dtype))

    @property
    def nbytes(self) -> int:
        """The number of bytes of a tensor with this shape and dtype."""
        return int(np.prod(self.shape)) * dtype_of(self.dtype).itemsize


Specs = Mapping[str, TensorSpec]  # by the names of variables


class Stored(NamedTuple):
    """The content of an object.

    Attributes:
      facts: the facts that the object's writer recorded.
      tensors: read-only arrays by name.
      checksum: the SHA-256 of facts and tensors, in hexadecimal digits.
    """

    facts: Any
    tensors: dict[str, np.ndarray]
    checksum: str


def dtype_of(name: str) -> np.dtype[Any]:
    """Returns the numpy dtype with a name; the name may also be "bfloat16"."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


def checksum(facts: Any, tensors: Arrays) -> str:
    """Returns the SHA-256 of an object's content, in hexadecimal digits.

    The checksum does not depend on the order of the tensors.

    Args:
      facts: a value that JSON can hold.
      tensors: a dictionary from names to arrays.
    """
    return _checksum(encoded_json(facts), tensors)


def _checksum(facts: bytes, tensors: Arrays) -> str:
    found = hashlib.sha256(facts)
    for name in sorted(tensors):
        value = np.asarray(tensors[name], order="C")
        found.update(json.dumps([name, *TensorSpec.of(value)]).encode())
        found.update(value.reshape(-1).view(np.uint8).data if value.size else b"")
    return found.hexdigest()


def decoded_json(data: Any, kind: Any) -> Any:
    """Returns the value of type `kind` that JSON text holds; raises ValueError if it is no such."""
    return msgspec.json.decode(data, type=kind)


def encoded_json(value: Any) -> bytes:
    """Returns a value as the bytes of JSON text with sorted keys."""
    return msgspec.json.encode(value, order="sorted")


def tensor_object(facts: Any, tensors: Arrays) -> tuple[str, bytes]:
    """Encodes facts and tensors as a file of `safetensors`; returns the checksum and the bytes.

    Args:
      facts: a value that JSON can hold; it is stored in the file's metadata.
      tensors: a dictionary from names to arrays.

    Returns:
      The SHA-256 of facts and tensors in hexadecimal digits, and the bytes of the file.
    """
    from safetensors.numpy import save

    text = encoded_json(facts)
    found = _checksum(text, tensors)
    # Numpy has no bfloat16 of its own, so these tensors are stored as uint16 with the same bits.
    narrow = sorted(key for key, value in tensors.items() if str(value.dtype) == _BFLOAT16)
    kept = {
        key: np.asarray(value.view(np.uint16) if key in narrow else value, order="C")
        for key, value in tensors.items()
    }
    metadata = {_TEXT: text.decode(), "sha256": found, _BFLOAT16: json.dumps(narrow)}
    return found, save(kept, metadata)


def read_tensors(
    where: str, data: memoryview, specs: Specs | None, expected: str | None, kind: Any
) -> Stored:
    """Returns the content of a file of tensors after checking it; the bytes are not copied.

    Args:
      where: the name of the file, for errors.
      data: the bytes of the file.
      specs: the shapes and dtypes that the tensors must have, by name; None accepts any.
      expected: the checksum that the content must have; None accepts any.
      kind: the type that the facts are read as.

    Raises:
      OtherTensorsError: the tensors differ from `specs`.
      DamagedObjectError: the file is damaged, or is no file of this kind.
    """
    try:
        return _read(data, specs, expected, kind)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        wrong = OtherTensorsError if isinstance(error, OtherTensorsError) else DamagedObjectError
        raise wrong(f"{where} is refused: {error}") from error


class _HeaderEntry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _read(data: memoryview, specs: Specs | None, expected: str | None, kind: Any) -> Stored:
    # The `safetensors` library would copy the file twice, or map it into memory. With a mapped
    # file, a failing disk would kill the process.
    begin = 8 + int.from_bytes(data[:8], "little")
    if not 8 < begin <= len(data):
        raise DamagedObjectError("it is no file of tensors")
    header = decoded_json(data[8:begin], dict[str, Any])
    metadata = msgspec.convert(header.pop("__metadata__", {}), dict[str, str])
    if _TEXT not in metadata:
        raise DamagedObjectError("it was not written by an island or a merger")
    narrow = decoded_json(metadata.get(_BFLOAT16, "[]"), list[str])
    there, ends = {}, collections.Counter[str]()
    for key, one in msgspec.convert(header, dict[str, _HeaderEntry]).items():
        dtype = _BFLOAT16 if key in narrow else _NAMES[one.dtype]
        spec = there[key] = TensorSpec(one.shape, dtype)
        begin_at, ends[key] = one.data_offsets
        if min(one.shape, default=0) < 0 or ends[key] - begin_at != spec.nbytes or begin_at < 0:
            raise DamagedObjectError(
                f"{key!r} is not at the place that the header of the file gives"
            )
    if specs is not None:
        _check_specs(there, specs)
    tensors = {}
    for key, spec in there.items():
        part = data[begin + ends[key] - spec.nbytes : begin + ends[key]]
        tensors[key] = np.frombuffer(part, dtype_of(spec.dtype)).reshape(spec.shape)
    text = metadata[_TEXT].encode()
    if _checksum(text, tensors) != metadata.get("sha256"):
        raise DamagedObjectError("its checksum is not that of its content")
    if expected not in (None, metadata["sha256"]):
        raise DamagedObjectError(
            f"its checksum is {metadata['sha256'][:12]}..., and {expected[:12]}... was expected"
        )
    return Stored(decoded_json(text, kind), tensors, metadata["sha256"])


def _check_specs(there: Specs, specs: Specs) -> None:
    if set(there) != set(specs):
        missing, more = sorted(set(specs) - set(there)), sorted(set(there) - set(specs))
        raise OtherTensorsError(
            f"it lacks {missing[:3]} of the program's tensors and has {more[:3]} in addition"
        )
    for key, found in there.items():
        if found != specs[key]:
            raise OtherTensorsError(
                f"{key!r} is {found.dtype} of shape {list(found.shape)}, and the program "
                f"has {specs[key].dtype} of shape {list(specs[key].shape)}"
            )
