"""All tables, one after the other: `python -m benchmarks`."""

from __future__ import annotations

import sys

from benchmarks import (
    accumulation,
    bucket_size,
    emulation,
    graph_building,
    islands,
    islands_merges,
    less_communication,
    mesh_optimizer,
    numerics,
    plan,
    races,
    reductions,
    repeatability,
    report,
    rounding,
    runtimes,
    scale,
    sharded_sums,
    sharded_updates,
    simd_collectives,
    spikes,
    sync_replicas,
    timeline,
    training_step,
    two_processes,
    way,
)

TABLES = (
    training_step,
    runtimes,
    sharded_updates,
    sharded_sums,
    accumulation,
    graph_building,
    mesh_optimizer,
    numerics,
    simd_collectives,
    sync_replicas,
    emulation,
    bucket_size,
    reductions,
    repeatability,
    races,
    plan,
    scale,
    two_processes,
    way,
    less_communication,
    islands,
    islands_merges,
    rounding,
    spikes,
    timeline,
)

if __name__ == "__main__":
    measures = [table.measure for table in TABLES]
    measures += [less_communication.measure_link, islands.measure_kills]
    sys.exit(report.main(measures, "python -m benchmarks"))
