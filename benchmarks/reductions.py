"""Reduction strategies against Mesh-TensorFlow's own ring and the bandwidth of memory."""

from __future__ import annotations

import os
import sys
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Callable, Sequence

import numpy as np

from benchmarks import reductions_plot, report, timing
from benchmarks.reduction_profiles import (
    ABOUT,
    PROFILES,
    AllReduceFn,
    Profile,
    Sums,
    build,
    running,
)
from mtf_gradsync import reduce
from mtf_gradsync._private.libraries import tf

DEVICES = (2, 4, 8)
BARE, BEST, LIMIT = "Mesh-TF's ring", "choose_the_best", "limit"
COMPRESSED = "CompressedAllReduce, bfloat16"
# Far more than caches hold, whatever the profile.
COPIED_BYTES = 512 << 20
# On the most devices, of what `choose_the_best` picks.
TARGET_DEVICES = 8
RING_TARGETS = {"t5": 0.2, "tiny": 0.12}
LIMIT_TARGET = 1.25
OPERATIONS_TARGET = 0.1
# Over the fastest strategy that does not round more than another, on every profile.
BEST_TARGET = 1.1


def strategies(devices: int) -> dict[str, AllReduceFn]:
    """What is compared, by name, for a mesh of so many devices."""
    share = [("add_n", 1, 1 << 20), ("add_n", devices, -1)]
    small = {"agg_small_grads_max_bytes": 16 << 10, "agg_small_grads_max_group": 32}
    objects = {
        "RingAllReduce": reduce.RingAllReduce(),
        "AllReduce, ring, 1 pack": reduce.AllReduce("ring"),
        "ReductionToOneDevice, fixed": reduce.ReductionToOneDevice("/device:CPU:0"),
        "ReductionToOneDevice, in turns": reduce.ReductionToOneDevice(),
        "AllReduce, 1 pack": reduce.AllReduce(),
        "AllReduce, a pack a device": reduce.AllReduce(num_packs=devices),
        "AllReduce, small ones grouped": reduce.AllReduce(num_packs=0, **small),
        "HierarchicalAllReduce": reduce.HierarchicalAllReduce(),
        "HierarchicalAllReduce, shards": reduce.HierarchicalAllReduce(share, **small),
        "CollectiveAllReduce": reduce.CollectiveAllReduce(),
        "FusedAllReduce": reduce.FusedAllReduce(),
        COMPRESSED: reduce.CompressedAllReduce(),
    }
    return {
        BARE: _mesh_tf,
        **{name: strategy.all_reduce for name, strategy in objects.items()},
        BEST: _choose,
    }


def _mesh_tf(mesh_impl: Any, values: Sequence[Any], groups: reduce.ProcessorGroups) -> list[Any]:
    return [mesh_impl.allreduce(x, list(groups.mesh_axes), "SUM") for x in values]


def _choose(mesh_impl: Any, values: Sequence[Any], groups: reduce.ProcessorGroups) -> list[Any]:
    strategy = reduce.choose_the_best(mesh_impl, values, groups)
    return strategy.all_reduce(mesh_impl, values, groups)


def measure(options: report.Options) -> report.Table:
    """Times all strategies on each profile and number of devices."""
    names = options.only.get("profiles", tuple(PROFILES))
    numbers = options.only.get("devices", DEVICES)
    if options.quick:
        numbers = numbers[:1]
    rows: list[report.Row] = []
    targets: list[report.Target] = []
    for name in names:
        for devices in numbers:
            profile = PROFILES[name](devices)
            if options.quick:
                profile = profile._replace(shapes=[[-(-d // 8) for d in s] for s in profile.shapes])
            some, seconds = _measure_profile(name, devices, profile, options)
            rows += some
            if not options.quick:
                targets += _targets(name, devices, some, seconds)
    return report.Table(
        name="reductions",
        title="Sums of gradients over CPU devices of one process, by strategy",
        rows=rows,
        notes=(
            "t5: 60 gradients, 75 MB a processor; tiny: 60, 0.25 MB; big: one of 64 MiB; lm: those"
            " of configs/lm_cpu_mesh.gin's model. float32; mesh of one axis, lm: model split in two"
            " from 4 devices on.",
            "A time is that until each device has every sum. Medians and quartiles of the ratios of"
            " each round; Grappler off.",
            "limit: the bytes that one pass moves over the bandwidth at which numpy, a thread a"
            " core, copies 256 MiB in the same round",
            "(512 MiB moved). One pass: each group reads what its n members have and writes one"
            " sum, (n + 1) times the bytes of one of them.",
            "What other devices read of a sum is not counted: in one process an identity between"
            " CPU devices copies nothing.",
            "A sum can be faster than its limit, because it reads more than it writes.",
        ),
        targets=targets,
        plot=lambda axes: reductions_plot.plot(axes, rows, BARE, ABOUT),
    )


def _measure_profile(
    name: str, devices: int, profile: Profile, options: report.Options
) -> tuple[list[report.Row], dict[str, list[float]]]:
    graph, sums = build(profile, strategies(devices))
    steps = 1 if profile.replica_bytes > 1 << 22 else 20
    threads = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(threads) as pool, running(graph, devices) as session:
        check(session, sums)
        programs = {n: session.make_callable(some.done) for n, some in sums.items()}
        programs[LIMIT] = copying(COPIED_BYTES, pool, threads)
        for program in programs.values():
            program()
        what = f"{name} on {devices}"
        seconds = timing.interleave(programs, options.rounds, steps, what, settle=True)
    seconds[LIMIT] = [s * profile.limit_bytes / COPIED_BYTES for s in seconds[LIMIT]]
    rows = [
        {
            "profile": name,
            "devices": devices,
            "strategy": program,
            "ms": timing.spread([1e3 * s for s in seconds[program]]).median,
            "time/ring": timing.ratio(seconds, program, BARE),
            "time/limit": timing.ratio(seconds, program, LIMIT),
            "graph ops": sums[program].operations if program in sums else None,
        }
        for program in programs
    ]
    return rows, seconds


def copying(num_bytes: int, pool: Executor, threads: int) -> Callable[[], Any]:
    """A function that moves bytes in memory, half of them read and half written.

    Args:
      num_bytes: how many, both ways together.
      pool: runs the threads.
      threads: how many copy.

    Returns:
      The function.
    """
    each = -(-num_bytes // (2 * threads))
    # Not zeros, whose pages are all one until they are written.
    pairs = [(np.ones(each, np.uint8), np.ones(each, np.uint8)) for _ in range(threads)]
    return lambda: list(pool.map(lambda pair: np.copyto(*pair), pairs))


def check(session: tf.Session, sums: dict[str, Sums]) -> None:
    """Raises RuntimeError unless strategies give the sums that Mesh-TF's ring gives.

    Times mean nothing if they do not. A gradient's values lie between -1 and 1, and groups have 8
    members at most: float32 loses less than 8 * 8 * 2**-24 on the way; bfloat16, which rounds the
    values and the sum, 2 * 8 * 2**-8.
    """
    some = sorted({0, len(sums[BARE].results) // 2, len(sums[BARE].results) - 1})
    want = session.run([sums[BARE].results[i] for i in some])
    for name, strategy in sums.items():
        tolerance = 2 * 8 * 2.0**-8 if name == COMPRESSED else 2 * 8 * 8 * 2.0**-24
        for ours, theirs in zip(session.run([strategy.results[i] for i in some]), want):
            off = max(np.abs(a - b).max() for a, b in zip(ours, theirs))
            if off > tolerance:
                raise RuntimeError(f"{name} is off Mesh-TF's ring by {off}.")


def _targets(
    name: str, devices: int, rows: list[report.Row], seconds: dict[str, list[float]]
) -> list[report.Target]:
    by_strategy = {row["strategy"]: row for row in rows}
    best, where = by_strategy[BEST], f"on {name}, {devices} devices"
    targets = []
    if devices == TARGET_DEVICES and name in RING_TARGETS:
        ratio = best["time/ring"].median
        targets.append(report.Target(f"{BEST} over the ring {where}", ratio, RING_TARGETS[name]))
    if devices == TARGET_DEVICES and name == "t5":
        ratio = best["time/limit"].median
        targets.append(report.Target(f"{BEST} over the limit {where}", ratio, LIMIT_TARGET))
    if devices == TARGET_DEVICES and name == "tiny":
        ratio = best["graph ops"] / by_strategy[BARE]["graph ops"]
        targets.append(report.Target(f"{BEST}'s graph ops {where}", ratio, OPERATIONS_TARGET))
    others = [n for n in seconds if n not in (BEST, LIMIT, COMPRESSED)]
    fastest = min(others, key=lambda n: by_strategy[n]["time/ring"].median)
    ratio = timing.ratio(seconds, BEST, fastest).median
    targets.append(report.Target(f"{BEST} over {fastest} {where}", ratio, BEST_TARGET))
    return targets


if __name__ == "__main__":
    parts = {"profiles": tuple(PROFILES), "devices": DEVICES}
    sys.exit(report.main([measure], "python -m benchmarks.reductions", parts))
