"""A critic whose loss has the norm of its own gradient in it, of which it takes the gradient."""

from mtf_gradsync._private.libraries import mtf
from tests.programs import style
from tests.programs.style import imported, variable

D, H = mtf.Dimension("d", 4), mtf.Dimension("h", 4)


def loss(mesh, inputs):
    x = imported(mesh, inputs["x"], D)
    w, out = variable(mesh, "w", D, H), variable(mesh, "out", H)
    h = mtf.square(mtf.einsum([x, w], reduced_dims=[D]) + variable(mesh, "b", H))
    score = mtf.einsum([h, out], reduced_dims=[H])
    (slope,) = mtf.gradients([mtf.reduce_sum(score)], [x])
    norm = mtf.sqrt(mtf.reduce_sum(mtf.square(slope), reduced_dim=D) + 1e-3)
    return score * imported(mesh, inputs["sign"]) + mtf.square(norm - 1.0)


def feed(rng):
    signs = rng.choice([-1.0, 1.0], style.ROWS).astype("f")
    return {"x": rng.randn(style.ROWS, D.size).astype("f"), "sign": signs}


STYLE = style.Style(
    loss,
    feed,
    lambda mesh, inputs: mtf.optimize.AdamWeightDecayOptimizer(0.01, epsilon=1e-3),
    style.adam(0.01),
    "batch:rows;h:cols",
)
