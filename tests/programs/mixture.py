"""A mixture of experts that lie along the axis of the batch: its examples change places."""

from mtf_gradsync._private.libraries import mtf
from tests.programs import style
from tests.programs.style import imported, variable

D, H, OUT = mtf.Dimension("d", 4), mtf.Dimension("h", 4), mtf.Dimension("out", 3)
EXPERTS, ALL_EXPERTS = mtf.Dimension("experts", 2), mtf.Dimension("all_experts", 2)


def loss(mesh, inputs):
    x, y = imported(mesh, inputs["x"], D), imported(mesh, inputs["y"], OUT)
    batch = x.shape.dims[0]
    chosen = mtf.softmax(
        mtf.einsum([x, variable(mesh, "gate", D, ALL_EXPERTS)], reduced_dims=[D]), ALL_EXPERTS
    )
    # From each shard all experts' examples to each expert those of all shards, and back.
    sent = mtf.einsum([x, chosen], mtf.Shape([ALL_EXPERTS, batch, D]))
    everyone = mtf.Dimension("everyone", batch.size)
    at_experts = mtf.reshape(sent, mtf.Shape([EXPERTS, everyone, D]))
    w, v = variable(mesh, "experts_in", EXPERTS, D, H), variable(mesh, "experts_out", EXPERTS, H, D)
    h = mtf.relu(mtf.einsum([at_experts, w], mtf.Shape([EXPERTS, everyone, H])))
    made = mtf.einsum([h, v], mtf.Shape([EXPERTS, everyone, D]))
    back = mtf.reshape(made, mtf.Shape([ALL_EXPERTS, batch, D]))
    x += mtf.einsum([back, chosen], mtf.Shape([batch, D]))
    out = mtf.einsum([x, variable(mesh, "out", D, OUT)], reduced_dims=[D])
    return mtf.reduce_sum(mtf.square(out - y), reduced_dim=OUT)


def feed(rng):
    sizes = {"x": D.size, "y": OUT.size}
    return {k: rng.randn(style.ROWS, size).astype("f") for k, size in sizes.items()}


STYLE = style.Style(
    loss,
    feed,
    lambda mesh, inputs: mtf.optimize.SgdOptimizer(0.05),
    style.descent(0.05),
    "batch:rows;experts:rows;h:cols",
    mixes=True,
    # SimdMeshImpl (0.1.21) exchanges float32 as bfloat16.
    exchanged=2.0**-7,
)
