"""Collectives whose operands are ready in another order on each process, and programs in a row.

Run as a script with the coordinator's address, the number of processes, this process's number and a
folder. Ends with an error when a value is not what it has to be.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any, Sequence

import numpy as np

from mtf_gradsync import xla
from mtf_gradsync.runtimes._private.jax import compiled_hlo
from mtf_gradsync.runtimes.xla.gathering import Cores
from mtf_gradsync.runtimes.xla.hlo_collectives import find_hlo_collectives
from mtf_gradsync.runtimes.xla.runner.jax_devices import put
from mtf_gradsync.runtimes.xla.runner.loaded_program import LoadedProgram
from mtf_gradsync.runtimes.xla.runner.loaded_program import compiled as compile_stablehlo
from tests.forked import TIME_LIMIT

CORES = 8
# Of two kinds, so that one taken for the other shows: gloo refuses what is longer than expected.
LENGTHS = 1024, 512
# Turns of a loop that take some milliseconds.
SLOW = 100
KINDS = "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute"
_PLACES = "program", "loop", "branch"
# A sum in every place beside something in every place, which is of every kind; in every second of
# them, too.
PAIRS = [
    ((place, kind), (other, "all_reduce"))
    for (place, other), kind in zip(itertools.product(_PLACES, _PLACES), itertools.cycle(KINDS))
]
_GROUPS = f"replica_groups = dense<[{list(range(CORES))}]> : tensor<1x{CORES}xi64>"
_PAIRS = [[core, CORES - 1 - core] for core in range(CORES)]
_SUM = """({
  ^bb0(%p: tensor<f32>, %q: tensor<f32>):
    %s = stablehlo.add %p, %q : tensor<f32>
    stablehlo.return %s : tensor<f32>
  })"""
# For each kind: attributes, whether it adds up, and how much longer its result is.
_SPELLED = {
    "all_reduce": (_GROUPS, True, 1),
    "all_gather": (f"all_gather_dim = 0 : i64, {_GROUPS}", False, CORES),
    "reduce_scatter": (f"scatter_dimension = 0 : i64, {_GROUPS}", True, 1 / CORES),
    "all_to_all": (
        f"split_dimension = 0 : i64, concat_dimension = 0 : i64, split_count = {CORES} : i64, "
        f"{_GROUPS}",
        False,
        1,
    ),
    "collective_permute": (
        f"source_target_pairs = dense<{_PAIRS}> : tensor<{CORES}x2xi64>",
        False,
        1,
    ),
}


def _collective(kind: str, name: str, operand: str, length: int) -> str:
    """A collective, and the first element of its result as %name."""
    attributes, adds, longer = _SPELLED[kind]
    given, made = f"tensor<{length}xf32>", f"tensor<{int(length * longer)}xf32>"
    return f"""
  %{name}_all = "stablehlo.{kind}"(%{operand}) <{{{attributes}}}> {_SUM if adds else ""}
    : ({given}) -> {made}
  %{name}_one = stablehlo.slice %{name}_all [0:1] : ({made}) -> tensor<1xf32>
  %{name} = stablehlo.reshape %{name}_one : (tensor<1xf32>) -> tensor<f32>"""


def _late(name: str, turns: str, value: str, length: int) -> str:
    """%name: a value, as often as asked, that is there when a loop has made its turns."""
    square, many = "tensor<32x32xf32>", f"tensor<{length}xf32>"
    return f"""
  %{name}_half = stablehlo.constant dense<0.5> : {square}
  %{name}_loop:2 = stablehlo.while(%{name}_i = %zero, %{name}_x = %{name}_half)
    : tensor<i32>, {square} cond {{
    %c = stablehlo.compare LT, %{name}_i, %{turns} : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  }} do {{
    %i = stablehlo.add %{name}_i, %one : tensor<i32>
    %d = stablehlo.dot_general %{name}_x, %{name}_x, contracting_dims = [1] x [0]
      : ({square}, {square}) -> {square}
    %t = stablehlo.tanh %d : {square}
    stablehlo.return %i, %t : tensor<i32>, {square}
  }}
  %{name}_part = stablehlo.slice %{name}_loop#1 [0:1, 0:1] : ({square}) -> tensor<1x1xf32>
  %{name}_corner = stablehlo.reshape %{name}_part : (tensor<1x1xf32>) -> tensor<f32>
  %{name}_nothing = stablehlo.minimum %{name}_corner, %nought : tensor<f32>
  %{name}_sum = stablehlo.add %{name}_nothing, %{value} : tensor<f32>
  %{name} = stablehlo.broadcast_in_dim %{name}_sum, dims = [] : (tensor<f32>) -> {many}"""


def _placed(place: str, kind: str, name: str, operand: str, length: int) -> str:
    """A collective as it stands, in a loop of three turns, or in a branch."""
    many = f"tensor<{length}xf32>"
    if place == "program":
        return _collective(kind, name, operand, length)
    inner = _collective(kind, f"{name}_in", f"{name}_h", length)
    if place == "loop":
        return f"""
  %{name}_turns:2 = stablehlo.while(%{name}_k = %zero, %{name}_y = %nought)
    : tensor<i32>, tensor<f32> cond {{
    %c = stablehlo.compare LT, %{name}_k, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  }} do {{
    %k = stablehlo.add %{name}_k, %one : tensor<i32>
    %least = stablehlo.minimum %{name}_y, %nought : tensor<f32>
    %w = stablehlo.broadcast_in_dim %least, dims = [] : (tensor<f32>) -> {many}
    %{name}_h = stablehlo.add %w, %{operand} : {many}
    {inner}
    stablehlo.return %k, %{name}_in : tensor<i32>, tensor<f32>
  }}
  %{name} = stablehlo.add %{name}_turns#1, %nought : tensor<f32>"""
    return f"""
  %{name}_is = stablehlo.compare LT, %zero, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
  %{name} = "stablehlo.if"(%{name}_is) ({{
    %{name}_h = stablehlo.add %{operand}, %{operand} : {many}
    {inner}
    %halved = stablehlo.multiply %{name}_in, %half_of_it : tensor<f32>
    stablehlo.return %halved : tensor<f32>
  }}, {{
    stablehlo.return %nought : tensor<f32>
  }}) : (tensor<i1>) -> tensor<f32>"""


def module(first: tuple[str, str], second: tuple[str, str]) -> str:
    """A program with two collectives that do not need each other, and enough beside them.

    XLA runs programs of few operations one after the other in any case.

    Args:
      first: its place and kind.
      second: likewise.
    """
    body = _late("a", "n0", "value", LENGTHS[0]) + _placed(*first, "A", "a", LENGTHS[0])
    body += _late("b", "n1", "value", LENGTHS[1]) + _placed(*second, "B", "b", LENGTHS[1])
    square = "tensor<32x32xf32>"
    others = []
    for i in range(16):
        body += f"""
  %f{i} = stablehlo.constant dense<{i + 1}.0> : {square}
  %g{i} = stablehlo.multiply %b_loop#1, %f{i} : {square}
  %o{i} = stablehlo.dot_general %g{i}, %g{i}, contracting_dims = [1] x [0]
    : ({square}, {square}) -> {square}"""
        others.append(f"%o{i}")
    kinds = ", ".join(["tensor<f32>"] * 2 + [square] * len(others))
    return f"""module {{
func.func public @main(%value: tensor<f32>, %n0: tensor<i32>, %n1: tensor<i32>,
    %three: tensor<i32>) -> ({kinds}) {{
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %nought = stablehlo.constant dense<0.0> : tensor<f32>
  %half_of_it = stablehlo.constant dense<0.5> : tensor<f32>
  {body}
  return %A, %B, {", ".join(others)} : {kinds}
}}
}}"""


def expected(kind: str, core: int) -> float:
    """The first element of what a collective makes of each core's number, plus one."""
    if kind in ("all_reduce", "reduce_scatter"):
        return CORES * (CORES + 1) / 2
    return float(CORES - core) if kind == "collective_permute" else 1.0


class Programs:
    """Compiles and runs them on this process's part of the cores."""

    def __init__(self, index: int):
        import jax

        self.index, self.cores = index, Cores(jax.devices())

    def put(self, *per_core):
        return put(list(per_core), self.cores.local_devices)

    def compiled(self, text: str) -> LoadedProgram:
        devices = self.cores.devices
        return LoadedProgram(compile_stablehlo(text, devices), devices)

    def dispatch(self, program: LoadedProgram, turns: tuple[int, int]):
        values = self.put(*(np.float32(core + 1) for core in self.cores.local))
        numbers = (self.put(*[np.int32(n)] * len(self.cores.local)) for n in (*turns, 3))
        return program.run([values, *numbers])

    def check(self, results, kinds: tuple[str, str]) -> None:
        for result, kind in zip(results, kinds):
            for core, array in zip(self.cores.local, result.arrays):
                assert float(np.asarray(array)) == expected(kind, core), (kinds, kind, core)


def in_one_program(programs: Programs, pairs: Sequence[Any]) -> None:
    """Two collectives, of which now the one and now the other is late."""
    for first, second in pairs:
        program = programs.compiled(module(first, second))
        found = [c.operation for c in find_hlo_collectives(compiled_hlo(program.executable))]
        # XLA of jax 0.12 makes two sums one.
        merged = first[1] == second[1] == "all_reduce" and len(found) == 1
        assert merged or len(found) == 2, (first, second, found)
        programs.cores.check_same("orders", repr(found).encode())
        for turn in range(2):
            late_first = programs.index % 2 == turn
            results = programs.dispatch(program, (SLOW, 0) if late_first else (0, SLOW))
            programs.check(results, (first[1], second[1]))
    print("one program: in order", flush=True)


def one_after_the_other(programs: Programs) -> None:
    """Programs that take nothing of each other, with exchanges of the host in between."""
    kinds = [("all_reduce", "all_gather"), ("all_to_all", "all_reduce")]
    made = [programs.compiled(module(("program", a), ("program", b))) for a, b in kinds]
    waiting = []
    for turn in range(12):
        late = programs.index == turn % 2
        waiting.append((programs.dispatch(made[turn % 2], (SLOW * late, 0)), kinds[turn % 2]))
        if turn % 3 == 0:
            mine = [np.int32(core + turn) for core in programs.cores.local]
            (found,) = programs.cores.gather([mine])
            assert [int(x) for x in found] == [core + turn for core in range(CORES)]
        if turn % 3 == 1:
            (first,) = programs.cores.from_first([np.arange(5, dtype=np.uint8) + programs.index])
            assert first.tolist() == [0, 1, 2, 3, 4]
    for results, pair in waiting:
        programs.check(results, pair)
    print("many programs: in order", flush=True)


def main(address: str, count: str, index: str, unused_folder: str) -> None:
    with xla.start_processes(
        address, int(count), int(index), cpu_devices=CORES // int(count), timeout=TIME_LIMIT
    ):
        print("started", flush=True)
        programs = Programs(int(index))
        # Two processes show the order; more, that it is everyone's.
        in_one_program(programs, PAIRS if int(count) == 2 else PAIRS[::2])
        one_after_the_other(programs)


if __name__ == "__main__":
    main(*sys.argv[1:])
