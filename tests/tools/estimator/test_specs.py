"""What users give an Estimator, and what it makes of it."""

import functools
import types

import numpy as np
import pytest

from mtf_gradsync import estimator
from mtf_gradsync._private.libraries import ESTIMATOR_AVAILABLE, tf
from tests.sessions import saved_variables
from tests.tools.estimator import digits
from tests.tools.estimator.runs import train


def ours(directory, fn=digits.model_fn, params=None, **given):
    params = {"optimizer": "cross_shard"} if params is None else params
    return estimator.Estimator(fn, directory, digits.config(), params, **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"runtime": "tpu"}, "runtime must be one of placement_mesh, cpu_replicas, xla"),
        ({"runtime": "cpu_replicas"}, "give num_cores"),
        ({"use_tpu": True}, "give num_cores"),
    ],
)
def test_no_such_runtime(given, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        ours(tmp_path, **given)


def test_model_dir_is_given_once(tmp_path):
    with pytest.raises(ValueError, match="give it once"):
        estimator.Estimator(digits.model_fn, "one", digits.config(model_dir="other"))
    assert ours(tmp_path).model_dir == str(tmp_path)
    assert estimator.Estimator(digits.model_fn).model_dir


@pytest.mark.parametrize("steps", [0, -1])
def test_no_steps(steps, tmp_path):
    with pytest.raises(ValueError, match="steps must be a whole number of 1 or more"):
        ours(tmp_path).train(digits.input_fn, steps=steps)
    with pytest.raises(ValueError, match="steps must be a whole number of 1 or more"):
        ours(tmp_path).evaluate(digits.input_fn, steps=steps)
    with pytest.raises(ValueError, match="not both"):
        ours(tmp_path).train(digits.input_fn, steps=1, max_steps=1)


def test_nothing_to_evaluate(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint in model_dir"):
        ours(tmp_path).evaluate(digits.input_fn)


def test_a_model_fn_without_a_spec(tmp_path):
    with pytest.raises(TypeError, match=r"must return an EstimatorSpec.*got NoneType"):
        ours(tmp_path, lambda features: None).train(digits.input_fn)


class Seen(Exception):
    """What a model_fn was called with."""


def see(features, labels, mode, params):
    raise Seen(params)


def params_seen(*args, **given):
    with pytest.raises(Seen) as seen:
        ours(*args, fn=see, **given).train(digits.input_fn)
    return seen.value.args[0]


def test_params_are_added_to_as_by_the_estimators_of_tensorflow(tmp_path):
    assert params_seen(tmp_path, params={"a": 1}) == {"a": 1}
    found = params_seen(tmp_path, params={"a": 1}, train_batch_size=8)
    assert found == {"a": 1, "batch_size": 8}
    given = types.SimpleNamespace(a=1)
    found = params_seen(tmp_path, params=given, runtime="cpu_replicas", num_cores=2)
    assert (found.a, found.use_tpu, found.context.num_replicas) == (1, True, 2)
    assert given == types.SimpleNamespace(a=1)
    with pytest.raises(TypeError, match="params must be a dict, or an object whose attributes"):
        ours(tmp_path, params=(1, 2), train_batch_size=8).train(digits.input_fn)


def test_input_fns_get_what_they_name():
    def input_fn(params, **others):
        assert not others
        return tf.data.Dataset.range(params)

    from mtf_gradsync.tools.estimator.specs import features_and_labels

    features, labels, hooks = features_and_labels(input_fn, "train", 3, None)
    assert (labels, len(hooks)) == (None, 1)
    held = functools.partial(lambda mode, params: tf.constant([mode]), mode="held")
    features, _, hooks = features_and_labels(held, "train", 3, None)
    with tf.Session() as session:
        assert session.run(features) == [b"held"]
    assert hooks == []


@pytest.mark.slow
def test_a_hook_may_end_an_evaluation(tmp_path):
    class Stop(tf.train.SessionRunHook):
        def after_run(self, run_context, run_values):
            run_context.request_stop()

    runs = ours(tmp_path, digits.with_loss_seen)
    train(runs, 1)
    result = runs.evaluate(digits.input_fn, hooks=[Stop()])
    assert result["global_step"] == 1


@pytest.mark.slow
def test_programs_take_their_step_from_a_resource(tmp_path):
    """Also where TensorFlow 1 would make ref variables, as GPT-Neo's main has it."""
    tf.disable_resource_variables()
    try:
        runs = ours(tmp_path, digits.with_loss_seen, runtime="cpu_replicas", num_cores=4)
        train(runs, 1)
    finally:
        tf.enable_resource_variables()
    assert saved_variables(tmp_path)["global_step"] == 1


@pytest.mark.skipif(not ESTIMATOR_AVAILABLE, reason="this TensorFlow has no Estimator")
@pytest.mark.slow
def test_checkpoints_hold_what_was_trained_without_a_config_in_the_model_fn(tmp_path):
    def model_fn(features, labels, mode, params):
        return digits.model_fn(features, labels, mode, params, None)

    params = {"optimizer": "cross_shard"}
    runs = tf.estimator.Estimator(model_fn, str(tmp_path), digits.config(), params)
    runs.train(digits.input_fn, steps=2)
    first, last = (saved_variables(tmp_path / f"model.ckpt-{step}") for step in (0, 2))
    assert not np.array_equal(first["hidden/kernel"], last["hidden/kernel"])
