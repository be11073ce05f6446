"""Checks an installed package from outside the checkout: python smoke.py.

Imports what a user imports, asks the command line for help, finds the gin files, and trains a small
model on a mesh of eight CPU devices.
"""

import pathlib
import subprocess
import sys
import sysconfig

import numpy as np
import tensorflow as tf2

import mtf_gradsync as gs
from mtf_gradsync._configs import configs_dir

# isort: split
# After mtf_gradsync, which makes it importable on TensorFlow 2.13 and later.
import mesh_tensorflow as mtf
import tensorflow.compat.v1 as tf


def check(condition, message):
    """Fails with the message unless the condition holds; -O does not remove it."""
    if not condition:
        raise SystemExit(f"smoke test failed: {message}")


def check_install():
    """The package is the installed one, with its data and its command line."""
    package = pathlib.Path(gs.__file__).resolve().parent
    site_packages = pathlib.Path(sysconfig.get_paths()["purelib"]).resolve()
    check(site_packages in package.parents, f"{package} is not under {site_packages}")
    configs = sorted(path.name for path in configs_dir().glob("*.gin"))
    check(configs_dir().parent == package, f"the gin files come from {configs_dir()}")
    check("lm_cpu_mesh.gin" in configs, f"lm_cpu_mesh.gin is not among {configs}")
    script = pathlib.Path(sysconfig.get_paths()["scripts"]) / "mtf-gradsync"
    result = subprocess.run(
        [script, "--help"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    output = result.stdout + result.stderr
    check(result.returncode == 0, f"mtf-gradsync --help gave {result.returncode}:\n{output}")
    check("train" in output, f"mtf-gradsync --help names no train command:\n{output}")
    return configs


def train_on_eight_devices(steps):
    """Trains a two-layer model on a 4x2 mesh and returns its losses."""
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    tf.set_random_seed(0)
    random = np.random.RandomState(0)
    features = random.normal(size=(16, 8)).astype(np.float32)
    labels = np.tanh(features @ random.normal(size=(8, 4))).astype(np.float32)

    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    batch, inputs = mtf.Dimension("batch", 16), mtf.Dimension("inputs", 8)
    hidden, outputs = mtf.Dimension("hidden", 32), mtf.Dimension("outputs", 4)
    x = mtf.import_tf_tensor(mesh, tf.constant(features), mtf.Shape([batch, inputs]))
    y = mtf.import_tf_tensor(mesh, tf.constant(labels), mtf.Shape([batch, outputs]))
    h = mtf.layers.dense(x, [hidden], activation=mtf.tanh, name="first")
    prediction = mtf.layers.dense(h, [outputs], name="second")
    loss = mtf.reduce_mean(mtf.square(prediction - y))

    grads = mtf.gradients([loss], [v.outputs[0] for v in graph.trainable_variables])
    optimizer = gs.CrossShardOptimizer(mtf.optimize.SgdOptimizer(0.1))
    updates = optimizer.apply_grads(grads, graph.trainable_variables)

    devices = [f"/cpu:{i}" for i in range(8)]
    mesh_impl = mtf.placement_mesh_impl.PlacementMeshImpl(
        mtf.convert_to_shape("replicas:4;model:2"),
        mtf.convert_to_layout_rules("batch:replicas;hidden:model"),
        devices,
    )
    lowering = mtf.Lowering(graph, {mesh: mesh_impl})
    tf_loss = lowering.export_to_tf_tensor(loss)
    step = tf.group([lowering.lowered_operation(op) for op in updates])
    to_slices = lowering.copy_masters_to_slices()
    config = tf.ConfigProto(device_count={"CPU": 8}, allow_soft_placement=False)
    with tf.Session(config=config) as session:
        session.run(tf.global_variables_initializer())
        session.run(to_slices)
        return [float(session.run([tf_loss, step])[0]) for _ in range(steps)]


def main():
    """Runs the checks and says what was seen."""
    configs = check_install()
    import mesh_tensorflow.transformer.utils  # noqa: F401 - it is the import that is checked

    losses = train_on_eight_devices(steps=5)
    check(np.all(np.isfinite(losses)), f"losses {losses}")
    check(losses[-1] < losses[0], f"the loss did not fall: {losses}")
    print(
        f"smoke test passed: TensorFlow {tf2.__version__}, Python {sys.version.split()[0]}, "
        f"{len(configs)} gin files, losses {losses[0]:.4f} to {losses[-1]:.4f}"
    )


if __name__ == "__main__":
    main()
