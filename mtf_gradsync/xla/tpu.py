"""Compiles a SIMD program with the real TPU compiler, or runs its HLO on virtual CPU devices.

The one file that knows jax and libtpu. Both are the extra ``tpu`` of the package, and are imported
only in a process of their own, for four reasons: libtpu reads its environment variables once, when
it is loaded; a compiler that dies takes only its own process along; TensorFlow's bridge to XLA
wants eager execution, which a Mesh-TF program has switched off; and the number of virtual CPU
devices of a process cannot change.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple, Sequence

import numpy as np

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.simd.program import Program
from mtf_gradsync.simd.variable_access import VariableAccess
from mtf_gradsync.xla.compiled import CompiledProgram, CoreMemory
from mtf_gradsync.xla.hlo_collectives import find_hlo_collectives
from mtf_gradsync.xla.lowering import Hlo, ReplicaProgram, check_tensorflow, replica_program, to_hlo
from mtf_gradsync.xla.topologies import GENERATIONS, generation_of

# Makes each all-reduce of a large weight update one operation again, so that bytes can be compared.
_UPDATE_NOT_SPLIT = {"xla_jf_auto_cross_replica_sharding": False}

_EXTRA = 'pip install "mtf-gradsync[train,tpu]" "tensorflow>=2.18", in an environment of its own'
_REQUEST, _ANSWER = "request.pickle", "answer.pickle"
_LONGEST_ERROR = 600


class CompilerMissingError(ImportError):
    """The TPU compiler is not installed."""


class CompilerDiedError(RuntimeError):
    """The process that compiles ended without an answer."""


class CpuDevicesRun(NamedTuple):
    """What a program's HLO computed on virtual CPU devices.

    Attributes:
      fetched: for each step, for each fetch: array ``[cores, ...]``, one value per core.
      variables: name -> value after the last step, put together from the cores' slices.
    """

    fetched: list[list[np.ndarray]]
    variables: dict[str, np.ndarray]


def why_no_tpu_compiler() -> str:
    """Why programs cannot be compiled here.

    Returns:
      The reason with what would help, or "" where they can.
    """
    try:
        check_tensorflow()
        _check_installed("jax", "jaxlib", "libtpu")
    except (RuntimeError, ImportError) as error:
        return str(error)
    return ""


def compile_for_tpu(
    program: Program,
    fetches: Sequence[Any] = (),
    topology: str = "v3:2x2",
    save_hlo: str | os.PathLike[str] | None = None,
) -> CompiledProgram:
    """Compiles a program for a TPU that is not there.

    The program is compiled as a TPU runs it: whole, with all its updates. Variables are arguments
    of a core's program, and their new values results that are written over them.

    Args:
      program: what `tpu_program` yielded, with the whole model built.
      fetches: tensors of the program that a step returns besides the updates, such as the loss.
      topology: TPU generation and chips, as in "v3:2x2"; it must have as many cores as the
        program's mesh. (A "v3" chip has two.)
      save_hlo: a folder to write ``before.hlo.txt`` and ``after.hlo.txt`` to, for a closer look.

    Returns:
      The compiler's answer; a program that it refuses is an answer too.

    Raises:
      TensorFlowTooOldError: on TensorFlow before 2.18.
      CompilerMissingError: when jax or libtpu are not installed.
      CompilerDiedError: when the compiler's process crashed.
      UnsupportedProgramError: when an operation or input has no counterpart in HLO.
      ValueError: when there is no such topology, it has another number of cores, or a fetch is no
        tensor of the program.
    """
    generation_of(topology)
    check_tensorflow()
    _check_installed("jax", "jaxlib", "libtpu")
    replica = replica_program(program, fetches)
    answer = _in_own_process(_compile, replica, topology=topology)
    if "bad_topology" in answer:
        raise ValueError(answer["bad_topology"])
    if save_hlo is not None:
        folder = Path(save_hlo)
        folder.mkdir(parents=True, exist_ok=True)
        for stage in ("before", "after"):
            if answer.get(stage):
                (folder / f"{stage}.hlo.txt").write_text(answer[stage])
    memory = answer.get("memory")
    before, after, unsharded = (
        tuple(find_hlo_collectives(answer[stage])) if answer.get(stage) else ()
        for stage in ("before", "after", "after_unsharded")
    )
    return CompiledProgram(
        topology=topology,
        device_kind=answer["device_kind"],
        num_replicas=replica.num_replicas,
        error=answer.get("error", ""),
        before=before,
        after=after,
        after_unsharded=unsharded,
        memory=CoreMemory(*memory) if memory else None,
        seconds=answer.get("seconds", 0.0),
    )


def run_on_cpu_devices(
    program: Program,
    lowering: Any = None,
    fetches: Sequence[Any] = (),
    feeds: Sequence[dict[Any, Any]] = ({},),
) -> CpuDevicesRun:
    """Runs the HLO that the TPU compiler gets, on as many virtual CPU devices as it has cores.

    The emulator (`Program.session`) runs TensorFlow's operations; this runs what TensorFlow's
    bridge made of them, with XLA's own collectives between the devices. Variables begin as their
    initializers say.

    Args:
      program: what `tpu_program` yielded, with the whole model built.
      lowering: as for `Program.session`.
      fetches: tensors of the program.
      feeds: for each step, tensors outside the program -> values.

    Returns:
      What the steps returned, and the variables after the last one.

    Raises:
      TensorFlowTooOldError: on TensorFlow before 2.18.
      CompilerMissingError: when jax is not installed.
      CompilerDiedError: when the other process crashed.
      UnsupportedProgramError: as `compile_for_tpu`, and what `Program.session` refuses.
      RuntimeError: when XLA refuses the program.
    """
    check_tensorflow()
    _check_installed("jax", "jaxlib")
    replica = replica_program(program, fetches)
    cores = range(replica.num_replicas)
    with program.session(lowering) as session:
        inputs = [i for i in replica.inputs if not i.is_variable]
        variables = [i for i in replica.inputs if i.is_variable]
        access = VariableAccess(program.graph)
        start = [[access.read[v.sources[c]] for c in cores] for v in variables]
        given = [[i.sources[c] for c in cores] for i in inputs]
        answer = _in_own_process(
            _run,
            replica,
            variables=session.run(start),
            steps=[session.run(given, feed) for feed in feeds],
        )
        if "error" in answer:
            raise RuntimeError(f"XLA cannot run the program: {answer['error']}")
        # A variable that all cores share has one source, and the same value on every core.
        new = {
            source: value
            for variable, per_core in zip(variables, answer["variables"])
            for source, value in zip(variable.sources, per_core)
        }
        access.set(session.tf_session, new.items())
        return CpuDevicesRun(answer["fetched"], session.variables())


def _check_installed(*modules: str) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise CompilerMissingError(
            f"Compiling for a TPU needs {', '.join(missing)}, which is not installed. Install the "
            f"extra: {_EXTRA}."
        )


# The two processes.


def _in_own_process(task: Any, replica: ReplicaProgram, **arguments: Any) -> dict[str, Any]:
    """Calls a function of this module in a process of its own."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in [*sys.path] if p),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        # jax must not look for a TPU; libtpu must not ask a cloud's metadata server for one, nor
        # wait for another process that has it open.
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={replica.num_replicas}",
    }
    # TensorFlow's protocol buffers do not pickle.
    packed = replica._replace(graph_def=replica.graph_def.SerializeToString())
    with tempfile.TemporaryDirectory(prefix="mtf_gradsync_") as folder:
        with open(os.path.join(folder, _REQUEST), "wb") as file:
            pickle.dump((task.__name__, packed, arguments), file)
        call = f"from mtf_gradsync.xla import tpu; tpu._main({folder!r})"
        done = subprocess.run(
            [sys.executable, "-c", call],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        try:
            with open(os.path.join(folder, _ANSWER), "rb") as file:
                return pickle.load(file)
        except OSError:
            raise CompilerDiedError(
                f"The compiler's process ended with status {done.returncode} and no answer. Its "
                f"last words:\n{done.stdout[-2000:]}"
            ) from None


def _main(folder: str) -> None:
    """What the other process runs."""
    with open(os.path.join(folder, _REQUEST), "rb") as file:
        task, replica, arguments = pickle.load(file)
    replica = replica._replace(graph_def=tf.GraphDef.FromString(replica.graph_def))
    answer = {"_compile": _compile, "_run": _run}[task](replica, **arguments)
    unfinished = os.path.join(folder, _ANSWER + ".unfinished")
    with open(unfinished, "wb") as file:
        pickle.dump(answer, file)
    os.replace(unfinished, os.path.join(folder, _ANSWER))


def _compile(replica: ReplicaProgram, topology: str) -> dict[str, Any]:
    """Compiles a core's program; runs in the other process."""
    from jax.experimental import topologies

    known = ", ".join(g.example for g in GENERATIONS)
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except RuntimeError as error:
        return {
            "bad_topology": f"libtpu does not know the topology {topology!r}: {_short(error)} "
            f"Topologies of 8 cores are {known}."
        }
    if len(devices) != replica.num_replicas:
        return {
            "bad_topology": f"topology {topology!r} has {len(devices)} cores and the program's "
            f"mesh {replica.num_replicas}; they have to agree. Topologies of 8 cores are {known}; "
            "twice the chips along one direction are twice the cores."
        }
    answer: dict[str, Any] = {"device_kind": devices[0].device_kind}
    try:
        hlo = to_hlo(replica)
    except (ValueError, tf.errors.OpError) as error:
        return {**answer, "error": f"TensorFlow's bridge to XLA: {_short(error)}"}
    answer["before"] = hlo.text
    began = time.monotonic()
    try:
        compiled = _compiled(hlo, devices)
    except RuntimeError as error:
        return {**answer, "error": f"the TPU compiler: {_short(error)}"}
    answer["seconds"] = time.monotonic() - began
    answer["after"] = compiled.hlo_modules()[0].to_string()
    stats = compiled.get_compiled_memory_stats()
    answer["memory"] = (
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.alias_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.generated_code_size_in_bytes,
    )
    unsharded = _compiled(hlo, devices, _UPDATE_NOT_SPLIT)
    answer["after_unsharded"] = unsharded.hlo_modules()[0].to_string()
    return answer


def _run(replica: ReplicaProgram, variables: Any, steps: Any) -> dict[str, Any]:
    """Runs a core's program on virtual CPU devices; runs in the other process."""
    import jax

    devices = jax.devices("cpu")[: replica.num_replicas]
    # Values differ from device to device, whatever this sharding is called: it only tells jax that
    # each device holds an array of the full shape.
    sharding = jax.sharding.NamedSharding(
        jax.sharding.Mesh(np.array(devices), ("core",)), jax.sharding.PartitionSpec()
    )

    def put(per_core: Sequence[np.ndarray]) -> Any:
        arrays = [jax.device_put(np.asarray(x), d) for x, d in zip(per_core, devices)]
        return jax.make_array_from_single_device_arrays(arrays[0].shape, sharding, arrays)

    try:
        hlo = to_hlo(replica)
        executable = _compiled(hlo, devices, load=True)
    except (ValueError, RuntimeError, tf.errors.OpError) as error:
        return {"error": _short(error)}
    state = [[np.asarray(x) for x in per_core] for per_core in variables]
    fetched = []
    for inputs in steps:
        arguments = [put(x) for x in [*inputs, *state]]
        results = executable.execute_sharded(arguments).disassemble_into_single_device_arrays()
        per_result = [[np.asarray(x) for x in per_core] for per_core in results]
        fetched.append([np.stack(x) for x in per_result[: len(replica.fetches)]])
        for parameter, value in zip(hlo.updated, per_result[hlo.num_fetches :]):
            state[parameter - len(inputs)] = value
    return {"fetched": fetched, "variables": state}


def _compiled(
    hlo: Hlo, devices: Sequence[Any], options: dict[str, Any] | None = None, load: bool = False
) -> Any:
    """Compiles HLO for devices that exist (load) or are only described.

    jax has no public way in for HLO that it did not make; read on jax 0.10.2.
    """
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir
    from jaxlib import _jax

    count = len(devices)
    compile_options = xla_client.CompileOptions()
    build = compile_options.executable_build_options
    for target in (compile_options, build):
        target.num_replicas, target.num_partitions = count, 1
    ids = np.array([d.id for d in devices]).reshape(count, 1)
    compile_options.device_assignment = xla_client.DeviceAssignment.create(ids)
    if options:
        compile_options.env_option_overrides = list(options.items())
    client = devices[0].client
    compile_ = client.compile_and_load if load else client.compile
    with mlir.make_ir_context():
        module = ir.Module.parse(_jax.mlir.hlo_to_stablehlo(hlo.proto))
        _drop_copies(module)
        _mark_updates(module, hlo)
        return compile_(module, xla_client.DeviceList(tuple(devices)), compile_options)


def _drop_copies(module: Any) -> None:
    """Takes out HLO's ``copy`` of results, which StableHLO does not have and nothing needs."""
    from jax._src.lib.mlir import ir

    copies = []

    def collect(op: Any) -> Any:
        if op.name == "mhlo.copy":
            copies.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(collect)
    for op in copies:
        op.results[0].replace_all_uses_with(op.operands[0])
        op.erase()


def _mark_updates(module: Any, hlo: Hlo) -> None:
    """Says that new values of variables may be written over the old ones.

    HLO says so in its header, which gets lost on the way through StableHLO.
    """
    from jax._src.lib.mlir import ir

    main = next(op for op in module.body.operations if op.name.value == "main")
    attributes = [ir.DictAttr.get({}) for _ in main.type.inputs]
    int32 = ir.IntegerType.get_signless(32)
    for output, parameter in enumerate(hlo.updated, start=hlo.num_fetches):
        alias = ir.IntegerAttr.get(int32, output)
        attributes[parameter] = ir.DictAttr.get({"tf.aliasing_output": alias})
    main.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)


def _short(error: BaseException) -> str:
    """The part of a compiler's message that a user can act on, on one line."""
    text = str(error).split("The op is created at", 1)[0].split("Stack trace", 1)[0]
    text = re.sub(r"\s+", " ", text).strip()
    return text if len(text) <= _LONGEST_ERROR else text[:_LONGEST_ERROR] + "..."
