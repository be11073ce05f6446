"""What `import mtf_gradsync` loads, and that every promised name is there, by each way to ask."""

import ast
import importlib
import io
import json
import pathlib
import re
import textwrap
import tokenize

import pytest

import mtf_gradsync as gs
from mtf_gradsync import extension
from tests.runtimes.cluster.processes import Processes

PACKAGE = pathlib.Path(gs.__file__).parent
ROOT = PACKAGE.parent
# The bar of an import: what a reader has to know of an optimizer wrapper.
MOST_FILES, MOST_LINES = 85, 14_500
ROOMS = {"": gs, ".simd": gs.simd, ".xla": gs.xla, ".estimator": gs.estimator,
         ".islands": gs.islands, ".reduce": gs.reduce, ".compat_v1": gs.compat_v1}  # fmt: skip
NOT_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
            tokenize.ENDMARKER)  # fmt: skip


# One program, in a process where only TensorFlow is imported, looks at everything, in this order.
PROGRAM = """
    import contextlib, importlib, inspect, io, json, pickle, runpy, sys
    from importlib import resources, util
    import gin
    import mtf_gradsync as gs
    import mesh_tensorflow as mtf

    out = {}
    names = [name for name in sys.modules if f"{name}.".startswith("mtf_gradsync.")]
    out["files"] = sorted({sys.modules[name].__file__ for name in names})

    gin.parse_config_files_and_bindings([], [
        "estimator.SpecBuilder.mesh_shape = 'a:2'",
        "ClipByGlobalNormOptimizer.reducer = @LowRankAllReduce()",
        "LowRankAllReduce.rank = 3",
    ])
    opt = gs.ClipByGlobalNormOptimizer(mtf.optimize.AdamWeightDecayOptimizer(0.1), 1.0)
    quantized = "mtf_gradsync.reduce.quantized"
    out["gin"] = [gin.config_is_locked(), opt.reducer.rank, quantized in sys.modules]
    gs.QuantizedAllReduce()
    out["gin"] += [gin.config_is_locked(), gs.islands.ElasticIslands.__name__]

    # Earlier names, before anything is loaded by its real one.
    from mtf_gradsync.xla.xla_session import XlaSession
    import mtf_gradsync.timelines.timeline, mtf_gradsync.planning.plan
    import mtf_gradsync.verification.verify, mtf_gradsync.processes.members
    import mtf_gradsync.train.cli.main as command
    from mtf_gradsync.tools.train.cli import main

    # An import of a module leaves the function of its name where it was.
    rooms = [gs.xla, gs.timelines, gs.planning, gs.verification]
    names = ["session", "timeline", "plan", "verify"]
    out["functions"] = [inspect.isfunction(getattr(*pair)) for pair in zip(rooms, names)]
    out["same"] = [
        command is main, gs.xla is sys.modules["mtf_gradsync.runtimes.xla"],
        sys.modules["mtf_gradsync.xla.xla_session"]
        is sys.modules["mtf_gradsync.runtimes.xla.xla_session"],
        XlaSession is gs.xla.XlaSession,
        pickle.loads(pickle.dumps(gs.Timeline)) is gs.Timeline,
        # A pickle of an earlier version.
        pickle.loads(b"cmtf_gradsync.timelines.timeline\\nTimeline\\n.") is gs.Timeline,
        importlib.reload(main) is command,
        importlib.reload(importlib.import_module("mtf_gradsync.xla")) is gs.xla,
        resources.files("mtf_gradsync.train") == resources.files("mtf_gradsync.tools.train"),
    ]
    out["itself"] = [
        main.__name__, main.__spec__.name, main.__package__, hasattr(main, "__path__"),
        inspect.getsource(command).startswith('\\"\\"\\"The command'),
        util.find_spec("mtf_gradsync.cluster").origin == gs.join_cluster.__code__.co_filename,
    ]
    out["functions"] += [inspect.isfunction(gs.xla.session)]
    out["missing"] = []
    for name in ("mtf_gradsync.xla.none", "mtf_gradsync.cluster.none", "mtf_gradsync.xlarge"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            out["missing"].append(error.name == name)
    del sys.modules["mtf_gradsync.train.cli.main"]  # as for `python -m`
    sys.argv = ["main", "--help"]
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        runpy.run_module("mtf_gradsync.train.cli.main", run_name="__main__", alter_sys=True)
    out["help"] = text.getvalue()
    print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def out():
    with Processes() as processes:
        process = processes.fork("-c", textwrap.dedent(PROGRAM))
        return json.loads(processes.wait(process).splitlines()[-1])


def code_lines(text):
    """How many lines of a file are neither blank, a comment nor a docstring."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {
        line for t in tokens if t.type not in NOT_CODE for line in range(t.start[0], t.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if documented and ast.get_docstring(node):
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def test_code_lines():
    assert (
        code_lines('"""Says."""\n\n# no\nx = f(\n    1,\n)  # yes\ndef f():\n    """S."""\n') == 4
    )


def test_what_an_import_loads(out):
    files = [pathlib.Path(file) for file in out["files"]]
    assert not [f for f in files if {"runtimes", "tools"} & set(f.relative_to(PACKAGE).parts)]
    # Newer versions of TensorFlow have no Estimator, and a file of stand-ins is loaded for it.
    files = [file for file in files if file.name != "estimator_stand_ins.py"]
    assert len(files) <= MOST_FILES
    assert sum(code_lines(file.read_text()) for file in files) <= MOST_LINES


def test_every_promised_name_is_seen():
    for name, room in ROOMS.items():
        listed = dir(room)
        for promised in room.__all__:
            assert promised in listed, (name, promised)
            value = getattr(room, promised)
            space = {}
            exec(f"from mtf_gradsync{name} import {promised} as it", space)
            assert space["it"] is value
        with pytest.raises(AttributeError, match=r"has no attribute 'nothing'"):
            _ = room.nothing
    for name in gs._ROOMS:
        assert name in dir(gs)
        assert importlib.import_module(f"mtf_gradsync.{name}") is getattr(gs, name)


def test_what_is_offered_to_runtimes_and_tools_is_what_its_page_lists():
    page = (ROOT / "docs" / "guides" / "own_wrapper.md").read_text()
    (table,) = re.findall(r"^## What runtimes and tools use\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    named = re.findall(
        r"`(\w+)`", "".join(line for line in table.splitlines(True) if line[0] == "|")
    )
    assert sorted(named) == sorted(extension.__all__)
    assert len(named) <= 100


def test_earlier_names_lead_to_the_same_modules(out):
    assert out["functions"] == [True] * 5
    assert out["same"] == [True] * 9
    name = "mtf_gradsync.tools.train.cli"
    assert out["itself"] == [f"{name}.main", f"{name}.main", name, False, True, True]
    assert out["missing"] == [True] * 3


def test_a_module_runs_by_its_earlier_name(out):
    assert "verify" in out["help"]


def test_gin_finds_what_is_not_loaded_yet_and_takes_it_when_it_is_locked(out):
    assert out["gin"] == [True, 3, False, True, "ElasticIslands"]


def test_what_is_offered_are_the_objects_that_type_checkers_see():
    text = (PACKAGE / "extension.py").read_text()
    (block,) = [node for node in ast.parse(text).body if isinstance(node, ast.If)]
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert sorted(seen) == sorted(extension.__all__)
    for name, module in seen.items():
        assert getattr(extension, name) is getattr(importlib.import_module(module), name)
    assert set(seen) <= set(dir(extension))
