"""Compiles a SIMD program with the real TPU compiler, for a TPU that is not there."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Sequence

from mtf_gradsync.simd.errors import UnsupportedProgramError
from mtf_gradsync.simd.program import Program
from mtf_gradsync.xla.installed import check_installed
from mtf_gradsync.xla.lowering.bridge import to_hlo
from mtf_gradsync.xla.lowering.replica_program import replica_program
from mtf_gradsync.xla.lowering.stablehlo import to_stablehlo
from mtf_gradsync.xla.topology.collectives import find_hlo_collectives
from mtf_gradsync.xla.topology.compiled import CompiledProgram, CoreMemory
from mtf_gradsync.xla.topology.estimate import read_estimate, with_conditions
from mtf_gradsync.xla.topology.own_process import ask
from mtf_gradsync.xla.topology.topologies import GENERATIONS, generation_of

_LONGEST_ERROR = 600
_STAGES = ("before", "after", "after_unsharded")
# Estimate -> the name of its compiled program, where that is another.
_STAGE_OF = {"step": "after"}


def compile_for_tpu(
    program: Program,
    fetches: Sequence[Any] = (),
    topology: str = "v3:2x2",
    save_hlo: str | os.PathLike[str] | None = None,
    bare: Program | None = None,
    update_not_split: bool = False,
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
      bare: the same model's program with the bare optimizer, to have its estimate beside.
      update_not_split: whether to compile it a second time, without splitting the weight update
        over the cores, so that the bytes of collectives can be compared.

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
    module, refused = None, ""
    try:
        module = to_stablehlo(to_hlo(replica))
    except UnsupportedProgramError as error:
        refused = str(error)
    others = _others(module, bare) if module is not None else {}
    with tempfile.TemporaryDirectory(prefix="mtf_gradsync_") as folder:
        answer = ask(folder, module, topology, replica.num_replicas, others, update_not_split)
        _check_topology(topology, answer, replica.num_replicas)
        if "error" in answer:
            refused = f"the TPU compiler: {_short(answer['error'])}"
        found = {stage: Path(folder) / f"{stage}.hlo.pb" for stage in _STAGES}
        before, after, unsharded = (
            tuple(find_hlo_collectives(path.read_bytes())) if path.exists() else ()
            for path in found.values()
        )
        estimates = {
            name: read_estimate(
                numbers, (Path(folder) / f"{_STAGE_OF.get(name, name)}.hlo.pb").read_bytes()
            )
            for name, numbers in answer.get("cost", {}).items()
        }
        if save_hlo is not None:
            Path(save_hlo).mkdir(parents=True, exist_ok=True)
            for stage in ("before", "after"):
                text = Path(folder) / f"{stage}.hlo.txt"
                if text.exists():
                    shutil.copy(text, save_hlo)
    return CompiledProgram(
        topology=topology,
        device_kind=answer["device_kind"],
        num_replicas=replica.num_replicas,
        error=refused,
        before=before,
        after=after,
        after_unsharded=unsharded,
        memory=CoreMemory(*answer["memory"]) if "memory" in answer else None,
        seconds=answer.get("seconds", 0.0),
        estimates=estimates,
    )


def _others(module: str, bare: Program | None) -> dict[str, str]:
    """Programs whose costs say more of a program's cost, by the name of the estimate."""
    made = {f"conditions_{str(v).lower()}": with_conditions(module, v) for v in (True, False)}
    if bare is not None:
        made["bare"] = to_stablehlo(to_hlo(replica_program(bare)))
    return {name: text for name, text in made.items() if text is not None}


def _check_topology(topology: str, answer: dict[str, Any], num_cores: int) -> None:
    known = ", ".join(g.example for g in GENERATIONS)
    if "no_topology" in answer:
        raise ValueError(
            f"libtpu does not know the topology {topology!r}: {_short(answer['no_topology'])} "
            f"Topologies of 8 cores are {known}."
        )
    if answer["num_cores"] != num_cores:
        raise ValueError(
            f"topology {topology!r} has {answer['num_cores']} cores and the program's mesh "
            f"{num_cores}; they have to agree. Topologies of 8 cores are {known}; twice "
            "the chips along one direction are twice the cores."
        )


def _short(text: str) -> str:
    """The part of a compiler's message that a user can act on, on one line."""
    text = " ".join(text.split("Stack trace", 1)[0].split())
    return text if len(text) <= _LONGEST_ERROR else text[:_LONGEST_ERROR] + "..."
