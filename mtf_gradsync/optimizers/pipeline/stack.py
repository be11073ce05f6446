"""A stack of wrappers as a value: what its step does to gradients, before anything is built.

Each wrapper gives its stages, frozen values that say what they take and give. `completed` makes one
value of those of a stack (`passes`), of which `StepBuilder` makes the operations in order, and
which `mtf_gradsync.describe` prints.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, Callable, Iterable, Iterator, Mapping, NamedTuple, Sequence

from mtf_gradsync._common import is_number
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.gradients.layout import find_axes
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.optimizers.pipeline.forms import Form, GradientSet, PerShard
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.reduce.strategy import has_gradient_reduction


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


class OwnArguments(NamedTuple):
    """Arguments of `apply_grads` after gradients and variables, for the innermost optimizer."""

    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = {}  # noqa: RUF012  # never changed

    def check(self, opt: Any) -> None:
        """Raises TypeError if the signature of an optimizer's `apply_grads` does not take these."""
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

    def tensors(self) -> Iterator[tuple[str, mtf.Tensor]]:
        """Gives the mesh tensors in arguments, and in lists and dictionaries, with names."""
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


class Stage:
    """What a wrapper does to gradients on their way to an update; the base passes them on.

    A stage is a frozen dataclass. Nothing of it changes while a step is built: `apply` makes the
    operations of the step, and tells the builder what is to be made after the update or at the end.

    Attributes:
      takes: the form of gradients for `apply`: `Form.REDUCED`, `Form.PART` for the parts of
        `_parts`, or `PerShard` for one gradient of each shard. None takes any form.
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


class Reduction(NamedTuple):
    """How a wrapper reduces gradients.

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
    """Returns the names of a stack's shard dims, from how each of its wrappers reduces gradients.

    They are all names that wrappers know, by their replica axes or as batch_dims, in any order of
    the wrappers. The default batch_dims count only if no wrapper knows any.
    """
    names = [(r.batch_dims if r.axes is None else r.axes.batch_dims, r.axes) for r in reductions]
    known = [some for some, axes in names if axes is not None or some != _DEFAULT_BATCH_DIMS]
    return tuple(dict.fromkeys(name for some in known or [_DEFAULT_BATCH_DIMS] for name in some))


class Partition(NamedTuple):
    """How updates or sums are sharded: which part of a variable each replica has.

    `shapes_of` gives the shapes of the parts of variables that get gradients in one step, without
    those that are not split. The name is the wrapper's.
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
    """Reduces gradients over the mesh, and divides them; to parts if there is a partition.

    `given` is the form of the gradients; sums of reduced gradients are reduced.
    """

    reduction: Reduction
    partition: Partition | None = None
    divides: str = ""
    given: Form = Form.PENDING

    @property
    def form(self) -> Form:
        """The form of the gradients then."""
        return Form.REDUCED if self.partition is None else Form.PART

    def apply(self, gradients: GradientSet, step: Any) -> GradientSet:
        """See `Stage.apply`."""
        return step.reduced(gradients, self.reduction, self.partition)

    def describe(self, about: About) -> list[Line]:
        """See `Stage.describe`."""
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
        what = f"{how} over {_over(about.axes)}: {strategy_told(used.strategy)}"
        found = about.num_bytes(None if self.partition else self.reduction.strategy)
        if found is None:
            return what
        groups = f"{found[1]} group{'s' * (found[1] != 1)}"
        return f"{what}, {bytes_told(found[0])} in {groups}"


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
