"""Opens sessions on every runtime, with or without TensorFlow's monitored sessions and hooks."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Callable, ContextManager, Iterator, Literal, NamedTuple, Sequence, get_args

from mtf_gradsync.extension import LayoutLike, MeshShapeLike, mtf, tf
from mtf_gradsync.runtimes import simd, xla
from mtf_gradsync.runtimes._private.tensorflow import session_interface
from mtf_gradsync.runtimes.settings import session_config
from mtf_gradsync.runtimes.simd.replica_session import ReplicaSession
from mtf_gradsync.runtimes.starting import Start

_SessionInterface: Any = session_interface()


class ProgramSession(_SessionInterface):
    """A session that runs a SIMD program on its cores, with the interface of a ``tf.Session``."""

    looks_at_steps = True

    def __init__(self, graph: tf.Graph, session: ReplicaSession):
        self._graph = graph
        self._session = session

    @property
    def graph(self) -> tf.Graph:
        """The program's graph, as it was built."""
        return self._graph

    @property
    def session(self) -> ReplicaSession:
        """The session on the cores that this session wraps."""
        return self._session

    @property
    def sess_str(self) -> str:
        """The server on which TensorFlow's part of the session runs: "", for this process."""
        return ""

    def run(
        self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
    ) -> Any:
        """Runs a step and returns the fetched values, as ``tf.Session.run`` does.

        `fetches` are tensors and operations of the program's graph, in any structure of lists,
        tuples and dicts. `feed_dict` has values by tensor. `options` and `run_metadata` are
        ignored.
        """
        del options, run_metadata
        flat: list[Any] = []
        rebuild = _flatten(fetches, flat)
        return rebuild(iter(self._session.run(flat, feed_dict)))

    def close(self) -> None:
        """Frees the session."""
        self._session.close()


def _flatten(fetches: Any, flat: list[Any]) -> Callable[[Any], Any]:
    """Appends the fetches in a structure to the list `flat`; returns a function that rebuilds it.

    The structure `fetches` is made of lists, tuples and dicts. The returned function takes an
    iterator over the fetched values, in the order of `flat`, and returns the structure with values
    in place of fetches. (`tf.nest` cannot be used: in a monitored session, fetches are a dict whose
    keys are hooks. `tf.nest` would sort the keys, but hooks have no order.)
    """
    if fetches is None:
        return lambda values: None
    if isinstance(fetches, dict):
        parts = {key: _flatten(value, flat) for key, value in fetches.items()}
        return lambda values: {key: part(values) for key, part in parts.items()}
    if isinstance(fetches, (list, tuple)):
        each = [_flatten(value, flat) for value in fetches]
        kind = type(fetches)
        if hasattr(fetches, "_fields"):
            return lambda values: kind(*(part(values) for part in each))
        return lambda values: kind(part(values) for part in each)
    flat.append(fetches)
    return next


@dataclasses.dataclass(eq=False)
class DeviceSessions(tf.train.SessionCreator):
    """A factory of sessions on devices. A session begins from a checkpoint if there is one.

    Sessions run `graph` on the server `target`, with the settings `config`. `scaffold` has the
    saver and the operations that run before the first step. `start` is a function that returns the
    checkpoint to begin from. It is called for each session, because a monitored session opens a new
    session when a worker is lost. TensorFlow's own `ChiefSessionCreator` would begin the new
    session from the checkpoint of the first session, not from the newest checkpoint.
    """

    graph: tf.Graph
    config: tf.ConfigProto
    target: str
    scaffold: tf.train.Scaffold
    start: Callable[[], Start]

    def create_session(self) -> tf.Session:
        """Opens a session; its variables have the checkpoint's values, or their initial values."""
        start = self.start()
        with self.graph.as_default(), start.restorable(self._initial_values) as path:
            session = tf.train.ChiefSessionCreator(
                self.scaffold, self.target, self.config, checkpoint_filename_with_path=path
            ).create_session()
        _recover_older(self.scaffold.saver, start)
        return session

    def _initial_values(self, names: Sequence[str]) -> dict[str, Any]:
        variables = {v.op.name: v for v in tf.global_variables() if v.op.name in names}
        with tf.Session(self.target, config=self.config) as session:
            session.run([variable.initializer for variable in variables.values()])
            return session.run(variables)


@dataclasses.dataclass(eq=False)
class ProgramSessions(tf.train.SessionCreator):
    """A factory of sessions on a SIMD program. A session begins from a checkpoint if there is one.

    `graph` has the program, and `make` is a function that opens a session on the cores. `scaffold`
    has the saver and the operations that run before the first step. `start` is a function that
    returns the checkpoint to begin from; it is called for each session.
    """

    graph: tf.Graph
    make: Callable[[], ReplicaSession]
    scaffold: tf.train.Scaffold
    start: Callable[[], Start]

    def create_session(self) -> ProgramSession:
        """Opens a session with the interface of a ``tf.Session``.

        In the new session, masters (whole variables) have their values, but slices do not have
        theirs yet. Hooks copy the masters to the slices afterwards.
        """
        return ProgramSession(self.graph, self.open())

    def open(self) -> ReplicaSession:
        """Opens a session on the cores; its masters have their values.

        Masters, which are whole variables, have the values of the checkpoint from which the session
        begins; without such a checkpoint, they have their initial values.
        """
        scaffold = self.scaffold
        savers = self.graph.get_collection(tf.GraphKeys.SAVERS)
        with self.graph.as_default():
            saver = scaffold.saver or (savers[0] if savers else None)
            if saver:
                saver.build()
            begin = scaffold.local_init_op
            if begin is None:
                begin = tf.train.Scaffold.default_local_init_op()
        session = self.make()
        try:
            start = self.start()
            with self.graph.as_default(), start.restorable(
                lambda names: {name: session.read(name) for name in names}
            ) as path:
                if path and saver:
                    saver.restore(ProgramSession(self.graph, session), path)
                elif path:
                    session.restore(path)
                elif scaffold.init_fn:
                    scaffold.init_fn(ProgramSession(self.graph, session))
            _recover_older(saver, start)
            session.run(begin)
        except BaseException:
            session.close()
            raise
        return session


def _recover_older(saver: tf.train.Saver | None, start: Start) -> None:
    """Tells a saver which older checkpoints a run has, so that the saver deletes them in time.

    The older checkpoints are those in `start.kept`. If `saver` is None, nothing is done.
    """
    if saver and start.kept:
        saver.recover_last_checkpoints(list(start.kept))


RuntimeName = Literal["placement_mesh", "cpu_replicas", "xla"]
RUNTIMES = get_args(RuntimeName)
_DESCRIPTIONS: dict[str, str] = {
    "placement_mesh": "a placement mesh",
    "cpu_replicas": "CPU replicas of the SIMD program",
    "xla": "XLA devices",
}


class Runtime(NamedTuple):
    """A runtime that was chosen.

    `name` is the runtime's name. `reason` is the reason of the choice, in a few words for the log.
    `target` is the server on which steps run; "" is this process.
    """

    name: RuntimeName
    reason: str
    target: str = ""

    def __str__(self) -> str:
        return f"{_DESCRIPTIONS[self.name]} ({self.reason})"


def choose_runtime(
    name: str,
    argument: str = "runtime",
    known: Sequence[str] = RUNTIMES,
    fastest: Runtime | None = None,
) -> Runtime:
    """Returns the runtime that a user chose by its name.

    `argument` is the name of the user's setting, for errors, and `known` are the names that the
    setting takes. If "fastest" is among these names, it stands for the runtime `fastest`. If the
    argument `fastest` is None, the name "fastest" stands for the fastest runtime that this
    environment has.

    Raises:
      ValueError: when no runtime has this name, or the runtime does not run in this environment.
    """
    if name not in known:
        raise ValueError(f"{argument} must be one of {', '.join(known)}; got {name!r}.")
    if name == "fastest":
        return fastest or fastest_runtime()
    if name not in available_runtimes():
        raise ValueError(
            f"{argument} {name!r} does not run here: {xla.why_no_xla()} 'cpu_replicas' runs the "
            "same program without jax."
        )
    return Runtime(name, argument)


def fastest_runtime() -> Runtime:
    """Returns the fastest runtime of SIMD programs in this environment, and the reason."""
    missing = xla.why_no_xla()
    if missing:
        return Runtime("cpu_replicas", f"the fastest without jax: {missing}")
    return Runtime("xla", "the fastest that is installed")


def available_runtimes() -> list[RuntimeName]:
    """Returns the names of the runtimes that run in this environment."""
    return [name for name in RUNTIMES if name != "xla" or not xla.why_no_xla()]


def runtime_for(
    name: RuntimeName,
    mesh_shape: MeshShapeLike,
    layout: LayoutLike = "",
    config: tf.ConfigProto | None = None,
    target: str = "",
) -> OnDevices | OnCores:
    """Returns the object that builds and runs steps on the runtime `name`.

    For a placement mesh the result is an `OnDevices`, whose sessions have the ConfigProto `config`
    and run on the server `target`. For the other runtimes the result is an `OnCores`, whose SIMD
    program has `mesh_shape` and `layout`.
    """
    if name == "placement_mesh":
        return OnDevices(config, target)
    return OnCores(name, mesh_shape, layout)


def program_session(
    name: str, program: simd.Program, lowering: Any, **settings: Any
) -> ReplicaSession:
    """Opens a SIMD program's session on XLA devices if `name` is "xla", else on CPU replicas.

    `program` is the SIMD program. `lowering` is the step's `mtf.Lowering`, or an EstimatorSpec
    whose hooks hold it. `settings` are further arguments of `xla.session`, such as the platform;
    CPU replicas ignore them.
    """
    if name == "xla":
        return xla.session(program, lowering, **settings)
    return program.session(lowering)


# Enough to keep devices busy while the host reads a result and fetches a batch.
_STEPS_AHEAD = 2


class OnDevices:
    """The runtime of a placement mesh: TensorFlow operations on devices.

    Sessions run on the server `target` ("" is this process) with the ConfigProto `config`. If
    `config` is None, sessions have as many CPU devices as the graph names.
    """

    program: simd.Program | None = None  # there is no SIMD program
    # How many more steps may be dispatched before the result of a step is asked for.
    steps_ahead = 0

    def __init__(self, config: tf.ConfigProto | None = None, target: str = ""):
        self._config, self._target = config, target

    def building(self) -> ContextManager[None]:
        """Returns the context manager in which to build the step, which here does nothing."""
        return contextlib.nullcontext()

    def sessions(
        self, lowering: Any, scaffold: tf.train.Scaffold | None, start: Callable[[], Start]
    ) -> DeviceSessions:
        """Returns a factory of sessions of the default graph.

        `scaffold` has the saver and the operations that run before the first step. `start` is a
        function that returns the checkpoint from which a session begins; the factory calls it for
        each session. `lowering` is not used.
        """
        del lowering
        config = self._config or session_config(num_cpu_devices=_num_cpu_devices())
        graph, scaffold = tf.get_default_graph(), scaffold or tf.train.Scaffold()
        return DeviceSessions(graph, config, self._target, scaffold, start)


class OnCores:
    """The runtime of a SIMD program: every core runs the whole step that is built."""

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
        """Returns a factory of sessions on the program, which must have been built.

        `lowering` is the step's `mtf.Lowering`, or an EstimatorSpec whose hooks hold it. `scaffold`
        has the saver and the operations that run before the first step. `start` is a function that
        returns the checkpoint from which a session begins; the factory calls it for each session.
        """
        program = self.program
        assert program is not None  # it has been built

        def make() -> ReplicaSession:
            return program_session(self.name, program, lowering)

        return ProgramSessions(program.graph, make, scaffold or tf.train.Scaffold(), start)


def _num_cpu_devices() -> int:
    """Returns the number of CPU devices that the default graph names, at least 1."""
    specs = {op.device for op in tf.get_default_graph().get_operations()}
    named = [tf.DeviceSpec.from_string(spec) for spec in specs if spec]
    return 1 + max((x.device_index or 0 for x in named if x.device_type == "CPU"), default=0)
