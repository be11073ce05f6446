"""Stacks whose steps are known, of the small model."""

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf
from tests import harness, models

MESH, LAYOUT, _ = harness.MESHES["2"]


AXES = {"mesh_shape": MESH, "layout": LAYOUT}


# Each leaves an update with all gradients as it is, or makes it of two equal micro steps.
WRAPPERS = {
    "cross_shard": lambda opt, name: gs.CrossShardOptimizer(opt, name=name),
    "clip": lambda opt, name: gs.ClipByGlobalNormOptimizer(opt, 1e9, name=name),
    "local": lambda opt, name: gs.GradientAccumulationOptimizer(
        opt, 2, average_aggregated_gradients=True, name=name, **AXES
    ),
    "synced": lambda opt, name: gs.GradientAccumulationOptimizer(
        opt, 2, average_aggregated_gradients=True, name=name
    ),
    "sync_replicas": lambda opt, name: gs.SyncReplicasOptimizer(opt, 2, name=name, **AXES),
}


def stacked(names, inner=None, prefix=""):
    opt = inner or mtf.optimize.SgdOptimizer(0.1)
    for number, name in enumerate(reversed(names)):
        opt = WRAPPERS[name](opt, f"{prefix}{name}_{number}")
    return opt


def mlp_step(opt, mesh, inputs):
    variables = mesh.graph.trainable_variables
    loss = models.mlp_loss(mesh, inputs)
    variables = mesh.graph.trainable_variables
    grads = mtf.gradients([loss], [v.value for v in variables])
    return opt.apply_grads(grads, variables)
