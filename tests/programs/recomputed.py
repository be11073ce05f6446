"""Blocks that are computed again on the way back, each with an auxiliary loss beside its result."""

from mtf_gradsync._private.libraries import mtf
from tests.programs import style
from tests.programs.style import imported, variable

D, H = mtf.Dimension("d", 4), mtf.Dimension("h", 4)


def loss(mesh, inputs):
    x, gate = imported(mesh, inputs["x"], D), variable(mesh, "gate", D)
    y, extras = imported(mesh, inputs["y"], D), []
    for number in range(2):
        w = variable(mesh, f"block_{number}", D, H)

        def block(x, w=w):
            h = mtf.tanh(mtf.einsum([x, w], reduced_dims=[D]))
            out = mtf.einsum([h, w], reduced_dims=[H]) * gate
            return x + out, mtf.reduce_sum(mtf.square(out), reduced_dim=D)

        x, extra = mtf.recompute_grad(block, [x])
        extras.append(extra)
    return 0.1 * mtf.add_n(extras) + mtf.reduce_mean(mtf.square(x - y), reduced_dim=D)


def feed(rng):
    return {key: rng.randn(style.ROWS, D.size).astype("f") for key in ("x", "y")}


STYLE = style.Style(
    loss,
    feed,
    lambda mesh, inputs: mtf.optimize.SgdOptimizer(0.1),
    style.descent(0.1),
    "batch:rows;h:cols",
)
