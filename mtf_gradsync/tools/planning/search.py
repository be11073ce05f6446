"""Builds and compiles a training step for each mesh, and predicts its cost from the results."""

from __future__ import annotations

import collections
import concurrent.futures
import hashlib
import math
import re
import subprocess
import threading
import time
from typing import Any, Callable, Iterable, NamedTuple, Sequence, Tuple

from mtf_gradsync.extension import mtf, tf
from mtf_gradsync.runtimes._signals import Interruption, signal_of
from mtf_gradsync.runtimes.simd.collectives import groups_by_axes, list_collectives
from mtf_gradsync.runtimes.simd.communication import CommunicationReport
from mtf_gradsync.runtimes.simd.graph_facts import UnsupportedProgramError
from mtf_gradsync.runtimes.simd.program import Program
from mtf_gradsync.runtimes.xla.topology.compiler_process import CompilerDiedError
from mtf_gradsync.runtimes.xla.topology.compiling import LoweredProgram
from mtf_gradsync.runtimes.xla.topology.estimate import CostEstimate
from mtf_gradsync.runtimes.xla.topology.roofline import why_doubtful
from mtf_gradsync.tools.planning.exchanges import DCN, exchanges_of
from mtf_gradsync.tools.planning.machines import Compiled, Machine, StepCost
from mtf_gradsync.tools.planning.result import (
    AxisTraffic,
    FewerMessages,
    Plan,
    PlanRow,
    Refused,
    sorted_rows,
)

_LONGEST_REASON = 300
# How often it is checked for signals while compilers run.
_CHECK_SECONDS = 1.0


class Built(NamedTuple):
    """A training step on one mesh, as the `build` function of `plan` returns it.

    Attributes:
      program: what `simd.tpu_program` yielded, with the training step built in it.
      fetches: tensors that a step returns, such as the loss.
      tokens: the number of tokens (or examples) in a step; None if unknown.
      parameters: the number of trainable parameters; None if unknown.
      steps_per_update: the number of steps of which one makes the update, such as the steps over
        which gradients are accumulated. The program's conditions are true in that step only.
      model_flops: operations that the model needs in a step on all cores, as the function
        `model_flops` counts them. None counts 6 for each parameter and token, without attention.
    """

    program: Program
    fetches: Sequence[Any] = ()
    tokens: int | None = None
    parameters: int | None = None
    steps_per_update: int = 1
    model_flops: float | None = None


def model_flops(loss: mtf.Tensor) -> float:
    """Returns how many floating-point operations a model needs in a training step (model FLOPs).

    Each pair of a weight and a token that are multiplied counts as 6 operations: 2 in the forward
    and 4 in the backward pass. Attention adds 12 operations for each combination of a layer, an
    element of a head, a token, and a token that it may attend to; tokens that a mask hides count,
    too. These counts are the formulas 6 N D and 12 L H Q T D of Chowdhery et al. (2022),
    https://arxiv.org/abs/2204.02311, appendix B.
    Embedding lookups and the dispatch of tokens to experts do not count, although Mesh-TensorFlow
    computes them as products of matrices. Recomputed operations count once.

    Args:
      loss: the loss, a tensor of an mtf graph. Only operations up to the loss are counted.

    Returns:
      The number of floating-point operations of a step on all cores together.

    Raises:
      ValueError: when the model is in a loop, because the loop's number of iterations is unknown.
        To count the model's operations, build the model without the loop.
    """
    selects: dict[mtf.Tensor, bool] = {}

    def is_selection(x: mtf.Tensor) -> bool:
        """Returns whether `x` selects elements of other tensors, as (scaled) one-hot vectors do."""
        if x not in selects:
            op = x.operation
            passes_on = len(op.inputs) == 1 or (
                isinstance(op, mtf.EinsumOperation) and not summed_dims(op)
            )
            selects[x] = isinstance(op, mtf.OneHotOperation) or (
                passes_on and any(map(is_selection, op.inputs))
            )
        return selects[x]

    operations = loss.mesh.graph.operations
    found = 0.0
    for op in operations[: operations.index(loss.operation) + 1]:
        if isinstance(op, mtf.WhileLoopOperation):
            raise ValueError(
                f"The loss {loss.name!r} is computed in a loop, {op.name!r}; give the loss of the "
                "model without it (one microbatch)."
            )
        is_product = isinstance(op, mtf.EinsumOperation) and summed_dims(op)
        if is_product and not any(map(is_selection, op.inputs)):
            found += 6.0 * math.prod(d.size for d in {d for x in op.inputs for d in x.shape})
    return found


def summed_dims(operation: mtf.Operation) -> frozenset[str]:
    """Returns the names of the dimensions that an operation sums over."""
    if not isinstance(operation, (mtf.EinsumOperation, mtf.ReduceOperation)):
        return frozenset()
    there = set(operation.outputs[0].shape.dims)
    return frozenset(d.name for x in operation.inputs for d in x.shape.dims if d not in there)


def rules_of(layout: str) -> list[tuple[str, ...]]:
    """Returns the rules of a layout: "batch:x;d:y" gives [("batch", "x"), ("d", "y")]."""
    # Mesh-TF lets any of these characters end a rule.
    return [tuple(rule.split(":")) for rule in re.split("[ ,.;]", layout) if rule]


class Candidate(NamedTuple):
    """A mesh, layout and machine to plan for."""

    mesh_shape: str  # as in "batch:4;model:2"
    layout: str
    machine: Machine
    inner_steps: tuple[int, ...] = ()  # see `plan`


class _LoweredCandidate(NamedTuple):
    """A candidate with its lowered program, but without the graph in which it was built."""

    candidate: Candidate
    lowered: LoweredProgram
    built: Built  # without the program and its fetches
    report: CommunicationReport
    axes: dict[frozenset, str]
    build_seconds: float


# A program, the result of its compilation, and whether an equal one was compiled before.
_Pending = Tuple[_LoweredCandidate, "concurrent.futures.Future[Compiled]", bool]


def search(
    build: Callable[[str, str], Built],
    candidates: Sequence[Candidate],
    jobs: int = 1,
    refusals: tuple[type[BaseException], ...] = (ValueError,),
    done: Callable[[], Any] = lambda: None,
    stop: Interruption | None = None,
) -> Plan:
    """Builds and compiles the program of each candidate; returns the predicted costs of all.

    After a KeyboardInterrupt the result has the candidates planned so far. Programs are built one
    after the other, while compilers work on the programs built before. The program of a mesh shape
    and layout is built once for all machines. Equal programs are compiled once for each machine.

    Args:
      build: a function that builds the program for a mesh shape and a layout, in a new graph.
      candidates: the meshes, layouts and machines to plan for.
      jobs: the number of compilers that run at once.
      refusals: types of errors by which `build` says that a mesh is not possible.
      done: a function without arguments that is called when a candidate is planned or refused.
      stop: a context manager that the caller has entered, and whose `check` raises
        KeyboardInterrupt after a signal. If it is None, signals do not stop the search.
    """
    return _Search(build, jobs, refusals, done, stop or Interruption()).run(candidates)


class _Search:
    def __init__(
        self,
        build: Callable[[str, str], Built],
        jobs: int,
        refusals: tuple[type[BaseException], ...],
        done: Callable[[], Any],
        stop: Interruption,
    ):
        self._build, self._jobs, self._done = build, jobs, done
        self._stop = stop
        self._refusals: tuple[type[BaseException], ...] = (*refusals, UnsupportedProgramError)
        self._rows: list[PlanRow] = []
        self._refused: list[Refused] = []
        self._compiled: dict[tuple[str, str], concurrent.futures.Future[Compiled]] = {}
        self._pending: list[_Pending] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._lock, self._stopped = threading.Lock(), False

    def run(self, candidates: Sequence[Candidate]) -> Plan:
        by_program: dict[Any, list[Candidate]] = collections.defaultdict(list)
        for candidate in candidates:
            by_program[candidate.mesh_shape, candidate.layout].append(candidate)
        stopped_by = None
        pool = concurrent.futures.ThreadPoolExecutor(self._jobs, "plan")
        try:
            for group in by_program.values():
                self._stop.check()
                for work in self._build_programs(group):
                    # Programs that wait to be compiled take memory, so only a few may wait.
                    while len(self._pending) > self._jobs:
                        self._finish_one()
                    self._start(pool, work)
            while self._pending:
                self._finish_one()
        except KeyboardInterrupt as error:
            self._stopped, stopped_by = True, signal_of(error)
            for entry in [entry for entry in self._pending if entry[1].done()]:
                self._finish(entry)
        finally:
            self._stop_compilers(pool)
        found = len(self._rows) + len(self._refused)
        return Plan(
            sorted_rows(self._rows),
            tuple(self._refused),
            self._stopped,
            len(candidates) - found,
            stopped_by,
        )

    def _build_programs(self, group: Sequence[Candidate]) -> Iterable[_LoweredCandidate]:
        """Builds the program of the candidates in `group`, which have one mesh shape and layout.

        Returns:
          A list with an entry for each candidate, which has the lowered program. If `build` refuses
          the mesh, the candidates are noted as refused and the list is empty.
        """
        first, started = group[0], time.monotonic()
        try:
            with tf.Graph().as_default():
                built = self._build(first.mesh_shape, first.layout)
                report = list_collectives(built.program)
                axes = groups_by_axes(built.program.mesh_impl)
                seconds = time.monotonic() - started
                lowered: dict[Any, LoweredProgram] = {}
                for candidate in group:
                    kind = type(candidate.machine)
                    if kind not in lowered:
                        lowered[kind] = candidate.machine.lower(built.program, built.fetches)
        except self._refusals as error:
            for candidate in group:
                self._refuse(candidate, str(error))
            return []
        needed = built.model_flops
        if needed is None and built.parameters and built.tokens:
            needed = 6.0 * built.parameters * built.tokens
        kept: Any = built._replace(program=None, fetches=(), model_flops=needed)  # type: ignore[arg-type]
        return [
            _LoweredCandidate(c, lowered[type(c.machine)], kept, report, axes, seconds)
            for c in group
        ]

    def _start(self, pool: concurrent.futures.Executor, work: _LoweredCandidate) -> None:
        machine, lowered = work.candidate.machine, work.lowered
        if lowered.module is None:
            self._refuse(work.candidate, lowered.refused)
            return
        key = hashlib.sha256(lowered.module.encode()).hexdigest(), machine.name
        is_repeated = key in self._compiled
        if not is_repeated:
            self._compiled[key] = pool.submit(machine.compile, lowered, self._begun)
        # Drop the module, which may be large.
        work = work._replace(lowered=lowered._replace(module=None))
        self._pending.append((work, self._compiled[key], is_repeated))

    def _finish_one(self) -> None:
        futures = [future for _, future, _ in self._pending]
        done: Any = ()
        while not done:
            self._stop.check()
            done, _ = concurrent.futures.wait(
                futures, _CHECK_SECONDS, concurrent.futures.FIRST_COMPLETED
            )
        self._finish(next(entry for entry in self._pending if entry[1].done()))

    def _finish(self, ready: _Pending) -> None:
        work, future, is_repeated = ready
        try:
            compiled = future.result()
        except CompilerDiedError as error:
            compiled = Compiled(error=str(error))
            if self._stopped:  # a terminal's Ctrl-C ends compilers, too
                self._pending.remove(ready)
                return
            self._stop.check()
        self._pending.remove(ready)
        if compiled.error:
            self._refuse(work.candidate, compiled.error)
        else:
            self._rows.append(_row(work, compiled, is_repeated))
            self._done()

    def _refuse(self, candidate: Candidate, reason: str) -> None:
        # Cut off what gin adds to a message: the call that raised it.
        reason = " ".join(reason.strip().split("\n  In call to ")[0].split())
        if len(reason) > _LONGEST_REASON:
            reason = reason[:_LONGEST_REASON] + "..."
        shape, layout = candidate.mesh_shape, candidate.layout
        self._refused.append(Refused(shape, layout, candidate.machine.name, reason))
        self._done()

    def _begun(self, process: subprocess.Popen[str]) -> None:
        with self._lock:
            self._processes.append(process)
            if self._stopped:
                process.kill()

    def _stop_compilers(self, pool: concurrent.futures.Executor) -> None:
        """Kills the compilers that still run, and waits until the threads of `pool` have ended."""
        with self._lock:
            self._stopped = self._stopped or bool(self._pending)
            for process in self._processes:
                if process.poll() is None:
                    process.kill()
        pool.shutdown(wait=True)


def _row(work: _LoweredCandidate, compiled: Compiled, is_repeated: bool) -> PlanRow:
    mesh_shape, layout, machine, _ = work.candidate
    assert compiled.step is not None  # it was not refused
    cost, tokens = compiled.step.cost, work.built.tokens
    traffic = _traffic_of(compiled.step, work, True)
    links = sum(t.seconds for t in traffic)
    step = mean = cost.seconds + links
    flops, steps = cost.flops, work.built.steps_per_update
    skipped_step: float | None = None
    of_skipped_step: tuple[AxisTraffic, ...] = ()
    if compiled.skipped is not None:
        of_skipped_step = _traffic_of(compiled.skipped, work, False)
        skipped_step = compiled.skipped.cost.seconds + sum(t.seconds for t in of_skipped_step)
        mean = (step + (steps - 1) * skipped_step) / steps
        flops = (flops + (steps - 1) * compiled.skipped.cost.flops) / steps
    dcn = sum(t.seconds for t in traffic if t.axis == DCN)
    peak, limit = machine.peak_flops_per_core, machine.memory_per_core
    roofline, doubt = _roofline(cost, machine), ""
    if roofline is not None:
        doubt = why_doubtful(cost.seconds, roofline)
        if compiled.skipped is not None and not doubt:
            of_skipped = _roofline(compiled.skipped.cost, machine)
            doubt = why_doubtful(compiled.skipped.cost.seconds, of_skipped or 0.0)
    needed = work.built.model_flops
    return PlanRow(
        mesh_shape=mesh_shape,
        layout=layout,
        machine=machine.name,
        cores=machine.cores,
        fits=limit is None or compiled.bytes_per_core <= limit,
        bytes_per_core=compiled.bytes_per_core,
        memory_per_core=limit,
        flops=cost.flops,
        bytes_accessed=cost.bytes_accessed,
        estimate_seconds=cost.seconds,
        unknown_operations=cost.unknown,
        unknown_names=cost.unknown_operations,
        loops_counted_once=cost.loops_counted_once,
        is_of_update=compiled.is_of_update,
        traffic=traffic,
        link_seconds=links,
        step_seconds=step,
        overlapped_seconds=max(cost.seconds, links),
        tokens_per_second=tokens / mean if tokens and mean else None,
        share_of_peak=flops / (mean * peak) if peak and mean else None,
        model_flops=needed,
        mfu=needed / (mean * peak * machine.cores) if needed and peak and mean else None,
        build_seconds=work.build_seconds,
        compile_seconds=compiled.seconds,
        is_repeated=is_repeated,
        parameters=work.built.parameters,
        steps_per_update=steps,
        skipped_step_seconds=skipped_step,
        skipped_step_traffic=of_skipped_step,
        mean_step_seconds=mean,
        estimate_source=machine.estimate_source,
        roofline_seconds=roofline,
        doubt=doubt,
        slices=machine.slices,
        dcn_seconds=dcn,
        fewer_messages=_times_with_fewer_messages(work, step - dcn),
    )


# Names of the dimensions of tensors that hold examples.
_BATCH = ("batch", "outer_batch")


def _times_with_fewer_messages(work: _LoweredCandidate, alone: float) -> tuple[FewerMessages, ...]:
    """Returns how long a step takes if TPU slices exchange values only once in several steps.

    The result has two entries for each number of steps in the candidate's `inner_steps`, because
    there are two ways to exchange. With "OuterOptimizer", an outer step adds up float32 values of
    each core over the TPU slices. With "islands", one process of each island sends the changes of
    the island's values and reads the merged values, while the island goes on with its training.

    Args:
      work: the candidate with its program.
      alone: the seconds of a step without any exchange between TPU slices.

    Returns:
      The step times. There are none for one TPU slice, or if the number of parameters is unknown.
      There are none either if the first mesh axis, which crosses the network between TPU slices,
      does not split the batch.
    """
    machine, parameters = work.candidate.machine, work.built.parameters
    (first, size), *_ = (axis.split(":") for axis in work.candidate.mesh_shape.split(";"))
    rules = rules_of(work.candidate.layout)
    if machine.slices < 2 or not parameters or not any((b, first) in rules for b in _BATCH):
        return ()
    of_core = 4.0 * parameters * int(size) / machine.cores
    everywhere = [tuple(range(0, machine.cores, machine.cores // machine.slices))]
    outer = machine.seconds("all-reduce", everywhere, of_core)
    island = 2 * 4.0 * parameters / machine.dcn_bytes_per_second
    steps = work.candidate.inner_steps
    return (
        *(FewerMessages("OuterOptimizer", h, alone + outer / h, outer) for h in steps),
        *(FewerMessages("islands", h, max(alone, island / h), island) for h in steps),
    )


def _roofline(cost: CostEstimate, machine: Machine) -> float | None:
    """Returns the least seconds that a step's operations can take on a core, without the links.

    The result is the longer of two times: the time of the step's floating-point operations at the
    core's peak, and the time of the step's bytes at the memory's bandwidth. It is None if the
    machine's rates are unknown. `cost` has the compiler's counts of operations and bytes.
    """
    peak, bandwidth = machine.peak_flops_per_core, machine.bytes_per_second_per_core
    if not peak or not bandwidth:
        return None
    return max(cost.flops / peak, cost.bytes_accessed / bandwidth)


def _traffic_of(
    step: StepCost, work: _LoweredCandidate, conditions: bool
) -> tuple[AxisTraffic, ...]:
    machine = work.candidate.machine
    exchanges = exchanges_of(
        step.collectives, work.report, work.axes, machine.cores, conditions, machine.slices
    )
    known: dict[Any, float] = {}
    sums: dict[str, tuple[int, int, float]] = {}
    for one in exchanges:
        key = (one.operation, one.axis, one.size)
        # Permutations along one axis may have different pairs, and so different times.
        if key not in known or one.operation == "collective-permute":
            known[key] = machine.seconds(one.operation, one.groups, one.size)
        count, size, seconds = sums.get(one.axis, (0, 0, 0.0))
        sums[one.axis] = (
            count + one.times,
            size + one.times * one.size,
            seconds + one.times * known[key],
        )
    return tuple(AxisTraffic(axis, *values) for axis, values in sums.items())
