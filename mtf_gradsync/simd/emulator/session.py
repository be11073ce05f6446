"""Runs an emulated TPU program, with fetches and feeds named by the user's own tensors."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any, Sequence

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import SLICES_COLLECTION
from mtf_gradsync.simd.emulator.agreement import divergence_of
from mtf_gradsync.simd.emulator.rewrite import emulate
from mtf_gradsync.simd.graph.facts import GraphFacts
from mtf_gradsync.simd.graph.refusals import check_can_be_emulated
from mtf_gradsync.simd.lowerings import lowerings_in


def cpu_config() -> tf.ConfigProto:
    """The session configuration in which emulated programs run.

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

    Attributes:
      source: the user's graph.
      version: the source graph's version when it was taken.
      emulated: the `EmulatedGraph`.
      graph: the imported graph that sessions run.
    """

    def __init__(self, source: tf.Graph, lowerings: Sequence[mtf.Lowering]):
        check_can_be_emulated(GraphFacts(source.as_graph_def()))  # before anything is added to it
        self.source = source
        with source.as_default(), contextlib.ExitStack() as stack:
            # None: not inside whatever scope the caller happens to be in.
            stack.enter_context(tf.control_dependencies(None))
            stack.enter_context(tf.name_scope(None))
            slices = source.get_collection(SLICES_COLLECTION)
            variables = tf.global_variables()
            self.initialize = [
                tf.variables_initializer(variables + tf.local_variables() + slices).name
            ]
            self.to_slices = [low.copy_masters_to_slices().name for low in lowerings]
            self.to_masters = [low.copy_slices_to_masters().name for low in lowerings]
            self.masters = {v.op.name: _value_name(source, v) for v in variables}
            saver = tf.train.Saver(variables, max_to_keep=None) if variables else None
            self.saver_def = saver.as_saver_def() if saver else None
        self.version = source.version
        self.emulated = emulate(source)
        self.graph = tf.Graph()
        with self.graph.as_default():
            tf.import_graph_def(self.emulated.graph_def, name="")
            self.saver = tf.train.Saver(saver_def=self.saver_def) if saver else None
        self.graph.finalize()


def _value_name(graph: tf.Graph, variable: Any) -> str:
    return graph.as_graph_element(variable, allow_operation=False).name


class CpuReplicaSession:
    """A session on N CPU replicas. Use it as a context manager.

    Running any tensor or operation of a program runs the whole program on all cores, updates
    included, as a TPU does.
    """

    def __init__(self, prepared: PreparedGraph, config: tf.ConfigProto | None = None):
        self._prepared = prepared
        self._emulated = prepared.emulated
        self._session = tf.Session(graph=prepared.graph, config=config or cpu_config())
        try:
            self._session.run(prepared.initialize)
            self._session.run(prepared.to_slices)
        except BaseException:
            self._session.close()
            raise

    def __enter__(self) -> CpuReplicaSession:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees the session; its variables are gone."""
        self._session.close()

    @property
    def tf_session(self) -> tf.Session:
        """The ``tf.Session`` underneath, on the rewritten graph."""
        return self._session

    def run(
        self, fetches: Any, feed_dict: dict[Any, Any] | None = None, per_replica: bool = False
    ) -> Any:
        """Runs the program once.

        Args:
          fetches: a tensor, operation or name of the user's graph, inside or outside the program,
            or a nested structure of them.
          feed_dict: tensors of the user's graph outside the program -> values.
          per_replica: whether a tensor of the program gives the list of its values on all cores
            (in physical order) in place of its value on core 0.

        Returns:
          The same structure, with values in place of tensors and None in place of operations.

        Raises:
          BranchDivergenceError: when cores that have to meet in a collective took different
            branches.
          ValueError: when a fetch or feed is no part of the graph, or not reachable there.
        """
        also: list[str] = []
        mapped = tf.nest.map_structure(lambda f: self._fetch(f, per_replica, also), fetches)
        feeds = {self._feed(k): v for k, v in (feed_dict or {}).items()}
        try:
            return self._session.run([mapped, sorted(set(also))], feeds)[0]
        except tf.errors.InvalidArgumentError as error:
            divergence = divergence_of(error, self._emulated.agreements)
            if divergence is None:
                raise
            raise divergence from error

    def variables(self) -> dict[str, np.ndarray]:
        """The values of all global variables, Mesh-TF's put together from their slices.

        Returns:
          name -> value. Variables that Mesh-TF stacked appear under their own names.
        """
        self._session.run(self._prepared.to_masters)
        return self._session.run(self._prepared.masters)

    def read(self, variable: str | mtf.Variable | tf.Variable) -> np.ndarray:
        """The value of one variable, put together from its slices.

        Args:
          variable: the variable, or its name.

        Returns:
          Its value.

        Raises:
          ValueError: when there is no such global variable.
        """
        name = variable if isinstance(variable, str) else variable.name
        name = name.split(":")[0]
        if name not in self._prepared.masters:
            raise ValueError(
                f"The graph has no global variable {name!r}. It has: "
                f"{', '.join(sorted(self._prepared.masters))}."
            )
        self._session.run(self._prepared.to_masters)
        return self._session.run(self._prepared.masters[name])

    def save(self, path: str) -> str:
        """Writes a checkpoint of the master variables, after copying the slices into them.

        Args:
          path: prefix of the checkpoint's files.

        Returns:
          The path to give to `restore`; any program with the same variables can read it, on
          another mesh or without one.

        Raises:
          ValueError: when the graph has no variables.
        """
        self._session.run(self._prepared.to_masters)
        return self._saver().save(self._session, path, write_meta_graph=False, write_state=False)

    def restore(self, path: str) -> None:
        """Reads a checkpoint into the master variables and copies them into the slices.

        Args:
          path: what `save`, or any ``tf.train.Saver`` over the same variables, returned.

        Raises:
          ValueError: when there is no such checkpoint, or the graph has no variables.
        """
        self._saver().restore(self._session, path)
        self._session.run(self._prepared.to_slices)

    def _saver(self) -> tf.train.Saver:
        if self._prepared.saver is None:
            raise ValueError("The graph has no variables to save or restore.")
        return self._prepared.saver

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

    def _feed(self, key: Any) -> str:
        name = self._name_of(key)
        if self._emulated.program_of(name):
            raise ValueError(
                f"{name!r} cannot be fed: it is inside the TPU program. Feed the tensor outside "
                "that it is made from."
            )
        return name

    def _name_of(self, element: Any) -> str:
        """The name of a tensor or operation; variables stand for their values."""
        try:
            found = self._prepared.source.as_graph_element(element)
            name = found.name
            self._emulated.program_of(name)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{element!r} is no tensor or operation of the program's graph as it was when the "
                "session was made; make the session after the whole graph is built."
            ) from error
        return name


def session_on(
    graph: tf.Graph, lowering: Any = None, config: tf.ConfigProto | None = None
) -> CpuReplicaSession:
    """Makes a session on CPU replicas for a graph whose programs ``tf.tpu.replicate`` made.

    For a program opened with `tpu_program`, use its own ``session`` method, which prepares the
    graph only once.

    Args:
      graph: the graph. Operations that initialize, copy and save variables are added to it.
      lowering: as for `Program.session`.
      config: session configuration; default `cpu_config`.

    Returns:
      A `CpuReplicaSession`; use it as a context manager.

    Raises:
      UnsupportedProgramError: when the graph holds what cannot be emulated.
      TypeError: when lowering is of no known kind.
    """
    return CpuReplicaSession(PreparedGraph(graph, lowerings_in(lowering)), config)
