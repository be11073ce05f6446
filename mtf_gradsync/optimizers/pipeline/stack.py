"""A stack of wrappers as a value: what its step does to gradients, before anything is built.

Each wrapper gives its stages, frozen values that say what they take and give. `completed` makes one
value of those of a stack, by passes that change nothing:

1. From the outside in, each wrapper gives its stages for its place: its replica axes there, the
   islands around it, the stages around it.
2. Stages that depend on those inside of them (a loss scale's) are told these.
3. Where a stage takes another form of gradients than it gets, one that converts is put before it.

`StepBuilder` makes the operations of a completed stack, in order, and `mtf_gradsync.describe`
prints the same value. `check_order` refuses orders by what stages take and give.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, NamedTuple, Sequence

from mtf_gradsync._common import is_number, some_of
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.gradients.pending import find_axes
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.optimizers.pairs import OwnArguments
from mtf_gradsync.optimizers.pipeline.forms import (
    Form,
    GradientSet,
    Partition,
    PerShard,
    Reduction,
)


class Line(NamedTuple):
    """What a stage does, in words.

    Attributes:
      what: for example "clip to a global norm of 1".
      when: on which steps, if that is not where the stage stands; "" if it is.
      after: whether it comes after the update.
      first: whether it comes before all stages, on every step.
    """

    what: str
    when: str = ""
    after: bool = False
    first: bool = False


class About(NamedTuple):
    """What is known of a program when its stack is described.

    Attributes:
      axes: the replica axes of the stage; None if they are not known.
      variables: the variables that get gradients; () if they are not known.
      num_bytes: returns the bytes of a core's gradients of these variables, in a dtype or in their
        own, and the number of groups in which they are reduced; None if they are not known.
    """

    axes: ReplicaAxes | None
    variables: tuple[mtf.Variable, ...]
    num_bytes: Callable[[Any], tuple[int, int] | None]


class Stage:
    """What a wrapper does to gradients on their way to an update; the base passes them on.

    A stage is a frozen dataclass. Nothing of it changes while a step is built: `apply` makes the
    operations of the step, and tells the builder what is to be made after the update or at the end.

    Attributes:
      takes: the form of gradients for `apply`: `Form.REDUCED`, or `PerShard` for one gradient of
        each shard. None takes any form.
      gives: `Form.REDUCED` if those inside get reduced gradients; None for what `apply` returns.
      due: on which of the steps those inside run, in words ("every 4th"); "" if the stage leaves
        that to others. Two stages of a stack cannot both decide it.
      finite: "skips" if those inside get no gradients that are not finite, "needs" if the stage
        needs those that are not.
      squares: whether it squares gradients, which overflow before they do.
      takes_parts: whether it works on parts of gradients and variables, too.
    """

    takes: Form | PerShard | None = None
    gives: Form | None = None
    due: str = ""
    finite: str = ""
    squares: bool = False
    takes_parts: bool = False

    # What only the package's own stages say: the form that `apply` returns, if it is another one;
    # the replica axes that it found itself; how it shards updates; whether it adds up reduced
    # gradients, in accumulators laid out like variables; the dtype of what it passes on, "wide" for
    # float32 at least; what these are divided by, in words.
    _leaves: Form | None = None
    axes: ReplicaAxes | None = None
    _partition: Partition | None = None
    _wants_reduced: bool = False
    _sums_in: Any = None
    _divides: str = ""
    # Whether `apply` calls `StepBuilder.tell_finite`; applies the gradients of some shards without
    # those of others; counts which shards contribute; keeps averages; trains other values of
    # variables than programs see; gives islands values of their own.
    _tells_finite: bool = False
    _skips_shards: bool = False
    _counts_shards: bool = False
    _averages: bool = False
    _keeps_outer_values: bool = False
    _islands: IslandAxes | None = None
    # What to do about gradients of several meshes, for an error; "" if it takes them.
    _one_mesh: str = ""

    def within(self, inside: Sequence[Stage], others: Sequence[Any]) -> Stage:
        """Returns the stage for a stack with some stages, and other optimizers, inside of it."""
        del inside, others
        return self

    def check(
        self,
        grads: Sequence[mtf.Tensor | None],
        variables: Sequence[mtf.Variable],
        arguments: OwnArguments,
    ) -> None:
        """Raises ValueError for what the stage cannot handle, before anything is built.

        Args:
          grads: gradients as given to the outermost wrapper, or None.
          variables: their variables.
          arguments: more arguments for `apply_grads` of the innermost optimizer.
        """

    def apply(self, gradients: GradientSet, step: Any) -> GradientSet:
        """Returns the gradients for the next stage; may add operations and conditions to the step.

        Args:
          gradients: the gradients, in the form that the stage takes.
          step: the step that is being built (`StepBuilder`).
        """
        del step
        return gradients

    def describe(self, about: About) -> list[Line]:
        """Returns what the stage does, in words, for `mtf_gradsync.describe`."""
        del about
        return []


class IslandAxes(NamedTuple):
    """The axes of islands (`OuterOptimizer`).

    Attributes:
      islands: the axes between islands.
      inside: the replica axes inside of an island; None for one island without a known mesh.
      axes: all replica axes.
    """

    islands: ReplicaAxes
    inside: ReplicaAxes | None
    axes: ReplicaAxes | None


class Program(NamedTuple):
    """What is known of the program that a stack is completed for.

    Attributes:
      find_axes: returns the replica axes for names of batch dims; None if they are not known.
      num_meshes: how many meshes the gradients are on.
    """

    find_axes: Callable[[Sequence[str]], ReplicaAxes | None]
    num_meshes: int = 1

    @classmethod
    def of(cls, grads: Sequence[mtf.Tensor]) -> Program:
        """Returns what is known of the program that made gradients."""
        return cls(lambda names: find_axes(grads, names), len({g.mesh for g in grads}))


class Segment(NamedTuple):
    """The stages of one wrapper, in the order in which gradients pass through them.

    Attributes:
      wrapper: the wrapper's class name.
      stages: its stages; in a completed stack also those that convert gradients for them.
      reduction: how the wrapper reduces gradients.
      islands: the islands that it is inside of; None outside of any.
    """

    wrapper: str
    stages: tuple[Stage, ...]
    reduction: Reduction
    islands: IslandAxes | None = None


class Place(NamedTuple):
    """Where a wrapper stands.

    Attributes:
      axes: its replica axes; inside of islands those of an island. None if they are not known.
      names: the names of its shard dims.
      islands: the islands that it is inside of; None outside of any.
      around: the wrappers around it, from the outside in.
      program: what is known of the program; None while no gradients are applied.
    """

    axes: ReplicaAxes | None
    names: tuple[str, ...]
    islands: IslandAxes | None = None
    around: tuple[Segment, ...] = ()
    program: Program | None = None


class Stack(NamedTuple):
    """A stack, completed: what a step does, in order.

    Attributes:
      segments: the wrappers, from the outside in.
      opt: the optimizer inside the innermost of them.
      others: the replica axes of the first wrapper inside of `opt` that knows some.
      islands: the islands that `opt` is inside of; None outside of any.
    """

    segments: tuple[Segment, ...]
    opt: Any
    others: ReplicaAxes | None = None
    islands: IslandAxes | None = None

    @property
    def stages(self) -> list[Stage]:
        """The stages of all wrappers."""
        return [stage for segment in self.segments for stage in segment.stages]

    def axes_now(self, number: int, grads: Sequence[mtf.Tensor]) -> ReplicaAxes | None:
        """Returns the replica axes of a wrapper and those inside; None if they are not known."""
        if len({g.mesh for g in grads}) > 1:
            return None
        reductions = [segment.reduction for segment in self.segments[number:]]
        known = next((r.axes for r in reductions if r.axes), self.others)
        return known or find_axes(grads, reductions[0].batch_dims)

    def shards_to_name(
        self, number: int, grads: Sequence[mtf.Tensor]
    ) -> tuple[ReplicaAxes | None, bool]:
        """Returns the replica axes that number shards in the log, and `of_shards_only` for flags.

        Inside of islands these are all shards of the mesh. Where each is an island, a gradient is
        that of its shard.
        """
        around = self.segments[number].islands
        if around is None or around.inside is None:
            return self.axes_now(number, grads), True
        return around.axes, around.inside.num_shards > 1


@dataclasses.dataclass(frozen=True)
class Reduce(Stage):
    """Reduces gradients over the mesh, and divides them; to parts if updates are sharded."""

    reduction: Reduction
    partition: Partition | None = None
    divides: str = ""
    is_sum: bool = False

    @property
    def form(self) -> Form:
        """The form of the gradients then."""
        return Form.REDUCED if self.partition is None else Form.PART

    def apply(self, gradients: GradientSet, step: Any) -> GradientSet:
        """See `Stage.apply`."""
        return step.reduced(gradients, self.reduction, self.partition)

    def describe(self, about: About) -> list[Line]:
        """See `Stage.describe`."""
        if self.is_sum:
            what = "take each replica's part of the sums" if self.partition else ""
        else:
            used = self.reduction if self.partition is None else self.partition
            how = "reduce" if self.partition is None else "reduce, each replica its part,"
            what = f"{how} over {_over(about.axes)}: {strategy_told(used.strategy)}"
            found = about.num_bytes(None if self.partition else self.reduction.strategy)
            if found is not None:
                groups = f"{found[1]} group{'s' * (found[1] != 1)}"
                what += f", {bytes_told(found[0])} in {groups}"
        return (
            [Line("; ".join(x for x in (what, self.divides) if x))] if what or self.divides else []
        )


@dataclasses.dataclass(frozen=True)
class SplitByShard(Stage):
    """Makes one gradient for each shard, without communication over the replica axes."""

    reduction: Reduction
    request: PerShard

    def apply(self, gradients: GradientSet, step: Any) -> GradientSet:
        """See `Stage.apply`."""
        return step.split_by_shard(gradients, self.reduction, self.request)


def _over(axes: ReplicaAxes | None) -> str:
    if axes is None:
        return "the replica axes"
    if not axes.shard_dims:
        return "the mesh, 1 shard"
    names = ", ".join(d.name for d in axes.shard_dims)
    return f"{names}, {axes.num_shards} shard{'s' * (axes.num_shards != 1)}"


def told(value: Any) -> str:
    """Returns a setting as lines have it: a number, or what a tensor is called."""
    if value is None or isinstance(value, (bool, str)):
        return str(value)
    if is_number(value):
        return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
    return f"the value of {getattr(value, 'name', type(value).__name__)}"


def strategy_told(strategy: Any) -> str:
    """Returns how a strategy reduces, in words."""
    name, inner = type(strategy).__name__, getattr(strategy, "reducer", None)
    narrow = getattr(strategy, "compressed_dtype", None)
    if narrow is not None:
        return f"{strategy_told(inner)}, sent in {narrow.name}"
    how = {
        "FusedAllReduce": "fused",
        "QuantizedAllReduce": f"quantized to {getattr(strategy, 'bits', '')} bits",
        "LowRankAllReduce": f"low rank, {getattr(strategy, 'rank', '')}",
    }
    return how.get(name, f"by {name}")


def nth(count: Any) -> str:
    """Returns on which steps something happens that does so once in some steps."""
    if not isinstance(count, int):
        return "when due"
    if count == 1:
        return "every step"
    ending = {1: "st", 2: "nd", 3: "rd"}.get(count % 10 if count % 100 not in (11, 12, 13) else 0)
    return f"every {count:,}{ending or 'th'}"


def bytes_told(count: int) -> str:
    """Returns a number of bytes as people write it, such as "12.3 MB"."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return (
                f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count // size:,} {unit}"
            )
    return f"{count} bytes"


# The passes.


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
    partition = next((s._partition for s in left if s._partition is not None), None)

    def reduction_of(form: Form, by: Reduction, divides: str, is_sum: bool) -> list[Reduce]:
        # Who adds up reduced gradients needs all of each.
        parts = None if any(stage._wants_reduced for stage in left) else partition
        made = Reduce(by, parts, divides, is_sum or form.is_reduced)
        return [] if form is made.form else [made]

    form, result = Form.PENDING, []
    for number, segment in enumerate(segments):
        stages: list[Stage] = []
        for stage in segment.stages:
            before: list[Any] = []
            if isinstance(stage.takes, PerShard):
                before, form = [SplitByShard(segment.reduction, stage.takes)], Form.PER_SHARD
            elif stage.takes is Form.REDUCED:
                before = reduction_of(form, segment.reduction, "", False)
                form = before[0].form if before else form
            left.pop(0)
            after, is_sum = [], stage._wants_reduced and form.is_reduced
            form = stage._leaves or form
            if stage.gives is Form.REDUCED:
                after = reduction_of(form, segment.reduction, stage._divides, is_sum)
                form = after[0].form if after else form
            stages += [*before, stage, *after]
        if number == len(segments) - 1 and not takes_pending:
            stages += reduction_of(form, segment.reduction, "", False)
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
