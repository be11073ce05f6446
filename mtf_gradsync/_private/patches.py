"""Patches of Mesh-TensorFlow, TensorFlow and gin; each leaves a mark on what it has replaced."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import itertools
import sys
import weakref
from typing import Any, Callable, Iterator, Mapping, NoReturn, TypeVar

import gin
from absl import flags
from tensorflow.python.framework.ops import register_proto_function

from mtf_gradsync._common import mixed
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import CALLS, MESHES, GradientsCall, Seed
from mtf_gradsync._private.tensorflow import advance_step_after, is_in_loop

# The attribute of a function for the names of the patches in it. Not `__wrapped__`, which every
# decorator may set. `functools.wraps` of a decorator around the function copies the attribute.
_PATCHES = "mtf_gradsync_patches"


def patch(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replaces a library's function by another one, once: a second call does nothing.

    Args:
      owner: the module or class that has the function.
      name: the function's name in it.
      replacement: the new function. It is called with the function that was there, which other
        libraries may have changed, followed by the arguments of the call. The name of `replacement`
        identifies the patch.
    """
    there = getattr(owner, name)
    this = f"{replacement.__module__}.{replacement.__qualname__}"
    before = getattr(there, _PATCHES, ())
    if this in before:
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(there, *args, **kwargs)

    made: Any = functools.wraps(there)(call)
    # Readers that do not follow `__wrapped__` see the arguments of the library, too.
    made.__signature__ = inspect.signature(there)
    setattr(made, _PATCHES, (*before, this))
    setattr(owner, name, made)


def patch_when_called(owner: Any, name: str, place: str) -> None:
    """Replaces a library's function by one whose module is loaded when it is first called.

    Args:
      owner: the module or class that has the library's function.
      name: the function's name in it.
      place: the full name of the new function. The new function is called with the library's
        function, followed by the arguments of the call.
    """
    module, _, function = place.rpartition(".")

    def load_and_call(there: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), function)(there, *args, **kwargs)

    load_and_call.__qualname__ = place
    patch(owner, name, load_and_call)


_Function = TypeVar("_Function")
# Names that gin may bind whose modules are not loaded yet, and these modules.
_when_named: dict[str, str] = {}


def configurable_when_named(places: Mapping[str, str]) -> None:
    """Makes gin load the module of a configurable when a gin configuration first names it.

    Args:
      places: maps the names of configurables, without their gin modules, to the Python modules that
        register them by `late_configurable`.
    """
    _when_named.update(places)

    patch(gin.config._REGISTRY, "matching_selectors", _load_and_find)


def _load_and_find(find: Any, selector: str) -> list[str]:
    place = _when_named.get(selector.split(".")[-1])
    if place and place not in sys.modules:
        importlib.import_module(place)
    return find(selector)


def load_configurables() -> None:
    """Loads all modules that were given to `configurable_when_named`, so that gin knows them."""
    for place in _when_named.values():
        importlib.import_module(place)


def late_configurable(*args: Any, **kwargs: Any) -> Callable[[_Function], _Function]:
    """Returns a decorator like `gin.configurable` that also works when gin's config is locked.

    The arguments are those of `gin.configurable`, such as `module=`.
    """

    def register(function: _Function) -> _Function:
        with gin.unlock_config():
            return gin.configurable(*args, **kwargs)(function)

    return register


def call_around_lowering(
    before: Callable[[mtf.Graph], None], after: Callable[[mtf.Lowering, int], None]
) -> None:
    """Makes Mesh-TF call `before` and `after` around every lowering of a graph.

    `before` gets the mtf graph, and may add operations. `after` gets the lowering, and the number
    of operations that TensorFlow's graph had before the lowering.
    """

    def call_and_lower(
        lower: Any, self: mtf.Lowering, graph: mtf.Graph, *args: Any, **kwargs: Any
    ) -> None:
        before(graph)
        first = tf.get_default_graph().version
        lower(self, graph, *args, **kwargs)
        after(self, first)

    def call_and_rewrite(rewrite: Any, self: mtf.Graph, *args: Any, **kwargs: Any) -> None:
        before(self)
        rewrite(self, *args, **kwargs)

    patch(mtf.Lowering, "__init__", call_and_lower)
    patch(mtf.Graph, "rewrite_stack_variables", call_and_rewrite)


def exclude_from_combining(kind: type) -> None:
    """Makes `mtf.Graph.combine_assignments` leave operations of the class `kind` as they are."""

    def combine_others(
        combine: Any, self: mtf.Graph, assignments: list[mtf.Operation]
    ) -> list[mtf.Operation]:
        apart = [op for op in assignments if isinstance(op, kind)]
        if not apart:
            return combine(self, assignments)
        return combine(self, [op for op in assignments if not isinstance(op, kind)]) + apart

    patch(mtf.Graph, "combine_assignments", combine_others)


def _refuse(x: Any, dtype: Any = None, name: Any = None, as_ref: bool = False) -> NoReturn:
    """Makes TensorFlow's operations refuse mtf tensors with an error that says what to do.

    The error stays a TypeError. So ``tf_tensor * mesh_tensor`` still calls the mesh tensor's
    multiplication.
    """
    del dtype, name, as_ref
    raise TypeError(
        f"An operation of TensorFlow cannot take {x!r}, which belongs to Mesh-TensorFlow: it has "
        "no value before it is lowered. Use what does the same on the mesh: mtf.reduce_sum and "
        "the like for operations, gs.clip_by_global_norm in place of tf.clip_by_global_norm (with "
        "a list of one gradient, also in place of tf.clip_by_norm), and "
        "gs.MeshOptimizer(optimizer) in place of an optimizer of tf.compat.v1.train. After the "
        "lowering, the value of a tensor is lowering.export_to_tf_tensor(tensor)."
    )


def _as_bytes_list(
    summary: tuple[str, tf.Tensor], export_scope: str | None = None
) -> tf.train.BytesList | None:
    name, tensor = summary
    if export_scope and not tensor.name.startswith(export_scope):
        return None
    return tf.train.BytesList(value=[name.encode(), tensor.name.encode()])


def _from_bytes_list(
    proto: tf.train.BytesList, import_scope: str | None = None
) -> tuple[str, tf.Tensor]:
    name, tensor = (value.decode() for value in proto.value)
    if import_scope:
        tensor = f"{import_scope}/{tensor}"
    return name, tf.get_default_graph().get_tensor_by_name(tensor)


# Mesh-TF multiplies the gradient by this number: so small that it changes nothing except by a NaN.
_NOTHING = 1e-30


def _recompute_each_shard_by_itself(
    unused_original: Any,
    explicit_inputs: list[mtf.Tensor],
    all_inputs: list[mtf.Tensor],
    forward_operations: list[mtf.Operation],
    outputs: list[mtf.Tensor],
    output_grads: list[mtf.Tensor],
    control_dependencies: bool,
) -> list[mtf.Tensor | None]:
    """Returns a gradient by each of `all_inputs`, or None, for a block of `mtf.recompute_grad`.

    Makes `mtf.recompute_grad` wait for each example's own gradient, not for a sum of them. Without
    the patch, Mesh-TF adds a tiny number to the inputs of a block: a part of the incoming
    gradient's sum over all examples. This keeps XLA from merging the second computation of the
    block with the first. But the sum takes an all-reduce for each block, and spreads a NaN of one
    shard to all gradients.

    The block is computed again from its inputs by copies of `forward_operations`, which first
    computed `outputs`. `explicit_inputs` are those of the inputs that the block gets as arguments.
    `output_grads` are the gradients by `outputs`. If `control_dependencies` is true, the second
    computation waits for `output_grads`.
    """
    given = {t: t for t in all_inputs}
    if control_dependencies:
        given.update(
            _copies_computed_after(
                output_grads[0], [t for t in explicit_inputs if t.dtype.is_floating]
            )
        )
    operations, copies = all_inputs[0].graph.clone_operations(forward_operations, given)
    grads = mtf.ops.gradients(
        ys=[copies[t] for t in outputs],
        xs=[given[t] for t in all_inputs],
        grad_ys=output_grads,
        operations=operations,
    )
    for x, grad in zip(all_inputs, grads):
        if x.dtype.is_floating and grad is None:
            raise ValueError(f"mtf.recompute_grad: the block has no gradient by {x}.")
    return grads


def _copies_computed_after(
    grad: mtf.Tensor, tensors: list[mtf.Tensor]
) -> dict[mtf.Tensor, mtf.Tensor]:
    """Returns copies of some of `tensors` that can be computed only once `grad` is computed.

    The result maps the tensors to their copies. The tensors that have the gradient's first
    dimension (the examples) are copied, and each example then waits for its own gradient. Tensors
    without this dimension would have to wait for a sum over examples. If no tensor has this
    dimension, the tensors that share most dimensions with the gradient are copied. Variables are
    copied only if there are no other tensors.
    """
    first = grad.shape.dims[:1]
    shared = {t: [d for d in grad.shape.dims if d in t.shape.dims] for t in tensors}
    made = [t for t in tensors if not isinstance(t.operation, mtf.Variable)] or tensors
    most = max((len(shared[t]) for t in made), default=0)
    waiting = [t for t in made if first and first[0] in shared[t]]
    waiting = waiting or [t for t in made if len(shared[t]) == most]
    nothing = grad * _NOTHING
    return {
        t: t + mtf.cast(mtf.reduce_sum(nothing, output_shape=mtf.Shape(shared[t])), t.dtype)
        for t in waiting
    }


def _keep_mask_finite(
    init: Any, self: mtf.ScalarMultiplyOperation, x: mtf.Tensor, scalar: Any, **how: Any
) -> None:
    """Makes Mesh-TF multiply float16 masks by the lowest finite number instead of -1e9.

    In float16 -1e9 is infinite, and its product with the zeros of a mask is NaN.
    """
    if x.dtype == tf.float16 and isinstance(scalar, float) and scalar == _MASK:
        scalar = float(tf.float16.min)
    init(self, x, scalar, **how)


# Mesh-TF multiplies masks by this number.
_MASK = -1e9


class _OwnFlags:
    """A stand-in for absl's flags that parses only the flag that is read.

    Mesh-TF's SIMD meshes have two flags. If the program has not parsed absl's flags, TensorFlow
    parses the whole command line as soon as one flag is read. If the program parses its arguments
    by argparse, TensorFlow then ends the program, because the command line has arguments that absl
    does not know. Once the program has parsed absl's flags, the stand-in returns their values.
    """

    def __getattr__(self, name: str) -> Any:
        if flags.FLAGS.is_parsed() or name not in flags.FLAGS:
            return getattr(flags.FLAGS, name)
        alone = flags.FlagValues()
        alone[name] = copy.deepcopy(flags.FLAGS[name])
        alone(sys.argv or [""], known_only=True)
        return alone[name].value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(flags.FLAGS, name, value)


def _check_imported_shape(
    init: Any,
    self: mtf.ImportOperation,
    mesh: mtf.Mesh,
    tf_tensor: Any,
    shape: mtf.Shape,
    name: str | None = None,
) -> None:
    """Makes a step fail if an imported tf tensor has another shape than its mtf tensor.

    Without this patch, a program can train on a part of the batch and not notice it. This happens
    if the imported tensor is larger than the mtf tensor, and TensorFlow does not know the imported
    tensor's shape when the step is built. A mesh then takes only as much of the imported tensor as
    the mtf tensor holds.
    """
    tf_tensor = tf.convert_to_tensor(tf_tensor)
    expected = shape.to_integer_list
    is_known = tf_tensor.shape.is_fully_defined()
    if not is_known and tf_tensor.shape.is_compatible_with(expected):
        tf_tensor = tf.ensure_shape(tf_tensor, expected)
    init(self, mesh, tf_tensor, shape, name)


def _note_mesh(init: Any, self: mtf.MeshImpl, *args: Any, **kwargs: Any) -> None:
    """Makes every TensorFlow graph record the meshes made in it, which `meshes_made` returns."""
    init(self, *args, **kwargs)
    tf.add_to_collection(MESHES, self)


def _note_gradients(
    gradients: Any,
    ys: list[mtf.Tensor],
    xs: list[mtf.Tensor],
    grad_ys: list[mtf.Tensor] | None = None,
    operations: list[mtf.Operation] | None = None,
) -> list[mtf.Tensor | None]:
    """Makes every mtf graph record its calls of `mtf.gradients`, which `gradients_calls` returns.

    Calls with given gradients of the losses (`grad_ys`) are not recorded.
    """
    if grad_ys:
        return gradients(ys, xs, grad_ys, operations)
    seeds = [Seed(y.mesh, 1.0, y.shape, y.dtype) for y in ys]
    grads = gradients(ys, xs, [seed.outputs[0] for seed in seeds], operations)
    pairs = [(g, x) for g, x in zip(grads, xs) if g is not None]
    call = GradientsCall(list(ys), seeds, [g for g, _ in pairs], [x for _, x in pairs])
    vars(ys[0].graph).setdefault(CALLS, []).append(call)
    return grads


_STATELESS = {
    tf.random.uniform: tf.random.stateless_uniform,
    tf.random.normal: tf.random.stateless_normal,
    tf.random.truncated_normal: tf.random.stateless_truncated_normal,
}


def _draw_by_step(
    draw: Any, self: Any, shape: mtf.Shape, tf_fn: Any, kwargs: dict[str, Any]
) -> Any:
    """Makes random numbers of placement meshes repeatable: they depend on the step and a seed.

    Mesh-TF seeds TensorFlow's generators by Python's random numbers and hash, and the generators
    begin anew in each session. The patch has an effect in a graph with a seed and a global step (a
    resource variable). With the patch, the same program gets the same random numbers in each
    process, and in a run that was resumed. In loops, and in graphs without a seed or a global step,
    random numbers are made as without this package.
    """
    stateless = _STATELESS.get(tf_fn)
    numbers = None if stateless is None else _StepSeeds.of(tf.get_default_graph())
    if stateless is None or numbers is None:
        return draw(self, shape, tf_fn, kwargs)
    slice_shape, operation = self.slice_shape(shape), next(numbers.operations)

    def of_slice(processor: int) -> tf.Tensor:
        # Slices that are the same part of a tensor have the same numbers.
        word = operation
        for begin in self.slice_begin(shape, processor):
            word = mixed(word, begin)
        key = tf.constant([mixed(word, numbers.seed), word], tf.int64)
        seed = tf.bitwise.bitwise_xor(numbers.step, key)
        return stateless(slice_shape, seed=seed, **kwargs)

    return self.slicewise(of_slice, self.laid_out_pnum())


class _StepSeeds:
    """The numbers that a graph's random operations make their seeds of; they differ in each step.

    Attributes:
      seed: the seed of the graph.
      step: an int64 tensor ``[2]`` with other values in each step.
      operations: an iterator over 1, 2, ...; each random operation takes one number.
    """

    def __init__(self, graph: tf.Graph, counter: Any):
        self.seed: int = graph.seed
        self.operations: Iterator[int] = itertools.count(1)
        with tf.control_dependencies(None), tf.name_scope("random_step"), tf.device(counter.device):
            self.step = _numbers_of_run(counter)

    @classmethod
    def of(cls, graph: tf.Graph) -> _StepSeeds | None:
        """Returns the `_StepSeeds` of a graph; None if random operations cannot depend on the step.

        The result is None for a graph without a seed or without a global step (a resource
        variable), and while operations are made inside of a loop.
        """
        if graph.seed is None or is_in_loop(graph):
            return None
        if graph not in _OF_GRAPH:
            counter = tf.train.get_global_step(graph)
            if counter is None or getattr(counter, "handle", None) is None:
                return None
            _OF_GRAPH[graph] = cls(graph, counter)
        return _OF_GRAPH[graph]


_OF_GRAPH: weakref.WeakKeyDictionary[tf.Graph, _StepSeeds] = weakref.WeakKeyDictionary()


def _numbers_of_run(counter: Any) -> tf.Tensor:
    """Returns an int64 tensor ``[2]`` that has other values in each run of the program's step.

    The second number is the value of `counter`, the global step. The first number counts the runs
    directly before this one that had the same value of `counter`.
    """
    count = tf.cast(counter.read_value(), tf.int64)
    advance_step_after(counter, [count.op])
    raw = tf.raw_ops
    # Nothing initializes this variable: it is in no collection, and in no checkpoint.
    last = raw.VarHandleOp(
        dtype=tf.int64, shape=[2], shared_name=tf.get_default_graph().unique_name("last")
    )
    before = tf.cond(
        raw.VarIsInitializedOp(resource=last),
        lambda: raw.ReadVariableOp(resource=last, dtype=tf.int64),
        lambda: tf.constant([0, -1], tf.int64),
    )
    stands = tf.cast(tf.equal(before[1], count), tf.int64)
    words = tf.stack([stands * (before[0] + 1), count])
    with tf.control_dependencies([raw.AssignVariableOp(resource=last, value=words)]):
        return tf.identity(words)


# What is replaced of Mesh-TF: the owner, the function's name, and the function in its place.
_REPLACED = (
    (mtf.ImportOperation, "__init__", _check_imported_shape),
    (mtf.MeshImpl, "__init__", _note_mesh),
    (mtf.ScalarMultiplyOperation, "__init__", _keep_mask_finite),
    (mtf, "gradients", _note_gradients),
    (mtf.ops, "gradients", _note_gradients),
    (mtf.ops, "_recompute_grad_grad", _recompute_each_shard_by_itself),
    (mtf.placement_mesh_impl.PlacementMeshImpl, "random", _draw_by_step),
)


def patch_libraries() -> None:
    """Makes the patches that need nothing else of this package, each once."""
    for owner, name, replacement in _REPLACED:
        patch(owner, name, replacement)
    if not isinstance(mtf.simd_mesh_impl.FLAGS, _OwnFlags):
        mtf.simd_mesh_impl.FLAGS = _OwnFlags()
    tf.register_tensor_conversion_function((mtf.Tensor, mtf.Variable), _refuse)
    # Savers cannot write Mesh-TF's collection of scalar summaries into meta graph files by
    # themselves: they would log a warning, and leave the collection out.
    summaries = mtf.utils.SCALAR_SUMMARIES_COLLECTION_KEY
    with contextlib.suppress(KeyError):  # somebody has done it before
        register_proto_function(summaries, tf.train.BytesList, _as_bytes_list, _from_bytes_list)
