"""Checks a program's arguments: gradients and variables when given, tensors in every step."""

from __future__ import annotations

import inspect
import math
from typing import Any, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from mtf_gradsync._common import check_number, elements, is_number
from mtf_gradsync._private.libraries import TF_VALUES, mtf, tf
from mtf_gradsync._private.mesh_tensorflow import set_operation_outputs
from mtf_gradsync._private.tensorflow import in_loop_or_branch
from mtf_gradsync.gradients.operations import MaybeGradients, on_mesh
from mtf_gradsync.mesh.axes import is_simd
from mtf_gradsync.step.conditional import Watched
from mtf_gradsync.step.plan import PlanExtension, StepPlan

GradsAndVars = List[Tuple[Optional[mtf.Tensor], mtf.Variable]]


def check_gradients(grads: MaybeGradients) -> list[mtf.Tensor | None]:
    """Returns gradients as a new list, Nones included, after a check of their types and graph.

    Raises:
      TypeError: something is neither an mtf tensor nor None.
      ValueError: gradients are of several mtf graphs.
    """
    found = elements(grads)
    if found is None:
        raise TypeError(f"grads must be a list of mtf.Tensor or None, got {grads!r}.")
    grads = found
    for index, grad in enumerate(grads):
        if grad is not None and not isinstance(grad, mtf.Tensor):
            raise TypeError(f"grads must hold mtf.Tensor or None, but grads[{index}] is {grad!r}.")
    if len({g.graph for g in grads if g is not None}) > 1:
        raise ValueError(f"grads must be of one mtf graph, got those of several: {grads!r}.")
    return grads


def check_present(grads: MaybeGradients) -> list[mtf.Tensor]:
    """Returns a new list of the gradients that are not None; raises ValueError if all are None.

    Raises:
      TypeError: `check_gradients` raises it, or a gradient has an integer dtype.
      ValueError: `check_gradients` raises it, or there is no gradient.
    """
    grads = check_gradients(grads)
    present = [g for g in grads if g is not None]
    if not present:
        raise ValueError(f"grads must have a gradient that is not None, got {grads!r}.")
    for grad in present:
        if not grad.dtype.is_floating:
            raise TypeError(f"grads must be of floating dtypes, got {grad!r} of {grad.dtype.name}.")
    return present


def check_variables(variables: Iterable[Any]) -> list[mtf.Variable]:
    """Returns a new list of mtf.Variable; raises TypeError for anything else.

    An item of `variables` may also be the value of a variable (`variable.value`, a tensor). The
    returned list then has the variable in place of the value.
    """
    found = elements(variables)
    if found is None:
        raise TypeError(f"variables must be a list of mtf.Variable, got {variables!r}.")
    result = []
    for index, variable in enumerate(found):
        if isinstance(variable, mtf.Tensor) and isinstance(variable.operation, mtf.Variable):
            variable = variable.operation
        if not isinstance(variable, mtf.Variable):
            raise TypeError(
                f"variables must hold mtf.Variable, but variables[{index}] is {variable!r}."
            )
        result.append(variable)
    return result


def check_grads_and_variables(
    grads: Sequence[Any], variables: Sequence[Any], same_shapes: bool = False
) -> tuple[list[mtf.Tensor | None], list[mtf.Variable]]:
    """Returns gradients and their variables as two new lists; refuses lists that do not match.

    Gradients may be None. If `same_shapes` is true, each gradient must also have the shape of its
    variable. Optimizers ask for this if they cannot take gradients per shard, whose shapes begin
    with shard dims.

    Raises:
      TypeError: something is no gradient or no variable, or a gradient has an integer dtype.
      ValueError: lengths differ, a variable is listed twice, a gradient is on another mesh than
        its variable or (with `same_shapes`) of another shape, or there are several graphs.
    """
    variables = check_variables(variables)
    count = len({v.graph for v in variables})
    if count > 1:
        raise ValueError(
            f"The variables are of several mtf graphs, {count}: apply the gradients of each graph "
            "by a call of its own."
        )
    grads = check_gradients(grads)
    if len(grads) != len(variables):
        raise ValueError(
            f"grads and variables must have the same length, got {len(grads)} gradients for "
            f"{len(variables)} variables."
        )
    seen = set()
    for grad, variable in zip(grads, variables):
        if grad is not None and not grad.dtype.is_floating:
            raise TypeError(
                f"The gradient of {variable.name!r} must be of a floating dtype, got {grad.dtype}."
            )
        if variable in seen:
            raise ValueError(f"Variable {variable.name!r} is twice in variables; give it once.")
        seen.add(variable)
        if grad is not None and grad.mesh is not variable.mesh:
            raise ValueError(
                f"The gradient {grad.name!r} and its variable {variable.name!r} are on different "
                "meshes."
            )
        if same_shapes and grad is not None and grad.shape != variable.shape:
            raise ValueError(
                f"The gradient of {variable.name!r} has shape {grad.shape.to_string}, but the "
                f"variable has {variable.shape.to_string}."
            )
    return grads, variables


def check_one_mesh(grads: MaybeGradients, what: str) -> None:
    """Raises ValueError if gradients are on several meshes.

    `what` is the name of the function that the gradients were given to, for the error's text.
    """
    first: dict[mtf.Mesh, str] = {}
    for grad in grads:
        if grad is not None:
            first.setdefault(grad.mesh, grad.name)
    if len(first) > 1:
        raise ValueError(
            f"{what} needs gradients of one mesh, because shards are of one mesh, but "
            f"{' and '.join(map(repr, first.values()))} are on different meshes: call "
            f"{what} once for the gradients of each mesh."
        )


class PassedOnArguments(NamedTuple):
    """The further arguments of a call of `apply_grads`, after gradients and variables.

    Wrappers pass these arguments on to `apply_grads` of the innermost optimizer.
    """

    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = {}  # noqa: RUF012  # never changed

    def check(self, opt: Any) -> None:
        """Raises TypeError if `opt.apply_grads` does not take these arguments."""
        try:
            # The signature of a decorator counts, not that of the function inside.
            signature = inspect.signature(opt.apply_grads, follow_wrapped=False)
        except (TypeError, ValueError):
            return
        try:
            signature.bind(None, None, *self.positional, **self.named)
        except TypeError as error:
            given = [*map(repr, self.positional), *(f"{k}={v!r}" for k, v in self.named.items())]
            raise TypeError(
                f"The optimizer {opt!r} cannot be called with "
                f"apply_grads({', '.join(['grads', 'variables', *given])}): {error}. It takes "
                f"apply_grads{signature}; wrappers pass on all arguments after grads and "
                "variables."
            ) from None

    def named_tensors(self) -> Iterator[tuple[str, mtf.Tensor]]:
        """Yields a pair for each mtf tensor in the arguments: its name for errors, and the tensor.

        Tensors in arguments that are lists or dictionaries are found, too. For a variable, the
        tensor of its value is yielded.
        """
        for number, value in enumerate(self.positional):
            yield from _tensors_in(f"positional argument {number + 3}", value)
        for name, value in self.named.items():
            yield from _tensors_in(name, value)


def _tensors_in(name: str, value: Any) -> Iterator[tuple[str, mtf.Tensor]]:
    if isinstance(value, mtf.Variable):
        value = value.value
    if isinstance(value, mtf.Tensor):
        yield name, value
    elif isinstance(value, (list, tuple, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(name, inner)


def check_pairs(grads_and_vars: Any) -> GradsAndVars:
    """Returns `grads_and_vars` as a new list of checked pairs (gradient or None, variable).

    `grads_and_vars` is the argument that the method `apply_gradients` of an optimizer was given.

    Raises:
      TypeError: `check_grads_and_variables` raises it.
      ValueError: `check_grads_and_variables` raises it, or `grads_and_vars` is not a list of pairs,
        or it is empty.
    """
    wanted = "a list of (gradient, variable) pairs as compute_gradients returns"
    pairs = elements(grads_and_vars)
    if pairs is None:
        raise ValueError(f"grads_and_vars must be {wanted}, got {grads_and_vars!r}.")
    for index, pair in enumerate(pairs):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ValueError(f"grads_and_vars must be {wanted}, but item {index} is {pair!r}.")
    if not pairs:
        raise ValueError(f"grads_and_vars must be {wanted}, got no pair at all.")
    given, owners = zip(*pairs)
    grads, variables = check_grads_and_variables(given, owners)
    return list(zip(grads, variables))


def check_step(global_step: Any) -> None:
    """Checks that `global_step` is None, or a scalar variable of Mesh-TF or TensorFlow.

    Raises TypeError if `global_step` is neither None nor a variable, and ValueError if it is a
    variable but no scalar.
    """
    if global_step is None:
        return
    if isinstance(global_step, mtf.Tensor):
        global_step = global_step.operation
    if isinstance(global_step, mtf.Variable):
        shape = global_step.shape.to_integer_list
    elif callable(getattr(global_step, "assign_add", None)):  # every kind of tf variable
        shape = global_step.shape.as_list()
    else:
        raise TypeError(
            f"global_step must be an mtf.Variable or a tf.Variable, got {global_step!r}."
        )
    if shape:
        raise ValueError(f"global_step must be a scalar variable, got shape {shape}.")


def is_tensor(value: Any) -> bool:
    """Returns whether a value is a tensor or variable, Mesh-TF's or TensorFlow's."""
    return isinstance(value, (mtf.Tensor, mtf.Variable, *TF_VALUES))


def is_scalar(value: Any) -> bool:
    """Returns whether a value is a tensor or variable without dimensions."""
    return is_tensor(value) and value.shape.ndims == 0


class Bounds(NamedTuple):
    """The bounds of an argument that is a number.

    Attributes:
      least: the least value that is allowed.
      below: a number that all values have to be less than; None if a value may be infinite.
    """

    least: float
    below: float | None = None

    def __str__(self) -> str:
        if self.below is None:
            return f"{self.least:g} or more"
        if self.below == np.inf:
            return f"finite and {self.least:g} or more"
        return f"from {self.least:g} up to {self.below:g} (not included)"

    def contain(self, x: Any) -> Any:
        """Returns whether x is within the bounds; a NaN is not.

        The result is a bool if x is a number. If x is a numpy array or a tf tensor, it is an array
        or tensor of bools.
        """
        is_right = x >= self.least
        return is_right if self.below is None else is_right & (x < self.below)


def saturated_cast(value: Any, dtype: tf.DType) -> tf.Tensor:
    """Returns a number or tf tensor, cast to `dtype`, as a tf tensor.

    If both dtypes are integer dtypes, numbers that `dtype` cannot hold become its largest or its
    least number.
    """
    value = tf.convert_to_tensor(value)
    both = value.dtype.is_integer and dtype.is_integer
    return tf.saturate_cast(value, dtype) if both else tf.cast(value, dtype)


def scalar_of_step(
    value: Any, mesh: mtf.Mesh, dtype: tf.DType, argument: str, owner: str, bounds: Bounds
) -> mtf.Tensor:
    """Returns a scalar as an mtf scalar on a mesh, with an operation that checks it in each step.

    If `value` is out of bounds in a step, the step raises an error that names `owner`, `argument`
    and the value. Some programs cannot report errors (on TensorFlow's own TPU runtime, or in the
    body of a loop). In such a program, an integer out of bounds is replaced by the least allowed
    value, and any other value out of bounds by NaN.

    Args:
      value: a scalar tensor or variable, of Mesh-TF or TensorFlow.
      mesh: the mesh of the result.
      dtype: the dtype of the result.
      argument: the name of the argument that the value was given as.
      owner: the name of the optimizer or function that the value was given to.
      bounds: the bounds that each step checks.
    """
    plan = StepPlan.of(mesh.graph)
    scalars, key = plan.extension(_CheckedScalars), (id(value), mesh, dtype, argument, owner)
    _, known = scalars.made.get(key, (None, None))
    if known is not None and known.operation in mesh.graph.operations:
        return known
    given, value = value, value.value if isinstance(value, mtf.Variable) else value
    with plan.outside_of_branches([value] if isinstance(value, mtf.Tensor) else ()):
        if not isinstance(value, mtf.Tensor):
            value = mtf.import_tf_tensor(mesh, saturated_cast(value, dtype), mtf.Shape([]))
        if value.dtype != dtype:
            value = mtf.cwise(lambda x: saturated_cast(x, dtype), [value], dtype)
        checked = _CheckedScalar(on_mesh(value, mesh), f"{owner}: {argument}", bounds).outputs[0]
        if not plan.is_in_branch:
            scalars.made = {**scalars.made, key: (given, checked)}
    return checked


class _CheckedScalars(PlanExtension):
    """The checked scalars of a graph, by value, mesh, dtype, argument and owner.

    For a scalar that is here already, `scalar_of_step` makes no second check.
    """

    made: Mapping[Any, tuple[Any, mtf.Tensor]] = {}  # an object keeps its id as long as it lives


class _CheckedScalar(Watched):
    """A scalar, the same on all processors, for which each step checks that it is within bounds."""

    def __init__(self, value: mtf.Tensor, argument: str, bounds: Bounds):
        super().__init__([], [value], [], [], "checked_argument")
        self._bounds, self._text = bounds, f"{argument} must be {bounds}, got"
        set_operation_outputs(self, [mtf.Tensor(self, value.shape, value.dtype)])

    def lower(self, lowering: mtf.Lowering) -> None:
        mesh_impl, dtype = lowering.mesh_impl(self), self.inputs[0].dtype
        value = lowering.tensors[self.inputs[0]].to_laid_out_tensor()
        if not is_simd(mesh_impl):
            first = value.all_slices[0]
            check = tf.raw_ops.Assert(
                condition=self._bounds.contain(first), data=[self._text, first]
            )
            with tf.control_dependencies([check]):
                value = mesh_impl.slicewise(tf.identity, value)
        else:
            self.counts_are_readable = self.counts_are_readable and not in_loop_or_branch(
                tf.get_default_graph()
            )
            self.note_lowering(lowering)
            other = self._bounds.least if dtype.is_integer else np.nan

            def checked(x: tf.Tensor) -> tf.Tensor:
                return tf.where_v2(self._bounds.contain(x), x, tf.cast(other, x.dtype))

            value = mesh_impl.slicewise(checked, value)
        lowering.set_tensor_lowering(self.outputs[0], value)

    def split_counts(self, bits: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        return [], [bits.view(np.float32)[0]]

    def is_due(self, before: Sequence[Any] | None, now: Sequence[Any]) -> bool:
        return bool(now) and not self._bounds.contain(now[0])

    def find(
        self, before: Sequence[Any] | None, now: Sequence[Any], records: Sequence[Any]
    ) -> list[Any]:
        return [ValueError(f"{self._text} {now[0]:g}.")]

    def _lowered(self, lowering: mtf.Lowering, tensors: Sequence[mtf.Tensor]) -> list[tf.Tensor]:
        return [tf.cast(x, tf.float32) for x in super()._lowered(lowering, tensors)]


_RATES = Bounds(0.0, math.inf)


def check_rate(rate: Any) -> Any:
    """Checks a learning rate, and returns it: a number, or the scalar that was given.

    A learning rate may be a finite number of 0 or more. It may also be a scalar tensor or variable
    of a floating dtype, of Mesh-TF or TensorFlow.

    Raises:
      TypeError: the rate is neither a number nor a scalar of a floating dtype.
      ValueError: the rate is a number below 0, or not finite.
    """
    if is_number(rate):
        return check_number("learning_rate", rate, str(_RATES))
    dtype: Any = (
        rate.activation_dtype if isinstance(rate, mtf.Variable) else getattr(rate, "dtype", None)
    )
    if not is_scalar(rate) or not dtype.is_floating:
        raise TypeError(
            "learning_rate must be a number or a floating scalar, a tf or mtf tensor or variable, "
            f"got {rate!r}. For a schedule give the tensor that it returns, such as "
            "schedule(gs.get_update_step(mesh))."
        )
    return rate


def rate_of_step(rate: Any, mesh: mtf.Mesh, dtype: tf.DType, owner: str) -> Any:
    """Returns a learning rate that `check_rate` returned, for computing with it on a mesh.

    A number is returned as it is. A tensor or variable becomes an mtf scalar on `mesh`, of the
    dtype `dtype`. Each step then checks that the scalar is finite and not less than 0. `owner` is
    the name of the optimizer, for the error.
    """
    if is_number(rate):
        return rate
    return scalar_of_step(rate, mesh, dtype, "learning_rate", owner, _RATES)
