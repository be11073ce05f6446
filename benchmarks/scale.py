"""How building, listing and compiling grow with cores and layers; nothing runs."""

from __future__ import annotations

import contextlib
import multiprocessing
import resource
import sys
import time
from typing import Any, Iterator, NamedTuple

from benchmarks import models, report, timing
from mtf_gradsync import simd, xla
from mtf_gradsync.runtimes.simd.program import compiled_only

CORES = (8, 32, 128, 512, 1024)
LAYERS = (2, 4, 8, 16)
# v5e has 256 chips at most, v5p's slices are of three directions.
TOPOLOGIES = {
    8: "v5e:2x4",
    32: "v5e:4x8",
    128: "v5e:8x16",
    512: "v5p:8x8x8",
    1024: "v5p:8x8x16",
}
FULL, ONLY = "to run", "to be compiled"
# Building for 1,024 cores against building for 8.
GROWTH = 3.0
_GIB = 2**20  # of the kilobytes that the system counts in


class _Size(NamedTuple):
    """One measurement: what is built, for how many cores."""

    cores: int
    layers: int
    kind: str


def measure(options: report.Options) -> report.Table:
    """The small transformer, each size in a process of its own for the memory's sake."""
    cores = CORES[:2] if options.quick else options.only.get("cores", CORES)
    layers = LAYERS[:2] if options.quick else options.only.get("layers", LAYERS)
    sizes = [_Size(n, 4, kind) for n in cores for kind in (FULL, ONLY)]
    sizes += [_Size(8, n, ONLY) for n in layers if n != 4]
    context = multiprocessing.get_context("spawn")
    rows = []
    for size in timing.progress(sizes, "sizes"):
        with context.Pool(1) as pool:
            rows.append(pool.apply(_measure, (size,)))
    targets = []
    if not options.quick:
        seconds = {row["cores"]: row["build s"] for row in rows if _is_of_cores(row, ONLY)}
        ratio = seconds[CORES[-1]] / seconds[CORES[0]]
        what = f"building for {CORES[-1]} cores, to be compiled, against {CORES[0]}"
        targets.append(report.Target(what, ratio, GROWTH))
    return report.Table(
        name="scale",
        title="Growth with cores and layers, in seconds of CPU time",
        rows=rows,
        notes=(
            "On N cores the layers are 128 wide, and the batch of 2N sequences of 64 tokens is"
            " split N/2 ways.",
            'In programs "to be compiled" all cores share variables (simd.program.compiled_only),'
            " as in the commands plan and compile.",
            '"compile s" is wall-clock time in the compiler\'s process. "GiB" is the memory of this'
            " process or of the process that builds the program, whichever is larger.",
        ),
        targets=targets,
        plot=lambda axes: _plot(axes, rows),
    )


def _is_of_cores(row: report.Row, kind: str) -> bool:
    return row["program"] == kind and row["layers"] == 4


def _measure(size: _Size) -> report.Row:
    report.prepare()
    # Not counted: the first build also imports what is imported when first used.
    _build(_Size(2, 1, size.kind))
    start = time.process_time()
    program, built = _build(size)
    build = time.process_time() - start
    start = time.process_time()
    simd.list_collectives(program)
    listing = time.process_time() - start
    row: dict[str, Any] = {
        "cores": size.cores,
        "layers": size.layers,
        "program": size.kind,
        "operations": len(built.graph.get_operations()),
        "build s": build,
        "list s": listing,
        "lower s": None,
        "compile s": None,
        "GiB": None,
    }
    if size.kind == ONLY and not xla.why_no_tpu_compiler():
        from mtf_gradsync.runtimes.xla.topology.compiling import compile_lowered, lower

        start = time.process_time()
        with built.graph.as_default():
            lowered = lower(program, [built.loss])
        row["lower s"] = time.process_time() - start
        compiled = compile_lowered(lowered, TOPOLOGIES[size.cores])
        if not compiled.accepted:
            raise RuntimeError(compiled.error)
        row["compile s"] = compiled.seconds
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    row["GiB"] = max(resource.getrusage(one).ru_maxrss for one in who) / _GIB
    return row


def _build(size: _Size) -> tuple[simd.Program, models.Program]:
    mesh_shape = f"batch:{size.cores // 2};model:2"
    model = models.lm(size.layers, batch=2 * size.cores, mesh_shape=mesh_shape)
    opened: list[simd.Program] = []

    @contextlib.contextmanager
    def block() -> Iterator[Any]:
        with simd.tpu_program(mesh_shape, model.layout) as program:
            opened.append(program)
            yield program.mesh_impl

    with compiled_only() if size.kind == ONLY else contextlib.nullcontext():
        built = models.build(model, models.WRAPPED, block)
    return opened[0], built


def _plot(axes: Any, rows: list[report.Row]) -> None:
    for kind in (FULL, ONLY):
        mine = [row for row in rows if _is_of_cores(row, kind)]
        axes.loglog(
            [r["cores"] for r in mine], [r["build s"] for r in mine], marker="o", label=kind
        )
    axes.set_xlabel("cores")
    axes.set_ylabel("seconds to build")
    axes.legend()


if __name__ == "__main__":
    PARTS = {"cores": CORES, "layers": LAYERS}
    sys.exit(report.main([measure], "python -m benchmarks.scale", PARTS))
