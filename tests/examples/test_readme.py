"""The README's code runs as it stands."""

from __future__ import annotations

import gin
import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import documents, harness

BLOCKS = documents.blocks("README.md")
MESH_SHAPE, LAYOUT = "batch:4;model:2", "batch:batch;hidden:model"


def namespace():
    """What the README's blocks take as given: a model with a loss for each shard."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    shard, hidden = mtf.Dimension("batch", 4), mtf.Dimension("hidden", 6)
    shape = mtf.Shape([shard, hidden])
    data = mtf.import_tf_tensor(
        mesh, tf.constant(np.arange(24, dtype="f").reshape(4, 6) / 24), shape
    )
    w = mtf.get_variable(mesh, "w", [hidden], initializer=tf.ones_initializer())
    shard_losses = mtf.reduce_mean(mtf.square(data * w - 1), output_shape=[shard])
    return {
        "mtf": mtf,
        "tf": tf,
        "gs": gs,
        "graph": graph,
        "mesh": mesh,
        "hidden": hidden,
        "data": data,
        "shard_losses": shard_losses,
        "loss": mtf.reduce_mean(shard_losses),
    }


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_code_blocks_run(number):
    names = namespace()
    # Later blocks go on from the names of earlier ones.
    setup = [b for b in BLOCKS[:number] if "ReplicaAxes" in b.code]
    for block in [*setup, BLOCKS[number]]:
        exec(compile(block.code, block.place, "exec"), names)
    if "session" in names:
        names["session"].close()
        return
    mesh_impl = harness.placement(MESH_SHAPE, LAYOUT)
    lowering = mtf.Lowering(names["graph"], {names["mesh"]: mesh_impl})
    update = [lowering.lowered_operation(op) for op in names["update_ops"]]
    with tf.Session(config=gs.session_config(num_cpu_devices=8)) as session:
        session.run(tf.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
        before = session.run(tf.global_variables())
        session.run(update)
        session.run(lowering.copy_slices_to_masters())
        after = session.run(tf.global_variables())
    assert any(np.any(a != b) for a, b in zip(after, before))


def test_gin_block_binds_the_wrapper():
    pytest.importorskip("mesh_tensorflow.transformer.utils", reason="needs the extra 'train'")
    (block,) = documents.blocks("README.md", "gin")
    with gin.unlock_config():
        gin.clear_config()
        try:
            gin.parse_config(block.code)
            reference = gin.query_parameter("utils.run.optimizer")
            optimizer = reference.scoped_configurable_fn(learning_rate=0.01)
        finally:
            gin.clear_config()
    assert isinstance(optimizer, gs.CrossShardOptimizer)
    assert isinstance(optimizer.opt, mtf.optimize.AdafactorOptimizer)
