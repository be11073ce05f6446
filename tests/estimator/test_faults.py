"""An input_fn that ends, raises or gives a batch of another size: what was trained is kept.

Batches whose size TensorFlow does not know are for placement meshes and CPU replicas; a program for
XLA devices refuses them before it begins.
"""

import numpy as np
import pytest

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.simd import UnsupportedProgramError
from tests.estimator import digits
from tests.estimator.test_estimator import RUNTIMES, ours, train

BEFORE = 4  # good batches; a checkpoint after every third


def ends(mode):
    return digits.input_fn(mode).take(BEFORE)


def generated(last, shape):
    def batch(number):
        return {"image": np.ones([number, 64])}, [1] * number

    def batches():
        for _ in range(BEFORE):
            yield batch(digits.BATCH)
        yield from last(batch)

    def input_fn(mode):
        del mode
        shapes = {"image": tf.TensorShape(shape and [*shape, 64])}, tf.TensorShape(shape)
        types = {"image": tf.float32}, tf.int32
        return tf.data.Dataset.from_generator(batches, types, shapes)

    return input_fn


def fails(batch):
    raise KeyError("no such picture")


raises = generated(fails, [digits.BATCH])
of_another_size = {
    "short": generated(lambda batch: [batch(digits.BATCH - 9)], None),
    "long": generated(lambda batch: [batch(2 * digits.BATCH)], None),
}


def test_an_input_that_ends_ends_the_training_with_a_checkpoint(tmp_path):
    runs = ours(tmp_path, runtime="cpu_replicas")
    assert len(train(runs, input_fn=ends)) == BEFORE
    assert runs.latest_checkpoint().endswith(f"model.ckpt-{BEFORE}")


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_an_input_that_raises_ends_it_with_its_error(runtime, tmp_path):
    runs = ours(tmp_path, runtime=runtime)
    with pytest.raises(tf.errors.UnknownError, match="KeyError: 'no such picture'"):
        train(runs, input_fn=raises)
    assert runs.latest_checkpoint().endswith("model.ckpt-3")


@pytest.mark.parametrize("size", of_another_size)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_batch_of_another_size_is_an_error(runtime, size, tmp_path):
    """Mesh-TF alone takes a part of a long one without a word."""
    given = of_another_size[size]
    runs = ours(tmp_path, runtime=runtime)
    if runtime == "xla":
        with pytest.raises(UnsupportedProgramError, match="needs static shapes"):
            train(runs, input_fn=given)
        return
    message = r"[Ss]hape of tensor .* is not compatible with expected shape"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        train(runs, input_fn=given)
    assert runs.latest_checkpoint().endswith("model.ckpt-3")
