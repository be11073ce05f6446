"""A language model as GPT programs have it: tied embedding, causal attention, one loss a token."""

import numpy as np
import pytest

from mtf_gradsync._private.libraries import mtf, tf
from tests.programs import compared
from tests.programs.compared import imported, mixed, normed, variable

VOCAB, LENGTH, D = mtf.Dimension("vocab", 6), mtf.Dimension("length", 4), mtf.Dimension("d", 4)
HEADS, SIZE, HIDDEN = mtf.Dimension("heads", 2), mtf.Dimension("size", 2), mtf.Dimension("h", 8)
MEMORY = mtf.Dimension("memory", 4)


def loss(mesh, inputs):
    tokens = imported(mesh, inputs["tokens"], LENGTH)
    table = variable(mesh, "wte", VOCAB, D)
    x = mtf.gather(table, tokens, VOCAB) + variable(mesh, "wpe", LENGTH, D)
    here, there = (mtf.range(mesh, d, tf.int32) for d in (LENGTH, MEMORY))
    mask = mtf.cast(mtf.greater(there, here), tf.float32) * -1e9
    seen = normed(x, D, "ln_1")
    memory = mtf.rename_dimension(seen, "length", "memory")
    x += mixed(seen, memory, D, HEADS, SIZE, "attn", mask)
    h = mtf.gelu(
        mtf.einsum([normed(x, D, "ln_2"), variable(mesh, "fc", D, HIDDEN)], reduced_dims=[D])
        + variable(mesh, "fc_b", HIDDEN)
    )
    x += mtf.einsum([h, variable(mesh, "proj", HIDDEN, D)], reduced_dims=[HIDDEN])
    logits = mtf.einsum([normed(x, D, "ln_f"), table], reduced_dims=[D])
    targets = mtf.one_hot(imported(mesh, inputs["targets"], LENGTH), VOCAB)
    each = mtf.layers.softmax_cross_entropy_with_logits(logits, targets, VOCAB)
    return mtf.reduce_mean(each, reduced_dim=LENGTH)


def feed(rng, rows):
    tokens = rng.randint(VOCAB.size, size=[rows, LENGTH.size + 1]).astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


STYLE = compared.Style(
    "batch:rows;heads:cols;h:cols",
    loss,
    feed,
    lambda: mtf.optimize.AdamWeightDecayOptimizer(0.01, weight_decay_rate=0.1, epsilon=1e-3),
)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cross_shard", "simd"),
        ("synced replicas", "placement"),
        pytest.param("loss scale of accumulated, sharded updates", "xla", marks=pytest.mark.xla),
    ],
)
def test_it_trains_as_bare_on_one_core(name, kind):
    compared.check(STYLE, name, kind)
