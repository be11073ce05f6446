"""Training graphs that are built once and forked with, which spares most of a start's time.

TensorFlow computes constants while a graph is built, in threads that all its devices share, and a
fork has no threads. With TF_OVERRIDE_GLOBAL_THREADPOOL=1 the devices of each session have theirs.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import gin

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.session import enable_mesh_defaults
from mtf_gradsync.train import gin_files
from mtf_gradsync.train import run as run_module
from mtf_gradsync.train.job import resolve_job
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
            made = run_module._training_graph(job, batches, choose_runtime(asked))
    finally:
        gin.clear_config()

    def take(unused_job: Any, given: Any, unused_runtime: Any) -> Any:
        batches.are(given)
        return made

    def use() -> None:
        run_module._training_graph = take
        run_module.tf = _WithGraph(graph)

    return use


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
