"""Runs of ``mtf-gradsync train`` that are islands."""

import signal
import time
from unittest import mock

import gin
import numpy as np
import pytest

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes._common import ConfigError, TrainingError
from mtf_gradsync.runtimes.starting import choose_checkpoint
from mtf_gradsync.tools.islands import Waiting
from mtf_gradsync.tools.islands.folder import Folder
from mtf_gradsync.tools.islands.journal import read_status
from mtf_gradsync.tools.islands.versions import replay
from mtf_gradsync.tools.train.cli import main as cli
from mtf_gradsync.tools.train.data.batches import TrainingBatches
from tests.sessions import saved_variables
from tests.tools.islands.conftest import merging
from tests.tools.islands.toy import begun
from tests.tools.train.conftest import NO_EVAL, metric, train_tiny


def bindings(folder, *more):
    return [
        NO_EVAL,
        f"ElasticIslands.folder = '{folder}'",
        "ElasticIslands.inner_steps = 3",
        *(f"ElasticIslands.{one}" for one in more),
    ]


def values_of(directory):
    """All variables of the newest checkpoint of a run."""
    return saved_variables(choose_checkpoint(str(directory), False, pytest.fail).path)


@gin.configurable(module="tests.islands")
def falling(step, total_train_steps):
    """A rate that falls to the end of the run."""
    return 0.03 * (1.0 - tf.cast(step, tf.float32) / total_train_steps)


SCHEDULE = "train.run.learning_rate_schedule = @falling"


@gin.configurable(module="tests.islands")
def padded(sequence_length, vocabulary, dataset_split):
    """Examples of which the last 6 of 16 targets are padding."""
    ids = np.random.RandomState(0).randint(3, 200, [64, sequence_length["targets"]])
    ids[:, 10:] = 0
    return tf.data.Dataset.from_tensor_slices({"targets": ids.astype(np.int32)})


class KillError(Exception):
    """Ends a run in the middle of a round."""


def kill():
    raise KillError


@pytest.mark.slow
@pytest.mark.parametrize(
    "runtime", ["cpu_replicas", "placement_mesh", pytest.param("xla", marks=pytest.mark.xla)]
)
def test_a_run_is_an_island(runtime, folder, tmp_path, after_step):
    where = [f"train.run.runtime = '{runtime}'", "train.run.train_dataset_fn = @padded"]
    merger = ["merge = True", "keep_all = True", "min_grace = 0.0"]

    after_step(8, kill)
    with pytest.raises(KillError):
        train_tiny(tmp_path / "run", *where, *bindings(folder, *merger))
    after_step(None)
    result, _, said = train_tiny(tmp_path / "run", *where, *bindings(folder, *merger))
    assert result.step == 12
    assert any(f"this run is the island 'run' of {folder}" in line for line in said)
    status = read_status(Folder(str(folder)))
    (row,) = status.rows
    assert (row.island, row.joined, row.state) == ("run", 2, "left")
    assert "run: 4 contributions, 4 merged" in (tmp_path / "run" / "report.html").read_text("utf-8")
    # To step 6, and after it was killed after step 8 again from step 6 to step 12: of each batch
    # of 8 sequences 80 targets count.
    merged = [c for d in status.decisions[1:] for c in d.contributions]
    assert [(c.steps, c.weight) for c in merged] == [(3, 240.0)] * 4
    assert replay(Folder(str(folder))) == []
    # The last version is in the last checkpoint.
    merged = Folder(str(folder)).load("versions/00000004.safetensors").tensors
    live = values_of(tmp_path / "run")
    for name, value in merged.items():
        np.testing.assert_array_equal(live[name], value)
    again = bindings(folder, "name = 'run'", "replay = True")
    train_tiny(tmp_path / "replayed", *where, *again)
    replayed = values_of(tmp_path / "replayed")
    assert {k: v.tobytes() for k, v in replayed.items()} == {
        k: v.tobytes() for k, v in live.items()
    }


@pytest.mark.slow
def test_what_a_checkpoint_had_learned_is_contributed(folder, tmp_path, after_step):
    where = ["train.run.runtime = 'cpu_replicas'", "train.run.train_dataset_fn = @padded"]
    given = bindings(folder, "merge = True", "keep_all = True", "min_grace = 0.0")
    given.append("ElasticIslands.inner_steps = 4")

    after_step(8, kill)
    with pytest.raises(KillError):
        train_tiny(tmp_path / "run", *where, *given, "ElasticIslands.inner_steps = 10")
    after_step(None)
    assert (tmp_path / "run" / "model.ckpt-6.island").exists()
    result, _, _ = train_tiny(tmp_path / "run", *where, *given)
    assert result.step == 12
    status = read_status(Folder(str(folder)))
    merged = [c for d in status.decisions[1:] for c in d.contributions]
    # Those of the checkpoint of step 6, and what came after it, are in versions.
    assert sum(c.steps for c in merged) == 12
    assert sum(c.weight for c in merged) == 12 * 80.0
    again = [*given, "ElasticIslands.merge = False", "ElasticIslands.name = 'run'",
             "ElasticIslands.replay = True"]  # fmt: skip
    live = values_of(tmp_path / "run")
    train_tiny(tmp_path / "replayed", *where, *again)
    replayed = values_of(tmp_path / "replayed")
    assert {k: v.tobytes() for k, v in replayed.items()} == {
        k: v.tobytes() for k, v in live.items()
    }


@pytest.mark.slow
def test_a_run_that_is_stopped_contributes_what_it_has(folder, tmp_path, after_step):
    after_step(5, lambda: signal.raise_signal(signal.SIGTERM))
    result, _, _ = train_tiny(tmp_path / "run", *bindings(folder, "merge = True"))
    assert (result.step, result.stopped_by) == (5, signal.SIGTERM)
    (row,) = read_status(Folder(str(folder))).rows
    assert (row.contributed, row.state) == (2, "left")
    (last,) = Folder(str(folder)).names("contributions/00000001")
    stored = Folder(str(folder)).load(f"contributions/00000001/{last}")
    assert (stored.facts["island"], stored.facts["steps"]) == ("run", 2)


@pytest.mark.slow
def test_a_run_that_joins_has_its_own_data_and_goes_on_where_others_are(
    folder, tmp_path, after_step
):
    seen = {}

    def watched(name):
        original = TrainingBatches.next

        def next_batch(self):
            found = original(self)
            (targets,) = found.values()
            seen.setdefault(name, []).extend(x.tobytes() for x in targets)
            return found

        where = ["train.run.runtime = 'cpu_replicas'", SCHEDULE]
        with mock.patch.object(TrainingBatches, "next", next_batch):
            return train_tiny(tmp_path / name, *where, *bindings(folder, "wait_seconds = 20.0"))

    with merging(folder, waiting=Waiting(min_grace=0.0)):
        after_step(8, lambda: signal.raise_signal(signal.SIGTERM))
        first, _, said = watched("a")
        after_step(None)
        while read_status(Folder(str(folder))).decisions[-1].counts["step"] < 8:
            pass
        gin.clear_config()
        second, _, said_by_second = watched("b")
    assert (first.step, second.step) == (8, 12)
    of = f"of {folder}, and learns from part"
    assert any(f"the island 'a' {of} 0 of 17 of the data" in line for line in said)
    assert any(f"the island 'b' {of} 1 of 17 of the data" in line for line in said_by_second)
    # Not 12 steps, but what the version had left.
    assert (len(seen["a"]), len(seen["b"])) == (8 * 8, 4 * 8)
    assert not set(seen["a"]) & set(seen["b"])
    for name, steps in (("a", range(1, 9)), ("b", range(9, 13))):
        found = metric(tmp_path / name, "learning_rate")
        assert list(found) == list(steps)
        np.testing.assert_allclose(
            list(found.values()), [0.03 * (13 - step) / 12 for step in steps], rtol=1e-6
        )
    assert int(values_of(tmp_path / "b")["global_step"]) == 12


@pytest.mark.slow
def test_a_version_of_a_run_is_evaluated_and_sampled(folder, tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "exported"
    of_island = bindings(folder, "merge = True", "min_grace = 0.0")[1:]
    _, _, said = train_tiny(run, *of_island)
    gin.clear_config()
    before = Folder(str(folder)).marks("parts"), Folder(str(folder)).marks("members")
    assert cli.main(["islands", str(folder), f"--export={out}", f"--run={run}"]) == 0
    config = f"--gin_file={out}/operative_config.gin"
    assert cli.main(["sample", f"--model_dir={out}", "--prompt=a", "--max_tokens=2"]) == 0
    assert f"from {out}" in capsys.readouterr().err
    gin.clear_config()
    evaluate = ["train", config, f"--model_dir={out}", "--gin_param=train.run.train_steps = 1"]
    assert cli.main(evaluate) == 0
    # The run's last checkpoint has taken the last version.
    (score,) = [line for line in said if line.startswith("held-out loss")]
    assert score in capsys.readouterr().out
    assert (Folder(str(folder)).marks("parts"), Folder(str(folder)).marks("members")) == before


@pytest.mark.slow
def test_another_model_ends_at_once(folder, tmp_path):
    begun(folder, ["one"])
    began = time.monotonic()
    with pytest.raises(TrainingError, match=r"The island has another model: .* it lacks"):
        train_tiny(tmp_path / "run", *bindings(folder))
    assert time.monotonic() - began < 60.0


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        (["wait = 'long'"], ConfigError, "ElasticIslands: wait must be one of grace, none"),
        (["quorum = 0", "merge = True"], ConfigError, "ElasticIslands: quorum must be a whole"),
        (["begin_seconds = 0"], TrainingError, "has no version of the values after 0 s"),
    ],
)
@pytest.mark.mostly_slow
def test_bad_settings(folder, tmp_path, more, error, message):
    with pytest.raises(error, match=message):
        train_tiny(tmp_path / "run", *bindings(folder, *more))
