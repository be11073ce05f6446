"""A stack of wrappers as a value: the work of its step on gradients, before anything is built.

Each wrapper gives its stages, frozen values that say what they take and give. `completed` makes one
value of them, of which `StepBuilder` makes the operations in order, and which
`mtf_gradsync.describe` prints:

1. From the outside in, each wrapper gives its stages for its place: its replica axes there, the
islands around it, the stages around it. 2. Stages that depend on the stages inside (a loss scale's)
are told these. 3. Where a stage takes another form of gradients than it gets, a converting stage is
put before it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Sequence

from mtf_gradsync._common import some_of
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.gradients.arguments import OwnArguments
from mtf_gradsync.gradients.layout import find_axes
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.optimizers.pipeline.forms import Form, GradientSet, PerShard
from mtf_gradsync.optimizers.pipeline.words import About, Line, bytes_told, over, strategy_told
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.reduce.strategy import has_gradient_reduction


class Stage:
    """A wrapper's work on gradients on their way to an update; the base class passes them on.

    A stage is a frozen dataclass. Nothing of it changes while a step is built: `apply` makes the
    operations of the step, and tells the builder what is to be made after the update or at the end.

    Attributes:
      takes: the form of gradients for `apply`: `Form.REDUCED`, `Form.PART` for the parts of
        `_parts`, or `PerShard` for one gradient of each shard. None takes any form.
      gives: `Form.REDUCED` if the stages inside get reduced gradients; None for the form that
        `apply` returns.
      due: the steps on which the stages inside run, in words ("every 4th"); "" if other stages
        decide that. Only one stage of a stack can.
      finite: "skips" if the stage keeps gradients that are not finite from the stages inside,
        "needs" if it needs to see such gradients.
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
    # gradients, in accumulators laid out like variables, or like the parts of `_parts`; the dtype
    # of what it passes on, "wide" for float32 at least; what these are divided by, in words.
    _leaves: Form | None = None
    axes: ReplicaAxes | None = None
    _partition: Partition | None = None
    _wants_reduced: bool = False
    _parts: Partition | None = None
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

    def within(self, inside: Sequence[Stage], others: Sequence[Stage]) -> Stage:
        """Returns the stage for a stack that has certain stages inside.

        `others` are the stages of that optimizer and inside it, if it is of another library.
        """
        del inside, others
        return self

    def check(
        self,
        grads: Sequence[mtf.Tensor | None],
        variables: Sequence[mtf.Variable],
        arguments: OwnArguments,
    ) -> None:
        """Raises ValueError for gradients that the stage cannot handle, before anything is built.

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
        """Returns the stage's work in words, for `mtf_gradsync.describe`."""
        del about
        return []


class Reduction(NamedTuple):
    """The settings of a wrapper's reduction of gradients.

    Attributes:
      strategy: the reduction strategy.
      batch_dims: names of the dimensions that the batch is split along.
      axes: the replica axes; None if the wrapper does not know them.
      name: the wrapper's name.
      other_axes: for per-shard gradients, the strategy for sums over mesh axes other than the
        replica axes; None for `strategy`.
    """

    strategy: Strategy
    batch_dims: tuple[str, ...]
    axes: ReplicaAxes | None = None
    name: str = ""
    other_axes: Strategy | None = None

    @property
    def reduces_gradients(self) -> bool:
        """Whether the strategy reduces gradients by `reduce_gradients`."""
        return has_gradient_reduction(self.strategy)


# What wrappers take for batch_dims where they are given nothing.
_DEFAULT_BATCH_DIMS = ("batch",)


def shard_names(reductions: Iterable[Reduction]) -> tuple[str, ...]:
    """Returns the names of a stack's shard dims, from its wrappers' reductions.

    These are all names that any wrapper knows, by its replica axes or as batch_dims. The default
    batch_dims count only if no wrapper knows any.
    """
    names = [(r.batch_dims if r.axes is None else r.axes.batch_dims, r.axes) for r in reductions]
    known = [some for some, axes in names if axes is not None or some != _DEFAULT_BATCH_DIMS]
    return tuple(dict.fromkeys(name for some in known or [_DEFAULT_BATCH_DIMS] for name in some))


class Partition(NamedTuple):
    """A sharding of updates or sums: the part of a variable that each replica has.

    `shapes_of` gives the shapes of the parts of variables that get gradients in one step, except
    variables that are not split. The name is the wrapper's.
    """

    axes: ReplicaAxes
    strategy: Strategy
    shapes_of: Callable[[Sequence[mtf.Variable]], Mapping[mtf.Variable, mtf.Shape]]
    name: str = ""


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
    """The facts of a program, for which a stack is completed.

    Attributes:
      find_axes: returns the replica axes for names of batch dims; None if they are not known.
      num_meshes: how many meshes the gradients are on.
    """

    find_axes: Callable[[Sequence[str]], ReplicaAxes | None]
    num_meshes: int = 1

    @classmethod
    def of(cls, grads: Sequence[mtf.Tensor]) -> Program:
        """Returns the facts of the program that made gradients."""
        return cls(lambda names: find_axes(grads, names), len({g.mesh for g in grads}))


class Segment(NamedTuple):
    """The stages of one wrapper, in the order in which gradients pass through them.

    Attributes:
      wrapper: the wrapper's class name.
      stages: its stages; in a completed stack also the stages that convert gradients for them.
      reduction: how the wrapper reduces gradients.
      islands: the islands that it is inside of; None outside of any.
    """

    wrapper: str
    stages: tuple[Stage, ...]
    reduction: Reduction
    islands: IslandAxes | None = None


class Place(NamedTuple):
    """The place of a wrapper in a stack.

    Attributes:
      axes: its replica axes; inside islands, an island's. None if they are not known.
      names: the names of its shard dims.
      islands: the islands that it is inside of; None outside of any.
      around: the wrappers around it, from the outside in.
      program: the facts of the program; None while no gradients are applied.
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
      first: stages of no wrapper, before those of all wrappers.
      last: stages of no wrapper, between those of all wrappers and the update.
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


class _SkipsNotFinite(Stage):
    """A user's optimizer that says `skips_not_finite` (docs/training.md)."""

    finite = "skips"
    takes_parts = True


def stages_of(opt: Any) -> tuple[Stage, ...]:
    """Returns the stages of a wrapper alone; () for other optimizers."""
    if hasattr(opt, "_place"):
        return tuple(opt.stages(opt._place(None, (), None)))
    return (_SkipsNotFinite(),) if getattr(opt, "skips_not_finite", False) else ()


@dataclasses.dataclass(frozen=True)
class Reduce(Stage):
    """The stage that reduces gradients and divides them; to parts if there is a partition.

    `given` is the form of the gradients; sums of reduced gradients are reduced.
    """

    reduction: Reduction
    partition: Partition | None = None
    divides: str = ""
    given: Form = Form.PENDING

    @property
    def form(self) -> Form:
        """The form of the reduced gradients."""
        return Form.REDUCED if self.partition is None else Form.PART

    def apply(self, gradients: GradientSet, step: Any) -> GradientSet:
        return step.reduced(gradients, self.reduction, self.partition)

    def describe(self, about: About) -> list[Line]:
        what: tuple[str, ...] = (self.divides,)
        if self.given is Form.PART and self.partition is None:
            what = self.divides, "gather the sums"
        elif self.given is Form.REDUCED and self.partition is not None:
            what = "take each replica's part of the sums", self.divides
        elif not self.given.is_reduced:
            what = self._reduces(about), self.divides
        return [Line("; ".join(filter(None, what)))] if any(what) else []

    def _reduces(self, about: About) -> str:
        used = self.reduction if self.partition is None else self.partition
        how = "reduce" if self.partition is None else "reduce, each replica its part,"
        what = f"{how} over {over(about.axes)}: {strategy_told(used.strategy)}"
        found = about.num_bytes(None if self.partition else self.reduction.strategy)
        if found is None:
            return what
        groups = f"{found[1]} group{'s' * (found[1] != 1)}"
        return f"{what}, {bytes_told(found[0])} in {groups}"


@dataclasses.dataclass(frozen=True)
class SplitByShard(Stage):
    """The stage that makes one gradient per shard, without communication over replica axes."""

    reduction: Reduction
    request: PerShard

    def apply(self, gradients: GradientSet, step: Any) -> GradientSet:
        return step.split_by_shard(gradients, self.reduction, self.request)


# The passes that complete a stack. They change nothing and build nothing.


def completed(
    wrappers: Sequence[Any],
    inside: Sequence[Any],
    program: Program | None,
    islands: IslandAxes | None = None,
) -> Stack:
    """Returns the completed stack of wrappers, given from the outside in.

    Args:
      wrappers: the wrappers up to the first optimizer of another library.
      inside: the optimizers inside the last wrapper, from the outside in.
      program: the facts of the program; None if none are known.
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
    """Inserts a converting stage where a stage takes another form than it gets.

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


#: What to do about gradients of several meshes.
ONE_FOR_EACH_MESH = "Make one for the variables of each mesh, each with a name= of its own"


def check_meshes(
    stack: Stack, grads: Sequence[mtf.Tensor | None], variables: Sequence[mtf.Variable]
) -> None:
    """Raises ValueError if gradients are on several meshes and a wrapper needs one."""
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
