"""A program that trains until it is killed: `python -m tests.pipelines.restart_program`.

Builds the graph, and forks a process for each run, one after the other. It restores the newest
checkpoint of a directory, makes some steps, saves, says so, and goes on with steps that nobody will
hear of.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
from typing import Any, Callable

import numpy as np

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models

MESH, LAYOUT = "rows:2;cols:2", "batch:rows;hidden:cols"
K = 2
# Which of the two replicas contribute to a step, where updates take three contributions.
CONTRIBUTES = np.array([[1, 0], [0, 1], [1, 1], [0, 1], [1, 1], [0, 0]], bool)


def inner() -> mtf.optimize.Optimizer:
    """Adafactor with the default decay rate, which follows the global step."""
    return mtf.optimize.AdafactorOptimizer(learning_rate=0.05, min_dim_size_to_factor=4)


def accumulation(
    inputs: dict[str, tf.Tensor], variables: list[mtf.Variable]
) -> gs.GradientAccumulationOptimizer:
    """An update every `K` steps."""
    del inputs, variables
    return gs.GradientAccumulationOptimizer(inner(), K, mesh_shape=MESH, layout=LAYOUT)


def sync_replicas(
    inputs: dict[str, tf.Tensor], variables: list[mtf.Variable]
) -> gs.SyncReplicasOptimizer:
    """Replicas that contribute as `CONTRIBUTES` says, and averages of the variables."""
    return gs.SyncReplicasOptimizer(
        inner(),
        3,
        variable_averages=0.9,
        variables_to_average=variables,
        contributes=inputs["contributes"],
        mesh_shape=MESH,
        layout=LAYOUT,
    )


WRAPPERS: dict[str, Callable[[dict[str, tf.Tensor], list[mtf.Variable]], Any]] = {
    "accumulation": accumulation,
    "sync_replicas": sync_replicas,
}


def main(wrapper: str, whole: str, parts: str, steps: list[int]) -> None:
    """Trains some steps in each run, until it is killed, and before that all steps in one.

    Args:
      wrapper: a key of `WRAPPERS`.
      whole: directory of the run that is not killed.
      parts: directory of the others.
      steps: how many are made in each, up to its checkpoint.
    """
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.set_random_seed(1)
    feeds = models.mlp_batches(len(CONTRIBUTES))
    for feed, contributes in zip(feeds, CONTRIBUTES):
        feed["contributes"] = contributes
    inputs = {name: tf.placeholder(tf.as_dtype(x.dtype), x.shape) for name, x in feeds[0].items()}
    global_step = tf.train.get_or_create_global_step()
    steps_made = tf.get_variable("steps_made", [], tf.int64, tf.zeros_initializer())
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    loss = models.mlp_loss(mesh, inputs)
    opt = WRAPPERS[wrapper](inputs, graph.trainable_variables)
    operations = opt.minimize(loss, global_step)
    lowering = mtf.Lowering(graph, {mesh: harness.placement(MESH, LAYOUT)})
    with tf.control_dependencies([lowering.lowered_operation(op) for op in operations]):
        step = steps_made.assign_add(1, read_value=True)
    to_slices, to_masters = lowering.copy_masters_to_slices(), lowering.copy_slices_to_masters()
    saver = tf.train.Saver()

    def run(directory: str, number: int, forever: bool) -> None:
        config = gs.session_config(num_cpu_devices=4)
        # Most of the time of so many short runs otherwise; see tests/grappler.py.
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        with tf.Session(config=config) as session:
            newest = tf.train.latest_checkpoint(directory)
            if newest:
                saver.restore(session, newest)
            else:
                session.run(tf.global_variables_initializer())
            session.run(to_slices)
            made = int(session.run(steps_made))

            def train(number: int) -> None:
                for feed in feeds[made : made + number]:
                    session.run(step, {inputs[name]: x for name, x in feed.items()})

            train(number)
            session.run(to_masters)
            path = os.path.join(directory, "model.ckpt")
            saver.save(session, path, made + number, write_meta_graph=False)
            if forever:
                print(f"saved {made + number} by {os.getpid()}", flush=True)
            while forever:
                train(1)

    for directory, number in ((whole, sum(steps)), *((parts, n) for n in steps)):
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
            continue
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: to end with its parent
        run(directory, number, forever=directory == parts)
        os._exit(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("wrapper", choices=sorted(WRAPPERS))
    parser.add_argument("whole")
    parser.add_argument("parts")
    parser.add_argument("steps", type=int, nargs="+")
    main(**vars(parser.parse_args()))
