"""The divisions of a program, each built and run in a graph and a session of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from typing import Any, Callable, ContextManager, Iterator, Mapping, NamedTuple, Sequence
from unittest import mock

import numpy as np

from mtf_gradsync.extension import (
    SyncReplicasOptimizer,
    mean_loss,
    mtf,
    placement_mesh_impl,
    session_config,
    tf,
)
from mtf_gradsync.runtimes import simd, xla
from mtf_gradsync.runtimes.simd.session import VariableAccess, copied
from mtf_gradsync.tools.verification.recording import (
    GRADIENT,
    UPDATES,
    Changes,
    Recorded,
    recording,
)

Batch = Any  # a structure of arrays, the examples their first dimension
RUNTIMES = ("placement_mesh", "cpu_replicas", "xla")


@dataclasses.dataclass(frozen=True)
class Division:
    """One way to divide a program.

    Attributes:
      name: for the table.
      mesh_shape: Mesh-TF's mesh shape.
      layout: Mesh-TF's layout rules.
      runtime: one of `RUNTIMES`.
      changes: what is changed of its stack of wrappers.
      params: more of the program's settings, as pairs.
      is_reference: whether its gradients are those to compare with.
      doubled: whether it is built in float64.
    """

    name: str
    mesh_shape: str
    layout: str
    runtime: str = "cpu_replicas"
    changes: Changes = dataclasses.field(default_factory=Changes)
    params: tuple[tuple[str, Any], ...] = ()
    is_reference: bool = False
    doubled: bool = False

    @property
    def key(self) -> Any:
        """What makes two divisions the same program."""
        shape = mtf.convert_to_shape(self.mesh_shape).to_string
        params = tuple((name, repr(value)) for name, value in self.params)
        return shape, self.layout, self.runtime, self.changes, params, self.doubled


class UserProgram:
    """A user's program: a model_fn, or a function that builds a step on a mesh.

    Args:
      function: `model_fn(features, labels, mode, params[, config])`, which returns a spec; or
        `step(mesh, inputs, params)`, which returns a loss and mtf operations, where `inputs` has
        the structure of a batch.
      params: the settings that it gets, with "mesh_shape" and "layout" among them.
    """

    def __init__(self, function: Callable[..., Any], params: Mapping[str, Any]):
        self.function, self.params = function, dict(params)
        names = inspect.signature(function).parameters
        self.is_model_fn = "mode" in names
        self._names = set(names)

    def build(self, division: Division, batch: Batch) -> BuiltDivision:
        """Builds the program in a graph of its own, for batches like this one."""
        params = {**self.params, **dict(division.params)}
        params.update(mesh_shape=division.mesh_shape, layout=division.layout)
        if "batch_size" in params:
            params["batch_size"] = len(tf.nest.flatten(batch)[0])
        with tf.Graph().as_default() as graph, contextlib.ExitStack() as blocks:
            tf.set_random_seed(1)
            inputs = tf.nest.map_structure(
                lambda x: tf.placeholder(tf.as_dtype(x.dtype), x.shape), batch
            )
            tf.train.get_or_create_global_step()
            recorded = blocks.enter_context(recording(division.changes))
            if division.doubled:
                blocks.enter_context(in_float64())
            program = None
            if division.runtime != "placement_mesh":
                block: ContextManager[Any] = simd.tpu_program(division.mesh_shape, division.layout)
                program = blocks.enter_context(block)
                params["mesh_impl"] = program.mesh_impl
            build = self._build_model_fn if self.is_model_fn else self._build_step
            loss, updates = build(division, inputs, params, program)
            recorded.end()
            weight = recorded.weight()
            blocks.close()
        return BuiltDivision(
            division, graph, program, recorded, tf.nest.flatten(inputs), loss, weight, updates
        )

    def _build_step(
        self, division: Division, inputs: Any, params: dict[str, Any], program: Any
    ) -> tuple[tf.Tensor, list[Any]]:
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        if program is not None:
            mesh_impl = program.mesh_impl
        else:
            size = mtf.convert_to_shape(division.mesh_shape).size
            devices = [f"/device:CPU:{number}" for number in range(size)]
            mesh_impl = placement_mesh_impl(division.mesh_shape, division.layout, devices)
        loss, operations = self.function(mesh, inputs, params)
        mean = mtf.anonymize(mean_loss(loss))
        lowering = mtf.Lowering(graph, {mesh: mesh_impl})
        updates = [lowering.lowered_operation(op) for op in operations]
        return lowering.export_to_tf_tensor(mean), updates

    def _build_model_fn(
        self, division: Division, inputs: Any, params: dict[str, Any], program: Any
    ) -> tuple[tf.Tensor, list[Any]]:
        if program is not None:
            params = {**params, "context": program.tpu_context, "use_tpu": True}
        features, labels = inputs if isinstance(inputs, tuple) else (inputs, None)
        given = {
            "features": features,
            "labels": labels,
            "mode": "train",
            "params": params,
            "config": None,
        }
        spec = self.function(**{k: v for k, v in given.items() if k in self._names})
        return spec.loss, [spec.train_op]


class BuiltDivision(NamedTuple):
    """A program that was built.

    Attributes:
      division: how it is divided.
      graph: its graph.
      program: the SIMD program; None on a placement mesh.
      recorded: what was seen meanwhile.
      inputs: placeholders of a batch.
      loss: the loss.
      weight: how much the loss stands for, by the program; None if it does not say.
      updates: the operations of a step.
    """

    division: Division
    graph: tf.Graph
    program: Any
    recorded: Recorded
    inputs: list[tf.Tensor]
    loss: tf.Tensor
    weight: tf.Tensor | None
    updates: list[Any]

    @contextlib.contextmanager
    def session(self) -> Iterator[Running]:
        """Opens a session, with initial values."""
        lowerings = self.recorded.lowerings
        if not lowerings:
            name = self.division.name
            raise ValueError(f"The program ({name}) has lowered nothing: it makes no mtf.Lowering.")
        with self.graph.as_default():
            if self.program is not None:
                if self.division.runtime == "xla":
                    session = xla.session(self.program, lowerings, cache_dir=None)
                else:
                    session = self.program.session(lowerings)
                with session:
                    yield Running(self, session)
                return
            to_masters = tf.group(*(x.copy_slices_to_masters() for x in lowerings))
            to_slices = tf.group(*(x.copy_masters_to_slices() for x in lowerings))
            init = [
                tf.global_variables_initializer(),
                tf.local_variables_initializer(),
                tf.tables_initializer(),
            ]
            sizes = [impl.size for x in lowerings for impl in x.mesh_to_impl.values()]
            masters = {v.op.name: v.read_value() for v in tf.global_variables()}
            access = VariableAccess(self.graph)
            config = session_config(num_cpu_devices=max(sizes))
            # For a few steps, rewriting the graph takes longer than it saves.
            config.graph_options.rewrite_options.disable_meta_optimizer = True
            with tf.Session(config=config) as session:
                session.run(init)
                session.run(to_slices)
                yield Running(self, session, to_masters, to_slices, masters, access)


class Running:
    """A session of a program that was built."""

    def __init__(
        self,
        built: BuiltDivision,
        session: Any,
        to_masters: Any = None,
        to_slices: Any = None,
        masters: Any = None,
        access: VariableAccess | None = None,
    ):
        self.built, self._session = built, session
        self._to_masters, self._to_slices = to_masters, to_slices
        self._masters, self._access = masters, access

    def step(self, batch: Batch) -> tuple[float, float]:
        """Makes a step, and returns its loss, and how much that stands for: 1 if none says."""
        built = self.built
        feed = dict(zip(built.inputs, map(copied, tf.nest.flatten(batch))))
        fetches = [built.loss, *([] if built.weight is None else [built.weight])]
        (loss, *weight), _ = self._session.run([fetches, built.updates], feed)
        return float(np.mean(loss)), float(np.mean(weight)) if weight else 1.0

    def values(self) -> dict[str, np.ndarray]:
        """Returns the values of all variables by name."""
        if self._access is None:
            return self._session.variables()
        self._session.run(self._to_masters)
        return self._session.run(self._masters)

    def write(self, values: Mapping[str, np.ndarray]) -> None:
        """Sets the values of variables that the program has, of the same shape."""
        there = self.values()
        fitting = {k: v for k, v in values.items() if k in there and there[k].shape == v.shape}
        fitting = {k: np.asarray(v, there[k].dtype) for k, v in fitting.items()}
        if self._access is None:
            self._session.write(fitting)
            return
        self._access.set(self._session, fitting.items())
        self._session.run(self._to_slices)

    def copies_apart(self) -> list[str]:
        """Returns the variables of which processors hold copies that are not equal.

        They are looked at on placement meshes.
        """
        if self._access is None:
            return []
        lowered = {
            variable: (lowering.mesh_impl(variable), laid_out.laid_out_tensor)
            for lowering in self.built.recorded.lowerings
            for variable, laid_out in lowering.variables.items()
            if not variable.name.endswith((GRADIENT, UPDATES))
        }
        # In one call, as each new set of fetches takes the time of the whole graph.
        slices = self._session.run(
            {v: x.to_laid_out_tensor().tensor_list for v, (_, x) in lowered.items()}
        )
        found = []
        for variable, (mesh_impl, _) in lowered.items():
            first: dict[Any, np.ndarray] = {}
            for number, part in enumerate(slices[variable]):
                begin = tuple(mesh_impl.slice_begin(variable.shape, number))
                if not np.array_equal(first.setdefault(begin, part), part, equal_nan=True):
                    found.append(variable.name)
        return list(dict.fromkeys(found))


def joined_batch(batches: Sequence[Batch]) -> Batch:
    """Returns one batch of the examples of several."""
    return tf.nest.map_structure(lambda *parts: np.concatenate(parts), *batches)


def batch_parts(batch: Batch, count: int) -> list[Batch]:
    """Returns a batch in parts of equally many examples; ValueError if it cannot be divided."""
    size = len(tf.nest.flatten(batch)[0])
    if size % count:
        raise ValueError(f"A batch of {size} cannot be divided into {count} microbatches.")
    each = size // count
    return [rows_of(batch, slice(n * each, (n + 1) * each)) for n in range(count)]


def rows_of(batch: Batch, rows: Any) -> Batch:
    """Returns some of the examples of a batch."""
    return tf.nest.map_structure(lambda x: x[rows], batch)


_WITH_SCALARS = (mtf.ops.ScalarMultiplyOperation, mtf.ops.ScalarAddOperation)


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Inside, mesh tensors and variables of floating point that are made are float64."""
    make_tensor, make_dtypes = mtf.Tensor.__init__, mtf.VariableDType.__init__
    make_import = mtf.ops.ImportOperation.__init__

    def wide(dtype: tf.DType) -> tf.DType:
        return tf.float64 if dtype.is_floating else dtype

    def tensor(self: Any, operation: Any, shape: Any, dtype: Any, *args: Any, **kw: Any) -> None:
        make_tensor(self, operation, shape, wide(dtype), *args, **kw)

    def dtypes(self: Any, master_dtype: Any = tf.float32, *others: Any, **named: Any) -> None:
        make_dtypes(self, wide(tf.as_dtype(master_dtype)))

    def imported(self: Any, mesh: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        tensor = tf.convert_to_tensor(tensor)
        make_import(self, mesh, tf.cast(tensor, wide(tensor.dtype)), *args, **kwargs)

    cast = mtf.ops.cast

    def cast_to_wide(x: Any, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        return cast(x, wide(tf.as_dtype(dtype)), *args, **kwargs)

    def scaled(init: Any) -> Any:
        # A learning rate may be a tensor of TensorFlow's.
        def scalar_operation(self: Any, x: Any, scalar: Any, *args: Any, **kw: Any) -> None:
            if isinstance(scalar, tf.Tensor) and scalar.dtype.is_floating:
                scalar = tf.cast(scalar, x.dtype)
            init(self, x, scalar, *args, **kw)

        return scalar_operation

    with contextlib.ExitStack() as patched:
        for owner, function in (
            (mtf.Tensor, tensor),
            (mtf.VariableDType, dtypes),
            (mtf.ops.ImportOperation, imported),
            *((kind, scaled(kind.__init__)) for kind in _WITH_SCALARS),
        ):
            patched.enter_context(mock.patch.object(owner, "__init__", function))
        for module in (mtf, mtf.ops):
            patched.enter_context(mock.patch.object(module, "cast", cast_to_wide))
        yield


KINDS = ("mesh", "batch", "model", "order", "microbatches", "wrappers", "masked", "runtimes")
MICRO_STEPS = 2


def own(mesh_shape: str, layout: str, drops: tuple[str, ...], runtime: str) -> Division:
    """The program as it is."""
    return Division("as configured", mesh_shape, layout, runtime, Changes(drops=drops))


def reference(base: Division) -> Division:
    """One core, without a wrapper."""
    ones = ";".join(f"{d.name}:1" for d in mtf.convert_to_shape(base.mesh_shape).dims)
    changes = Changes(base.changes.without, unwrapped=True, drops=base.changes.drops)
    return Division(
        "one core, unwrapped", ones, base.layout, "placement_mesh", changes, base.params, True
    )


def default_divisions(
    base: Division, recorded: Recorded, kinds: Sequence[str] = KINDS, k_of_stack: int = 1
) -> list[Division]:
    """Returns the divisions of some kinds (`KINDS`) that a program can have besides its own.

    Args:
      base: the program's own.
      recorded: what was seen when it was built.
      kinds: which of them.
      k_of_stack: how many microbatch steps its stack joins.
    """
    found = []
    dims = mtf.convert_to_shape(base.mesh_shape).dims
    size = mtf.convert_to_shape(base.mesh_shape).size

    def varied(name: str, **fields: Any) -> None:
        values = {
            "mesh_shape": base.mesh_shape,
            "layout": base.layout,
            "runtime": base.runtime,
            "changes": base.changes,
            "params": base.params,
            **fields,
        }
        found.append(Division(name, **values))

    def along(axis: str) -> str:
        return ";".join(f"{d.name}:{size if d.name == axis else 1}" for d in dims)

    batch_axes = axes_of_batch(base.layout, recorded)
    if "batch" in kinds and len(dims) > 1:
        for axis in batch_axes[:1]:
            varied(f"all {size} cores along {axis}", mesh_shape=along(axis))
    if "model" in kinds:
        for axis in [d.name for d in dims if d.name not in batch_axes]:
            varied(f"all {size} cores along {axis}", mesh_shape=along(axis))
    if "order" in kinds and len(dims) > 1:
        varied("axes in the reverse order", mesh_shape=shape_text(dims[::-1]))
    if (
        "microbatches" in kinds
        and recorded.sees_gradients
        and k_of_stack == 1
        and not _has_schedulers(base, recorded)
    ):
        changes = base.changes._replace(
            micro_steps=MICRO_STEPS, mesh=(base.mesh_shape, base.layout)
        )
        varied(f"{MICRO_STEPS} microbatch steps", changes=changes)
    if "wrappers" in kinds:
        for label in [x for x in recorded.stack if x not in base.changes.without]:
            varied(f"without {label}", changes=without(base, label))
    shards = masked_shards(recorded)
    if "masked" in kinds and shards > 1 and k_of_stack == 1:
        mask = tuple(number != shards - 1 for number in range(shards))
        varied(f"shard {shards - 1} masked", changes=base.changes._replace(mask=mask))
    if "runtimes" in kinds:
        for runtime in RUNTIMES:
            if runtime != base.runtime and not (runtime == "xla" and xla.why_no_xla()):
                varied(f"on {runtime}", runtime=runtime)
    return found


def without(base: Division, label: str) -> Changes:
    """What is changed of a program where one more wrapper is taken out."""
    return base.changes._replace(without=(*base.changes.without, label))


def _has_schedulers(base: Division, recorded: Recorded) -> bool:
    return any(label not in base.changes.without for label in recorded.schedulers)


def masked_shards(recorded: Recorded) -> int:
    """How many shards a `SyncReplicasOptimizer` of the stack has; 0 without one."""
    for wrapper in recorded.wrappers.values():
        if isinstance(wrapper, SyncReplicasOptimizer) and wrapper.axes is not None:
            return wrapper.axes.num_shards
    return 0


def axes_of_batch(layout: str, recorded: Recorded) -> list[str]:
    """The mesh axes that a layout splits the batch over."""
    names = recorded.batch_dims
    rules = mtf.convert_to_layout_rules(layout)
    pairs = sorted(rules._pairs)
    return [axis for name in names for dim, axis in pairs if dim == name]


def shape_text(dims: Sequence[mtf.Dimension]) -> str:
    """Writes a mesh shape as Mesh-TF reads it."""
    return ";".join(f"{d.name}:{d.size}" for d in dims)
