"""Lowers a core's program and compiles it for devices, or takes both from the cache."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from pathlib import Path
from typing import Any, NamedTuple, Sequence

from mtf_gradsync._private.jax import writes_over_arguments_well
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.simd.errors import UnsupportedProgramError
from mtf_gradsync.xla.devices.cache import Cache, key_of
from mtf_gradsync.xla.lowering.bridge import to_hlo
from mtf_gradsync.xla.lowering.replica_program import ReplicaProgram
from mtf_gradsync.xla.lowering.stablehlo import to_stablehlo, without_overwriting
from mtf_gradsync.xla.runner.packs import packed_for_cpus
from mtf_gradsync.xla.runner.program import (
    LoadedProgram,
    RefusedError,
    compiled,
    loaded_executable,
    serialized_executable,
)

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
