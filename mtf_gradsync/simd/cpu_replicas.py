"""Runs an emulated TPU program; fetches and feeds are the user's own tensors."""

from __future__ import annotations

from typing import Any, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.simd.checks import check_can_be_emulated, values_name
from mtf_gradsync.simd.emulator import EmulatedGraph, emulate
from mtf_gradsync.simd.facts import BranchDivergenceError, GraphFacts
from mtf_gradsync.simd.session import MasterOps, ReplicaSession, lowerings_in


def cpu_config() -> tf.ConfigProto:
    """Returns the session configuration in which emulated programs run.

    Returns:
      A configuration with one CPU device and without graph rewriting, so that the program runs as
      it was built.
    """
    config = tf.ConfigProto(device_count={"CPU": 1, "GPU": 0}, intra_op_parallelism_threads=1)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = -1  # L0
    return config


class PreparedGraph:
    """A user's graph, emulated and imported, with the operations that a session needs.

    `source` is the user's graph, of the version `version`; `graph` is the one that sessions run.
    """

    def __init__(self, source: tf.Graph, lowerings: Sequence[mtf.Lowering]):
        check_can_be_emulated(GraphFacts(source.as_graph_def()))  # before operations are added
        self.source = source
        self.ops = MasterOps(source, lowerings)
        self.version = source.version
        self.emulated = emulate(source)
        self.graph = tf.Graph()
        with self.graph.as_default():
            tf.import_graph_def(self.emulated.graph_def, name="")
        self.graph.finalize()


class CpuReplicaSession(ReplicaSession):
    """A session on N CPU replicas. Use it as a context manager."""

    def __init__(self, prepared: PreparedGraph, config: tf.ConfigProto | None = None):
        self._prepared = prepared
        self._emulated = prepared.emulated
        super().__init__(
            tf.Session(graph=prepared.graph, config=config or cpu_config()), prepared.ops
        )
        try:
            self._session.run(prepared.ops.initialize)
            self._session.run(prepared.ops.to_slices)
        except BaseException:
            self._session.close()
            raise

    @property
    def emulated(self) -> EmulatedGraph:
        """The graph that runs, and how names of the user's graph map to its own."""
        return self._emulated

    @property
    def source(self) -> tf.Graph:
        """The user's graph."""
        return self._prepared.source

    def run(
        self, fetches: Any, feed_dict: dict[Any, Any] | None = None, per_replica: bool = False
    ) -> Any:
        """Runs the program once; see `ReplicaSession.run`.

        Raises:
          BranchDivergenceError: when cores that have to meet in a collective took different
            branches.
          ValueError: see `ReplicaSession.run`.
        """
        also: list[str] = []
        counts: dict[str, str] = {}
        mapped = tf.nest.map_structure(lambda f: self._fetch(f, per_replica, also), fetches)
        feeds = {self._feed(k): v for k, v in (feed_dict or {}).items()}
        for name in self._ops.watches.counts:
            if self._emulated.done[self._emulated.program_of(name)] in also:
                counts[name] = self._emulated.names_on_replicas(name)[0]
        try:
            values, told, _ = self._session.run([mapped, counts, sorted(set(also))], feeds)
        except tf.errors.InvalidArgumentError as error:
            name = str(error.op.name) if error.op is not None else ""
            compared = self._emulated.agreements.get(name)
            if compared is None:
                raise
            predicates = map(bool, self._session.run(values_name(name) + ":0"))
            by_core = dict(zip(compared.group, predicates))
            raise BranchDivergenceError(
                compared.kind, compared.predicate, by_core, compared.meetings
            ) from error
        self._ops.watches.look(told, self._session.run)
        return values

    def _fetch(self, fetch: Any, per_replica: bool, also: list[str]) -> Any:
        name = self._name_of(fetch)
        names = self._emulated.names_on_replicas(name)
        program = self._emulated.program_of(name)
        if program:
            also.append(self._emulated.done[program])
        if ":" not in name:
            also.extend(names)
            return names[0]
        return names if per_replica and program else names[0]

    def _is_inside(self, name: str) -> bool:
        return bool(self._emulated.program_of(name))


def session_on(
    graph: tf.Graph, lowering: Any = None, config: tf.ConfigProto | None = None
) -> CpuReplicaSession:
    """Makes a session on CPU replicas for a graph whose programs ``tf.tpu.replicate`` made.

    For a program opened with `tpu_program`, use its own ``session`` method, which prepares the
    graph only once.

    Args:
      graph: the graph. Operations that initialize, copy and save variables are added to it.
      lowering: see `Program.session`.
      config: session configuration; default `cpu_config`.

    Returns:
      A `CpuReplicaSession`; use it as a context manager.

    Raises:
      UnsupportedProgramError: when the graph holds what cannot be emulated.
      TypeError: when lowering is of no known kind.
    """
    return CpuReplicaSession(PreparedGraph(graph, lowerings_in(lowering)), config)
