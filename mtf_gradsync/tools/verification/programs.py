"""The user's program: building it in a division (a mesh, layout and runtime), and running it."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence

import numpy as np

from mtf_gradsync.extension import (
    HeldSlices,
    is_simd,
    mean_loss,
    mtf,
    placement_mesh_impl,
    tf,
    warn_once,
)
from mtf_gradsync.runtimes._private.mesh_tensorflow import variables_of_cores
from mtf_gradsync.runtimes.sessions import program_session, runtime_for
from mtf_gradsync.runtimes.settings import session_config
from mtf_gradsync.runtimes.simd.communication import axes_between
from mtf_gradsync.runtimes.simd.replica_session import MeshVariables, VariableAccess, copy_array
from mtf_gradsync.tools.verification.comparing import LEAST, error_of
from mtf_gradsync.tools.verification.divisions import Division
from mtf_gradsync.tools.verification.program_patches import in_precision, recording
from mtf_gradsync.tools.verification.recorded_program import GRADIENT, RANDOM, RecordedProgram

Batch = Any  # a structure of arrays, the examples their first dimension
# Arrays of so many random numbers, or more, are never equal by chance.
_FEW = 4


class UserProgram:
    """A user's program: a model_fn, or a function that builds a step on a mesh.

    Args:
      function: `model_fn(features, labels, mode, params[, config])`, which returns a spec; or
        `step(mesh, inputs, params)`, which returns a loss and mtf operations, where `inputs` has
        the structure of a batch.
      params: the settings that the function gets; "mesh_shape" and "layout" are among them.
    """

    def __init__(self, function: Callable[..., Any], params: Mapping[str, Any]):
        self.function, self.params = function, dict(params)
        names = inspect.signature(function).parameters
        self.is_model_fn = "mode" in names
        self._names = set(names)

    def build(self, division: Division, batch: Batch) -> BuiltDivision:
        """Builds the program in a division, in a new TensorFlow graph.

        The program's inputs are placeholders with the shapes and dtypes of the arrays in `batch`.
        """
        params = {**self.params, **dict(division.params)}
        params.update(mesh_shape=division.mesh_shape, layout=division.layout)
        if "batch_size" in params:
            params["batch_size"] = size_of(batch)
        with tf.Graph().as_default() as graph, contextlib.ExitStack() as blocks:
            tf.set_random_seed(1)
            # Ref variables race; a TPU program makes its variables resource variables in any case.
            tf.get_variable_scope().set_use_resource(True)
            inputs = tf.nest.map_structure(
                lambda x: tf.placeholder(tf.as_dtype(x.dtype), x.shape), batch
            )
            tf.train.get_or_create_global_step()
            recorded = blocks.enter_context(recording(division.changes))
            if division.precision:
                blocks.enter_context(in_precision(tf.as_dtype(division.precision)))
            place = runtime_for(division.runtime, division.mesh_shape, division.layout)
            program = blocks.enter_context(place.building())
            if program is not None:
                params["mesh_impl"] = program.mesh_impl
            elif not division.is_reference and not tf.resource_variables_enabled():
                warn_once(
                    "ref variables",
                    "This program is verified with resource variables, but on placement meshes it "
                    "makes TensorFlow ref variables, whose reads and writes race. Call "
                    "tf.compat.v1.enable_resource_variables() after "
                    "tf.compat.v1.disable_v2_behavior().",
                )
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
        # A program without the argument mesh_impl gets a context, as under TPUEstimator.
        if program is not None and "mesh_impl" not in self._names:
            params = {**params, "context": program.tpu_context, "use_tpu": True}
        features, labels = inputs if isinstance(inputs, tuple) else (inputs, None)
        given = {
            "features": features,
            "labels": labels,
            "mode": "train",
            "params": params,
            "config": None,
            "mesh_impl": params.get("mesh_impl"),
        }
        spec = self.function(**{k: v for k, v in given.items() if k in self._names})
        return spec.loss, [spec.train_op]


class NotOnCoresError(ValueError):
    """The error of a program that makes a placement mesh although a SIMD runtime was requested."""


class BuiltDivision(NamedTuple):
    """A program, built in a division.

    Attributes:
      division: the division.
      graph: the TensorFlow graph of the program.
      program: the SIMD program; None on a placement mesh.
      recorded: what was recorded while the program was built.
      inputs: the placeholders of a batch.
      loss: the mean loss.
      weight: the weight of the loss; None if the program gives none.
      updates: the operations to run in a step.
    """

    division: Division
    graph: tf.Graph
    program: Any
    recorded: RecordedProgram
    inputs: list[tf.Tensor]
    loss: tf.Tensor
    weight: tf.Tensor | None
    updates: list[Any]

    @contextlib.contextmanager
    def session(self) -> Iterator[Running]:
        """Opens a session in which variables have their initial values, until the block ends.

        Raises:
          ValueError: the program has lowered nothing.
          NotOnCoresError: the program makes a placement mesh although a SIMD runtime was requested.
        """
        lowerings = self.recorded.lowerings
        if not lowerings:
            name = self.division.name
            raise ValueError(f"The program ({name}) has lowered nothing: it makes no mtf.Lowering.")
        if self.program is not None and not self.recorded.is_simd:
            raise NotOnCoresError(
                f"The program makes a placement mesh of its own: on {self.division.runtime} it has "
                "to lower on params['mesh_impl'], or by params['context'] as under TPUEstimator."
            )
        with self.graph.as_default():
            if self.program is not None:
                name = self.division.runtime
                with program_session(name, self.program, lowerings, cache_dir=None) as session:
                    yield Running(self, session)
                return
            on_mesh = MeshVariables(self.graph, lowerings)
            init = [
                tf.global_variables_initializer(),
                tf.local_variables_initializer(),
                tf.tables_initializer(),
            ]
            sizes = [impl.size for x in lowerings for impl in x.mesh_to_impl.values()]
            config = session_config(num_cpu_devices=max(sizes))
            # Rewriting the graph takes longer than it saves in a few steps.
            config.graph_options.rewrite_options.disable_meta_optimizer = True
            with tf.Session(config=config) as session:
                session.run(init)
                session.run(on_mesh.to_slices)
                yield Running(self, session, on_mesh)


class Running:
    """A session of a built program.

    Args:
      built: the built program.
      session: the session of its runtime.
      on_mesh: the variables of the graph on a placement mesh; None for a SIMD program.
    """

    def __init__(self, built: BuiltDivision, session: Any, on_mesh: MeshVariables | None = None):
        self.built, self._session, self._on_mesh = built, session, on_mesh
        self._names = [v.op.name for v in tf.global_variables()]
        self._is_stepped = False

    def step(self, batch: Batch) -> tuple[float, float]:
        """Runs a step on a batch; returns two numbers: the mean loss, and the weight of the loss.

        The weight is 1 if the program gives no weights for its losses.
        """
        built, self._is_stepped = self.built, True
        feed = dict(zip(built.inputs, map(copy_array, tf.nest.flatten(batch))))
        fetches = [built.loss, *([] if built.weight is None else [built.weight])]
        (loss, *weight), _ = self._session.run([fetches, built.updates], feed)
        return float(np.mean(loss)), float(np.mean(weight)) if weight else 1.0

    def values(self) -> dict[str, np.ndarray]:
        """Returns a dictionary from the names of all variables to their values."""
        if self._on_mesh is None:
            return self._session.variables()
        return self._on_mesh.read(self._session, self._names)

    def write(self, values: Mapping[str, np.ndarray]) -> None:
        """Sets the variables that `values` names; ignores names and shapes that do not fit."""
        there = self.values()
        fitting = {k: v for k, v in values.items() if k in there and there[k].shape == v.shape}
        fitting = {k: np.asarray(v, there[k].dtype) for k, v in fitting.items()}
        if self._on_mesh is None:
            self._session.write(fitting)
        else:
            self._on_mesh.write(self._session, fitting, begins=not self._is_stepped)

    def compare_cores(self) -> tuple[list[str], list[tuple[str, str]]]:
        """Finds copies that differ between cores, and random numbers that cores wrongly share.

        Returns:
          Two lists. The first has the names of variables whose slice, or the slice's gradient,
          differs between two cores that should hold equal copies of it. The second has a pair for
          each tensor of random numbers that should differ between two cores, because they hold
          different slices of it, and is equal on both. The pair is the name of the tensor, and the
          mesh axes in whose coordinates the two cores differ.
        """
        inside = self._session
        if self._on_mesh is None:
            self._session.variables()  # brings the slices to TensorFlow
            inside = self._session.tf_session
        access = VariableAccess(inside.graph)
        lowered = {
            variable: (lowering.mesh_impl(variable), laid_out.laid_out_tensor)
            for lowering in self.built.recorded.lowerings
            for variable, laid_out in lowering.variables.items()
            if not isinstance(laid_out, HeldSlices)  # these are slices of another variable
        }
        reads = {}
        for variable, (mesh_impl, laid_out) in lowered.items():
            if is_simd(mesh_impl):
                of_cores = [x.op.name for x in variables_of_cores(laid_out.one_slice)]
                names = [of_cores[mesh_impl.l2p(core)] for core in range(mesh_impl.size)]
                reads[variable] = [access.read[name] for name in names]
            else:
                reads[variable] = laid_out.to_laid_out_tensor().tensor_list
        # In one call, as TensorFlow prepares the whole graph for each new set of fetches.
        values = inside.run(reads)
        found, alike = [], []
        for variable, (mesh_impl, _) in lowered.items():
            first: dict[Any, tuple[int, dict[str, np.ndarray]]] = {}
            stacked = getattr(variable, "original_names", None)
            for core, part in enumerate(map(np.asarray, values[variable])):
                begin = tuple(mesh_impl.slice_begin(variable.shape, core))
                parts = dict(zip(stacked, part)) if stacked else {variable.name: part}
                _, others = first.setdefault(begin, (core, parts))
                found += [name for name, x in parts.items() if error_of(x, others[name]) > LEAST]
            for (core, parts), (other, others) in itertools.combinations(first.values(), 2):
                axes = " and ".join(axes_between(mesh_impl.shape, core, other))
                for name in [name for name in parts if name.endswith(RANDOM)]:
                    if parts[name].size >= _FEW and np.array_equal(parts[name], others[name]):
                        alike.append((name[: -len(RANDOM)], axes))
        names = [name.removesuffix(GRADIENT).removesuffix(RANDOM) for name in found]
        order = {name: number for number, name in enumerate(self.built.recorded.order)}
        apart = sorted(dict.fromkeys(names), key=lambda name: order.get(name, len(order)))
        # Pairs of cores that differ along one axis only come first.
        return apart, sorted(dict.fromkeys(alike), key=lambda pair: pair[1].count(" "))


def size_of(batch: Batch) -> int:
    """Returns the number of examples in a batch: the size of the first dimension of its arrays.

    The result is 1 if the batch has only single numbers, and no array with a dimension.
    """
    return next((len(x) for x in tf.nest.flatten(batch) if np.ndim(x)), 1)


def joined_batch(batches: Sequence[Batch]) -> Batch:
    """Returns one batch with the examples of several batches, one batch after the other.

    An input that is a single number is for all examples of a batch. If the batches have different
    numbers for this input, the function raises ValueError.
    """

    def joined(*parts: Any) -> Any:
        if np.ndim(parts[0]):
            return np.concatenate(parts)
        if any(part != parts[0] for part in parts):
            raise ValueError(
                f"An input that is a single number is {parts[0]} in one microbatch step, and has "
                "another value in another step of the same update: one batch cannot have both."
            )
        return parts[0]

    return tf.nest.map_structure(joined, *batches)


def batch_parts(batch: Batch, count: int) -> list[Batch]:
    """Splits a batch into `count` equal parts; raises ValueError if that is impossible."""
    size = size_of(batch)
    if size % count:
        raise ValueError(f"A batch of {size} cannot be divided into {count} microbatches.")
    each = size // count
    return [select_examples(batch, slice(n * each, (n + 1) * each)) for n in range(count)]


def select_examples(batch: Batch, rows: Any) -> Batch:
    """Returns a batch that has only some of the examples of a batch.

    `rows` says which examples these are. It is an array of their indices, a Python slice, or a mask
    with a bool for each example of `batch`. An input that is a single number is for all examples,
    and is not changed.
    """
    return tf.nest.map_structure(lambda x: x[rows] if np.ndim(x) else x, batch)
