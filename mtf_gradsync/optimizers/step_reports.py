"""Reports of a step: norms of gradients, the noise scale, and values of wrappers."""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import gin
import numpy as np

from mtf_gradsync._common import check_number, warn_once
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.compat_v1 import AppliesGradients
from mtf_gradsync.gradients.clipping import clipping_of
from mtf_gradsync.gradients.measures import global_norm, joined_norm, shard_norms
from mtf_gradsync.gradients.operations import gradient_name, on_mesh
from mtf_gradsync.gradients.shards import (
    Recoverability,
    per_shard,
    shard_dims_in,
    split_into_shards,
    summed_over_other_axes,
)
from mtf_gradsync.mesh.axes import ReplicaAxes, check_axes
from mtf_gradsync.optimizers.pipeline.builder import StepBuilder
from mtf_gradsync.optimizers.pipeline.forms import GradientSet, Reduced
from mtf_gradsync.optimizers.pipeline.stack import stages_of
from mtf_gradsync.optimizers.state import check_name, named_state
from mtf_gradsync.optimizers.wrapper import Wrapper
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.step.conditional import Branch, values_after
from mtf_gradsync.step.plan import StepPlan
from mtf_gradsync.step.writes import Gate, WriteInPlace

_logger = logging.getLogger("mtf_gradsync")


def norm_of_reduced(grads: Sequence[mtf.Tensor], strategy: Strategy) -> mtf.Tensor:
    """Returns the norm over all of the reduced gradients `grads`, an mtf scalar.

    If a clip by the global norm made the gradients, the result is the norm before the clip times
    the clip's factor, and the gradients are not read. Otherwise the norm is computed from the
    gradients. `strategy` is the reduction strategy that adds up the squares if the mesh splits a
    gradient.
    """
    clipping = clipping_of(grads)
    if clipping is not None and not clipping.norm.shape.ndims:
        return mtf.multiply(clipping.norm, clipping.factor)
    return global_norm(grads, strategy)


def norms_of_shards(
    grads: Sequence[mtf.Tensor], axes: ReplicaAxes, strategy: Strategy
) -> tuple[mtf.Tensor | None, mtf.Tensor | None]:
    """Returns the norms of each shard's gradients, before and after clipping by shard.

    `grads` are pending or per shard, `axes` are the replica axes, and `strategy` is the reduction
    strategy. Each result is an mtf tensor `[shards...]`, the same on all processors. It has one
    number for each shard: the norm, over all gradients together, of the terms that the shard adds
    to the sums over shards.

    The second result is None if gradients were not clipped by shard. Both results are None if the
    gradients are on several meshes, or if each shard's term of a gradient cannot be recovered. Both
    results are also None if the terms can be recovered only by sending more numbers than the
    gradients have.
    """
    if len({g.mesh for g in grads}) > 1:
        return None, None
    clipping = clipping_of(grads)
    if clipping is not None and clipping.norm.shape.ndims:
        both = mtf.stack([clipping.norm, mtf.multiply(clipping.norm, clipping.factor)], "reported")
        both = mtf.anonymize(both)
        before, after = mtf.unstack(both, both.shape.dims[0])
        return before, after
    own = [None if shard_dims_in(g.shape, axes) else g for g in grads]
    recoverability = Recoverability(own, axes)
    mixed = [i for i in recoverability.mixed if i not in recoverability.from_sums]
    why = "know of all shards"
    sums = _sums_of(recoverability)
    if not mixed and axes.num_shards * _size(sums) > _size(grads):
        mixed = list(recoverability.from_sums)
        why = "are made of sums of which all shards' terms are larger than the gradients"
    if not mixed:
        why = "take sums over other mesh axes first"
    unfit = sorted(mixed) or summed_over_other_axes([*own, *sums], axes)
    if unfit:
        text = "Norms of shards are not reported: %d gradients %s, such as %s."
        what = (len(unfit), why, gradient_name([*grads, *sums][unfit[0]]))
        if any(axes.free_shard_dims(grads[i].shape) != axes.shard_dims for i in mixed):
            # The variable's layout mixes shards, and nothing that the program does.
            warn_once("norms of shards", text, *what)
        else:
            _logger.info(text, *what)
        return None, None
    return _norms_of_terms(grads, recoverability, axes, strategy), None


def _sums_of(recoverability: Recoverability) -> list[mtf.Tensor]:
    return list(dict.fromkeys(x for one in recoverability.from_sums.values() for x in one.sums))


def _size(tensors: Sequence[mtf.Tensor]) -> int:
    return sum(x.shape.size for x in tensors)


def _norms_of_terms(
    grads: Sequence[mtf.Tensor],
    recoverability: Recoverability,
    axes: ReplicaAxes,
    strategy: Strategy,
) -> mtf.Tensor:
    """Returns the norm of each shard's terms of gradients, over all gradients: `[shards...]`.

    A shard's term of a gradient is what the shard adds to the sum over shards. `recoverability`
    says how the terms of each of `grads` are found. From most gradients they can be read. Other
    gradients (`from_sums`) are computed from sums over the shards. For such a gradient, every
    processor gets each shard's terms of these sums, and computes each shard's term of the gradient
    from them. If a gradient depends on no shard's data (`shared`), each shard has an equal share of
    it.

    `axes` are the replica axes, and `strategy` is the reduction strategy. The result is an mtf
    tensor, the same on every processor.
    """
    made, shared = recoverability.from_sums, [grads[i] for i in recoverability.shared]
    own = [g for i, g in enumerate(grads) if i not in made and i not in recoverability.shared]
    norms = []
    if own:
        norms.append(mtf.anonymize(shard_norms(per_shard(own, axes, strategy), axes, strategy)))
    if made or shared:
        sums = _sums_of(recoverability)
        each = split_into_shards(sums, axes, strategy, accept_summed=False)
        terms = {s: _split_shards(x, axes) for s, x in zip(sums, each) if x is not None}
        share = 1.0 / axes.num_shards
        of_shards = []
        for number in range(axes.num_shards):
            recomputed = [
                one.compute_from(
                    [terms[s][number] for s in one.sums], [x * share for x in one.shared]
                )
                for one in made.values()
            ]
            of_shards.append(global_norm([*recomputed, *(x * share for x in shared)], strategy))
        shape = mtf.anonymous_shape(mtf.Shape(list(axes.shard_dims)))
        norms.append(mtf.reshape(mtf.stack(of_shards, "terms"), shape))
    return norms[0] if len(norms) == 1 else joined_norm(norms)


def _split_shards(x: mtf.Tensor, axes: ReplicaAxes) -> list[mtf.Tensor]:
    """Splits a tensor with shard dims into a list of one tensor for each shard, on every processor.

    The list is in row-major order of the shards along the replica axes `axes`. The tensors in it
    have the dimensions of `x` that are no shard dims.
    """
    dims = list(axes.shard_dims)
    number = mtf.Dimension("terms", axes.num_shards)
    rest = [d for d in x.shape.dims if d not in dims]
    shape = [*mtf.anonymous_shape(mtf.Shape(dims)).dims, *rest]
    x = mtf.reshape(mtf.transpose(x, mtf.Shape([*dims, *rest])), mtf.Shape(shape))
    return mtf.unstack(mtf.reshape(x, mtf.Shape([number, *rest])), number)


def values_of_last_run(values: Sequence[mtf.Tensor], branch: Branch, name: str) -> list[mtf.Tensor]:
    """Returns float32 scalars for every step, with the values that a branch's scalars had last.

    `values` are mtf scalars that exist only in `branch`, a branch of the step that some steps do
    not run. The results are in the same order. The values are kept from step to step in a variable
    with the name `name`, which is in no checkpoint. The results are NaN until the branch has run in
    the session.
    """
    dim = mtf.Dimension("reported", len(values) + 1)
    mesh, shape = values[0].mesh, mtf.anonymous_shape(mtf.Shape([dim]))
    variable = named_state(mesh, name, shape, tf.float32, checkpointed=False)
    branch.plan.write_in_place(variable)
    with branch.opened():
        # The last element is 1 once the branch has run.
        one = mtf.constant(mesh, 1.0, mtf.Shape([]), tf.float32)
        together = mtf.stack([*(mtf.cast(x, tf.float32) for x in values), one], shape.dims[0].name)
        write = WriteInPlace([variable], [together], tf.assign, "keep_reported")
    branch.updates.append(write)
    (held,) = values_after([variable], [write])
    *known, has_run = mtf.unstack(held, shape.dims[0])
    return [
        mtf.cwise(lambda x, has: tf.where_v2(has > 0, x, np.float32(np.nan)), [value, has_run])
        for value in known
    ]


class NoiseScale(NamedTuple):
    """The gradient noise scale of a training step.

    Attributes:
      value: float32 mtf scalar, the noise scale after the fetched step, in the unit of the batch
        size. NaN before the first step.
      updates: mtf operations that update the moving averages, to run together with the optimizer's
        operations. The list is empty if the optimizer's operations include them.
    """

    value: mtf.Tensor
    updates: list[mtf.Operation]


@gin.configurable(module="mtf_gradsync")
def gradient_noise_scale(
    opt: Wrapper,
    batch_size: float,
    decay: float = 0.99,
    axes: ReplicaAxes | None = None,
    name: str = "gradient_noise_scale",
) -> NoiseScale:
    """Estimates the simple noise scale, tr(Sigma) / |G|^2, from the shards' gradients.

    If the batch size is above about the noise scale, a larger batch saves few steps. The mean
    squared norm of the shards' gradients (of batch_size / num_shards examples each) is compared
    with the squared norm of their mean (of batch_size examples). The noise scale is the ratio of
    two moving averages, of tr(Sigma) and of |G|^2. The estimate costs a pass over the gradients for
    each norm, and reduces one number for each shard. The gradients themselves are not reduced a
    second time. The moving averages leave out steps with gradients that are not finite, and steps
    with a norm whose square is too large for float32.

    Call `gradient_noise_scale` once, after gradients were applied and before the graph is lowered.
    Checkpoints have the moving averages, the variables `<name>/trace` and `<name>/squared_norm`.

    Args:
      opt: a wrapper that has applied gradients, of a loss that is a mean or a sum over a batch that
        is split equally.
      batch_size: the number of examples in the gradients that the optimizer reduces at once: in a
        global batch, or with local accumulation in all microbatches of an update. If it counts
        something else, such as tokens, so does the noise scale.
      decay: decay of the moving averages, at least 0 and less than 1.
      axes: the replica axes, if no wrapper was given them; None takes those of the mesh that the
        program has made for this graph.
      name: prefix of the variables' names.

    Returns:
      The noise scale, and the operations that update its moving averages.

    Raises:
      TypeError: opt is not a wrapper, or axes are no `ReplicaAxes`.
      ValueError: an argument is out of range; gradients were not applied before, or were not summed
        over several shards, or shards are mixed or skipped.

    References:
      McCandlish et al., "An empirical model of large-batch training", 2018, appendix A.1
    """
    check_number("batch_size", batch_size, "finite and greater than 0", above=True)
    check_number("decay", decay, "at least 0 and less than 1", below=1.0)
    if axes is not None:
        check_axes(axes)
    check_name(name)
    reduced, axes = _first_reduction(opt, axes)
    branch, mesh = reduced.branch, reduced.sums[0].mesh
    plan = StepPlan.of(mesh.graph)
    with plan.undone_on_error():
        with branch.opened() if branch else contextlib.nullcontext():
            own, clipped = norms_of_shards(reduced.parts, axes, reduced.strategy)
            parts = own if clipped is None else clipped
            if parts is None:
                raise ValueError(
                    f"gradient_noise_scale cannot compare per-shard gradients of {opt!r}, which "
                    "are not recoverable without sums of the size of gradients."
                )
        averages = [
            named_state(mesh, f"{name}/{field}", dtype=tf.float32)
            for field in ("trace", "squared_norm")
        ]
        with branch.opened() if branch else contextlib.nullcontext():
            total = norm_of_reduced(reduced.sums, reduced.strategy)
            estimates = _estimate_noise(parts, total, axes.num_shards, batch_size)
            made = [
                mtf.assign(average, _moved_average(average.value, new, estimates, decay))
                for average, new in zip(averages, estimates)
            ]
        if branch is None:
            Gate(plan, estimates).hold(made)
        else:
            branch.updates.extend(made)
        trace, squared_norm = values_after(averages, made)
        # Before the first step this is 0 / 0, a NaN.
        value = mtf.cwise(tf.divide, [trace, squared_norm])
    return NoiseScale(value, made if branch is None else [])


def _first_reduction(opt: Any, axes: ReplicaAxes | None) -> tuple[Reduced, ReplicaAxes]:
    """Returns a record of a step's first reduction over shards, and the replica axes.

    The step is the one that `opt` has built. `axes` are the replica axes that the user gave; None
    takes those of the stack. Raises TypeError if `opt` is no wrapper. Raises ValueError if there is
    no step or more than one, if a stage skips single shards, if gradients are on several meshes, or
    if nothing was summed over several shards.
    """
    if not isinstance(opt, Wrapper):
        raise TypeError(
            f"gradient_noise_scale needs a wrapper that reduces gradients, got {opt!r}: wrap it, "
            "CrossShardOptimizer(opt)."
        )
    if opt.step is None:
        raise ValueError(f"Apply gradients by {opt!r} before you call gradient_noise_scale.")
    if opt.times_applied > 1:
        raise ValueError(
            f"gradient_noise_scale needs one call of apply_grads, got {opt.times_applied} in this "
            "graph; give apply_grads all variables at once."
        )
    wrappers = opt._wrappers()
    skips = next((w for w in wrappers if any(s._skips_shards for s in stages_of(w))), None)
    if skips is not None:
        raise ValueError(
            f"{type(skips).__name__} skips gradients of some replicas on some steps, so that norms "
            "before and after the sum over replicas are not of the same batch: "
            "gradient_noise_scale needs another wrapper."
        )
    meshes = {g.mesh for g in opt.step.received[0].present} if opt.step.received else set()
    if len(meshes) > 1:
        raise ValueError(
            "gradient_noise_scale compares the shards of one mesh, but the gradients are on "
            f"{len(meshes)} meshes: use a wrapper for the variables of each mesh."
        )
    axes = axes or opt.axes_now(opt.step.received[0].present)
    steps = [w.step for w in wrappers if w.step is not None]
    reduced = next((s.reduced_first for s in steps if s.reduced_first is not None), None)
    if axes is None or axes.num_shards == 1 or reduced is None:
        what = (
            "are on one shard" if axes and axes.num_shards == 1 else "were not summed over shards"
        )
        raise ValueError(
            f"The gradients {what}, but gradient_noise_scale compares several shards. If "
            "there are several, give the replica axes by axes=."
        )
    return reduced, axes


def _estimate_noise(
    parts: mtf.Tensor, total: mtf.Tensor, num_shards: int, batch_size: float
) -> list[mtf.Tensor]:
    """Returns unbiased estimates of tr(Sigma) and |G|^2 from one step, two float32 mtf scalars.

    G is the gradient of all data, and Sigma the covariance of the gradients of single examples.
    `parts` has the norm of each of the `num_shards` shards' terms of the gradient, `[shards...]`,
    and `total` is the norm of the sum of the terms. `batch_size` is the number of examples of all
    shards.
    """
    small, big = batch_size / num_shards, batch_size
    # A shard's own gradient is num_shards times its term.
    of_shards = mtf.reduce_mean(mtf.square(mtf.cast(parts, tf.float32))) * num_shards**2
    of_sum = mtf.square(mtf.cast(total, tf.float32))
    trace = (of_shards - of_sum) * (1 / (1 / small - 1 / big))
    squared_norm = (of_sum * big - of_shards * small) * (1 / (big - small))
    return [trace, squared_norm]


def _moved_average(
    average: mtf.Tensor, new: mtf.Tensor, estimates: Sequence[mtf.Tensor], decay: float
) -> mtf.Tensor:
    """Returns the value that a moving average has after a step whose estimate is `new`.

    The value is decay * average + (1 - decay) * new, where `average` is the value before the step.
    `estimates` are all estimates of the step, `new` among them. If one of them is not finite, the
    result is `average`, unchanged. An average begins at 0, and so is biased towards 0. Callers use
    only the ratio of two averages with the same decay, in which the bias cancels out.
    """

    def move(average: tf.Tensor, new: tf.Tensor, *estimates: tf.Tensor) -> tf.Tensor:
        counts = tf.reduce_all(tf.math.is_finite(tf.stack(estimates)))
        return tf.where_v2(counts, average * decay + new * (1 - decay), average)

    return mtf.cwise(move, [average, new, *estimates])


def reported(opt: AppliesGradients, axes: ReplicaAxes | None = None) -> dict[str, mtf.Tensor]:
    """Returns norms and counts of a step by name, as mtf tensors to fetch together with the step.

    Call `reported` once, after gradients were applied and before the graph is lowered. Tensors that
    are not fetched cost nothing. A norm costs a pass over the gradients and a reduction of a few
    numbers, unless clipping has computed it already. Which of these names the result has depends on
    the wrappers in the stack:

    - `gradient_norm/applied`: norm of the reduced and clipped gradients that the innermost
      optimizer gets.
    - `gradient_norm/before_clipping`: norm of the reduced gradients before they were clipped by
      their global norm.
    - `gradient_norm/of_shards`: `[shards...]`, for each shard the norm of its term of the sum over
      shards, before clipping. For the gradient of a mean over the batch, the term is 1/num_shards
      of the shard's own gradient. For variables that the layout splits over a replica axis,
      processors exchange all shards' terms of the sums from which the variables' gradients are
      computed. If shards' terms are not recoverable (those of experts that get the examples of all
      shards), the result lacks this name, and the log says so. The same holds if they are
      recoverable only by sending as many numbers as the gradients have.
    - `gradient_norm/of_shards_clipped`: `[shards...]`, the norms of shards after
      `clip_by_shard_norm`, if the applied gradients come from that function.
    - `compression/rate`: bytes of the gradients, divided by the bytes that a compressing strategy
      (`QuantizedAllReduce`, `LowRankAllReduce`) sends instead. `compression/whole`: the number of
      gradients that the strategy does not compress; the log names these gradients.
    - `update_step`: the number of updates made. `updates_without_data`: the number of updates that
      were skipped because their weights were 0.
    - `accumulation/micro_step`: the number of microbatch steps whose gradients are in the sums.
      `accumulation/skipped`: the number of microbatch steps skipped so far.
      `accumulation/steps_without_update`: the number of microbatch steps since the last update;
      only with a limit for it (max_steps_without_update).
    - `sync_replicas/contributions`: `[shards...]`, the number of contributions that each replica
      has made so far. `sync_replicas/dropped`: `[shards...]`, the number of steps in which the
      replica made none. `sync_replicas/waiting_contributions`: the number of contributions since
      the last update. `sync_replicas/steps_without_update`: the number of steps since the last
      update.
    - `loss_scale/scale`: the loss scale. `loss_scale/good_steps`: the number of updates in a row
      since it changed. (These two are missing if the scale is fixed.) `loss_scale/skipped`: the
      number of steps skipped so far. `loss_scale/steps_without_update`: the number of steps since
      the last update; only with a limit for it (max_steps_without_update).
    - `outer/step`, `outer/skipped`: see `OuterOptimizer.reported`.

    Counts include the step with which they are fetched. Norms of shards belong to this step, too
    (to the microbatch step, if gradients accumulate). Some gradients exist only in steps with an
    update, as inside accumulation. Norms of such gradients keep their values on other steps, and
    are NaN before the first update of a session.

    If a stack has several wrappers of a kind, the values of the outermost have the plain names. The
    names of the other wrappers' values end with "/" and the wrapper's name.

    Args:
      opt: an optimizer, usually a stack of wrappers. The result also has what the method `reported`
        of each optimizer in the stack returns, if it has one (wrappers do): mtf tensors by name.
      axes: the replica axes, if no wrapper was given them; None takes those of the mesh that the
        program has made for this graph.

    Returns:
      mtf tensors by name: scalars, or of the shape of the shard dims (see `split_by_shard`), the
      same on every processor. {} for an optimizer that is no wrapper and has no method `reported`.
    """
    stack, wrappers = [opt], []
    if isinstance(opt, Wrapper):
        stack, wrappers = [opt, *opt.inner_stack()], opt._wrappers()
    values: dict[str, mtf.Tensor] = {}

    def add(tag: str, value: mtf.Tensor | None, name: str) -> None:
        if value is not None:
            values[f"{tag}/{name}" if tag in values else tag] = value

    if wrappers and wrappers[0].step is not None:
        # Several steps if an optimizer of another library is in between.
        steps = list(dict.fromkeys(w.step for w in wrappers if w.step is not None))
        _add_norms(wrappers, steps, axes, add)
        for step in steps:
            if step.compressions:
                given, sent, whole = zip(*step.compressions)
                found = {"rate": sum(given) / max(1, sum(sent)), "whole": len(sum(whole, ()))}
                for name, number in found.items():
                    mesh = step.received[0].mesh
                    value = mtf.constant(mesh, float(number), mtf.Shape([]), tf.float32)
                    add(f"compression/{name}", value, step.names[0])
            add("updates_without_data", step.without_data, step.names[0])
    for one in stack:
        name = getattr(one, "name", type(one).__name__)
        report = getattr(one, "reported", None)
        for tag, value in (report() if callable(report) else {}).items():
            add(tag, value, name)
    return values


def in_sums_now(opt: AppliesGradients) -> mtf.Tensor | None:
    """Returns how many gradients each accumulator of a stack holds after the current step.

    The number is an int32 mtf scalar, to fetch together with the step; 0 if the accumulators are
    empty. The result is None for a stack without accumulators. If several wrappers of the stack
    accumulate, the result is the sum of their numbers.
    """
    stack = [opt, *opt.inner_stack()] if isinstance(opt, Wrapper) else [opt]
    found = [x for x in (getattr(one, "in_sums_now", None) for one in stack) if x is not None]
    return functools.reduce(mtf.add, (on_mesh(x, found[0].mesh) for x in found)) if found else None


def weight_now(opt: AppliesGradients) -> mtf.Tensor | None:
    """Returns the weight of the current step's gradients; None if the program gave no weights.

    The weight is a float32 mtf scalar, to fetch together with the step: the total weight of all
    shards' gradients as the stack `opt` received them.
    """
    step = opt.step if isinstance(opt, Wrapper) else None
    weights = step.received[0].weights if step else None
    return weights and weights.total


def _add_norms(
    wrappers: list[Wrapper],
    steps: list[StepBuilder],
    axes: ReplicaAxes | None,
    add: Callable[[str, mtf.Tensor | None, str], None],
) -> None:
    outer, inner = wrappers[0], wrappers[-1]
    received, applied = steps[0].received[0], steps[-1].passed_on[-1]
    axes = axes or outer.axes_now(received.present)
    shards = next((s.per_shard for s in steps if s.per_shard), received)
    if axes and axes.num_shards > 1 and shards.branch is None:
        own, clipped = norms_of_shards(shards.present, axes, outer.reducer)
        add("gradient_norm/of_shards", own, outer.name)
        add("gradient_norm/of_shards_clipped", clipped, outer.name)
    # If the program itself has clipped the gradients before.
    places = {received.present[0]: (received, "program")}
    for step in steps:
        for passed_on, name in zip(step.passed_on, step.names):
            places[passed_on.present[0]] = passed_on, name
    of_branches: dict[Branch, dict[tuple[str, str], mtf.Tensor]] = {}

    def add_norm(tag: str, norm: mtf.Tensor | None, place: GradientSet, name: str) -> None:
        if norm is not None and place.branch is not None:
            of_branches.setdefault(place.branch, {})[tag, name] = norm
        else:
            add(tag, norm, name)

    for place, name in places.values():
        clipping = clipping_of(place.present)
        before = None if clipping is None or clipping.norm.shape.ndims else clipping.norm
        add_norm("gradient_norm/before_clipping", before, place, name)
    with applied.branch.opened() if applied.branch else contextlib.nullcontext():
        norm = norm_of_reduced(applied.present, inner.reducer)
    add_norm("gradient_norm/applied", norm, applied, inner.name)
    for branch, found in of_branches.items():
        held = values_of_last_run(list(found.values()), branch, f"{inner.name}/reported")
        for (tag, name), value in zip(found, held):
            add(tag, value, name)


def split_by_shard(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns scalars by name for summaries: values with one number for each shard are split.

    Args:
      values: by name, scalars and tensors with one number for each shard, as `reported` returns
        them and a session fetches them: tf tensors of a known shape, arrays or numbers.

    Returns:
      Scalars by name. A tensor's numbers are under `<name>/shard_0`, `<name>/shard_1` and so on, in
      row-major order of the shard dims.

    Raises:
      TypeError: values are no mapping, or one is neither a tf tensor, an array nor a number.
      ValueError: the shape of a tf tensor is not known.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"values must be a mapping from names to values, got {values!r}.")
    for tag, value in values.items():
        if isinstance(value, (tf.Tensor, tf.Variable)):
            if not value.shape.is_fully_defined():
                raise ValueError(f"values[{tag!r}] must have a known shape, got {value!r}.")
        elif not isinstance(value, (np.ndarray, np.generic, int, float)):
            hint = ": lowering.export_to_tf_tensor makes one of it"
            raise TypeError(
                f"values[{tag!r}] must be a tf tensor, an array or a number, got {value!r}"
                f"{hint if isinstance(value, mtf.Tensor) else ''}."
            )
    scalars: dict[str, Any] = {}
    for tag, value in values.items():
        if not tuple(getattr(value, "shape", ())):  # a TensorShape of a scalar is true
            scalars[tag] = value
            continue
        each = (
            value.ravel() if isinstance(value, np.ndarray) else tf.unstack(tf.reshape(value, [-1]))
        )
        scalars.update((f"{tag}/shard_{number}", one) for number, one in enumerate(each))
    return scalars
