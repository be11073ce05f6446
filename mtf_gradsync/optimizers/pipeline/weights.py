"""Weights of gradients: what the loss of a step stands for, such as its number of tokens."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple, Sequence

from mtf_gradsync._common import check_number, is_number, walk
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import computed_from, gradients_calls
from mtf_gradsync.gradients.arguments import is_tensor
from mtf_gradsync.gradients.operations import MaybeGradients, on_mesh
from mtf_gradsync.gradients.shards import Recoverability, shard_dims_in, split_into_shards
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.optimizers.pipeline.forms import GradientSet, Weights
from mtf_gradsync.optimizers.pipeline.stack import Condition, Reduce, Stack, Stage
from mtf_gradsync.optimizers.pipeline.words import About, Line
from mtf_gradsync.optimizers.slots import SlotBook
from mtf_gradsync.optimizers.state import named_state
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.step.plan import PlanExtension, StepPlan


class RecordedWeights(NamedTuple):
    """The weights with which `compute_gradients` has computed a gradient.

    Attributes:
      weights: a number, a tf scalar or an mtf tensor, as `check_weights` returned it; None if the
        losses of shards were averaged with equal weights.
      in_loop: whether `compute_gradients` was called in the body of a loop.
    """

    weights: Any
    in_loop: bool


class WeightsOfGradients(PlanExtension):
    """A record of the weights that the gradients and losses of one mtf graph were computed with.

    Attributes:
      weighted: for each loss given to `weighted_loss`, the loss that it returned.
    """

    def __init__(self) -> None:
        self._given: dict[mtf.Tensor, Any] = {}
        self.weighted: dict[mtf.Tensor, mtf.Tensor] = {}

    def record(self, grads: MaybeGradients, weights: Any) -> None:
        """Records the weights with which `grads` were computed; None for equal weights."""
        own = {g: weights for g in grads if g is not None}
        self._given = {**self._given, **own}  # a plan that is undone takes the old one

    def record_loss(self, loss: mtf.Tensor, weighted: mtf.Tensor) -> None:
        """Records the loss `weighted` that `weighted_loss` returned for `loss`, for `mean_loss`."""
        self.weighted = {**self.weighted, loss: weighted}

    def recorded_for(self, grads: Sequence[mtf.Tensor]) -> list[list[RecordedWeights]]:
        """Returns, for each of `grads`, the weights on record for those that it was computed from.

        The method `record` was called for gradients as `compute_gradients` made them. A clipped
        gradient, for example, was computed from one of these. The result has a list of weights for
        each gradient, in which equal weights are listed once. The list is empty if there is no
        record of any gradient from which the gradient was computed.
        """
        found: list[list[RecordedWeights]] = [[] for _ in grads]
        if not self._given or not grads:
            return found
        graph = grads[0].graph
        # The search ends at gradients, because what they were computed from has other weights.
        ends = {x for call in gradients_calls(graph) for x in call.outputs}.union(self._given)

        def sources(tensor: mtf.Tensor) -> list[mtf.Tensor]:
            return [] if tensor in ends else computed_from(tensor)

        users: dict[mtf.Tensor, list[mtf.Tensor]] = {}
        starts: dict[Any, tuple[RecordedWeights, list[mtf.Tensor]]] = {}
        outside = set(graph.operations)
        for tensor in walk(grads, sources):
            for source in sources(tensor):
                users.setdefault(source, []).append(tensor)
            if tensor in self._given:
                one = RecordedWeights(self._given[tensor], tensor.operation not in outside)
                starts.setdefault((_key(one.weights), one.in_loop), (one, []))[1].append(tensor)
        for one, tensors in starts.values():
            reached = set(walk(tensors, lambda tensor: users.get(tensor, [])))
            for grad, behind in zip(grads, found):
                if grad in reached:
                    behind.append(one)
        return found


def _key(weights: Any) -> Any:
    return weights if isinstance(weights, float) else id(weights)


def weights_of_step(
    weights: Any, found: Sequence[Sequence[RecordedWeights]], variables: Sequence[mtf.Variable]
) -> Any:
    """Returns the weights of a step's gradients; None if no weights were given.

    All gradients of a step must have the same weights. The result is the argument `weights` or, if
    that is None, the weights that `compute_gradients` was given for the gradients: a number, a tf
    scalar or an mtf tensor.

    Args:
      weights: the weights that `apply_grads` was given, as `check_weights` returned them; None if
        it was given none.
      found: for each gradient of the step, the weights on record for the gradients that it was
        computed from, as `WeightsOfGradients.recorded_for` returns them.
      variables: the variables of these gradients, in the same order. Errors name them.

    Raises:
      ValueError: gradients have different weights; only some of them have weights;
        `compute_gradients` was given weights in the body of a loop; or `apply_grads` was given
        weights of shards, but `compute_gradients` has averaged the losses of shards with equal
        weights already.
    """
    first: dict[Any, tuple[Any, str]] = {}  # by key: weights, and the name of a variable with them
    equal, without = "", ""  # variables with equal weights of shards; without weights
    for variable, behind in zip(variables, found):
        if any(one.in_loop and one.weights is not None for one in behind):
            raise ValueError(
                f"The gradient of {variable.name!r} was computed with weights in the body of a "
                "loop, and these weights are not known outside of it. In the loop, divide the loss "
                "by the tokens of the whole loop, and give the step's weights to apply_grads."
            )
        for one in behind:
            if one.weights is None:
                equal = equal or variable.name
            else:
                first.setdefault(_key(one.weights), (one.weights, variable.name))
        if not any(one.weights is not None for one in behind):
            without = without or variable.name
    other = [x for key, x in first.items() if weights is None or key != _key(weights)]
    if len(other) > (weights is None):
        (one, name) = other[-1]
        before = f"{weights!r}" if weights is not None else f"{other[0][0]!r} of {other[0][1]!r}"
        raise ValueError(
            f"The gradients of a step have one weight, but the gradient of {name!r} was computed "
            f"with weights={one!r}, and the step has weights={before}. Give each loss an "
            "optimizer of its own."
        )
    if weights is None:
        weights = other[0][0] if other else None
        if weights is not None and without:
            raise ValueError(
                f"The gradient of {without!r} was computed without weights, that of "
                f"{other[0][1]!r} with weights={weights!r}: a step has one weight for all "
                "gradients. Give this weight to compute_gradients for each loss, or to "
                "apply_gradients."
            )
    if equal and isinstance(weights, mtf.Tensor) and weights.shape.dims:
        raise ValueError(
            f"compute_gradients has joined the losses of shards for the gradient of {equal!r} with "
            f"equal weights, so that weights of shards, {weights!r}, come too late: give them to "
            "compute_gradients or minimize."
        )
    return weights


def check_weights(weights: Any, names: Sequence[str]) -> Any:
    """Returns weights that a program gave, after a check: a Python float, tf scalar or mtf tensor.

    `names` are the names of the stack's shard dims. For an mtf variable the result is its value.

    Raises:
      TypeError: weights are no number, no tf scalar and no mtf tensor.
      ValueError: a number is negative, or a tensor has other dimensions than shard dims.
    """
    wanted = (
        "weights must be how much the loss stands for (tokens, say): an mtf tensor, a scalar or "
        f"with shard dims {list(names)}, or a tf scalar or variable or a number of 0 or more"
    )
    if isinstance(weights, mtf.Variable):
        weights = weights.value
    if is_number(weights):
        if weights < 0 or not math.isfinite(weights):
            raise ValueError(f"{wanted}; got {weights!r}.")
        return check_number("weights", weights, "a number of 0 or more")
    is_mesh = isinstance(weights, mtf.Tensor)
    if not is_tensor(weights):
        raise TypeError(f"{wanted}; got {weights!r}.")
    dtype = weights.dtype.base_dtype
    if not (dtype.is_floating or dtype.is_integer):
        raise TypeError(f"{wanted}; got the dtype {dtype.name} of {weights!r}.")
    others = [d.name for d in weights.shape.dims if d.name not in names] if is_mesh else []
    if others or (not is_mesh and weights.shape.ndims != 0):
        raise ValueError(
            f"{wanted}; got the shape {weights.shape} of {weights!r}. If the batch is split along "
            "other dimensions, name them in batch_dims."
        )
    return weights


def weights_on_mesh(weights: Any, mesh: mtf.Mesh, axes: ReplicaAxes | None) -> Weights:
    """Returns weights as float32 tensors on `mesh`: the total weight, and that of each shard.

    `weights` is what `check_weights` or `weights_of_step` returns. `axes` are the replica axes. If
    these are not known (None), or if `weights` is a scalar, the result has no weights of shards.
    Raises ValueError for weights of shards on another mesh.
    """
    tensor = _as_tensor(weights, mesh)
    if not tensor.shape.dims:
        return Weights(on_mesh(tensor, mesh))
    if tensor.mesh is not mesh:
        raise ValueError(
            f"weights={weights!r} have shard dims and are on another mesh than the gradients: give "
            "weights on the gradients' mesh, or a scalar."
        )
    total = mtf.reduce_sum(tensor)
    return Weights(total, None if axes is None else _weight_per_shard(tensor, axes))


def _as_tensor(weights: Any, mesh: mtf.Mesh) -> mtf.Tensor:
    if isinstance(weights, float):
        return mtf.constant(mesh, weights, mtf.Shape([]), tf.float32)
    if not isinstance(weights, mtf.Tensor):
        weights = mtf.import_tf_tensor(mesh, tf.cast(weights, tf.float32), mtf.Shape([]))
    # Weights are data: no gradient flows through them.
    return mtf.cast(mtf.stop_gradient(weights), tf.float32)


def _weight_per_shard(weights: mtf.Tensor, axes: ReplicaAxes) -> mtf.Tensor:
    """Returns the weight of each shard, `[shard dims...]`, from weights that have some shard dims.

    `axes` are the replica axes, which say how many shards there are along each dimension. If
    `weights` is longer than the number of shards along a dimension, it has one weight for each
    example, and the weights of a shard's examples are added up. A weight that several shards have
    in common, because `weights` lacks a shard dim, is divided among these shards. Raises ValueError
    if a length is no multiple of the number of shards.
    """
    by_name = {d.name: d for d in weights.shape.dims}
    kept = [d for d in axes.shard_dims if d.name in by_name]
    for dim in kept:
        if by_name[dim.name].size % dim.size:
            raise ValueError(
                f"weights has the size {by_name[dim.name].size} along {dim.name!r}, which is no "
                f"multiple of {dim.size}, the number of shards."
            )
    given = mtf.Shape([by_name[d.name] for d in kept])
    weights = mtf.transpose(_summed_to(weights, given), given)
    rows = [mtf.Dimension(f"{d.name}_rows", by_name[d.name].size // d.size) for d in kept]
    split = mtf.Shape([d for pair in zip(kept, rows) for d in pair])
    weights = _summed_to(mtf.reshape(weights, split), mtf.Shape(kept))
    full = mtf.Shape(list(axes.shard_dims))
    if weights.shape == full:
        return weights
    return mtf.broadcast(weights * (weights.shape.size / full.size), full)


def _summed_to(x: mtf.Tensor, shape: mtf.Shape) -> mtf.Tensor:
    """Returns x, summed over its dimensions that `shape` does not have."""
    names = shape.dimension_names
    return mtf.reduce_sum(x, output_shape=mtf.Shape([d for d in x.shape.dims if d.name in names]))


def weighted_loss(loss: mtf.Tensor, weights: Any, names: Sequence[str]) -> mtf.Tensor:
    """Returns the losses of shards, each multiplied by its weight divided by the mean weight.

    The mean of the returned losses is the weighted mean of the given losses. If the loss or the
    weights have no shard dims, the loss is returned unchanged, as it is a mean already. `weights`
    is what `check_weights` returns, or None, and `names` are the names of the stack's shard dims.
    """
    if not isinstance(weights, mtf.Tensor) or not weights.shape.dims:
        return loss
    if not any(d.name in names for d in loss.shape.dims):
        return loss
    if any(d not in loss.shape.dims for d in weights.shape.dims):
        raise ValueError(
            f"The loss of shape {loss.shape.to_string} has one value for each shard, so that "
            "weights must have shard dims of the loss, got weights of shape "
            f"{weights.shape.to_string}."
        )
    tensor = _as_tensor(weights, loss.mesh)
    count, total = float(tensor.shape.size), mtf.reduce_sum(tensor)

    def weigh(loss: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
        # A mean of nothing is 0 / 0.
        return tf.where_v2(tf.equal(share, 0), tf.zeros_like(loss), loss * share)

    shares = mtf.cwise(lambda w, all_: w * (count / nonzero(all_)), [tensor, total], tf.float32)
    shares = mtf.broadcast(mtf.cast(shares, loss.dtype), loss.shape)
    return mtf.cwise(weigh, [loss, shares], loss.dtype)


def mean_loss(loss: mtf.Tensor) -> mtf.Tensor:
    """Returns the loss of a step as a scalar to show: the mean over the losses of all shards.

    The mean is weighted if `compute_gradients` was given `loss` together with weights of shards.
    """
    plan = StepPlan.of_graph(loss.graph)
    known = plan.known_extension(WeightsOfGradients) if plan else None
    return mtf.reduce_mean(known.weighted.get(loss, loss) if known else loss)


def nonzero(x: tf.Tensor) -> tf.Tensor:
    """Returns x with 1 in place of 0, to divide by."""
    return tf.where_v2(tf.equal(x, 0), tf.ones_like(x), x)


def divided(grad: mtf.Tensor, by: mtf.Tensor) -> mtf.Tensor:
    """Returns a gradient divided by the mtf scalar `by`, in the gradient's dtype.

    The division is in at least float32. If `by` is 0, the gradient is returned as it is.
    """
    wide = grad.dtype if grad.dtype.size >= 4 else tf.float32

    def divide(x: tf.Tensor, divisor: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.cast(x, wide) / tf.cast(nonzero(divisor), wide), x.dtype)

    return mtf.cwise(divide, [grad, on_mesh(by, grad.mesh)], grad.dtype)


# The stages that are added to a stack of any wrappers if gradients have weights.


def with_weights(stack: Stack, axes: ReplicaAxes | None, slots: SlotBook) -> Stack:
    """Returns a copy of `stack` with two more stages, which gradients with weights need.

    The first stage of the step fits the gradients of shards to the shards' weights. The last stage
    before the update skips the update if the weights are 0. Sums of gradients are divided by the
    sum of their weights.

    Args:
      stack: a completed stack.
      axes: the replica axes of the shards that have weights; None if they are not known.
      slots: the `SlotBook` in which the variable that counts the skipped updates is recorded.
    """
    outermost = stack.segments[0].reduction
    first = _WeighShards(outermost.strategy, axes)
    segments = [
        segment._replace(stages=tuple(_divided_by_weight(stage) for stage in segment.stages))
        for segment in stack.segments
    ]
    last = _OnlyWithData(outermost.name, slots)
    return stack._replace(segments=tuple(segments), first=(first,), last=(last,))


def _divided_by_weight(stage: Stage) -> Stage:
    """Returns a stage that divides gradients, with what `describe` says of weights."""
    if isinstance(stage, Reduce) and stage.divides:
        return dataclasses.replace(stage, divides="divide by their weights")
    return stage


@dataclasses.dataclass(frozen=True)
class _WeighShards(Stage):
    """The stage before those of all wrappers: it fits gradients to the weights of the shards.

    The sum of the gradients over the shards is then right for the weights. Two things change. A
    shard with a weight of 0 gets zeros, because its loss may have been 0 / 0. The second change is
    for terms of the loss that depend on no data, such as a penalty on the model's variables. Each
    shard holds an equal part of the gradient of such a term; the parts become proportional to the
    shards' weights. Gradients of terms that depend on data need no change, because `weighted_loss`
    has weighted these terms.

    The changed gradients have shard dims. A gradient stays as it is if the terms of its shards
    cannot be recovered. If shards have no weights of their own, all gradients stay as they are.

    Attributes:
      strategy: the strategy for the sums over other mesh axes that per-shard gradients need.
      axes: the replica axes; None if they are not known.
    """

    strategy: Strategy
    axes: ReplicaAxes | None

    def apply(self, gradients: GradientSet, step: Any) -> GradientSet:
        del step
        grads, weights, axes = gradients.grads, gradients.weights, self.axes
        assert weights is not None
        of_shards = weights.of_shards
        if axes is None or of_shards is None or axes.num_shards == 1:
            return gradients
        own = [None if g is None or shard_dims_in(g.shape, axes) else g for g in grads]
        recoverability, num_shards = Recoverability(own, axes), float(axes.num_shards)

        def is_apart(i: int, grad: mtf.Tensor) -> bool:
            dims = {d.name for d in shard_dims_in(grad.shape, axes)}
            all_dims = axes.free_shard_dims(grad.shape) == axes.shard_dims
            return dims == {d.name for d in axes.shard_dims} or (
                not dims
                and all_dims
                and i not in recoverability.mixed
                and i not in recoverability.shared
            )

        fit = [g if g is not None and is_apart(i, g) else None for i, g in enumerate(grads)]
        shards = split_into_shards(fit, axes, self.strategy, accept_summed=False)

        def weigh(
            x: tf.Tensor, weight: tf.Tensor, total: tf.Tensor, shared: tf.Tensor | None = None
        ) -> tf.Tensor:
            weight = tf.reshape(weight, [])
            if shared is not None:  # an equal share is in x already
                more = weight / nonzero(total) - 1.0 / num_shards
                x = x + tf.cast(tf.cast(shared, more.dtype) * more, x.dtype)
            return tf.where_v2(weight > 0, x, tf.zeros_like(x))

        weighted: list[mtf.Tensor | None] = []
        for i, (x, grad) in enumerate(zip(shards, grads)):
            if x is None:
                weighted.append(grad)
                continue
            shared = recoverability.term_without_data(i)
            given = [x, of_shards, weights.total, *([] if shared is None else [shared])]
            weighted.append(mtf.cwise(weigh, given, x.dtype))
        return gradients.with_grads(weighted)


@dataclasses.dataclass(frozen=True)
class _OnlyWithData(Stage):
    """The stage after those of all wrappers: it skips an update whose gradients have a weight of 0.

    The stage counts the updates that it skips in the variable
    `<name of the outermost wrapper>/without_data`.
    """

    name: str
    slots: SlotBook
    condition = Condition()

    def describe(self, about: About) -> list[Line]:
        return [Line("skip where weights are 0")]

    def apply(self, gradients: GradientSet, step: Any) -> GradientSet:
        assert gradients.weights is not None
        has_data = step.agreed(mtf.greater(gradients.weights.total, 0.0), by_any=True)
        counter = named_state(has_data.mesh, f"{self.name}/without_data", stacked=True)
        self.slots.record([counter], [])
        gate = step.gate([*gradients.present, has_data])
        now = counter.value + 1 - mtf.cast(has_data, tf.int32)
        step.write([mtf.assign(counter, now)], gate)
        step.counts_without_data = counter
        return gradients.only_when(has_data, gate)
