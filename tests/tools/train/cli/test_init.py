"""The command ``mtf-gradsync init``."""

import pytest

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.tools.train import gin_files
from mtf_gradsync.tools.train.cli import main as cli


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
