"""Where a model_fn's steps run: devices of a placement mesh, CPU replicas, or XLA devices."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, ContextManager, Literal, get_args

from mtf_gradsync import simd, xla
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.estimator.sessions import DeviceSessionCreator, ProgramSessionCreator
from mtf_gradsync.estimator.summaries import traffic_of_program
from mtf_gradsync.session import session_config

Runtime = Literal["placement_mesh", "cpu_replicas", "xla"]
RUNTIMES = get_args(Runtime)


def check_runtime(runtime: Runtime | None, use_tpu: bool, num_cores: int | None) -> Runtime:
    """The name of a runtime.

    Args:
      runtime: one of `RUNTIMES`, or None for what use_tpu says.
      use_tpu: whether the model_fn is to be called as for a TPU.
      num_cores: how many cores it is for.

    Returns:
      One of `RUNTIMES`.

    Raises:
      ValueError: there is no such runtime, it does not run here, or the number of cores is missing.
    """
    chosen: Runtime = runtime or ("xla" if use_tpu else "placement_mesh")
    if chosen not in RUNTIMES:
        raise ValueError(f"runtime must be one of {', '.join(RUNTIMES)}, or None; got {runtime!r}.")
    if chosen == "placement_mesh":
        return chosen
    if not num_cores:
        raise ValueError(
            f"On {chosen!r} the model_fn is one program for all cores, and their number is not "
            "known: give num_cores, or a TPUConfig with num_shards in config."
        )
    if chosen == "xla" and xla.why_no_xla():
        raise ValueError(
            f"The runtime 'xla' does not run here: {xla.why_no_xla()} 'cpu_replicas' runs the "
            "same program without jax."
        )
    return chosen


def _cpu_devices() -> int:
    """How many CPU devices the default graph names, at least 1."""
    specs = {op.device for op in tf.get_default_graph().get_operations()}
    named = [tf.DeviceSpec.from_string(spec) for spec in specs if spec]
    return 1 + max((x.device_index or 0 for x in named if x.device_type == "CPU"), default=0)


class OnDevices:
    """A placement mesh: TensorFlow operations on devices."""

    is_program = False

    def __init__(self, config: tf.ConfigProto | None):
        """Takes the configuration of its sessions."""
        self._config = config

    def building(self) -> ContextManager[Any]:
        """Within it the model_fn is called; gives what goes into params["context"]."""
        return contextlib.nullcontext()

    def sessions(
        self, spec: Any, scaffold: Any, checkpoint: Callable[[], ContextManager[str | None]]
    ) -> tf.train.SessionCreator:
        """Makes sessions that begin with a checkpoint, where there is one."""
        del spec
        config = self._config or session_config(num_cpu_devices=_cpu_devices())
        return DeviceSessionCreator(tf.get_default_graph(), config, scaffold, checkpoint)


class OnCores:
    """A SIMD program: all that the model_fn builds runs on each core."""

    is_program = True

    def __init__(self, name: str, num_cores: int):
        """Takes "cpu_replicas" or "xla", and the number of cores."""
        self._name = name
        self._num_cores = num_cores
        self._program: simd.Program | None = None

    @contextlib.contextmanager
    def building(self) -> Any:
        """Within it the model_fn is called; gives what goes into params["context"]."""
        with simd.tpu_program(f"all:{self._num_cores}", "") as program:
            self._program = program
            yield program.tpu_context

    def sessions(
        self, spec: Any, scaffold: Any, checkpoint: Callable[[], ContextManager[str | None]]
    ) -> tf.train.SessionCreator:
        """Makes sessions that begin with a checkpoint, where there is one."""
        program = self._program
        assert program is not None  # it has been built

        def make() -> Any:
            if self._name == "xla":
                return xla.session(program, spec)
            return program.session(spec)

        return ProgramSessionCreator(program.graph, make, scaffold, checkpoint)

    def traffic(self, spec: Any) -> dict[str, float]:
        """Bytes that a core puts into collectives in a step, by name."""
        assert self._program is not None  # it has been built
        return traffic_of_program(self._program, spec)
