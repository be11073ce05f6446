"""The command ``mtf-gradsync plan``."""

import json
import signal

import gin
import pytest

import mtf_gradsync as gs
from mtf_gradsync import xla
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.runtimes.simd.program import compiled_only
from mtf_gradsync.tools import planning
from mtf_gradsync.tools._private.gin import bindings, bound
from mtf_gradsync.tools.train import gin_files, model
from mtf_gradsync.tools.train.cli import main as cli
from mtf_gradsync.tools.train.cli import plan as command
from mtf_gradsync.tools.train.train_graph import steps_per_update
from tests.tools.planning.machines import interrupted_and_dropped
from tests.tools.train.conftest import TINY, accumulates

missing = xla.why_no_tpu_compiler()


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--jobs=0", "--jobs must be 1 or more; got 0"),
        ("--topologies=v9:2x2", "topology must name a TPU generation"),
        ("--topologies=cpu:8", "topology must name a TPU generation"),
        # On each mesh, however many cores it has.
        ("--gin_param=train.run.batch_size = 0", "train.run.batch_size"),
        ("--json=/no/such/directory/plan.json", "cannot be written"),
    ],
)
def test_what_cannot_be_is_a_bad_config(capsys, flag, message):
    assert cli.main(["plan", f"--gin_file={TINY}", flag]) == cli.EXIT_BAD_CONFIG
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "axes"),
    [(["--mesh_shape=rows:2;columns:2"], None), ([], ["batch", "model"])],
)
def test_the_configs_own_mesh_need_not_be_possible(monkeypatch, flags, axes):
    """Only its axes are taken, where no mesh is given."""
    asked = []

    def plan(build, topologies, layouts, mesh_shapes, axes, *unused, **unused_options):
        asked.append(axes)
        return planning.Plan(())

    monkeypatch.setattr(planning, "plan", plan)
    # 6 cannot be split into 4.
    own = "train.run.batch_size = 6", "train.run.mesh_shape = 'batch:4;model:2'"
    arguments = [f"--gin_file={TINY}", *(f"--gin_param={binding}" for binding in own), *flags]
    assert cli.main(["plan", *arguments]) == cli.EXIT_FAILED  # as that plan has no rows
    assert asked == [axes]


@pytest.mark.slow
def test_parameters_and_the_steps_of_an_update_are_those_of_the_config(monkeypatch):
    made = []

    def plan(build, *unused, **unused_options):
        with tf.Graph().as_default(), compiled_only():
            made.append(build("batch:2;model:2", "batch:batch"))
        return planning.Plan(())

    monkeypatch.setattr(planning, "plan", plan)
    recomputes = ["transformer.LayerStack.recompute_grads = True"]
    for bindings_ in ([], accumulates(), recomputes):
        cli.main(["plan", f"--gin_file={TINY}", *(f"--gin_param={one}" for one in bindings_)])
    # Embeddings of 260 bytes and 16 positions, four projections, two dense layers, three norms.
    by_hand = 260 * 16 + 16 * 16 + 4 * 16 * 16 + 2 * 16 * 32 + 3 * 16
    assert [one.parameters for one in made] == [by_hand] * 3
    assert [one.steps_per_update for one in made] == [1, 4, 1]
    # Of each token all weights but positions and norms, and the 16 that it attends to, twice.
    of_a_token = 6 * (260 * 16 + 4 * 16 * 16 + 2 * 16 * 32) + 12 * 16 * 16
    assert [one.model_flops for one in made] == [of_a_token * made[0].tokens] * 3


def test_steps_of_an_update_are_not_known_where_there_are_more_than_two_kinds():
    inner = mtf.optimize.SgdOptimizer(0.1)
    accumulation = gs.GradientAccumulationOptimizer(inner, 4)
    outer = gs.OuterOptimizer(inner, inner_steps=8, mesh_shape="all:8", layout="batch:all")
    changing = gs.GradientAccumulationOptimizer(inner, lambda step: 4)
    stacks = [(inner,), (accumulation, inner), (outer, inner), (outer, accumulation), (changing,)]
    assert [steps_per_update(stack) for stack in stacks] == [1, 4, 8, 1, 1]


@pytest.mark.parametrize(
    ("given", "price"), [("1.2", 1.2), ("v5e:1,v5p:4.2", {"v5e": 1.0, "v5p": 4.2}), (None, None)]
)
def test_a_price_is_one_number_or_one_for_each_generation(monkeypatch, given, price):
    asked = []
    monkeypatch.setattr(command, "plan_config", lambda *_, **given: asked.append(given["price"]))
    flags = [] if given is None else [f"--price={given}"]
    with pytest.raises(AttributeError):  # as that is no plan
        cli.main(["plan", f"--gin_file={TINY}", *flags])
    assert asked == [price]


@pytest.mark.parametrize("given", ["cheap", "-1", "v5e", "v5e:", "v5e:1,2", "v5e:1:2"])
def test_what_is_no_price_is_an_error(capsys, given):
    with pytest.raises(SystemExit):
        cli.main(["plan", f"--gin_file={TINY}", f"--price={given}"])
    assert "dollars for an hour of a chip, like 1.2" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--json", "--png"])
def test_a_full_disk_is_an_error_of_one_line_below_the_plan(capsys, monkeypatch, flag):
    monkeypatch.setattr(command, "plan_config", lambda *unused, **unused_options: planning.Plan(()))
    status = cli.main(["plan", f"--gin_file={TINY}", f"{flag}=/dev/full"])
    printed = capsys.readouterr()
    assert status == cli.EXIT_FAILED
    assert "no mesh can be planned" in printed.out
    assert f"{flag}=/dev/full cannot be written: No space left on device" in printed.err


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_python_drops_before_the_plan_begins_stops_it(capsys, monkeypatch, number):
    def resolved(config):
        interrupted_and_dropped(number)

    monkeypatch.setattr(model, "resolve_job", resolved)
    monkeypatch.setattr(planning, "plan", None)
    assert cli.main(["plan", f"--gin_file={TINY}"]) == 128 + number
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_exit_code_of_a_partial_plan_has_the_signal(capsys, monkeypatch, number):
    partial = planning.Plan((), (), True, 4, number)
    monkeypatch.setattr(command, "plan_config", lambda *unused, **unused_options: partial)
    assert cli.main(["plan", f"--gin_file={TINY}"]) == 128 + number
    assert "stopped: 4 not looked at" in capsys.readouterr().out


def test_optimizers_that_are_given_the_mesh_get_the_one_that_is_planned():
    shape, layout = "train.run.mesh_shape", "a/mtf_gradsync.ReplicaAxes.layout"
    wrapper = "mtf_gradsync.SyncReplicasOptimizer.mesh_shape"
    given = [
        "mesh = 'batch:4;model:2'",
        f"{shape} = %mesh",
        f"{wrapper} = %mesh",
        f"{layout} = 'batch:batch'",
        "mtf_gradsync.SyncReplicasOptimizer.replicas_to_aggregate = 3",
    ]
    gin_files.load([], given)
    before = bindings()
    with bound(gin_files.mesh_lines("batch:8", "batch:batch;heads:model")):
        assert gin.query_parameter(wrapper) == "batch:8"
        assert gin.query_parameter(layout) == "batch:batch;heads:model"
        # The run's own is replaced elsewhere.
        changed = {key for key, value in bindings().items() if value is not before[key]}
        assert {key[1:] for key in changed} == {
            ("mtf_gradsync.SyncReplicasOptimizer", "mesh_shape"),
            ("mtf_gradsync.ReplicaAxes", "layout"),
        }
    assert bindings() == before
    gin.clear_config()


@pytest.mark.slow
@pytest.mark.tpu
@pytest.mark.skipif(bool(missing), reason=missing)
def test_plans_the_transformer_of_a_config(capsys, tmp_path):
    json_file, png_file = tmp_path / "plan.json", tmp_path / "plan.png"
    status = cli.main(
        [
            "plan",
            f"--gin_file={TINY}",
            "--topologies=v5e:2x2",
            "--mesh_shape=batch:4;model:1",
            "--mesh_shape=batch:1;model:4",
            "--mesh_shape=batch:8;model:1",
            f"--json={json_file}",
            f"--png={png_file}",
        ]
    )
    assert status == 0
    printed = capsys.readouterr().out
    plan = json.loads(json_file.read_text())
    assert [row["mesh_shape"] for row in plan["rows"]] == ["batch:4;model:1"]
    assert plan["rows"][0]["tokens_per_second"] == pytest.approx(
        8 * 16 / plan["rows"][0]["step_seconds"]
    )
    reasons = {refused["mesh_shape"]: refused["reason"] for refused in plan["refused"]}
    assert reasons["batch:8;model:1"] == "The mesh has 8 cores and the topology 4"
    # Two heads.
    assert "model:4, which does not divide heads = 2" in reasons["batch:1;model:4"]
    assert reasons["batch:1;model:4"] in " ".join(printed.split())  # lines end between words
    assert png_file.stat().st_size
