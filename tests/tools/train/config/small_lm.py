"""Runs the language models of configs/, made small."""

from pathlib import Path

from mtf_gradsync.tools.train import gin_files
from tests.tools.train.conftest import NO_ATTENTION, NO_EVAL, metric, run_quietly

CONFIGS = Path(__file__).parents[4] / "configs"
SMALL = [
    "num_layers = 1",
    "d_model = 16",
    "d_ff = 32",
    "num_heads = 2",
    "d_kv = 8",
    "Unitransformer.max_length = 16",
    "train.run.sequence_length = 16",
    "train.run.batch_size = 8",
    NO_EVAL,
    "train.run.log_steps = 1",
    "train.run.mesh_devices = None",
    "train.run.runtime = 'cpu_replicas'",
    "train.run.reports = False",
    NO_ATTENTION,
]


def train(config, directory, mesh_shape, steps, *bindings):
    """Trains a config's model.

    Args:
      config: the file's name.
      directory: of the run.
      mesh_shape: instead of the config's.
      steps: of the whole run.
      *bindings: more of them.
    """
    # The configs name their mesh once, for the run and for wrappers that ask for it, or only here.
    text = (CONFIGS / config).read_text(encoding="utf-8")
    name = "mesh_shape" if "%mesh_shape" in text else "train.run.mesh_shape"
    more = [f"{name} = '{mesh_shape}'", f"train.run.train_steps = {steps}"]
    gin_files.load([str(CONFIGS / config)], [*SMALL, *more, *bindings])
    run_quietly(directory)


def losses(directory):
    """The loss of each step."""
    return [*metric(directory, "loss").values()]
