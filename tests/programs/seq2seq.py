"""An encoder and a decoder, whose program applies gradients pair by pair."""

import numpy as np

from mtf_gradsync._private.libraries import mtf
from tests.programs import style
from tests.programs.style import cross_entropy, imported, mixed, variable

VOCAB, D, H = mtf.Dimension("vocab", 6), mtf.Dimension("d", 4), mtf.Dimension("h", 4)
SOURCE, TARGET = mtf.Dimension("memory", 3), mtf.Dimension("length", 2)
HEADS, SIZE = mtf.Dimension("heads", 2), mtf.Dimension("size", 2)


def loss(mesh, inputs):
    table = variable(mesh, "symbols", VOCAB, D)
    source = mtf.gather(table, imported(mesh, inputs["source"], SOURCE), VOCAB)
    x = mtf.gather(table, imported(mesh, inputs["target"], TARGET), VOCAB)
    w = variable(mesh, "encoder", D, H)
    h = mtf.relu(mtf.einsum([source, w], reduced_dims=[D]))
    source += mtf.einsum([h, w], reduced_dims=[H])
    x += mixed(x, source, D, HEADS, SIZE, "decoder")
    logits = mtf.einsum([x, variable(mesh, "readout", D, VOCAB)], reduced_dims=[D])
    each = cross_entropy(logits, imported(mesh, inputs["right"], TARGET), VOCAB)
    return mtf.reduce_mean(each, reduced_dim=TARGET)


def feed(rng):
    sizes = {"source": SOURCE.size, "target": TARGET.size, "right": TARGET.size}
    shapes = {k: [style.ROWS, n] for k, n in sizes.items()}
    return {k: rng.randint(VOCAB.size, size=shape).astype(np.int32) for k, shape in shapes.items()}


def pair_by_pair(optimizer, grads, variables):
    return [op for pair in zip(grads, variables) for op in optimizer.apply_grad(*pair)]


STYLE = style.Style(
    loss,
    feed,
    lambda mesh, inputs: mtf.optimize.AdamWeightDecayOptimizer(0.01, epsilon=1e-3),
    style.adam(0.01),
    "batch:rows;heads:cols;h:cols;vocab:cols",
    apply=pair_by_pair,
)
