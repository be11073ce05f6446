"""``mtf-gradsync plan --best``: from a config to lines of gin, and the proof of them."""

import functools
import os
import signal

import gin
import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync import simd, xla
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes._common import ConfigError
from mtf_gradsync.runtimes._signals import Interruption, signal_of
from mtf_gradsync.tools._private.gin import bindings, bound
from mtf_gradsync.tools.planning import best as planning_best
from mtf_gradsync.tools.planning.best import Choice
from mtf_gradsync.tools.planning.costs import Predicted
from mtf_gradsync.tools.planning.stacks import StackSettings
from mtf_gradsync.tools.train import best_division, gin_files
from mtf_gradsync.tools.train.best_division import BestDivision
from mtf_gradsync.tools.train.cli import main as cli
from mtf_gradsync.tools.train.model import MeshModel, placeholders, resolve_job
from mtf_gradsync.tools.train.train_graph import model_and_optimizer
from mtf_gradsync.tools.verification.verdicts import DivisionResult, Verification
from tests.tools.planning.machines import Counting
from tests.tools.train.conftest import NO_EVAL, QUICK, TINY, accumulates, run_quietly

LAYOUT = "batch:batch;d_ff:model;heads:model;vocab:model"
missing = xla.why_no_tpu_compiler()


def choice_of(stack, mesh_shape="batch:4;model:2", layout=LAYOUT):
    return Choice(mesh_shape, layout, stack, Predicted(1.0, 1.0))


def loaded(*params, files=(TINY,)):
    gin_files.load(files, params)
    return BestDivision([LAYOUT], 8)


ALL = [
    StackSettings(),
    StackSettings(sharded_updates=True),
    StackSettings(2, "local"),
    StackSettings(2, "synced"),
    StackSettings(2, "sharded"),
    StackSettings(2, "local", True),
    StackSettings(2, "sharded", True),
    StackSettings(inner_steps=10),
]
SAME = [
    "ClipByGlobalNormOptimizer.opt = @AdafactorOptimizer",
    "ClipByGlobalNormOptimizer.clip_norm = 1.0",
]


def described_when_applied():
    """Returns what `gs.describe` says of the loaded config's optimizer once it has an update."""
    job = resolve_job(gin_files.bound_run_config())
    mesh = job.model.mesh.shape, job.model.mesh.layout
    with tf.Graph().as_default(), simd.tpu_program(*mesh):
        model, step = MeshModel(job.model), tf.train.get_or_create_global_step()
        _, pairs, opt, _ = model_and_optimizer(job, model, placeholders(job), step)
        opt.apply_grads([g for g, _ in pairs], [v for _, v in pairs])
        return str(gs.describe(opt))


@functools.lru_cache
def step_costs():
    return loaded().step_costs()


def variables():
    return step_costs()[1]


def test_frozen_variables_cost_no_gradients():
    groups = "train.run.optimizer = @CrossShardOptimizer", "CrossShardOptimizer.opt = @ByVariable"
    frozen = 'ByVariable.groups = [("embedding", None)]', "ByVariable.opt = @AdafactorOptimizer"
    whole, some = loaded().step_costs(), loaded(*groups, *frozen).step_costs()
    names = [v.name for v in some[1]]
    assert len(names) == len(whole[1])
    kept = sum("embedding" not in name for name in names)
    assert sum(some[0].gradients.values()) == kept < sum(whole[0].gradients.values())


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("stack", "clipped"),
    [*((stack, False) for stack in ALL), (ALL[1], True), (ALL[-2], True)],
    ids=str,
)
def test_lines_of_gin_make_the_optimizer_that_is_described(stack, clipped):
    more = ["CrossShardOptimizer.opt = @ClipByGlobalNormOptimizer", *SAME] if clipped else []
    trained = variables()  # which may load another config
    best = loaded(*more)
    choice = choice_of(stack)
    lines, described = best.gin_lines(choice), best.describe_optimizer(choice, trained)
    # As a user would: at the end of the config.
    gin_files.load([TINY], [*more, *lines])
    config = gin_files.bound_run_config()
    assert config.mesh_shape == choice.mesh_shape
    assert config.batch_size * stack.steps == 8
    assert described_when_applied() == described
    assert ("clip" in described) == clipped
    for word, is_there in (
        ("each replica its part", stack.sharded_updates or stack.sums == "sharded"),
        ("every 2nd", stack.steps == 2),
    ):
        assert (word in described) == is_there or stack.sums == "sharded"


def test_lengths_of_the_run_count_microbatch_steps():
    best = loaded(
        "train.run.log_steps = 3",
        "train.run.total_run_steps = 20",
        "train.run.watch_copies_steps = 2",
    )
    lines = best.gin_lines(choice_of(StackSettings(4, "local")))
    assert "train.run.batch_size = 2" in lines
    assert "train.run.train_steps = 48" in lines
    assert "train.run.total_run_steps = 80" in lines
    assert "train.run.save_checkpoints_steps = 24" in lines
    assert "train.run.perplexity_eval_steps = 12" in lines
    assert "train.run.watch_copies_steps = 8" in lines
    assert not any("max_steps_without_decrease" in line for line in lines)
    assert "train.run.schedule_step = @get_update_step" in lines
    assert not any("train_steps" in line for line in best.gin_lines(choice_of(StackSettings())))


@pytest.mark.slow
def test_the_lines_train_the_same_as_the_config(tmp_path):
    """With a schedule and a clip, and with microbatch steps where the config has none."""
    config = [
        *(*QUICK[1:], NO_EVAL),
        "import mesh_tensorflow.transformer.learning_rate_schedules",
        "train.run.learning_rate_schedule = [0.02, @learning_rate_schedules.linear_decay]",
        "linear_decay.steps_or_fraction = 0.5",
        "train.run.train_steps = 4",
        "CrossShardOptimizer.opt = @ClipByGlobalNormOptimizer",
        "ClipByGlobalNormOptimizer.clip_norm = 0.5",
        "ClipByGlobalNormOptimizer.opt = @AverageOptimizer",
        "AverageOptimizer.opt = @AdafactorOptimizer",
    ]
    lines = loaded(*config).gin_lines(choice_of(StackSettings(2, "sharded", True), "batch:4"))
    found = []
    for name, more in (("config", []), ("divided", lines)):
        gin_files.load([TINY], [*config, *more])
        run_quietly(tmp_path / name)
        reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(tmp_path / name))
        found.append({x: reader.get_tensor(x) for x in reader.get_variable_to_shape_map()})
    before, after = found
    assert after["global_step"] == 2 * before["global_step"]
    others = set(before) - {"global_step"}
    assert len(others) > 15
    for name in others:
        np.testing.assert_allclose(after[name], before[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_devices_of_another_mesh_are_not_kept():
    devices = "train.run.mesh_devices = ['cpu:0', 'cpu:1', 'cpu:2', 'cpu:3']"
    lines = loaded(devices).gin_lines(choice_of(StackSettings()))
    gin_files.load([TINY], [devices, *lines])
    assert resolve_job(gin_files.bound_run_config()).model.mesh.shape.size == 8
    assert "train.run.mesh_devices = None" not in loaded().gin_lines(choice_of(StackSettings()))


@pytest.mark.parametrize(
    ("mesh_shape", "layout"),
    [
        *(("all:1", ""), ("all:4", "batch:all"), ("all:2;model:2", "batch:all")),
        ("all:4", "batch:all;vocab:model"),
    ],
)
def test_a_layout_that_does_not_split_the_model_is_completed(mesh_shape, layout):
    costs, _ = step_costs()
    gin_files.load(
        [TINY], [f"train.run.mesh_shape = '{mesh_shape}'", f"train.run.layout_rules = '{layout}'"]
    )
    found = {}
    for completes in (True, False):
        best = BestDivision([layout], 1, completes)
        choices, _ = best.predict_choices(costs, Counting(memory=None), None)
        found[completes] = {choice[:2] for choice in choices}
    last = {"all:4;model:1"} if "model" in mesh_shape else {"all:4"}
    assert found[False] == {(shape, layout) for shape in last if layout}
    assert found[True] == {
        *((shape, layout or "batch:all") for shape in last),
        *(("all:2;model:2", f"batch:all;{more}") for more in TWO_WAYS),
        *(("all:1;model:4", f"batch:all;{more}") for more in TWO_WAYS if "heads" not in more),
    }


def test_dimensions_along_the_batch_s_axis_are_not_split_along_another_too(monkeypatch):
    costs, _ = step_costs()
    monkeypatch.setattr(best_division, "MOST_RULES", 3)
    monkeypatch.setattr(planning_best, "MOST_RULES", 3)
    layout = "batch:all;d_model:all"
    gin_files.load(
        [TINY], ["train.run.mesh_shape = 'all:4'", f"train.run.layout_rules = '{layout}'"]
    )
    choices, _ = BestDivision([layout], 1, True).predict_choices(costs, Counting(memory=None), None)
    layouts = {choice.layout for choice in choices if "model:2" in choice.mesh_shape}
    most = [
        f"batch:all;{more}" for more in TWO_WAYS if "d_ff" not in more and "d_model" not in more
    ]
    assert layouts == set(most)


# The dimensions of the tiny model's variables that a mesh can split, together or alone.
TWO_WAYS = [
    *("d_model:model", "vocab:model", "heads:model", "d_ff:model", "vocab:model;heads:model"),
    *("vocab:model;d_ff:model", "heads:model;d_ff:model", "vocab:model;heads:model;d_ff:model"),
]


ACCUMULATES = accumulates()
AVERAGE = "GradientAccumulationOptimizer.average_aggregated_gradients = True"
COUNTS = "train.run.schedule_step = @get_update_step"
SGD = "GradientAccumulationOptimizer.opt = @SgdOptimizer"
OWN_DECAY = "AdafactorOptimizer.decay_rate = @adafactor_decay_rate_pow()"
NOAM = "train.run.learning_rate_schedule = @learning_rate_schedules.learning_rate_schedule_noam"
PER_UPDATE = [
    "train.run.learning_rate_schedule = @per_update()",
    "per_update.schedule = @learning_rate_schedules.learning_rate_schedule_noam",
    "per_update.backward_passes_per_step = 4",
]


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ([], ""),
        ([OWN_DECAY], "decay_rate of AdafactorOptimizer follows microbatch steps"),
        ([NOAM, PER_UPDATE[-1]], ""),  # which nothing calls, as in t5_gradsync.gin
        (PER_UPDATE, "decay_rate of AdafactorOptimizer follows microbatch steps"),
        ([COUNTS, *PER_UPDATE], "schedule_step and per_update.backward_passes_per_step both"),
        ([*ACCUMULATES, AVERAGE, COUNTS], ""),
        ([*ACCUMULATES, AVERAGE, COUNTS, OWN_DECAY], "decay_rate of AdafactorOptimizer follows"),
        ([*ACCUMULATES, AVERAGE], "decay_rate of AdafactorOptimizer follows microbatch steps"),
        ([*ACCUMULATES, AVERAGE, *PER_UPDATE], "decay_rate of AdafactorOptimizer follows"),
        ([*ACCUMULATES, AVERAGE, SGD], ""),
        ([*ACCUMULATES, AVERAGE, SGD, *PER_UPDATE], ""),
        (
            [*ACCUMULATES, AVERAGE, SGD, NOAM],
            "its learning rate follows microbatch steps",
        ),
    ],
)
def test_steps_may_change_only_if_all_settings_count_updates(params, why):
    best = loaded(*params)
    assert why in best.fixed
    assert bool(best.fixed) == bool(why) == (len(best.steps) == 1)


@pytest.mark.parametrize("outside", [True, False], ids=["around", "inside"])
def test_what_stands_around_the_accumulation_is_refused(outside):
    """A clip of each microbatch's gradients does not become one of their average."""
    order = ["ClipByGlobalNormOptimizer", "GradientAccumulationOptimizer"][:: 1 if outside else -1]
    params = [
        *(*ACCUMULATES, AVERAGE, "ClipByGlobalNormOptimizer.clip_norm = 1.0"),
        'GradientAccumulationOptimizer.accumulate = "synced"',
        "train.run.optimizer = @AverageOptimizer",
        f"AverageOptimizer.opt = @{order[0]}",
        f"{order[0]}.opt = @{order[1]}",
        f"{order[1]}.opt = @AdafactorOptimizer",
    ]
    if not outside:
        chain = loaded(*params).gin_lines(choice_of(StackSettings(4, "local")))
        assert "GradientAccumulationOptimizer.opt = @AverageOptimizer" in chain
        assert "AverageOptimizer.opt = @ClipByGlobalNormOptimizer" in chain
        return
    with pytest.raises(
        ConfigError, match=r"ClipByGlobalNormOptimizer stands around Grad\w+, .* of 4 "
    ):
        loaded(*params)
    single = "GradientAccumulationOptimizer.backward_passes_per_step = 1"
    assert loaded(*params, single).steps  # then both are the same


def test_what_is_around_a_loss_scale_stays_around_it():
    best = loaded(
        "CrossShardOptimizer.opt = @ClipByGlobalNormOptimizer",
        "ClipByGlobalNormOptimizer.clip_norm = 1.0",
        "ClipByGlobalNormOptimizer.opt = @LossScaleOptimizer",
        "LossScaleOptimizer.opt = @AdafactorOptimizer",
    )
    lines = best.gin_lines(choice_of(StackSettings(sharded_updates=True)))
    assert "train.run.optimizer = @ClipByGlobalNormOptimizer" in lines
    assert "LossScaleOptimizer.opt = @ShardedUpdateOptimizer" in lines


def test_a_config_that_accumulates_keeps_the_batch_of_an_update():
    best = loaded(*ACCUMULATES, AVERAGE, COUNTS)
    assert best.steps == [1, 2, 4, 8]
    lines = best.gin_lines(choice_of(StackSettings(2, "local")))
    assert "train.run.batch_size = 16" in lines
    assert "train.run.train_steps = 6" in lines
    single = best.gin_lines(choice_of(StackSettings()))
    assert "train.run.batch_size = 32" in single
    assert "train.run.optimizer = @CrossShardOptimizer" in single
    # A sum of gradients is another one of another number of steps.
    best = loaded(*ACCUMULATES)
    assert best.steps == [4]
    assert "adds up gradients" in best.fixed


def test_what_counts_updates_counts_the_new_ones():
    best = loaded(files=["lm_accumulate.gin"])
    lines = best.gin_lines(choice_of(StackSettings(8, "local")))
    for name in ("per_update", "adafactor_decay_rate_per_update"):
        assert f"{name}.backward_passes_per_step = 8" in lines
    assert 'GradientAccumulationOptimizer.mesh_shape = "batch:4;model:2"' in lines
    assert not any("schedule_step" in line for line in lines)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (["train.run.optimizer = @SyncReplicasOptimizer"], "SyncReplicasOptimizer decides by its"),
        (["train.run.optimizer = @OuterOptimizer"], "--outer_steps considers outer steps"),
        (
            ["CrossShardOptimizer.reducer = @QuantizedAllReduce()"],
            "binds CrossShardOptimizer.reducer",
        ),
        (["train.run.optimizer = 3"], "is no reference such as @AdafactorOptimizer; got 3"),
        (
            [*ACCUMULATES, "GradientAccumulationOptimizer.flush = @is_last_step"],
            "binds GradientAccumulationOptimizer.flush",
        ),
    ],
)
def test_stacks_that_cannot_be_divided_anew_are_refused(params, message):
    opts = ["SyncReplicasOptimizer.opt = @AdafactorOptimizer",
            "OuterOptimizer.opt = @AdafactorOptimizer"]  # fmt: skip
    with pytest.raises(ConfigError, match=message):
        loaded(*opts, *params)


def test_bindings_in_a_block_are_gone_behind_it():
    gin_files.load([TINY], [])
    before = bindings()
    with bound(["train.run.batch_size = 2", "d_model = 4"]):
        assert gin.query_parameter("train.run.batch_size") == 2
        assert gin.query_parameter("d_model/gin.macro.value") == 4
    assert bindings() == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--best"], "--best needs --chips, as in --chips=v5e:256; got None"),
        (["--chips=v5e:4"], "--chips is for plan --best"),
        (["--no_proof"], "--no_proof is for plan --best"),
        (["--best", "--chips=v5e:4", "--topologies=v5e:2x2"], "--chips names them"),
        (["--best", "--chips=v5e:4", "--price=1"], "--price does not go with --best"),
        (["--best", "--chips=v5e:4", "--png=a.png"], "--png does not go with --best"),
        (["--best", "--chips=v5e:4", "--jobs=2"], "--jobs=2 does not go with --best"),
        (["--best", "--chips=v5e:4", "--inner_steps=3"], "only where --outer_steps is given"),
        (
            ["--best", "--chips=v5e:4", "--budget-bytes=0"],
            "--budget_bytes must be more than 0; got 0",
        ),
        (["--best", "--chips=v5e:4", "--mesh_shape=batch"], "mesh_shape = 'batch' cannot be read"),
        (["--best", "--chips=v5e:4", "--layout=batch"], "layout_rules = 'batch' cannot be read"),
        (["--best", "--chips=v5e:3"], "how 3 chips of v5e are arranged"),
        (["--best", "--chips=v9:4"], "topology must name a TPU generation"),
    ],
)
def test_flags_that_contradict_each_other(capsys, flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", f"--gin_file={TINY}", *flags]) == cli.EXIT_BAD_CONFIG
    assert message in capsys.readouterr().err


class Chips(Counting):
    """Cores on which links take all of the time, and whose compiler says what it is told to."""

    peak_flops_per_core = bytes_per_second_per_core = 1e15

    def seconds(self, operation, groups, size):
        return 1e-3 + 1e-6 * size

    def compile(self, lowered, begun):
        compiled = super().compile(lowered, begun)
        return compiled._replace(bytes_per_core=10_000)


def run(verdict="equal", **given):
    """Returns what is said, and the exit code, with a proof that ends in a verdict.

    With None for `verdict` the proof is a real one.
    """
    said = []
    line = DivisionResult("as configured", "", "", "cpu_replicas", verdict, is_asked=True)
    proof = Verification((line,), "one core", "float64", 1, (1,), 1)
    with pytest.MonkeyPatch.context() as patch:
        if verdict is not None:
            patch.setattr(best_division, "verify_config", lambda **unused: proof)
        gin_files.load([TINY], [])
        _, code = best_division.find_and_prove(
            Chips(memory=None), [LAYOUT], most_steps=2, say=said.append, **given
        )
    return "\n".join(said), code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verdict", "code", "words"),
    [("NOT EQUAL", 1, "Not the same training: "), ("not shown", 3, "Not shown: ")],
)
def test_the_verdict_of_the_proof_is_that_of_the_command(verdict, code, words):
    said, found = run(verdict, mesh_shapes=["batch:4;model:1"])
    assert found == code
    assert said.splitlines()[-1] == f"{words}as configured."
    assert "train.run.mesh_shape = " in said
    assert "(batches of 8 sequences of 16 tokens)" in said


@pytest.mark.slow
def test_sigterm_while_a_compiler_works_is_the_number_of_the_interrupt(monkeypatch):
    compile_it = Chips.compile

    def signalled(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return compile_it(*arguments)

    monkeypatch.setattr(Chips, "compile", signalled)
    with pytest.raises(KeyboardInterrupt) as raised, Interruption():
        run(mesh_shapes=["batch:4;model:1"])
    assert signal_of(raised.value) == signal.SIGTERM


@pytest.mark.slow
def test_none_fits_is_a_failure_that_names_the_nearest():
    said, code = run(budget=100.0)
    assert code == 1
    assert "None fits into 100 bytes a core. The nearest is batch:" in " ".join(said.split())
    assert "train.run." not in said


@pytest.mark.slow
def test_outer_steps_are_said_to_change_the_training():
    said, code = run(verdict=None, inner_steps=(1000,), mesh_shapes=["batch:4;model:1"])
    assert code == 0
    assert "an outer step after 1000 steps" in said
    assert "Outer steps change what is trained" in said
    assert "(outer steps after 4 steps, batches of 8 sequences of 16 tokens)" in said


@pytest.mark.slow
@pytest.mark.tpu
@pytest.mark.skipif(bool(missing), reason=missing)
def test_from_plan_to_proof_in_one_command(capsys, tmp_path):
    flags = ["--best", "--chips=v5e:4", "--most_steps=2", f"--json={tmp_path / 'best.json'}"]
    assert cli.main(["plan", f"--gin_file={TINY}", *flags]) == 0
    said = capsys.readouterr().out
    assert "The TPU compiler, with the whole model" in said
    assert said.rstrip().endswith("The same training, however it is divided.")
    assert (tmp_path / "best.json").is_file()
    # The printed lines, behind the config in a file.
    _, after = said.split("Lines for the end of the config:\n\n")
    lines, described = after.split("\n\nWhat its optimizer does:\n\n")
    own = tmp_path / "own.gin"
    own.write_text(f'include "{TINY}"\n{lines}\n')
    gin_files.load([str(own)], [])
    assert described.startswith(described_when_applied())
