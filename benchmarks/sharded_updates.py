"""What a step takes with sharded updates: time, memory for slots, bytes on the wire."""

from __future__ import annotations

import collections
import contextlib
import math
import sys
from typing import Any, Callable, Iterator

import mtf_gradsync as gs
from benchmarks import models, report, timing
from mtf_gradsync import simd, xla

BARE, WHOLE, PARTS = "bare", "whole", "parts"
TOPOLOGY = "v5e:2x4"
STEPS = 8
# Of a step on `placement_mesh_impl`, against bare Mesh-TensorFlow; of one on XLA devices, against
# the one without parts; of the bytes that the sum of gradients sends.
PLACEMENT, DEVICES, WIRE = 0.55, 0.95, 1.0


def measure(options: report.Options) -> report.Table:
    """Both models; times, then what the variables, the collectives and the compiler say."""
    rows: list[report.Row] = []
    targets: list[report.Target] = []
    for model in models.models(options.quick):
        row: report.Row = {"model": model.name}
        _time_on_placement_mesh(model, options, row)
        built = {name: _SimdStep(model, name) for name in (WHOLE, PARTS)}
        _time_on_devices(model, built, options, row)
        num_shards = gs.ReplicaAxes(model.mesh_shape, model.layout).num_shards
        slots = {name: step.slot_bytes() for name, step in built.items()}
        row["slots a core, KB"] = slots[PARTS] / 1024
        row["slots parts/whole"] = slots[PARTS] / slots[WHOLE]
        wire = {name: step.wire_bytes() for name, step in built.items()}
        row["gradients and values on the wire, KB"] = wire[PARTS][0] / 1024
        row["wire parts/whole"] = wire[PARTS][0] / wire[WHOLE][0]
        row["whole step's wire parts/whole"] = wire[PARTS][1] / wire[WHOLE][1]
        row["compiled: saved/slots saved"] = _saved_by_compiler(built, slots)
        rows.append(row)
        if not options.quick:
            if model.name == "dense":
                # Of the transformer, small factored statistics stay whole.
                share = 1 / num_shards + 0.02
                targets.append(report.Target("slots of dense", row["slots parts/whole"], share))
            targets += [
                report.Target(f"wire of {model.name}", row["wire parts/whole"], WIRE),
            ]
            if model.name == "lm":
                on_mesh, on_devices = row["placement parts/bare"], row["XLA parts/whole"]
                targets += [
                    report.Target("lm on placement_mesh_impl", on_mesh.median, PLACEMENT),
                    report.Target("lm on XLA devices", on_devices.median, DEVICES),
                ]
    if not options.quick:
        rows.append({**dict.fromkeys(rows[0]), **_wide(options)})
    return report.Table(
        name="sharded_updates",
        title="Sharded updates (parts) against CrossShardOptimizer (whole) and bare Mesh-TF",
        rows=rows,
        notes=(
            "placement: on mtf_gradsync.placement_mesh_impl, Grappler off. floor: forward and "
            "backward passes alone, with no sum and no update.",
            "wire: what a core sends, by the least that each collective can: 2(n-1)/n of its "
            "operand for a sum, (n-1)/n for a reduce-scatter or an all-to-all.",
            f"compiled: bytes of variables that the compiler for {TOPOLOGY} saves on a core, over "
            "those of the slots that the variables say; its layouts pad. None where it died.",
        ),
        targets=targets,
    )


def _wide(options: report.Options) -> report.Row:
    """A transformer whose update takes as long as it has numbers, not operations."""
    model = models.lm(layers=2, d_model=512, batch=8, length=32)._replace(name="wide lm")
    row: report.Row = {"model": model.name}
    _time_on_devices(model, {n: _SimdStep(model, n) for n in (WHOLE, PARTS)}, options, row)
    return row


def _with_parts(model: models.Model) -> models.Model:
    def make() -> Any:
        return gs.ShardedUpdateOptimizer(
            model.make_optimizer(), mesh_shape=model.mesh_shape, layout=model.layout
        )

    return model._replace(make_optimizer=make)


def _build(model: models.Model, name: str, block: Callable[[], Any] | None) -> models.Program:
    if name == PARTS:
        return models.build(_with_parts(model), models.BARE, block)
    return models.build(model, models.WRAPPED if name == WHOLE else models.BARE, block)


def _time_on_placement_mesh(model: models.Model, options: report.Options, row: report.Row) -> None:
    def mesh() -> Any:
        return contextlib.nullcontext(models.placement_mesh(model, gs.placement_mesh_impl))

    programs = {BARE: _build(model, BARE, None)}
    programs.update((name, _build(model, name, mesh)) for name in (WHOLE, PARTS))
    programs[models.FLOOR] = models.build(model, models.FLOOR, mesh)
    seconds = models.time_steps(model, programs, False, options)
    for name in programs:
        row[f"placement {name} ms"] = timing.spread([1e3 * s for s in seconds[name]])
    row["placement whole/bare"] = timing.ratio(seconds, WHOLE, BARE)
    row["placement parts/bare"] = timing.ratio(seconds, PARTS, BARE)
    row["placement floor/bare"] = timing.ratio(seconds, models.FLOOR, BARE)


def _time_on_devices(
    model: models.Model, built: dict[str, _SimdStep], options: report.Options, row: report.Row
) -> None:
    with contextlib.ExitStack() as stack:
        steps = {}
        for name, one in built.items():
            session = stack.enter_context(
                xla.session(one.program, one.built.lowering, cache_dir=None)
            )
            fetches, feeds = [one.built.loss, one.built.update], {one.built.x: model.batch}
            steps[name] = lambda s=session, f=fetches, d=feeds: s.run(f, d)[0]
        models.check_same_training({n: [step() for _ in range(3)] for n, step in steps.items()})
        seconds = timing.interleave(steps, options.rounds, STEPS, f"{model.name} devices", True)
    for name in steps:
        row[f"XLA {name} ms"] = timing.spread([1e3 * s for s in seconds[name]])
    row["XLA parts/whole"] = timing.ratio(seconds, PARTS, WHOLE)


class _SimdStep:
    """A training step as a SIMD program.

    Attributes:
      program: the program.
      built: the step.
    """

    program: simd.Program

    def __init__(self, model: models.Model, name: str):
        @contextlib.contextmanager
        def block() -> Iterator[Any]:
            with simd.tpu_program(model.mesh_shape, model.layout) as self.program:
                yield self.program.mesh_impl

        self.built = _build(model, name, block)
        self._axes = gs.ReplicaAxes(model.mesh_shape, model.layout)

    def slot_bytes(self) -> int:
        """Bytes of slots on a core."""
        slots = [v for v in self.built.lowering.graph.all_variables if not v.trainable]
        slice_size = self.program.mesh_impl.slice_size
        return sum(slice_size(v.shape) * v.slice_dtype.size for v in slots)

    def wire_bytes(self) -> tuple[int, int]:
        """Bytes that a core sends: for gradients and new values, and in the whole step."""
        rows = simd.list_collectives(self.program, lowering=self.built.lowering).rows
        sizes = {dim.name: dim.size for dim in self.program.mesh_impl.shape.dims}
        sent = {}
        for row in rows:
            group = math.prod(sizes[axis] for axis in row.group.split("+"))
            passes = 2 if row.operation == "CrossReplicaSum" else 1
            sent[row] = passes * (row.bytes_per_core or 0) * (group - 1) // group
        replica = "+".join(self._axes.mesh_shape[a].name for a in self._axes.mesh_axes)
        groups: collections.Counter[tuple[str, str]] = collections.Counter()
        for row, num_bytes in sent.items():
            if row.group == replica:
                groups[row.operation, row.together or row.name] += num_bytes
        largest = {
            operation: max((n for key, n in groups.items() if key[0] == operation), default=0)
            for operation in ("CrossReplicaSum", "XlaReduceScatter", "AllToAll")
        }
        # Others are of an update's statistics.
        if largest["XlaReduceScatter"]:
            of_gradients = largest["XlaReduceScatter"] + largest["AllToAll"]
        else:
            of_gradients = largest["CrossReplicaSum"]
        return of_gradients, sum(sent.values())


def _saved_by_compiler(built: dict[str, _SimdStep], slots: dict[str, int]) -> float | None:
    """Bytes of arguments that the TPU compiler saves, over the bytes of slots saved."""
    if xla.why_no_tpu_compiler():
        return None
    memory = {}
    for name, step in built.items():
        try:
            compiled = xla.compile_for_tpu(step.program, topology=TOPOLOGY)
        except xla.CompilerDiedError:
            # libtpu 0.0.17 dies of a check of its own on the transformer without parts.
            return None
        if compiled.memory is None:
            raise RuntimeError(f"{TOPOLOGY} refuses the program: {compiled.error}")
        memory[name] = compiled.memory.arguments
    return (memory[WHOLE] - memory[PARTS]) / (slots[WHOLE] - slots[PARTS])


if __name__ == "__main__":
    sys.exit(report.main([measure], "python -m benchmarks.sharded_updates"))
