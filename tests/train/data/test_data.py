import numpy as np
import pytest

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes.errors import ConfigError
from mtf_gradsync.train.data import datasets as data
from mtf_gradsync.train.data.batches import TrainingBatches
from mtf_gradsync.train.data.vocabulary import EOS_ID, ByteVocabulary

TEXTS = ["".join(chr(97 + i % 26) for i in range(50)), "0123456789" * 4]


def windows(split, seed=0):
    return data.text_windows(TEXTS, {"targets": 8}, ByteVocabulary(), split, seed)


def read(split, batches, seed=0):
    return data.read_batches(lambda: windows(split, seed), batch_size=4, max_batches=batches)


def test_same_seed_same_windows():
    first, again, other = (read("train", 3, seed=seed)[2]["targets"] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert first.shape == (4, 8)


def test_validation_shows_every_token_once():
    batches = read("validation", None)
    tokens = np.concatenate([batch["targets"].reshape(-1) for batch in batches])
    expected = ByteVocabulary()
    ids = [i for t in TEXTS for i in [*expected.encode(t), EOS_ID]]
    assert tokens[tokens > 0].tolist() == ids
    assert {batch["targets"].shape for batch in batches} == {(4, 8)}


def test_training_goes_on_where_the_step_says():
    expected = [batch["targets"] for batch in read("train", 5)]
    sizes = {"targets": ByteVocabulary().vocab_size}
    with TrainingBatches(lambda: windows("train"), 4, lambda name: 8, sizes) as batches:
        (feed,) = batches.placeholders().values()
        batches.begin(3)
        for batch in expected[3:]:
            np.testing.assert_array_equal(batches.next()[feed], batch)


def test_features_that_no_model_reads_are_dropped():
    def dataset():
        return tf.data.Dataset.from_tensors({"targets": [1, 2], "targets_pretokenized": "text"})

    assert list(data.read_batches(dataset, 1, None)[0]) == ["targets"]


def test_too_little_text():
    with pytest.raises(ConfigError, match=r"92 tokens, less than one window.*sequence_length = 99"):
        data.text_windows(TEXTS, {"targets": 99}, ByteVocabulary(), "train", 0)
