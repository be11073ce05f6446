"""Trains with TensorFlow 2's switches as they are at the start, and prints the variable.

    python -m tests.step.control_flow_v2

A line for each of `WRAPPERS` and kind of mesh: both, and the values of the variable.
"""

from __future__ import annotations

import contextlib
import json

import numpy as np

import mtf_gradsync as gs
from mtf_gradsync import simd
from mtf_gradsync._private.libraries import mtf, tf
from tests.wrappers import wrap

MESH, LAYOUT, STEPS, RATE = "all:2", "batch:all", 4, 0.25
# Wrappers with branches, and how many contributions of two replicas make an update.
WRAPPERS = [["local", 2], ["synced", 2], ["replicas", 4], ["replicas", 2], ["loss_scale", 2]]


def batch(step: int) -> np.ndarray:
    """The input of a step: ``[4, 2]``, small whole numbers."""
    return np.random.RandomState(step).randint(-2, 3, [4, 2]).astype(np.float32)


def train(name: str, contributions: int, kind: str) -> list[float]:
    """The variable after some steps on sum(mean over the batch of (x * w))."""
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [4, 2])
        program = simd.tpu_program(MESH, LAYOUT) if kind == "simd" else contextlib.nullcontext()
        with program as made:
            graph = mtf.Graph()
            mesh = mtf.Mesh(graph, "mesh")
            dims = mtf.Dimension("batch", 4), mtf.Dimension("d", 2)
            value = mtf.import_tf_tensor(mesh, x, mtf.Shape(dims))
            w = mtf.get_variable(mesh, "w", mtf.Shape(dims[1:]), initializer=tf.ones_initializer())
            loss = mtf.reduce_mean(mtf.reduce_sum(value * w, reduced_dim=dims[1]))
            opt = wrap(
                name,
                mtf.optimize.SgdOptimizer(RATE),
                {"mesh_shape": MESH, "layout": LAYOUT},
                replicas_to_aggregate=contributions,
                initial_scale=4.0,
            )
            updates = opt.minimize(loss, global_step=tf.train.get_or_create_global_step())
            devices = [f"/device:CPU:{i}" for i in range(2)]
            shape, layout = mtf.convert_to_shape(MESH), mtf.convert_to_layout_rules(LAYOUT)
            impl = made.mesh_impl if made else gs.placement_mesh_impl(shape, layout, devices)
            lowering = mtf.Lowering(graph, {mesh: impl})
            steps = [lowering.lowered_operation(op) for op in updates]
            slices = lowering.variables[w.operation].laid_out_tensor.all_slices
        if made:
            with made.session(lowering) as session:
                for step in range(STEPS):
                    session.run(steps, {x: batch(step)})
                return session.read(w.operation).tolist()
        to_slices = lowering.copy_masters_to_slices()
        with tf.Session(config=gs.session_config(num_cpu_devices=2)) as session:
            session.run(tf.global_variables_initializer())
            session.run(to_slices)
            for step in range(STEPS):
                session.run(steps, {x: batch(step)})
            return session.run(slices[0]).tolist()


def main() -> None:
    """Prints what is trained."""
    assert tf.control_flow_v2_enabled()
    for wrapper in WRAPPERS:
        for kind in ("placement", "simd"):
            print(json.dumps([wrapper, kind, train(*wrapper, kind)]), flush=True)


if __name__ == "__main__":
    main()
