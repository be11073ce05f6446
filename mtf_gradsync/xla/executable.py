"""Lowers a core's program and compiles it for devices, or takes both from the cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any, NamedTuple, Sequence

from mtf_gradsync._private.jax import writes_over_arguments_well
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.simd.facts import UnsupportedProgramError
from mtf_gradsync.xla.bridge import to_hlo
from mtf_gradsync.xla.replica_program import ReplicaProgram
from mtf_gradsync.xla.runner.packs import packed_for_cpus
from mtf_gradsync.xla.runner.program import (
    LoadedProgram,
    RefusedError,
    compiled,
    loaded_executable,
    serialized_executable,
)
from mtf_gradsync.xla.stablehlo import to_stablehlo, without_overwriting

# Beyond this size the least recently used entries are deleted; reading an entry uses it.
_MOST_BYTES = 2 << 30


def default_cache_dir() -> str | None:
    """Returns where compiled programs are kept unless a session says otherwise.

    Returns:
      The environment variable ``MTF_GRADSYNC_CACHE_DIR``, where it is set (empty: nothing is kept,
      None), otherwise a folder in the user's cache.
    """
    given = os.environ.get("MTF_GRADSYNC_CACHE_DIR")
    if given is not None:
        return given or None
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "mtf_gradsync", "xla")


class Cache:
    """A folder of entries by key. A folder that cannot be used, or None, keeps nothing."""

    def __init__(self, folder: str | None):
        self._folder = Path(folder) if folder else None

    def get(self, key: str) -> bytes | None:
        """Returns the content stored under a key, or None."""
        if self._folder is None:
            return None
        path = self._folder / key
        try:
            content = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        checksum, content = content[:32], content[32:]
        return content if hashlib.sha256(content).digest() == checksum else None

    def put(self, key: str, content: bytes) -> None:
        """Stores content under a key, for this and other processes."""
        if self._folder is None:
            return
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                file.write(hashlib.sha256(content).digest() + content)
            os.replace(file.name, self._folder / key)
            self._drop_old(self._folder)

    def _drop_old(self, folder: Path) -> None:
        found = [(p.stat().st_mtime, p.stat().st_size, p) for p in folder.iterdir()]
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= _MOST_BYTES:
                break
            path.unlink()
            total -= size


def key_of(*parts: bytes | str) -> str:
    """Returns a key, usable as a file's name, of everything that the stored content depends on."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


# To be increased when the same program is lowered, or compiled, in another way.
_LOWERING_VERSION = 4
_COMPILING_VERSION = 2


class Lowered(NamedTuple):
    """A core's program as the text of a StableHLO module. The other fields are those of `Hlo`."""

    module: str
    num_fetches: int
    updated: tuple[int, ...]
    has_randomness: bool


def lowered(replica: ReplicaProgram, cache: Cache) -> Lowered:
    """Returns a core's program as StableHLO, from the cache where it is there."""
    import jaxlib

    key = key_of(
        f"lowered {_LOWERING_VERSION} {tf.__version__} {jaxlib.__version__}",
        replica.graph_def.SerializeToString(deterministic=True),
        repr(replica._replace(graph_def=None)),
    )
    kept = cache.get(key)
    if kept is not None:
        fields = json.loads(kept)
        return Lowered(**{**fields, "updated": tuple(fields["updated"])})
    hlo = to_hlo(replica)
    made = Lowered(
        to_stablehlo(hlo, with_names=True), hlo.num_fetches, hlo.updated, hlo.has_randomness
    )
    cache.put(key, json.dumps(made._asdict()).encode())
    return made


def loaded(program: Lowered, devices: Sequence[Any], cache: Cache) -> LoadedProgram:
    """Compiles a program, or takes it from the cache, and loads it on devices, one core on each."""
    module = program.module
    if devices[0].platform == "cpu" and not writes_over_arguments_well():
        module = without_overwriting(module)
    key = key_of(f"compiled {_COMPILING_VERSION}", _machine(devices), module)
    kept = cache.get(key)
    if kept is not None:
        try:
            return LoadedProgram(loaded_executable(kept, devices), devices)
        except RuntimeError:
            pass  # written by another build with the same version: compile
    try:
        executable = compiled(
            packed_for_cpus(module) if devices[0].platform == "cpu" else module, devices
        )
    except RefusedError as error:
        raise UnsupportedProgramError(str(error)) from error
    with contextlib.suppress(RuntimeError):  # not every platform can
        cache.put(key, serialized_executable(executable, devices))
    return LoadedProgram(executable, devices)


def _machine(devices: Sequence[Any]) -> str:
    """Returns everything besides a program that its compiled form depends on."""
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
