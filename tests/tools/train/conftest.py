import contextlib
import itertools
from pathlib import Path
from unittest import mock

import gin
import pytest

from mtf_gradsync.runtimes.settings import enable_mesh_defaults
from mtf_gradsync.tools.train import gin_files, plots, run_files
from mtf_gradsync.tools.train import run as run_module
from mtf_gradsync.tools.train.metrics import read_metrics
from mtf_gradsync.tools.train.run import run

TINY = str(Path(__file__).with_name("tiny.gin"))


@pytest.fixture(autouse=True)
def mesh_defaults():
    enable_mesh_defaults()
    yield
    gin.clear_config()


# What surrounds the steps has nothing to do with a model axis, which makes graphs twice as large,
# nor with XLA's compiler, which takes as long as the rest of a run, nor with attention, which is a
# third of a graph.
NO_ATTENTION = "make_layer_stack.layers = [@DenseReluDense]"
ATTENTION = "make_layer_stack.layers = [@SelfAttention, @DenseReluDense]"
QUICK = [
    "train.run.mesh_shape = 'batch:2;model:1'",
    "train.run.runtime = 'cpu_replicas'",
    NO_ATTENTION,
]
FASTEST = "train.run.runtime = 'fastest'"
NO_EVAL = "train.run.eval_dataset_fn = None"
REPORTS = "train.run.reports = True"


def accumulates(passes=4, opt="AdafactorOptimizer", **more):
    """Bindings of a run that accumulates gradients around an optimizer; `more` in gin's words."""
    name = "GradientAccumulationOptimizer"
    given = {"opt": f"@{opt}", "backward_passes_per_step": passes, **more}
    return [f"train.run.optimizer = @{name}", *(f"{name}.{k} = {v}" for k, v in given.items())]


def metric(directory, name):
    """The values of a name in a run's file of metrics, by step."""
    rows = read_metrics(directory / run_files.METRICS_FILE)
    return {row["step"]: row[name] for row in rows if name in row}


def run_quietly(directory, with_plots=False):
    """Runs what gin says; returns the result and what was said. To draw takes longer than steps."""
    said = []
    with contextlib.ExitStack() as stack:
        if not with_plots:
            stack.enter_context(mock.patch.object(plots, "draw_plots", return_value=[]))
        return run(gin_files.bound_run_config(), str(directory), say=said.append), said


def train_tiny(directory, *bindings, with_plots=False, gin_file=TINY):
    """Runs tiny.gin with more bindings; returns the result, the directory and what was said."""
    gin_files.load([gin_file], [*QUICK, *bindings])
    result, said = run_quietly(directory, with_plots)
    return result, directory, said


@pytest.fixture
def after_step(monkeypatch):
    """Makes runs call a function after a number of their own steps; None lets them be."""
    at = {"left": None, "call": None}
    original = run_module.TrainingLoop

    def loop(runner, *args):
        dispatch, made = runner.dispatch, itertools.count(1)

        def dispatch_and_call():
            result = dispatch()
            if next(made) == at["left"]:
                at["call"]()
            return result

        runner.dispatch = dispatch_and_call
        return original(runner, *args)

    monkeypatch.setattr(run_module, "TrainingLoop", loop)
    return lambda left, call=None: at.update(left=left, call=call)


@pytest.fixture
def train(tmp_path):
    """`train_tiny` in directories of the test."""
    return lambda *bindings, model_dir="run", **more: train_tiny(
        tmp_path / model_dir, *bindings, **more
    )
