"""What it costs to run a SIMD (TPU) program on CPU replicas, against a placement mesh."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
import time
from typing import Any, Callable, Iterator, NamedTuple

import numpy as np

import mtf_gradsync as gs
from benchmarks import models, report, timing
from mtf_gradsync import simd
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.tools.train import gin_files
from mtf_gradsync.tools.train.model import TrainingJob, placeholders, resolve_job
from mtf_gradsync.tools.train.train_graph import build_simd

CONFIG = "lm_cpu_mesh.gin"
# How many ways the batch is split; the model is split two ways.
BATCH_SPLITS = (2, 4, 8, 16)
COMPARED = 4
SECONDS_TARGET, STEP_TARGET = 10.0, 1.5
STEPS = 5
_TINY = ("num_layers = 1", "d_model = 16", "d_ff = 32", "num_heads = 2", "d_kv = 8")


class _Emulated(NamedTuple):
    """An emulated program with its session open.

    Attributes:
      session: the session.
      step: makes a step and returns the loss before it.
      operations: of the graph that was built.
      build: seconds from the empty graph to the lowered step.
      prepare: seconds from there to a session with initialized variables.
      first: seconds of the first step.
    """

    session: simd.CpuReplicaSession
    step: Callable[[], float]
    operations: int
    build: float
    prepare: float
    first: float


def measure(options: report.Options) -> report.Table:
    """Emulates the configured language model on meshes of several sizes."""
    rows: list[report.Row] = []
    targets = []
    for split in BATCH_SPLITS[:2] if options.quick else BATCH_SPLITS:
        job = _job(split, options.quick)
        batch = np.random.RandomState(0).randint(1, 256, [job.model.batch_size, _length(job)])
        gc.collect()
        with contextlib.ExitStack() as stack:
            emulated = stack.enter_context(_emulated(job, batch))
            steps = {"emulated": emulated.step}
            if split == COMPARED:
                steps["placement"] = stack.enter_context(_placement(job, batch, emulated.session))
                models.check_same_training({n: [s() for _ in range(3)] for n, s in steps.items()})
            else:
                emulated.step()
            name = f"emulation, {2 * split} cores"
            seconds = timing.interleave(steps, options.rounds, STEPS, name)
            replicas = len(emulated.session.tf_session.graph.get_operations())
        ratio = timing.ratio(seconds, *steps) if split == COMPARED else None
        rows.append(
            {
                "cores": 2 * split,
                "mesh": f"{split}x2",
                "build s": emulated.build,
                "emulation adds s": emulated.prepare,
                "first step s": emulated.first,
                "step ms": timing.spread([1e3 * s for s in seconds["emulated"]]),
                "placement ms": timing.spread([1e3 * s for s in seconds["placement"]])
                if ratio
                else None,
                "emulated/placement": ratio,
                "operations": emulated.operations,
                "emulated operations": replicas,
            }
        )
        if ratio and not options.quick:
            added = emulated.prepare + emulated.first
            what = f"session and first step on {2 * split} cores"
            targets.append(report.Target(what, added, SECONDS_TARGET, unit=" s"))
            what = f"emulated step on {2 * split} cores against the placement mesh's"
            targets.append(report.Target(what, ratio.median, STEP_TARGET))
    return report.Table(
        name="emulation",
        title=f"Emulating the SIMD program of {CONFIG} on CPU replicas",
        rows=rows,
        notes=(
            "emulation adds: from the lowered program to a session with initialized variables.",
            "The same global batch on every mesh: the arithmetic stays, the operations grow.",
        ),
        targets=targets,
        plot=lambda axes: _plot(axes, rows),
    )


def _job(split: int, quick: bool) -> TrainingJob:
    bindings = [f"train.run.mesh_shape = 'batch:{split};model:2'", "train.run.mesh_devices = None"]
    gin_files.load([CONFIG], [*bindings, *(_TINY if quick else ())])
    return resolve_job(gin_files.bound_run_config())


def _length(job: TrainingJob) -> int:
    return job.model.sequence_length["targets"]


@contextlib.contextmanager
def _emulated(job: TrainingJob, batch: np.ndarray) -> Iterator[_Emulated]:
    start = time.perf_counter()
    with tf.Graph().as_default() as tf_graph:
        graph, program = build_simd(job)
    built = time.perf_counter()
    with program.session(graph.lowering) as session:
        ready = time.perf_counter()

        def step() -> float:
            return session.run([graph.loss, graph.step], {"targets:0": batch})[0]

        step()
        first = time.perf_counter() - ready
        operations = len(tf_graph.get_operations())
        yield _Emulated(session, step, operations, built - start, ready - built, first)


@contextlib.contextmanager
def _placement(
    job: TrainingJob, batch: np.ndarray, like: simd.CpuReplicaSession
) -> Iterator[Callable[[], float]]:
    """The same step on virtual CPU devices, from the variables that a session has now."""
    with tf.Graph().as_default() as tf_graph, tempfile.TemporaryDirectory() as directory:
        features = placeholders(job)
        graph = job.build(features)
        to_slices = graph.lowering.copy_masters_to_slices()
        saver = tf.train.Saver(tf.global_variables())
        config = gs.session_config(num_cpu_devices=job.model.mesh.num_cpu_devices)
        with tf.Session(graph=tf_graph, config=config) as session:
            saver.restore(session, like.save(os.path.join(directory, "variables")))
            session.run(to_slices)
            run = session.make_callable([graph.loss, graph.step], [features["targets"]])
            yield lambda: run(batch)[0]


def _plot(axes: Any, rows: list[report.Row]) -> None:
    cores = [row["cores"] for row in rows]
    for column in ("build s", "emulation adds s", "first step s"):
        axes.plot(cores, [row[column] for row in rows], marker="o", label=column)
    axes.plot(
        cores, [row["step ms"].median / 100 for row in rows], marker="o", label="ten steps s"
    )  # fmt: skip
    axes.set_xlabel("cores")
    axes.set_ylabel("seconds")
    axes.legend()


if __name__ == "__main__":
    sys.exit(report.main([measure], "python -m benchmarks.emulation"))
