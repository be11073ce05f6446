"""Checks of gradients and variables, before anything is created in a graph."""

from __future__ import annotations

from typing import Any, Iterable, List, Optional, Sequence, Tuple

from mtf_gradsync._private.libraries import mtf

MaybeGradients = Sequence[Optional[mtf.Tensor]]
GradsAndVars = List[Tuple[Optional[mtf.Tensor], mtf.Variable]]


def check_gradients(grads: MaybeGradients) -> list[mtf.Tensor | None]:
    """Returns grads as a new list; raises TypeError for what is neither an mtf tensor nor None."""
    if isinstance(grads, mtf.Tensor) or not hasattr(grads, "__iter__"):
        raise TypeError(f"grads must be a list of mtf.Tensor or None, got {grads!r}.")
    grads = list(grads)
    for index, grad in enumerate(grads):
        if grad is not None and not isinstance(grad, mtf.Tensor):
            raise TypeError(f"grads must hold mtf.Tensor or None, but grads[{index}] is {grad!r}.")
    return grads


def check_variables(variables: Iterable[Any]) -> list[mtf.Variable]:
    """Returns variables, or variables of given values, as a new list of mtf.Variable."""
    if isinstance(variables, (mtf.Variable, mtf.Tensor)) or not hasattr(variables, "__iter__"):
        raise TypeError(f"variables must be a list of mtf.Variable, got {variables!r}.")
    result = []
    for index, variable in enumerate(variables):
        if isinstance(variable, mtf.Tensor) and isinstance(variable.operation, mtf.Variable):
            variable = variable.operation
        if not isinstance(variable, mtf.Variable):
            raise TypeError(
                f"variables must hold mtf.Variable, but variables[{index}] is {variable!r}."
            )
        result.append(variable)
    return result


def check_grads_and_variables(
    grads: Sequence[Any], variables: Sequence[Any]
) -> tuple[list[mtf.Tensor | None], list[mtf.Variable]]:
    """Returns gradients and variables as new lists, which belong together; does not check shapes.

    Raises:
      TypeError: something is no gradient, no variable, or a gradient of integers.
      ValueError: lengths differ, a variable is listed twice, a gradient is on another mesh than
        its variable, or there are several graphs.
    """
    grads, variables = check_gradients(grads), check_variables(variables)
    if len(grads) != len(variables):
        raise ValueError(
            f"grads and variables must have the same length, got {len(grads)} gradients for "
            f"{len(variables)} variables."
        )
    seen = set()
    if len({v.graph for v in variables}) > 1:
        count = len({v.graph for v in variables})
        raise ValueError(
            f"The variables are of several mtf graphs, {count}: apply those of each by itself."
        )
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
    return grads, variables


def check_one_mesh(grads: MaybeGradients, what: str) -> None:
    """Raises ValueError if gradients are on several meshes; `what` needs those of one mesh."""
    first: dict[mtf.Mesh, str] = {}
    for grad in grads:
        if grad is not None:
            first.setdefault(grad.mesh, grad.name)
    if len(first) > 1:
        raise ValueError(
            f"{what} needs gradients of one mesh, because shards are of one mesh, but "
            f"{' and '.join(map(repr, first.values()))} are on different ones: call it for those "
            "of each mesh."
        )


def check_pairs(grads_and_vars: Any) -> GradsAndVars:
    """Returns the argument of apply_gradients as a new list of (gradient or None, variable).

    Raises:
      TypeError: as `check_grads_and_variables`.
      ValueError: it is not a list of pairs, or empty, or as `check_grads_and_variables`.
    """
    wanted = "a list of (gradient, variable) pairs as compute_gradients returns"
    if not hasattr(grads_and_vars, "__iter__") or isinstance(grads_and_vars, (str, mtf.Tensor)):
        raise ValueError(f"grads_and_vars must be {wanted}, got {grads_and_vars!r}.")
    pairs = list(grads_and_vars)
    for index, pair in enumerate(pairs):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ValueError(f"grads_and_vars must be {wanted}, but item {index} is {pair!r}.")
    if not pairs:
        raise ValueError(f"grads_and_vars must be {wanted}, got no pair at all.")
    grads, variables = check_grads_and_variables(*zip(*pairs))
    return list(zip(grads, variables))


def check_step(global_step: Any) -> None:
    """Raises TypeError if global_step is neither None nor a scalar mtf or tf variable."""
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
