"""The code in the guide runs."""

import pathlib
import re

from mtf_gradsync._private.libraries import tf

GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "simd.md"


def test_code_of_the_guide_runs(capsys):
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE):
        exec(block, names)
    printed = capsys.readouterr().out
    assert printed.count("(8, 4)") == 3
    table = printed[printed.index("mesh rows:4;cols:2") :].splitlines()
    shown = GUIDE.read_text().partition("    mesh rows:4;cols:2\n")[2].splitlines()
    assert table[1].split() == shown[0].split()
    assert any(line.split()[2:4] == ["64", "rows"] and line.endswith(" w") for line in table[3:])
    assert tf.get_default_graph() is names["program"].graph
