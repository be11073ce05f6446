"""An encoder with two losses, of masked words and of the pooled first one, clipped by itself."""

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf
from tests.programs import style
from tests.programs.style import cross_entropy, imported, mixed, normed, variable

VOCAB, LENGTH, D = mtf.Dimension("vocab", 6), mtf.Dimension("length", 3), mtf.Dimension("d", 4)
HEADS, SIZE, H = mtf.Dimension("heads", 2), mtf.Dimension("size", 2), mtf.Dimension("h", 4)
MASKED, CLASSES = mtf.Dimension("masked", 2), mtf.Dimension("classes", 2)
POOLED = mtf.Dimension("pooled", 2)
NORM, SPARED = 0.5, ["scale", "/b"]


def loss(mesh, inputs):
    table = variable(mesh, "table", VOCAB, D)
    x = mtf.gather(table, imported(mesh, inputs["words"], LENGTH), VOCAB)
    x = normed(x + variable(mesh, "positions", LENGTH, D), D, "embeddings")
    memory = mtf.rename_dimension(x, "length", "memory")
    x += mixed(x, memory, D, HEADS, SIZE, "attention")
    w, b = variable(mesh, "w", D, H), variable(mesh, "w/b", H)
    h = mtf.gelu(mtf.einsum([x, w], reduced_dims=[D]) + b)
    x = normed(x + mtf.einsum([h, w], reduced_dims=[H]), D, "out")
    first = mtf.gather(x, mtf.constant(mesh, 0, mtf.Shape([]), tf.int32), LENGTH)
    pooled = mtf.einsum([first, variable(mesh, "pooler", D, POOLED)], reduced_dims=[D])
    answer = variable(mesh, "answer", POOLED, CLASSES)
    answer = mtf.einsum([mtf.tanh(pooled), answer], reduced_dims=[POOLED])
    of_pairs = cross_entropy(answer, imported(mesh, inputs["classes"]), CLASSES)
    places = mtf.one_hot(imported(mesh, inputs["places"], MASKED), LENGTH, dtype=x.dtype)
    logits = mtf.einsum([mtf.einsum([x, places], reduced_dims=[LENGTH]), table], reduced_dims=[D])
    of_words = cross_entropy(logits, imported(mesh, inputs["hidden"], MASKED), VOCAB)
    return of_pairs + mtf.reduce_mean(of_words, reduced_dim=MASKED)


def feed(rng):
    sizes = {"words": (VOCAB, [LENGTH.size]), "classes": (CLASSES, []),
             "places": (LENGTH, [MASKED.size]), "hidden": (VOCAB, [MASKED.size])}  # fmt: skip
    return {
        name: rng.randint(limit.size, size=[style.ROWS, *shape]).astype(np.int32)
        for name, (limit, shape) in sizes.items()
    }


def clipped(optimizer, grads, variables):
    """The program's own norm of all gradients."""
    norm = mtf.sqrt(mtf.add_n([mtf.reduce_sum(mtf.square(g)) for g in grads]))
    factor = NORM * mtf.minimum(mtf.reciprocal(norm), 1.0 / NORM)
    return optimizer.apply_grads([g * factor for g in grads], variables)


STYLE = style.Style(
    loss,
    feed,
    lambda mesh, inputs: mtf.optimize.AdamWeightDecayOptimizer(
        0.01, 0.01, epsilon=1e-3, exclude_from_weight_decay=SPARED
    ),
    style.adam(0.01, 0.01, spared=SPARED),
    "batch:rows;heads:cols;h:cols",
    apply=clipped,
    clip=NORM,
)
# Where gradients that are clipped already are refused.
NOT_CLIPPED = STYLE._replace(apply=style.at_once, clip=None)
