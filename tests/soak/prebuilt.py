"""Training graphs that are built once and forked with, which spares most of a start's time.

TensorFlow computes constants while a graph is built, in threads that all its devices share, and a
fork has no threads. With TF_OVERRIDE_GLOBAL_THREADPOOL=1 the devices of each session have theirs.
"""

from __future__ import annotations

import functools
import os
from typing import Any, Callable

import gin

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.session import enable_mesh_defaults
from mtf_gradsync.train import gin_files
from mtf_gradsync.train import run as run_module
from mtf_gradsync.train.job import resolve_job
from mtf_gradsync.train.runners.runner import Start
from mtf_gradsync.train.runtime import choose_runtime
from tests.soak import settings


@functools.lru_cache(maxsize=None)
def prebuilt(runtime: str, config: str) -> Callable[[], None]:
    """Builds the graph of a run.

    Args:
      runtime: its name.
      config: its name.

    Returns:
      A function that makes `mtf_gradsync.train.run.run` take the graph in place of building one; to
      be called in a fork of this process.
    """
    enable_mesh_defaults()
    gin_files.load([str(settings.TINY)], list(settings.bindings(runtime, config)))
    try:
        asked = gin_files.run_config()
        graph = tf.Graph()
        with graph.as_default():
            job = resolve_job(asked)._replace(reports=asked.reports)
            batches = _LaterBatches([job.model.batch_size, job.model.feature_length("targets")])
            chosen = choose_runtime(asked)
            made, simd_program, make_runner = run_module._training_graph(job, batches, chosen)
            if chosen.name == "cpu_replicas":
                runner = make_runner("", Start(), asked, tf.ConfigProto())
                simd_program.emulated(made.lowering)
                make_runner = functools.partial(_begun, runner)
    finally:
        gin.clear_config()

    def take(unused_job: Any, given: Any, unused_runtime: Any) -> Any:
        batches.are(given)
        return made, simd_program, make_runner

    def use() -> None:
        run_module._training_graph = take
        run_module.tf = _WithGraph(graph)

    return use


def _begun(runner: Any, model_dir: str, start: Start, *unused: Any) -> Any:
    """A runner that was made with its graph, for a run's directory and checkpoint."""
    runner._start = start
    runner._checkpoints.prefix = os.path.join(model_dir, "model.ckpt")
    runner._checkpoints.saver.recover_last_checkpoints(list(start.kept))
    return runner


class _LaterBatches:
    """Batches that are drawn in a fork: their session has threads."""

    def __init__(self, shape: list[int]):
        self._shape = shape

    def placeholders(self) -> dict[str, tf.Tensor]:
        self._feeds = {"targets": tf.placeholder(tf.int32, self._shape, name="targets")}
        return self._feeds

    def are(self, batches: Any) -> None:
        batches._feeds = self._feeds
        self.begin, self.next = batches.begin, batches.next


class _WithGraph:
    """TensorFlow, but for one graph that is there already."""

    def __init__(self, graph: tf.Graph):
        self.Graph = lambda: graph

    def __getattr__(self, name: str) -> Any:
        return getattr(tf, name)
