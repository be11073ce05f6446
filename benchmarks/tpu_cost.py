"""What the compiler for TPUs expects of a step: bare, by each wrapper, and by hand in JAX."""

from __future__ import annotations

import collections
import importlib.util
import math
import re
import sys
from typing import Any, Callable, NamedTuple, Sequence

import mtf_gradsync as gs
from benchmarks import lm_by_hand, models, report, wrappers_by_hand
from benchmarks.hlo import hlo_from_text
from mtf_gradsync import simd, xla
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.runtimes.xla.topology.compiled import CoreMemory
from mtf_gradsync.runtimes.xla.topology.estimate import CostEstimate, read_estimate
from mtf_gradsync.runtimes.xla.topology.slices import slice_of

TOPOLOGIES = ("v3:2x2", "v5e:2x4", "v5p:2x2x2")
# Layers, d_model, batch and length.
LMS = {"small lm": (4, 128, 16, 64), "larger lm": (6, 512, 64, 256)}
MODELS = ("dense", *LMS)
BARE, CLIPPED, BY_HAND = "bare", "bare, clipping by hand", "JAX by hand"
# What `wrappers_by_hand` has of a step, and its sizes of the models.
HANDS = {
    BARE: wrappers_by_hand.BARE,
    "LossScale": wrappers_by_hand.LOSS_SCALE,
    "Accumulation": wrappers_by_hand.ACCUMULATION,
    "SyncReplicas": wrappers_by_hand.SYNC_REPLICAS,
}
SIZES = {"dense": (40, 64, 64), **LMS}
_COLLECTIVE = re.compile(r" (all-reduce|all-gather|reduce-scatter)(?:-start)?\(")
CLIP_NORM, MICROBATCHES = 1.0, 8
# Bytes that an estimate counts for a byte that is copied to the core's fast memory: read and
# written where the copy begins, and where it ends. (For each, the bare dense model and small LM
# have 3.7 to 4.1 more on v5e and v5p than on v3, which makes no such copies.)
COUNTED_FOR_A_COPY = 4
# Of bare, in seconds and bytes touched; of sharded updates also in memory.
SAME, SHARDED = 1.005, 1.02


class _Step(NamedTuple):
    """A way to make a step.

    Attributes:
      make: from the model to its optimizer.
      against: the step that it is compared with.
      clips: whether the program clips its gradients itself.
      reports: whether it computes what `mtf_gradsync.reported` has.
      passes: how often its state makes a step read or write all accumulators once, in a step with
        an update and in one without.
      reads_sums: whether it reads all reduced gradients once more.
    """

    make: Callable[[models.Model], Any]
    against: str = BARE
    clips: bool = False
    reports: bool = False
    passes: tuple[int, int] = (0, 0)
    reads_sums: bool = False


def _of(model: models.Model) -> dict[str, str]:
    return {"mesh_shape": model.mesh_shape, "layout": model.layout}


def _clipping(model: models.Model) -> Any:
    return gs.ClipByGlobalNormOptimizer(model.make_optimizer(), CLIP_NORM, **_of(model))


def _from_all_replicas(model: models.Model) -> Any:
    num_shards = gs.ReplicaAxes(model.mesh_shape, model.layout).num_shards
    return gs.SyncReplicasOptimizer(model.make_optimizer(), num_shards, **_of(model))


STEPS = {
    BARE: _Step(lambda m: m.make_optimizer()),
    CLIPPED: _Step(lambda m: m.make_optimizer(), clips=True),
    "CrossShard": _Step(lambda m: gs.CrossShardOptimizer(m.make_optimizer())),
    "CrossShard, reports": _Step(
        lambda m: gs.CrossShardOptimizer(m.make_optimizer()), CLIPPED, reports=True
    ),
    "ClipByGlobalNorm": _Step(_clipping, CLIPPED),
    # Whether all gradients are finite is known after one more pass over their sums.
    "LossScale": _Step(
        lambda m: gs.LossScaleOptimizer(m.make_optimizer(), **_of(m)), reads_sums=True
    ),
    # A microbatch step reads and writes the accumulators; an update reads them and makes them zero.
    "Accumulation": _Step(
        lambda m: gs.GradientAccumulationOptimizer(m.make_optimizer(), MICROBATCHES, **_of(m)),
        passes=(2, 2),
    ),
    # With the gradients of all shards the update needs no accumulators.
    "SyncReplicas": _Step(_from_all_replicas, passes=(0, 2)),
    "ShardedUpdate": _Step(lambda m: gs.ShardedUpdateOptimizer(m.make_optimizer(), **_of(m))),
}


def measure(options: report.Options) -> report.Table:
    """Compiles every step for every topology; nothing is run."""
    missing = xla.why_no_tpu_compiler()
    if missing:
        raise SystemExit(f"There is no compiler for TPUs here: {missing}")
    import jax

    by_hand = importlib.util.find_spec("optax") is not None and hasattr(jax, "shard_map")
    rows: list[report.Row] = []
    targets: list[report.Target] = []
    for topology in options.only["topologies"]:
        for name in options.only["models"]:
            chosen = [s for s in STEPS if s in (BARE, CLIPPED, *options.only["steps"])]
            of_model = [row for step in chosen for row in _compiled(name, step, topology, options)]
            if by_hand and not options.quick and BY_HAND in options.only["steps"]:
                if name in LMS:
                    of_model.append(_by_hand(name, topology, BY_HAND))
                of_model += [row for s in chosen for row in _wrapper_by_hand(name, s, topology)]
            seen = compare(of_model)
            if not options.quick:
                targets += _targets(f"{name} on {topology}", seen)
            rows += of_model
    notes = (
        "The compiler's own estimate, which is no timing: nothing overlaps, and there is no host. "
        "MB a core: arguments, temporaries and code.",
        "/bare: over the bare optimizer; ClipByGlobalNorm and reports, which make a norm, "
        "over a program that clips by hand.",
        "update and skipped: programs with conditionals, whose branches the estimate does not "
        "count, compiled with all conditions true and false put in line.",
        f"Accumulation: of {MICROBATCHES} microbatch steps.",
        "/necessary: over the bare step and what the wrapper's state makes necessary: accumulators "
        "read and written once, sums read once more; seconds by the bare step's rate. no copies: "
        "bytes, without the compiler's own copies to fast memory on both sides.",
        "/by hand: over the bare step and what the same algorithm by hand in JAX adds to its own "
        "bare step; skipped steps over that of the algorithm by hand.",
    )
    if not by_hand:
        notes += ("JAX by hand is not in it, for which optax and jax 0.6.1 or newer are needed.",)
    return report.Table("tpu_cost", "What the TPU compiler expects of a step", rows, notes, targets)


def compare(rows: Sequence[report.Row]) -> dict[str, report.Row]:
    """Adds to a model's rows for one topology how each compares; returns them by their step."""
    seen = {row["step"]: row for row in rows}
    for row in rows:
        against = STEPS[row["step"]].against if row["step"] in STEPS else BARE
        row["us/bare"] = row["us"] / seen[against]["us"]
        row["MB/bare"] = row["MB touched"] / seen[against]["MB touched"]
        row["core/bare"] = row["MB a core"] / seen[against]["MB a core"]
        _compare_with_necessary(row, seen[against], seen[BARE])
        _compare_with_hand(row, seen)
    return seen


def _compare_with_necessary(row: report.Row, against: report.Row, bare: report.Row) -> None:
    """Adds how a step compares with the bare one and what the wrapper's state makes necessary."""
    necessary = row.pop("passes") * (row["arguments"] - bare["arguments"]) + row.pop("sums")
    bytes_ = against["MB touched"] + necessary
    row["us/necessary"] = row["us"] / (against["us"] * bytes_ / against["MB touched"])
    row["MB/necessary"] = row["MB touched"] / bytes_
    ours, theirs = (r["MB touched"] - COUNTED_FOR_A_COPY * r["MB copied"] for r in (row, against))
    row["no copies"] = ours / (theirs + necessary)


def _compare_with_hand(row: report.Row, seen: dict[str, report.Row]) -> None:
    """Adds how a step compares with the bare one and what the algorithm adds to it by hand."""
    hand, bare = seen.get(f"{BY_HAND}, {row['step']}"), seen.get(f"{BY_HAND}, {BARE}")
    for unit, column in (("us", "us/by hand"), ("MB touched", "MB/by hand")):
        row[column] = None
        if hand is None or bare is None or row["step"] == BARE:
            continue
        # A step without an update has nothing of the bare step's update.
        own = hand[unit] - bare[unit] if row["step"].endswith(", update") else None
        row[column] = row[unit] / (hand[unit] if own is None else seen[BARE][unit] + own)


def _targets(where: str, seen: dict[str, report.Row]) -> list[report.Target]:
    targets = []
    for step in sorted(set(seen) & {"CrossShard", "CrossShard, reports", "ClipByGlobalNorm"}):
        row = seen[step]
        targets.append(report.Target(f"{step}, {where}, us", row["us/bare"], SAME))
        targets.append(report.Target(f"{step}, {where}, bytes touched", row["MB/bare"], SAME))
    targets += [
        report.Target(f"{step}, {where}, us/by hand", row["us/by hand"], SAME)
        for step, row in seen.items()
        if row["us/by hand"] is not None
    ]
    if "ShardedUpdate" not in seen:
        return targets
    row = seen["ShardedUpdate"]
    targets.append(report.Target(f"ShardedUpdate, {where}, us", row["us/bare"], SHARDED))
    targets.append(report.Target(f"ShardedUpdate, {where}, memory", row["core/bare"], 1.0))
    return targets


def _model(name: str, quick: bool) -> models.Model:
    if name == "dense":
        return models.dense(layers=6, width=16) if quick else models.dense()
    return models.lm(layers=1, d_model=32, length=16) if quick else models.lm(*LMS[name])


def _compiled(name: str, step: str, topology: str, options: report.Options) -> list[report.Row]:
    return rows_of(_model(name, options.quick), name, step, topology)


def rows_of(model: models.Model, name: str, step: str, topology: str) -> list[report.Row]:
    """The rows of a step: two where it has conditionals, with all of them true and false."""
    program, fetches, sums = _program(model, STEPS[step])
    compiled = xla.compile_for_tpu(program, fetches, topology)
    if compiled.memory is None:
        raise RuntimeError(f"{topology} refuses {step} of {name}: {compiled.error}")
    found = collections.Counter(c.operation for c in compiled.after)
    in_branches = sum(c.is_conditional and c.operation == "all-reduce" for c in compiled.after)
    estimates = {step: compiled.estimates["step"]}
    if "conditions_true" in compiled.estimates:
        estimates = {
            f"{step}, update": compiled.estimates["conditions_true"],
            f"{step}, skipped": compiled.estimates["conditions_false"],
        }
    rows = [
        {
            **_row(name, topology, label, cost, compiled.memory, found, in_branches),
            "passes": passes,
            "sums": sums / 1e6 if STEPS[step].reads_sums else 0.0,
        }
        for (label, cost), passes in zip(estimates.items(), STEPS[step].passes)
    ]
    print(*rows, sep="\n", file=sys.stderr, flush=True)
    return rows


def _row(
    name: str,
    topology: str,
    step: str,
    cost: CostEstimate,
    memory: CoreMemory,
    found: collections.Counter[str],
    in_branches: int,
) -> report.Row:
    return {
        "model": name,
        "topology": topology,
        "step": step,
        "us": 1e6 * cost.compiler_seconds,
        "MB touched": cost.compiler_bytes / 1e6,
        "MB copied": cost.bytes_copied / 1e6,
        "arguments": memory.arguments / 1e6,
        "MB a core": memory.total / 1e6,
        "all-reduces": found["all-reduce"],
        "in branches": in_branches,
        "reduce-scatters": found["reduce-scatter"],
        "all-gathers": found["all-gather"],
    }


def _program(model: models.Model, step: _Step) -> tuple[simd.Program, list[tf.Tensor], int]:
    """The SIMD program of a step, what is fetched of it, and the bytes of a core's gradients."""
    with tf.Graph().as_default():
        x = tf.placeholder(tf.as_dtype(model.batch.dtype), model.batch.shape)
        with simd.tpu_program(model.mesh_shape, model.layout) as program:
            mesh = mtf.Mesh(mtf.Graph(), "mesh")
            loss = model.make_loss(mesh, x)
            variables = mesh.graph.trainable_variables
            optimizer = step.make(model)
            if isinstance(optimizer, gs.LossScaleOptimizer):
                grads = [g for g, _ in optimizer.compute_gradients(loss, variables)]
            else:
                grads = mtf.gradients([loss], [v.value for v in variables])
            if step.clips:
                squares = [mtf.reduce_sum(mtf.square(g)) for g in grads]
                scale = mtf.minimum(CLIP_NORM * mtf.rsqrt(mtf.add_n(squares)), 1.0)
                grads = [g * scale for g in grads]
            operations = optimizer.apply_grads(grads, variables)
            tensors = [loss, *(gs.reported(optimizer).values() if step.reports else ())]
            lowering = mtf.Lowering(mesh.graph, {mesh: program.mesh_impl})
            fetches = [lowering.export_to_tf_tensor(t) for t in tensors]
            for operation in operations:
                lowering.lowered_operation(operation)
            shape = program.mesh_impl.slice_shape
            sums = sum(_padded(shape(v.shape)) * v.activation_dtype.size for v in variables)
    return program, fetches, sums


def _padded(shape: Sequence[int]) -> int:
    """The numbers of a slice as a TPU stores it, in rows of 128 and tiles of 8 x 128."""
    if len(shape) < 2:
        return 128 * math.ceil(math.prod(shape) / 128)
    *others, rows, columns = shape
    orders = ((rows, columns), (columns, rows))
    tiles = min(math.ceil(r / 8) * math.ceil(c / 128) for r, c in orders)
    return math.prod(others) * tiles * 8 * 128


def _by_hand(
    name: str, topology: str, label: str, kind: str | None = None, condition: bool = True
) -> report.Row:
    if kind is None:
        answer = lm_by_hand.cost(topology, *LMS[name])
    else:
        answer = wrappers_by_hand.cost(topology, kind, condition, *SIZES[name])
    # By the text: newer compilers name groups of cores by the axes of a mesh.
    found = collections.Counter(_COLLECTIVE.findall(answer["hlo"]))
    cost = read_estimate(answer["cost"], hlo_from_text(answer["hlo"]), slice_of(topology).rates)
    row = _row(name, topology, label, cost, CoreMemory(*answer["memory"]), found, 0)
    return {**row, "passes": 0, "sums": 0.0}


def _wrapper_by_hand(name: str, step: str, topology: str) -> list[report.Row]:
    if step not in HANDS:
        return []
    if step == BARE:
        return [_by_hand(name, topology, f"{BY_HAND}, {BARE}", HANDS[step])]
    ends = {"update": True, "skipped": False}
    return [
        _by_hand(name, topology, f"{BY_HAND}, {step}, {end}", HANDS[step], condition)
        for end, condition in ends.items()
    ]


if __name__ == "__main__":
    parts = {"topologies": TOPOLOGIES, "models": MODELS, "steps": (*STEPS, BY_HAND)}
    sys.exit(report.main([measure], "python -m benchmarks.tpu_cost", parts))
