import os
import signal
import tempfile
import time

import pytest

from mtf_gradsync.runtimes.starting import choose_checkpoint
from mtf_gradsync.tools.train.cli import main as cli
from mtf_gradsync.tools.train.cli import report
from tests.forked import TIME_LIMIT
from tests.runtimes.cluster.processes import Processes
from tests.tools.train.conftest import NO_EVAL, QUICK, TINY


def fail(capsys, *arguments):
    """Runs a command line that must end with a bad config; returns the one message."""
    assert cli.main(["train", *arguments]) == cli.EXIT_BAD_CONFIG
    error = capsys.readouterr().err
    assert "Traceback" not in error
    (line,) = [line for line in error.splitlines() if line.startswith("mtf-gradsync: error:")]
    return error[error.index(line) :]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("", "train"),
        (
            "train",
            "train --gin_file --gin_param --gin_location_prefix --model_dir --verbosity Ctrl-C",
        ),
        ("plan", "--gin_file --topologies --mesh_shape --layout --jobs --json --png"),
        ("compile", "--gin_file --gin_param --topology --json --save_hlo --verbosity"),
        ("report", "--gin_file --gin_param --rows --json --png --no_placement"),
    ],
)
def test_help_names_every_flag(capsys, command, words):
    with pytest.raises(SystemExit) as ended:
        cli.main([*command.split(), "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for word in words.split():
        assert word in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        ("train.run.train_step = 3", "parameter named 'train_step'; did you mean train_steps"),
        ("no_such.thing = 3", "No configurable matching 'no_such'"),
        ("train.run.optimizer = @NoSuchOptimizer", "NoSuchOptimizer"),
        ("train.run.train_steps = ", "train.run.train_steps"),
        ("train.run.train_steps = 'many'", "train.run.train_steps must be a positive integer"),
        ("train.run.optimizer = @AdafactorOptimizer()", "train.run.optimizer"),
        ("train.run.optimizer = @ByteVocabulary", "cannot be called with learning_rate="),
        ("train.run.hooks = 3", "hooks"),
        ("run.train_steps = 3", "mtf_gradsync.train.run"),
        ("train.run.vocabulary = @ByteVocabulary", "train.run.vocabulary must be an object"),
        ("train.run.layout_rules = 'batch:rows'", 'the mesh dimension "rows"'),
        ("train.run.mesh_shape = 'batch:2;rows:2'", "mesh dimension \"model\""),
        ("train.run.mesh_devices = ['cpu:0']", "train.run.mesh_devices must list 4 devices"),
        ("train.run.batch_size = 7", "train.run.batch_size = 7"),
        ("train.run.model_type = 'mind'", "train.run.model_type must be one of lm"),
        ("Unitransformer.max_length = 4", "Unitransformer.max_length = 4 is less than 16, the"),
        (
            "train.run.optimizer = @CrossShardOptimizer()",
            "train.run.optimizer = @CrossShardOptimizer(): take the parentheses away",
        ),
        ("CrossShardOptimizer.strategi = 3", "parameter named 'strategi'; it has "),
        ("train.run.trian_steps = 3", "'trian_steps'; did you mean train_steps"),
        ("Unitransformer.d_model = 'wide'", "size='wide'"),
        ("train.run.variable_filter = 'embeding'", "did you mean transformer/embedding"),
        ("train.run.variable_filter = '('", "not a regular expression"),
        ("train.run.init_checkpoint = '/no/such'", "train.run.init_checkpoint = '/no/such'"),
        ("train.sample.prompt_tokens = 99", "train.sample.prompt_tokens must leave room"),
    ],
)  # fmt: skip
def test_bad_binding_is_named(capsys, tmp_path, binding, message):
    # What needs no evaluation shall not wait for it.
    given = QUICK if "sample" in binding else [NO_EVAL]
    text = fail(
        capsys,
        f"--gin_file={TINY}",
        f"--model_dir={tmp_path}",
        "--gin_param=train.run.train_steps = 1",
        *(f"--gin_param={one}" for one in given),
        f"--gin_param={binding}",
    )
    assert any(one in text for one in message.split("|")), text


def test_missing_bindings_are_named(capsys, tmp_path):
    text = fail(capsys, "--gin_param=train.run.train_steps = 1", f"--model_dir={tmp_path}")
    assert "Missing in the config: train.run." in text
    assert "train.run.mesh_shape" in text


def test_missing_macro_and_file_are_named(capsys, tmp_path):
    assert "no_such.gin" in fail(capsys, "--gin_file=no_such.gin")
    assert "configs/no.gin: there is no such file" in fail(capsys, "--gin_file=configs/no.gin")
    assert "Give at least one --gin_file" in fail(capsys)
    text = fail(
        capsys, f"--gin_file={TINY}", "--gin_param=Unitransformer.d_model = %width",
        f"--model_dir={tmp_path}",
    )  # fmt: skip
    assert "width" in text


def test_a_file_of_another_kind_is_told_from_a_config(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "novel.txt").write_text("All happy families are alike.\n")
    text = fail(capsys, "--gin_file=novel.gin")
    assert "there is no such file; mtf-gradsync init --text novel.txt makes it" in text
    text = fail(capsys, "--gin_file=novel.txt")
    assert "If it is a text to train on: mtf-gradsync init --text novel.txt" in text
    (tmp_path / "operative_config.gin").touch()
    text = fail(capsys, f"--model_dir={tmp_path}")
    assert f"--gin_file={tmp_path / 'operative_config.gin'}" in text


def test_debug_verbosity_shows_the_traceback(capsys, tmp_path):
    code = cli.main(
        ["train", f"--gin_file={TINY}", "--gin_param=train.run.batch_size = 7",
         f"--model_dir={tmp_path}", "--verbosity=debug"]
    )  # fmt: skip
    assert code == cli.EXIT_BAD_CONFIG
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "--model-dir=x"], "--model-dir=x; did you mean --model_dir?"),
        (["sample", "--modeldir", "x", "--prompt=a"], "--modeldir x; did you mean --model_dir?"),
        (["init", "a", "b", "c"], "unrecognized arguments: c\n"),
        (["train", "my.gin"], "my.gin; a config is given by --gin_file=my.gin"),
        (["timeline", "/"], "/; a run's directory is given by --model_dir=/"),
        (["--verson"], "did you mean --version?"),
    ],
)
def test_unknown_arguments_are_told_with_similar_ones(capsys, arguments, said):
    if arguments[0] == "sample":
        arguments = [*arguments, "--model_dir=y"]
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_sigterm_ends_a_command_as_ctrl_c_does(tmp_path, capsys, monkeypatch):
    def work(args):
        with tempfile.TemporaryDirectory(dir=tmp_path):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(report, "main", work)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        assert cli.main(["report"]) == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not list(tmp_path.iterdir())
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.slow
def test_interrupt_leaves_a_checkpoint_and_the_same_command_goes_on(tmp_path, capsys):
    command = [
        "train", f"--gin_file={TINY}",
        f"--model_dir={tmp_path}", "--gin_param=train.run.train_steps = 100000",
        "--gin_param=train.run.save_checkpoints_steps = 100000",
        *(f"--gin_param={binding}" for binding in [*QUICK, NO_EVAL]),
    ]  # fmt: skip
    metrics = tmp_path / "metrics.jsonl"
    with Processes() as processes:
        process = processes.fork("-m", "mtf_gradsync.tools.train.cli.main", *command)
        deadline = time.monotonic() + TIME_LIMIT
        while not (metrics.exists() and len(metrics.read_text().splitlines()) > 3):
            assert process.poll() is None, process.errors()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait() == 128 + signal.SIGINT
    out, error = process.output(), process.errors()
    step = choose_checkpoint(str(tmp_path), False, print).step
    assert step >= 4
    assert f"stopped after step {step}" in out
    assert "Traceback" not in error
    # No terminal: lines instead of a bar that draws over itself.
    assert "step 1/100000  loss " in error
    assert "\r" not in error
    assert cli.main([*command, f"--gin_param=train.run.train_steps = {step + 2}"]) == 0
    assert f"from step {step} to {step + 2}" in capsys.readouterr().out
