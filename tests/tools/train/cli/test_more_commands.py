"""``mtf-gradsync env``, ``init`` and ``sample``."""

import os
import subprocess
import sys

import numpy as np
import pytest

from mtf_gradsync import xla
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes.settings import session_config
from mtf_gradsync.runtimes.starting import latest_checkpoint
from mtf_gradsync.tools.train import gin_files
from mtf_gradsync.tools.train.cli import main as cli
from mtf_gradsync.tools.train.evaluation import Evaluator
from mtf_gradsync.tools.train.model import resolve_job
from tests.runtimes.cluster.processes import ROOT
from tests.tools.train.conftest import ATTENTION, NO_EVAL, TINY


@pytest.mark.parametrize("missing", ["", "This needs jax, which is not installed."])
def test_env_says_what_runs_here_and_why_not(capsys, monkeypatch, missing):
    monkeypatch.setattr(xla, "why_no_xla", lambda: missing)
    # Tests have devices of their own.
    device = type("Device", (), {"platform": "gpu", "device_kind": "NVIDIA X"})()
    device.client = type("Client", (), {"devices": lambda self: [device] * 2})()
    monkeypatch.setattr(xla, "devices_for", lambda number: [device])
    assert cli.main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = {line[:24].strip(): line[24:] for line in lines}
    assert found["runtime xla"] == (f"no: {missing}" if missing else "yes, on 2 NVIDIA X")
    assert found["runtime fastest"] == ("is cpu_replicas" if missing else "is xla")
    assert "CPU of TensorFlow" in found["runtime placement_mesh"]
    assert {"Python", "tensorflow", "mesh-tensorflow", "numpy", "jax"} <= set(found)


def test_init_copies_and_never_overwrites(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "lm_cpu_mesh"]) == 0
    copy = tmp_path / "lm_cpu_mesh.gin"
    assert "mtf-gradsync train --gin_file=lm_cpu_mesh.gin\n" in capsys.readouterr().out
    text = copy.read_text()
    assert "#   mtf-gradsync train --gin_file=lm_cpu_mesh.gin\n" in text
    assert "train.run.train_steps = 700" in text
    copy.write_text("mine")
    assert cli.main(["init", "lm_cpu_mesh"]) == cli.EXIT_BAD_CONFIG
    assert "is there already" in capsys.readouterr().err
    assert copy.read_text() == "mine"
    assert cli.main(["init", "lm_accumulate.gin", "other.gin"]) == 0
    assert (tmp_path / "other.gin").exists()
    for wrong, said in (
        ("lm_cpu", "; did you mean lm_cpu_mesh?"),
        ("mine", "; there are lm_accumulate, lm_cpu_mesh, "),
    ):
        assert cli.main(["init", wrong]) == cli.EXIT_BAD_CONFIG
        assert said in capsys.readouterr().err
    assert cli.main(["init", "lm_cpu_mesh", "no/such/x.gin"]) == cli.EXIT_BAD_CONFIG
    # Those that are parts of others are not offered.
    assert cli.main(["init", "unitransformer"]) == cli.EXIT_BAD_CONFIG


def test_init_makes_a_config_for_own_text(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "it's.txt").write_text("Once upon a time. " * 20 + "\u00e9", encoding="utf-8")
    (tmp_path / "b.txt").write_text("Another text.\n" * 99)
    for name, content, message in (
        ("no.txt", None, "No such file"),
        ("latin.txt", b"caf\xe9", "'latin.txt' as UTF-8"),
        ("empty.txt", b" \n", "'empty.txt' is empty"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        assert cli.main(["init", "--text", "b.txt", name]) == cli.EXIT_BAD_CONFIG
        assert message in capsys.readouterr().err
        assert not (tmp_path / "b.gin").exists()
    assert cli.main(["init", "--text", "it's.txt", "b.txt"]) == 0
    gin_files.load(["it_s.gin"], [])
    config = gin_files.bound_run_config()
    monkeypatch.chdir("/")
    for dataset_fn in (config.train_dataset_fn, config.eval_dataset_fn):
        with tf.Graph().as_default():
            dataset_fn({"targets": 16}, config.vocabulary, dataset_split="train")


def test_init_names_a_config_after_its_text_in_either_order(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("novel.txt", "my novel,1.txt", "lm_cpu_mesh.txt", "unitransformer.txt"):
        (tmp_path / name).write_text("All happy families are alike.\n" * 99)
    for arguments, file, config in (
        (["--text", "novel.txt"], "novel.gin", "lm_cpu_mesh"),
        (["lm_outer", "--text", "my novel,1.txt"], "my_novel_1.gin", "lm_outer"),
        (["--text", "novel.txt", "lm_outer", "a.gin"], "a.gin", "lm_outer"),
        (["--text", "novel.txt", "b.gin"], "b.gin", "lm_cpu_mesh"),
        # Of the names of the package's own files there is no copy: it would include itself, or
        # train where these train.
        (["--text", "lm_cpu_mesh.txt", "novel.txt"], "lm_cpu_mesh_text.gin", "lm_cpu_mesh"),
        (["--text", "unitransformer.txt"], "unitransformer_text.gin", "lm_cpu_mesh"),
    ):
        assert cli.main(["init", *arguments]) == 0
        said = capsys.readouterr().out
        text = next(name for name in arguments if name.endswith(".txt"))
        assert said.startswith(f"{file} is {config}.gin with the text of {text}")
        assert said.endswith(f"\n  mtf-gradsync train --gin_file={file}\n")
        lines = (tmp_path / file).read_text().splitlines()
        assert lines[1].startswith(f"# {config}.gin, trained on {text}")
        assert f"#   mtf-gradsync train --gin_file={file}" in lines
        assert "Python's own documentation" not in "\n".join(lines[:6])
        gin_files.load([file], [])
        assert gin_files.bound_run_config().train_dataset_fn.__name__ == "text_files"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "short.txt"], "The train split of text short.txt (12 bytes) has 12 tok"),
        (["--text", "novel.txt", "lm_acumulate"], "config 'lm_acumulate'; did you mean lm_accumul"),
        (
            ["novel.txt"],
            "There is no config 'novel.txt'. To train on a text: mtf-gradsync init --t",
        ),
        (["lm_outer", "a.gin", "--text", "novel.txt", "lm_outer"], "takes one CONFIG and one FILE"),
    ],
)
def test_init_says_what_is_wrong(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("Hello world\n")
    (tmp_path / "novel.txt").write_text("All happy families are alike.\n" * 99)
    assert cli.main(["init", *arguments]) == cli.EXIT_BAD_CONFIG
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("*.gin"))


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


@pytest.mark.parametrize("flag", ["--timeout=nan", "--silence=inf", "--watch_port=70000"])
def test_a_bad_number_of_processes_names_its_flag(capsys, flag):
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--gin_file=no.gin", flag])
    assert ended.value.code == 2
    assert f"argument {flag.split('=')[0]}: expected a " in capsys.readouterr().err
