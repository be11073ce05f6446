"""Weights divided by their spectral norm, which a loop on the mesh estimates without a gradient."""

from mtf_gradsync._private.libraries import mtf, tf
from tests.programs import style
from tests.programs.style import imported, variable

D, H, TURNS = mtf.Dimension("d", 4), mtf.Dimension("h", 4), 3


def spectral_norm(w):
    """By power iteration."""

    def turn(number, v):
        u = mtf.einsum([w, v], reduced_dims=[D])
        v = mtf.einsum([w, u], reduced_dims=[H])
        return number + 1, v * mtf.rsqrt(mtf.reduce_sum(mtf.square(v)) + 1e-6)

    first = mtf.ones(w.mesh, mtf.Shape([D]), dtype=w.dtype)
    zero = mtf.zeros(w.mesh, mtf.Shape([]), dtype=tf.int32)
    _, v = mtf.while_loop(lambda number, v: mtf.less(number, TURNS), turn, [zero, first])
    return mtf.sqrt(mtf.reduce_sum(mtf.square(mtf.einsum([w, v], reduced_dims=[D]))))


def loss(mesh, inputs):
    x, w = imported(mesh, inputs["x"], D), variable(mesh, "w", D, H)
    w = mtf.stop_gradient(mtf.reciprocal(spectral_norm(mtf.stop_gradient(w * 1.0)))) * w
    h = mtf.relu(mtf.einsum([x, w], reduced_dims=[D]))
    score = mtf.einsum([h, variable(mesh, "out", H)], reduced_dims=[H])
    return mtf.square(score - imported(mesh, inputs["y"]))


def feed(rng):
    shapes = {"x": [style.ROWS, D.size], "y": [style.ROWS]}
    return {key: rng.randn(*shape).astype("f") for key, shape in shapes.items()}


STYLE = style.Style(
    loss,
    feed,
    lambda mesh, inputs: mtf.optimize.SgdOptimizer(0.1),
    style.descent(0.1),
    "batch:rows;h:cols",
)
