"""How a run ends: early, with its best checkpoint, with sums in no update, or before it began."""

import os
import signal
import threading

import numpy as np
import pytest

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes import saving
from mtf_gradsync.runtimes._common import ConfigError, TrainingError
from mtf_gradsync.tools.train import held_out
from mtf_gradsync.tools.train.evaluation import Score
from mtf_gradsync.tools.train.held_out import Improvement
from mtf_gradsync.tools.train.run_files import REPORT_FILE
from mtf_gradsync.tools.train.runner import Runner, SimdProgramRunner
from tests.sessions import assert_same_bits, saved_variables
from tests.tools.train.conftest import NO_EVAL, accumulates, metric

OFTEN = "train.run.save_checkpoints_steps = 2"


def test_a_run_has_ended_when_its_loss_has_not_fallen_for_long_enough():
    def ended_at(losses, most):
        improvement = Improvement([], most)
        for step, nats in enumerate(losses, 1):
            improvement.add(10 * step, nats)
            if improvement.has_ended:
                return 10 * step
        return None

    nan = float("nan")
    assert ended_at([3, 2, 2.5, 2, 1.9, 2, 2, 2], 30) == 80
    assert ended_at([3, 2, 2.5, 2, 1.9, 2, 2, 2], 31) is None
    assert ended_at([3, nan, nan], 20) == 30
    assert ended_at([nan, nan, nan], 20) is None
    assert ended_at([3, 4, 5], None) is None
    rows = [{"step": 10, "held_out_nats": 3.0}, {"step": 20, "loss": 1.0}]
    assert Improvement(rows, 10).best_step == 10


@pytest.mark.slow
def test_the_best_checkpoint_is_kept_and_a_run_ends_early(train, monkeypatch, after_step):
    """The held-out loss is the lowest after step 6; the run is killed on its way, once."""
    nats = dict(zip(range(2, 13, 2), [5.0, 4.0, 3.0, 3.5, 3.2, 3.1]))

    def score(self, path):
        self.build()
        self._evaluator.restore(path, str(self._directory))
        return Score(nats[int(path.rsplit("-", 1)[1])], 1, 1)

    monkeypatch.setattr(held_out.HeldOut, "_score", score)
    settings = [
        OFTEN, "train.run.keep_best = True", "train.run.max_steps_without_decrease = 4",
        "train.run.keep_checkpoint_max = 1", "train.sample.num_samples = 0",
    ]  # fmt: skip
    after_step(5, lambda: os.kill(os.getpid(), signal.SIGINT))
    nats[5] = 4.5
    result, directory, _ = train(*settings)
    assert (result.step, result.stopped_by) == (5, signal.SIGINT)
    best = tf.train.latest_checkpoint(str(directory / "best"))
    assert tf.train.load_variable(best, "global_step") == 4
    after_step(None)
    result, _, said = train(*settings)
    assert (result.step, result.stopped_by, result.held_out.nats) == (10, None, 3.2)
    assert (
        "10 of 12 steps: ended early, by the held-out loss" in (directory / REPORT_FILE).read_text()
    )
    best = tf.train.latest_checkpoint(str(directory / "best"))
    assert tf.train.load_variable(best, "global_step") == 6
    assert sorted(p.name for p in (directory / "best").iterdir()) == [
        "checkpoint", "model.ckpt-6.data-00000-of-00001", "model.ckpt-6.index"
    ]  # fmt: skip
    # The same command makes no step more; a longer patience goes on.
    result, _, said = train(*settings)
    assert result.step == 10
    assert any("has not fallen since step 6 (3.000): the run has ended" in line for line in said)
    result, _, _ = train(*settings, "train.run.max_steps_without_decrease = 6")
    assert result.step == 12


def test_what_goes_by_the_held_out_loss_needs_one(train):
    with pytest.raises(ConfigError, match="keep_best = True needs a held-out loss: bind"):
        train(NO_EVAL, "train.run.keep_best = True")
    with pytest.raises(ConfigError, match="decrease must be a positive integer or None; got 0"):
        train("train.run.max_steps_without_decrease = 0")


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["placement_mesh", "xla"])
def test_the_last_step_flushes_or_says_what_is_left(train, runtime, capfd):
    """Ten steps of four for an update: the last two are in the sums, or are an update of two."""
    accumulation = accumulates(average_aggregated_gradients=True)
    steps = "train.run.train_steps = 10"
    bindings = NO_EVAL, *accumulation, steps, f"train.run.runtime = '{runtime}'"
    _, left, _ = train(*bindings, model_dir="left")
    told = "the last 2 steps are in the accumulated gradients and in no update"
    assert told in capfd.readouterr().err
    flush = "GradientAccumulationOptimizer.flush = @is_last_step"
    _, flushed, _ = train(*bindings, flush, model_dir="flushed")
    assert told not in capfd.readouterr().err

    def counts(directory):
        found = saved_variables(directory)
        name = "GradientAccumulationOptimizer"
        return {one: int(found[f"{name}/{one}"]) for one in ("mini_step", "update_step")}

    assert counts(left) == {"mini_step": 2, "update_step": 2}
    assert counts(flushed) == {"mini_step": 0, "update_step": 3}
    # The logged loss is that of the microbatches of an update so far.
    losses = metric(left, "loss")
    single = np.diff([0, *(losses[step] * (step % 4 or 4) for step in range(1, 5))])
    assert losses[4] == pytest.approx(single.mean())
    assert losses == pytest.approx(metric(flushed, "loss"), rel=1e-6)


@pytest.mark.slow
def test_where_each_step_is_an_update_lines_are_of_single_steps(train, capfd):
    """Counted by an optimizer that may wait, and in a run that goes on."""
    losses = {}
    for name, more in {
        "CrossShardOptimizer": (),
        "SyncReplicasOptimizer": ("SyncReplicasOptimizer.replicas_to_aggregate = 1",),
    }.items():
        bindings = (
            NO_EVAL, *more, f"train.run.optimizer = @{name}", f"{name}.opt = @AdafactorOptimizer",
            "train.run.log_steps = 1",
        )  # fmt: skip
        for steps in (2, 4):
            _, directory, _ = train(*bindings, f"train.run.train_steps = {steps}", model_dir=name)
        losses[name] = metric(directory, "loss")
    assert len(losses["CrossShardOptimizer"]) == 4
    assert losses["SyncReplicasOptimizer"] == pytest.approx(losses["CrossShardOptimizer"], rel=1e-5)
    assert "in no update" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["cpu_replicas", "placement_mesh", "xla"])
def test_a_checkpoint_is_of_its_step_though_steps_go_on(train, monkeypatch, runtime):
    """Files are put on the disk long after the values were taken, beside the steps that follow."""
    on_disk, dispatch = saving._flush_to_disk, Runner.dispatch
    made, all_made = [], threading.Event()

    def once_all_steps_are_made(path):
        assert all_made.wait(120)
        on_disk(path)

    def counted(self):
        made.append(dispatch(self))
        if len(made) == 6:
            all_made.set()
        return made[-1]

    monkeypatch.setattr(saving, "_flush_to_disk", once_all_steps_are_made)
    monkeypatch.setattr(Runner, "dispatch", counted)
    given = NO_EVAL, f"train.run.runtime = '{runtime}'", "train.run.train_steps = 6"
    _, beside, _ = train(*given, "train.run.save_checkpoints_steps = 3", model_dir="beside")
    _, alone, _ = train(*given, "train.run.train_steps = 3", model_dir="alone")
    found, expected = (saved_variables(path / "model.ckpt-3") for path in (beside, alone))
    assert_same_bits(found, expected)


def padded(sequence_length, vocabulary, dataset_split):
    """The same 16 examples for training and evaluation, with 1 to 16 tokens of 16 positions."""
    del vocabulary, dataset_split
    ids = np.random.RandomState(0).randint(3, 200, [16, sequence_length["targets"]])
    for row in range(16):
        ids[row, row + 1 :] = 0
    return tf.data.Dataset.from_tensor_slices({"targets": ids.astype(np.int32)})


@pytest.mark.slow
def test_training_and_held_out_losses_are_in_one_unit(train):
    import gin

    gin.external_configurable(padded, "padded_examples", module="tests.train")
    _, directory, _ = train(
        "train.run.train_dataset_fn = @padded_examples",
        "train.run.eval_dataset_fn = @padded_examples",
        "train.run.learning_rate_schedule = 0.0",
        "train.run.batch_size = 16",
        "train.run.train_steps = 3",
        "train.sample.num_samples = 0",
        "Unitransformer.z_loss = 0.0",
    )
    trained, scored = metric(directory, "nats_per_token"), metric(directory, "held_out_nats")
    assert trained[3] == pytest.approx(scored[3], rel=1e-5)
    # The model's own loss is a mean over positions: 136 of 256 are tokens.
    assert metric(directory, "loss")[3] == pytest.approx(trained[3] * 136 / 256, rel=1e-5)


def test_a_run_that_is_stopped_before_its_first_step_has_no_checkpoint(train, monkeypatch):
    # As a user who presses Ctrl-C while the first step compiles.
    begin = SimdProgramRunner._begin_session

    def interrupted(self):
        begin(self)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(SimdProgramRunner, "_begin_session", interrupted)
    result, directory, said = train(NO_EVAL)
    assert (result.step, result.stopped_by) == (0, signal.SIGINT)
    assert said[-1].startswith("stopped before the first step, without a checkpoint")
    assert tf.train.latest_checkpoint(str(directory)) is None


def test_an_error_before_the_first_checkpoint_names_none(train):
    with pytest.raises(TrainingError, match=r"The loss of step 1 is inf\. There is no checkpoint"):
        train(NO_EVAL, "Unitransformer.z_loss = 1e999")


def test_gpus_that_are_not_there_are_named(train):
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match=r"mesh_devices names /device:GPU:0, and .* no GPUs here"):
        train(
            "train.run.runtime = 'placement_mesh'",
            "train.run.mesh_devices = ['/gpu:0', '/gpu:1']",
        )
