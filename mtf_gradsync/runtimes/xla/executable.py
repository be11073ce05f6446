"""Compiles a core's program for each set of fetches, or loads it from the cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import stat
import tempfile
from pathlib import Path
from typing import Any, NamedTuple, Sequence

from mtf_gradsync.extension import mtf, tf, warn_once
from mtf_gradsync.runtimes._private.jax import can_write_over_arguments, compiled_hlo
from mtf_gradsync.runtimes.processes.watchdog import keep_heartbeats
from mtf_gradsync.runtimes.simd.graph_facts import UnsupportedProgramError
from mtf_gradsync.runtimes.simd.program import Program
from mtf_gradsync.runtimes.xla.bridge import to_hlo
from mtf_gradsync.runtimes.xla.gathering import Cores
from mtf_gradsync.runtimes.xla.hlo_collectives import find_hlo_collectives
from mtf_gradsync.runtimes.xla.host_graph import HostGraph
from mtf_gradsync.runtimes.xla.replica_program import ReplicaProgram, replica_program
from mtf_gradsync.runtimes.xla.runner.loaded_program import (
    LoadedProgram,
    RefusedError,
    compiled,
    loaded_executable,
    serialized_executable,
)

# Beyond this size, the entries that were written or read least recently are deleted.
_MOST_BYTES = 2 << 30


def _checksum(key: str, content: bytes) -> bytes:
    """Returns a checksum (32 bytes) of a cache entry's content and `key`, its file name."""
    return hashlib.sha256(key.encode() + content).digest()


def _why_unsafe(status: os.stat_result) -> str:
    """Returns why others can write a file or folder, as in "belongs to user 12"; "" if they cannot.

    `status` is what ``os.stat`` returned for the file or folder.
    """
    if not hasattr(os, "geteuid"):  # no POSIX
        return ""
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}"
    if status.st_mode & 0o022:
        return f"can be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def default_cache_dir() -> str | None:
    """Returns the folder in which compiled programs are cached by default.

    Returns:
      The value of the environment variable ``MTF_GRADSYNC_CACHE_DIR`` if this variable is set;
      None, which means no cache, if its value is empty. If the variable is not set, a folder in the
      user's cache, or None if the user has no home folder.
    """
    given = os.environ.get("MTF_GRADSYNC_CACHE_DIR")
    if given is not None:
        return given or None
    # As the XDG specification says, relative paths count as not set.
    homes = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")
    base = next((home for home in homes if os.path.isabs(home)), None)
    return base and os.path.join(base, "mtf_gradsync", "xla")


class Cache:
    """A cache in a folder. If the folder is None or cannot be used, nothing is cached.

    The files in a cache are run as programs. So the folder and each of its files must belong to
    this user (or root), and no other user may be able to write them. If other users can write the
    folder, the folder is not used, and a warning is logged once.
    """

    def __init__(self, folder: str | None):
        folder = os.path.expanduser(folder or "")
        # For a user without a home folder, "~" stays in the path.
        self._folder = Path(folder) if folder and not folder.startswith("~") else None

    def get(self, key: str) -> bytes | None:
        """Returns the content stored under `key`; None if it is missing, damaged or unsafe.

        An entry is unsafe if another user can write its file.
        """
        if self._folder is None or not self._is_safe(self._folder):
            return None
        path = self._folder / key
        try:
            with open(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb") as file:
                if _why_unsafe(os.fstat(file.fileno())):
                    return None
                content = file.read()
            os.utime(path)
        except OSError:
            return None
        checksum, content = content[:32], content[32:]
        return content if _checksum(key, content) == checksum else None

    def put(self, key: str, content: bytes) -> None:
        """Stores `content` under `key`, which `key_of` returned, for this and other processes.

        If the folder of the cache cannot be used, nothing is stored. If the folder has become too
        large, the files that were used least recently are deleted.
        """
        if self._folder is None:
            return
        with contextlib.suppress(OSError):
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if not self._is_safe(self._folder):
                return
            with contextlib.ExitStack() as at_end:
                with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                    at_end.callback(Path(file.name).unlink, missing_ok=True)
                    file.write(_checksum(key, content) + content)
                os.replace(file.name, self._folder / key)
            self._drop_old(self._folder)

    @staticmethod
    def _is_safe(folder: Path) -> bool:
        try:
            reason = _why_unsafe(os.stat(folder))
        except OSError:  # it is not there yet
            return False
        if reason:
            warn_once(
                f"cache {folder}",
                "Compiled programs are neither stored in the folder %s nor taken from it. The "
                "folder %s, so another user may have put programs there. Use chmod go-w, or "
                "set MTF_GRADSYNC_CACHE_DIR to a folder of your own.",
                folder, reason,
            )  # fmt: skip
        return not reason

    def _drop_old(self, folder: Path) -> None:
        found = [(p.stat().st_mtime, p.stat().st_size, p) for p in folder.iterdir()]
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= _MOST_BYTES:
                break
            path.unlink()
            total -= size


def key_of(*parts: bytes | str) -> str:
    """Returns a cache key: a sha256 of `parts`, in hexadecimal, usable as a file name.

    `parts` are texts or bytes. Everything that can change the cached content has to be in them, so
    that two different contents never have the same key.
    """
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


# To be increased when the same program is lowered, or compiled, in another way.
_LOWERING_VERSION = 4
_COMPILING_VERSION = 2


class CoreModule(NamedTuple):
    """A core's program as the text of a StableHLO module, with facts about its results.

    `num_fetches` is how many results are fetches; they come first. `updated` has, for each further
    result, the number of the parameter that it replaces. `has_randomness` says whether the program
    draws random numbers.
    """

    module: str
    num_fetches: int
    updated: tuple[int, ...]
    has_randomness: bool


def lowered(replica: ReplicaProgram, cache: Cache) -> CoreModule:
    """Returns a core's program, `replica`, as StableHLO, from `cache` if it is there already.

    If `cache` does not have the StableHLO, it is made from the program and put into `cache`.
    """
    import jaxlib

    from mtf_gradsync.runtimes.xla.stablehlo import to_stablehlo

    key = key_of(
        f"lowered {_LOWERING_VERSION} {tf.__version__} {jaxlib.__version__}",
        replica.graph_def.SerializeToString(deterministic=True),
        repr(replica._replace(graph_def=None)),
    )
    kept = cache.get(key)
    if kept is not None:
        fields = json.loads(kept)
        return CoreModule(**{**fields, "updated": tuple(fields["updated"])})
    hlo = to_hlo(replica)
    made = CoreModule(
        to_stablehlo(hlo, with_names=True), hlo.num_fetches, hlo.updated, hlo.has_randomness
    )
    cache.put(key, json.dumps(made._asdict()).encode())
    return made


def loaded(program: CoreModule, devices: Sequence[Any], cache: Cache) -> LoadedProgram:
    """Returns a program compiled for devices, from `cache` if it is there already.

    If `cache` does not have the compiled program, `program` is compiled, and the compiled program
    is put into `cache`. `devices` are jax devices, one for each core. Raises an
    UnsupportedProgramError when XLA cannot compile the program.
    """
    from mtf_gradsync.runtimes.xla.runner.combiner import combined_for_cpus
    from mtf_gradsync.runtimes.xla.stablehlo import without_overwriting

    module = program.module
    if devices[0].platform == "cpu" and not can_write_over_arguments():
        module = without_overwriting(module)
    key = key_of(f"compiled {_COMPILING_VERSION}", _describe_environment(devices), module)
    kept = cache.get(key)
    if kept is not None:
        try:
            return LoadedProgram(loaded_executable(kept, devices), devices)
        except RuntimeError:
            pass  # written by another build with the same version: compile
    try:
        executable = compiled(
            combined_for_cpus(module) if devices[0].platform == "cpu" else module, devices
        )
    except RefusedError as error:
        raise UnsupportedProgramError(str(error)) from error
    with contextlib.suppress(RuntimeError):  # not every platform can
        cache.put(key, serialized_executable(executable, devices))
    return LoadedProgram(executable, devices)


def _describe_environment(devices: Sequence[Any]) -> str:
    """Describes the compiler and the devices, on which a compiled program depends, as one text.

    The text has the version of jaxlib, the devices, XLA's flags and the kind of CPU. The cache key
    of a compiled program is made from this text, among other things. `devices` are jax devices, one
    for each core.
    """
    import jaxlib

    client = devices[0].client
    local = [i for i, d in enumerate(devices) if d.process_index == client.process_index()]
    cpu = ""
    if devices[0].platform == "cpu":
        try:
            lines = Path("/proc/cpuinfo").read_text().splitlines()
            cpu = next((x for x in lines if x.startswith(("flags", "Features"))), "")
        except OSError:
            cpu = platform.processor()
    return repr(
        (
            jaxlib.__version__,
            client.platform_version,
            [(d.id, d.device_kind, d.process_index) for d in devices],
            local,
            os.environ.get("XLA_FLAGS", ""),
            platform.machine(),
            cpu,
        )
    )


class CompiledCore(NamedTuple):
    """A core's program for one set of fetches, ready to run."""

    replica: ReplicaProgram
    lowered: CoreModule
    program: LoadedProgram


class PreparedProgram:
    """A program for devices, which is compiled once for each set of fetches.

    `by_fetches` has the programs compiled so far, by the names of the tensors that they fetch.
    `host` is the part of the user's graph outside the program, and `cores` are the cores that run
    the program. `version` is the attribute ``version`` that the user's graph had after `host` was
    made; TensorFlow raises this number with each operation that is added to the graph.
    """

    def __init__(
        self, program: Program, lowerings: Sequence[mtf.Lowering], cores: Cores, cache: Cache
    ):
        self.host = HostGraph(program, lowerings)
        self.version = program.graph.version
        self._program = program
        self.cores = cores
        self._cache = cache
        self.by_fetches: dict[tuple[str, ...], CompiledCore] = {}

    def compiled(self, inside: tuple[str, ...]) -> CompiledCore:
        """Returns the compiled program that fetches some tensors; compiles it once for them.

        `inside` has the names of the tensors to fetch, all of which the program computes. Raises a
        ProcessesError when another process has a different program.
        """
        if inside not in self.by_fetches:
            replica = replica_program(self._program, inside)
            with keep_heartbeats():  # TensorFlow's bridge keeps Python's lock
                module = lowered(replica, self._cache)
            self.cores.check_same("the programs", module.module.encode())
            program = loaded(module, self.cores.devices, self._cache)
            if not self.cores.is_alone:
                self.cores.check_same("the orders of collectives", _collective_order(program))
            self.by_fetches[inside] = CompiledCore(replica, module, program)
        return self.by_fetches[inside]


def _collective_order(program: LoadedProgram) -> bytes:
    """Lists a compiled program's collectives as one text, in the order in which they begin.

    Processes compare these texts, because all of them have to run the same collectives in the same
    order.
    """
    found = find_hlo_collectives(compiled_hlo(program.executable))
    return repr([(c.operation, c.bytes_per_core, c.groups, c.inside) for c in found]).encode()
