"""Totals of the mesh traffic of a training step."""

from __future__ import annotations

from typing import NamedTuple

from mtf_gradsync import simd
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.optimizers import traits_of
from mtf_gradsync.simd.traffic import has_calls
from mtf_gradsync.train.comparison.parts import PARTS, parts_of
from mtf_gradsync.train.train_graph import TrainGraph

_PART_LABELS = dict(zip(PARTS, ("forward and backward", "gradients", "optimizer")))


class TrafficRow(NamedTuple):
    """Collectives or copies ("transfer") of one kind along a group of mesh axes, taken together.

    They belong to a `part` of the step, "" where it is not known; if `on_updates`, only update
    steps have them. `runs` counts them in one update step, and `bytes_per_core` the bytes that a
    core sends, or a device receives, there.
    """

    operation: str
    group: str
    part: str
    on_updates: bool
    runs: int
    bytes_per_core: int


class Traffic(NamedTuple):
    """The bytes per core of a training step without and with an update, and what they consist of.

    `scalars` are the totals by the names that summaries have, empty where `is_complete` is false:
    functions, such as an update that is one call, are not looked into.
    """

    every_step: int
    update_step: int
    rows: list[TrafficRow]
    scalars: dict[str, float]
    is_complete: bool = True


def list_traffic(graph: TrainGraph, program: simd.Program | None) -> Traffic | None:
    """Lists the mesh traffic of a training step in the default graph, without running it.

    `program` is None on a placement mesh. Returns None where totals cannot be known, as on a mesh
    whose processors share a device.
    """
    try:
        if program is not None:
            report = simd.list_collectives(program, lowering=graph.lowering)
            parts = parts_of(graph, report)
            return _totals(report, {row: _PART_LABELS[part] for row, part in parts.items()})
        (mesh_impl,) = graph.lowering.mesh_to_impl.values()
        report = simd.list_transfers([graph.loss, graph.step], mesh_impl)
    except (simd.UnsupportedProgramError, ValueError):
        return None
    skips = any(traits_of(opt).schedules_updates for opt in graph.optimizers)
    return _totals(report, {}, is_complete=not (skips and has_calls(tf.get_default_graph())))


def _totals(
    report: simd.CommunicationReport, parts: dict[str, str], is_complete: bool = True
) -> Traffic:
    """Returns the totals of a report, the largest first."""
    totals: dict[tuple[str, str, str, bool], list[int]] = {}
    for row in report.rows:
        key = (row.operation, row.group, parts.get(row.name, ""), row.is_conditional)
        total = totals.setdefault(key, [0, 0])
        total[0] += 1 if row.turns is None else row.turns
        total[1] += row.bytes_per_step or row.bytes_per_core or 0
    rows = [TrafficRow(*key, runs, size) for key, (runs, size) in totals.items()]
    return Traffic(
        report.every_step.bytes_per_core,
        report.update_step.bytes_per_core,
        sorted(rows, key=lambda row: -row.bytes_per_core),
        report.scalars() if is_complete else {},
        is_complete,
    )
