"""An encoder with two losses, of masked words and of the pooled first one, clipped by itself."""

import numpy as np
import pytest

from mtf_gradsync._private.libraries import mtf, tf
from tests.programs import compared
from tests.programs.compared import imported, mixed, normed, variable

VOCAB, LENGTH, D = mtf.Dimension("vocab", 6), mtf.Dimension("length", 4), mtf.Dimension("d", 4)
HEADS, SIZE, H = mtf.Dimension("heads", 2), mtf.Dimension("size", 2), mtf.Dimension("h", 8)
MASKED, CLASSES = mtf.Dimension("masked", 2), mtf.Dimension("classes", 2)
POOLED = mtf.Dimension("pooled", 4)
NORM = 0.5


def dense(x, name, old, new):
    made = mtf.einsum([x, variable(x.mesh, f"{name}/w", old, new)], reduced_dims=[old])
    return made + variable(x.mesh, f"{name}/b", new)


def loss(mesh, inputs):
    table = variable(mesh, "table", VOCAB, D)
    x = mtf.gather(table, imported(mesh, inputs["words"], LENGTH), VOCAB)
    x = normed(x + variable(mesh, "positions", LENGTH, D), D, "embeddings")
    memory = mtf.rename_dimension(x, "length", "memory")
    x = normed(x + mixed(x, memory, D, HEADS, SIZE, "attention"), D, "attention_norm")
    x = normed(x + dense(mtf.gelu(dense(x, "in", D, H)), "out", H, D), D, "out_norm")
    first = mtf.gather(x, mtf.constant(mesh, 0, mtf.Shape([]), tf.int32), LENGTH)
    answer = dense(mtf.tanh(dense(first, "pooler", D, POOLED)), "answer", POOLED, CLASSES)
    right = mtf.one_hot(imported(mesh, inputs["classes"]), CLASSES)
    of_pairs = mtf.layers.softmax_cross_entropy_with_logits(answer, right, CLASSES)
    places = mtf.one_hot(imported(mesh, inputs["places"], MASKED), LENGTH, dtype=x.dtype)
    logits = mtf.einsum([mtf.einsum([x, places], reduced_dims=[LENGTH]), table], reduced_dims=[D])
    hidden = mtf.one_hot(imported(mesh, inputs["hidden"], MASKED), VOCAB)
    of_words = mtf.layers.softmax_cross_entropy_with_logits(logits, hidden, VOCAB)
    return of_pairs + mtf.reduce_mean(of_words, reduced_dim=MASKED)


def feed(rng, rows):
    sizes = {"words": (VOCAB, [LENGTH.size]), "classes": (CLASSES, []),
             "places": (LENGTH, [MASKED.size]), "hidden": (VOCAB, [MASKED.size])}  # fmt: skip
    return {
        name: rng.randint(limit.size, size=[rows, *shape]).astype(np.int32)
        for name, (limit, shape) in sizes.items()
    }


def clipped(optimizer, grads, variables):
    """The program's own norm of all gradients."""
    norm = mtf.sqrt(mtf.add_n([mtf.reduce_sum(mtf.square(g)) for g in grads]))
    factor = NORM * mtf.minimum(mtf.reciprocal(norm), 1.0 / NORM)
    return optimizer.apply_grads([g * factor for g in grads], variables)


STYLE = compared.Style(
    "batch:rows;heads:cols;h:cols",
    loss,
    feed,
    lambda: mtf.optimize.AdamWeightDecayOptimizer(
        0.01, 0.01, epsilon=1e-3, exclude_from_weight_decay=["norm", "/b"]
    ),
    clipped,
)
# Micro steps that are clipped one by one are no whole batch that is.
NOT_CLIPPED = STYLE._replace(apply=compared.at_once)


@pytest.mark.parametrize(
    ("style", "name", "kind"),
    [
        (STYLE, "averages of clipped, sharded updates", "simd"),
        (NOT_CLIPPED, "synced", "placement"),
        pytest.param(NOT_CLIPPED, "synced replicas", "xla", marks=pytest.mark.xla),
    ],
)
def test_it_trains_as_bare_on_one_core(style, name, kind):
    compared.check(style, name, kind)
