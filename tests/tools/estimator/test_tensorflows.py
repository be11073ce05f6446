"""What TensorFlow's Estimators have: there, or named on the page. Warm starts, early stopping."""

import inspect
import re

import numpy as np
import pytest

from mtf_gradsync import estimator
from mtf_gradsync._private.libraries import ESTIMATOR_AVAILABLE, tf
from mtf_gradsync.tools.estimator.hooks import write_summary
from tests.documents import ROOT
from tests.sessions import saved_variables
from tests.tools.estimator import digits
from tests.tools.estimator.runs import RUNTIMES, VARIABLES, ours, train

# XLA devices begin and end as CPU replicas do.
TWO_RUNTIMES = RUNTIMES[:2]

with_estimator = pytest.mark.skipif(
    not ESTIMATOR_AVAILABLE, reason="this TensorFlow has no Estimator"
)


def names(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


@with_estimator
def test_all_that_tensorflow_s_have_is_there_or_named_on_the_page():
    page = (ROOT / "docs" / "api" / "estimator.md").read_text(encoding="utf-8")
    said = set(re.findall(r"`(\w+)`", page[page.index("## Differences from TensorFlow") :]))
    mine = estimator.Estimator
    for theirs in (tf.estimator.Estimator, tf.estimator.tpu.TPUEstimator):
        assert set(names(theirs.__init__)) - set(names(mine.__init__)) <= said
        for name in (n for n in dir(theirs) if not n.startswith("_")):
            # What is inherited would read private state that is not there.
            assert name in vars(mine), name
            theirs_has = getattr(theirs, name)
            if callable(theirs_has) and name not in said:
                expected = [n for n in names(theirs_has) if n not in said]
                assert names(getattr(mine, name)) == expected
    assert names(mine.__init__)[:5] == names(tf.estimator.Estimator.__init__)


def test_names_values_and_the_model_fn(trained):
    runs = ours(trained.directory)
    assert runs.get_variable_names() == sorted(saved_variables(trained.directory))
    found = runs.get_variable_value("hidden/bias")
    np.testing.assert_array_equal(found, saved_variables(trained.directory)["hidden/bias"])
    assert runs.eval_dir() == f"{trained.directory}/eval"
    assert runs.eval_dir("x") == f"{trained.directory}/eval_x"
    with tf.Graph().as_default():
        features, labels = tf.data.make_one_shot_iterator(digits.input_fn("train")).get_next()
        spec = runs.model_fn(features, labels, "eval", runs.config)
    assert spec.mode == "eval"
    with pytest.raises(ValueError, match="no checkpoint in model_dir"):
        estimator.Estimator(digits.model_fn, "nowhere").get_variable_names()


@pytest.mark.slow
@pytest.mark.parametrize("runtime", TWO_RUNTIMES)
def test_a_warm_start_takes_values_and_no_slots_and_happens_once(runtime, trained, tmp_path):
    before = saved_variables(trained.directory)
    runs = ours(tmp_path, runtime=runtime, warm_start_from=trained.directory)
    start = runs.evaluate(digits.input_fn, steps=2)
    assert start["global_step"] == 0
    # Other runtimes than that of the run sum in another order.
    expected = ours(trained.directory).evaluate(digits.input_fn, steps=2)["loss"]
    np.testing.assert_allclose(start["loss"], expected, rtol=100 * np.finfo(np.float32).eps)
    (first,) = train(runs, 1)
    np.testing.assert_allclose(first, trained_loss(trained), rtol=100 * np.finfo(np.float32).eps)
    begun = saved_variables(tmp_path / "model.ckpt-0")
    for name in VARIABLES:
        np.testing.assert_array_equal(begun[name], before[name])
        assert not begun[f"{name}/adam_m"].any()
        assert before[f"{name}/adam_m"].any()
    # From the run's own checkpoint, although it is to begin elsewhere.
    again = ours(tmp_path, runtime=runtime, warm_start_from="no longer there")
    assert again.evaluate(digits.input_fn, steps=2)["global_step"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("runtime", TWO_RUNTIMES)
def test_averages_begin_with_the_values_of_a_warm_start(runtime, trained, tmp_path):
    before = saved_variables(trained.directory)
    runs = ours(tmp_path, "average", runtime, warm_start_from=trained.directory)
    train(runs, 1)
    begun, after = saved_variables(tmp_path / "model.ckpt-0"), saved_variables(tmp_path)
    for name in VARIABLES:
        average = f"{name}/ExponentialMovingAverage"
        np.testing.assert_array_equal(begun[average], before[name])
        # The decay is a half.
        expected = before[name] - (before[name] - after[name]) / 2
        np.testing.assert_array_equal(after[average], expected)


def trained_loss(trained):
    """Of the first batch, in a run that goes on by itself, whose input begins again."""
    return ours(trained.directory).evaluate(digits.input_fn, steps=1)["loss"]


@pytest.mark.slow
def test_settings_choose_what_is_warm(trained, tmp_path):
    chosen = tf.estimator.WarmStartSettings(str(trained.directory), vars_to_warm_start="hidden")
    runs = ours(tmp_path, warm_start_from=chosen)
    train(runs, 1)
    begun, before = saved_variables(tmp_path / "model.ckpt-0"), saved_variables(trained.directory)
    same = {name for name in VARIABLES if np.array_equal(begun[name], before[name])}
    assert same == {"hidden/kernel", "hidden/bias"}
    none = tf.estimator.WarmStartSettings(str(trained.directory), vars_to_warm_start="encoder")
    with pytest.raises(ValueError, match="'encoder' chooses no variable; names look like hidden"):
        train(ours(tmp_path / "other", warm_start_from=none), 1)


def test_nothing_to_start_from(tmp_path):
    runs = ours(tmp_path, warm_start_from=tmp_path)
    for call in (runs.train, runs.evaluate):
        with pytest.raises(ValueError, match=r"warm_start_from: .* is no checkpoint"):
            call(digits.input_fn, steps=1)
    with pytest.raises(TypeError, match="warm_start_from must be the path of a checkpoint"):
        ours(tmp_path, warm_start_from=3)


@with_estimator
@pytest.mark.slow
@pytest.mark.parametrize("runtime", TWO_RUNTIMES)
def test_tensorflow_s_early_stopping_ends_the_training(runtime, tmp_path):
    runs = ours(tmp_path, runtime=runtime)
    train(runs, 1)
    runs.evaluate(digits.input_fn, steps=1)
    write_summary(runs.eval_dir(), {"loss": 1e9}, 3)

    def stop(patience):
        return tf.estimator.experimental.stop_if_no_decrease_hook(
            runs, "loss", patience, run_every_secs=None, run_every_steps=1
        )

    # The checkpoint is of a run without the hook's variable.
    runs.train(digits.input_fn, hooks=[stop(3)], steps=2)
    assert runs.get_variable_value("global_step") == 3
    runs.train(digits.input_fn, hooks=[stop(2)], steps=9)
    assert runs.get_variable_value("global_step") == 4


@pytest.mark.slow
@with_estimator
def test_tensorflow_trains_and_evaluates_in_turn(tmp_path):
    runs = ours(tmp_path)
    result, exported = tf.estimator.train_and_evaluate(
        runs,
        tf.estimator.TrainSpec(digits.input_fn, max_steps=digits.STEPS),
        tf.estimator.EvalSpec(digits.input_fn, steps=1, start_delay_secs=0, throttle_secs=0),
    )
    assert result["global_step"] == digits.STEPS
    assert not exported
