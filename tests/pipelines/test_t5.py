"""T5's `MtfModel` and command train as they do bare, with wrappers chosen by gin alone.

The wrappers are those of configs/t5_gradsync.gin. The mesh is given once, to the pipeline.
"""

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mtf_gradsync._private.libraries import tf

if importlib.util.find_spec("t5") is None:
    pytest.skip("T5 is not installed here; make test-t5 has it", allow_module_level=True)
from tests.pipelines import t5_model
from tests.pipelines.t5_model import LM_TASK, TASK

ROOT = Path(__file__).resolve().parents[2]
UPDATES = 3
# No norm reaches this: clipping by it changes nothing.
SETTINGS = """
GRADSYNC_PASSES = 2
GRADSYNC_REPLICAS = 2
GRADSYNC_CLIP_NORM = 1e6
"""
BARE = "MtfModel.optimizer = %GRADSYNC_INNER"
MICROBATCHES = "utils.serialize_num_microbatches.tokens_per_microbatch_per_replica = 32"
ADAM = "GRADSYNC_INNER = @AdamWeightDecayOptimizer\nAdamWeightDecayOptimizer.epsilon = 1e-3"
# Adafactor and Adam pass relative errors of gradients on to weights, at a rate of 0.05.
TOLERANCE = 2 * UPDATES * 16 * np.finfo(np.float32).eps


def chosen(optimizer):
    """Gin text that chooses a wrapper of configs/t5_gradsync.gin."""
    return f"{SETTINGS}GRADSYNC_OPTIMIZER = @{optimizer}"


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A folder of `UPDATES` steps with the inner optimizer alone, and their losses."""

    @functools.lru_cache(maxsize=None)
    def trained(task, *bindings):
        folder = tmp_path_factory.mktemp("bare")
        model = t5_model.mtf_model(folder, *bindings, BARE)
        model.train(task, UPDATES)
        return folder, model.losses

    return trained


# Adafactor, T5's own, and Adam, whose update a wrong scale of the gradients changes.
@pytest.mark.parametrize(
    ("optimizer", "passes", "bindings"),
    [
        ("cross_shard/CrossShardOptimizer", 1, ()),
        ("clip/ClipByGlobalNormOptimizer", 1, ()),
        ("accumulate/GradientAccumulationOptimizer", 2, ()),
        ("accumulate_sums/GradientAccumulationOptimizer", 2, (MICROBATCHES, ADAM)),
        ("accumulate_clip/GradientAccumulationOptimizer", 2, (MICROBATCHES, ADAM)),
        ("sync_replicas/SyncReplicasOptimizer", 1, ()),
        ("sync_replicas_clip/SyncReplicasOptimizer", 1, (MICROBATCHES, ADAM)),
    ],
)
def test_losses_are_those_of_the_bare_model(bare, tmp_path, optimizer, passes, bindings):
    bindings = (t5_model.LANGUAGE_MODEL, *bindings)
    _, losses = bare(LM_TASK, *bindings)
    model = t5_model.mtf_model(tmp_path, *bindings, chosen(optimizer))
    model.train(LM_TASK, UPDATES * passes)
    # Every microbatch step has the same batch.
    np.testing.assert_allclose(model.losses, np.repeat(losses, passes), rtol=TOLERANCE)
    assert losses[-1] < 0.9 * losses[0]


def lines(folder, pattern):
    """The lines of the only file that a pattern names."""
    (path,) = Path(folder).glob(pattern)
    return path.read_text().split("\n")


def evaluated(model, summaries):
    """What a model of `TASK` says in place of the targets, one line each, and its metrics."""
    summaries.mkdir()  # which T5 takes as given
    model.eval(TASK, checkpoint_steps=-1, summary_dir=str(summaries), compute_sequence_length=False)
    (events,) = summaries.glob("events*")
    summary = [v for event in tf.train.summary_iterator(str(events)) for v in event.summary.value]
    metrics = {value.tag: value.simple_value for value in summary}
    return lines(summaries, "*_outputs"), metrics


def test_encoder_and_decoder_continue_evaluate_and_predict(bare, tmp_path):
    # With T5's default, bfloat16 weights in checkpoints, going on is another run, bare as well.
    given = ADAM, 'utils.get_variable_dtype.master_dtype = "float32"'
    bare_folder, losses = bare(TASK, *given)
    wrapped = *given, chosen("accumulate/GradientAccumulationOptimizer")
    # Ends in the middle of the second update, and goes on from its checkpoint.
    found = []
    for steps in (3, 2 * UPDATES):
        model = t5_model.mtf_model(tmp_path / "model", *wrapped)
        model.train(TASK, steps)
        found += model.losses
    np.testing.assert_allclose(found, np.repeat(losses, 2), rtol=TOLERANCE)

    outputs, metrics = evaluated(model, tmp_path / "eval")
    model = t5_model.mtf_model(bare_folder, *given, BARE)
    assert (outputs, metrics) == evaluated(model, tmp_path / "bare_eval")
    assert list(metrics) == [f"eval/{TASK}/sequence_accuracy"]
    assert len(outputs) == t5_model.BATCH
    assert any(outputs)

    (tmp_path / "inputs").write_text("\n".join(t5_model.pages()["inputs"]))
    model = t5_model.mtf_model(tmp_path / "model", *wrapped)
    given = dict(temperature=0.0, vocabulary=t5_model.VOCABULARY)
    model.predict(str(tmp_path / "inputs"), str(tmp_path / "outputs"), **given)
    # T5 writes the texts as Python shows bytes, and ends each line.
    assert lines(tmp_path, "outputs-*") == [*(repr(text.encode()) for text in outputs), ""]


def test_finetuning_a_bare_model(bare, tmp_path):
    pretrained, _ = bare(LM_TASK, t5_model.LANGUAGE_MODEL)
    losses = {}
    for name, passes, choice in (
        ("bare", 1, BARE),
        ("wrapped", 2, chosen("accumulate_clip/GradientAccumulationOptimizer")),
    ):
        # T5 reads the pretrained model's gin bindings over the given ones, but not over these.
        again = f"MtfModel.extra_gin_bindings = {ADAM.splitlines()}"
        given = t5_model.LANGUAGE_MODEL, ADAM, choice, again
        model = t5_model.mtf_model(tmp_path / name, *given)
        model.finetune(LM_TASK, 2 * passes, str(pretrained))
        losses[name] = np.repeat(model.losses, 2 // passes)
    np.testing.assert_allclose(losses["wrapped"], losses["bare"], rtol=TOLERANCE)
    assert losses["bare"][0] < 5


def test_the_command(tmp_path):
    (tmp_path / "mine.gin").write_text(
        t5_model.COMMAND_GIN + chosen("accumulate/GradientAccumulationOptimizer")
    )
    arguments = [
        f"--model_dir={tmp_path / 'model'}",
        "--module_import=tests.pipelines.t5_model",
        "--gin_location_prefix=configs",
        f"--gin_file={tmp_path / 'mine.gin'}",
        "--gin_param=utils.run.train_steps = 3",
    ]
    result = subprocess.run(
        [sys.executable, "examples/run_t5.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    saved = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(tmp_path / "model")))
    state = "GradientAccumulationOptimizer"
    counts = {name: saved.get_tensor(f"{state}/{name}") for name in ("mini_step", "update_step")}
    assert counts == {"mini_step": 1, "update_step": 1}
    # One accumulator for each shard of the batch.
    shape = saved.get_variable_to_shape_map()["shared/embedding/gradient_accumulator"]
    assert shape[0] == 2
