"""The result of compiling a SIMD program for a TPU, which can be written as a table or as JSON."""

from __future__ import annotations

import dataclasses
import json

from mtf_gradsync.runtimes._tables import text_table
from mtf_gradsync.runtimes.xla.hlo_collectives import HloCollective, bytes_by_operation
from mtf_gradsync.runtimes.xla.topology.chips import GENERATIONS, Generation
from mtf_gradsync.runtimes.xla.topology.estimate import CostEstimate
from mtf_gradsync.runtimes.xla.topology.roofline import why_doubtful
from mtf_gradsync.runtimes.xla.topology.slices import slice_of

_ESTIMATES = {
    "step": "step, with conditionals",
    "conditions_true": "step, all conditions true",
    "conditions_false": "step, all conditions false",
    "bare": "bare optimizer",
}
_ESTIMATE = (
    "An estimate is no timing. It adds up operations one after the other, each at its roofline: "
    "the longer of its products at the chip's published peak and its bytes at the memory's "
    "bandwidth. It does not count links and host."
)
# A step that costs more than this, in steps of the bare optimizer, gets a note.
_DEARER = 1.02


@dataclasses.dataclass(frozen=True)
class CoreMemory:
    """The memory of a program on one core, in bytes, with the padding of the TPU's layouts.

    Attributes:
      arguments: inputs and variables.
      outputs: fetches and new values of variables.
      aliased: bytes of outputs that are written over arguments, and so count once in `total`.
      temporaries: the peak of all intermediate values.
      code: the program's instructions.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        """The total bytes on one core; aliased bytes count once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """The compiler's answer for one program and one topology.

    Attributes:
      topology: the name of the topology that the program was compiled for, as in "v3:2x2".
      device_kind: libtpu's name of the topology's devices, as in "TPU v3".
      num_replicas: the number of cores that run the program.
      error: why the program was refused, in short; "" if the compiler accepted it.
      before: collectives of the program before the compiler's optimization. Empty if TensorFlow
        itself refused the program.
      after: collectives of the compiled program. Empty if the program was refused.
      after_unsharded: collectives of the program, compiled a second time without splitting the
        weight update over the cores. The split turns one all-reduce into several operations. So, to
        compare the bytes of programs, compare these collectives. Empty unless the caller has asked
        for them with `update_not_split`.
      memory: bytes on one core; None if the program was refused.
      seconds: how long the compilation took. This says nothing about how fast the program runs.
      estimates: estimates of programs' costs, by name. "step" is the program itself; no branch of a
        conditional counts. (In the `flops` of libtpu 0.0.17 the most expensive branch counts.) Only
        a program with conditionals has the next two: "conditions_true" is the program with all
        conditions true, as in an update step; "conditions_false" is the program with all conditions
        false. "bare" is the program with the bare optimizer, with all conditions true.
      bare_memory: bytes on one core of the program with the bare optimizer; None if no such program
        was given.
      of_update: collectives of the compiled program with all conditions true, as in an update step.
        If the program has no conditionals, they are those of `after`.
      of_skipped_step: collectives of the compiled program with all conditions false, as in a step
        that only accumulates. Empty if the program has no conditionals.
      not_estimated: for the name of each estimate that is missing, why its program was refused.
      bare_lacks_fetches: whether a step of the bare program returns less than a step of the
        program, so that the bare step is a little cheaper.
    """

    topology: str
    device_kind: str
    num_replicas: int
    error: str
    before: tuple[HloCollective, ...]
    after: tuple[HloCollective, ...]
    after_unsharded: tuple[HloCollective, ...]
    memory: CoreMemory | None
    seconds: float
    estimates: dict[str, CostEstimate] = dataclasses.field(default_factory=dict)
    bare_memory: CoreMemory | None = None
    of_update: tuple[HloCollective, ...] = ()
    of_skipped_step: tuple[HloCollective, ...] = ()
    not_estimated: dict[str, str] = dataclasses.field(default_factory=dict)
    bare_lacks_fetches: bool = False

    @property
    def accepted(self) -> bool:
        """Whether the compiler accepted the program."""
        return not self.error

    def fits(self) -> dict[str, bool]:
        """Returns for each TPU generation whether the program fits into a core's memory.

        The bytes that the program needs on a core of `topology` are compared with the memory of a
        core of each generation. Other generations pad and schedule a little differently: if the
        bytes are near a generation's limit, compile for that generation.

        Returns:
          A dict from the name of each generation, such as "v3", to True or False. The dict is empty
          if the program was refused.
        """
        if self.memory is None:
            return {}
        return {g.name: self.memory.total <= g.memory_per_core for g in self._generations()}

    def _generations(self) -> list[Generation]:
        """Returns all TPU generations, for a comparison with the memory of their cores.

        If `topology` counts a v4 chip as two cores ("/two_cores"), the entry for v4 also counts a
        chip as two cores.
        """
        own = slice_of(self.topology).generation
        return [own if g.name == own.name else g for g in GENERATIONS]

    def __str__(self) -> str:
        kind = f" ({self.device_kind})" if self.device_kind else ""
        lines = [f"topology {self.topology}{kind}, {self.num_replicas} cores"]
        if self.error:
            lines.append(f"refused: {self.error}")
        else:
            lines.append(f"accepted, compiled in {self.seconds:.1f} s")
        if self.before:
            lines += ["", *self._collectives()]
        if self.memory is not None:
            lines += ["", *self._memory(self.memory)]
        if self.estimates:
            lines += ["", *self._estimates()]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Returns all attributes as JSON text, with the results of `accepted` and `fits`.

        The entry "memory" also has the total of the memory.
        """
        content = dataclasses.asdict(self)
        content["accepted"] = self.accepted
        content["fits"] = self.fits()
        if self.memory is not None:
            content["memory"]["total"] = self.memory.total
        return json.dumps(content, indent=2)

    def _collectives(self) -> list[str]:
        columns = [("before optimization", self.before)]
        if self.accepted:
            columns.append(("compiled", self.after))
        if self.after_unsharded:
            columns.append(("compiled, update not split", self.after_unsharded))
        sums = [bytes_by_operation(rows) for _, rows in columns]
        operations = list(dict.fromkeys(name for found in sums for name in found))
        table = []
        for operation in operations:
            counts = (found.get(operation, (0, 0)) for found in sums)
            table.append([operation, *(f"{n} ({size:,} bytes)" for n, size in counts)])
        conditional = (sum(c.is_conditional for c in rows) for _, rows in columns)
        in_loops = (sum(c.is_in_loop for c in rows) for _, rows in columns)
        table += [["in branches", *map(str, conditional)], ["in loops", *map(str, in_loops)]]
        return text_table(["collectives", *(title for title, _ in columns)], table, ["collectives"])

    def _estimates(self) -> list[str]:
        bare = self.estimates.get("bare")
        labels = dict(_ESTIMATES)
        if set(self.estimates) <= {"step", "bare"}:
            labels["step"] = "step"
        rows = []
        notes = [_ESTIMATE]
        for name, cost in self.estimates.items():
            share = f"{cost.seconds / bare.seconds:.2f}" if bare and bare.seconds else ""
            numbers = [f"{n:,.0f}" for n in (cost.flops, cost.bytes_accessed)]
            rows.append([labels[name], *numbers, f"{1e6 * cost.seconds:,.1f}", share])
            if cost.unknown:
                kinds = ", ".join(cost.unknown_operations)
                notes.append(
                    f"{labels[name]}: {cost.unknown} custom calls count with their bytes alone "
                    f"({kinds})."
                )
            doubt = why_doubtful(cost.seconds, cost.roofline_seconds)
            # Of a conditional libtpu 0.0.17 counts operations, and no branch takes time here.
            if doubt and (name != "step" or "conditions_true" not in self.estimates):
                notes.append(f"{labels[name]}: do not trust the time, which is {doubt}.")
            if cost.loops_counted_once:
                notes.append(
                    f"{labels[name]}: of {cost.loops_counted_once} loops one turn is counted."
                )
        for name, reason in self.not_estimated.items():
            notes.append(f"{labels[name]}: refused: {reason}")
        if self.bare_lacks_fetches:
            notes.append("The bare step returns less than this one: give its loss as bare_fetches.")
        step = self.estimates.get("conditions_true", self.estimates.get("step"))
        if bare and step and step.seconds > _DEARER * bare.seconds:
            more = 100 * (step.seconds / bare.seconds - 1)
            notes.append(f"A step with an update takes {more:.0f}% more than the bare optimizer's.")
        if self.memory and self.bare_memory and self.memory.total > self.bare_memory.total:
            more = self.memory.total - self.bare_memory.total
            notes.append(f"It takes {more:,} bytes of memory more than the bare optimizer's.")
        headers = ["estimate per core", "operations", "bytes touched", "us by roofline", "of bare"]
        if bare is None:
            headers, rows = headers[:-1], [row[:-1] for row in rows]
        return text_table(headers, rows, headers[:1]) + notes

    def _memory(self, memory: CoreMemory) -> list[str]:
        rows = [
            ["arguments (variables and inputs)", f"{memory.arguments:,}"],
            ["outputs", f"{memory.outputs:,}"],
            ["outputs written over arguments", f"-{memory.aliased:,}"],
            ["temporaries", f"{memory.temporaries:,}"],
            ["code", f"{memory.code:,}"],
            ["total", f"{memory.total:,}"],
        ]
        lines = text_table(["memory per core", "bytes"], rows, ["memory per core"])
        shares = [
            f"{g.name} {100 * memory.total / g.memory_per_core:.3g}%" for g in self._generations()
        ]
        lines.append(f"of a core's memory: {', '.join(shares)}")
        misfits = [name for name, fits in self.fits().items() if not fits]
        lines.append(
            f"does not fit on: {', '.join(misfits)}" if misfits else "fits on all of these"
        )
        return lines
