"""The order of wrappers: which may be around which, by what their stages take and give."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

from mtf_gradsync.optimizers.pipeline.forms import Form, PerShard
from mtf_gradsync.optimizers.pipeline.stack import Segment, Stage, stages_of, with_conversions
from mtf_gradsync.optimizers.pipeline.words import About, frequency_text

Stages = Sequence[Stage]


# Facts about some stages together that decide which stages may be around or inside them.


def reduces(stages: Stages) -> bool:
    """Returns whether these stages of a wrapper give reduced gradients to the stages inside."""
    return any(Form.REDUCED in (s.takes, s.gives) for s in stages)


def needs_shards(stages: Stages) -> PerShard | None:
    """Returns the request of one of these stages for gradients that nothing has reduced before.

    If stages request gradients that nothing has reduced (`PerShard`), no wrapper around the stages
    may reduce gradients. The result is None if the stages have no such request, or also take
    reduced gradients.
    """
    requests = [s.takes for s in stages if isinstance(s.takes, PerShard)]
    return next((r for r in requests if r.or_else is not None), None)


def schedules_updates(stages: Stages) -> bool:
    """Returns whether these stages decide which steps make an update."""
    return any(s.condition is not None and s.condition.when for s in stages)


def skips_not_finite(stages: Stages) -> bool:
    """Returns whether these stages skip what is not finite, so that stages inside never get it."""
    return any(s.finite == "skips" for s in stages)


def needs_not_finite(stages: Stages) -> bool:
    """Returns whether these stages must get gradients that are not finite.

    The stage of a loss scale must get gradients that are not finite: it lowers the scale when it
    finds them.
    """
    return any(s.finite == "needs" for s in stages)


def shards_updates(stages: Stages) -> bool:
    """Returns whether these stages give replicas' parts of variables to the stages inside."""
    return any(s._partition is not None for s in stages)


def averages(stages: Stages) -> bool:
    """Returns whether these stages keep moving averages of variables."""
    return any(s._averages for s in stages)


def keeps_outer_values(stages: Stages) -> bool:
    """Returns whether these stages train values of variables that programs do not see.

    The stages of `OuterOptimizer` are an example: islands train their own values, and programs see
    the outer values.
    """
    return any(s._keeps_outer_values for s in stages)


def makes_islands(stages: Stages) -> bool:
    """Returns whether these stages give islands their own values of variables and slots."""
    return any(s._islands is not None for s in stages)


def counts_shards(stages: Stages) -> bool:
    """Returns whether these stages count contributing shards, and update when there are enough."""
    return any(s._counts_shards for s in stages)


class OrderRule(NamedTuple):
    """A rule that forbids some wrappers around others.

    Attributes:
      forbids: a function `forbids(outer, inner)` that takes the stages of two wrappers, and is true
        if the first wrapper must not be around the second.
      why: the text of the error, with the fields {outer} and {inner} for the class names of the two
        wrappers, and {or_else} for the remedy that `PerShard.or_else` has.
    """

    forbids: Callable[[Stages, Stages], object]
    why: str


RULES = (
    OrderRule(
        lambda outer, inner: keeps_outer_values(outer) and keeps_outer_values(inner),
        "{inner} inside {outer} would make islands of islands; use one of the two.",
    ),
    OrderRule(
        lambda outer, inner: (
            (makes_islands(outer) and counts_shards(inner))
            or (counts_shards(outer) and makes_islands(inner))
        ),
        "{outer} cannot be around {inner}: islands update in lock step, but the shards of one "
        "island could have contributed enough when the shards of another island have not. To "
        "accumulate, and to skip what is not finite, use "
        "OuterOptimizer(GradientAccumulationOptimizer(opt, passes, "
        "should_skip_update_fn=skip_not_finite), ..., leave_out_not_finite=True).",
    ),
    OrderRule(
        lambda outer, inner: (
            makes_islands(inner)
            and (reduces(outer) or needs_shards(outer) or needs_not_finite(outer))
        ),
        "{outer} around {inner} would reduce gradients over the islands, which {inner} trains "
        "separately: turn them round, {inner}({outer}(opt, ...), ...).",
    ),
    OrderRule(
        lambda outer, inner: averages(outer) and averages(inner),
        "{outer} and {inner} would update the same averages of variables twice; use one of the "
        "two.",
    ),
    OrderRule(
        lambda outer, inner: shards_updates(outer) and shards_updates(inner),
        "{inner} inside {outer} would shard updates that are sharded already; use one of the two.",
    ),
    OrderRule(
        lambda outer, inner: needs_not_finite(outer) and needs_not_finite(inner),
        "A {inner} inside a {outer} would scale the loss twice; use one of the two.",
    ),
    OrderRule(
        lambda outer, inner: schedules_updates(outer) and schedules_updates(inner),
        "{inner} cannot be inside {outer}: each decides by itself when there is an update, so "
        "that {inner} would count the updates of {outer} as steps. Use one of the two: "
        "GradientAccumulationOptimizer with the product of both backward_passes_per_step, or "
        "SyncReplicasOptimizer with replicas_to_aggregate=K * num_shards.",
    ),
    OrderRule(
        lambda outer, inner: skips_not_finite(outer) and needs_not_finite(inner),
        "{outer} skips gradients that are not finite, so that {inner} inside it cannot find that "
        "its scale is too large: turn them round, {inner}({outer}(opt, ...)), or skip nothing in "
        "{outer}.",
    ),
    OrderRule(
        lambda outer, inner: (
            needs_not_finite(outer) and schedules_updates(inner) and not skips_not_finite(inner)
        ),
        "{outer} around {inner} needs {inner} to skip microbatch steps that are not finite: turn "
        "them round, {inner}({outer}(opt), ...), which skips whole updates, or give {inner} "
        "should_skip_update_fn=skip_not_finite.",
    ),
    OrderRule(
        lambda outer, inner: shards_updates(outer) and not all(s.takes_parts for s in inner),
        "{inner} cannot be inside {outer}, whose inner optimizer gets parts of variables: turn "
        "them round, {inner}({outer}(opt), ...).",
    ),
    OrderRule(
        lambda outer, inner: reduces(outer) and needs_shards(inner) and not needs_not_finite(outer),
        "{outer} around {inner} would reduce gradients over the mesh on every step, but {inner} "
        "needs per-shard gradients: turn them round, {inner}({outer}(opt), ...), or {or_else}.",
    ),
)


def why_not(outer: Stages, inner: Stages) -> str | None:
    """Returns why a wrapper must not be around another one; None if it may be.

    `outer` are the stages of the wrapper around, and `inner` those of the wrapper inside. The
    result is the text of the first rule that forbids it (`OrderRule.why`). The caller fills in the
    fields of this text.
    """
    return next((rule.why for rule in RULES if rule.forbids(outer, inner)), None)


def check_order(outer: Any, inner_stack: Sequence[Any]) -> None:
    """Raises ValueError if a wrapper must not be around one of the optimizers inside it.

    `outer` is the wrapper, and `inner_stack` are the optimizers inside it, the outermost first. The
    error says why the order is wrong, and what each of the two optimizers does.
    """
    own = stages_of(outer)
    for inner in inner_stack:
        stages = stages_of(inner)
        why = why_not(own, stages)
        if why is not None:
            request = needs_shards(stages)
            raise ValueError(
                why.format(
                    outer=type(outer).__name__,
                    inner=type(inner).__name__,
                    or_else=request.or_else if request else "",
                )
                + "".join(f"\n  {line}" for line in map(_describe_wrapper, (outer, inner)) if line)
            )


def _describe_wrapper(wrapper: Any) -> str:
    """Describes a wrapper in a line of an error; returns "" for an optimizer that is no wrapper.

    An example is "CrossShardOptimizer: reduce over batch, 4 shards: fused".
    """
    if not hasattr(wrapper, "_place"):
        return ""
    stages = stages_of(wrapper)
    alone = Segment("", stages, wrapper._gradient_reduction())
    (segment,) = with_conversions([alone], takes_pending=True)
    about = About(segment.reduction.axes, (), lambda strategy: None)
    lines = [line for stage in segment.stages for line in stage.describe(about)]
    lines.sort(key=lambda line: not line.first)
    what = "; ".join(f"{line.when} {line.what}".lstrip() for line in lines)
    conditions = [stage.condition for stage in stages if stage.condition is not None]
    due = "".join(
        f" ({frequency_text(condition.when)})" for condition in conditions if condition.when
    )
    return f"{wrapper.name}{due}: {what}"
