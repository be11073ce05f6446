"""A language model as GPT programs have it: tied embedding, causal attention, one loss a token."""

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf
from tests.programs import style
from tests.programs.style import cross_entropy, imported, mixed, normed, variable

VOCAB, LENGTH, D = mtf.Dimension("vocab", 6), mtf.Dimension("length", 3), mtf.Dimension("d", 4)
HEADS, SIZE, HIDDEN = mtf.Dimension("heads", 2), mtf.Dimension("size", 2), mtf.Dimension("h", 4)
MEMORY = mtf.Dimension("memory", LENGTH.size)


def loss(mesh, inputs):
    tokens = imported(mesh, inputs["tokens"], LENGTH)
    table = variable(mesh, "wte", VOCAB, D)
    x = mtf.gather(table, tokens, VOCAB) + variable(mesh, "wpe", LENGTH, D)
    here, there = (mtf.range(mesh, d, tf.int32) for d in (LENGTH, MEMORY))
    mask = mtf.cast(mtf.greater(there, here), x.dtype) * -1e9
    seen = normed(x, D, "ln_1")
    memory = mtf.rename_dimension(seen, "length", "memory")
    x += mixed(seen, memory, D, HEADS, SIZE, "attn", mask)
    fc = variable(mesh, "fc", D, HIDDEN)
    x += mtf.einsum([mtf.gelu(mtf.einsum([x, fc], reduced_dims=[D])), fc], reduced_dims=[HIDDEN])
    # As many programs scale it, so that the gradient of the table is made of two sums.
    logits = mtf.einsum([normed(x, D, "ln_f"), table * D.size**-0.5], reduced_dims=[D])
    each = cross_entropy(logits, imported(mesh, inputs["targets"], LENGTH), VOCAB)
    return mtf.reduce_mean(each, reduced_dim=LENGTH)


def feed(rng):
    tokens = rng.randint(VOCAB.size, size=[style.ROWS, LENGTH.size + 1]).astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


STYLE = style.Style(
    loss,
    feed,
    lambda mesh, inputs: mtf.optimize.AdamWeightDecayOptimizer(0.01, 0.1, epsilon=1e-3),
    style.adam(0.01, 0.1),
    "batch:rows;heads:cols;h:cols",
)
