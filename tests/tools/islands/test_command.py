"""The command ``mtf-gradsync islands``, and runs of ``train`` that are islands."""

import json
import re
import signal
import subprocess
import sys
import time
from unittest.mock import Mock, call

import numpy as np
import pytest
from tensorflow.python.framework import tensor_util
from tensorflow.python.util import deprecation

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.tools.islands.folder import Folder
from mtf_gradsync.tools.islands.journal import read_status
from mtf_gradsync.tools.islands.merger import Merger
from mtf_gradsync.tools.islands.versions import export_version
from mtf_gradsync.tools.train.cli import main as cli
from mtf_gradsync.tools.train.page import Ended, write_page
from tests.tools.islands.toy import Toy, begun, merge


def test_merges_until_it_is_stopped(folder):
    command = [sys.executable, "-m", "mtf_gradsync_command", "islands", str(folder), "--keep_all"]
    with subprocess.Popen(
        [*command, "--outer_learning_rate=1", "--outer_momentum=0", "--min_grace=0"],
        stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout.readline().startswith(f"merging in {folder}, 1 contributions or more")
        toy = Toy(folder, "one", 1).begin()
        toy.step(0.5, tokens=3.0)
        assert (toy.b, toy.island.version) == (1.5, 1)
        process.send_signal(signal.SIGTERM)
        said = process.stdout.read()
        assert process.wait() == 128 + signal.SIGTERM
    assert said == "version 0: one (1)\nversion 1: one (3)\n"


def test_a_second_sigterm_is_in_the_exit_code(folder, monkeypatch):
    monkeypatch.setattr(Merger, "run", Mock(side_effect=KeyboardInterrupt(signal.SIGTERM)))
    assert cli.main(["islands", str(folder)]) == 128 + signal.SIGTERM


def test_ctrl_c_ends_a_watch_without_a_message(folder, monkeypatch, capsys):
    begun(folder, ["one"])
    waits = Mock(side_effect=[None, KeyboardInterrupt(signal.SIGINT)])
    monkeypatch.setattr(time, "sleep", waits)
    command = ["islands", str(folder), "--status", "--watch=7"]
    assert cli.main(command) == 128 + signal.SIGINT
    assert waits.mock_calls == [call(7.0)] * 2
    out, error = capsys.readouterr()
    assert out.count("one ") == 2
    assert not error


def test_status_plot_and_replay(folder, tmp_path, capsys):
    one, two = begun(folder, ["one", "two"])
    place = Folder(str(folder))
    one.steps(2, 1.0)
    two.steps(2, float("nan"))
    merge(folder, 1, keep_all=True)
    one.step(1.0)
    plot, found = tmp_path / "islands.png", tmp_path / "islands.json"
    command = ["islands", str(folder), "--status", f"--plot={plot}", f"--json={found}"]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    rows = json.loads(found.read_text())["islands"]
    assert [(row["island"], row["merged"]) for row in rows] == [("one", 1), ("two", 0)]
    assert re.search(r"^one +1 +1 +1 +0 +0 +2 .* after step 3$", out, re.MULTILINE)
    assert re.search(r"^two +1 +0 +0 +0 +0 +0 .* after step 2$", out, re.MULTILINE)
    assert plot.read_bytes().startswith(b"\x89PNG")
    page = write_page(tmp_path, [], Ended(3, 9, "stopped", {}), None, islands=read_status(place))
    (label,) = re.findall('aria-label="(A row for .*?)"', page.read_text("utf-8"))
    assert label.endswith(
        "one: 1 contributions, 1 merged, 0 late; two: 0 contributions, 0 merged, 0 late."
    )
    assert cli.main(["islands", str(folder), "--replay"]) == 0
    assert capsys.readouterr().out == "2 versions: equal, bit for bit\n"
    values = place.load("versions/00000001.safetensors").tensors
    values["a"] = values["a"] + np.float32(1e-6)
    place.store("versions/00000001.safetensors", {"version": 1}, values)
    assert cli.main(["islands", str(folder), "--replay"]) == cli.EXIT_FAILED
    assert "other bits in 1 of 2 versions: [1]" in capsys.readouterr().out


def test_a_version_is_exported_as_a_checkpoint(folder, tmp_path, capsys, monkeypatch):
    warned: dict = {}
    monkeypatch.setattr(deprecation, "_PRINTED_WARNING", warned)
    monkeypatch.setattr(deprecation, "_PRINT_DEPRECATION_WARNINGS", True)
    begun(folder, ["one"])
    out = tmp_path / "out"
    assert cli.main(["islands", str(folder), f"--export={out}"]) == 0
    saved = tf.train.load_checkpoint(str(out))
    assert (saved.get_tensor("b"), saved.get_tensor("global_step")) == (2.0, 0)
    assert not warned
    assert cli.main(["islands", str(folder), f"--export={out}", "--version=7"]) == cli.EXIT_FAILED
    assert "versions/00000007.safetensors" in capsys.readouterr().err


def test_an_export_makes_no_constants_which_have_at_most_2_gb(folder, tmp_path, monkeypatch):
    begun(folder, ["one"])
    make = tensor_util.make_tensor_proto

    def make_small(values, *args, **kwargs):
        if isinstance(values, np.ndarray) and values.dtype.kind == "f":
            raise ValueError("Cannot create a tensor proto whose content is larger than 2GB.")
        return make(values, *args, **kwargs)

    monkeypatch.setattr(tensor_util, "make_tensor_proto", make_small)
    path = export_version(Folder(str(folder)), tmp_path)
    assert tf.train.latest_checkpoint(str(tmp_path)) == path
    np.testing.assert_array_equal(tf.train.load_checkpoint(path).get_tensor("a").ravel(), range(6))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--replay"], cli.EXIT_FAILED, "has no versions yet: no merger has begun there"),
        (["--status"], cli.EXIT_FAILED, "is no folder of islands: no island has joined it yet"),
        (["--json=x"], cli.EXIT_BAD_CONFIG, "--json=x writes the status; add --status"),
        (["--plot=x.png"], cli.EXIT_BAD_CONFIG, "draws the status; add --status"),
        (["--quorum=0"], cli.EXIT_BAD_CONFIG, "at least 1, or 'living', got 0"),
        (["--outer_momentum=2"], cli.EXIT_BAD_CONFIG, "outer_momentum must be in [0, 1), got 2.0"),
        (["--fragments=2", "--max_staleness=1"], cli.EXIT_BAD_CONFIG, "max_staleness=1 needs frag"),
    ],
)
def test_bad_arguments(folder, capsys, arguments, code, message):
    assert cli.main(["islands", str(folder), *arguments]) == code
    assert message in capsys.readouterr().err
    assert not folder.exists()


def test_answers_without_tensorflow(folder):
    code = "import sys, mtf_gradsync_command as c; c.main(['islands', sys.argv[1], '--status'])"
    code += "; print('tensorflow' in sys.modules)"
    out = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
    ).stdout
    assert out == "False\n"


def test_quorum_of_the_living(folder, capsys):
    parser = cli.build_parser()
    assert parser.parse_args(["islands", str(folder), "--quorum=living"]).quorum == "living"
    assert parser.parse_args(["islands", str(folder), "--quorum=3"]).quorum == 3
    with pytest.raises(SystemExit):
        parser.parse_args(["islands", str(folder), "--quorum=most"])
    assert "quorum must be a whole number or 'living', got 'most'" in capsys.readouterr().err
