"""Runs one mtf program on a placement mesh, as a SIMD program, or on one processor."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterable, Iterator, NamedTuple, Sequence, Tuple

import numpy as np

from mtf_gradsync import placement_mesh_impl, session_config, simd, xla
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.step.plan import StepPlan
from tests import grappler as grapplers
from tests import ordering

ONE = ("one:1", "")
# Mesh, layout and batch dimensions; the model below splits "hidden" where it can.
MESHES = {
    "8": ("all:8", "batch:all", ("batch",)),
    "4x2": ("rows:4;cols:2", "batch:rows;hidden:cols", ("batch",)),
    "2x2x2": ("a:2;b:2;c:2", "outer:a;batch:b;hidden:c", ("outer", "batch")),
    # Where the number of processors is not the point: half as many are built in half the time.
    "4": ("all:4", "batch:all", ("batch",)),
    "2x2": ("rows:2;cols:2", "batch:rows;hidden:cols", ("batch",)),
    "2": ("all:2", "batch:all", ("batch",)),
}

# A core order of a SIMD mesh that no symmetry of the mesh explains.
SHUFFLED = [3, 6, 0, 5, 7, 1, 4, 2]

Build = Callable[..., Tuple[Sequence[Any], Dict[str, mtf.Tensor]]]


class Result(NamedTuple):
    """What a run left behind.

    Attributes:
      fetched: for each step the values of the fetches.
      variables: master variables after the last step.
      graph: the tf graph.
      lowering: the mtf lowering.
    """

    fetched: list[dict[str, np.ndarray]]
    variables: dict[str, np.ndarray]
    graph: tf.Graph
    lowering: mtf.Lowering


def placement(mesh_shape: Any, layout: Any) -> mtf.placement_mesh_impl.PlacementMeshImpl:
    """A placement mesh over as many virtual CPU devices as it has processors."""
    shape = mtf.convert_to_shape(mesh_shape)
    devices = [f"/device:CPU:{i}" for i in range(shape.size)]
    return mtf.placement_mesh_impl.PlacementMeshImpl(
        shape, mtf.convert_to_layout_rules(layout), devices
    )


def shared(mesh_shape: Any, layout: Any) -> mtf.placement_mesh_impl.PlacementMeshImpl:
    """As `placement`, by this package: processors share copies of what is equal on them."""
    size = mtf.convert_to_shape(mesh_shape).size
    devices = [f"/device:CPU:{i}" for i in range(size)]
    return placement_mesh_impl(mesh_shape, layout, devices)


def beside(program: simd.Program, mesh_shape: Any, layout: Any) -> Any:
    """A SIMD mesh over the cores of a program that has another."""
    return mtf.simd_mesh_impl.SimdMeshImpl(
        mtf.convert_to_shape(mesh_shape),
        mtf.convert_to_layout_rules(layout),
        device_assignment=program.mesh_impl.device_assignment,
    )


def pairs(first: Iterable[Any], second: Iterable[Any]) -> list[tuple[Any, Any]]:
    """As few pairs as have each of `first` and each of `second` in them."""
    first, second = list(first), list(second)
    longer = range(max(len(first), len(second)))
    return [(first[i % len(first)], second[i % len(second)]) for i in longer]


def on_both(every: Iterable[Any], on_placement: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Parameters (kind, *case): all cases as SIMD programs, and some on a placement mesh too.

    There every device has operations of its own, so that a case takes several times as long.
    """
    return [
        *(("simd", *case) for case in every),
        *(("placement", *case) for case in on_placement),
    ]


@contextlib.contextmanager
def unchanged(*graphs: mtf.Graph, tensorflow: bool = True) -> Iterator[None]:
    """Fails unless mtf graphs, and TensorFlow's default one, are at the end as they were before."""

    def state() -> list[Any]:
        of_mtf = [(list(g.operations), list(g.all_variables)) for g in graphs]
        return [*of_mtf, tf.get_default_graph().get_operations() if tensorflow else None]

    before = state()
    yield
    assert state() == before


class Built(NamedTuple):
    """A program in a graph of its own.

    Attributes:
      kind: as for `run`.
      graph: the tf graph.
      lowering: the mtf lowering.
      program: the SIMD program; None on a placement mesh.
      inputs: placeholders by name.
      fetched: the tensors that `build` asked for, whole.
      updates: the lowered operations.
      init: initializes a session on a placement mesh.
      restore: then copies masters to slices.
      collect: copies slices back to masters.
      grappler: as for `run`.
      is_settled: whether its writes were put in order here, as it has no wrapper that does so.
    """

    kind: str
    graph: tf.Graph
    lowering: mtf.Lowering
    program: simd.Program | None
    inputs: dict[str, tf.Tensor]
    fetched: dict[str, tf.Tensor]
    updates: list[tf.Operation]
    init: list[tf.Operation]
    restore: tf.Operation | None
    collect: tf.Operation | None
    grappler: bool
    is_settled: bool = False

    def run(self, feeds: Sequence[dict[str, np.ndarray]]) -> Result:
        """A session of its own, with one step for each feed."""
        return self.runs(feeds, 1)[0]

    def runs(self, feeds: Sequence[dict[str, np.ndarray]], number: int) -> list[Result]:
        """Several in one session, each from the start; on a placement mesh only."""
        assert number == 1 or self.program is None
        sessions = grapplers.as_users_have_it(self.grappler)
        with sessions, self.graph.as_default(), self._session() as session:
            masters = {v.op.name: v for v in tf.global_variables()}
            results = []
            for _ in range(number):
                if self.program is None:
                    session.run(self.init)
                    session.run(self.restore)
                steps = []
                for feed in feeds:
                    feed = {self.inputs[name]: value for name, value in feed.items()}
                    steps.append(session.run([self.fetched, self.updates], feed)[0])
                if self.program is None:
                    session.run(self.collect)
                    values = session.run(masters)
                else:
                    values = session.variables()
                results.append(Result(steps, values, self.graph, self.lowering))
        return results

    def after_each(self, feeds: Sequence[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
        """Master variables after each step of one session."""
        with self.graph.as_default(), self._session() as session:
            masters = {v.op.name: v for v in tf.global_variables()}
            if self.program is None:
                session.run(self.init)
                session.run(self.restore)
            after = []
            for feed in feeds:
                session.run(self.updates, {self.inputs[k]: v for k, v in feed.items()})
                if self.program is None:
                    session.run(self.collect)
                after.append(session.variables() if self.program else session.run(masters))
        return after

    def collectives(self) -> simd.CommunicationReport:
        """What the cores of a SIMD program exchange."""
        return simd.list_collectives(self.program, lowering=self.lowering)

    def races(self) -> list[ordering.Race]:
        """What the graph of a step leaves open; of a SIMD program's, on CPU replicas."""
        assert not self.is_settled, "Build it with may_race=True."
        if self.program is None:
            return ordering.races([*self.updates, *(t.op for t in self.fetched.values())])
        return ordering.races_on_replicas(self.program, self.lowering)

    def _session(self) -> Any:
        if self.kind == "xla":
            return xla.session(self.program, self.lowering, cache_dir=None)
        if self.program:
            return self.program.session(self.lowering)
        mesh_impl, *_ = self.lowering.mesh_to_impl.values()
        return tf.Session(config=placement_config(mesh_impl.size))


def placement_config(size: int) -> tf.ConfigProto:
    """Session options for a placement mesh of some CPU devices."""
    return session_config(num_cpu_devices=size)


def built(
    kind: str,
    mesh_shape: Any,
    layout: Any,
    build: Build,
    feed: dict[str, np.ndarray],
    autostack: bool = True,
    logical_to_physical: Sequence[int] | None = None,
    grappler: bool = False,
    more_meshes: Sequence[tuple[str, str]] = (),
    may_race: bool = False,
) -> Built:
    """Builds a program in a graph of its own; arguments as for `run`.

    `more_meshes` are shapes and layouts of others; `build` gets them after the first. Updates
    of an optimizer without a wrapper, which race on a placement mesh, are put in order unless the
    program `may_race`: its values would be others now and then.
    """
    with tf.Graph().as_default() as tf_graph:
        tf.set_random_seed(1)
        inputs = {
            name: tf.placeholder(tf.as_dtype(value.dtype), value.shape, name=name)
            for name, value in feed.items()
        }
        if kind in ("simd", "xla"):
            block = simd.tpu_program(mesh_shape, layout, logical_to_physical=logical_to_physical)
        else:
            block = contextlib.nullcontext()
        with block as program:
            on_devices = shared if kind == "shared" else placement
            mesh_impl = program.mesh_impl if program else on_devices(mesh_shape, layout)
            graph = mtf.Graph()
            meshes = {mtf.Mesh(graph, "mesh"): mesh_impl}
            for number, of_another in enumerate(more_meshes, 2):
                meshes[mtf.Mesh(graph, f"mesh_{number}")] = (
                    beside(program, *of_another) if program else on_devices(*of_another)
                )
            operations, fetches = build(*meshes, inputs)
            # Only tensors that are not split can leave a SIMD program.
            fetches = {name: mtf.anonymize(t) for name, t in fetches.items()}
            lowering = mtf.Lowering(graph, meshes, autostack=autostack)
            fetched = {name: lowering.export_to_tf_tensor(t) for name, t in fetches.items()}
            updates = [lowering.lowered_operation(op) for op in operations]
            plan = StepPlan.of_graph(graph)
            writes = any(isinstance(op, mtf.Assign) for op in graph.operations)
            in_order = program is not None or (plan and plan.orders_updates)
            is_settled = writes and not (in_order or may_race)
            if is_settled:
                ordering.settle([*updates, *(t.op for t in fetched.values())])
        init, restore, collect = [], None, None
        if program is None:
            restore, collect = lowering.copy_masters_to_slices(), lowering.copy_slices_to_masters()
            init = [tf.global_variables_initializer(), tf.local_variables_initializer()]
    return Built(
        kind, tf_graph, lowering, program, inputs, fetched, updates,
        init, restore, collect, grappler, is_settled,
    )  # fmt: skip


def run(
    kind: str,
    mesh_shape: Any,
    layout: Any,
    build: Build,
    feeds: Sequence[dict[str, np.ndarray]],
    autostack: bool = True,
    logical_to_physical: Sequence[int] | None = None,
    repeats: int = 1,
    grappler: bool = False,
) -> Any:
    """Builds a program in a graph of its own and runs one step for each feed.

    Args:
      kind: "placement" or "shared", which are those functions; for a SIMD program "simd" (on CPU
        replicas) or "xla" (on XLA devices).
      mesh_shape: shape of the mesh.
      layout: its layout.
      build: called with the mesh and a placeholder for each input; returns the mtf operations to
        run and the mtf tensors to fetch.
      feeds: inputs by name, one dictionary a step.
      autostack: as for `mtf.Lowering`.
      logical_to_physical: core order of a SIMD mesh.
      repeats: run the whole session that often, and return a list of results.
      grappler: whether a placement mesh's graph is rewritten as in a user's session.

    Returns:
      A `Result`, or a list of them if repeats is not 1.
    """
    made = built(
        kind, mesh_shape, layout, build, feeds[0], autostack, logical_to_physical, grappler
    )
    results = [made.run(feeds) for _ in range(repeats)]
    return results[0] if repeats == 1 else results
