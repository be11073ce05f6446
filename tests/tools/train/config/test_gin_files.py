"""What can be bound on train.run, and the guide's table of it."""

import dataclasses
import inspect
import re
import textwrap
from pathlib import Path

import gin
import pytest

import mtf_gradsync
from mtf_gradsync.runtimes._common import ConfigError
from mtf_gradsync.tools.train import gin_files
from mtf_gradsync.tools.train.config import RunConfig
from tests.runtimes.cluster.processes import Processes
from tests.tools.train.conftest import TINY

GUIDE = Path(__file__).parents[4] / "docs" / "training.md"
FIELDS = dataclasses.fields(RunConfig)


def table():
    """The default that the guide gives for each binding."""
    section = GUIDE.read_text().partition("## The bindings of `train.run`")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", section, re.MULTILINE))


def test_the_guide_lists_every_binding_with_its_default():
    written = {
        field.name: "required" if field.default is gin.REQUIRED else str(field.default)
        for field in FIELDS
    }
    shown = {name: text.strip("`").replace('"', "'") for name, text in table().items()}
    for name in ("model_type", "runtime"):
        shown[name] = shown[name].strip("'")
    assert shown == written


def test_the_docstring_lists_every_binding():
    listed = re.findall(r"^  (\w+): ", inspect.getdoc(RunConfig), re.MULTILINE)
    assert listed == [field.name for field in FIELDS]


def test_gin_fills_it():
    gin_files.load([TINY], ["train.run.seed = 7"])
    config = gin_files.bound_run_config()
    assert (config.seed, config.train_steps, config.log_steps) == (7, 12, 1)
    assert config.mesh_shape == "batch:2;model:2"
    assert config.keep_checkpoint_max is None
    assert RunConfig(seed=8).seed == 8
    assert "train.run.seed = 7" in gin.operative_config_str()


def test_what_is_required_is_asked_for():
    gin_files.load([], ["train.run.train_steps = 1"])
    with pytest.raises(ConfigError) as raised:
        gin_files.bound_run_config()
    required = [field.name for field in FIELDS if field.default is gin.REQUIRED]
    missing = [f"train.run.{name}" for name in required if name != "train_steps"]
    assert str(raised.value) == f"Missing in the config: {', '.join(missing)}"


def test_parameters_of_t5_mean_the_same(tmp_path):
    more = tmp_path / "more.gin"
    more.write_text("""
        utils.run.total_run_steps = 5
        utils.run.train_steps = 999
        utils.run.iterations_per_loop = 7
    """)
    # Of files, train.run counts, which configs of this package bind; a flag overrides both.
    flags = ["utils.run.keep_checkpoint_max = 3", "utils.run.mesh_shape = 'batch:4'"]
    ignored = gin_files.load([TINY, str(more)], flags)
    config = gin_files.bound_run_config()
    assert (config.keep_checkpoint_max, config.train_steps) == (3, 12)
    assert config.total_run_steps == 5
    assert config.mesh_shape == "batch:4"
    assert ignored == [
        "utils.run.train_steps (train.run.train_steps counts)",
        "utils.run.iterations_per_loop",
    ]
    steps = "run.total_run_steps ="
    gin_files.load([TINY], [f"utils.{steps} 1", f"train.{steps} 2", f"utils.{steps} 1"])
    assert gin_files.bound_run_config().total_run_steps == 1


def test_a_macro_that_nothing_uses_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing .* uses the macro 'num_layer'; .*num_layers\?"):
        gin_files.load([TINY], ["num_layer = 4"])
    more = tmp_path / "more.gin"
    more.write_text("num_layer = 4\nWIDTH = 8\nd_ff = %WIDTH")
    (ignored,) = gin_files.load([TINY, str(more)], ["num_layer = 5", "WIDTH = 16", "d_model = 8"])
    assert ignored == "num_layer (a macro that nothing uses)"
    assert gin.query_parameter("WIDTH/gin.macro.value") == 16
    # A later flag for a parameter may leave the macro of an earlier flag without a use.
    gin_files.load([TINY, str(more)], ["WIDTH = 16", "d_ff = 4"])
    gin_files.load([TINY], ["WIDTH = 16", "d_ff = %WIDTH", "d_ff = 4"])
    assert gin.query_parameter("d_ff/gin.macro.value") == 4
    with pytest.raises(ConfigError, match="uses the macro 'WIDTH'"):
        gin_files.load([TINY, str(more)], ["d_ff = 4", "WIDTH = 16"])


@pytest.mark.slow
def test_nothing_is_left_to_register_once_a_config_is_read():
    """gin refuses that, so a config with data of its own would fail where ours are first used."""
    package = Path(mtf_gradsync.__file__).parent
    named = [
        ".".join(path.relative_to(package.parent).with_suffix("").parts)
        for room in ("islands", "train")
        for path in sorted((package / "tools" / room).rglob("*.py"))
        if re.search(r"^@(gin\.|late_)configurable", path.read_text("utf-8"), re.MULTILINE)
    ]
    assert {"mtf_gradsync.tools.train.data.datasets", "mtf_gradsync.tools.islands.elastic"} < set(
        named
    )
    program = f"""
        import importlib
        from mtf_gradsync.tools.train import gin_files
        gin_files.load([], [])
        for name in {named}:
            importlib.import_module(name)
        print("all")
    """
    with Processes() as processes:
        assert processes.wait(processes.fork("-c", textwrap.dedent(program))).endswith("all\n")


_ALL_LOADED = """
import importlib, pkgutil
import gin
from mtf_gradsync.tools import train
from mtf_gradsync.tools.train import gin_files

gin.finalize()
for module in pkgutil.walk_packages(train.__path__, train.__name__ + "."):
    importlib.import_module(module.name)
print("all")
"""


@pytest.mark.slow
def test_nothing_of_train_registers_names_once_a_config_is_read():
    """The commands import most of it afterwards."""
    with Processes() as processes:
        assert processes.wait(processes.fork("-c", _ALL_LOADED)).endswith("all\n")
