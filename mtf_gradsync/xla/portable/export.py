"""Writes a program to a folder that runs without TensorFlow and without this package."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Sequence

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.simd.facts import split_input
from mtf_gradsync.simd.program import Program
from mtf_gradsync.simd.session import ReplicaSession
from mtf_gradsync.xla.devices.cache import Cache, default_cache_dir
from mtf_gradsync.xla.devices.executable import lowered
from mtf_gradsync.xla.devices.session import XlaSession
from mtf_gradsync.xla.installed import check_installed
from mtf_gradsync.xla.lowering.replica_program import ReplicaInput, replica_program
from mtf_gradsync.xla.lowering.stand_ins import initial_state
from mtf_gradsync.xla.portable import manifest as entries
from mtf_gradsync.xla.portable.artifact import to_artifact
from mtf_gradsync.xla.portable.host import Host
from mtf_gradsync.xla.runner.files import (
    FORMAT,
    PROGRAM,
    check_free,
    distinct_rows,
    dtype_of,
    key_of,
    write_folder,
)

_HERE = Path(__file__).parent


def export(
    program: Program,
    lowering: mtf.Lowering | Sequence[mtf.Lowering] | Any,
    fetches: Mapping[str, Any] | Sequence[Any],
    folder: str | os.PathLike[str],
    *,
    session: ReplicaSession | None = None,
    checkpoint: str | None = None,
    inputs: Mapping[str, Any] | None = None,
    keep: Mapping[Any, Any] | None = None,
    seed: int | None = None,
    replace: bool = False,
    cache_dir: str | None = "default",
) -> None:
    """Writes a program to a folder that any machine with numpy and jax runs.

    The folder holds the program as StableHLO, the values of its variables, a manifest and a runner:
    ``python FOLDER/run.py --help``. Exporting needs no devices. See ``docs/portable.md``.

    Only the program is exported, not what is outside: a value made outside from placeholders
    or variables (a learning rate from a step counter, say) becomes an input, to be given at each
    step; a value made of constants, or of `keep`, is stored in the folder.

    Args:
      program: the program that `tpu_program` yielded, with the whole model built.
      lowering: see `Program.session`.
      fetches: tensors of the program by the names to fetch them under, or a list of tensors, which
        are called after their operations. All of the program's updates are made in every step;
        operations of the program may be named, too, and have no value.
      folder: the folder to write; nothing is left of it after an error.
      session: takes variables from this session, on CPU replicas or XLA devices. With several
        processes, all have to call this, and the one with the first core writes.
      checkpoint: takes variables from this checkpoint. Without it and session, variables have their
        initial values.
      inputs: names for the program's inputs: name -> tensor that it reads from outside.
      keep: values of tensors outside that are the same in every step, by tensor. Where the program
        reads one of them directly, the folder's value can still be replaced in a step.
      seed: for random operations of the program without a seed; default a random one. The folder
        keeps it: runs of a folder draw the same numbers.
      replace: whether it may take the place of an exported step.
      cache_dir: see `session`.

    Raises:
      XlaMissingError: when jax is not installed.
      UnsupportedProgramError: when XLA cannot run the program.
      StepError: when the folder is there already.
      ValueError: when a fetch is not inside the program, an input is not one of its inputs, or
        both a session and a checkpoint are given.
    """
    check_installed("jax", "jaxlib")
    if session is not None and checkpoint is not None:
        raise ValueError(
            "Give a session or a checkpoint to take variables from, not both; got "
            f"session={session!r} and checkpoint={checkpoint!r}."
        )
    check_free(Path(folder), replace)
    host = Host(program, lowering)
    names = _fetch_names(program, host.facts.cluster, fetches)
    tensors = sorted(set(names.values()))
    replica = replica_program(program, tensors)
    called = entries.input_names(replica.inputs, inputs)
    made = lowered(replica, Cache(default_cache_dir() if cache_dir == "default" else cache_dir))
    artifact = to_artifact(made.module)
    variables = [i for i in replica.inputs if i.is_variable]
    contents = _Contents()
    with host.session(checkpoint) as opened:
        fed = _by_name(program, keep or {})
        for name, given in called.items():
            contents.add_input(name, given, host, opened, fed)
        meshed = entries.mesh_variables(host.lowerings)
        # The program reads this counter, and the host increments it.
        counted = {
            v
            for position, v in enumerate(replica.inputs)
            if set(v.sources) == {host.counter} and position not in made.updated
        }
        held = {source for v in variables if v not in counted for source in v.sources}
        in_slices = {n for v in variables for n in entries.master_names(v, meshed)}
        others = host.others(held | in_slices)
        values = host.values(sorted({*held, *others}), session or opened)
    # numpy's files cannot hold strings without pickle; no program trains them.
    others = [name for name in others if values[name].dtype != object]
    step = 0 if host.counter is None else int(values[host.counter])
    for variable in variables:
        if variable in counted:
            assert host.counter is not None  # it is what counts
            contents.parameters.append(entries.describe_input(host.counter, variable, "step"))
            continue
        per_core = [values[source] for source in variable.sources]
        contents.add(partial(entries.describe_variable, variable, meshed), per_core)
    if made.has_randomness:
        entropy = int.from_bytes(os.urandom(7), "little") if seed is None else seed
        states = [initial_state(core, step, entropy) for core in range(replica.num_replicas)]
        contents.add(entries.describe_random_state, states)
    contents.arrays.update((f"others/{name}", values[name]) for name in others)
    positions = {name: tensors.index(tensor) for name, tensor in names.items()}
    manifest = {
        "format": FORMAT,
        "made_by": {**entries.made_by(), "stablehlo": artifact.version},
        "cores": replica.num_replicas,
        "mesh": ";".join(f"{d.name}:{d.size}" for d in program.mesh_impl.shape.dims),
        "steps": 0,
        "counter": host.counter,
        "global_step": step,
        "fetches": list(names),
        "parameters": contents.parameters,
        "results": entries.describe_results(
            replica, made, contents.parameters, positions, program.graph
        ),
        "others": {name: values[name].dtype.name for name in others},
        "together": artifact.groups,
    }
    files = {PROGRAM: artifact.content, "README.txt": _readme(manifest), **_runner()}

    def write() -> None:
        if not isinstance(session, XlaSession) or session.cores.is_first:
            write_folder(Path(folder), manifest, contents.arrays, files, replace)

    if isinstance(session, XlaSession):
        session.cores.together(write)
    else:
        write()


class _Contents:
    """The manifest's entries of a program's parameters, in its order, and their values."""

    def __init__(self) -> None:
        self.parameters: list[dict[str, Any]] = []
        self.arrays: dict[str, np.ndarray] = {}

    def add_input(
        self,
        name: str,
        given: ReplicaInput,
        host: Host,
        session: tf.Session,
        fed: Mapping[str, Any],
    ) -> None:
        """Adds an input, with its value if that is the same in every step."""
        if all(host.outside.is_fixed(source, fed) for source in given.sources):
            self.parameters.append(entries.describe_input(name, given, "kept"))
            sources = self.parameters[-1]["sources"]
            values = [
                np.asarray(fed[s] if s in fed else session.run(s, fed), dtype_of(given.dtype))
                for s in sources
            ]
            for source, value in zip(sources, values):
                if value.shape != given.shape:
                    raise ValueError(
                        f"The value to keep for {source!r} has shape {list(value.shape)}; the "
                        f"program reads {list(given.shape)}."
                    )
            self.arrays[key_of(self.parameters[-1])] = np.stack(values)
        else:
            counts = all(host.is_counter(source) for source in given.sources)
            self.parameters.append(entries.describe_input(name, given, "step" if counts else None))

    def add(
        self, describe: Callable[[Sequence[int]], dict[str, Any]], per_core: Sequence[np.ndarray]
    ) -> None:
        """Adds a parameter by its value on each core; `describe` takes each core's row."""
        value, rows = distinct_rows(per_core)
        self.parameters.append(describe(rows))
        self.arrays[key_of(self.parameters[-1])] = value


def _fetch_names(
    program: Program, cluster: Mapping[str, str], fetches: Mapping[str, Any] | Sequence[Any]
) -> dict[str, str]:
    """Returns the tensors to fetch, by the fetches' names. The program's operations run anyway."""
    pairs: Iterable[tuple[str | None, Any]] = (
        fetches.items() if isinstance(fetches, Mapping) else ((None, f) for f in fetches)
    )
    found = {}
    for name, fetch in pairs:
        element = program.graph.as_graph_element(fetch)
        if isinstance(element, tf.Operation):
            if element.name not in cluster:
                raise ValueError(
                    f"The operation {element.name!r} stands outside the program and cannot be "
                    "exported. Build it inside simd.tpu_program(...), or remove it from fetches."
                )
            continue
        found[split_input(element.name)[0] if name is None else name] = element.name
    return found


def _by_name(program: Program, values: Mapping[Any, Any]) -> dict[str, Any]:
    graph = program.graph
    return {graph.as_graph_element(k, allow_operation=False).name: v for k, v in values.items()}


def _runner() -> dict[str, bytes]:
    """Returns the files of the runner, by path in the folder."""
    runner = sorted((_HERE.parent / "runner").glob("*.py"))
    files = {"run.py": _HERE / "run.py", **{f"runner/{path.name}": path for path in runner}}
    return {name: path.read_bytes() for name, path in files.items()}


def _readme(manifest: Mapping[str, Any]) -> bytes:
    cores = manifest["cores"]
    inputs = [p for p in manifest["parameters"] if p["kind"] == "input" and p["default"] is None]
    shapes = [
        ["steps", *([max(p["rows"]) + 1] * (max(p["rows"]) > 0)), *p["shape"]] for p in inputs
    ]
    arrays = ", ".join(
        f"{p['name']} {p['dtype']}[{', '.join(map(str, shape))}]"
        for p, shape in zip(inputs, shapes)
    )
    return f"""A training step for {cores} {"core" if cores == 1 else "cores"}, with its variables.

It needs Python, numpy and jax: pip install numpy jax (or "jax[cuda12]", "jax[tpu]").

    python run.py --list                       what it reads and returns
    python run.py --random-inputs --steps 10 --time
    python run.py --inputs batches.npz --save FOLDER
    python run.py --help

batches.npz: {arrays or "not needed"}

sha256sum -c SHA256SUMS checks the files.
""".encode()
