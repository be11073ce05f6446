"""Mesh-TensorFlow's own pipeline trains as it does bare, with wrappers chosen by gin alone.

The mesh is given once, to the pipeline.
"""

import functools
import logging
import re
import shutil

import numpy as np
import pytest

from mtf_gradsync._private.libraries import ESTIMATOR_AVAILABLE, tf

if not ESTIMATOR_AVAILABLE:
    pytest.skip("utils.run trains by Estimator", allow_module_level=True)
from tests.pipelines import utils_run
from tests.runtimes.cluster.processes import ROOT, Processes
from tests.sessions import saved_variables

pytestmark = pytest.mark.slow

STEPS = 4
INNER = """
utils.run.optimizer = @AdamWeightDecayOptimizer
AdamWeightDecayOptimizer.epsilon = 1e-3
"""
# How many microbatch steps make an update, and the bindings.
WRAPPERS = {
    "accumulated on each shard": (
        2,
        """
        utils.run.optimizer = @GradientAccumulationOptimizer
        GradientAccumulationOptimizer.opt = @ClipByGlobalNormOptimizer
        GradientAccumulationOptimizer.backward_passes_per_step = 2
        GradientAccumulationOptimizer.average_aggregated_gradients = True
        GradientAccumulationOptimizer.accumulate = "local"
        ClipByGlobalNormOptimizer.opt = @AdamWeightDecayOptimizer
        ClipByGlobalNormOptimizer.clip_norm = 1e6
        """,
    ),
    "accumulated whole": (
        2,
        """
        utils.run.optimizer = @GradientAccumulationOptimizer
        GradientAccumulationOptimizer.opt = @CrossShardOptimizer
        GradientAccumulationOptimizer.backward_passes_per_step = 2
        GradientAccumulationOptimizer.average_aggregated_gradients = True
        CrossShardOptimizer.opt = @AdamWeightDecayOptimizer
        """,
    ),
    "scaled": (
        1,
        """
        utils.run.optimizer = @LossScaleOptimizer
        LossScaleOptimizer.opt = @ClipByGlobalNormOptimizer
        ClipByGlobalNormOptimizer.opt = @AdamWeightDecayOptimizer
        ClipByGlobalNormOptimizer.clip_norm = 1e6
        """,
    ),
}
# On two devices, for graphs half as large; a run goes on on four below.
MODELS = {
    "unitransformer in microbatches": utils_run.TWO_DEVICES + utils_run.MICROBATCHES,
    "bitransformer, bfloat16": utils_run.BITRANSFORMER + utils_run.BFLOAT16,
}
# Losses near 4. Adam passes relative errors of gradients on to weights, at a rate of 0.01.
TOLERANCE = {"float32": STEPS * 16 * np.finfo(np.float32).eps, "bfloat16": 2.0**-8}


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Losses with the inner optimizer alone, and the model's folder."""

    @functools.lru_cache(maxsize=None)
    def losses(model):
        folder = tmp_path_factory.mktemp("bare")
        return utils_run.run(folder, MODELS[model], INNER, train_steps=STEPS + 1), folder

    return losses


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory):
    """Losses with a wrapper, and the model's folder."""

    @functools.lru_cache(maxsize=None)
    def losses(model, wrapper):
        folder = tmp_path_factory.mktemp("wrapped")
        passes, bindings = WRAPPERS[wrapper]
        steps = STEPS * passes
        return utils_run.run(folder, MODELS[model], INNER, bindings, train_steps=steps), folder

    return losses


# Synchronous replicas: test_utils_run_gin_files.
@pytest.mark.parametrize(
    ("model", "wrapper"),
    [
        ("bitransformer, bfloat16", "accumulated on each shard"),
        ("unitransformer in microbatches", "accumulated whole"),
        ("unitransformer in microbatches", "scaled"),
    ],
)
def test_losses_are_those_of_the_bare_pipeline(bare, wrapped, model, wrapper):
    passes, _ = WRAPPERS[wrapper]
    found, _ = wrapped(model, wrapper)
    assert len(found) == STEPS * passes
    tolerance = TOLERANCE["bfloat16" if "bfloat16" in model else "float32"]
    # Every microbatch step has the same batch.
    np.testing.assert_allclose(found, np.repeat(bare(model)[0][:STEPS], passes), rtol=tolerance)
    assert found[-1] < 0.98 * found[0]


def evaluated(model_dir):
    """What mode="perplexity_eval" has found, by name."""
    (events,) = model_dir.glob("eval_*/events*")
    values = [
        value
        for event in tf.train.summary_iterator(str(events))
        for value in event.summary.value
        if value.HasField("simple_value")
    ]
    return {value.tag: value.simple_value for value in values}


def test_evaluation_and_inference_read_what_a_wrapped_run_has_written(bare, wrapped, tmp_path):
    model, wrapper = "bitransformer, bfloat16", "accumulated on each shard"
    (tmp_path / "inputs").write_text("abc\nhello\n")
    _, folder = wrapped(model, wrapper)
    decoding = f"""
    decode_from_file.input_filename = "{tmp_path / "inputs"}"
    decode_from_file.output_filename = "{tmp_path / "outputs"}"
    """
    given = MODELS[model], INNER, WRAPPERS[wrapper][1], decoding
    utils_run.run(folder, *given, mode="perplexity_eval", perplexity_eval_steps=1)
    utils_run.run(folder, *given, mode="infer")
    # The loss of the step that would have come next.
    found = evaluated(folder)
    np.testing.assert_allclose(found["loss"], bare(model)[0][STEPS], rtol=TOLERANCE["bfloat16"])
    assert {"neg_log_perplexity", "token_accuracy"} < set(found)
    (outputs,) = tmp_path.glob("outputs-*")
    assert len(outputs.read_text().splitlines()) == 2


def variables(folder, step):
    return saved_variables(folder / f"model.ckpt-{step}")


def test_a_run_goes_on_with_a_wrapper_on_another_mesh(bare, tmp_path):
    model, (_, local) = "unitransformer in microbatches", WRAPPERS["accumulated on each shard"]
    made = STEPS + 1
    _, folder = bare(model)
    before = variables(folder, made)
    shutil.copytree(folder, tmp_path / "more")
    # Every run writes what it restored before it makes a step.
    utils_run.run(tmp_path / "more", INNER, local, train_steps=made + 2)
    added = variables(tmp_path / "more", made)
    for name, value in before.items():
        np.testing.assert_array_equal(added[name], value, err_msg=name)
    new = {name: value for name, value in added.items() if name not in before}
    assert any(name.endswith("gradient_accumulator") for name in new)
    for name, value in new.items():
        # Each step of the bare run was an update.
        assert (value == (made if name.endswith("update_step") else 0)).all(), name
    after = variables(tmp_path / "more", made + 2)
    assert after["GradientAccumulationOptimizer/update_step"] == made + 1


@pytest.mark.parametrize(
    "optimizer",
    [
        WRAPPERS["accumulated on each shard"][1],
        "utils.run.optimizer = @CrossShardOptimizer\n"
        "CrossShardOptimizer.opt = @AdamWeightDecayOptimizer",
    ],
)
def test_the_step_is_advanced_after_it_was_read(tmp_path, caplog, capfd, optimizer):
    """Hooks and the pipeline's own line see the step before, in each of thirty steps."""
    caplog.set_level("INFO", "tensorflow")
    logging.getLogger("tensorflow").addHandler(caplog.handler)
    try:
        utils_run.run(tmp_path, utils_run.TWO_DEVICES, INNER, optimizer, train_steps=30)
    finally:
        logging.getLogger("tensorflow").removeHandler(caplog.handler)
    assert not [r for r in caplog.records if "has not been increased" in r.getMessage()]
    printed = re.findall(r"step, tf_loss\[[^]]*\]\[(\d+)\]", capfd.readouterr().err)
    assert sorted(map(int, printed)) == list(range(30))


def test_the_command(tmp_path):
    """What `python -m mesh_tensorflow.transformer.main` does, by the example that corrects it."""
    config = f"""
    import mtf_gradsync.tools.train.data.vocabulary
    import tests.pipelines.utils_run
    {utils_run.PIPELINE}
    {utils_run.TWO_DEVICES}
    {WRAPPERS["accumulated on each shard"][1]}
    utils.run.vocabulary = @ByteVocabulary()
    utils.run.train_steps = 3
    """
    lines = [line.strip() for line in config.splitlines()]
    (tmp_path / "mine.gin").write_text("\n".join(lines))
    flags = f"--model_dir={tmp_path / 'model'}", f"--gin_file={tmp_path / 'mine.gin'}"
    with Processes() as processes:
        processes.wait(processes.fork(ROOT / "examples/run_mtf.py", *flags))
    saved = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(tmp_path / "model")))
    state = "GradientAccumulationOptimizer"
    counts = {name: saved.get_tensor(f"{state}/{name}") for name in ("mini_step", "update_step")}
    assert counts == {"mini_step": 1, "update_step": 1}
