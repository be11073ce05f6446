"""What goes wrong in the middle of a training: what was trained is kept.

An input_fn ends, raises or gives a batch of another size, or has none; a session is lost.

Batches whose size TensorFlow does not know are for placement meshes and CPU replicas; a program for
XLA devices refuses them before it begins.
"""

import shutil

import numpy as np
import pytest

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.simd import UnsupportedProgramError
from tests import harness
from tests.tools.estimator import digits
from tests.tools.estimator.runs import RUNTIMES, VARIABLES, ours, train

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


@pytest.mark.slow
def test_an_input_that_ends_ends_the_training_with_a_checkpoint(tmp_path):
    runs = ours(tmp_path, runtime="cpu_replicas")
    assert len(train(runs, input_fn=ends)) == BEFORE
    assert runs.latest_checkpoint().endswith(f"model.ckpt-{BEFORE}")


@pytest.mark.slow
def test_an_input_without_batches_is_warned_of(tmp_path, caplog):
    runs = ours(tmp_path, runtime="cpu_replicas")
    assert train(runs, input_fn=lambda mode: digits.input_fn(mode).take(0)) == []
    (warning,) = [r for r in caplog.records if r.name.startswith("mtf_gradsync")]
    assert warning.levelname == "WARNING"
    assert "made no step" in warning.getMessage()
    caplog.clear()
    train(runs, steps=1)
    assert not [r for r in caplog.records if r.name.startswith("mtf_gradsync")]


class LosesTheSession(tf.train.SessionRunHook):
    """Fails once, after a step, as a session does that has lost a worker; knows all steps made."""

    def __init__(self, step):
        self._lost_after = step
        self.steps = []

    def begin(self):
        self._step_made = tf.train.get_global_step()

    def after_run(self, run_context, run_values):
        del run_values
        self.steps.append(int(run_context.session.run(self._step_made)))
        if self.steps == list(range(1, self._lost_after + 1)):
            raise tf.errors.AbortedError(None, None, "a worker was lost")


@pytest.mark.parametrize("runtime", ["placement_mesh", "cpu_replicas"])
@pytest.mark.mostly_slow
def test_a_session_made_anew_goes_on_from_the_newest_checkpoint(runtime, tmp_path):
    """Before the first one there was none; one is written after every third step."""
    loses = LosesTheSession(5)
    ours(tmp_path, runtime=runtime).train(digits.input_fn, hooks=[loses], steps=7)
    assert loses.steps == [1, 2, 3, 4, 5, 4, 5, 6, 7]


@pytest.mark.slow
def test_a_damaged_checkpoint_ends_the_training_or_is_skipped(copied):
    data = next(copied.glob("model.ckpt-6.data-*"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    said = (
        r"newest checkpoint, .*model\.ckpt-6, is damaged: .* cannot be read.* "
        r"With Estimator\(skip_damaged_checkpoint=True\) .* from .*model\.ckpt-3"
    )
    with pytest.raises(ValueError, match=said):
        train(ours(copied), 1)
    runs = ours(copied, skip_damaged_checkpoint=True)
    train(runs, 1)
    assert runs.latest_checkpoint() == str(copied / "model.ckpt-4")
    assert (copied / "damaged" / data.name).exists()


def test_files_that_the_run_has_not_written_are_not_its_checkpoint(copied):
    for file in copied.glob("model.ckpt-3.*"):
        shutil.copy(file, copied / file.name.replace("-3.", "-6."))
    with pytest.raises(ValueError, match=r"model\.ckpt-6\.index is not the one that the run wrote"):
        train(ours(copied), 1)


def test_a_checkpoint_of_another_optimizer_is_named_in_full(copied):
    with pytest.raises(ValueError, match="made by another model") as raised:
        train(ours(copied, "momentum"), 1)
    for name in VARIABLES:
        assert f"{name}_momentum_v is not in the checkpoint" in str(raised.value)
    assert not list(copied.glob("model.ckpt-7.*"))


@pytest.mark.slow
def test_a_run_begins_with_a_checkpoint_of_another_directory(copied, tmp_path):
    """As who writes the state file by hand has it."""
    (tmp_path / "new").mkdir()
    newest = copied / "model.ckpt-6"
    (tmp_path / "new" / "checkpoint").write_text(f'model_checkpoint_path: "{newest}"\n')
    runs = ours(tmp_path / "new")
    assert runs.latest_checkpoint() == str(newest)
    train(runs, 1)
    assert runs.latest_checkpoint() == str(tmp_path / "new" / "model.ckpt-7")


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.slow
def test_an_input_that_raises_ends_it_with_its_error(runtime, tmp_path):
    runs = ours(tmp_path, runtime=runtime)
    with pytest.raises(tf.errors.UnknownError, match="KeyError: 'no such picture'"):
        train(runs, input_fn=raises)
    assert runs.latest_checkpoint().endswith("model.ckpt-3")


@pytest.mark.parametrize(
    ("runtime", "size"), harness.pairs(["placement_mesh", "cpu_replicas"], of_another_size)
)
@pytest.mark.mostly_slow(keep="placement_mesh")
def test_a_batch_of_another_size_is_an_error(runtime, size, tmp_path):
    """Mesh-TF alone takes a part of a long one without a word."""
    given = of_another_size[size]
    runs = ours(tmp_path, runtime=runtime)
    message = (
        rf"{given.__qualname__} gave a batch of another size: .* \[16(, 64)?\].* drop_remainder"
    )
    with pytest.raises(ValueError, match=message):
        train(runs, input_fn=given)
    assert runs.latest_checkpoint().endswith("model.ckpt-3")


@pytest.mark.parametrize("runtime", RUNTIMES[2:])
def test_batches_of_an_unknown_size_are_refused_on_xla_devices(runtime, tmp_path):
    with pytest.raises(UnsupportedProgramError, match=r"needs static shapes.*drop_remainder=True"):
        train(ours(tmp_path, runtime=runtime), input_fn=of_another_size["short"])
