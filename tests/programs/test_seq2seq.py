"""An encoder and a decoder, whose program applies gradients pair by pair."""

import numpy as np
import pytest

from mtf_gradsync._private.libraries import mtf
from tests.programs import compared
from tests.programs.compared import imported, mixed, variable

VOCAB, D, H = mtf.Dimension("vocab", 6), mtf.Dimension("d", 4), mtf.Dimension("h", 8)
SOURCE, TARGET = mtf.Dimension("memory", 3), mtf.Dimension("length", 2)
HEADS, SIZE = mtf.Dimension("heads", 2), mtf.Dimension("size", 2)


def layer(x, name):
    h = mtf.relu(mtf.einsum([x, variable(x.mesh, f"{name}/in", D, H)], reduced_dims=[D]))
    return x + mtf.einsum([h, variable(x.mesh, f"{name}/out", H, D)], reduced_dims=[H])


def loss(mesh, inputs):
    table = variable(mesh, "symbols", VOCAB, D)
    source = mtf.gather(table, imported(mesh, inputs["source"], SOURCE), VOCAB)
    target = mtf.gather(table, imported(mesh, inputs["target"], TARGET), VOCAB)
    encoded = layer(source, "encoder")
    x = layer(target + mixed(target, encoded, D, HEADS, SIZE, "attention"), "decoder")
    logits = mtf.einsum([x, variable(mesh, "readout", D, VOCAB)], reduced_dims=[D])
    right = mtf.one_hot(imported(mesh, inputs["right"], TARGET), VOCAB)
    each = mtf.layers.softmax_cross_entropy_with_logits(logits, right, VOCAB)
    return mtf.reduce_mean(each, reduced_dim=TARGET)


def feed(rng, rows):
    sizes = {"source": SOURCE.size, "target": TARGET.size, "right": TARGET.size}
    return {k: rng.randint(VOCAB.size, size=[rows, n]).astype(np.int32) for k, n in sizes.items()}


def pair_by_pair(optimizer, grads, variables):
    return [op for pair in zip(grads, variables) for op in optimizer.apply_grad(*pair)]


STYLE = compared.Style(
    "batch:rows;heads:cols;h:cols;vocab:cols",
    loss,
    feed,
    lambda: mtf.optimize.AdamWeightDecayOptimizer(0.01, epsilon=1e-3),
    pair_by_pair,
)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cross_shard", "placement"),
        ("synced replicas", "simd"),
        pytest.param("loss scale of accumulated, sharded updates", "xla", marks=pytest.mark.xla),
    ],
)
def test_it_trains_as_bare_on_one_core(name, kind):
    compared.check(STYLE, name, kind)
