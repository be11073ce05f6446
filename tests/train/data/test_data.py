import re
import time

import numpy as np
import pytest

from mtf_gradsync._common import ConfigError
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.train.data import batches as batches_module
from mtf_gradsync.train.data import datasets as data
from mtf_gradsync.train.data.batches import TrainingBatches
from mtf_gradsync.train.data.vocabulary import EOS_ID, ByteVocabulary

TEXTS = ["".join(chr(97 + i % 26) for i in range(50)), "0123456789" * 4]


def windows(split, seed=0, start=0):
    return data.text_windows(TEXTS, {"targets": 8}, ByteVocabulary(), split, seed, start)


def windows_from(start):
    return windows("train", start=start)


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


def shuffled():
    """Forty examples in an order that nobody has given a seed, another one each time round."""
    data = tf.data.Dataset.range(40).map(lambda n: {"targets": tf.fill([8], n)})
    return data.shuffle(30, reshuffle_each_iteration=True)


@pytest.mark.parametrize("make", [lambda: windows("train"), windows_from, shuffled])
def test_training_goes_on_where_the_checkpoint_says_whatever_the_batch_size(make):
    def drawn(batch_size, step, examples, count):
        """Examples `[count, 8]` of a session after `step` steps made of `examples`."""
        sizes = {"targets": 1 << 40}
        with TrainingBatches(make, batch_size, lambda name: 8, sizes, seed=3) as batches:
            (feed,) = batches.placeholders().values()
            batches.begin(step, examples)
            steps = [batches.next()[feed] for _ in range(count // batch_size)]
        return np.concatenate(steps)

    expected = drawn(4, 0, 0, 120)
    assert len(np.unique(expected, axis=0)) > 30
    if make is shuffled:
        assert (np.diff(expected[:40, 0]) != 1).any()
        assert (expected[:40] != expected[40:80]).any()
        assert sorted(expected[:40, 0]) == sorted(expected[40:80, 0]) == list(range(40))
    for batch_size, count in ((4, 108), (6, 108), (2, 20)):
        rest = drawn(batch_size, 3, 12, count)
        np.testing.assert_array_equal(rest, expected[12 : 12 + count])


def test_a_data_set_that_takes_a_start_goes_there_at_once(monkeypatch, capfd):
    """2**40 examples on: to draw them would take years. Others show how far they are."""
    monkeypatch.setattr(batches_module, "_SECONDS_BETWEEN_LOOKS", 0.1)
    sizes = {"targets": 1 << 40}
    with TrainingBatches(windows_from, 4, lambda name: 8, sizes) as batches:
        (feed,) = batches.placeholders().values()
        batches.begin(3, 1 << 40)
        drawn = batches.next()[feed]
    expected = data.read_batches(lambda: windows_from(1 << 40), batch_size=4, max_batches=1)
    np.testing.assert_array_equal(drawn, expected[0]["targets"])

    def slow(n):
        time.sleep(0.02)
        return n

    def dataset():
        counted = tf.data.Dataset.range(100)
        return counted.map(lambda n: {"targets": tf.fill([8], tf.py_function(slow, [n], tf.int64))})

    with TrainingBatches(dataset, 4, lambda name: 8, sizes) as batches:
        (feed,) = batches.placeholders().values()
        batches.begin(3, 30)
        assert batches.next()[feed][:, 0].tolist() == [30, 31, 32, 33]
    shown = capfd.readouterr().err
    assert "draws the 30 examples of the steps before" in shown
    assert "argument `start`" in shown
    assert re.search(r"skipping: .*/30 ", shown)


def test_features_that_no_model_reads_are_dropped():
    def dataset():
        return tf.data.Dataset.from_tensors({"targets": [1, 2], "targets_pretokenized": "text"})

    assert list(data.read_batches(dataset, 1, None)[0]) == ["targets"]


def test_too_little_text():
    with pytest.raises(ConfigError, match=r"92 tokens, less than one window.*sequence_length = 99"):
        data.text_windows(TEXTS, {"targets": 99}, ByteVocabulary(), "train", 0)
