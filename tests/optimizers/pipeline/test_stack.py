"""A stack as a value: its blocks, and what a stage with a condition has to return."""

import dataclasses

import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.optimizers import CommonArguments, Condition, Stage, Wrapper
from mtf_gradsync.optimizers.pipeline.stack import complete_stack, in_blocks
from tests import harness

SHAPE, LAYOUT, _ = harness.MESHES["2x2"]


def test_what_comes_after_a_condition_is_a_block():
    clipped = gs.ClipByGlobalNormOptimizer(mtf.optimize.SgdOptimizer(0.1), 1.0)
    scaled = gs.LossScaleOptimizer(clipped)
    opt = gs.GradientAccumulationOptimizer(scaled, 4, mesh_shape=SHAPE, layout=LAYOUT)
    blocks = in_blocks(complete_stack(*opt._segment(), None))
    assert [[(number, type(x).__name__) for number, x in one.stages] for one in blocks] == [
        [(0, "SplitByShard"), (0, "_Accumulate")],
        [(0, "Reduce"), (1, "_SkipNotFinite")],
        [(2, "_Clip")],
    ]
    assert [one.condition for one in blocks] == [None, Condition(4, True, True), Condition()]


@dataclasses.dataclass(frozen=True)
class Forgetful(Stage):
    condition = Condition()


class ForgetfulOptimizer(Wrapper):
    def __init__(self, opt):
        self._wrap(opt, CommonArguments("forgetful"))

    def stages(self, place):
        return [Forgetful()]


def test_a_condition_without_a_scalar_is_an_error():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    width = mtf.Dimension("width", 2)
    variable = mtf.get_variable(mesh, "w", [width])
    grads = mtf.gradients([mtf.reduce_sum(mtf.square(variable))], [variable])
    with pytest.raises(TypeError, match=r"Forgetful needs both .* gradients.only_when"):
        ForgetfulOptimizer(mtf.optimize.SgdOptimizer(0.1)).apply_grads(grads, [variable.operation])
