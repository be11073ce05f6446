"""Writes a program to a folder, to run it without TensorFlow and without this package."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from mtf_gradsync.extension import counted, mtf, tf
from mtf_gradsync.runtimes._common import mesh_text
from mtf_gradsync.runtimes.checkpoints import write_changed
from mtf_gradsync.runtimes.processes import meeting, members
from mtf_gradsync.runtimes.simd.graph_facts import split_input
from mtf_gradsync.runtimes.simd.program import Program
from mtf_gradsync.runtimes.simd.replica_session import ReplicaSession, VariableAccess, lowerings_in
from mtf_gradsync.runtimes.xla import manifest as entries
from mtf_gradsync.runtimes.xla.bridge import initial_state
from mtf_gradsync.runtimes.xla.executable import Cache, default_cache_dir, lowered
from mtf_gradsync.runtimes.xla.host_graph import HostGraph
from mtf_gradsync.runtimes.xla.installed import check_installed
from mtf_gradsync.runtimes.xla.replica_program import ReplicaInput, replica_program
from mtf_gradsync.runtimes.xla.runner.files import (
    FORMAT,
    PROGRAM,
    VALUES,
    array_name,
    assemble,
    check_free,
    distinct_rows,
    dtype_of,
    from_savable,
    read_manifest,
    write_folder,
)
from mtf_gradsync.runtimes.xla.xla_session import XlaSession, host_config


class _Host:
    """The part of a user's graph outside the exported program; TensorFlow runs this part.

    The attribute `graph` is a graph that has the operations outside the program, and all variables.
    The attribute `counter` is the name of the variable that counts steps (TensorFlow's global
    step); None if the user's graph has no such variable.
    """

    def __init__(self, program: Program, lowering: Any):
        self.lowerings = lowerings_in(lowering)
        self.outside = HostGraph(program, self.lowerings)
        self._ops = self.outside.ops
        self.graph = self.outside.graph
        self._access = VariableAccess(self.graph)
        counter = tf.train.get_global_step(program.graph)
        is_known = counter is not None and counter.op.name in self._access.read
        self.counter = counter.op.name if is_known else None

    @contextlib.contextmanager
    def session(self, checkpoint: str | None = None) -> Iterator[tf.Session]:
        """Opens a TensorFlow session of `graph` whose masters and slices have values.

        If `checkpoint` is the path of a checkpoint, the variables have the values that are in the
        checkpoint. If `checkpoint` is None, the variables have their initial values.
        """
        with tf.Session(graph=self.graph, config=host_config()) as session:
            session.run(self._ops.initialize)
            if checkpoint is not None:
                self._ops.restore(session, checkpoint)
            session.run(self._ops.to_slices)
            yield session

    def values(
        self, names: Iterable[str], session: tf.Session | ReplicaSession
    ) -> dict[str, np.ndarray]:
        """Returns the values that variables have in a session, by the variables' names.

        `names` are the names of the ``VarHandleOp`` operations of the variables to read. `session`
        is a session that the method `session` has opened, or the user's session on the program's
        cores. Raises a ValueError if the session lacks one of the variables.
        """
        access = self._access
        if isinstance(session, ReplicaSession):
            session.variables()  # brings what is on the devices to TensorFlow
            session = session.tf_session
            access = VariableAccess(session.graph)
        unknown = sorted(set(names) - set(access.read))
        if unknown:
            raise ValueError(
                f"The session lacks {counted(unknown, 'variable')}; give a session of this program."
            )
        return session.run({name: access.read[name] for name in names})

    def variables_except(self, inside: Collection[str]) -> list[str]:
        """Returns the names of the user's global variables except those in `inside`, sorted.

        `inside` has the names of the variables that the program has, as slices or as masters.
        """
        return sorted(set(self._ops.masters) & set(self._access.read) - set(inside))

    def is_counter(self, name: str) -> bool:
        """Returns whether a tensor is the value that the step counter has before the step.

        The value may be converted to another dtype. `name` is the tensor's name in `graph`.
        """
        if self.counter is None or self.outside.touched([name]).written:
            return False
        op = self.graph.get_operation_by_name(split_input(name)[0])
        while op.type in ("Identity", "ReadVariableOp", "Cast"):
            op = op.inputs[0].op
        return op.name == self.counter and not self.outside.is_after(name)


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
    """Writes a program to a folder, so that any machine with numpy and jax can run it.

    The folder holds the program as StableHLO, the values of the program's variables, a manifest and
    a runner. The runner is a script; ``python FOLDER/run.py --help`` shows how to use it. No
    devices are needed to export a program. See ``docs/portable.md``.

    Only the program is exported, not the operations outside the program. The program may read
    values that are computed outside from placeholders or variables, such as a learning rate from a
    step counter. Such a value becomes an input of the exported program: users have to give it at
    each step. Values that are computed outside from constants only, or from the values in `keep`,
    are stored in the folder.

    Args:
      program: the program that `tpu_program` yielded, with the whole model built.
      lowering: the program's lowering, a list of lowerings, or the EstimatorSpec that a model_fn
        returned. None for a program without mesh variables.
      fetches: a dict from names to tensors of the program; or a list of tensors of the program,
        which get the names of their operations. Operations of the program may be in the list, too;
        they return no value. In any case every step makes all of the program's updates.
      folder: the folder to write. If there is an error, no part of a new folder is left.
      session: a session, on CPU replicas or XLA devices, from which to take the variables' values.
        If the session has several processes, all of them have to call `export`, and the process
        with the first core writes the folder.
      checkpoint: a checkpoint from which to take the variables' values. Without session and
        checkpoint, variables have their initial values.
      inputs: names for the program's inputs, as a dict from names to tensors that the program reads
        from outside.
      keep: a dict from tensors outside the program to values. Each of these tensors has its value
        in `keep` in every step. If the program reads such a tensor directly, users of the folder
        may still give another value at a step.
      seed: the seed for random operations of the program that have no seed; default a random
        number. The folder stores the seed, so that all runs of the folder have the same random
        numbers.
      replace: whether the new folder may replace an exported step in `folder`.
      cache_dir: the folder in which the program's StableHLO is cached for later exports; default
        `default_cache_dir`. None for no cache.

    Raises:
      XlaMissingError: when jax is not installed.
      UnsupportedProgramError: when XLA cannot run the program.
      StepError: when something that may not be replaced is at the path `folder` already.
      ValueError: when a fetch is not inside the program, when a tensor in `inputs` is no input of
        the program, or when both a session and a checkpoint are given.
    """
    check_installed("jax", "jaxlib")
    from mtf_gradsync.runtimes.xla.stablehlo import to_artifact

    if session is not None and checkpoint is not None:
        raise ValueError(
            "Give a session or a checkpoint to take variables from, not both; got "
            f"session={session!r} and checkpoint={checkpoint!r}."
        )
    check_free(Path(folder), replace)
    host = _Host(program, lowering)
    names = _fetch_names(program, host.outside.facts.cluster, fetches)
    tensors = sorted(set(names.values()))
    replica = replica_program(program, tensors)
    called = entries.input_names(replica.tensors, inputs)
    made = lowered(replica, Cache(default_cache_dir() if cache_dir == "default" else cache_dir))
    artifact = to_artifact(made.module)
    variables = replica.variables
    with host.session(checkpoint) as opened:
        fed = {
            program.graph.as_graph_element(tensor, allow_operation=False).name: value
            for tensor, value in (keep or {}).items()
        }
        parameters, arrays = _describe_inputs(called, host, opened, fed)
        meshed = entries.mesh_variables(host.lowerings)
        # The program reads this counter, and the host increments it.
        counted = {
            v
            for position, v in enumerate(replica.inputs)
            if set(v.sources) == {host.counter} and position not in made.updated
        }
        held = {source for v in variables if v not in counted for source in v.sources}
        in_slices = {n for v in variables for n in entries.master_names(v, meshed)}
        others = host.variables_except(held | in_slices)
        values = host.values(sorted({*held, *others}), session or opened)
    # numpy's files cannot hold strings without pickle; no program trains them.
    others = [name for name in others if values[name].dtype != object]
    step = 0 if host.counter is None else int(values[host.counter])
    for variable in variables:
        if variable in counted:
            assert host.counter is not None  # it is what counts
            parameters.append(entries.describe_input(host.counter, variable, "step"))
            continue
        stored, rows = distinct_rows([values[source] for source in variable.sources])
        parameters.append(entries.describe_variable(variable, meshed, rows))
        arrays[array_name(parameters[-1])] = stored
    if made.has_randomness:
        entropy = int.from_bytes(os.urandom(7), "little") if seed is None else seed
        states = [initial_state(core, step, entropy) for core in range(replica.num_replicas)]
        stored, rows = distinct_rows(states)
        parameters.append(entries.describe_random_state(rows))
        arrays[array_name(parameters[-1])] = stored
    arrays.update((f"others/{name}", values[name]) for name in others)
    positions = {name: tensors.index(tensor) for name, tensor in names.items()}
    manifest = {
        "format": FORMAT,
        "made_by": {**entries.made_by(), "stablehlo": artifact.version},
        "cores": replica.num_replicas,
        "mesh": mesh_text(program.mesh_impl.shape),
        "steps": 0,
        "counter": host.counter,
        "global_step": step,
        "fetches": list(names),
        "parameters": parameters,
        "results": entries.describe_results(replica, made, parameters, positions, program.graph),
        "others": {name: values[name].dtype.name for name in others},
        "together": artifact.groups,
    }
    files = {PROGRAM: artifact.content, "README.txt": _readme(manifest), **_runner()}

    def write() -> None:
        if not isinstance(session, XlaSession) or session.cores.is_first:
            write_folder(Path(folder), manifest, arrays, files, replace)

    if isinstance(session, XlaSession):
        session.cores.call_on_all_processes(write)
    else:
        write()


def _describe_inputs(
    inputs: Mapping[str, ReplicaInput], host: _Host, session: tf.Session, fed: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Returns the manifest's entries for a program's inputs, and the values that are stored.

    Args:
      inputs: the inputs of the program, by their names in the manifest.
      host: the part of the graph that computes the inputs.
      session: a session of `host`, in which values that are the same in every step are computed.
      fed: the values of the tensors that the user asked to keep in every step, by name.

    Returns:
      Two values: the list of the entries, and a dict from names to the arrays with the values.
    """
    parameters, arrays = [], {}
    for name, given in inputs.items():
        if not all(host.outside.is_fixed(source, fed) for source in given.sources):
            counts = all(host.is_counter(source) for source in given.sources)
            parameters.append(entries.describe_input(name, given, "step" if counts else None))
            continue
        entry = entries.describe_input(name, given, "kept")
        values = [
            np.asarray(fed[s] if s in fed else session.run(s, fed), dtype_of(given.dtype))
            for s in entry["sources"]
        ]
        for source, value in zip(entry["sources"], values):
            if value.shape != given.shape:
                raise ValueError(
                    f"The value to keep for {source!r} has shape {list(value.shape)}; the program "
                    f"reads {list(given.shape)}."
                )
        parameters.append(entry)
        arrays[array_name(entry)] = np.stack(values)
    return parameters, arrays


def _fetch_names(
    program: Program, cluster: Mapping[str, str], fetches: Mapping[str, Any] | Sequence[Any]
) -> dict[str, str]:
    """Returns a dict from the name of each fetch to the name of its tensor.

    `fetches` is a dict from names to tensors of `program`, or a list of tensors and operations. A
    tensor in a list has the name of its operation. Operations are left out of the result, because
    an exported step runs all operations of the program anyway.

    `cluster` maps the names of operations inside programs to the names of their programs. Raises a
    ValueError if an operation in `fetches` is outside all programs.
    """
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


_MEETING = (meeting.__file__, members.__file__)


def _runner() -> dict[str, bytes]:
    """Returns the Python files that run an exported step, by their paths in the step's folder."""
    modules = [*sorted((_HERE / "runner").glob("*.py")), *map(Path, _MEETING)]
    paths = [_HERE / "run.py", *modules]
    files = {path.name if path == paths[0] else f"runner/{path.name}": path for path in paths}
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


def to_checkpoint(folder: str | os.PathLike[str], path: str | os.PathLike[str]) -> str:
    """Writes the values of an exported step as a checkpoint, without a model.

    Args:
      folder: a folder that `export` or its runner wrote.
      path: prefix of the checkpoint's files.

    Returns:
      The path to give to ``restore``. Programs with the same variables can read the checkpoint, on
      another mesh, on another runtime or without a mesh. The value of a step counter outside the
      program (``tf.train.get_global_step``) includes the steps that the runner made.

    Raises:
      StepError: when a file is missing or damaged.
    """
    manifest = read_manifest(Path(folder))
    found: dict[str, np.ndarray] = {}
    with np.load(Path(folder) / VALUES, allow_pickle=False) as file:
        for name, dtype in manifest["others"].items():
            found[name] = from_savable(file[f"others/{name}"], dtype)
        for p in manifest["parameters"]:
            if p["kind"] == "variable":
                stored = from_savable(file[array_name(p)], p["dtype"])
                dtype = dtype_of(p["whole"]["dtype"] if p["whole"] else p["dtype"])
                for name, value in assemble(p, [stored[row] for row in p["rows"]]).items():
                    found[name] = value.astype(dtype)
    counter = manifest["counter"]
    if counter in manifest["others"]:
        found[counter] = np.asarray(found[counter] + manifest["steps"], found[counter].dtype)
    write_changed(None, os.fspath(path), found)
    return os.fspath(path)
