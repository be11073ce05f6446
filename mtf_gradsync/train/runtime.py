"""Chooses the runtime of the training steps."""

from __future__ import annotations

from typing import NamedTuple, get_args

from mtf_gradsync import xla
from mtf_gradsync.runtimes import sessions
from mtf_gradsync.train.config.bindings import RunConfig, RuntimeName
from mtf_gradsync.train.errors import ConfigError

RUNTIMES = get_args(RuntimeName)

_WORDS = {
    "xla": "XLA devices",
    "cpu_replicas": "CPU replicas of the SIMD program",
    "placement_mesh": "a placement mesh",
}
# Bindings that have no effect except on a placement mesh.
_OF_PLACEMENT_MESHES = ("mesh_devices", "mesh_impl", "hooks")


class Runtime(NamedTuple):
    """The runtime of the training steps, and why it was chosen.

    Steps run on the server `target`; "" is this process.
    """

    name: sessions.RuntimeName
    reason: str
    target: str = ""

    def __str__(self) -> str:
        return f"{_WORDS[self.name]} ({self.reason})"


def choose_runtime(config: RunConfig, target: str = "") -> Runtime:
    """Returns the runtime that a config names, or the fastest that this environment has.

    `target` is the server of a cluster's chief where the run's mesh is over its tasks.
    """
    asked = config.runtime
    if asked not in RUNTIMES:
        raise ConfigError(f"train.run.runtime must be one of {', '.join(RUNTIMES)}; got {asked!r}")
    if target:
        if asked not in ("fastest", "placement_mesh"):
            raise ConfigError(
                f'train.run.runtime = "{asked}" does not run on a cluster of tf.train.Servers; '
                '"placement_mesh" does. For XLA devices of several processes give --coordinator, '
                "--num_processes and --process_id instead."
            )
        return Runtime("placement_mesh", "over the tasks of a cluster", target)
    bound = [name for name in _OF_PLACEMENT_MESHES if getattr(config, name)]
    if asked == "fastest":
        if bound:
            return Runtime("placement_mesh", f"train.run.{bound[0]} is bound")
        missing = xla.why_no_xla()
        if not missing:
            return Runtime("xla", "the fastest that is installed")
        return Runtime("cpu_replicas", f"the fastest without jax: {missing}")
    if bound and asked != "placement_mesh":
        raise ConfigError(
            f"train.run.{bound[0]} is for placement meshes, and train.run.runtime is "
            f'"{asked}". Remove one of them.'
        )
    if asked == "xla" and xla.why_no_xla():
        raise ConfigError(f'train.run.runtime = "xla": {xla.why_no_xla()}')
    return Runtime(asked, "train.run.runtime")
