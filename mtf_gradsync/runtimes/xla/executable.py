"""Lowers a core's program to StableHLO, and compiles it for devices; or takes it from the cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import stat
import tempfile
from pathlib import Path
from typing import Any, NamedTuple, Sequence

import numpy as np

from mtf_gradsync.extension import tf, warn_once
from mtf_gradsync.runtimes._private.jax import hlo_to_module, writes_over_arguments_well
from mtf_gradsync.runtimes.simd.facts import UnsupportedProgramError
from mtf_gradsync.runtimes.xla.bridge import COLLECTIVE_TARGETS, Hlo, to_hlo
from mtf_gradsync.runtimes.xla.replica_program import ReplicaProgram
from mtf_gradsync.runtimes.xla.runner.combiner import (
    TOGETHER,
    combined_for_cpus,
    create,
    fill_with_sum,
    nested_operations,
    text_of,
)
from mtf_gradsync.runtimes.xla.runner.program import (
    LoadedProgram,
    RefusedError,
    compiled,
    loaded_executable,
    serialized_executable,
)


def share_constants(operation: Any) -> None:
    """Keeps the first of equal arrays in each block, as XLA does when it reads a module.

    TensorFlow makes one for each layer: of relative positions, say, a megabyte each, and more than
    twice that as text.
    """
    from jaxlib.mlir import ir

    for region in operation.regions:
        for block in region:
            first: dict[Any, Any] = {}
            for inner in list(block):
                op = inner.operation
                share_constants(op)
                if op.name != "stablehlo.constant":
                    continue
                value = op.attributes["value"]
                if ir.DenseElementsAttr(value).is_splat:
                    continue
                kept = first.setdefault(value, op)
                if kept is not op:
                    op.results[0].replace_all_uses_with(kept.results[0])
                    op.erase()


#: The attribute of a loop that says how often it turns.
TURNS = "mtf_gradsync.turns"
_STABLEHLO = {
    "AllGather": "stablehlo.all_gather",
    "AllToAll": "stablehlo.all_to_all",
    "CollectivePermute": "stablehlo.collective_permute",
    "CrossReplicaSum": "stablehlo.all_reduce",
    "XlaReduceScatter": "stablehlo.reduce_scatter",
}


def to_stablehlo(hlo: Hlo, with_names: bool = False) -> str:
    """Turns a core's program into the text of an MLIR module of StableHLO.

    New values of variables are marked as written over the old ones. `with_names` gives each
    operation the name of its operation in the graph; profiles of the compiled program show these
    names. Without names, each loop has the attribute `TURNS`, where the graph says how often it
    turns.
    """
    from jax.interpreters import mlir
    from jaxlib.mlir import ir

    with mlir.make_ir_context(), ir.Location.unknown():
        module = hlo_to_module(hlo.proto)
        for op in list(nested_operations(module.operation)):
            if op.name == "mhlo.copy":
                # HLO's copy of results, which StableHLO lacks and nothing needs.
                op.results[0].replace_all_uses_with(op.operands[0])
                op.operation.erase()
            elif op.name == "stablehlo.custom_call":
                _put_collective(op)
            elif op.name == "stablehlo.while" and not with_names:
                turns = hlo.turns.get(str(op.location)[len('loc("') : -len('")')])
                if turns is not None:
                    op.attributes[TURNS] = ir.IntegerAttr.get(
                        ir.IntegerType.get_signless(64), turns
                    )
        main = next(op for op in module.body.operations if _name(op) == "main")
        _return_separately(main)
        _mark_updates(main, hlo)
        share_constants(module.operation)
        # The rest of HLO's header needs a dialect that other versions do not have.
        for name in [getattr(a, "name", a) for a in module.operation.attributes]:
            if name.startswith("mhlo."):
                del module.operation.attributes[name]
        # TensorFlow's name has a count of all functions that the process has made.
        text = text_of(module, with_names)
        return re.sub(r"^module @\S+", "module @step", text, count=1, flags=re.MULTILINE)


def without_overwriting(module: str) -> str:
    """Returns a module of `to_stablehlo` that writes no results over parameters."""
    return re.sub(r" \{tf\.aliasing_output = \d+ : i32\}", "", module)


def _put_collective(op: Any) -> None:
    """Replaces a custom call by XLA's own collective."""
    from jaxlib.mlir import ir

    target = ir.StringAttr(op.attributes["call_target_name"]).value
    if target not in COLLECTIVE_TARGETS:
        return
    settings = json.loads(ir.StringAttr(op.attributes["backend_config"]).value)
    collective = COLLECTIVE_TARGETS[target]
    name = _STABLEHLO[collective]
    who = "source_target_pairs" if collective == "CollectivePermute" else "replica_groups"
    attributes: dict[str, Any] = {who: _matrix(settings.pop("groups"))}
    group = settings.pop("together", None)
    if group is not None:
        attributes[TOGETHER] = ir.StringAttr.get(group)
    int64 = ir.IntegerType.get_signless(64)
    attributes.update((key, ir.IntegerAttr.get(int64, n)) for key, n in settings.items())
    regions = 1 if collective in ("CrossReplicaSum", "XlaReduceScatter") else 0
    with ir.InsertionPoint(op), op.location:
        made = create(name, op.results[0].type, [op.operands[0]], attributes, regions)
    if regions:
        fill_with_sum(made.owner.regions[0], op.operands[0])
    op.results[0].replace_all_uses_with(made)
    op.erase()


def _matrix(groups: list[list[int]]) -> Any:
    """Returns groups of cores as an attribute; shorter groups are filled up with -1."""
    from jaxlib.mlir import ir

    longest = max((len(g) for g in groups), default=0)
    rows = [[*g, *[-1] * (longest - len(g))] for g in groups]
    return ir.DenseIntElementsAttr.get(np.array(rows, np.int64).reshape(len(rows), longest))


def _name(function: Any) -> str:
    from jaxlib.mlir import ir

    return ir.StringAttr(function.attributes["sym_name"]).value


def _type_of(function: Any) -> Any:
    from jaxlib.mlir import ir

    return ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)


def _return_separately(main: Any) -> None:
    """Makes a function return its results one by one if it returns one tuple of them."""
    from jaxlib.mlir import ir

    last = main.regions[0].blocks[0].operations[len(main.regions[0].blocks[0].operations) - 1]
    if len(last.operands) == 1 and _is_tuple(last.operands[0].type):
        packed = last.operands[0].owner
        with ir.InsertionPoint(last):
            ir.Operation.create("func.return", operands=list(packed.operands))
        types = [x.type for x in packed.operands]
        last.operation.erase()
        packed.erase()
        new = ir.FunctionType.get(list(_type_of(main).inputs), types)
        main.attributes["function_type"] = ir.TypeAttr.get(new)
        if "res_attrs" in main.attributes:
            del main.attributes["res_attrs"]


def _is_tuple(kind: Any) -> bool:
    from jaxlib.mlir import ir

    if hasattr(ir.TupleType, "isinstance"):  # jaxlib 0.4
        return ir.TupleType.isinstance(kind)
    return isinstance(kind, ir.TupleType)


def _mark_updates(main: Any, hlo: Hlo) -> None:
    """Marks new values of variables as results that may be written over the old values."""
    from jaxlib.mlir import ir

    attributes = [ir.DictAttr.get({}) for _ in _type_of(main).inputs]
    int32 = ir.IntegerType.get_signless(32)
    for output, parameter in enumerate(hlo.updated, start=hlo.num_fetches):
        alias = ir.IntegerAttr.get(int32, output)
        attributes[parameter] = ir.DictAttr.get({"tf.aliasing_output": alias})
    main.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)


# Beyond this size the least recently used entries are deleted; reading an entry uses it.
_MOST_BYTES = 2 << 30


def _checksum(key: str, content: bytes) -> bytes:
    """Returns 32 bytes, by which an entry under another name is found out, too."""
    return hashlib.sha256(key.encode() + content).digest()


def _why_unsafe(status: os.stat_result) -> str:
    """Returns what lets others write a file or folder; "" if nothing does."""
    if not hasattr(os, "geteuid"):  # no POSIX
        return ""
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}"
    if status.st_mode & 0o022:
        return f"can be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def default_cache_dir() -> str | None:
    """Returns where compiled programs are kept unless a session says otherwise.

    Returns:
      The environment variable ``MTF_GRADSYNC_CACHE_DIR``, where it is set (empty: nothing is kept,
      None), otherwise a folder in the user's cache; None for a user without a home.
    """
    given = os.environ.get("MTF_GRADSYNC_CACHE_DIR")
    if given is not None:
        return given or None
    # As the XDG specification says, relative paths count as not set.
    homes = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")
    base = next((home for home in homes if os.path.isabs(home)), None)
    return base and os.path.join(base, "mtf_gradsync", "xla")


class Cache:
    """A folder of entries by key. A folder that cannot be used, or None, keeps nothing.

    What is read is run: so the folder and each entry belong to this user (or root), and nobody else
    may write there. A folder that others can write is not used, with one warning.
    """

    def __init__(self, folder: str | None):
        folder = os.path.expanduser(folder or "")
        # Of a user without a home "~" stays.
        self._folder = Path(folder) if folder and not folder.startswith("~") else None

    def get(self, key: str) -> bytes | None:
        """Returns the content stored under a key, or None."""
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
        """Stores content under a key, for this and other processes."""
        if self._folder is None:
            return
        with contextlib.suppress(OSError):
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if not self._is_safe(self._folder):
                return
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
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
                "Compiled programs are neither kept in %s nor taken from it: it %s, so that they "
                "may be somebody else's. Use chmod go-w, or a folder of your own: "
                "MTF_GRADSYNC_CACHE_DIR.",
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
    """Returns a key, usable as a file's name, of everything that the stored content depends on."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


# To be increased when the same program is lowered, or compiled, in another way.
_LOWERING_VERSION = 4
_COMPILING_VERSION = 2


class CoreModule(NamedTuple):
    """A core's program as the text of a StableHLO module. The other fields are those of `Hlo`."""

    module: str
    num_fetches: int
    updated: tuple[int, ...]
    has_randomness: bool


def lowered(replica: ReplicaProgram, cache: Cache) -> CoreModule:
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
        return CoreModule(**{**fields, "updated": tuple(fields["updated"])})
    hlo = to_hlo(replica)
    made = CoreModule(
        to_stablehlo(hlo, with_names=True), hlo.num_fetches, hlo.updated, hlo.has_randomness
    )
    cache.put(key, json.dumps(made._asdict()).encode())
    return made


def loaded(program: CoreModule, devices: Sequence[Any], cache: Cache) -> LoadedProgram:
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
            combined_for_cpus(module) if devices[0].platform == "cpu" else module, devices
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
