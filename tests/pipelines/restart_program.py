"""A program that trains until it is killed: `python -m tests.pipelines.restart_program`.

Restores the newest checkpoint of a directory, makes some micro steps, saves, says so, and goes on
with micro steps that nobody will hear of.
"""

from __future__ import annotations

import argparse
import os

import mtf_gradsync as gs
from mtf_gradsync._tf_compat import mtf, tf
from tests import harness, models

MESH, LAYOUT = "rows:2;cols:2", "batch:rows;hidden:cols"
K = 3
STEPS = 2 * K


def make() -> gs.GradientAccumulationOptimizer:
    """Adafactor with the default decay rate, which follows the global step."""
    inner = mtf.optimize.AdafactorOptimizer(learning_rate=0.05, min_dim_size_to_factor=4)
    return gs.GradientAccumulationOptimizer(inner, K, mesh_shape=MESH, layout=LAYOUT)


def main(directory: str, steps: int, forever: bool) -> None:
    """Trains."""
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.set_random_seed(1)
    feeds = models.mlp_batches(STEPS)
    inputs = {name: tf.placeholder(tf.float32, x.shape) for name, x in feeds[0].items()}
    global_step = tf.train.get_or_create_global_step()
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    operations, _ = models.train(make)(mesh, inputs)
    lowering = mtf.Lowering(graph, {mesh: harness.placement(MESH, LAYOUT)})
    with tf.control_dependencies([lowering.lowered_operation(op) for op in operations]):
        step = global_step.assign_add(1, read_value=True)
    to_slices, to_masters = lowering.copy_masters_to_slices(), lowering.copy_slices_to_masters()
    saver = tf.train.Saver()
    with tf.Session(config=gs.session_config(num_cpu_devices=4)) as session:
        newest = tf.train.latest_checkpoint(directory)
        if newest:
            saver.restore(session, newest)
        else:
            session.run(tf.global_variables_initializer())
        session.run(to_slices)
        made = int(session.run(global_step))

        def train(number: int) -> None:
            for feed in feeds[made : made + number]:
                session.run(step, {inputs[name]: x for name, x in feed.items()})

        train(steps)
        session.run(to_masters)
        saver.save(session, os.path.join(directory, "model.ckpt"), made + steps)
        print(f"saved {made + steps}", flush=True)
        while forever:
            train(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("steps", type=int)
    parser.add_argument("--forever", action="store_true", help="go on until killed")
    main(**vars(parser.parse_args()))
