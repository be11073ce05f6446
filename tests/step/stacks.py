"""Stacks whose steps are known, of the small model."""

from mtf_gradsync._private.libraries import mtf
from tests import harness, models
from tests.wrappers import wrap

MESH, LAYOUT, _ = harness.MESHES["2"]
AXES = {"mesh_shape": MESH, "layout": LAYOUT}


def stacked(names, inner=None, prefix=""):
    opt = inner or mtf.optimize.SgdOptimizer(0.1)
    for number, name in enumerate(reversed(names)):
        own_name = f"{prefix}{name}_{number}"
        opt = wrap(name, opt, AXES, replicas_to_aggregate=2, name=own_name)
    return opt


def mlp_step(opt, mesh, inputs):
    grads, variables = models.gradients(models.mlp_loss(mesh, inputs))
    return opt.apply_grads(grads, variables)
