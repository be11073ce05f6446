"""The command ``mtf-gradsync sample``."""

import os
import subprocess
import sys

import numpy as np
import pytest

from mtf_gradsync.runtimes.settings import session_config
from mtf_gradsync.runtimes.starting import latest_checkpoint
from mtf_gradsync.tools.train import gin_files
from mtf_gradsync.tools.train.cli import main as cli
from mtf_gradsync.tools.train.evaluation import Evaluator
from mtf_gradsync.tools.train.model import resolve_job
from tests.runtimes.cluster.processes import ROOT
from tests.tools.train.conftest import ATTENTION, NO_EVAL, TINY


def greedy(directory, prompt, count):
    """What the most likely tokens are, by a graph of the run's own batch."""
    gin_files.load([f"{directory}/operative_config.gin"], [])
    model = resolve_job(gin_files.bound_run_config()).model
    targets = np.zeros([model.batch_size, 16], np.int32)
    ids = model.vocabulary.encode(prompt)
    with Evaluator(model, [{"targets": targets}], session_config(num_cpu_devices=4)) as evaluator:
        evaluator.restore(latest_checkpoint(directory), directory)
        for _ in range(count):
            targets[3, : len(ids)] = ids
            logits = evaluator.next_logits({"targets": targets}, len(ids))
            ids.append(1 + int(np.argmax(logits[3, 1:])))
    return model.vocabulary.decode(ids)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["cpu_replicas", "placement_mesh"])
def test_sample_writes_from_any_run_s_checkpoint(train, capsys, tmp_path, runtime):
    directory = str(tmp_path / "a,run")  # a comma separates gin files, not this
    train(
        NO_EVAL,
        ATTENTION,
        "train.run.train_steps = 2",
        f"train.run.runtime = '{runtime}'",
        model_dir="a,run",
    )
    capsys.readouterr()
    command = ["sample", f"--model_dir={directory}", "--temperature=0", "--max_tokens=5"]
    assert cli.main([*command, "--prompt=import", "--num_samples=3"]) == 0
    texts = capsys.readouterr().out.split("\n---\n")
    assert len(texts) == 3
    assert {text.rstrip("\n") for text in texts} == {greedy(directory, "import", 5).rstrip("\n")}
    if runtime == "cpu_replicas":
        # Longer than a sequence: the model sees the end, and all of it is printed.
        long = "a" * 20
        assert cli.main([*command, f"--prompt={long}"]) == 0
        assert capsys.readouterr().out.startswith(long)


def test_bytes_that_are_no_text_are_an_error_of_one_line(capsys, tmp_path):
    (tmp_path / "operative_config.gin").write_text(f"include '{TINY}'")
    bad = os.fsdecode(b"a\xff")
    assert cli.main(["sample", f"--prompt={bad}", f"--model_dir={tmp_path}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "mtf-gradsync: error: --prompt=b'a\\xff' is no UTF-8 text"
    # Names of files may be anything: here that of the copy, which is printed.
    command = [sys.executable, "-m", "mtf_gradsync_command", "init", "lm_cpu_mesh", f"{bad}.gin"]
    utf8 = {**os.environ, "PYTHONUTF8": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=utf8, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "a\\udcff.gin is a copy of lm_cpu_mesh.gin" in done.stdout


def test_sample_says_what_a_directory_lacks(capsys, tmp_path):
    command = ["sample", "--prompt=a"]
    assert cli.main([*command, f"--model_dir={tmp_path}"]) == cli.EXIT_BAD_CONFIG
    assert "is no run: it has no operative_config.gin" in capsys.readouterr().err
    (tmp_path / "operative_config.gin").write_text(f"include '{TINY}'")
    assert cli.main([*command, f"--model_dir={tmp_path}"]) == cli.EXIT_BAD_CONFIG
    assert "has no checkpoint yet" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag",
    ["--temperature=nan", "--temperature=inf", "--temperature=-1", "--temperature=warm",
     "--keep_top_k=-1", "--num_samples=0", "--max_tokens=1.5", "--seed=4294967296"],
)  # fmt: skip
def test_a_bad_number_names_its_flag(capsys, flag):
    with pytest.raises(SystemExit) as ended:
        cli.main(["sample", "--model_dir=no", "--prompt=a", flag])
    assert ended.value.code == 2
    name, value = flag.split("=")
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"mtf-gradsync sample: error: argument {name}: expected a ")
    assert error.endswith(f"got '{value}'")
