"""Compiles a SIMD program with the real TPU compiler, on a machine without a TPU."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Callable, Mapping, NamedTuple, Sequence

from mtf_gradsync.runtimes.simd.graph_facts import UnsupportedProgramError
from mtf_gradsync.runtimes.simd.program import Program
from mtf_gradsync.runtimes.xla.bridge import to_hlo
from mtf_gradsync.runtimes.xla.hlo_collectives import find_hlo_collectives
from mtf_gradsync.runtimes.xla.installed import check_installed
from mtf_gradsync.runtimes.xla.replica_program import replica_program
from mtf_gradsync.runtimes.xla.topology.chips import GENERATIONS
from mtf_gradsync.runtimes.xla.topology.compiled import CompiledProgram, CoreMemory
from mtf_gradsync.runtimes.xla.topology.compiler_process import compile_in_process
from mtf_gradsync.runtimes.xla.topology.estimate import (
    CostEstimate,
    OneMoreIteration,
    read_estimate,
    with_conditions,
    with_one_more_iteration,
)
from mtf_gradsync.runtimes.xla.topology.slices import slice_of

_LONGEST_ERROR = 600
_EXAMPLES = ", ".join(g.example for g in GENERATIONS)
_STAGES = ("before", "after", "after_unsharded", "conditions_true", "conditions_false")
# A conditional in the text of a program.
_IF = '"stablehlo.if"('


def compile_for_tpu(
    program: Program,
    fetches: Sequence[Any] = (),
    topology: str = "v3:2x2",
    save_hlo: str | os.PathLike[str] | None = None,
    bare: Program | None = None,
    update_not_split: bool = False,
    bare_fetches: Sequence[Any] = (),
) -> CompiledProgram:
    """Compiles a program for a TPU, to find whether it is accepted, its collectives and its memory.

    No TPU is needed. The program is compiled as a TPU runs it, with all its updates. Variables are
    arguments of a core's program. Their new values are results, which are written over these
    arguments.

    Args:
      program: what `tpu_program` yielded, with the whole model built.
      fetches: tensors of the program that a step returns, such as the loss.
      topology: TPU generation and chips, as in "v3:2x2", or Google Cloud's name of a TPU slice, as
        in "v4-8". It must have as many cores as the program's mesh. A "v3" chip has two cores. A
        "v4" chip counts as one core, as in the runtimes of TensorFlow and JAX; with "/two_cores"
        ("v4:2x2x1/two_cores") it counts as two cores.
      save_hlo: a folder to write ``before.hlo.txt`` and ``after.hlo.txt`` to: the program before
        and after the compiler's optimization. None for no files.
      bare: the program of the same model with the bare optimizer, for comparison. The answer has an
        estimate of this program, too, under the name "bare".
      update_not_split: whether to compile a second time, without splitting the weight update over
        the cores, so that the bytes of collectives can be compared.
      bare_fetches: the tensors that a step of `bare` returns, such as its loss. Give those that
        correspond to `fetches`: a step that returns fewer tensors is a little cheaper.

    Returns:
      The compiler's answer, also if the compiler refuses the program.

    Raises:
      XlaMissingError: when jax or libtpu are not installed.
      CompilerDiedError: when the compiler's process crashed.
      UnsupportedProgramError: when an operation or input has no counterpart in HLO.
      ValueError: when the topology does not exist, when its number of cores is not that of the
        program's mesh or of `bare`, or when a fetch is no tensor of its program.
    """
    slice_of(topology)
    check_installed("jax", "jaxlib", "libtpu")
    if bare is not None and bare.num_replicas != program.num_replicas:
        raise ValueError(
            f"The bare program has {bare.num_replicas} cores and the program {program.num_replicas}"
            ". Build both on the same mesh: their estimates are compared core by core."
        )
    lowered = lower(program, fetches)
    bare_module, refused = (None, "") if bare is None else _lower_bare(bare, bare_fetches)
    made = compile_lowered(lowered, topology, save_hlo, bare_module, update_not_split)
    if refused:
        made.not_estimated["bare"] = _short(refused)
    return dataclasses.replace(
        made, bare_lacks_fetches=bare is not None and len(bare_fetches) < len(fetches)
    )


class LoweredProgram(NamedTuple):
    """A core's program for the TPU compiler, or why TensorFlow cannot turn the program into HLO."""

    num_replicas: int
    module: str | None  # StableHLO text; None if TensorFlow refused the program
    refused: str = ""


def lower(program: Program, fetches: Sequence[Any] = ()) -> LoweredProgram:
    """Returns a core's program as StableHLO, for `compile_lowered`; needs no TPU compiler.

    `fetches` are the tensors of the program that a step returns. If TensorFlow refuses to turn an
    operation into HLO, the result has the reason in place of a program.
    """
    from mtf_gradsync.runtimes.xla.stablehlo import to_stablehlo

    replica = replica_program(program, fetches)
    try:
        return LoweredProgram(replica.num_replicas, to_stablehlo(to_hlo(replica)))
    except UnsupportedProgramError as error:
        return LoweredProgram(replica.num_replicas, None, str(error))


def compile_lowered(
    lowered: LoweredProgram,
    topology: str,
    save_hlo: str | os.PathLike[str] | None = None,
    bare: str | None = None,
    update_not_split: bool = False,
    begun: Callable[[subprocess.Popen[str]], None] = lambda process: None,
    by_branches: bool = False,
) -> CompiledProgram:
    """Returns the TPU compiler's answer for a program that `lower` made.

    To estimate what an iteration of a loop costs, each program is compiled once more for each of
    its loops.

    Args:
      lowered: the program.
      topology: TPU generation and chips, as in "v3:2x2", or Google Cloud's name of a TPU slice, as
        in "v4-8".
      save_hlo: a folder to write ``before.hlo.txt`` and ``after.hlo.txt`` to; None for no files.
      bare: the StableHLO of the program with the bare optimizer, to be estimated, too.
      update_not_split: whether to compile the program a second time, without splitting its update
        over the cores.
      begun: a function that is called once, with the compiler's process, right after its start.
      by_branches: whether a program with a single conditional is compiled once and not three times
        (as it is, with the condition true, and with the condition false). The estimates for a true
        and a false condition then add up what the branches of the one compiled program do.
    """
    num_replicas, program, refused = lowered
    by_branches = by_branches and (program or "").count(_IF) == 1
    others = {} if by_branches or program is None else _without_conditionals(program)
    if bare is not None:
        # With all conditions true, like the step that it is compared with.
        others["bare"] = with_conditions(bare, True) or bare
    estimated = {**({} if program is None else {"step": program}), **others}
    loops = {name: with_one_more_iteration(module) for name, module in estimated.items()}
    with_iterations = {
        f"{name}.loop_{i}": one.module
        for name, (found, _) in loops.items()
        for i, one in enumerate(found)
    }
    with tempfile.TemporaryDirectory(prefix="mtf_gradsync_") as folder:
        every = {**others, **with_iterations}
        answer = compile_in_process(
            folder, program, topology, num_replicas, every, update_not_split, begun
        )
        _check_topology(topology, answer, num_replicas)
        paths = Path(folder).glob("*.hlo.pb")
        hlo = {path.name[: -len(".hlo.pb")]: path.read_bytes() for path in paths}
        if save_hlo is not None:
            Path(save_hlo).mkdir(parents=True, exist_ok=True)
            for stage in ("before", "after"):
                text = Path(folder) / f"{stage}.hlo.txt"
                # A file of an earlier program must not be taken for this program's.
                (Path(save_hlo) / text.name).unlink(missing_ok=True)
                if text.exists():
                    shutil.copy(text, save_hlo)
    if "error" in answer:
        refused = f"the TPU compiler: {_short(answer['error'])}"
    before, after, unsharded, of_update, of_skipped_step = (
        tuple(find_hlo_collectives(hlo[stage])) if stage in hlo else () for stage in _STAGES
    )
    costs, rates = answer.get("cost", {}), slice_of(topology).rates
    read = {
        name: read_estimate(numbers, hlo["after" if name == "step" else name], rates)
        for name, numbers in costs.items()
    }
    of_branches: dict[str, CostEstimate] = {}
    if by_branches and read:
        for name, value in (("conditions_true", True), ("conditions_false", False)):
            of_branches[name] = read_estimate(costs["step"], hlo["after"], rates, value)
        of_update, of_skipped_step = (
            tuple(one for one in after if not any(other in x for x in one.inside))
            for other in ("branch false ", "branch true ")
        )
    estimates = {name: _with_loops(name, read, *loops[name]) for name in read if name in loops}
    estimates.update(of_branches)
    bare_memory = answer.get("memory_of", {}).get("bare")
    return CompiledProgram(
        topology=topology,
        device_kind=answer["device_kind"],
        num_replicas=num_replicas,
        error=refused,
        before=before,
        after=after,
        after_unsharded=unsharded,
        memory=CoreMemory(**answer["memory"]) if "memory" in answer else None,
        seconds=answer.get("seconds", 0.0),
        estimates=estimates,
        bare_memory=CoreMemory(**bare_memory) if bare_memory else None,
        of_update=of_update or after,
        of_skipped_step=of_skipped_step,
        not_estimated={
            name: _short(said)
            for name, said in answer.get("not_estimated", {}).items()
            if name in loops
        },
    )


def _with_loops(
    name: str, read: Mapping[str, CostEstimate], loops: Sequence[OneMoreIteration], unknown: int
) -> CostEstimate:
    """Returns the estimate of a program in which every iteration of its loops counts.

    Args:
      name: the program's name in `read`.
      read: estimates by name: of the program, in which one iteration of each loop counts, and of
        each program in `loops`.
      loops: for each loop, the program with one more iteration of this loop.
      unknown: the number of loops of which only one iteration counts, because their number of
        iterations is not known.
    """
    once = total = read[name]
    for i, one in enumerate(loops):
        more = read.get(f"{name}.loop_{i}")
        if more is None:  # it was refused; it may need more memory than the program
            unknown += 1
        else:
            total = total.plus(one.times, once, more)
    return dataclasses.replace(total, loops_counted_once=unknown)


def places_of(topology: str) -> tuple[tuple[int, ...], ...]:
    """Returns each core's place in a topology: the coordinates of its chip, its number on the chip.

    The cores are in the order of a program's cores. `topology` is the topology's name, as in
    "v3:2x2". Raises a ValueError if libtpu does not know the topology, and an XlaMissingError if
    libtpu is not installed.
    """
    slice_of(topology)
    check_installed("jax", "jaxlib", "libtpu")
    with tempfile.TemporaryDirectory(prefix="mtf_gradsync_") as folder:
        answer = compile_in_process(folder, None, topology, 0)
    _check_known(topology, answer)
    return tuple(tuple(place) for place in answer["places"])


def _lower_bare(bare: Program, fetches: Sequence[Any]) -> tuple[str | None, str]:
    """Lowers the program with the bare optimizer; returns its StableHLO, and "".

    If TensorFlow refuses the program, the function returns None in place of the StableHLO, and the
    reason of the refusal in place of "". `fetches` are the tensors that a step of the program
    returns.
    """
    try:
        lowered = lower(bare, fetches)
    except UnsupportedProgramError as error:
        return None, str(error)
    return lowered.module, lowered.refused


def _without_conditionals(module: str) -> dict[str, str]:
    """Returns a program's two variants: with all conditions true, and with all conditions false.

    In a variant, the branch that is taken stands in place of each conditional. `module` is the
    program's StableHLO. The result is a dict of StableHLO with the keys "conditions_true" and
    "conditions_false". It is empty if the program has no conditionals.
    """
    made = {f"conditions_{str(v).lower()}": with_conditions(module, v) for v in (True, False)}
    return {name: text for name, text in made.items() if text is not None}


def _check_known(topology: str, answer: dict[str, Any]) -> None:
    if "no_topology" in answer:
        raise ValueError(
            f"topology {topology!r} is one that libtpu does not know: "
            f"{_short(answer['no_topology']).rstrip('.')}. "
            f"Topologies of 8 cores are {_EXAMPLES}."
        )


def _check_topology(topology: str, answer: dict[str, Any], num_cores: int) -> None:
    _check_known(topology, answer)
    if answer["num_cores"] != num_cores:
        raise ValueError(
            f"topology {topology!r} has {answer['num_cores']} cores and the program's mesh "
            f"{num_cores}. Give a topology with as many cores as the mesh: those of 8 cores are "
            f"{_EXAMPLES}; twice the chips along one direction are twice the cores."
        )


def _short(text: str) -> str:
    """Returns a compiler's message on one line, without its stack trace.

    `text` is the message. Of a long message, the first `_LONGEST_ERROR` characters are returned.
    """
    text = " ".join(text.split("Stack trace", 1)[0].split())
    return text if len(text) <= _LONGEST_ERROR else text[:_LONGEST_ERROR] + "..."
