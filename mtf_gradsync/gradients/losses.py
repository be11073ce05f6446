"""Finds the losses behind gradients, scales them, and unscales the gradients."""

from __future__ import annotations

import math
from typing import Any, Callable, Container, Iterable, Iterator, Sequence, Union

from mtf_gradsync._common import walk
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import Seed, computed_from, gradients_calls, loop_body
from mtf_gradsync.gradients.flow import linear_positions
from mtf_gradsync.gradients.operations import MaybeGradients, map_present, on_mesh
from mtf_gradsync.step.plan import PlanExtension, StepPlan, flat

Scale = Union[float, mtf.Tensor]
_SHARED = (
    "The gradient of {name!r} comes from a call of mtf.gradients whose losses {owner} scales, and "
    "is applied by another optimizer, which would apply it multiplied by the scale: give the "
    "gradient to {owner}, or compute it by a separate call of mtf.gradients."
)


class ScaledLosses(PlanExtension):
    """A graph's record of which losses are scaled, and which gradients are without the scale."""

    def __init__(self) -> None:
        # For each seed its scale, and the name of the optimizer that set it.
        self.scales: dict[Seed, tuple[Scale, str]] = {}
        # Gradients without the scale, each with the name of the optimizer that unscaled it.
        self.unscaled: dict[mtf.Tensor, str] = {}
        # Names of the wrappers that have applied gradients.
        self.applied: frozenset[str] = frozenset()
        # Seeds whose gradients an optimizer took without scaling the loss.
        self.taken: frozenset[Seed] = frozenset()

    def begin(self, lowering: mtf.Lowering) -> None:
        del lowering
        for seed, (scale, _) in self.scales.items():
            seed.scale, seed.rounded = scale, _rounded_to(self.scales)


def _rounded_to(seeds: Iterable[Seed]) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a function that rounds a scale to a number that the dtypes of all seeds can hold.

    A scale that is too large for a dtype becomes the largest power of two that the dtype can hold.
    Seeds are the tensors of ones that `mtf.gradients` begins with.
    """
    dtypes = {seed.outputs[0].dtype for seed in seeds}

    def rounded(scale: tf.Tensor) -> tf.Tensor:
        for dtype in sorted(dtypes, key=lambda x: x.name):
            if dtype.size < 4:
                # The largest power of two, so that a capped scale changes no bit either.
                largest = 2.0 ** math.floor(math.log2(float(dtype.max)))
                scale = tf.cast(tf.cast(tf.minimum(scale, largest), dtype), scale.dtype)
        return scale

    return rounded


def record_unscaled_use(grads: MaybeGradients, names: Sequence[str]) -> None:
    """Records that an optimizer uses the gradients `grads` without scaling their losses.

    `names` has the name of each gradient's variable, for errors. Raises ValueError if another
    optimizer has scaled the loss of one of the gradients.
    """
    present = [g for g in grads if g is not None]
    if not present:
        return
    graph = present[0].graph
    seeds_of, scaled = _seeds_of(graph), StepPlan.of(graph).extension(ScaledLosses)
    for grad, name in zip(grads, names):
        for seed in seeds_of.get(grad, ()):
            if seed in scaled.scales:
                raise ValueError(_SHARED.format(name=name, owner=scaled.scales[seed][1]))
    scaled.taken |= {seed for grad in present for seed in seeds_of.get(grad, ())}


def unscaled_gradients(
    grads: MaybeGradients, make_scale: Callable[[], Scale], owner: str, names: Sequence[str]
) -> list[mtf.Tensor | None]:
    """Scales the losses behind gradients, and returns the gradients without the scale, in order.

    The scale multiplies the seed of `mtf.gradients`: the gradient of the loss with respect to
    itself, which is 1 without a scale. The loss itself keeps its value. The gradients may have been
    cast, summed or scaled since `mtf.gradients` made them. The returned gradients are float32 or
    wider, and pending gradients stay pending. None, and gradients that were unscaled already, pass
    through.

    Args:
      grads: gradients by `mtf.gradients`.
      make_scale: a function that returns the scale: a number, or an mtf scalar that is the value of
        a variable. The function is called after all checks.
      owner: name of the optimizer that has the scale.
      names: names of the gradients' variables.

    Raises:
      ValueError: gradients come from no loss, an operation that is not linear has changed them, or
        another optimizer has scaled the loss.
    """
    present = [g for g in grads if g is not None]
    if not present:
        return list(grads)
    plan = StepPlan.of(present[0].graph)
    scaled = plan.extension(ScaledLosses)
    computed = _seeds_of(plan.graph)
    seeds_of = {
        grad: _seeds_behind(grad, scaled, computed, name, owner)
        for grad, name in zip(grads, names)
        if grad is not None
    }
    raw = [grad for grad, some in seeds_of.items() if some]
    seeds = {seed for some in seeds_of.values() for seed in some}
    _check_first_order(plan.graph, seeds, owner)
    for seed in seeds:
        if seed in scaled.taken:
            raise ValueError(_SHARED.format(name="another variable", owner=owner))
        _, other = scaled.scales.get(seed, (None, owner))
        if other != owner:
            raise ValueError(
                f"{owner} and {other} would both scale one loss; give all gradients of this "
                "loss to one LossScaleOptimizer."
            )
    if not raw:
        return list(grads)
    scale = make_scale()
    # Replaced, not changed, so that the plan can go back.
    scaled.scales = {**scaled.scales, **dict.fromkeys(seeds, (scale, owner))}
    if not isinstance(scale, mtf.Tensor):
        scale = mtf.constant(raw[0].mesh, scale, mtf.Shape([]), tf.float32)
    inverse = mtf.cwise(lambda x: tf.math.reciprocal(_rounded_to(scaled.scales)(x)), [scale])
    inverses = {mesh: on_mesh(inverse, mesh) for mesh in dict.fromkeys(g.mesh for g in raw)}
    outputs = {grad: _unscaled(grad, inverses[grad.mesh]) for grad in raw}
    scaled.unscaled = {**scaled.unscaled, **dict.fromkeys(outputs.values(), owner)}
    return map_present(grads, lambda some: [outputs.get(g, g) for g in some])


def losses_behind(grads: Sequence[mtf.Tensor]) -> list[mtf.Tensor]:
    """Returns the losses that were given to `mtf.gradients` to compute `grads`, each once.

    The gradients are of one graph. Losses inside of loops are left out.
    """
    outside = set(grads[0].graph.operations) if grads else ()
    return [x for x in _losses_of_calls(grads) if x.operation in outside]


def losses_of_step(grads: Sequence[mtf.Tensor]) -> list[mtf.Tensor]:
    """Returns the losses that `grads` come from, as values of the whole step.

    In place of a loss inside of a loop over microbatches, the output of the loop is returned that
    is the sum of this loss over all iterations. The gradients are the derivatives of the sum of all
    returned losses. The list is empty if the gradients come from no loss, or if a loss inside of a
    loop is no output of the loop.
    """
    operations = grads[0].graph.operations if grads else []
    loops = [op for op in operations if isinstance(op, mtf.WhileLoopOperation)]
    added_up = {x: y for op in loops for x, y in zip(loop_body(op).outputs, op.outputs)}
    outside = set(operations)
    found = _losses_of_calls(grads)
    values = [x if x.operation in outside else added_up.get(x) for x in found]
    return [] if None in values else values


def _losses_of_calls(grads: Sequence[mtf.Tensor]) -> list[mtf.Tensor]:
    """Returns the losses of the calls of `mtf.gradients` behind gradients, each once."""
    calls = gradients_calls(grads[0].graph) if grads else []
    computed = {x: call.losses for call in calls for x in call.outputs}
    return list(dict.fromkeys(x for t in _walk_back(grads, computed) for x in computed.get(t, ())))


def _check_first_order(graph: mtf.Graph, seeds: set[Seed], owner: str) -> None:
    """Raises ValueError if a loss depends on gradients of another loss that is scaled, too.

    If gradients of one scaled loss are part of another scaled loss, they would be scaled twice.
    `seeds` are the seeds of all losses that are scaled, and `owner` is the name of the optimizer
    that scales them.
    """
    calls = [call for call in gradients_calls(graph) if seeds.intersection(call.seeds)]
    if len(calls) < 2:
        return
    outputs = {x for call in calls for x in call.outputs}
    for call in calls:
        tensor = next((t for t in _walk_back(call.losses) if t in outputs), None)
        if tensor is not None:
            raise ValueError(
                f"{owner} scales losses of several calls of mtf.gradients, and the gradient "
                f"{tensor.name!r} of one call is part of the loss of another call (a penalty on "
                "gradients): this gradient would be scaled twice. Add up the losses, and call "
                "mtf.gradients for the variables once."
            )


def _unscaled(grad: mtf.Tensor, inverse: mtf.Tensor) -> mtf.Tensor:
    # In a narrow dtype small values would underflow to zero without the scale.
    wide = grad.dtype if grad.dtype.size >= 4 else tf.float32
    return mtf.cwise(lambda x, by: tf.cast(x, wide) * tf.cast(by, wide), [grad, inverse], wide)


def _seeds_of(graph: mtf.Graph) -> dict[mtf.Tensor, list[Seed]]:
    """Returns the gradients that `mtf.gradients` made in a graph, each with its seeds.

    A seed is the tensor of ones with which a call of `mtf.gradients` began for one of its losses.
    """
    return {x: call.seeds for call in gradients_calls(graph) for x in call.outputs}


def _seeds_behind(
    grad: mtf.Tensor,
    scaled: ScaledLosses,
    computed: dict[mtf.Tensor, list[Seed]],
    name: str,
    owner: str,
) -> set[Seed]:
    """Returns the seeds whose scale is in a gradient; an empty set if the scale was taken out.

    Args:
      grad: the gradient.
      scaled: the record of the gradient's graph.
      computed: for each gradient that `mtf.gradients` made in this graph, its seeds (`_seeds_of`).
      name: the name of the gradient's variable, for errors.
      owner: the name of the optimizer that has the scale, for errors.

    Raises:
      ValueError: `owner` cannot take the scale out of the gradient. The gradient is another
        optimizer's or comes from no loss, or an operation is not linear in the scale.
    """
    before = list(_walk_back([grad], scaled.unscaled, computed))
    owners = {scaled.unscaled[t] for t in before if t in scaled.unscaled}
    ends = {t for t in before if t in computed and t not in scaled.unscaled}
    seeds = {seed for t in ends for seed in computed[t]}
    if owners - {owner}:
        raise ValueError(
            f"The gradient of {name!r} belongs to {sorted(owners)}, which scaled its "
            f"loss, but was given to {owner}; give it to the optimizer that computed it."
        )
    if not seeds and not owners:
        raise ValueError(
            f"{owner} scales the loss, but the gradient of {name!r} does not come from "
            "mtf.gradients of a loss; compute it with opt.compute_gradients(loss)."
        )
    between = {t.operation for t in before if t not in scaled.unscaled and t not in computed}
    not_linear = _first_not_linear(grad.graph, between, ends) if seeds else None
    if seeds and owners and not_linear is None:
        not_linear = grad.operation  # some of its terms have the scale, others do not
    if not_linear is not None:
        raise ValueError(
            f"{owner} scales the loss, but {type(not_linear).__name__} {not_linear.name!r} has "
            f"changed the gradient of {name!r} in a way that is not linear (a clip, say) before "
            "the scale was taken out. Compute gradients with opt.compute_gradients(loss), which "
            "takes the scale out, or clip inside the optimizer, by ClipByGlobalNormOptimizer."
        )
    return seeds


def _walk_back(tensors: Sequence[mtf.Tensor], *ends: Container[mtf.Tensor]) -> Iterator[mtf.Tensor]:
    """Yields tensors and all tensors that they are computed from, back to members of `ends`.

    Tensors that are in `ends` are yielded, too, but not the tensors that they are computed from.
    """

    def sources(tensor: mtf.Tensor) -> Iterable[mtf.Tensor]:
        return () if any(tensor in some for some in ends) else computed_from(tensor)

    return walk(tensors, sources)


def _first_not_linear(
    graph: mtf.Graph, between: set[mtf.Operation], ends: set[mtf.Tensor]
) -> mtf.Operation | None:
    """Returns the first operation of `between` that is not linear in its scaled inputs, or None.

    The tensors `ends` are scaled, and so are all outputs of an operation that has a scaled input.
    """
    scaled: set[Any] = set(ends)
    for operation in flat(graph.operations):
        if operation not in between:
            continue
        if isinstance(operation, mtf.WhileLoopOperation):
            body = loop_body(operation)
            scaled.update(x for x, y in zip(operation.outputs, body.outputs) if y in scaled)
            continue
        positions = {i for i, x in enumerate(operation.inputs) if x in scaled}
        if not positions:
            continue
        if not _keeps_scale(operation, positions):
            return operation
        scaled.update(operation.outputs)
    return None


def _keeps_scale(operation: mtf.Operation, positions: set[int]) -> bool:
    """Returns whether scaling some inputs of an operation scales all of its outputs equally.

    `positions` are the positions of the inputs that are scaled.
    """
    if isinstance(operation, (mtf.StopGradient, mtf.PrintOperation)):
        return True
    if getattr(operation, "is_linear", False):
        return positions == set(range(len(operation.inputs)))
    if isinstance(operation, mtf.ScalarAddOperation):
        return False
    found = linear_positions(operation, sorted(positions))
    return found is not None and set(found) <= positions
