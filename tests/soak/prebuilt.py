"""Training graphs that are built once and forked with, which spares most of a start's time.

TensorFlow computes constants while a graph is built, in threads that all its devices share, and a
fork has no threads. With TF_OVERRIDE_GLOBAL_THREADPOOL=1 the devices of each session have theirs.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any, Callable, ContextManager
from unittest import mock

import gin

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes import sessions
from mtf_gradsync.runtimes.settings import enable_mesh_defaults
from mtf_gradsync.runtimes.starting import Start
from mtf_gradsync.tools.train import gin_files
from mtf_gradsync.tools.train import run as run_module
from mtf_gradsync.tools.train.config import transformer_utils
from mtf_gradsync.tools.train.model import resolve_job
from mtf_gradsync.tools.train.runner import choose_runtime
from tests.soak import settings


def import_all() -> None:
    """Imports, and reads, what a program needs before it is forked."""
    transformer_utils()
    import jinja2  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import tensorflow_datasets  # noqa: F401


def prebuilt(runtime: str, config: str) -> Callable[[], None]:
    """Builds the graph of a run.

    Args:
      runtime: its name.
      config: its name.

    Returns:
      A function that makes `mtf_gradsync.tools.train.run.run` take the graph in place of building
      one; to be called in a fork of this process.
    """
    # How many processes share a mesh of XLA devices is not in the graph.
    chosen = settings.RUNTIMES[runtime]
    return _built(chosen.binding, chosen.devices, config)


@functools.lru_cache(maxsize=None)
def _built(binding: str, devices: tuple[str, ...], config: str) -> Callable[[], None]:
    enable_mesh_defaults()
    gin_files.load([str(settings.TINY)], list(settings.bindings(binding, config)))
    try:
        asked = gin_files.bound_run_config()
        if devices:
            asked = dataclasses.replace(asked, mesh_devices=list(devices))
        graph = tf.Graph()
        with graph.as_default():
            job = resolve_job(asked)._replace(reports=asked.reports)
            batches = _LaterBatches([job.model.batch_size, job.model.feature_length("targets")])
            chosen = choose_runtime(asked, "grpc://later" if devices else "")
            places = []
            make_place = sessions.runtime_for

            def runtime_for(*args: Any) -> Any:
                places.append(make_place(*args))
                return places[-1]

            with mock.patch.object(sessions, "runtime_for", runtime_for):
                made, simd_program, make_runner = run_module.training_graph(
                    job, batches, chosen, tf.ConfigProto()
                )
            if chosen.name == "cpu_replicas":
                # What it runs is made from the graph with all that the runner adds.
                make_runner = _LaterRunner(make_runner, asked)
                simd_program.emulated(made.lowering)
    finally:
        gin.clear_config()

    def take(unused_job: Any, given: Any, runtime: Any, session: Any) -> Any:
        batches.are(given)
        if chosen.name == "placement_mesh":
            # The server's port is known now.
            places[0]._config, places[0]._target = session, runtime.target
        return made, simd_program, make_runner

    def use() -> None:
        run_module.training_graph = take
        run_module.tf = _WithGraph(graph)

    return use


class _LaterRunner:
    """A runner that is made with its graph, and gets a run's directory and checkpoint in a fork."""

    def __init__(self, make_runner: Callable[..., Any], config: Any):
        self._start = _LaterStart()
        self._runner = make_runner("", self._start, config)

    def __call__(self, model_dir: str, start: Start, *unused: Any) -> Any:
        self._start.given = start
        self._runner._prefix = os.path.join(model_dir, "model.ckpt")
        self._runner._saver.recover_last_checkpoints(list(start.kept))
        return self._runner


class _LaterStart:
    """Where a runner begins; known in a fork."""

    kept: tuple[str, ...] = ()
    given = Start()

    def restorable(self, initial_values: Callable[..., Any]) -> ContextManager[str | None]:
        return self.given.restorable(initial_values)


class _LaterBatches:
    """Batches that are drawn in a fork: their session has threads."""

    def __init__(self, shape: list[int]):
        self._shape = shape

    def placeholders(self) -> dict[str, tf.Tensor]:
        self._feeds = {"targets": tf.placeholder(tf.int32, self._shape, name="targets")}
        return self._feeds

    def are(self, batches: Any) -> None:
        with tf.Graph().as_default():
            batches.placeholders()
        self._batches, self.begin = batches, batches.begin

    @property
    def targets(self) -> int:
        return self._batches.targets

    def next(self) -> dict[tf.Tensor, Any]:
        return {self._feeds[feed.op.name]: ids for feed, ids in self._batches.next().items()}


class _WithGraph:
    """TensorFlow, but for one graph that is there already."""

    def __init__(self, graph: tf.Graph):
        self.Graph = lambda: graph

    def __getattr__(self, name: str) -> Any:
        return getattr(tf, name)
