import inspect
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes._common import ConfigError
from mtf_gradsync.tools.islands import DataPart
from mtf_gradsync.tools.train.data import batches as batches_module
from mtf_gradsync.tools.train.data import datasets as data
from mtf_gradsync.tools.train.data.batches import TrainingBatches
from mtf_gradsync.tools.train.data.vocabulary import EOS_ID, ByteVocabulary

TEXTS = [bytes(97 + i % 26 for i in range(50)), b"0123456789" * 4]


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
    ids = [i for t in TEXTS for i in [*expected.encode(t.decode()), EOS_ID]]
    assert tokens[tokens > 0].tolist() == ids
    assert {batch["targets"].shape for batch in batches} == {(4, 8)}


def test_ids_in_a_file_are_those_in_memory(monkeypatch):
    in_memory = {split: read(split, 3) for split in ("train", "validation")}
    monkeypatch.setattr(data, "_IN_A_FILE", 16)
    assert isinstance(data._encode_documents(TEXTS, ByteVocabulary()), np.memmap)
    for split, expected in in_memory.items():
        for batch, other in zip(read(split, 3), expected):
            np.testing.assert_array_equal(batch["targets"], other["targets"])
            assert batch["targets"].dtype == np.int32


def test_ids_have_the_smallest_type_that_holds_them():
    class Vocabulary(ByteVocabulary):
        vocab_size = 70_000

    assert data._encode_documents(TEXTS, ByteVocabulary()).dtype == np.uint16
    assert data._encode_documents(TEXTS, Vocabulary()).dtype == np.uint32
    Vocabulary.vocab_size = 100
    with pytest.raises(ConfigError, match=r"ids from 100 to 125, and its vocab_size is 100"):
        data._encode_documents(TEXTS, Vocabulary())


def test_no_room_for_ids_is_an_error_of_one_line(monkeypatch):
    monkeypatch.setattr(data, "_IN_A_FILE", 16)
    full = Path("/dev/full")
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: full.open("wb"))
    with pytest.raises(ConfigError, match=r"No space left on device\. Set TMPDIR"):
        windows("train")


_MEMORY = """
import resource, sys
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.tools.train.data import datasets
from mtf_gradsync.tools.train.data.vocabulary import ByteVocabulary

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

tf.disable_v2_behavior()
before = peak()
for split in ("train", "validation"):
    given = {"targets": 64}, ByteVocabulary(), split, [sys.argv[1]]
    datasets.read_batches(lambda: datasets.text_files(*given), 4, 2)
print(peak() - before)
"""


@pytest.mark.slow
def test_a_text_takes_little_memory_whatever_its_characters(tmp_path):
    """As text, one emoji makes four bytes of each character."""
    path, size = tmp_path / "long.txt", 50 << 20
    line = b"the quick brown fox jumps over the lazy dog \xf0\x9f\x98\x80\n"
    path.write_bytes(line * (size // len(line)))
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY, path], check=True, capture_output=True, text=True
    )
    # The text, the part to train on, and the pages of the file of ids that are looked at.
    assert int(done.stdout.splitlines()[-1]) < 4 * size


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


def numbers(start=None, part=0, parts=1):
    """Examples that hold their number; with a `start` without end, else 10 of them."""
    if start is None:
        found = tf.data.Dataset.range(part, 10, parts)
    else:
        found = tf.data.Dataset.range(start * parts + part, 1 << 40, parts)
    return found.map(lambda n: {"targets": tf.fill([2], n + 1)})


@pytest.mark.parametrize(
    "make",
    [
        lambda start, part, parts: numbers(start, part, parts),
        lambda start: numbers(start),
        lambda part, parts: numbers(None, part, parts),
        lambda: numbers(),
    ],
    ids=["takes both", "takes a start", "takes a part", "takes neither"],
)
@pytest.mark.parametrize("before", [0, 6])
def test_parts_of_a_data_set_are_apart(make, before):
    """Each of three islands has every third example, also when it goes on."""
    takes = inspect.signature(make).parameters
    for part in range(3):
        which = DataPart(part, 3)
        with TrainingBatches(make, 2, lambda name: 2, {"targets": 1 << 40}, part=which) as batches:
            (feed,) = batches.placeholders().values()
            batches.begin(3, before)
            found = np.concatenate([batches.next()[feed][:, 0] - 1 for _ in range(5)])
        own = np.arange(before, before + 10)
        if "start" in takes:
            expected = own * 3 + part
        elif "part" in takes:
            expected = np.resize(np.arange(part, 10, 3), 16)[own]
        else:
            # 3 is prime to 10: after three passes over its parts an island had all examples.
            expected = (own * 3 + part) % 10
            assert set(found) == set(range(10))
        np.testing.assert_array_equal(found, expected)


def test_windows_of_parts_are_those_of_the_whole():
    def targets(**how):
        made = data.read_batches(
            lambda: data.text_windows(TEXTS, {"targets": 8}, ByteVocabulary(), "train", 0, **how),
            batch_size=4, max_batches=3,
        )  # fmt: skip
        return np.concatenate([x["targets"] for x in made])

    whole = np.concatenate([targets(start=4 * 3 * n) for n in range(3)])
    for part in range(3):
        np.testing.assert_array_equal(targets(part=part, parts=3), whole[part::3])
        np.testing.assert_array_equal(
            targets(start=2, part=part, parts=3)[:8], whole[6 + part :: 3][:8]
        )


def test_features_that_no_model_reads_are_dropped():
    def dataset():
        return tf.data.Dataset.from_tensors({"targets": [1, 2], "targets_pretokenized": "text"})

    assert list(data.read_batches(dataset, 1, None)[0]) == ["targets"]


def test_too_little_text():
    with pytest.raises(ConfigError, match=r"92 tokens, less than one window.*sequence_length = 99"):
        data.text_windows(TEXTS, {"targets": 99}, ByteVocabulary(), "train", 0)
