"""Model functions train, evaluate, predict and restart alike, whatever runs them."""

import functools
import glob
import importlib.util
import itertools
import os
import shutil

import numpy as np
import pytest

from mtf_gradsync import estimator
from mtf_gradsync._private.libraries import ESTIMATOR_AVAILABLE, tf
from tests import reference
from tests.sessions import assert_same_bits, saved_variables
from tests.tools.estimator import by_hand, digits

# isort: split
from tensorflow.python.tpu import tpu_estimator

from tests.tools.estimator.runs import (
    RUNTIMES,
    TOLERANCE,
    VARIABLES,
    ours,
    tpu_run_config,
    train,
)

with_estimator = pytest.mark.skipif(
    not ESTIMATOR_AVAILABLE, reason="this TensorFlow has no Estimator"
)


def summaries(directory):
    """Scalars by (tag, step) in all event files of a directory."""
    found = {}
    for path in glob.glob(os.path.join(str(directory), "events*")):
        for event in tf.train.summary_iterator(path):
            for value in event.summary.value:
                number = value.simple_value
                if value.HasField("tensor"):
                    number = tf.make_ndarray(value.tensor)
                found[value.tag, event.step] = (
                    float(np.reshape(number, [-1])[0]) if np.size(number) else None
                )
    return found


def losses_from(start):
    """The losses of training in float64, from given values of the variables."""
    values = {name: start[name].astype(np.float64) for name in start if name in VARIABLES}
    adam, losses = reference.Adam(decay=0.0), []
    for images, labels in itertools.islice(batches(digits.input_fn("train")), digits.STEPS):
        logits = forward(values, images)
        losses.append(cross_entropy(logits, labels))
        values = adam(values, gradients(values, images, labels, logits))
    return losses


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.slow
def test_trains_evaluates_and_predicts(runtime, tmp_path, request):
    if runtime == "placement_mesh":
        tmp_path = request.getfixturevalue("copied")
    runs = ours(tmp_path, runtime=runtime)
    if runtime == "placement_mesh":
        losses = request.getfixturevalue("trained").losses
    else:
        losses = train(runs)
    start = saved_variables(tmp_path / "model.ckpt-0")
    np.testing.assert_allclose(losses, losses_from(start), rtol=TOLERANCE)
    end = saved_variables(tmp_path)
    assert end["global_step"] == digits.STEPS

    result = runs.evaluate(digits.input_fn, name="held_out")
    logits, loss = held_out(end)
    _, labels = zip(*batches(digits.input_fn("eval")))
    assert result["global_step"] == digits.STEPS
    np.testing.assert_allclose(result["loss"], loss, rtol=TOLERANCE)
    found = np.concatenate(logits).argmax(-1)
    assert result["accuracy"] == pytest.approx(np.mean(found == np.concatenate(labels)))
    assert summaries(tmp_path / "eval_held_out")["loss", digits.STEPS] == pytest.approx(
        result["loss"]
    )

    predicted = list(runs.predict(digits.input_fn, predict_keys="logits"))
    assert [list(one) for one in predicted[:1]] == [["logits"]]
    np.testing.assert_allclose(
        [one["logits"] for one in predicted], np.concatenate(logits), rtol=TOLERANCE, atol=TOLERANCE
    )


def batches(dataset):
    """The batches of a dataset as arrays."""
    features, labels = dataset.make_one_shot_iterator().get_next()
    with tf.Session() as session:
        while True:
            try:
                yield session.run((features["image"], labels))
            except tf.errors.OutOfRangeError:
                return


def hidden(values, images):
    return np.maximum(
        images.astype(np.float64) @ values["hidden/kernel"] + values["hidden/bias"], 0
    )


def forward(values, images):
    """The model in float64."""
    return hidden(values, images) @ values["logits/kernel"] + values["logits/bias"]


def gradients(values, images, labels, logits):
    """Of the mean cross-entropy of a batch, by hand."""
    h = hidden(values, images)
    chances = np.exp(logits - logits.max(-1, keepdims=True))
    chances /= chances.sum(-1, keepdims=True)
    d_logits = (chances - np.eye(10)[labels]) / len(labels)
    d_h = d_logits @ values["logits/kernel"].T * (h > 0)
    return {
        "hidden/kernel": images.T @ d_h,
        "hidden/bias": d_h.sum(0),
        "logits/kernel": h.T @ d_logits,
        "logits/bias": d_logits.sum(0),
    }


def held_out(values):
    """The logits of the batches to evaluate with, and their mean loss, in float64."""
    images, labels = zip(*batches(digits.input_fn("eval")))
    logits = [forward(values, x) for x in images]
    return logits, np.mean([cross_entropy(x, y) for x, y in zip(logits, labels)])


def cross_entropy(logits, labels):
    largest = logits.max(-1, keepdims=True)
    normal = largest[:, 0] + np.log(np.exp(logits - largest).sum(-1))
    return np.mean(normal - logits[np.arange(len(labels)), labels])


# CPU replicas restart as XLA devices do, and a placement mesh in test_old_checkpoints.py.
@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES[2:])
def test_a_run_in_two_pieces_is_the_same_run(runtime, tmp_path):
    in_two_pieces("local", runtime, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "kept"),
    [("quantized", "quantization_error"), ("low_rank", "low_rank_error")],
)
def test_a_restarted_run_keeps_what_was_not_sent(optimizer, kept, tmp_path):
    saved = in_two_pieces(optimizer, "cpu_replicas", tmp_path)
    assert np.abs(saved[f"hidden/kernel/{kept}"]).max() > 0


def in_two_pieces(optimizer, runtime, tmp_path):
    """A run that goes on from the middle of another ends alike; returns the variables."""
    whole = train(ours(tmp_path / "whole", optimizer, runtime))
    runs = goes_on(tmp_path, optimizer, runtime)
    assert train(runs, 3, digits.skipping(3)) == whole[3:]
    check_kept(tmp_path / "pieces", {3, 6})
    end = saved_variables(tmp_path / "pieces")
    assert_same_bits(end, saved_variables(tmp_path / "whole"))
    return end


def goes_on(tmp_path, optimizer, runtime="placement_mesh"):
    """A run in "pieces" that has what the run in "whole" had left after three steps."""
    pieces = tmp_path / "pieces"
    pieces.mkdir()
    paths = [str(pieces / f"model.ckpt-{step}") for step in (0, 3)]
    for path in paths:
        for file in (tmp_path / "whole").glob(f"{os.path.basename(path)}.*"):
            shutil.copy(file, pieces)
    tf.train.update_checkpoint_state(str(pieces), paths[-1], paths)
    return ours(pieces, optimizer, runtime, keep=2)


def check_kept(directory, steps):
    """A second training deletes the checkpoints of the first that are too many."""
    kept = {path.name for path in directory.glob("model.ckpt-*.index")}
    assert kept == {f"model.ckpt-{step}.index" for step in steps}


@pytest.mark.slow
def test_outer_steps_restart_in_a_round_and_evaluate_with_the_outer_values(tmp_path):
    whole = train(ours(tmp_path / "whole", "outer"), 4)
    runs = goes_on(tmp_path, "outer")
    values = saved_variables(tmp_path / "pieces")
    found = runs.evaluate(digits.input_fn)["loss"]
    np.testing.assert_allclose(found, held_out(values)[1], rtol=TOLERANCE)
    assert np.abs(values["logits/kernel/island"] - values["logits/kernel"]).max() > 0
    assert train(runs, 1, digits.skipping(3)) == whole[3:]
    check_kept(tmp_path / "pieces", {3, 4})
    assert_same_bits(saved_variables(tmp_path / "pieces"), saved_variables(tmp_path / "whole"))


# XLA devices restore what CPU replicas do.
@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES[:2])
def test_averages_stand_in_place_of_the_variables(runtime, tmp_path):
    losses = train(ours(tmp_path / "without", "average", runtime), 4)
    runs = ours(tmp_path / "with", "average", runtime, evaluate_with_averages=True)
    assert train(runs, 3) == losses[:3]
    end, without = (
        saved_variables(tmp_path / "with"),
        saved_variables(tmp_path / "without" / "model.ckpt-3"),
    )
    assert_same_bits(end, without)

    averages = {name: end[f"{name}/ExponentialMovingAverage"] for name in VARIABLES}
    logits, wanted = held_out(averages)
    assert abs(wanted - held_out(end)[1]) > 1e-3
    np.testing.assert_allclose(runs.evaluate(digits.input_fn)["loss"], wanted, rtol=TOLERANCE)
    predicted = [one["logits"] for one in runs.predict(digits.input_fn)]
    np.testing.assert_allclose(predicted, np.concatenate(logits), rtol=TOLERANCE, atol=TOLERANCE)
    if runtime == "placement_mesh":
        images, _ = next(batches(digits.input_fn("eval")))
        served = exported(runs, tmp_path / "exported", images)
        np.testing.assert_allclose(served, logits[0], rtol=TOLERANCE, atol=TOLERANCE)
    # It goes on from the variables.
    assert train(runs, 1, digits.skipping(3)) == losses[3:]


@pytest.mark.slow
def test_there_have_to_be_averages_to_evaluate_with(copied):
    runs = ours(copied, evaluate_with_averages=True)
    with pytest.raises(ValueError, match=r"wrap it in mtf_gradsync\.AverageOptimizer"):
        train(runs, 1)
    with pytest.raises(ValueError, match=r"model\.ckpt-6 has no moving averages"):
        runs.evaluate(digits.input_fn)


@pytest.mark.slow
@with_estimator
def test_estimator_and_tpu_estimator_do_the_same(trained, copied, tmp_path):
    losses = trained.losses
    result = ours(copied).evaluate(digits.input_fn)

    def input_fn(params, mode=tf.estimator.ModeKeys.TRAIN):
        return digits.input_fn(mode)

    under_estimator = tf.estimator.Estimator(
        digits.with_loss_seen,
        str(tmp_path / "estimator"),
        digits.config(),
        {"optimizer": "cross_shard"},
    )
    under_tpu_estimator = tpu_estimator.TPUEstimator(
        digits.with_loss_seen, config=tpu_run_config(tmp_path / "tpu", save_checkpoints_steps=3),
        params={"optimizer": "cross_shard"}, use_tpu=False, train_batch_size=digits.BATCH,
        eval_batch_size=digits.BATCH, predict_batch_size=digits.BATCH,
    )  # fmt: skip
    for runs, name in ((under_estimator, "estimator"), (under_tpu_estimator, "tpu")):
        data = digits.input_fn if name == "estimator" else input_fn
        assert train(runs, input_fn=data) == losses
        evaluated = runs.evaluate(functools.partial(data, mode="eval"), steps=2)
        assert {key: evaluated[key] for key in result} == result
        scalars = summaries(tmp_path / name)
        assert scalars["loss", 3] == pytest.approx(losses[2])
        assert scalars["gradient_norm/applied", 3] > 0
        assert scalars["traffic/bytes_of_update_step", 3] >= 4 * (64 * 8 + 8 * 10) / 2


def exported(runs, directory, images):
    """Exports a model, loads it with TensorFlow alone; returns its logits."""

    def serving():
        image = tf.placeholder(tf.float32, [digits.BATCH, 64])
        return tf.estimator.export.ServingInputReceiver({"image": image}, {"image": image})

    path = tf.compat.as_str(runs.export_saved_model(str(directory), serving))
    with tf.Graph().as_default(), tf.Session() as session:
        model = tf.saved_model.load(session, ["serve"], path)
        signature = model.signature_def["serving_default"]
        feed = {signature.inputs["image"].name: images}
        return session.run(signature.outputs["logits"].name, feed)


@pytest.mark.parametrize("whose", ["ours", pytest.param("theirs", marks=with_estimator)])
def test_an_exported_model_loads_without_the_mesh(whose, copied, tmp_path):
    runs = ours(copied)
    if whose == "theirs":
        runs = tf.estimator.Estimator(
            digits.model_fn, str(copied), digits.config(), {"optimizer": "cross_shard"}
        )
    images, _ = next(batches(digits.input_fn("eval")))
    logits = exported(runs, tmp_path / "exported", images)
    np.testing.assert_allclose(
        logits, forward(saved_variables(copied), images), rtol=TOLERANCE, atol=TOLERANCE
    )


def check_written(directory, losses):
    """A host_call sees the step before or after it is advanced, as on a TPU."""
    scalars = summaries(directory)
    written = [scalars["loss", step] for step in range(1, digits.STEPS)]
    assert written in (losses[1:], losses[:-1])


# XLA devices run the program that CPU replicas do.
@pytest.mark.parametrize("runtime", RUNTIMES[:2])
@pytest.mark.slow
def test_specs_made_by_hand(runtime, tmp_path):
    params = {
        "optimizer": "cross_shard",
        "model_path": str(tmp_path),
        "steps_per_checkpoint": 3,
    }
    # The one line that changes: tpu_estimator.TPUEstimator before.
    runs = estimator.Estimator(
        use_tpu=runtime != "placement_mesh",
        runtime=runtime,
        model_fn=by_hand.model_fn,
        config=tpu_run_config(tmp_path),
        train_batch_size=digits.BATCH,
        eval_batch_size=digits.BATCH,
        predict_batch_size=digits.BATCH,
        params=params,
    )
    losses = train(runs)
    start, end = saved_variables(tmp_path / "model.ckpt-0"), saved_variables(tmp_path)
    np.testing.assert_allclose(losses, losses_from(start), rtol=TOLERANCE)
    if runtime != "placement_mesh":
        # At least the gradients of two layers, of which a core has halves.
        assert summaries(tmp_path)["traffic/bytes_of_update_step", 0] >= 4 * (64 * 8 + 8 * 10) / 2
    if importlib.util.find_spec("tensorboard"):
        check_written(tmp_path, losses)
    result = runs.evaluate(digits.input_fn, steps=1)
    (images, labels), _ = batches(digits.input_fn("eval"))
    np.testing.assert_allclose(
        result["loss"], cross_entropy(forward(end, images), labels), rtol=TOLERANCE
    )
    predicted = [one["digit"] for one in runs.predict(digits.input_fn)]
    np.testing.assert_array_equal(predicted[: digits.BATCH], forward(end, images).argmax(-1))
