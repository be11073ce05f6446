"""The passes that complete a stack, and the orders that make no sense.

1. From the outside in, each wrapper gives its stages for its place: its replica axes there, the
   islands around it, the stages around it.
2. Stages that depend on those inside of them (a loss scale's) are told these.
3. Where a stage takes another form of gradients than it gets, one that converts is put before it.

They change nothing and build nothing. `check_order` refuses orders by what stages take and give.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

from mtf_gradsync._common import some_of
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.optimizers.pipeline.forms import Form, PerShard
from mtf_gradsync.optimizers.pipeline.stack import (
    About,
    IslandAxes,
    Program,
    Reduce,
    Reduction,
    Segment,
    SplitByShard,
    Stack,
    Stage,
)


def completed(
    wrappers: Sequence[Any],
    inside: Sequence[Any],
    program: Program | None,
    islands: IslandAxes | None = None,
) -> Stack:
    """Returns the stack of some wrappers, from the outside in.

    Args:
      wrappers: the wrappers up to the first optimizer of another library.
      inside: the optimizers inside of the last of them, the first of which it wraps.
      program: what is known of the program; None for nothing.
      islands: the islands that they are inside of; None outside of any.
    """
    # 1. Each wrapper's stages, for its place.
    segments: list[Segment] = []
    for wrapper in wrappers:
        place = wrapper._place(islands, segments, program)
        stages = tuple(wrapper.stages(place))
        own = next((s.axes for s in stages if s.axes is not None), None)
        reduction = wrapper._gradient_reduction(place, own)
        segments.append(Segment(type(wrapper).__name__, stages, reduction, islands))
        # Islands inside of islands are refused.
        islands = islands or next((s._islands for s in stages if s._islands is not None), None)
    # 2. What those inside mean for those around.
    for number, segment in enumerate(segments):
        inner = [s for one in segments[number + 1 :] for s in one.stages]
        stages = tuple(s.within(inner, inside) for s in segment.stages)
        segments[number] = segment._replace(stages=stages)
    # 3. Conversions.
    more = [opt._place(islands, (), program) for opt in inside if hasattr(opt, "_place")]
    others = next((place.axes for place in more if place.axes), None)
    return Stack(_with_conversions(segments, bool(more)), inside[0], others, islands)


def _with_conversions(segments: Sequence[Segment], takes_pending: bool) -> tuple[Segment, ...]:
    """Puts a stage that converts wherever a stage takes another form than it gets.

    `takes_pending` says whether the optimizer inside takes gradients that are not reduced: a
    wrapper inside of an optimizer of another library reduces by itself.
    """
    left = [stage for segment in segments for stage in segment.stages]
    of_updates = next((s._partition for s in left if s._partition is not None), None)

    def reduction_of(
        form: Form, by: Reduction, given: Form | None = None, divides: str = ""
    ) -> list[Reduce]:
        # Who adds up reduced gradients says whether it needs all of each, or parts.
        adds_up = next((stage for stage in left if stage._wants_reduced), None)
        made = Reduce(by, adds_up._parts if adds_up else of_updates, divides, given or form)
        return [] if form is made.form and given is None else [made]

    form, result = Form.PENDING, []
    for number, segment in enumerate(segments):
        stages: list[Stage] = []
        for stage in segment.stages:
            before: list[Any] = []
            if isinstance(stage.takes, PerShard):
                before, form = [SplitByShard(segment.reduction, stage.takes)], Form.PER_SHARD
            elif stage.takes in (Form.REDUCED, Form.PART):
                before = reduction_of(form, segment.reduction)
                form = before[0].form if before else form
            left.pop(0)
            after: list[Reduce] = []
            # Sums of reduced gradients are reduced, and still to be divided.
            given = form if stage._wants_reduced and form.is_reduced else stage._leaves
            form = stage._leaves or form
            if stage.gives is Form.REDUCED:
                after = reduction_of(form, segment.reduction, given, stage._divides)
                form = after[0].form if after else form
            stages += [*before, stage, *after]
        if number == len(segments) - 1 and not takes_pending:
            stages += reduction_of(form, segment.reduction)
        result.append(segment._replace(stages=tuple(stages)))
    return tuple(result)


# Which orders make sense.


class Traits(NamedTuple):
    """What the stages of a wrapper mean for those around and inside of it.

    Attributes:
      reduces: those inside get reduced gradients.
      needs_shards: it needs per-shard gradients, which no wrapper around it may have reduced.
      or_else: for the error, an argument with which it does not need them.
      schedules_updates: it decides on which steps there is an update.
      skips_not_finite: it skips gradients that are not finite; wrappers inside do not get them.
      watches_not_finite: it needs gradients that are not finite, to change the loss scale.
      shards_updates: the optimizer inside it gets parts of variables.
      takes_parts: it works on parts of gradients and variables, too.
      skips_shards: it applies the gradients of some shards without those of others.
      averages: it keeps moving averages of variables.
      squares: it squares reduced gradients, which overflow before they do.
      keeps_outer_values: it trains other values of variables than those that programs see.
      makes_islands: it gives each of several islands its own values of variables and slots.
      counts_shards: it counts which shards contribute, to decide when there is an update.
    """

    reduces: bool = False
    needs_shards: bool = False
    or_else: str = ""
    schedules_updates: bool = False
    skips_not_finite: bool = False
    watches_not_finite: bool = False
    shards_updates: bool = False
    takes_parts: bool = True
    skips_shards: bool = False
    averages: bool = False
    squares: bool = False
    keeps_outer_values: bool = False
    makes_islands: bool = False
    counts_shards: bool = False

    @classmethod
    def of(cls, stages: Sequence[Stage]) -> Traits:
        """Returns what some stages together mean."""
        requests = [s.takes for s in stages if isinstance(s.takes, PerShard)]
        strict = next((r for r in requests if r.or_else is not None), None)
        return cls(
            reduces=any(Form.REDUCED in (s.takes, s.gives) for s in stages),
            needs_shards=strict is not None,
            or_else=(strict and strict.or_else) or "",
            schedules_updates=any(s.due for s in stages),
            skips_not_finite=any(s.finite == "skips" for s in stages),
            watches_not_finite=any(s.finite == "needs" for s in stages),
            shards_updates=any(s._partition is not None for s in stages),
            takes_parts=all(s.takes_parts for s in stages),
            skips_shards=any(s._skips_shards for s in stages),
            averages=any(s._averages for s in stages),
            squares=any(s.squares for s in stages),
            keeps_outer_values=any(s._keeps_outer_values for s in stages),
            makes_islands=any(s._islands is not None for s in stages),
            counts_shards=any(s._counts_shards for s in stages),
        )


#: What to do about gradients of several meshes.
ONE_FOR_EACH_MESH = "Make one for the variables of each mesh, each with a name= of its own"


class OrderRule(NamedTuple):
    """An order that makes no sense; `forbids` gets the traits of outer and inner wrapper.

    `why` is the error, with fields {outer}, {inner} and {or_else}.
    """

    forbids: Callable[[Traits, Traits], bool]
    why: str


RULES = (
    OrderRule(
        lambda outer, inner: outer.keeps_outer_values and inner.keeps_outer_values,
        "{inner} inside {outer} would make islands of islands; use one.",
    ),
    OrderRule(
        lambda outer, inner: (
            (outer.makes_islands and inner.counts_shards)
            or (outer.counts_shards and inner.makes_islands)
        ),
        "{outer} cannot be around {inner}: islands update in lock step, but the shards of one "
        "could have contributed enough when those of another have not. To accumulate, and to skip "
        "what is not finite, use OuterOptimizer(GradientAccumulationOptimizer(opt, passes, "
        "should_skip_update_fn=skip_not_finite), ..., leave_out_not_finite=True).",
    ),
    OrderRule(
        lambda outer, inner: (
            inner.makes_islands
            and (outer.reduces or outer.needs_shards or outer.watches_not_finite)
        ),
        "{outer} around {inner} would reduce gradients over the islands, which {inner} trains "
        "separately: turn them round, {inner}({outer}(opt, ...), ...).",
    ),
    OrderRule(
        lambda outer, inner: outer.averages and inner.averages,
        "{outer} and {inner} would update the same averages of variables twice; use one.",
    ),
    OrderRule(
        lambda outer, inner: outer.shards_updates and inner.shards_updates,
        "{inner} inside {outer} would shard updates that are sharded already; use one.",
    ),
    OrderRule(
        lambda outer, inner: outer.watches_not_finite and inner.watches_not_finite,
        "A {inner} inside a {outer} would scale the loss twice; use one.",
    ),
    OrderRule(
        lambda outer, inner: outer.schedules_updates and inner.schedules_updates,
        "{inner} cannot be inside {outer}: each decides by itself when there is an update, so "
        "that one would count the updates of the other as steps. Use one: "
        "GradientAccumulationOptimizer with the product of both backward_passes_per_step, or "
        "SyncReplicasOptimizer with replicas_to_aggregate=K * num_shards.",
    ),
    OrderRule(
        lambda outer, inner: outer.skips_not_finite and inner.watches_not_finite,
        "{outer} skips gradients that are not finite, so that {inner} inside it cannot find that "
        "its scale is too large: turn them round, {inner}({outer}(opt, ...)), or skip nothing in "
        "{outer}.",
    ),
    OrderRule(
        lambda outer, inner: (
            outer.watches_not_finite and inner.schedules_updates and not inner.skips_not_finite
        ),
        "{outer} around {inner} needs {inner} to skip microbatch steps that are not finite: turn "
        "them round, {inner}({outer}(opt), ...), which skips whole updates, or give {inner} "
        "should_skip_update_fn=skip_not_finite.",
    ),
    OrderRule(
        lambda outer, inner: outer.shards_updates and not inner.takes_parts,
        "{inner} cannot be inside {outer}, whose inner optimizer gets parts of variables: turn "
        "them round, {inner}({outer}(opt), ...).",
    ),
    OrderRule(
        lambda outer, inner: outer.reduces and inner.needs_shards and not outer.watches_not_finite,
        "{outer} around {inner} would reduce gradients over the mesh on every step, but {inner} "
        "needs per-shard gradients: turn them round, {inner}({outer}(opt), ...), or {or_else}.",
    ),
)


def traits_of(opt: Any) -> Traits:
    """Returns the traits of an optimizer; an optimizer without traits may be anywhere."""
    traits = getattr(opt, "traits", None)
    if isinstance(traits, Traits):
        return traits
    # Optimizers of users may have an attribute for one trait: docs/training.md.
    skips = bool(getattr(opt, "skips_not_finite", False))
    return Traits(skips_not_finite=skips)


def why_not(outer: Traits, inner: Traits) -> str | None:
    """Returns why a wrapper must not be around another one, with fields; None if it may."""
    return next((rule.why for rule in RULES if rule.forbids(outer, inner)), None)


def check_order(outer: Any, inner_stack: Sequence[Any]) -> None:
    """Raises ValueError if a wrapper must not be around one of the optimizers inside it."""
    for inner in inner_stack:
        traits = traits_of(inner)
        why = why_not(outer.traits, traits)
        if why is not None:
            raise ValueError(
                why.format(
                    outer=type(outer).__name__,
                    inner=type(inner).__name__,
                    or_else=traits.or_else,
                )
                + "".join(f"\n  {line}" for line in map(_line_of, (outer, inner)) if line)
            )


def _line_of(wrapper: Any) -> str:
    """Returns what a wrapper does by itself, for an error; "" for other optimizers."""
    if not hasattr(wrapper, "stages"):
        return ""
    place = wrapper._place(None, (), None)
    stages = tuple(wrapper.stages(place))
    alone = Segment("", stages, wrapper._gradient_reduction(place))
    (segment,) = _with_conversions([alone], takes_pending=True)
    about = About(segment.reduction.axes, (), lambda strategy: None)
    lines = [line for stage in segment.stages for line in stage.describe(about)]
    lines.sort(key=lambda line: not line.first)
    what = "; ".join(f"{line.when} {line.what}".lstrip() for line in lines)
    due = "".join(f" ({stage.due})" for stage in stages if stage.due)
    return f"{wrapper.name}{due}: {what}"


def check_meshes(
    stack: Stack, grads: Sequence[mtf.Tensor | None], variables: Sequence[mtf.Variable]
) -> None:
    """Raises ValueError if gradients are on several meshes and a wrapper needs those of one."""
    first: dict[mtf.Mesh, mtf.Variable] = {}
    for grad, variable in zip(grads, variables):
        if grad is not None:
            first.setdefault(variable.mesh, variable)
    cures = [(one.wrapper, s._one_mesh) for one in stack.segments for s in one.stages]
    needs_one = next(((name, cure) for name, cure in cures if cure), None)
    if len(first) > 1 and needs_one is not None:
        raise ValueError(
            f"{needs_one[0]} needs to know the shards, and shards are of one mesh, but "
            f"the variables {some_of([repr(v.name) for v in first.values()])} are on different "
            f"ones. {needs_one[1]}."
        )
