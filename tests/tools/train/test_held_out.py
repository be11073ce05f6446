"""Held-out text is scored with the averages of the variables, and training knows nothing of it."""

import dataclasses

import numpy as np
import pytest

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes._common import ConfigError
from mtf_gradsync.runtimes.settings import session_config
from mtf_gradsync.tools.train import gin_files
from mtf_gradsync.tools.train.cli import main as cli
from mtf_gradsync.tools.train.data import datasets
from mtf_gradsync.tools.train.evaluation import build_eval_graph
from mtf_gradsync.tools.train.model import resolve_job
from mtf_gradsync.tools.train.run import run
from mtf_gradsync.tools.train.sampling import Sampling, sample_after
from tests.sessions import saved_variables
from tests.tools.train.conftest import NO_EVAL, QUICK, TINY

pytestmark = pytest.mark.slow

AVERAGED = [
    "train.run.optimizer = @AverageOptimizer",
    "AverageOptimizer.opt = @CrossShardOptimizer",
    "AverageOptimizer.decay = 0.5",
    "train.run.train_steps = 3",
]
SETTING = "train.run.evaluate_with_averages = True"


def held_out_nats(directory):
    """The loss as a TensorFlow program has it that restores averages, and variables, itself."""
    config = gin_files.bound_run_config()
    model = resolve_job(config).model
    arguments = {"sequence_length": model.sequence_length, "vocabulary": model.vocabulary}
    batches = datasets.read_batches(
        lambda: config.eval_dataset_fn(dataset_split="validation", **arguments),
        model.batch_size, config.perplexity_eval_steps, "eval_dataset_fn",
    )  # fmt: skip
    session = session_config(num_cpu_devices=model.mesh.num_cpu_devices)
    with tf.Graph().as_default(), tf.Session(config=session) as session:
        graph = build_eval_graph(model, sorted(batches[0]))
        masters = {v.op.name: v for v in tf.global_variables()}
        averages = tf.train.ExponentialMovingAverage(0.5).variables_to_restore()
        # A mesh's slices are variables, too, which no checkpoint has.
        averages = {name: v for name, v in averages.items() if v.op.name in masters}
        assert all(name.endswith("/ExponentialMovingAverage") for name in averages)
        to_slices, found = graph.lowering.copy_masters_to_slices(), []
        for names in (averages, masters):
            tf.train.Saver(names).restore(session, tf.train.latest_checkpoint(str(directory)))
            session.run(to_slices)
            nats = [
                session.run(graph.cross_entropy, {graph.features[k]: x for k, x in batch.items()})
                for batch in batches
            ]
            tokens = sum(np.sum(batch["targets"] > 0) for batch in batches)
            found.append(sum(map(np.sum, nats)) / tokens)
    return found


# XLA devices write the checkpoints that CPU replicas do.
@pytest.mark.parametrize("runtime", ["cpu_replicas", "placement_mesh"])
def test_held_out_loss_is_of_the_averages(train, runtime):
    choice = f"train.run.runtime = '{runtime}'"
    result, directory, _ = train(*AVERAGED, SETTING, choice)
    # Sums of some hundred float32 numbers in the same order, but for how batches are added up.
    wanted, of_variables = held_out_nats(directory)
    assert result.held_out.nats_per_token == pytest.approx(wanted, rel=1e-6)
    assert abs(wanted - of_variables) > 1e-3 * wanted
    if runtime != "cpu_replicas":
        return
    # Training goes on with the variables.
    without, other, _ = train(*AVERAGED, "train.run.evaluate_with_averages = False", model_dir="b")
    assert without.held_out != result.held_out
    one, two = saved_variables(directory), saved_variables(other)
    assert one.keys() == two.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, two[name], err_msg=name)


def test_without_averages_it_is_an_error(train, capsys):
    plain = ["train.run.optimizer = @CrossShardOptimizer", "train.run.train_steps = 1", NO_EVAL]
    with pytest.raises(ConfigError, match=r"wrap it in mtf_gradsync\.AverageOptimizer"):
        train(*plain, SETTING)
    _, directory, _ = train(*plain)
    gin_files.load([TINY], [*QUICK, *plain])
    config = dataclasses.replace(
        gin_files.bound_run_config(),
        evaluate_with_averages=True,
        eval_dataset_fn=datasets.python_topics,
    )
    # All its steps are made: nothing is trained, and the checkpoint is read.
    with pytest.raises(ConfigError, match=r"model\.ckpt-1 has no moving averages"):
        run(config, str(directory), say=lambda line: None)
    command = ["sample", f"--model_dir={directory}", "--prompt=a", f"--gin_param={SETTING}"]
    assert cli.main(command) == cli.EXIT_BAD_CONFIG
    assert "has no moving averages" in capsys.readouterr().err


def test_samples_are_of_the_averages(train, tmp_path):
    _, directory, _ = train(*AVERAGED, NO_EVAL, SETTING)
    path = tf.train.latest_checkpoint(str(directory))
    values = saved_variables(directory)
    copy = str(tmp_path / "copy")
    with tf.Graph().as_default(), tf.Session() as session:
        made = [
            tf.get_variable(name, initializer=values.get(f"{name}/ExponentialMovingAverage", value))
            for name, value in values.items()
        ]
        session.run(tf.global_variables_initializer())
        tf.train.Saver(made).save(session, copy)
    model = resolve_job(gin_files.bound_run_config()).model
    given = "import", Sampling(temperature=1.0, max_tokens=8)
    averaged = sample_after(model, path, *given, with_averages=True)
    assert averaged == sample_after(model, copy, *given)
