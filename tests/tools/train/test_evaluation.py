import math

import numpy as np
import pytest

from mtf_gradsync.runtimes.settings import enable_mesh_defaults, session_config
from mtf_gradsync.runtimes.starting import latest_checkpoint
from mtf_gradsync.tools.train import evaluation
from mtf_gradsync.tools.train.data.vocabulary import ByteVocabulary
from mtf_gradsync.tools.train.mesh_settings import resolve_mesh
from mtf_gradsync.tools.train.model import ModelSettings
from mtf_gradsync.tools.train.sampling import Sampling, escape_controls, sample
from tests.tools.train.conftest import ATTENTION, NO_EVAL, train_tiny


class Words:
    """A vocabulary that does not know how many bytes its ids stand for."""

    vocab_size = 4

    def encode(self, text):
        return [{"aa": 2, "bbb": 3}[word] for word in text.split()]

    def decode(self, ids):
        return "".join({2: "aa", 3: "bbb"}.get(i, "") for i in ids)


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory):
    """An evaluator of a model that has made two steps."""
    enable_mesh_defaults()
    directory = str(tmp_path_factory.mktemp("model"))
    train_tiny(directory, "train.run.train_steps = 2", NO_EVAL, ATTENTION)
    settings = ModelSettings(
        model_type="lm",
        vocabulary=ByteVocabulary(),
        mesh=resolve_mesh("batch:2;model:2", "batch:batch,d_ff:model,vocab:model", None),
        batch_size=2,
        outer_batch_size=0,
        sequence_length={"targets": 16},
        autostack=True,
        seed=0,
    )
    targets = np.random.RandomState(0).randint(3, 259, [2, 16]).astype(np.int32)
    targets[1, 9:] = 0
    config = session_config(num_cpu_devices=4)
    with evaluation.Evaluator(settings, [{"targets": targets}], config) as made:
        made.restore(latest_checkpoint(directory), directory)
        yield made


@pytest.mark.slow
def test_perplexity_is_that_of_numpy(evaluator):
    (batch,) = evaluator.batches
    nats, tokens = 0.0, 0
    for position in range(16):
        logits = evaluator.next_logits(batch, position).astype(np.float64)
        # The model's vocabulary is padded to 260; the last logit is not in the slice.
        assert logits.shape == (2, 259)
        for row, target in enumerate(batch["targets"][:, position]):
            if target:
                nats += np.log(np.sum(np.exp(logits[row]))) - logits[row, target]
                tokens += 1
    score = evaluator.score()
    assert score.tokens == tokens == 25
    assert score.num_bytes == 25
    assert score.nats_per_token == pytest.approx(nats / tokens, rel=1e-3)
    assert score.perplexity == pytest.approx(math.exp(nats / tokens), rel=1e-2)
    assert score.bits_per_byte == pytest.approx(score.nats_per_token / math.log(2))


@pytest.mark.slow
def test_later_targets_have_no_influence(evaluator):
    (batch,) = evaluator.batches
    changed = {"targets": batch["targets"].copy()}
    changed["targets"][:, 5:] = 7
    np.testing.assert_array_equal(
        evaluator.next_logits(batch, 5), evaluator.next_logits(changed, 5)
    )


@pytest.mark.slow
def test_samples_repeat_with_their_seed_and_follow_the_temperature(evaluator):
    def write(**given):
        return sample(evaluator, Sampling(**{"prompt_tokens": 8, "max_tokens": 6, **given}))

    assert write(temperature=1.0, seed=1) == write(temperature=1.0, seed=1)
    assert write(temperature=1.0, seed=1) != write(temperature=1.0, seed=2)
    assert write(temperature=0.0, seed=1) == write(temperature=0.0, seed=2)
    assert write(temperature=1.0, keep_top_k=1) == write(temperature=0.0)
    # More than the sequence of 16 holds; the beginning is the same.
    short, long = (write(num_samples=1, max_tokens=n, temperature=0)[0] for n in (6, 30))
    assert long.prompt == short.prompt
    assert len(long.continuation) > 16
    assert long.continuation.startswith(short.continuation[:3])
    assert write(num_samples=0) == []


def test_unigram_baseline_by_hand():
    train = [{"targets": np.array([[2, 2, 2, 3], [2, 0, 0, 0]])}]
    held_out = [{"targets": np.array([[2, 3, 0, 0]])}]
    score = evaluation.unigram_score(train, held_out, Words())
    # Counts 0, 0, 4, 1 plus one each, over nine.
    assert score.nats == pytest.approx(-math.log(5 / 9) - math.log(2 / 9))
    assert (score.tokens, score.num_bytes) == (2, 5)
    assert score.perplexity == pytest.approx(math.sqrt(81 / 10))


def test_unigram_baseline_of_a_pair_counts_the_targets():
    batches = [{"targets": np.array([[2, 3]])}]
    pair = (ByteVocabulary(), Words())
    assert evaluation.unigram_score(batches, batches, pair).perplexity == pytest.approx(3.0)


def test_what_a_terminal_would_obey_is_escaped():
    text = "\x1b[2Jred\x07\x00\x9b1m \u202eabc\r"
    assert escape_controls(text) == r"\x1b[2Jred\x07\x00\x9b1m \u202eabc\r"
    assert escape_controls("a\tb\n\u00e9 \U0001f600") == "a\tb\n\u00e9 \U0001f600"
