"""Compiles a SIMD program with the real TPU compiler, for a TPU that is not there."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NamedTuple, Sequence

from mtf_gradsync._private.jax import (
    MemoryBytes,
    compile_stablehlo,
    compiled_hlo,
    hlo_text,
    memory_bytes,
    stablehlo_to_hlo,
)
from mtf_gradsync.simd.program import Program
from mtf_gradsync.xla.installed import check_installed
from mtf_gradsync.xla.lowering.bridge import to_hlo
from mtf_gradsync.xla.lowering.replica_program import ReplicaProgram, replica_program
from mtf_gradsync.xla.lowering.stablehlo import to_stablehlo
from mtf_gradsync.xla.topology.collectives import find_hlo_collectives
from mtf_gradsync.xla.topology.compiled import CompiledProgram, CoreMemory
from mtf_gradsync.xla.topology.own_process import call_in_own_process
from mtf_gradsync.xla.topology.topologies import GENERATIONS, generation_of

_LONGEST_ERROR = 600

# Makes each all-reduce of a large weight update one operation again, so that bytes can be compared.
_UPDATE_NOT_SPLIT = {"xla_jf_auto_cross_replica_sharding": False}


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
      XlaMissingError: when jax or libtpu are not installed.
      CompilerDiedError: when the compiler's process crashed.
      UnsupportedProgramError: when an operation or input has no counterpart in HLO.
      ValueError: when there is no such topology, it has another number of cores, or a fetch is no
        tensor of the program.
    """
    generation_of(topology)
    check_installed("jax", "jaxlib", "libtpu")
    replica = replica_program(program, fetches)
    answer = call_in_own_process(
        _compile, replica, topology=topology, with_texts=save_hlo is not None
    )
    if answer.no_topology:
        raise ValueError(answer.no_topology)
    if save_hlo is not None:
        folder = Path(save_hlo)
        folder.mkdir(parents=True, exist_ok=True)
        for stage, text in (("before", answer.text_before), ("after", answer.text_after)):
            if text:
                (folder / f"{stage}.hlo.txt").write_text(text)
    before, after, unsharded = (
        tuple(find_hlo_collectives(module)) if module else ()
        for module in (answer.before, answer.after, answer.after_unsharded)
    )
    return CompiledProgram(
        topology=topology,
        device_kind=answer.device_kind,
        num_replicas=replica.num_replicas,
        error=answer.error,
        before=before,
        after=after,
        after_unsharded=unsharded,
        memory=CoreMemory(*answer.memory) if answer.memory else None,
        seconds=answer.seconds,
    )


class _Answer(NamedTuple):
    """What the TPU compiler said to a core's program.

    Attributes:
      no_topology: why it cannot be compiled for that topology; "" where it can, and nothing else is
        known otherwise.
      device_kind: what libtpu calls a core, as in "TPU v3".
      error: why the program was refused, in short; "" where it was taken.
      before: the program as TensorFlow hands it over, as a serialized ``HloModuleProto``; empty
        where TensorFlow itself refused it.
      after: the compiled program; empty where it was refused.
      after_unsharded: the same, compiled without splitting the weight update over the cores.
      text_before: `before` as XLA prints it, where that was asked for.
      text_after: `after` as XLA prints it, where that was asked for.
      memory: what it takes on one core; None where it was refused.
      seconds: how long the compiler took.
    """

    no_topology: str = ""
    device_kind: str = ""
    error: str = ""
    before: bytes = b""
    after: bytes = b""
    after_unsharded: bytes = b""
    text_before: str = ""
    text_after: str = ""
    memory: MemoryBytes | None = None
    seconds: float = 0.0


def short_error(error: BaseException) -> str:
    """The part of a compiler's message that a user can act on, on one line.

    Args:
      error: what the compiler raised.

    Returns:
      The text; a long one ends in "...".
    """
    text = " ".join(str(error).split("Stack trace", 1)[0].split())
    return text if len(text) <= _LONGEST_ERROR else text[:_LONGEST_ERROR] + "..."


def _compile(replica: ReplicaProgram, topology: str, with_texts: bool) -> _Answer:
    """Compiles a core's program; runs in the other process."""
    from jax.experimental import topologies

    known = ", ".join(g.example for g in GENERATIONS)
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except RuntimeError as error:
        return _Answer(
            f"libtpu does not know the topology {topology!r}: {short_error(error)} Topologies of 8 "
            f"cores are {known}."
        )
    if len(devices) != replica.num_replicas:
        return _Answer(
            f"topology {topology!r} has {len(devices)} cores and the program's mesh "
            f"{replica.num_replicas}; they have to agree. Topologies of 8 cores are {known}; twice "
            "the chips along one direction are twice the cores."
        )
    answer = _Answer(device_kind=devices[0].device_kind)
    try:
        module = to_stablehlo(to_hlo(replica))
    except ValueError as error:
        return answer._replace(error=short_error(error))
    before = stablehlo_to_hlo(module)
    text = hlo_text(before) if with_texts else ""
    answer = answer._replace(before=before, text_before=text)
    began = time.monotonic()
    try:
        executable = compile_stablehlo(module, devices, {}, load=False)
    except RuntimeError as error:
        return answer._replace(error=f"the TPU compiler: {short_error(error)}")
    seconds = time.monotonic() - began
    after = compiled_hlo(executable)
    unsharded = compile_stablehlo(module, devices, _UPDATE_NOT_SPLIT, load=False)
    return answer._replace(
        after=after,
        after_unsharded=compiled_hlo(unsharded),
        text_after=hlo_text(after) if with_texts else "",
        memory=memory_bytes(executable),
        seconds=seconds,
    )
