"""The folder that islands exchange values through: objects of tensors, whole or not there at all.

Any folder that `fsspec` reaches will do: a local disk, NFS, ``gs://``, ``s3://``. Who can read and
write it takes part. Tensors are `safetensors` files, which hold numbers and text and nothing that
could run. Each carries the SHA-256 of what is in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import posixpath
import tempfile
import uuid
from typing import Any, Iterator, Mapping, NamedTuple

import numpy as np

from mtf_gradsync.extension import install_extra

_TEXT = "mtf_gradsync"  # the key of an object's facts in the metadata of its file
SUFFIX = ".safetensors"
# Where a put makes an object appear whole; elsewhere a file is written beside it and renamed.
_OBJECT_STORES = {"abfs", "abfss", "az", "gcs", "gs", "memory", "oss", "s3", "s3a"}
_BFLOAT16 = "bfloat16"


class DamagedObjectError(ValueError):
    """An object of the folder is damaged, or is not what its name says."""


class Spec(NamedTuple):
    """The shape and dtype of a tensor, as text so that it can be written down."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, value: np.ndarray) -> Spec:
        """Returns the spec of an array."""
        return cls(tuple(map(int, value.shape)), str(value.dtype))


class Stored(NamedTuple):
    """What an object holds.

    Attributes:
      facts: what its writer says of it, as JSON has it.
      tensors: arrays by name.
      checksum: of both, SHA-256 in hexadecimal digits.
    """

    facts: dict[str, Any]
    tensors: dict[str, np.ndarray]
    checksum: str


def checksum(facts: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> str:
    """Returns the SHA-256 of facts and tensors, which the order of either does not change."""
    found = hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode())
    for name in sorted(tensors):
        value = np.asarray(tensors[name], order="C")
        found.update(json.dumps([name, *Spec.of(value)]).encode())
        found.update(value.reshape(-1).view(np.uint8).data if value.size else b"")
    return found.hexdigest()


class Folder:
    """A folder, by the URL or path that `fsspec` takes. Names in it are relative, with ``/``.

    Raises ImportError without the islands extra, and ValueError for a URL that no installed package
    can open.
    """

    def __init__(self, url: str | os.PathLike[str]):
        for library in ("fsspec", "safetensors"):
            if importlib.util.find_spec(library) is None:
                raise ImportError(
                    f"Islands need {library}: {install_extra('islands')}", name=library
                )
        import fsspec

        self.url = os.fspath(url)
        if not self.url:
            raise ValueError(f"The folder of the islands needs a path or URL, got {self.url!r}.")
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise ValueError(f"The folder {self.url!r} cannot be opened: {error}") from error
        protocols = self._files.protocol
        self._protocols = {protocols} if isinstance(protocols, str) else set(protocols)
        self.is_local = bool(self._protocols & {"file", "local"})

    def __repr__(self) -> str:
        return f"Folder({self.url!r})"

    def local_path(self, name: str) -> str:
        """Returns the path of an object on this machine's file system, where `is_local`."""
        return self._path(name)

    def _path(self, name: str) -> str:
        return posixpath.join(self._root, name)

    def names(self, folder: str) -> list[str]:
        """Returns the sorted names of the objects in a folder of it, without those half written."""
        try:
            # Others write at the same time: what an earlier look has seen is no answer.
            self._files.invalidate_cache()
            found = self._files.ls(self._path(folder), detail=False)
        except FileNotFoundError:
            return []
        names = sorted(posixpath.basename(path.rstrip("/")) for path in found)
        return [name for name in names if not name.startswith(".")]

    def read(self, name: str) -> bytes | None:
        """Returns the bytes of an object; None where there is none."""
        try:
            return self._files.cat_file(self._path(name))
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Writes an object, which appears whole; one that was there is replaced."""
        path = self._path(name)
        if self._protocols & _OBJECT_STORES:
            self._files.pipe_file(path, data)
            return
        parent, last = posixpath.split(path)
        self._files.makedirs(parent, exist_ok=True)
        beside = posixpath.join(parent, f".{last}.{uuid.uuid4().hex}")
        try:
            if self.is_local:
                # Not fsspec's: its own goes over another folder, so that renaming may copy.
                with open(beside, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(beside, path)
            else:
                self._files.pipe_file(beside, data)
                self._files.mv(beside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                self._files.rm_file(beside)
            raise

    def remove(self, name: str) -> None:
        """Removes an object, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def remove_half_written(self, folder: str) -> None:
        """Removes what writers that were killed have left in a folder where nobody writes now."""
        for path in self._files.glob(posixpath.join(self._path(folder), ".*")):
            with contextlib.suppress(FileNotFoundError):
                self._files.rm_file(path)

    def remove_all(self, folder: str) -> None:
        """Removes a folder of it with all objects, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(self._path(folder), recursive=True)

    def read_json(self, name: str) -> Any:
        """Returns what a JSON object holds; None where there is none.

        Raises DamagedObjectError for what is no JSON.
        """
        data = self.read(name)
        if data is None:
            return None
        try:
            return json.loads(data)
        except ValueError as error:
            raise DamagedObjectError(f"{name} in {self.url} is no JSON: {error}") from error

    def write_json(self, name: str, value: Any) -> None:
        """Writes a value as JSON, with sorted keys and a line end."""
        self.write(name, f"{json.dumps(value, sort_keys=True)}\n".encode())

    def store(self, name: str, facts: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> str:
        """Writes facts and tensors as one object; returns their checksum."""
        from safetensors.numpy import save

        found = checksum(facts, tensors)
        text = json.dumps({"facts": dict(facts), "sha256": found}, sort_keys=True)
        kept, narrow = {}, list[str]()
        for key, value in tensors.items():
            if str(value.dtype) == _BFLOAT16:
                # Numpy has no such dtype of its own; the bits are kept.
                value, narrow = value.view(np.uint16), [*narrow, key]
            kept[key] = np.asarray(value, order="C")
        self.write(name, save(kept, {_TEXT: text, _BFLOAT16: json.dumps(narrow)}))
        return found

    def load(
        self, name: str, specs: Mapping[str, Spec] | None = None, expected: str | None = None
    ) -> Stored | None:
        """Reads an object, one tensor after the other; None where there is none.

        Args:
          name: of the object.
          specs: shapes and dtypes that its tensors must have; they are looked at before any tensor
            is read. None takes what is there.
          expected: the checksum that it must have; None takes the one that it carries.

        Raises:
          DamagedObjectError: the object is damaged, foreign, or another than was expected.
        """
        from safetensors import SafetensorError, safe_open

        def refuse(reason: Any) -> DamagedObjectError:
            return DamagedObjectError(f"{name} in {self.url} is refused: {reason}")

        with self._local_copy(name) as path:
            if path is None:
                return None
            try:
                with safe_open(path, framework="numpy") as file:
                    metadata = file.metadata() or {}
                    if _TEXT not in metadata:
                        raise refuse("it was not written by an island or a merger")
                    text = json.loads(metadata[_TEXT])
                    narrow = json.loads(metadata.get(_BFLOAT16, "[]"))
                    facts, found = text["facts"], text["sha256"]
                    keys = list(file.keys())
                    if specs is not None:
                        _check_specs(file, keys, specs, narrow, refuse)
                    tensors = {key: _as_stored(file.get_tensor(key), key in narrow) for key in keys}
            except DamagedObjectError:
                raise
            except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
                raise refuse(error) from error
        if checksum(facts, tensors) != found:
            raise refuse("its checksum is not that of its content")
        if expected is not None and found != expected:
            raise refuse(f"its checksum is {found[:12]}..., and {expected[:12]}... was expected")
        return Stored(facts, tensors, found)

    @contextlib.contextmanager
    def _local_copy(self, name: str) -> Iterator[str | None]:
        path = self._path(name)
        if self.is_local:
            yield path if os.path.exists(path) else None
            return
        with tempfile.TemporaryDirectory(prefix="mtf_gradsync_") as own:
            copy = os.path.join(own, "object")
            try:
                self._files.get_file(path, copy)
            except FileNotFoundError:
                copy = ""
            yield copy or None


def _as_stored(value: np.ndarray, is_narrow: bool) -> np.ndarray:
    if not is_narrow:
        return value
    import ml_dtypes

    return value.view(ml_dtypes.bfloat16)


def _check_specs(
    file: Any, keys: list[str], specs: Mapping[str, Spec], narrow: list[str], refuse: Any
) -> None:
    if set(keys) != set(specs):
        missing, more = sorted(set(specs) - set(keys)), sorted(set(keys) - set(specs))
        raise refuse(f"it lacks {missing[:3]} and has {more[:3]} beyond the program's variables")
    for key in keys:
        piece = file.get_slice(key)
        dtype = _BFLOAT16 if key in narrow else _NAMES.get(piece.get_dtype(), piece.get_dtype())
        found = Spec(tuple(piece.get_shape()), dtype)
        if found != specs[key]:
            raise refuse(
                f"{key!r} is {found.dtype} of shape {list(found.shape)}, and the program "
                f"has {specs[key].dtype} of shape {list(specs[key].shape)}"
            )


# The names of dtypes in safetensors, and numpy's.
_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "I64": "int64", "I32": "int32",
          "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16",
          "U8": "uint8", "BOOL": "bool"}  # fmt: skip
