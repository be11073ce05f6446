"""What is trained under faults: runtimes and configs."""

from __future__ import annotations

from pathlib import Path
from typing import Callable, NamedTuple, Sequence

from benchmarks.cluster import free_ports

TINY = Path(__file__).resolve().parents[1] / "tools" / "train" / "tiny.gin"
STEPS, SAVE_EVERY, KEEP = 24, 3, 3
# How long a process of several may be silent before the others give it up.
SILENCE_S = 15.0
# For the others, less than `faults.LIMIT_S`: one that is hit before they meet never comes.
TIMEOUT_S = 25.0
_WAITS = (f"--silence={SILENCE_S}", f"--timeout={TIMEOUT_S}")

_COMMON = (
    "train.run.mesh_shape = 'batch:2;model:1'",
    "train.run.eval_dataset_fn = None",
    # A third of a graph, and nothing that a fault would find there.
    "make_layer_stack.layers = [@DenseReluDense]",
    f"train.run.train_steps = {STEPS}",
    f"train.run.save_checkpoints_steps = {SAVE_EVERY}",
    f"train.run.keep_checkpoint_max = {KEEP}",
)
_LAYOUT = "batch:batch,d_ff:model,heads:model,vocab:model"
_LOCAL = "mesh_shape = 'batch:2;model:1'", f"layout = '{_LAYOUT}'"

CONFIGS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "accumulation": (
        "train.run.optimizer = @GradientAccumulationOptimizer",
        "GradientAccumulationOptimizer.opt = @AdafactorOptimizer",
        "GradientAccumulationOptimizer.backward_passes_per_step = 3",
        "GradientAccumulationOptimizer.accumulate = 'local'",
        *(f"GradientAccumulationOptimizer.{one}" for one in _LOCAL),
    ),
    "sync replicas": (
        "train.run.optimizer = @SyncReplicasOptimizer",
        "SyncReplicasOptimizer.opt = @AdafactorOptimizer",
        "SyncReplicasOptimizer.replicas_to_aggregate = 2",
        *(f"SyncReplicasOptimizer.{one}" for one in _LOCAL),
    ),
    "sharded updates": (
        "train.run.optimizer = @ShardedUpdateOptimizer",
        "ShardedUpdateOptimizer.opt = @AdamWeightDecayOptimizer",
        "ShardedUpdateOptimizer.min_size = 16",
        *(f"ShardedUpdateOptimizer.{one}" for one in _LOCAL),
    ),
}


class Runtime(NamedTuple):
    """What runs the steps.

    Attributes:
      name: for people.
      binding: the value of train.run.runtime.
      flags: gives the flags of each process, process 0 first.
      num_processes: how many there are.
      devices: of its mesh, where they are on tasks of a cluster.
    """

    name: str
    binding: str
    flags: Callable[[], Sequence[Sequence[str]]]
    num_processes: int = 1
    devices: tuple[str, ...] = ()


def _alone() -> list[list[str]]:
    return [[]]


def _cluster() -> list[list[str]]:
    ports = free_ports(3)
    spec = f"worker=127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}"
    flags = [f"--cluster_spec={spec}", "--job_name=worker", f"--watch_port={ports[2]}"]
    return [[*flags, f"--task_index={i}", *_WAITS] for i in range(2)]


_DEVICES_OF_TASKS = tuple(f"/job:worker/task:{i}/device:CPU:0" for i in range(2))


def _xla_processes() -> list[list[str]]:
    flags = [f"--coordinator=127.0.0.1:{free_ports(1)[0]}", "--num_processes=2"]
    return [[*flags, f"--process_id={i}", *_WAITS] for i in range(2)]


RUNTIMES = {
    one.name: one
    for one in (
        Runtime("placement mesh", "placement_mesh", _alone),
        Runtime("CPU replicas", "cpu_replicas", _alone),
        Runtime("XLA devices", "xla", _alone),
        Runtime("XLA devices of two processes", "xla", _xla_processes, num_processes=2),
        Runtime("cluster of two", "placement_mesh", _cluster, 2, _DEVICES_OF_TASKS),
    )
}


def other_config(config: str) -> str:
    """The config that runs of this one are confused with."""
    names = list(CONFIGS)
    return names[(names.index(config) + 1) % len(names)]


def bindings(binding: str, config: str) -> list[str]:
    """What gin binds for a value of train.run.runtime and a config, by its name."""
    return [*_COMMON, f"train.run.runtime = '{binding}'", *CONFIGS[config]]


def command(runtime: Runtime, config: str, flags: Sequence[str], directory: Path) -> list[str]:
    """Arguments of ``mtf-gradsync`` for one process of a run."""
    return [
        "train",
        f"--gin_file={TINY}",
        f"--model_dir={directory}",
        *(f"--gin_param={one}" for one in bindings(runtime.binding, config)),
        *flags,
    ]
