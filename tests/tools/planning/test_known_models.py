"""Plans of models whose parameters, operations and bytes are known, and of one on four chips."""

import json

import gin
import numpy as np
import pytest

from benchmarks import models
from mtf_gradsync import xla
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes.xla.topology.slices import slice_of
from mtf_gradsync.tools.train.cli import main as cli

no_compiler = xla.why_no_tpu_compiler()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.tpu,
    pytest.mark.skipif(bool(no_compiler), reason=no_compiler),
]

WIDTH, WIDE, LAYERS, CORES = 768, 3072, 12, 8
# To compile all twelve takes minutes. Of an encoder and a decoder one each.
COMPILED = {"GPT-2 small": 2, "T5-base": 1}


@gin.configurable(module="tests")
def texts_and_answers(sequence_length, vocabulary, dataset_split):
    """A data set that has the features of an encoder and a decoder."""
    numbers = {name: np.ones((8, size), np.int32) for name, size in sequence_length.items()}
    return tf.data.Dataset.from_tensor_slices(numbers)


# One sequence for each core, whose length leaves numbers of operations and bytes apart.
COMMON = f"""
include "lm_cpu_mesh.gin"
d_model = {WIDTH}
d_ff = {WIDE}
num_heads = 12
d_kv = 64
train.run.mesh_shape = "batch:8"
train.run.batch_size = {CORES}
train.run.optimizer = @AdafactorOptimizer
"""
GPT2_SMALL = (
    COMMON
    + f"num_layers = {COMPILED['GPT-2 small']}"
    + """
Unitransformer.max_length = 1024
Unitransformer.vocab_divisor = 50304
train.run.sequence_length = {"inputs": 128, "targets": 128}
"""
)
T5_BASE = f"""{COMMON}{models.T5_BASE}
num_layers = {COMPILED["T5-base"]}
train.run.sequence_length = {{"inputs": 128, "targets": 32}}
train.run.train_dataset_fn = @texts_and_answers
"""
# On four kinds of chips: one layer, and narrow, which compiles in half of the time.
ONE_LAYER = (
    COMMON
    + """
num_layers = 1
d_model = 256
d_ff = 1024
num_heads = 4
Unitransformer.max_length = 128
train.run.sequence_length = {"inputs": 128, "targets": 128}
"""
)

ATTENTION, DENSE = 4 * WIDTH**2, 2 * WIDTH * WIDE


def flops_by_hand(layers, weights, lookups, pairs):
    """Operations of a step of one core: of weights by tokens, lookups by tokens, and attention.

    A product takes two operations for each number of its weight, and its gradients twice as many. A
    lookup is a product with ones and zeros, which needs no gradient. A query meets a key in two
    products.
    """
    products = sum(6 * size * tokens for size, tokens in weights)
    embedded = sum(4 * size * tokens for size, tokens in lookups)
    met = sum(3 * 2 * 2 * WIDTH * queries * keys for queries, keys in pairs)
    return products + layers * met, embedded


def gpt2_small(count):
    """Returns the parameters, and the operations of a step with a sequence of 128 tokens."""
    vocabulary = 50304 * WIDTH
    layers = count * (ATTENTION + DENSE)
    norms = (2 * count + 1) * WIDTH
    parameters = vocabulary + 1024 * WIDTH + layers + norms
    flops = flops_by_hand(count, [(layers + vocabulary, 128)], [(vocabulary, 128)], [(128, 128)])
    return parameters, flops


def t5_base(count):
    """The same of 128 tokens that are read and 32 that are written."""
    vocabulary = 32128 * WIDTH
    encoder, decoder = count * (ATTENTION + DENSE), count * (2 * ATTENTION + DENSE)
    norms = (2 * count + 1 + 3 * count + 1) * WIDTH
    buckets = 2 * 32 * 12
    parameters = vocabulary + encoder + decoder + norms + buckets
    # Keys and values of what is read are made from the encoder's tokens.
    crossed = count * ATTENTION // 2
    weights = [(encoder + crossed, 128), (decoder - crossed + vocabulary, 32)]
    pairs = [(128, 128), (32, 32), (32, 128)]
    return parameters, flops_by_hand(count, weights, [(vocabulary, 128 + 32)], pairs)


def planned(config, topologies, tmp_path):
    """Rows by topology, fastest first; the plan is that of the command."""
    gin_file, json_file = tmp_path / "model.gin", tmp_path / "plan.json"
    gin_file.write_text(config)
    arguments = [f"--gin_file={gin_file}", f"--topologies={topologies}", f"--json={json_file}"]
    assert cli.main(["plan", "--mesh_shape=batch:8", *arguments]) == 0
    rows = json.loads(json_file.read_text())["rows"]
    assert [row["doubt"] for row in rows] == [""] * len(rows)
    return {row["machine"]: row for row in rows}


def check_roofline(name, row):
    """An estimate is near the roofline by the chip's published figures."""
    chip, cores = slice_of(name).chip, slice_of(name).generation.cores_per_chip
    by_hand = cores * max(
        row["flops"] / chip.peak_flops, row["bytes_accessed"] / chip.hbm_bytes_per_second
    )
    assert row["roofline_seconds"] == pytest.approx(by_hand)
    assert 0.97 * by_hand <= row["estimate_seconds"] <= 2 * by_hand


# Fastest first, by memory bandwidth: with so few tokens bytes take longer than operations.
ORDER = ["v5p:2x2x2", "v6e:2x4", "v5e:2x4", "v2:2x2"]


@pytest.mark.parametrize(
    ("name", "config", "by_hand", "of_twelve", "chips"),
    [
        ("GPT-2 small", GPT2_SMALL, gpt2_small, 124_373_760, "v5e:2x4"),
        ("T5-base", T5_BASE, t5_base, 222_903_552, "v3:2x2"),
    ],
)
def test_known_models(name, config, by_hand, of_twelve, chips, tmp_path):
    assert by_hand(LAYERS)[0] == of_twelve
    parameters, (needed, embedded) = by_hand(COMPILED[name])
    flops = needed + embedded
    ((_, row),) = planned(config, chips, tmp_path).items()
    check_roofline(chips, row)
    assert row["parameters"] == parameters
    # Lookups are no products that the model needs. The model is counted in float64.
    assert row["model_flops"] == CORES * needed
    peak = slice_of(chips).chip.peak_flops / slice_of(chips).generation.cores_per_chip
    assert row["mfu"] == pytest.approx(needed / (row["step_seconds"] * peak))
    # The compiler counts what is no product, too.
    assert flops <= row["flops"] <= 1.05 * flops
    # A weight of four bytes is read by the forward and by the backward pass; its gradient is
    # written, reduced (read and written), and read by the optimizer, which reads the weight and
    # writes it. Activations and statistics come on top, and embeddings have two of all.
    assert 8 * 4 * parameters <= row["bytes_accessed"] <= 16 * 4 * parameters


def test_chips_are_in_the_order_of_their_rooflines(tmp_path):
    rows = planned(ONE_LAYER, ",".join(sorted(ORDER)), tmp_path)
    for name, row in rows.items():
        check_roofline(name, row)
    for key in ("estimate_seconds", "roofline_seconds"):
        assert sorted(rows, key=lambda name, key=key: rows[name][key]) == ORDER
