"""Training graphs that are built once and forked with, which spares most of a start's time.

Building one makes TensorFlow's eager context, which has threads, and a fork has none. With
TF_OVERRIDE_GLOBAL_THREADPOOL=1 each session makes threads of its own.
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
            made = run_module._training_graph(
                resolve_job(asked)._replace(reports=asked.reports), choose_runtime(asked)
            )
    finally:
        gin.clear_config()

    def use() -> None:
        run_module._training_graph = lambda *unused_args: made
        run_module.tf = _WithGraph(graph)

    return use


class _WithGraph:
    """TensorFlow, but for one graph that is there already."""

    def __init__(self, graph: tf.Graph):
        self.Graph = lambda: graph

    def __getattr__(self, name: str) -> Any:
        return getattr(tf, name)
