"""The folder through which islands exchange objects; objects are written atomically.

A folder is a path (a local disk, NFS) or a URL of an object store (``gs://``, ``s3://``, ``az://``)
that `obstore` opens. A process that can read and write the folder can be an island, or merge. An
object is a file of the folder. The size and the schema of an object are checked before it is used;
module `tensor_files` says how objects with tensors are checked.

Most objects (files of the folder) are created once and never replaced. If two processes create the
same object, only one of them succeeds. So processes need no locks. The clocks of two machines are
never compared, either.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import re
import stat
import time
import urllib.parse
import uuid
from datetime import timedelta
from typing import Any, Iterator, TypeVar, overload

from mtf_gradsync.runtimes._common import install_extra
from mtf_gradsync.tools.islands.tensor_files import (
    Arrays,
    DamagedObjectError,
    Specs,
    Stored,
    decoded_json,
    encoded_json,
    read_tensors,
    tensor_object,
)

with contextlib.suppress(ImportError):  # `Folder` raises an error that says how to install it
    import obstore
    import obstore.exceptions
    import obstore.store

T = TypeVar("T")
JSON_BYTES = 1 << 26  # no JSON object is larger
_SET_ASIDE = "damaged"
# The largest object that a store takes in one request. Only then can it refuse an existing name.
_ONE_PUT = 4 << 30
# Names of half-written files on a local disk, and the age in seconds from which they are left over.
_HALF, _HALF_SECONDS = re.compile(r".*#\d+"), 3600.0
_RETRIES: Any = {
    "max_retries": 6,
    "retry_timeout": timedelta(seconds=30),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5),
                "base": 2},
}  # fmt: skip
_CLIENT: Any = {"connect_timeout": "5 seconds", "timeout": "15 minutes"}
# The stores behind URLs memory://NAME, by NAME: they exist in this process only.
_MEMORY: dict[str, Any] = {}
# The id of the process in which `obstore` was first used (one element, or none yet).
_WORKS_IN: list[int] = []


class FolderError(OSError):
    """The error of a folder that cannot be read or written now, but may work again later."""


class Folder:
    """A folder of objects, at a path or at the URL of an object store.

    An object is bytes under a name, as in a file. Names of objects have parts that are separated by
    ``/``. If a folder on a disk is moved away, every operation raises FolderError until the same
    folder is back; a new folder at the same path is refused. If an object store fails, operations
    are tried again for some seconds, and then raise FolderError.

    `Folder(...)` raises ImportError if the package's extra "islands" is not installed, and
    ValueError for a URL that `obstore` cannot open.
    """

    def __init__(self, url: str | os.PathLike[str]):
        for library in ("obstore", "safetensors"):
            if importlib.util.find_spec(library) is None:
                raise ImportError(
                    f"Islands need {library}: {install_extra('islands')}", name=library
                )
        self.url = os.fspath(url)
        if not self.url:
            raise ValueError(f"The folder of the islands needs a path or URL, got {self.url!r}.")
        scheme, _, rest = self.url.partition("://")
        self.is_local = not rest or scheme == "file"
        self._store: Any = None
        self._inode: tuple[int, int] | None = None  # of a local folder, once it was seen
        if self.is_local:
            path = urllib.parse.unquote(rest) if rest else self.url
            self._root = os.path.abspath(os.path.expanduser(path))
        elif scheme == "memory":
            self._store = _MEMORY.setdefault(rest, obstore.store.MemoryStore())
        else:
            _check_not_forked()
            # obstore ignores this variable of its own for clients that are given options.
            http = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")
            try:
                self._store = obstore.store.from_url(
                    self.url, retry_config=_RETRIES, client_options={**_CLIENT, "allow_http": http}
                )
            except Exception as error:
                raise ValueError(
                    f"The folder {self.url!r} cannot be opened: {_reason(error)}"
                ) from error

    def __repr__(self) -> str:
        return f"Folder({self.url!r})"

    # Where objects are.

    def _path(self, name: str) -> str:
        return os.path.join(self._root, name)

    def _is_there(self, creates: bool = False) -> bool:
        """Returns whether the folder exists; an object store always does.

        `creates` says whether to make the folder if it never existed. The method raises FolderError
        if a folder on a disk is gone or was replaced by another folder.
        """
        if not self.is_local:
            return True
        try:
            if creates and self._inode is None:
                os.makedirs(self._root, exist_ok=True)
            found = os.stat(self._root)
        except FileNotFoundError:
            if self._inode is None:
                return False
            raise FolderError(f"{self.url} is gone; it was there before") from None
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise ValueError(f"{self.url} is no name for a folder: {error.strerror}") from None
            raise FolderError(f"{self.url} cannot be reached: {error}") from error
        if not stat.S_ISDIR(found.st_mode):
            raise FolderError(f"{self.url} is a file, and not a folder")
        inode = (found.st_dev, found.st_ino)
        if self._inode is None:
            self._store = obstore.store.LocalStore(self._root)
            self._inode = inode
        if self._inode != inode:
            raise FolderError(
                f"{self.url} is another folder than before: move the earlier folder back to this "
                "path, or start the program anew to use the new folder"
            )
        return True

    @contextlib.contextmanager
    def _store_errors(self, name: str, what: str) -> Iterator[None]:
        """Turns the store's errors inside the block into FolderErrors.

        `name` is the name of the object that the block reads or writes. `what` follows "cannot be"
        in the error's text: it is a word such as "read" or "written".
        """
        _check_not_forked()
        if name and any(part in ("", ".", "..") for part in name.split("/")):
            raise DamagedObjectError(f"{name!r} is no name of an object of {self.url}.")
        try:
            yield
        except (FolderError, DamagedObjectError):
            raise
        except Exception as error:
            where = f"{name} in {self.url}" if name else self.url
            raise FolderError(f"{where} cannot be {what}: {_reason(error)}") from error

    def names(self, folder: str) -> list[str]:
        """Returns the sorted names in a subfolder, or in the folder itself if it is "".

        Names of objects that are only half written are left out.
        """
        return sorted(self.marks(folder))

    def marks(self, folder: str) -> dict[str, str]:
        """Lists a subfolder: returns a dictionary from the names in it to their marks.

        The mark of an object is a text, such as an ETag, that changes with each write of the
        object. The mark of a folder is "". The result is {} if the subfolder does not exist. On a
        disk, links, pipes and names that are not text are left out.
        """
        if not self._is_there():
            return {}
        with self._store_errors(folder, "listed"):
            found = self._local_marks(folder) if self.is_local else self._marks(folder)
        if not found:
            self._is_there()  # raises if the folder was moved away just now
        return found

    def _local_marks(self, folder: str) -> dict[str, str]:
        found = {}
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for entry in os.scandir(self._path(folder)):
                is_text = entry.name.isprintable() and not entry.name.startswith(".")
                if not is_text or _HALF.fullmatch(entry.name):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_dir(follow_symlinks=False):
                        found[entry.name] = ""
                    elif entry.is_file(follow_symlinks=False):
                        has = entry.stat(follow_symlinks=False)
                        found[entry.name] = f"{has.st_ino}-{has.st_mtime_ns}-{has.st_size}"
        return found

    def _marks(self, folder: str) -> dict[str, str]:
        found = {}
        listed = obstore.list_with_delimiter(self._store, folder)
        for one in listed["objects"]:
            name = one["path"].rsplit("/", 1)[-1]
            # Consoles of object stores mark a folder by an empty object of the folder's own name.
            if one["path"].strip("/") != folder and not name.startswith("."):
                found[name] = f"{one['e_tag']}-{one['last_modified']}-{one['size']}"
        return found | {p.rstrip("/").rsplit("/", 1)[-1]: "" for p in listed["common_prefixes"]}

    # Bytes.

    def read(self, name: str, most: int | None = JSON_BYTES) -> Any:
        """Returns the bytes of an object, as a buffer; None if it does not exist.

        The method raises DamagedObjectError if the object has more than `most` bytes, or if `name`
        is the name of something else than an object, such as a directory.
        """
        if not self._is_there():
            return None
        with self._store_errors(name, "read"):
            try:
                # Opening a pipe would wait for ever.
                if self.is_local and not stat.S_ISREG(os.lstat(self._path(name)).st_mode):
                    raise DamagedObjectError(f"{name} in {self.url} is refused: it is no file")
                found = obstore.get(self._store, name)
            except (FileNotFoundError, NotADirectoryError):
                self._is_there()
                return None
            size = found.meta["size"]
            if most is not None and size > most:
                raise DamagedObjectError(
                    f"{name} in {self.url} is refused: it has {size:,} bytes, and at most "
                    f"{most:,} are allowed"
                )
            return found.bytes()

    def write(self, name: str, data: bytes) -> None:
        """Writes an object atomically; replaces an existing object of the same name.

        `name` is the object's name, such as "versions/00000008.soon", and `data` are its bytes.
        The method raises FolderError if the folder cannot be written now.
        """
        self._is_there(creates=True)
        with self._store_errors(name, "written"):
            obstore.put(self._store, name, data)
            self._is_there()  # raises if another folder has taken the place meanwhile

    def create(self, name: str, data: bytes) -> bool:
        """Writes an object atomically, unless it exists; returns whether this call created it.

        If several processes create the same object, only one succeeds. An object store may create
        an object and not answer in time. So an existing object that holds exactly `data` counts as
        created by this call.
        """
        self._is_there(creates=True)
        with self._store_errors(name, "written"):
            try:
                if len(data) <= _ONE_PUT:
                    obstore.put(self._store, name, data, mode="create")
                elif self.read(name, most=0) is None:
                    obstore.put(self._store, name, data)
                self._is_there()
            except obstore.exceptions.AlreadyExistsError:
                with contextlib.suppress(DamagedObjectError):
                    found = self.read(name, most=len(data))
                    return found is not None and len(found) == len(data) and bytes(found) == data
                return False
            return True

    def remove(self, name: str) -> None:
        """Removes the object of this name, if it exists; raises FolderError if the folder fails."""
        if self._is_there():
            with self._store_errors(name, "removed"), contextlib.suppress(FileNotFoundError):
                obstore.delete(self._store, name)

    def set_aside(self, name: str) -> str:
        """Moves a damaged object to the subfolder "damaged"; returns the object's new name.

        After the move, an object can be created again under the old name.
        """
        aside = f"{_SET_ASIDE}/{name.replace('/', '.')}.{uuid.uuid4().hex[:8]}"
        self._is_there()
        with self._store_errors(name, "set aside"), contextlib.suppress(FileNotFoundError):
            if self.is_local:  # also moves directories and pipes
                os.makedirs(self._path(_SET_ASIDE), exist_ok=True)
                os.rename(self._path(name), self._path(aside))
            else:
                obstore.copy(self._store, name, aside)
                obstore.delete(self._store, name)
        return aside

    def remove_half_written(self) -> None:
        """Removes half-written files that are over an hour old, since their writers were killed.

        The method does nothing if the folder is in an object store.
        """
        if not self.is_local or not self._is_there():
            return
        for place, _, files in os.walk(self._root):
            for path in (os.path.join(place, name) for name in files if _HALF.fullmatch(name)):
                with contextlib.suppress(OSError):
                    if time.time() - os.lstat(path).st_mtime > _HALF_SECONDS:
                        os.remove(path)

    # JSON.

    @overload
    def read_json(self, name: str) -> Any: ...
    @overload
    def read_json(self, name: str, kind: type[T]) -> T | None: ...
    def read_json(self, name: str, kind: Any = Any) -> Any:
        """Returns the decoded value of an object that holds JSON; None if it does not exist.

        `kind` is the type that the value must have, such as a subclass of `msgspec.Struct`; the
        result has this type. The method raises DamagedObjectError if the object holds no JSON, or a
        value of another type.
        """
        data = self.read(name)
        if data is None:
            return None
        try:
            return decoded_json(data, kind)
        except (ValueError, RecursionError) as error:
            raise DamagedObjectError(
                f"{name} in {self.url} is refused: it is no JSON of the expected kind: {error}"
            ) from error

    def write_json(self, name: str, value: Any) -> None:
        """Writes an object that holds a value as JSON; replaces an existing object of this name."""
        self.write(name, encoded_json(value))

    def create_json(self, name: str, value: Any) -> bool:
        """Creates an object that holds a value as JSON, unless the object exists.

        Returns whether this call created the object. If an object that holds the same bytes exists
        already, it counts as created by this call.
        """
        return self.create(name, encoded_json(value))

    # Tensors.

    def store(self, name: str, facts: Any, tensors: Arrays) -> str:
        """Writes facts and tensors as one object; replaces an existing object of this name.

        Args:
          name: the object's name.
          facts: a value that JSON can hold.
          tensors: a dictionary from names to arrays.

        Returns:
          The SHA-256 of facts and tensors, in hexadecimal digits.
        """
        found, data = tensor_object(facts, tensors)
        self.write(name, data)
        return found

    def load(
        self,
        name: str,
        specs: Specs | None = None,
        expected: str | None = None,
        kind: Any = dict[str, Any],
        most: int | None = None,
    ) -> Stored | None:
        """Returns facts and tensors of an object; None if it does not exist.

        Args:
          name: the object's name.
          specs: shapes and dtypes that its tensors must have, by name; None accepts any.
          expected: the checksum that the object must have; None only checks the object against the
            checksum that it contains.
          kind: the class of the facts.
          most: the largest allowed size in bytes; None allows any. If `specs` is not None, the size
            follows from `specs`, and `most` is ignored.

        Raises:
          DamagedObjectError: the object is damaged, was not written by an island or a merger, or
            is not the one that was expected.
        """
        if specs is not None:
            most = sum(spec.nbytes for spec in specs.values()) + JSON_BYTES
        data = self.read(name, most)
        if data is None:
            return None
        where = f"{name} in {self.url}"
        return read_tensors(where, memoryview(data), specs, expected, kind)


def _check_not_forked() -> None:
    """Raises RuntimeError in a forked process, in which requests would never be answered."""
    _WORKS_IN.extend([] if _WORKS_IN else [os.getpid()])
    if os.getpid() not in _WORKS_IN:
        raise RuntimeError(
            f"This process was forked from process {_WORKS_IN[0]}, which had used a folder of "
            "islands: the forked process lacks the threads of obstore, and requests would never "
            "end. Fork before a folder is used, or start processes by "
            'multiprocessing.get_context("spawn").'
        )


def _reason(error: Exception) -> str:
    """Returns the message of an object store's error, without its debug details."""
    return str(error).split("\n\nDebug source:")[0].strip()
