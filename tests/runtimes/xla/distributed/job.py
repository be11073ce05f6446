"""A training job of one or several processes, as the tests here run it.

Its batch comes in parts: each process feeds what its own cores use, and has nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import pathlib
import sys
import threading
import time
import unittest.mock

import absl.flags
import numpy as np

import mtf_gradsync as gs
from mtf_gradsync import simd, xla
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.runtimes.processes.watchdog import keep_heartbeats
from mtf_gradsync.tools._private.profiles import Profiler
from tests.forked import TIME_LIMIT

MESH, LAYOUT = "rows:4;cols:2", "batch:rows;hidden:cols"
# The same cores, of which those of a process are an island.
ISLANDS, ISLANDS_LAYOUT = "island:2;batch:2;model:2", "outer:island;batch:batch;hidden:model"
CORES, ROWS, COLS = 8, 4, 2
BATCH, INPUTS, HIDDEN = 16, 8, 6
ACCUMULATED = 2
ROUND = 2
CORE_BATCH = [BATCH // ROWS, INPUTS]
# How C's library ends a process. ctypes gives Python's lock back for the call, but not by PyDLL.
CRASHES = {
    "abort": lambda: ctypes.CDLL(None).abort(),
    "abort with the lock": lambda: ctypes.PyDLL(None).abort(),
    "fault": lambda: ctypes.CDLL(None).strlen(None),
}


@dataclasses.dataclass
class Plan:
    """What one process of a job does.

    Attributes:
      index: number of the process.
      count: how many there are.
      port: the coordinator's.
      folder: for what it writes.
      cache: folder of compiled programs.
      steps: how many it makes; checkpoints after every third.
      again_from: a checkpoint (of step 3) from which it makes its steps once more.
      newest: whether it goes on from the newest checkpoint in its folder.
      pace: seconds of sleep before each step.
      silence: as for `start_processes`.
      recorded: how many steps it makes at its end while a timeline is recorded.
      odd: the part that process 1 has in the test of that name; "islands" is a model of islands.
    """

    index: int
    count: int
    port: int
    folder: str
    cache: str
    steps: int = 6
    again_from: str = ""
    newest: bool = False
    pace: float = 0.0
    silence: float = 20.0
    recorded: int = 0
    odd: str = ""


class Model:
    """Two layers, Adafactor, accumulation, sums over the mesh, one variable with random values."""

    def __init__(self, wider: bool = False, islands: bool = False):
        self.islands = islands
        where = (ISLANDS, ISLANDS_LAYOUT) if islands else (MESH, LAYOUT)
        with tf.Graph().as_default():
            self.x = [tf.placeholder(tf.float32, CORE_BATCH, name=f"x_{c}") for c in range(CORES)]
            with simd.tpu_program(*where) as program:
                self.program = program
                self._build(program, 2.0 if wider else 1.0)

    def _build(self, program, factor):
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        inputs, hidden = mtf.Dimension("inputs", INPUTS), mtf.Dimension("hidden", HIDDEN)
        batch = [mtf.Dimension("batch", BATCH)]
        if self.islands:
            batch = [mtf.Dimension("outer", 2), mtf.Dimension("batch", BATCH // 2)]
        self.part = part = program.per_replica(self.x)
        shape = mtf.Shape([*batch, inputs])
        laid_out = program.mesh_impl.LaidOutTensor(
            [tf.reshape(part, program.mesh_impl.slice_shape(shape))]
        )
        x = mtf.import_laid_out_tensor(mesh, laid_out, shape)
        w = np.random.RandomState(1).randn(INPUTS, HIDDEN).astype(np.float32) / 4
        w = mtf.get_variable(mesh, "w", [inputs, hidden], initializer=tf.constant_initializer(w))
        v = np.random.RandomState(2).randn(HIDDEN, INPUTS).astype(np.float32) / 4
        v = mtf.get_variable(mesh, "v", [hidden, inputs], initializer=tf.constant_initializer(v))
        # No seed: every process draws its own.
        self.drawn = mtf.get_variable(
            mesh, "drawn", [hidden], initializer=tf.random_normal_initializer(), trainable=False
        )
        y = mtf.einsum([mtf.tanh(mtf.einsum([x, w], reduced_dims=[inputs])), v], shape)
        loss = mtf.reduce_mean(mtf.square(y - x * factor))
        updates = self._optimizer().minimize(loss)
        self.lowering = mtf.Lowering(graph, {mesh: program.mesh_impl})
        self.loss = self.lowering.export_to_tf_tensor(loss)
        self.updates = [self.lowering.lowered_operation(op) for op in updates]

    def _optimizer(self):
        if self.islands:
            return gs.OuterOptimizer(
                mtf.optimize.AdafactorOptimizer(learning_rate=0.05),
                ROUND,
                outer_momentum=0.5,
                leave_out_not_finite=True,
                mesh_shape=ISLANDS,
                layout=ISLANDS_LAYOUT,
                batch_dims=("outer", "batch"),
                outer_dims="outer",
                reducer=gs.QuantizedAllReduce(block_size=4),
            )
        return gs.GradientAccumulationOptimizer(
            gs.CrossShardOptimizer(mtf.optimize.AdafactorOptimizer(learning_rate=0.05)),
            ACCUMULATED,
            average_aggregated_gradients=True,
            mesh_shape=MESH,
            layout=LAYOUT,
        )

    def feeds(self, step, cores):
        """What some cores use in a step."""
        batch = np.random.RandomState(step).randn(ROWS, *CORE_BATCH).astype(np.float32)
        return {self.x[core]: batch[core // COLS] for core in cores}


def checkpoints(folder):
    """Those in a folder by step."""
    found = pathlib.Path(folder).glob("step_*.index")
    return {int(path.stem.split("_")[1]): str(path.with_suffix("")) for path in found}


def say(text):
    print(text, flush=True)


class Run:
    """One process's part."""

    def __init__(self, plan, model):
        self.plan, self.model = plan, model

    def whole(self):
        plan = self.plan
        if plan.count == 1:
            self.job(None)
            return
        with xla.start_processes(
            f"127.0.0.1:{plan.port}",
            plan.count,
            plan.index,
            cpu_devices=CORES // plan.count,
            timeout=TIME_LIMIT,
            silence=plan.silence,
        ) as processes:
            say("started")
            assert processes.process_index == plan.index
            assert processes.num_processes == plan.count
            self.job(processes)
        say("left")

    def job(self, processes):
        plan = self.plan
        model = self.model
        if plan.odd == "program" and plan.index == 1:
            model = Model(wider=True)
        with model.program.graph.as_default():
            with xla.session(model.program, model.lowering, cache_dir=plan.cache) as session:
                assert len(session.cores.local) == CORES // plan.count
                say(f"drawn {session.read(model.drawn).tolist()}")
                self.odd(session, model, processes)
                first = 0
                if plan.newest:
                    first, path = max(checkpoints(plan.folder).items())
                    session.restore(path)
                    say(f"restored {first}")
                found = self.train(session, model, first, plan.steps)
                if plan.again_from:
                    session.restore(plan.again_from)
                    again = self.train(session, model, 3, plan.steps, save=False)
                    found.update({f"again/{name}": value for name, value in again.items()})
                if plan.recorded:
                    path = os.path.join(plan.folder, f"trace_{plan.index}.json")
                    with gs.timeline(session, path, lowering=model.lowering):
                        self.train(session, model, plan.steps, plan.steps + plan.recorded, False)
                    for name in ("start", "stop"):
                        self.fail_to_record(session, model, name)
            if plan.again_from and plan.count == 1 and not model.islands:
                with model.program.session(model.lowering) as session:
                    session.restore(plan.again_from)
                    replicas = self.train(session, model, 3, plan.steps, save=False)
                    found.update({f"replicas/{name}": value for name, value in replicas.items()})
            np.savez(os.path.join(plan.folder, f"found_{plan.index}"), **found)

    def train(self, session, model, first, steps, save=True):
        plan = self.plan
        on_devices = isinstance(session, xla.XlaSession)
        cores = session.cores.local if on_devices else range(CORES)
        losses = []
        for step in range(first, steps):
            time.sleep(plan.pace)
            if plan.odd == "hold patiently in turn" and plan.index == step:
                with keep_heartbeats():
                    hold_the_lock()
            feeds = model.feeds(step, cores)
            # In turns, because steps that are only dispatched run another way through the code.
            if on_devices and step % 2:
                losses.append(session.dispatch([model.loss, model.updates], feeds).result()[0])
            else:
                losses.append(session.run([model.loss, model.updates], feeds)[0])
            if save and (step + 1) % 3 == 0:
                session.save(os.path.join(plan.folder, f"step_{step + 1}"))
            say(f"step {step + 1}")
        variables = {f"variable/{k}": v for k, v in session.variables().items()}
        return {"losses": np.array(losses), **variables}

    def fail_to_record(self, session, model, name):
        """Records a step while the profiler of process 1 fails, and makes another step."""

        def start(profiler):
            raise RuntimeError("another one runs")

        def stop(profiler, stop=Profiler.stop):
            return stop(profiler)[:-1]  # cut off

        with contextlib.ExitStack() as stack:
            if self.plan.index == 1:
                broken = {"start": start, "stop": stop}[name]
                stack.enter_context(unittest.mock.patch.object(Profiler, name, broken))
            try:
                with gs.timeline(session):
                    self.train(session, model, 0, 1, save=False)
            except gs.TimelineError as error:
                say(f"{name}: {error}")
        self.train(session, model, 0, 1, save=False)
        say(f"made steps after {name}")

    def odd(self, session, model, processes):
        """What fails on purpose."""
        plan = self.plan
        if plan.odd == "fetches and save":
            feeds = model.feeds(0, session.cores.local)
            fetched = session.run([model.part, model.loss], feeds, per_replica=True)
            say(f"fetched {[[x is not None for x in per_core] for per_core in fetched]}")
            try:
                session.save("/dev/null/no_folder/step")
            except Exception as error:
                say(f"save: {type(error).__name__}: {error}")
        if plan.odd == "hold" and plan.index == 1:
            hold_the_lock()
        if plan.odd == f"hold patiently {plan.index}":
            with keep_heartbeats():
                say("holds the lock")
                hold_the_lock()
        if plan.odd in CRASHES and plan.index == plan.count - 1:
            session.dispatch([model.loss, model.updates], model.feeds(0, session.cores.local))
            time.sleep(2)  # the others hear every second how far it has come
            threading.Thread(target=CRASHES[plan.odd]).start()
            time.sleep(60)
        if plan.odd == "fail in turn":
            try:
                processes.in_turn(lambda: os.listdir("/dev/null"))
            finally:
                # Process 0 has work to end, for longer than the watchdogs' grace.
                time.sleep(4 if plan.index == 0 else 0)
        if plan.odd == "raise" and plan.index == 1:
            time.sleep(0.5)
            raise KeyError("as asked")
        if plan.odd == "exit" and plan.index == 1:
            sys.exit(3)


def hold_the_lock():
    """Keeps Python's interpreter lock for longer than the tests' limit of silence."""
    ctypes.PyDLL(None).sleep(6)


def prepare():
    """What a Mesh-TensorFlow program does first."""
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    absl.flags.FLAGS.mark_as_parsed()


def main(plan, model):
    """Runs one process's part.

    Args:
      plan: a `Plan` as a dictionary.
      model: a `Model`, of islands if the plan says so.
    """
    Run(Plan(**plan), model).whole()
