"""The runtimes: devices of a placement mesh, CPU replicas, and XLA devices."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, ContextManager, Iterator, Literal, get_args

from mtf_gradsync import simd, xla
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.mesh.axes import LayoutLike, MeshShapeLike
from mtf_gradsync.runtimes.checkpoints.start import Start
from mtf_gradsync.runtimes.sessions import DeviceSessions, ProgramSessions
from mtf_gradsync.session import session_config
from mtf_gradsync.simd.session import ReplicaSession

RuntimeName = Literal["placement_mesh", "cpu_replicas", "xla"]
RUNTIMES = get_args(RuntimeName)
# Enough to keep devices busy while the host reads a result and fetches a batch.
_STEPS_AHEAD = 2


class OnDevices:
    """The runtime of a placement mesh: TensorFlow operations on devices.

    Sessions run on the server `target`, "" for this process, with `config`; None makes one with as
    many CPU devices as the graph names.
    """

    program: simd.Program | None = None  # there is no SIMD program
    # How many more steps may be dispatched before the result of a step is asked for.
    steps_ahead = 0

    def __init__(self, config: tf.ConfigProto | None = None, target: str = ""):
        self._config, self._target = config, target

    def building(self) -> ContextManager[None]:
        """Returns a context manager in which to build the step."""
        return contextlib.nullcontext()

    def sessions(
        self, lowering: Any, scaffold: tf.train.Scaffold | None, start: Callable[[], Start]
    ) -> DeviceSessions:
        """Returns a factory of sessions of the default graph; see `DeviceSessions`."""
        del lowering
        config = self._config or session_config(num_cpu_devices=_cpu_devices())
        return DeviceSessions(config, scaffold, start, self._target)


class OnCores:
    """The runtime of a SIMD program: each core runs all that is built."""

    def __init__(self, name: RuntimeName, mesh_shape: MeshShapeLike, layout: LayoutLike = ""):
        self.name = name
        self.program: simd.Program | None = None  # until it is built
        self.steps_ahead = _STEPS_AHEAD if name == "xla" else 0
        self._mesh_shape, self._layout = mesh_shape, layout

    @contextlib.contextmanager
    def building(self) -> Iterator[simd.Program]:
        """Opens the program in which to build the step, and yields it."""
        with simd.tpu_program(self._mesh_shape, self._layout) as program:
            self.program = program
            yield program

    def sessions(
        self,
        lowering: mtf.Lowering | Any,
        scaffold: tf.train.Scaffold | None,
        start: Callable[[], Start],
    ) -> ProgramSessions:
        """Returns a factory of sessions on the program; see `ProgramSessions`.

        `lowering` may also be a spec whose hooks have it.
        """
        program = self.program
        assert program is not None  # it has been built

        def make() -> ReplicaSession:
            if self.name == "xla":
                return xla.session(program, lowering)
            return program.session(lowering)

        return ProgramSessions(program.graph, make, scaffold, start)


def _cpu_devices() -> int:
    """Returns how many CPU devices the default graph names, at least 1."""
    specs = {op.device for op in tf.get_default_graph().get_operations()}
    named = [tf.DeviceSpec.from_string(spec) for spec in specs if spec]
    return 1 + max((x.device_index or 0 for x in named if x.device_type == "CPU"), default=0)
