"""Data that nobody can train on: an error that says what was given, and nothing that is lost."""

import re

import gin
import numpy as np
import pytest

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes._common import ConfigError, TrainingError
from mtf_gradsync.runtimes.starting import choose_checkpoint
from mtf_gradsync.tools.train.cli import main as cli
from mtf_gradsync.tools.train.data.batches import DataError, TrainingBatches
from mtf_gradsync.tools.train.data.datasets import read_batches
from tests.tools.train.conftest import NO_EVAL, QUICK, TINY

BATCH, LENGTH, VOCAB = 2, 4, 10
GOOD = np.array([1, 2, 3, 0])
PER_STEP = 8  # examples, as in tiny.gin


def batches(make_dataset):
    sizes = {"inputs": VOCAB, "targets": VOCAB}
    return TrainingBatches(make_dataset, BATCH, lambda name: LENGTH, sizes)


def generated(examples, shape=None, dtype=tf.int32):
    """A data set of what a function yields, of a shape that nobody knows or a given one."""

    def dicts():
        yield from ({"targets": x} for x in examples())

    def make():
        shapes = {"targets": tf.TensorShape(shape)}
        return tf.data.Dataset.from_generator(dicts, {"targets": dtype}, shapes)

    return make


def of(**features):
    return lambda: tf.data.Dataset.from_tensors(features)


def raises_in_the_sixth():
    yield from [GOOD] * 5
    raise KeyError("lost")


def stops_in_the_sixth():
    def example(number):
        if number == 5:
            raise StopIteration
        return GOOD.astype(np.int32)

    def read(number):
        x = tf.numpy_function(example, [number], tf.int32)
        return {"targets": tf.ensure_shape(x, [LENGTH])}

    return tf.data.Dataset.range(100).map(read)


def fails_to_parse():
    texts = tf.data.Dataset.from_tensor_slices(["1"] * 5 + ["one"])
    return texts.map(lambda x: {"targets": tf.fill([LENGTH], tf.strings.to_number(x, tf.int32))})


once = iter([GOOD] * 5)
FAULTS = {
    # name: (the data set, the step that has no batch, what is said)
    "ends for good": (generated(lambda: once), 3, "ended before step 3.*can be read only once"),
    "has never been": (generated(list), 1, "for step 1; the data set is empty"),
    "the generator raises": (generated(raises_in_the_sixth), 3, "step 3: .*KeyError: 'lost'"),
    "an operation raises": (fails_to_parse, 3, "step 3: InvalidArgumentError: .*one"),
    "ragged": (
        generated(lambda: [GOOD] * 3 + [GOOD[:3]]),
        2,
        r"example 1 in the batch of step 2 has 'targets' of the shape \[3\]; .* wants \[4\]",
    ),
    "too long": (generated(lambda: [np.tile(GOOD, 2)], [None]), 1, r"of the shape \[8\]"),
    "scalars": (generated(lambda: [3]), 1, r"of the shape \[\]"),
    "matrices": (generated(lambda: [GOOD[None]]), 1, r"of the shape \[1, 4\]"),
    "of many dimensions": (generated(lambda: [[[[[1]]]]]), 1, r"shape \[1, 1, 1, ...\]"),
    "of another type": (generated(lambda: [GOOD, "abcd"]), 1, "step 1: .*expected type was int32"),
    "id beyond": (of(targets=[1, 2, 10, 0]), 1, "the id 10 in 'targets', at 2; .*0 to 9 "),
    "id that int32 wraps": (of(targets=np.array([1, 2**32 + 5, 3, 0])), 1, "the id 4294967301 in"),
    "negative input": (of(inputs=[1, 2, -3, 0], targets=GOOD), 1, "-3 in 'inputs'.* 0 to 9. The"),
    "far below": (of(targets=[1, 2, -10, 0]), 1, "-10 in 'targets'.*or negative, for a target"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_without_a_batch_is_named(fault):
    make, step, said = FAULTS[fault]
    with batches(make) as drawn:
        drawn.begin(0, 0)
        for _ in range(step - 1):
            drawn.next()
        with pytest.raises(DataError, match=said) as raised:
            drawn.next()
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith("train.run.train_dataset_fn: ")


@pytest.mark.parametrize(
    "make",
    [
        stops_in_the_sixth,
        generated(lambda: [GOOD] * 5),
        generated(lambda: [GOOD] * 5, [LENGTH], tf.int64),
        of(targets=[1, 2, -9, 0]),
        of(targets=[0, 0, 0, 0]),
    ],
    ids=["stops", "ends", "int64", "negative target", "padding"],
)
def test_what_can_be_trained_on_is_repeated(make):
    with batches(make) as drawn:
        feeds = drawn.placeholders()
        drawn.begin(1, BATCH)
        for _ in range(6):
            values = drawn.next()
            assert values[feeds["targets"]].dtype == np.int32
            assert values[feeds["targets"]].shape == (BATCH, LENGTH)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (of(targets=[1.0, 2.0]), "'targets' as float32; it must be integers"),
        (of(targets=["a", "b"]), "'targets' as string; it must be integers"),
        (lambda: tf.data.Dataset.from_tensors(GOOD), "must give examples as dicts"),
        (lambda: [GOOD], "must return a tf.data.Dataset; got "),
        (of(targets=tf.ragged.constant([[1], [2, 3]])), "it must be a dense tensor"),
        (lambda: of(targets=GOOD)().take(0), "gives an empty data set"),
    ],
)
def test_what_is_known_before_training_is_a_bad_config(make, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        batches(make)


@pytest.mark.parametrize("runtime", ["cpu_replicas", "placement_mesh", "xla"])
@pytest.mark.mostly_slow
def test_a_run_ends_in_one_line_and_keeps_its_steps(runtime, tmp_path, capsys):
    name = f"faulty_{runtime}"

    @gin.configurable(name, module="tests.train.data")
    def faulty(sequence_length, vocabulary, dataset_split):
        good = np.arange(sequence_length["targets"]) + 3
        return generated(lambda: [*[good] * 2 * PER_STEP, good[:5]])()

    bindings = [*QUICK, NO_EVAL, f"train.run.runtime = '{runtime}'"]
    bindings.append(f"train.run.train_dataset_fn = @{name}")
    params = [f"--gin_param={one}" for one in bindings]
    command = ["train", f"--gin_file={TINY}", f"--model_dir={tmp_path}", *params]
    # On the quickest it goes on from there as well, and comes to the same.
    for _ in range(2 if runtime == "cpu_replicas" else 1):
        assert cli.main(command) == cli.EXIT_FAILED
        error = capsys.readouterr().err
        assert "Traceback" not in error
        (line,) = [x for x in error.splitlines() if x.startswith("mtf-gradsync: error: ")]
        assert "example 0 in the batch of step 3 has 'targets' of the shape [5]" in line
        assert line.endswith("wants [16]. Pad or cut it there. The newest checkpoint is of step 2.")
        assert choose_checkpoint(str(tmp_path), False, pytest.fail).step == 2


def test_held_out_data_that_cannot_be_read_are_a_bad_config():
    with pytest.raises(ConfigError, match=r"^the_function: .* UnknownError: KeyError: 'lost'$"):
        read_batches(generated(raises_in_the_sixth), BATCH, None, "the_function")


@gin.configurable(module="tests.train.data")
def only_padding(sequence_length, vocabulary, dataset_split):
    """A batch of which one shard has none, then batches without any."""
    first = np.ones([PER_STEP, sequence_length["targets"]], np.int32)
    first[: PER_STEP // 2] = 0
    return tf.data.Dataset.from_tensor_slices({"targets": np.concatenate([first, 0 * first])})


def test_padding_alone_has_no_loss_and_breaks_nothing(train):
    bindings = ["train.run.train_dataset_fn = @only_padding", "train.run.train_steps = 3"]
    _, directory, _ = train(NO_EVAL, *bindings)
    reader = tf.train.load_checkpoint(str(directory))
    for name in reader.get_variable_to_shape_map():
        assert np.isfinite(reader.get_tensor(name)).all(), name


@gin.configurable(module="tests.train.data")
def falls_below_zero(step, total_train_steps):
    """A learning rate."""
    del total_train_steps
    return 0.01 * (2.0 - tf.cast(step, tf.float32))


def test_an_invalid_learning_rate_is_named(train):
    for numbers in ("-0.1", "1e999", "[1.0, -0.1]"):
        with pytest.raises(ConfigError, match="learning_rate_schedule must be finite and not neg"):
            train(NO_EVAL, f"train.run.learning_rate_schedule = {numbers}")
    with pytest.raises(TrainingError, match=r"learning rate of step 4 is -0.01.*rate_schedule"):
        train(NO_EVAL, "train.run.learning_rate_schedule = @falls_below_zero")
