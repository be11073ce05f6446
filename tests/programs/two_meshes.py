"""Two models on two meshes of one graph: one of four shards, one of two that split a layer."""

from mtf_gradsync._private.libraries import mtf
from tests.programs import style
from tests.programs.style import imported, variable

D, H, OUT = mtf.Dimension("d", 4), mtf.Dimension("h", 4), mtf.Dimension("out", 2)


def loss(mesh, inputs):
    x, y = imported(mesh, inputs["x"], D), imported(mesh, inputs["y"], OUT)
    h = mtf.tanh(mtf.einsum([x, variable(mesh, "in", D, H)], reduced_dims=[D]))
    out = mtf.einsum([h, variable(mesh, "out", H, OUT)], reduced_dims=[H])
    return mtf.reduce_sum(mtf.square(out * variable(mesh, "gain") - y), reduced_dim=OUT)


def feed(rng):
    sizes = {"x": D.size, "y": OUT.size}
    return {k: rng.randn(style.ROWS, size).astype("f") for k, size in sizes.items()}


OTHER = style.Style(
    loss,
    feed,
    lambda mesh, inputs: mtf.optimize.SgdOptimizer(0.1),
    style.descent(0.1),
    "batch:rows;h:cols",
)
ONE = OTHER._replace(layout="batch:all", shape="all:4", shards=4)
