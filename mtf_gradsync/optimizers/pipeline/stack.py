"""A stack of wrappers as a value: the work of its step on gradients, before anything is built.

Each wrapper gives its stages, frozen values that say which form of gradients they take and give,
and whether all that comes after them runs in some steps only. A stack is completed by passes, which
are functions that return a new stack. `StepBuilder` makes the operations of the completed stack,
stage by stage, and `mtf_gradsync.describe` prints the completed stack. The passes:

1. From the outermost wrapper to the innermost, each wrapper gives its stages for its place (`Place`
   has the replica axes, and the islands and stages around the wrapper).
2. Each stage is told which stages are inside it, because the work of some stages depends on the
   stages inside (the work of a loss scale, for example).
3. If a stage takes another form of gradients than the stage before it gives, a converting stage is
   inserted (`with_conversions`). The function `complete_stack` makes these three passes.
4. If gradients have weights, stages for them are added (`with_weights` in the file `weights`).
5. Conditions become blocks of stages that run in the same steps (`in_blocks`): the builder makes a
   branch for each.

A stage that adds up gradients says which steps or shards it skips, by a field of the set of
gradients (`Mask`). The mask tells later code where to put zeros in place of skipped gradients,
which weights count, and what to tell outer stages about skipped gradients.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, NamedTuple, Sequence

from mtf_gradsync._common import some_of
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.gradients.arguments import PassedOnArguments
from mtf_gradsync.gradients.layout import find_replica_axes
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.optimizers.pipeline.forms import (
    Form,
    GradientSet,
    IslandAxes,
    Partition,
    PerShard,
    ReductionSettings,
)
from mtf_gradsync.optimizers.pipeline.words import (
    About,
    Line,
    bytes_text,
    shards_text,
    strategy_text,
)


class Condition(NamedTuple):
    """A stage's condition: all that comes after the stage runs in some steps only.

    What comes after the stage runs in the steps in which a boolean scalar is true. The stage gives
    this scalar to `GradientSet.only_when`.

    Attributes:
      when: in which steps there is an update, if the condition decides this: the number of steps
        that an update takes, or a function from the number of updates to the number of steps, or
        text for `describe`. Only one stage of a stack can decide in which steps there is an update.
        "" if the stage only skips some updates.
      as_call: whether all that comes after the stage is one function call, so that steps that skip
        it are cheap.
      counts_every_step: whether the global step also advances in steps in which the boolean scalar
        is false.
    """

    when: Any = ""
    as_call: bool = False
    counts_every_step: bool = False


class Stage:
    """One step of a wrapper's work on gradients before an update; the base class changes nothing.

    A stage is a frozen dataclass, which does not change while a step is built: `apply` makes the
    operations of the step, and tells the builder what is to be made after the update or at the end.

    Attributes:
      takes: the form of gradients that `apply` takes: `Form.REDUCED`, `Form.PART` for replicas'
        parts of reduced gradients, or `PerShard` for one gradient of each shard. None takes any
        form.
      gives: `Form.REDUCED` if the stages inside get reduced gradients; None if they get gradients
        in the form that `apply` returns.
      condition: the condition on all that comes after the stage; None if it runs in the same steps
        as the stage.
      finite: "skips" if the stage skips gradients that are not finite, so that stages inside do not
        get them; "needs" if it needs to get such gradients; "" otherwise.
      squares: whether the stage squares gradients. A stage outside then checks their norm, because
        squares overflow before gradients do.
      takes_parts: whether the stage also works on replicas' parts of gradients and variables.
    """

    takes: Form | PerShard | None = None
    gives: Form | None = None
    condition: Condition | None = None
    finite: str = ""
    squares: bool = False
    takes_parts: bool = False

    # Attributes of this package's own stages. The form of the gradients that `apply` returns; None
    # for the form that it takes.
    _leaves: Form | None = None
    # The replica axes, if the stage has found them itself.
    axes: ReplicaAxes | None = None
    # How updates are split, if the stages inside get replicas' parts of variables.
    _partition: Partition | None = None
    # Whether the stage adds up reduced gradients, and how the sums are split; None for full sums.
    _wants_reduced: bool = False
    _parts: Partition | None = None
    # The dtype of the gradients that the stage passes on: None for the dtype in which it gets them,
    # "wide" for at least float32.
    _sums_in: Any = None
    # The divisor of gradients once they are reduced, as text; "" if they are not divided.
    _divides: str = ""
    # Whether the stage can apply the gradients of some shards without the gradients of others.
    _skips_shards: bool = False
    # Whether the stage counts which shards contribute; the mask of its gradients then says which.
    _counts_shards: bool = False
    # Whether the stage keeps moving averages of variables.
    _averages: bool = False
    # Whether the stage trains values of variables that programs do not see.
    _keeps_outer_values: bool = False
    # The islands, if the stage gives each island its own values of variables.
    _islands: IslandAxes | None = None
    # The remedy for an error about gradients of several meshes; "" if the stage takes them.
    _one_mesh: str = ""

    def within(self, inside: Sequence[Stage], others: Sequence[Stage]) -> Stage:
        """Returns this stage, or a changed copy if its work depends on the stages inside it.

        The base class returns the stage itself.

        Args:
          inside: the stages of all wrappers inside this stage's wrapper.
          others: the stages of optimizers further inside: of the first optimizer that is no
            wrapper, and of all optimizers inside it.
        """
        del inside, others
        return self

    def check(
        self,
        grads: Sequence[mtf.Tensor | None],
        variables: Sequence[mtf.Variable],
        arguments: PassedOnArguments,
    ) -> None:
        """Raises ValueError for gradients that the stage cannot handle, before anything is built.

        Args:
          grads: the gradients that the outermost wrapper was given; each may be None.
          variables: the variables of these gradients.
          arguments: the arguments that `apply_grads` was given for the innermost optimizer.
        """

    def apply(self, gradients: GradientSet, step: Any) -> GradientSet:
        """Makes the stage's operations; returns the gradients for the next stage.

        A stage with a condition returns what `GradientSet.only_when` returns.

        Args:
          gradients: the gradients, in the form that the stage takes.
          step: the step that is being built (`StepBuilder`).
        """
        del step
        return gradients

    def describe(self, about: About) -> list[Line]:
        """Returns the lines that `mtf_gradsync.describe` prints for the stage; [] for none.

        `about` has what the lines can tell of the program, such as the replica axes.
        """
        del about
        return []


class ProgramFacts(NamedTuple):
    """Facts about the program that applies gradients, with which a stack is completed.

    Attributes:
      find_replica_axes: a function of names of batch dims that returns the replica axes; None if
        they are not known.
      num_meshes: the number of meshes that gradients are on.
    """

    find_replica_axes: Callable[[Sequence[str]], ReplicaAxes | None]
    num_meshes: int = 1

    @classmethod
    def of(cls, grads: Sequence[mtf.Tensor]) -> ProgramFacts:
        """Returns what is known of the program that computed `grads`, a list without None."""
        return cls(lambda names: find_replica_axes(grads, names), len({g.mesh for g in grads}))


class Segment(NamedTuple):
    """The stages of one wrapper, in the order in which gradients pass through them.

    Attributes:
      wrapper: the name of the wrapper's class.
      stages: the wrapper's stages; in a completed stack also the stages that convert gradients for
        them.
      reduction: the settings by which the wrapper reduces gradients.
      islands: the islands of an `OuterOptimizer` around the wrapper; None if there is none.
    """

    wrapper: str
    stages: tuple[Stage, ...]
    reduction: ReductionSettings
    islands: IslandAxes | None = None


class Place(NamedTuple):
    """A wrapper's place in a stack: its replica axes, and what is around it.

    Attributes:
      axes: the replica axes of the wrapper; inside islands, those of an island. None if they are
        not known.
      names: the names of the wrapper's shard dims.
      islands: the islands of an `OuterOptimizer` around the wrapper; None if there is none.
      around: the wrappers around the wrapper, the outermost first.
      program: what is known of the program; None while no gradients are applied.
    """

    axes: ReplicaAxes | None
    names: tuple[str, ...]
    islands: IslandAxes | None = None
    around: tuple[Segment, ...] = ()
    program: ProgramFacts | None = None


class Stack(NamedTuple):
    """A completed stack of wrappers: all stages of a step, in order.

    Attributes:
      segments: the wrappers with their stages, the outermost first.
      opt: the optimizer inside the innermost of these wrappers.
      others: if `opt` has wrappers inside, the replica axes of the first of these wrappers that was
        given axes; else None.
      islands: the islands of an `OuterOptimizer` around `opt`; None if there is none.
      first: stages that belong to no wrapper and come before those of all wrappers.
      last: stages that belong to no wrapper and come between those of all wrappers and the update.
    """

    segments: tuple[Segment, ...]
    opt: Any
    others: ReplicaAxes | None = None
    islands: IslandAxes | None = None
    first: tuple[Stage, ...] = ()
    last: tuple[Stage, ...] = ()

    @property
    def stages(self) -> list[Stage]:
        """The stages of all wrappers."""
        return [stage for segment in self.segments for stage in segment.stages]

    def axes_now(self, number: int, grads: Sequence[mtf.Tensor]) -> ReplicaAxes | None:
        """Returns the replica axes that wrapper `number` uses; None if they are not known.

        The outermost wrapper has the number 0. The axes are those that wrapper `number`, or the
        first wrapper inside it, was given, or else those of the program that computed `grads`. If
        `grads` are on several meshes, the result is None.
        """
        if len({g.mesh for g in grads}) > 1:
            return None
        reductions = [segment.reduction for segment in self.segments[number:]]
        known = next((r.axes for r in reductions if r.axes), self.others)
        return known or find_replica_axes(grads, reductions[0].batch_dims)

    def shard_numbering(
        self, number: int, grads: Sequence[mtf.Tensor]
    ) -> tuple[ReplicaAxes | None, bool]:
        """Returns how log lines of wrapper `number` number the shards, as two values.

        The first value has the replica axes whose shards are numbered: those of the whole mesh,
        also inside islands; None if they are not known. The second value is true if a reduced
        gradient is a sum over several of these shards. It is false inside islands of one shard
        each, where a reduced gradient belongs to a single shard. `number` counts wrappers from the
        outermost, which has the number 0. `grads` are the gradients that the wrapper has received.
        """
        around = self.segments[number].islands
        if around is None or around.inside is None:
            return self.axes_now(number, grads), True
        return around.axes, around.inside.num_shards > 1


class _SkipsNotFinite(Stage):
    """The stage of a user's optimizer that has `skips_not_finite` (docs/training.md)."""

    finite = "skips"
    takes_parts = True


def stages_of(opt: Any) -> tuple[Stage, ...]:
    """Returns the stages that an optimizer has by itself, with nothing around it.

    The result is () for an optimizer that is no wrapper, unless its attribute `skips_not_finite` is
    true: such an optimizer has one stage.
    """
    if hasattr(opt, "_place"):
        return tuple(opt.stages(opt._place(None, (), None)))
    return (_SkipsNotFinite(),) if getattr(opt, "skips_not_finite", False) else ()


@dataclasses.dataclass(frozen=True)
class Reduce(Stage):
    """The stage that reduces gradients and divides them.

    Attributes:
      by: the settings of the reduction, if each replica is to get full gradients; how gradients are
        split, if each replica is to get only its part of them.
      divides: what `describe` says about the division of the gradients; "" if they are not divided.
      given: the form of the gradients that the stage gets. If the form is `Form.REDUCED` or
        `Form.PART`, the gradients are sums of gradients that were reduced before. The stage then
        only splits or gathers these sums, and divides them.
    """

    by: ReductionSettings | Partition
    divides: str = ""
    given: Form = Form.PENDING

    @property
    def form(self) -> Form:
        """The form of the gradients that this stage gives."""
        return Form.PART if isinstance(self.by, Partition) else Form.REDUCED

    def apply(self, gradients: GradientSet, step: Any) -> GradientSet:
        return step.reduce_and_divide(gradients, self.by)

    def describe(self, about: About) -> list[Line]:
        what: tuple[str, ...] = (self.divides,)
        if self.given is Form.PART and self.form is Form.REDUCED:
            what = self.divides, "gather the sums"
        elif self.given is Form.REDUCED and self.form is Form.PART:
            what = "take each replica's part of the sums", self.divides
        elif not self.given.is_reduced:
            what = self._reduces(about), self.divides
        return [Line("; ".join(filter(None, what)))] if any(what) else []

    def _reduces(self, about: About) -> str:
        is_part = self.form is Form.PART
        how = "reduce, each replica its part," if is_part else "reduce"
        what = f"{how} over {shards_text(about.axes)}: {strategy_text(self.by.strategy)}"
        found = about.num_bytes(None if is_part else self.by.strategy)
        if found is None:
            return what
        num_bytes, number = found
        if not num_bytes:
            return f"{what}, nothing to send"
        if number is None:
            return f"{what}, of {bytes_text(num_bytes)}"
        return f"{what}, {bytes_text(num_bytes)} in {number} group{'s' * (number != 1)}"


@dataclasses.dataclass(frozen=True)
class SplitByShard(Stage):
    """The stage that makes one gradient per shard, without communication over replica axes.

    `reduction` has the settings of the wrapper whose stage makes the `request`.
    """

    reduction: ReductionSettings
    request: PerShard

    def apply(self, gradients: GradientSet, step: Any) -> GradientSet:
        return step.split_by_shard(gradients, self.reduction, self.request)

    def describe(self, about: About) -> list[Line]:
        count = len(about.mixed)
        which = f"gradient{'s' * (count != 1)} of {count} variable{'s' * (count != 1)}"
        what = f"reduce the {which}, in which the program has mixed shards"
        return [Line(what)] if count else []


# The passes that complete a stack. They change nothing and build nothing.


def complete_stack(
    wrappers: Sequence[Any],
    inside: Sequence[Any],
    program: ProgramFacts | None,
    islands: IslandAxes | None = None,
) -> Stack:
    """Returns a stack with all stages of a step in order: those of wrappers, and added conversions.

    Args:
      wrappers: the wrappers around the first optimizer that is no wrapper, the outermost first.
      inside: the first optimizer that is no wrapper, and all optimizers inside it, in this order.
      program: finds the replica axes of the program that applies gradients, and counts its meshes;
        None if there is no program yet.
      islands: the islands of an `OuterOptimizer` around the wrappers; None if there is none.
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
    # 2. Stages get to know the stages inside them.
    others = [stage for opt in inside for stage in stages_of(opt)]
    for number, segment in enumerate(segments):
        inner = [s for one in segments[number + 1 :] for s in one.stages]
        stages = tuple(s.within(inner, others) for s in segment.stages)
        segments[number] = segment._replace(stages=stages)
    # 3. Conversions.
    more = [opt._place(islands, (), program) for opt in inside if hasattr(opt, "_place")]
    axes = next((place.axes for place in more if place.axes), None)
    return Stack(with_conversions(segments, bool(more)), inside[0], axes, islands)


def with_conversions(segments: Sequence[Segment], takes_pending: bool) -> tuple[Segment, ...]:
    """Adds stages to segments so that each stage gets gradients of the form that it takes.

    Where a stage would get another form than it takes, a stage that converts gradients is put
    before it. If gradients are not reduced after the last stage, a reduction is added. No reduction
    is added if `takes_pending` is true: the optimizer inside then takes pending gradients, because
    it has a wrapper inside that reduces them.
    """
    left = [stage for segment in segments for stage in segment.stages]
    of_updates = next((s._partition for s in left if s._partition is not None), None)

    def reduction_of(
        form: Form, by: ReductionSettings, given: Form | None = None, divides: str = ""
    ) -> list[Reduce]:
        # A stage inside that adds up reduced gradients says whether it needs them in full.
        adds_up = next((stage for stage in left if stage._wants_reduced), None)
        parts = adds_up._parts if adds_up else of_updates
        made = Reduce(parts or by, divides, given or form)
        return [] if form is made.form and given is None else [made]

    form, result = Form.PENDING, []
    for number, segment in enumerate(segments):
        stages: list[Stage] = []
        for stage in segment.stages:
            before: list[Any] = []
            are_sums = form.is_reduced
            if isinstance(stage.takes, PerShard):
                before, form = [SplitByShard(segment.reduction, stage.takes)], Form.PER_SHARD
            elif stage.takes in (Form.REDUCED, Form.PART):
                before = reduction_of(form, segment.reduction)
                form = before[0].form if before else form
            left.pop(0)
            after: list[Reduce] = []
            # Sums of reduced gradients are reduced already, but not divided yet.
            given = stage._leaves
            if stage._wants_reduced and (are_sums or form.is_reduced):
                given = form if form.is_reduced else Form.REDUCED
            form = stage._leaves or form
            if stage.gives is Form.REDUCED:
                after = reduction_of(form, segment.reduction, given, stage._divides)
                form = after[0].form if after else form
            stages += [*before, stage, *after]
        if number == len(segments) - 1 and not takes_pending:
            stages += reduction_of(form, segment.reduction)
        result.append(segment._replace(stages=tuple(stages)))
    return tuple(result)


class Block(NamedTuple):
    """Stages of a stack that run in the same steps.

    Attributes:
      condition: the condition under which these stages run, and all later ones; None for the first
        block, which runs in every step.
      stages: the stages, each with the number of its wrapper, or None if it belongs to no wrapper.
    """

    condition: Condition | None
    stages: tuple[tuple[int | None, Stage], ...]


def in_blocks(stack: Stack) -> tuple[Block, ...]:
    """Returns the stages of a completed stack as blocks of stages that run in the same steps.

    A stage with a condition is the last of its block. Later blocks run only if the condition holds.
    """
    numbered: list[tuple[int | None, Stage]] = [
        *((None, stage) for stage in stack.first),
        *((i, stage) for i, segment in enumerate(stack.segments) for stage in segment.stages),
        *((None, stage) for stage in stack.last),
    ]
    blocks: list[Block] = []
    stages: list[tuple[int | None, Stage]] = []
    condition: Condition | None = None
    for number, stage in numbered:
        stages.append((number, stage))
        after = stage.condition
        if after is not None:
            blocks.append(Block(condition, tuple(stages)))
            condition, stages = after, []
    return (*blocks, Block(condition, tuple(stages)))


#: The remedy in errors about gradients of several meshes.
ONE_FOR_EACH_MESH = "Make one wrapper for the variables of each mesh, with a name= of its own"


def check_meshes(
    stack: Stack, grads: Sequence[mtf.Tensor | None], variables: Sequence[mtf.Variable]
) -> None:
    """Raises ValueError if gradients are on several meshes and a wrapper needs a single one.

    `grads` has the gradient, or None, of each of `variables`. `stack` has the wrappers.
    """
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
            f"meshes. {needs_one[1]}."
        )
