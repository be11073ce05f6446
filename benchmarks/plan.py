"""Whether the order of mesh shapes that `mtf-gradsync plan` predicts is the one that is measured.

On CPU devices of this machine, at rates that are fitted to sample steps first.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import multiprocessing
import sys
import tempfile
from typing import Any, Callable, Iterator, Mapping

from benchmarks import models, report, timing
from benchmarks.this_machine import Calibration, CpuMachine
from mtf_gradsync import simd, xla
from mtf_gradsync.tools.planning.search import Built, Candidate, search

SHAPES = [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4)]
SHAPES += [(8, 1), (4, 2), (2, 4), (16, 1), (8, 2), (4, 4)]
# The most that 1 - Kendall's tau may be; 0 is the same order, 1 is none.
DISORDER = 0.3
STEPS = 2
# Rounds of a model whose steps take 20 s each, and of two that nothing was chosen on; on request.
LARGER, OTHERS = "larger_rounds", "other_rounds"


def measure(options: report.Options) -> report.Table:
    """Predicts and measures steps of transformers on each mesh shape."""
    # jax makes its devices once, and other tables may have made fewer.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        rows, notes = pool.apply(_measure, (options.rounds, dict(options.settings), options.quick))
    targets = []
    for name in dict.fromkeys(row["model"] for row in rows) if not options.quick else ():
        mine = [row for row in rows if row["model"] == name]
        targets += targets_of(name, mine)
        notes += (_certainty(name, mine),)
    return report.Table(
        name="plan",
        title="Step time by mesh shape, as planned and as measured, on XLA devices",
        rows=rows,
        notes=notes,
        targets=targets,
        plot=lambda axes: _plot(axes, rows),
    )


def _measure(
    rounds: int, settings: Mapping[str, int], quick: bool
) -> tuple[list[report.Row], tuple[str, ...]]:
    report.prepare()
    shapes = SHAPES[:3] if quick else SHAPES
    # Layers, width, sequences, tokens of each; rounds.
    sizes = {"lm": ((4, 128, 16, 64), rounds), "lm, wide": ((2, 256, 16, 64), rounds)}
    if quick:
        sizes = {"lm": ((1, 32, 16, 16), rounds)}
    else:
        # Their steps take ten times as long.
        few = math.ceil(rounds / 4)
        sizes["lm, large batch"] = ((4, 128, 64, 128), few)
        sizes["lm, wide, large batch"] = ((2, 256, 64, 128), few)
        if settings.get(LARGER):
            sizes["lm, larger"] = ((6, 512, 64, 256), settings[LARGER])
        if settings.get(OTHERS):
            sizes["lm, long"] = ((8, 320, 32, 320), settings[OTHERS])
            sizes["lm, widest"] = ((3, 768, 32, 128), settings[OTHERS])
    counts = sorted({a * b for a, b in shapes})
    rows: list[report.Row] = []
    notes: tuple[str, ...] = ()
    with tempfile.TemporaryDirectory() as cache_dir:
        of_models: dict[str, Calibration] = {}
        for name, (size, mine) in sizes.items():
            make = functools.partial(_lm, size)
            machines = {n: CpuMachine(f"cpu:{n}", n, counts[-1], cache_dir) for n in counts}
            rows += _rows(name, make, shapes, machines, cache_dir, mine)
            calibration = machines[counts[-1]].calibration
            assert calibration is not None  # programs were planned
            of_models[name] = calibration
    for calibration in {id(one): one for one in of_models.values()}.values():
        notes += _said(calibration, [n for n, one in of_models.items() if one is calibration])
    return rows, (
        *notes,
        *(
            f'The model "{name}" has {layers} layers of width {width}, and a batch of {sequences} '
            f"sequences of {tokens} tokens."
            for name, ((layers, width, sequences, tokens), _) in sizes.items()
        ),
    )


def _said(calibration: Calibration, names: list[str]) -> tuple[str, ...]:
    """A calibration, and the models that were planned with it, for the notes of the table."""
    rates = calibration.rates
    return (
        'For "' + '", "'.join(names) + '", these rates were fitted to calibration steps: '
        f"{1e-9 / rates.flop if rates.flop else math.inf:.0f} GFLOP/s and "
        f"{1e-9 / rates.byte if rates.byte else math.inf:.0f} GB/s of all cores, "
        f"{1e6 * rates.operation:.2f} us for an operation, {1e9 * rates.core_byte:.3f} s more for "
        f"a GB that one core touches, {1e3 * rates.meeting:.3f} ms for a collective of all cores, "
        f"{1e9 * rates.exchanged_byte:.3f} s for a GB that a core puts into collectives, "
        f"{1e9 * rates.new_byte:.3f} s for a GB of memory that is allocated anew, "
        f"{1e6 * rates.division:.2f} us to divide an operation among threads.",
        "This list has the measured time of calibration steps divided by their predicted time, for "
        "each number of cores, and of cores in a collective: "
        + "; ".join(f"{n}, {g}: {c:.3f}" for (n, g), c in calibration.corrections.items())
        + f". The calibration took {calibration.took:.0f} s.",
    )


def targets_of(name: str, rows: list[report.Row]) -> list[report.Target]:
    """How well the predicted order is the measured one: of all pairs, and of those apart."""
    first = min(rows, key=lambda row: row["predicted rank"])
    pairs = list(itertools.combinations(rows, 2))
    said = (
        ("", pairs, first["measured rank"]),
        (
            ", of what the measurement can tell apart",
            [pair for pair in pairs if apart(*pair)],
            1 + sum(apart(row, first) and faster(row, first) for row in rows),
        ),
    )
    targets = []
    for where, some, rank in said:
        what = f"1 - Kendall's tau of {name}, predicted and measured{where}"
        targets.append(report.Target(what, 1 - kendall_tau(some), DISORDER))
        what = f"measured rank of the mesh of {name} that is named first{where}"
        targets.append(report.Target(what, rank, 2))
    return targets


def _certainty(name: str, rows: list[report.Row]) -> str:
    pairs = list(itertools.combinations(rows, 2))
    times = [row["measured ms"].median for row in rows]
    first = min(rows, key=lambda row: row["predicted rank"])
    known = (
        f"For {sum(apart(*pair) for pair in pairs)} of {len(pairs)} pairs of meshes the "
        "measurement tells which mesh of the pair is faster."
    )
    if all(row["measured ms"].low == row["measured ms"].high for row in rows):
        known = "Each mesh was measured once, so it is not known how certain its rank is."
    return (
        f'For the model "{name}", a step on the slowest mesh takes {max(times) / min(times):.2f} '
        "times as long as on the fastest mesh, and on the mesh that is predicted to be the fastest "
        f"{first['measured ms'].median / min(times):.3f} times. {known}"
    )


def faster(one: report.Row, other: report.Row) -> bool:
    """Whether one mesh was measured as faster than another."""
    return one["measured ms"].median < other["measured ms"].median


def apart(one: report.Row, other: report.Row) -> bool:
    """Whether the measurement tells which of two is faster: their quartiles do not overlap."""
    quick, slow = sorted((one["measured ms"], other["measured ms"]), key=lambda ms: ms.median)
    return quick.high < slow.low


def kendall_tau(pairs: list[tuple[report.Row, report.Row]]) -> float:
    """Kendall's tau: the share of pairs predicted in the measured order, less that of the others.

    1 where there are no pairs. Times that are equal do not occur.
    """
    right = sum(
        (one["predicted rank"] < other["predicted rank"]) == faster(one, other)
        for one, other in pairs
    )
    return (2 * right - len(pairs)) / len(pairs) if pairs else 1.0


def _lm(size: tuple[int, int, int, int], mesh_shape: str) -> models.Model:
    return models.lm(*size, mesh_shape=mesh_shape)


def _rows(
    name: str,
    make: Callable[[str], models.Model],
    shapes: list[tuple[int, int]],
    machines: dict[int, CpuMachine],
    cache_dir: str,
    rounds: int,
) -> list[report.Row]:
    programs: dict[str, tuple[models.Model, simd.Program, models.Program]] = {}

    def build(mesh_shape: str, layout: str) -> Built:
        opened: list[simd.Program] = []

        @contextlib.contextmanager
        def block() -> Iterator[Any]:
            with simd.tpu_program(mesh_shape, layout) as program:
                opened.append(program)
                yield program.mesh_impl

        model = make(mesh_shape)
        built = models.build(model, models.WRAPPED, block)
        programs[mesh_shape] = (model, opened[0], built)
        return Built(opened[0], [built.loss], model.batch.size)

    layout = make("batch:1;model:1").layout
    candidates = [Candidate(f"batch:{a};model:{b}", layout, machines[a * b]) for a, b in shapes]
    found = {row.mesh_shape: row for row in search(build, candidates).rows}
    with contextlib.ExitStack() as stack:
        steps = {
            mesh: stack.enter_context(_running(*parts, cache_dir))
            for mesh, parts in programs.items()
        }
        seconds = timing.interleave(steps, rounds, STEPS, f"{name} on each mesh", True)
    measured = {mesh: timing.spread([1e3 * s for s in values]) for mesh, values in seconds.items()}
    order = sorted(measured, key=lambda mesh: measured[mesh].median)
    ranks = sorted(found, key=lambda mesh: found[mesh].step_seconds)
    return [
        {
            "model": name,
            "mesh": mesh,
            "predicted ms": 1e3 * found[mesh].step_seconds,
            "of it collectives": 1e3 * found[mesh].link_seconds,
            "measured ms": measured[mesh],
            "predicted rank": 1 + ranks.index(mesh),
            "measured rank": 1 + order.index(mesh),
        }
        for mesh in found
    ]


@contextlib.contextmanager
def _running(
    model: models.Model, program: simd.Program, built: models.Program, cache_dir: str
) -> Iterator[Callable[[], float]]:
    with xla.session(program, built.lowering, cache_dir=cache_dir) as session:

        def step() -> float:
            return session.run([built.loss], {built.x: model.batch})[0]

        step()
        yield step


def _plot(axes: Any, rows: list[report.Row]) -> None:
    for name in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == name]
        axes.scatter(
            [row["predicted ms"] for row in mine],
            [row["measured ms"].median for row in mine],
            label=name,
        )
    axes.set_xlabel("predicted ms")
    axes.set_ylabel("measured ms")
    axes.legend()


if __name__ == "__main__":
    sys.exit(report.main([measure], "python -m benchmarks.plan", settings={LARGER: 0, OTHERS: 0}))
