"""Values go into an exported step from sessions and checkpoints, and come back as a checkpoint."""

from __future__ import annotations

import numpy as np
import pytest

from mtf_gradsync import xla
from mtf_gradsync.runtimes.xla.runner import Step
from tests.runtimes.xla.export import models

pytestmark = pytest.mark.xla


def steps_of(step, numbers):
    """Makes some of the steps that `models.batches` is for."""
    given = models.batches()
    fetched = [step({n: v[i] for n, v in given.items()}) for i in numbers]
    return {n: np.stack([f[n] for f in fetched]) for n in fetched[0]}


def rest(exported):
    return {n: v[2:] for n, v in exported.fetches.items()}


@pytest.mark.slow
def test_a_session_s_values_go_on(exported):
    # Sums in accumulators, the step counter and random numbers as well.
    found = steps_of(Step.load(str(exported.half)), range(2, models.STEPS))
    models.assert_same_bits(found, rest(exported))


@pytest.mark.slow
def test_a_checkpoint_s_values_go_on(exported, tmp_path):
    with models.model() as model:
        model.export(tmp_path / "step", checkpoint=exported.halfway)
    found = steps_of(Step.load(str(tmp_path / "step")), range(2, models.STEPS))
    models.assert_same_bits(found, rest(exported))


@pytest.mark.slow
def test_values_of_cpu_replicas_go_on(tmp_path):
    with models.model() as model:
        with model.program.session(model.lowering) as session:
            model.run(session, range(2))
            expected = session.variables()
            model.export(tmp_path / "step", session=session)
    step = Step.load(str(tmp_path / "step"))
    assert step.manifest["global_step"] == 2
    found = step.variables()
    found["table"] = found["table"].astype(np.float32)
    expected.pop("global_step")
    models.assert_same_bits(found, expected)


@pytest.mark.slow
def test_a_checkpoint_is_made_of_a_folder(exported, tmp_path):
    step = Step.load(str(exported.half))
    steps_of(step, range(2, 4))
    step.save(str(tmp_path / "saved"))
    path = xla.to_checkpoint(tmp_path / "saved", tmp_path / "made")
    with models.model() as model:
        with xla.session(model.program, model.lowering, cache_dir=None) as session:
            session.restore(path)
            assert session.read("global_step") == 4
            found = model.run(session, [4])
            models.assert_same_bits(found, {n: v[4:] for n, v in exported.fetches.items()})
            models.assert_same_bits(session.variables(), exported.variables)


def test_runs_of_a_folder_draw_the_same_numbers(tmp_path):
    from mtf_gradsync import simd
    from mtf_gradsync._private.libraries import tf

    with simd.tpu_program("all:2", "") as program:
        drawn = tf.random.normal([4])  # without any seed
    for name, seed in (("one", 1), ("same", 1), ("other", 2), ("any", None)):
        xla.export(program, None, {"drawn": drawn}, tmp_path / name, seed=seed)
    found = {}
    for name in ("one", "same", "other", "any"):
        for turn in range(2):
            step = Step.load(str(tmp_path / name))
            found[name, turn] = [step()["drawn"].tobytes() for _ in range(2)]
    assert all(found[name, 0] == found[name, 1] for name, _ in found)
    assert found["one", 0] == found["same", 0]
    assert len({drawn for run in found.values() for drawn in run}) == 6
