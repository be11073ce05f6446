"""Predicts what a training step costs on each mesh of TPU slices; no TPU is needed for this."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from typing import Any, Callable, Iterator, Mapping, Sequence

from tqdm import tqdm

from mtf_gradsync.extension import is_whole_number, mtf
from mtf_gradsync.runtimes._signals import Interruption
from mtf_gradsync.runtimes.simd.program import Program, compiled_only
from mtf_gradsync.runtimes.xla.topology.slices import slice_of
from mtf_gradsync.tools.planning.machines import TpuMachine, shapes_of
from mtf_gradsync.tools.planning.result import Plan, PlanRow, Refused
from mtf_gradsync.tools.planning.search import Built, Candidate, rules_of, search


def plan(
    build: Callable[[str, str], Built | Program],
    topologies: str | Sequence[str],
    layouts: str | Sequence[str],
    mesh_shapes: Sequence[str] | None = None,
    axes: Sequence[str] | None = None,
    jobs: int = 1,
    progress: bool = False,
    refusals: tuple[type[BaseException], ...] = (ValueError,),
    price: float | Mapping[str, float] | None = None,
    dcn_bandwidth: float | None = None,
    inner_steps: Sequence[int] = (10, 36, 100),
) -> Plan:
    """Returns a table of a training step's predicted cost on each mesh of each TPU topology.

    No chips are needed: the real TPU compiler compiles each program on this computer. The predicted
    time of a step is the time of its operations plus the time of its collectives. The time of an
    operation is its roofline, which follows from the chip's published peak and bandwidth. The time
    of a collective is computed from the bytes that it sends on a ring of chips, and from the links'
    published rates.

    Args:
      build: a function that builds the training step in `simd.tpu_program`. It returns the program,
        or a `Built`, which also has the fetches and the number of tokens of a step. The function is
        called with a mesh shape ("batch:4;model:2") and a layout, in a new graph. If the mesh is
        not possible, the function raises ValueError. The result then lists the mesh as refused,
        with the error's message as the reason.
      topologies: one or several topologies as `xla.compile_for_tpu` takes them, such as
        "v5e:4x4,v5p:4x4x8" or "v4-8"; "2xv5e:4x4" for two TPU slices that a data center network
        joins.
      layouts: Mesh-TF's layout rules ("batch:batch;heads:model"), or several of them.
      mesh_shapes: the mesh shapes to plan; None for all factorizations of a topology's cores over
        `axes`. With several TPU slices, the first axis of a mesh shape crosses the data center
        network. So, for several TPU slices, None tries several mesh shapes of the same sizes. Each
        axis whose size is a multiple of the number of TPU slices comes first in one of these
        shapes.
      axes: names of the mesh axes; None for the axes that the first layout names, in the order in
        which it names them.
      jobs: the number of compilers that run at once. Each takes a CPU of this computer, and memory.
      progress: whether to show a progress bar on terminals.
      refusals: further types of errors by which `build` says that a mesh is not possible.
      price: dollars for an hour of one chip. It is a number for all topologies, or a dictionary
        with a number for each generation of chips, such as ``{"v5e": 1.2, "v5p": 4.2}``. If it is
        None, the table has no costs in dollars.
      dcn_bandwidth: GB/s that a chip sends over the data center network; needed for several TPU
        slices.
      inner_steps: numbers of steps; used if there are several TPU slices. For each number N, the
        table says how long a step takes if TPU slices exchange values only once in N steps
        (`PlanRow.fewer_messages`).

    Returns:
      The table, sorted by predicted speed. If Ctrl-C or SIGTERM stops the planning, the table has
      the meshes that were planned until then, and `Plan.is_partial` is true.

    Raises:
      KeyboardInterrupt: when Ctrl-C or SIGTERM comes before the compiler has described all
        topologies.
      XlaMissingError: when there is no TPU compiler.
      ValueError: when an argument is out of range, or a topology does not exist.
    """
    for steps in inner_steps:
        if not is_whole_number(steps):
            raise ValueError(f"inner_steps must be positive integers; got {list(inner_steps)!r}.")
    if not is_whole_number(jobs):
        raise ValueError(f"jobs must be a positive integer; got {jobs!r}")
    given = [layouts] if isinstance(layouts, str) else layouts
    layouts = _without_duplicates("layout", given, _read_layout, "batch:batch;heads:model")
    mesh_shapes = _without_duplicates(
        "mesh shape", mesh_shapes or (), _read_shape, "batch:4;model:2"
    )
    names = _split(topologies)
    if not layouts or not names:
        raise ValueError(
            f"Give at least one layout and one topology; got {layouts!r} and {topologies!r}."
        )
    axes = (
        list(axes)
        if axes is not None
        else [*dict.fromkeys(rule[-1] for rule in rules_of(layouts[0]))]
    )
    dcn = () if dcn_bandwidth is None else (1e9 * _positive("dcn_bandwidth", dcn_bandwidth),)
    chip_hours = [_dollars_per_chip_hour(price, slice_of(name).chip.name) for name in names]
    with _environment_kept(), Interruption() as stop:
        machines = [TpuMachine(name, *dcn) for name in names]
        candidates, refused = [], []
        for layout in layouts:
            for machine in machines:
                for shape in mesh_shapes or shapes_of(machine.cores, axes, machine.slices):
                    dims = mtf.convert_to_shape(shape)
                    reason = ""
                    if dims.size != machine.cores:
                        reason = f"The mesh has {dims.size} cores and the topology {machine.cores}"
                    elif machine.slices > 1 and dims.dims[0].size % machine.slices:
                        reason = (
                            f"its first axis, {dims.dims[0].name}:{dims.dims[0].size}, crosses the "
                            f"data center network, and {machine.slices} slices do not divide it"
                        )
                    if reason:
                        refused.append(Refused(shape, layout, machine.name, reason))
                    else:
                        candidates.append(Candidate(shape, layout, machine, tuple(inner_steps)))

        def built(mesh_shape: str, layout: str) -> Built:
            with compiled_only():
                made = build(mesh_shape, layout)
            return made if isinstance(made, Built) else Built(made)

        hidden = None if progress else True  # tqdm shows bars on terminals only where that is None
        with tqdm(
            total=len(candidates), desc="planning", unit="mesh", leave=False, disable=hidden
        ) as bar:
            found = search(built, candidates, jobs, (ValueError, *refusals), bar.update, stop)
    hourly = {machine.name: hours and hours * machine.chips
              for machine, hours in zip(machines, chip_hours)}  # fmt: skip
    rows = tuple(_priced(row, hourly.get(row.machine)) for row in found.rows)
    return dataclasses.replace(found, rows=rows, refused=(*refused, *found.refused))


def _dollars_per_chip_hour(price: float | Mapping[str, float] | None, chip: str) -> float | None:
    """Returns the dollars for an hour of one chip, or None if no price was given.

    `chip` is the generation of the chip, such as "v5e". `price` is a number for all generations, a
    dictionary with a number for each generation, or None. Raises ValueError if `price` has no price
    of this generation, or is not a positive number.
    """
    if isinstance(price, Mapping):
        if chip not in price:
            raise ValueError(f"price has {', '.join(price)}, and no {chip}; got {dict(price)!r}.")
        price = price[chip]
    return None if price is None else _positive("price", price)


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a number above 0; got {value!r}.")
    return float(value)


def _priced(row: PlanRow, hourly: float | None) -> PlanRow:
    rate = row.tokens_per_second
    per_dollar = rate * 3600 / hourly if rate and hourly else None
    return dataclasses.replace(row, dollars_per_hour=hourly, tokens_per_dollar=per_dollar)


# Environment variables that choose jax's devices here, or keep jax from a search for TPUs.
_SET_FOR_JAX = ("JAX_PLATFORMS", "TPU_SKIP_MDS_QUERY", "TPU_WORKER_HOSTNAMES", "XLA_FLAGS")


@contextlib.contextmanager
def _environment_kept() -> Iterator[None]:
    """Restores environment variables, which the use of jax changes, after a ``with`` block."""
    before = {name: os.environ.get(name) for name in _SET_FOR_JAX}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _without_duplicates(
    kind: str, texts: Sequence[str], read: Callable[[str], Any], example: str
) -> list[str]:
    """Returns `texts` without those that mean the same as an earlier one.

    Args:
      kind: what the texts are, such as "layout", for the error.
      texts: the texts.
      read: a function that returns what a text means, as a value that can be compared, and raises
        ValueError for a text that Mesh-TF cannot read.
      example: a text of the right form, for the error.

    Raises:
      ValueError: when Mesh-TF cannot read a text.
    """
    found: dict[Any, str] = {}
    for text in texts:
        try:
            found.setdefault(read(text), text)
        except ValueError:
            raise ValueError(
                f'The {kind} {text!r} cannot be read; write it like "{example}"'
            ) from None
    return list(found.values())


def _read_shape(text: str) -> tuple[Any, ...]:
    dims = tuple(mtf.convert_to_shape(text).dims)
    for dim in dims:
        if dim.size < 1:
            raise ValueError(f"{dim.size} cores along {dim.name!r}")
    return dims


def _read_layout(text: str) -> frozenset[tuple[str, ...]]:
    mtf.convert_to_layout_rules(text)  # raises ValueError for wrong rules
    return frozenset(rules_of(text))


def _split(topologies: str | Sequence[str]) -> list[str]:
    parts = topologies.split(",") if isinstance(topologies, str) else topologies
    found: dict[Any, str] = {}
    for name in filter(None, (part.strip() for part in parts)):
        found.setdefault(slice_of(name), name)
    return list(found.values())
