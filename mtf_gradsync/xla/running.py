"""Runs the HLO of a SIMD program on virtual CPU devices."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import numpy as np

from mtf_gradsync._private.jax import run_executable
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.simd.program import Program
from mtf_gradsync.simd.variable_access import VariableAccess
from mtf_gradsync.xla.executable import compiled, short_error
from mtf_gradsync.xla.installed import check_installed
from mtf_gradsync.xla.lowering import check_tensorflow, to_hlo
from mtf_gradsync.xla.own_process import call_in_own_process
from mtf_gradsync.xla.replica_program import ReplicaProgram, replica_program


class CpuDevicesRun(NamedTuple):
    """What a program's HLO computed on virtual CPU devices.

    Attributes:
      fetched: for each step, for each fetch: array ``[cores, ...]``, one value per core.
      variables: name -> value after the last step, put together from the cores' slices.
    """

    fetched: list[list[np.ndarray]]
    variables: dict[str, np.ndarray]


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
    check_installed("jax", "jaxlib")
    replica = replica_program(program, fetches)
    cores = range(replica.num_replicas)
    with program.session(lowering) as session:
        inputs = [i for i in replica.inputs if not i.is_variable]
        variables = [i for i in replica.inputs if i.is_variable]
        access = VariableAccess(program.graph)
        start = [[access.read[v.sources[c]] for c in cores] for v in variables]
        given = [[i.sources[c] for c in cores] for i in inputs]
        answer = call_in_own_process(
            _run,
            replica,
            variables=session.run(start),
            steps=[session.run(given, feed) for feed in feeds],
        )
        if answer.error:
            raise RuntimeError(f"XLA cannot run the program: {answer.error}")
        # A variable that all cores share has one source, and the same value on every core.
        new = {
            source: value
            for variable, per_core in zip(variables, answer.variables)
            for source, value in zip(variable.sources, per_core)
        }
        access.set(session.tf_session, new.items())
        return CpuDevicesRun(list(answer.fetched), session.variables())


class _Answer(NamedTuple):
    """What the devices computed.

    Attributes:
      error: why XLA refused the program; "" where it ran.
      fetched: for each step, for each fetch: array ``[cores, ...]``.
      variables: for each variable, for each core: its value after the last step.
    """

    error: str = ""
    fetched: Sequence[list[np.ndarray]] = ()
    variables: Sequence[list[np.ndarray]] = ()


def _run(replica: ReplicaProgram, variables: Any, steps: Any) -> _Answer:
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
        executable = compiled(hlo, devices, load=True)
    except (ValueError, RuntimeError, tf.errors.OpError) as error:
        return _Answer(short_error(error))
    state = [[np.asarray(x) for x in per_core] for per_core in variables]
    fetched = []
    for inputs in steps:
        results = run_executable(executable, [put(x) for x in [*inputs, *state]])
        per_result = [[np.asarray(x) for x in per_core] for per_core in results]
        fetched.append([np.stack(x) for x in per_result[: len(replica.fetches)]])
        for parameter, value in zip(hlo.updated, per_result[hlo.num_fetches :]):
            state[parameter - len(inputs)] = value
    return _Answer(fetched=fetched, variables=state)
