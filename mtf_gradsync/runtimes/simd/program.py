"""SIMD programs on CPU replicas: opened around a Mesh-TensorFlow model, and run."""

from __future__ import annotations

import contextlib
import contextvars
from typing import Any, Callable, Hashable, Iterator, Sequence, TypeVar

import numpy as np
from mesh_tensorflow import tpu_variables

from mtf_gradsync.extension import (
    LayoutLike,
    MeshShapeLike,
    forget_mesh,
    mtf,
    ref_variables_explained,
    tf,
)
from mtf_gradsync.runtimes._private import tensorflow as private
from mtf_gradsync.runtimes.simd.checks import check_can_be_emulated, name_of_last_values
from mtf_gradsync.runtimes.simd.emulator import EmulatedGraph, emulate
from mtf_gradsync.runtimes.simd.graph_facts import (
    BranchDivergenceError,
    GraphFacts,
    UnsupportedProgramError,
)
from mtf_gradsync.runtimes.simd.graph_writing import finalized_graph
from mtf_gradsync.runtimes.simd.randomness import RandomStep
from mtf_gradsync.runtimes.simd.replica_session import (
    MasterOps,
    ReplicaSession,
    copy_array,
    lowerings_in,
)


def cpu_config() -> tf.ConfigProto:
    """Returns the default configuration of sessions on CPU replicas.

    Returns:
      A configuration with one CPU device and without graph rewriting, so that the program runs as
      it was built.
    """
    config = tf.ConfigProto(device_count={"CPU": 1, "GPU": 0}, intra_op_parallelism_threads=1)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = -1  # L0
    return config


class PreparedGraph:
    """A user's graph rewritten for CPU replicas, with the operations that a session needs.

    Attributes:
      source: the user's graph. Operations that initialize, copy and save variables are added to it.
      version: the version of the user's graph that was rewritten.
      graph: the rewritten graph, which sessions run.
      emulated: the rewriting, which knows the new names of operations.
      ops: the added operations.
    """

    def __init__(self, source: tf.Graph, lowerings: Sequence[mtf.Lowering]):
        check_can_be_emulated(GraphFacts(source.as_graph_def()))  # before operations are added
        self.source = source
        self.ops = MasterOps(source, lowerings)
        self.version = source.version
        self.emulated = emulate(source)
        self.graph = finalized_graph(self.emulated.graph_def)


class CpuReplicaSession(ReplicaSession):
    """A session on N CPU replicas. Use it as a context manager."""

    def __init__(self, prepared: PreparedGraph, config: tf.ConfigProto | None = None):
        self._prepared = prepared
        self._emulated = prepared.emulated
        self._step_of_draws: RandomStep | None = None
        if self._emulated.random_steps is not None:
            counter = tf.train.get_global_step(prepared.source)
            name = None if counter is None else prepared.ops.masters.get(counter.op.name)
            self._step_of_draws = RandomStep(self._emulated.random_steps, name)
        session = tf.Session(graph=prepared.graph, config=config or cpu_config())
        super().__init__(session, prepared.ops)

    @property
    def emulated(self) -> EmulatedGraph:
        """The rewritten graph, and the names in it of operations of the user's graph."""
        return self._emulated

    @property
    def source(self) -> tf.Graph:
        """The user's graph."""
        return self._prepared.source

    def run(
        self, fetches: Any, feed_dict: dict[Any, Any] | None = None, per_replica: bool = False
    ) -> Any:
        """Runs the program once, and returns the fetched values.

        Args:
          fetches: a tensor, operation or name of the user's graph, inside or outside the program,
            or a nested structure of them.
          feed_dict: the values to feed, by tensor; the tensors have to be in the user's graph and
            outside the program.
          per_replica: whether a tensor of the program is returned as the list of its values on all
            cores, in physical order; if False, as its value on core 0.

        Returns:
          The structure of `fetches`, with values in place of tensors and None in place of
          operations.

        Raises:
          BranchDivergenceError: when cores that have to meet in a collective took different
            branches.
          ValueError: when a fetch or feed is not in the graph, or is in a part of the graph where
            it cannot be fetched or fed.
        """
        also: list[str] = []
        counts: dict[str, str] = {}
        mapped = tf.nest.map_structure(lambda f: self._fetch(f, per_replica, also), fetches)
        feeds = {self._name_to_feed(k): copy_array(v) for k, v in (feed_dict or {}).items()}
        for name in self._ops.watches.counts:
            if self._emulated.done[self._emulated.program_of(name)] in also:
                counts[name] = self._emulated.names_on_replicas(name)[0]
        runs = not set(also).isdisjoint(self._emulated.done.values())
        self._is_stepped = self._is_stepped or runs
        if runs and self._step_of_draws is not None:
            self._step_of_draws.begin(self._session)
        try:
            values, records, _ = self._session.run([mapped, counts, sorted(set(also))], feeds)
        except tf.errors.InvalidArgumentError as error:
            name = str(error.op.name) if error.op is not None else ""
            compared = self._emulated.agreements.get(name)
            if compared is None:
                raise
            predicates = map(bool, self._session.run(name_of_last_values(name) + ":0"))
            by_core = dict(zip(compared.group, predicates))
            raise BranchDivergenceError(
                compared.kind, compared.predicate, by_core, compared.meetings
            ) from error
        self._ops.watches.report(records, self._session.run)
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

    def _read_masters(self, path: str) -> None:
        super()._read_masters(path)
        if self._step_of_draws is not None:
            self._step_of_draws.restart()

    def _is_inside(self, name: str) -> bool:
        return bool(self._emulated.program_of(name))


def session_on(
    graph: tf.Graph, lowering: Any = None, config: tf.ConfigProto | None = None
) -> CpuReplicaSession:
    """Returns a session on CPU replicas for a graph whose programs ``tf.tpu.replicate`` made.

    To open a session for a program that `tpu_program` made, call the program's own method
    ``session``, which prepares the graph only once.

    Args:
      graph: the graph. Operations that initialize, copy and save variables are added to it.
      lowering: the programs' lowering, a list of lowerings, or the EstimatorSpec that a model_fn
        returned. None for programs without mesh variables.
      config: session configuration; default `cpu_config`.

    Returns:
      A `CpuReplicaSession`; use it as a context manager.

    Raises:
      UnsupportedProgramError: when CPU replicas cannot run an operation of the graph.
      TypeError: when `lowering` has another type, or is an EstimatorSpec without a lowering.
    """
    return CpuReplicaSession(PreparedGraph(graph, lowerings_in(lowering)), config)


def made_up_device_assignment(num_replicas: int) -> Any:
    """Returns a ``DeviceAssignment`` of `num_replicas` imaginary cores, in lexicographic order.

    The cores are arranged as in a TPU slice of generation v2 or v3. Two cores are on a chip, or one
    if the number of cores is odd. The chips are in a rectangle that is as square as it can be.
    """
    cores = 2 if num_replicas % 2 == 0 else 1
    chips = num_replicas // cores
    width = next(w for w in range(int(chips**0.5), 0, -1) if chips % w == 0)
    shape = [width, chips // width, 1, cores]
    coordinates = np.stack(np.unravel_index(np.arange(num_replicas), shape), 1).astype(np.int32)
    topology = tf.tpu.experimental.Topology(
        mesh_shape=shape, device_coordinates=coordinates[np.newaxis]
    )
    return tf.tpu.experimental.DeviceAssignment(topology, coordinates[:, np.newaxis, :])


@contextlib.contextmanager
def replicated_program(num_replicas: int) -> Iterator[str]:
    """Puts all operations that are made in the block into one TPU program; yields its name.

    `num_replicas` is the number of cores. Variables made in the block are resource variables.
    """
    graph = tf.get_default_graph()
    cluster = graph.unique_name("cluster")
    pivot = tf.no_op(name=cluster + "/pivot")
    scope = tf.get_variable_scope()
    used_resources = scope.use_resource
    with private.tpu_replicate_context(cluster, num_replicas, pivot):
        metadata = private.tpu_replicate_metadata(num_replicas)
        # A TPU program cannot use reference variables.
        scope.set_use_resource(True)
        try:
            with private.tpu_shard_context(num_replicas), tf.control_dependencies([metadata]):
                yield cluster
        finally:
            scope.set_use_resource(used_resources)


_wanted: contextvars.ContextVar[bool] = contextvars.ContextVar("compiled_only", default=False)


@contextlib.contextmanager
def compiled_only() -> Iterator[None]:
    """Lets programs that are opened in the block be compiled, but not run.

    A program that is opened in the block is smaller than others, because all of its cores share one
    core's variables.
    """
    token = _wanted.set(True)
    try:
        yield
    finally:
        _wanted.reset(token)


class CompiledOnlyMeshImpl(mtf.simd_mesh_impl.SimdMeshImpl):
    """A SIMD mesh whose cores share the first core's variables, for programs that never run."""

    class LaidOutVariable(mtf.simd_mesh_impl.SimdMeshImpl.LaidOutVariable):
        """A variable of the first core that all cores use; it is not copied from or to a master."""

        def __init__(self, variable: Any, mesh_impl: Any):
            """Makes the slice of the Mesh-TF variable `variable` that all cores of the mesh use.

            `mesh_impl` is the mesh, a `CompiledOnlyMeshImpl`.
            """
            self._variable, self._mesh_impl = variable, mesh_impl
            shape = mesh_impl.slice_shape(variable.outputs[0].shape)
            with tf.init_scope():
                zeros = tf.zeros(shape, variable.slice_dtype)
            one = tf.Variable(
                initial_value=zeros,
                trainable=variable.trainable,
                collections=[],
                dtype=variable.slice_dtype,
                name=f"{variable.name}_slice_0",
                expected_shape=shape,
            )
            everywhere = tpu_variables.ReplicatedVariable(variable.name, [one] * mesh_impl.size)
            self._laid_out_tensor = mesh_impl.LaidOutTensor([everywhere])
            with tf.init_scope():
                self._copy_master_to_slices = self._copy_slices_to_master = tf.no_op()


_Prepared = TypeVar("_Prepared")


class Program:
    """A TPU program that is built inside the block of `tpu_program`; afterwards it makes sessions.

    Attributes:
      graph: the ``tf.Graph`` that holds the program.
      mesh_impl: the ``SimdMeshImpl`` to lower with.
      name: TensorFlow's name of the program.
      num_replicas: how many cores run the program.
    """

    def __init__(self, graph: tf.Graph, mesh_impl: Any, name: str):
        self.graph = graph
        self.mesh_impl = mesh_impl
        self.name = name
        self.num_replicas: int = mesh_impl.size
        self._prepared: dict[Hashable, Any] = {}

    @property
    def tpu_context(self) -> TPUContext:
        """The value for ``params["context"]`` of a model_fn that was written for TPUEstimator.

        A model_fn that was written for TPUEstimator makes its own ``SimdMeshImpl``, which takes the
        place of this program's `mesh_impl`. So reading this property removes this program's
        `mesh_impl` from the meshes that wrappers find by themselves in the graph.
        """
        forget_mesh(self.graph, self.mesh_impl)
        return TPUContext(self.mesh_impl.device_assignment)

    def per_replica(self, tensors: Sequence[Any], name: str = "per_replica") -> tf.Tensor:
        """Returns a tensor of the program whose value on core i is `tensors[i]`.

        Use this method in place of an infeed, which the sessions of this package do not have.

        Args:
          tensors: one tensor per core in physical order, all of one dtype and shape, from outside
            the program.
          name: name of the operation.

        Returns:
          The tensor to use inside the program.

        Raises:
          ValueError: when there is not one tensor per core, or the tensors differ in dtype or
            shape.
        """
        if len(tensors) != self.num_replicas:
            raise ValueError(
                f"per_replica got {len(tensors)} tensors for {self.num_replicas} cores; give one "
                "per core."
            )
        kinds = {f"{t.dtype.name} {t.shape}" for t in tensors if isinstance(t, tf.Tensor)}
        if len(kinds) > 1:
            raise ValueError(
                f"per_replica got tensors of different dtypes or shapes: {sorted(kinds)}; give "
                "all cores one dtype and shape."
            )
        # The operation belongs outside the program, whose context would mark it as inside.
        with tf.control_dependencies(None):
            return private.tpu_replicated_input(tensors, name)

    def session(
        self,
        lowering: Any = None,
        config: tf.ConfigProto | None = None,
    ) -> CpuReplicaSession:
        """Returns a session on CPU replicas, with variables initialized and copied into slices.

        Args:
          lowering: the program's lowering, a list of lowerings, or the EstimatorSpec that a
            model_fn returned. None for a program without mesh variables.
          config: session configuration; default `cpu_config`.

        Returns:
          A `CpuReplicaSession`; use it as a context manager.

        Raises:
          UnsupportedProgramError: when CPU replicas cannot run an operation of the graph.
          TypeError: when `lowering` has another type, or is an EstimatorSpec without a lowering.
        """
        return CpuReplicaSession(self.emulated(lowering), config)

    def emulated(self, lowering: Any = None) -> PreparedGraph:
        """Returns the graph that sessions on CPU replicas run.

        The graph is made at the first call, and made again if this program's graph has changed
        since the last call.

        Args:
          lowering: the program's lowering, a list of lowerings, or the EstimatorSpec that a
            model_fn returned. None for a program without mesh variables.

        Raises:
          UnsupportedProgramError: when CPU replicas cannot run an operation of the graph.
        """
        lowerings = lowerings_in(lowering)
        return self.prepared(
            ("emulator", *map(id, lowerings)), lambda: PreparedGraph(self.graph, lowerings)
        )

    def prepared(self, key: Hashable, make: Callable[[], _Prepared]) -> _Prepared:
        """Returns the object that sessions share under `key`; makes it again if the graph changed.

        A runtime calls this method to open a session, so that later sessions need not prepare the
        program again.

        Args:
          key: a value that identifies the runtime and the runtime's arguments.
          make: a function that makes the object. The object's attribute ``version`` is the version
            of the graph that the object was made from.

        Raises:
          UnsupportedProgramError: when the program was built to be compiled only.
        """
        if isinstance(self.mesh_impl, CompiledOnlyMeshImpl):
            raise UnsupportedProgramError(
                "The program was built to be compiled and not to run: its cores share variables. "
                "Build it again outside gs.plan."
            )
        found = self._prepared.get(key)
        if found is None or found.version != self.graph.version:
            found = self._prepared[key] = make()
        return found


class TPUContext:
    """A stand-in for the object that ``TPUEstimator`` puts into ``params["context"]``."""

    num_hosts = 1

    def __init__(self, device_assignment: Any):
        self.device_assignment = device_assignment
        self.num_replicas: int = device_assignment.num_replicas

    def tpu_host_placement_function(self, **kwargs: Any) -> str:
        """Returns the device of the host: always this machine's CPU; `kwargs` are ignored."""
        del kwargs
        return "/device:CPU:0"


@contextlib.contextmanager
def tpu_program(
    mesh_shape: MeshShapeLike,
    layout: LayoutLike,
    logical_to_physical: Sequence[int] | None = None,
) -> Iterator[Program]:
    """Opens a TPU program in the default graph.

    All operations that are built inside the block are one program, which every core of the mesh
    runs. Tensors from outside the block (placeholders, input pipelines) can be used inside. All
    cores see the same value of such a tensor, unless `Program.per_replica` gives each core a value
    of its own.

        with simd.tpu_program("batch:4;model:2", "batch:batch;d_ff:model") as program:
            lowering = mtf.Lowering(graph, {mesh: program.mesh_impl})
            updates = [lowering.lowered_operation(op) for op in update_ops]
            loss = lowering.export_to_tf_tensor(mtf_loss)
        with program.session(lowering) as session:
            print(session.run([loss, updates], {x: batch})[0])

    Args:
      mesh_shape: Mesh-TF's mesh shape: a string such as "batch:4;model:2", or a Shape.
      layout: Mesh-TF's layout: a string such as "batch:batch;d_ff:model", or LayoutRules.
      logical_to_physical: the number of the physical core of each logical core, a permutation. By
        default a physical core has the same number as its logical core.

    Yields:
      The `Program`.

    Raises:
      ValueError: when the arguments do not describe a mesh; nothing is created then.
      NotImplementedError: when the program writes a ref variable that was made outside of the
        program.
    """
    shape = mtf.convert_to_shape(mesh_shape)
    if logical_to_physical is not None:
        logical_to_physical = list(logical_to_physical)
    mesh_class = CompiledOnlyMeshImpl if _wanted.get() else mtf.simd_mesh_impl.SimdMeshImpl
    impl = mesh_class(
        shape,
        mtf.convert_to_layout_rules(layout),
        device_assignment=made_up_device_assignment(shape.size),
        logical_to_physical=logical_to_physical,
    )
    with ref_variables_explained(), replicated_program(shape.size) as name:
        yield Program(tf.get_default_graph(), impl, name)
