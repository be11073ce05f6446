"""The flags by which a command is one of several processes."""

import pytest

from mtf_gradsync.tools.train.cli import main as cli


@pytest.mark.parametrize("flag", ["--timeout=nan", "--silence=inf", "--watch_port=70000"])
def test_a_bad_number_of_processes_names_its_flag(capsys, flag):
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--gin_file=no.gin", flag])
    assert ended.value.code == 2
    assert f"argument {flag.split('=')[0]}: expected a " in capsys.readouterr().err
