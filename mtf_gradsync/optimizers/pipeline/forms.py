"""Sets of gradients on their way to an update, their forms, and the settings of conversions."""

from __future__ import annotations

import dataclasses
import enum
import re
from typing import Any, Callable, Iterable, Literal, Mapping, NamedTuple, Sequence

from mtf_gradsync._common import counted, grouped, warn_once
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients.operations import map_present, on_mesh
from mtf_gradsync.gradients.reduce_gradients import GatherParts, GradientFromSums
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.optimizers.slots import optimizer_of
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.reduce.strategy import has_gradient_reduction
from mtf_gradsync.step.conditional import Branch
from mtf_gradsync.step.plan import StepPlan
from mtf_gradsync.step.writes import Gate


class Form(enum.Enum):
    """The form of a set of gradients on its way from the loss to the variables."""

    #: Not reduced: of the variable's shape with its all-reduce still to run, or with shard dims.
    PENDING = "pending"
    #: One gradient for each shard: ``[shard dims...] + variable dims``.
    PER_SHARD = "per shard"
    #: Reduced over the mesh: of the variable's shape, the same on all replicas.
    REDUCED = "reduced"
    #: Each replica has its part of the reduced gradient.
    PART = "part"

    @property
    def is_reduced(self) -> bool:
        """Whether gradients of this form are summed over the replicas."""
        return self in (Form.REDUCED, Form.PART)


class ReductionSettings(NamedTuple):
    """The settings of a wrapper's reduction of gradients.

    Attributes:
      strategy: the reduction strategy.
      batch_dims: names of the dimensions that the batch is split along.
      axes: the replica axes; None if the wrapper does not know them.
      name: the wrapper's name.
      other_axes: the strategy for sums of per-shard gradients over mesh axes other than the replica
        axes; None for `strategy`.
    """

    strategy: Strategy
    batch_dims: tuple[str, ...]
    axes: ReplicaAxes | None = None
    name: str = ""
    other_axes: Strategy | None = None

    @property
    def reduces_gradients(self) -> bool:
        """Whether the strategy reduces gradients itself, by a method `reduce_gradients`."""
        return has_gradient_reduction(self.strategy)


# The default of batch_dims.
_DEFAULT_BATCH_DIMS = ("batch",)


def shard_names(reductions: Iterable[ReductionSettings]) -> tuple[str, ...]:
    """Returns the names of a stack's shard dims, from the reductions of its wrappers.

    The names are the batch_dims of all wrappers that were given replica axes, or other batch_dims
    than the default. If no wrapper was given axes or other batch_dims, the names are the default
    batch_dims.
    """
    names = [(r.batch_dims if r.axes is None else r.axes.batch_dims, r.axes) for r in reductions]
    known = [some for some, axes in names if axes is not None or some != _DEFAULT_BATCH_DIMS]
    return tuple(dict.fromkeys(name for some in known or [_DEFAULT_BATCH_DIMS] for name in some))


class Partition(NamedTuple):
    """The way in which updates or sums are split, so that each replica has its part.

    Attributes:
      axes: the replica axes.
      strategy: the strategy that reduces gradients to parts.
      shapes_of: a function that takes all variables that get gradients in one step. It returns, for
        each variable that is split, the shape of a replica's part.
      name: the wrapper's name.
    """

    axes: ReplicaAxes
    strategy: Strategy
    shapes_of: Callable[[Sequence[mtf.Variable]], Mapping[mtf.Variable, mtf.Shape]]
    name: str = ""


class IslandAxes(NamedTuple):
    """The mesh axes of an `OuterOptimizer`: between its islands, and inside an island.

    Attributes:
      islands: the axes between islands.
      inside: the replica axes inside an island; None for a single island without a known mesh.
      axes: all replica axes; None for a single island without a known mesh.
      agree: a function `agree(holds, by_any)`. Each island has its own boolean scalar `holds`. The
        result is one boolean scalar for all islands. If `by_any` is true, the result says whether
        `holds` is true on at least one island. If `by_any` is false, the result says whether
        `holds` is true on all islands.
    """

    islands: ReplicaAxes
    inside: ReplicaAxes | None
    axes: ReplicaAxes | None
    agree: Callable[[mtf.Tensor, bool], mtf.Tensor]


@dataclasses.dataclass(frozen=True)
class PerShard:
    """A stage's request for one gradient per shard, given as `Stage.takes`.

    Attributes:
      mixed: what to do about gradients in which shards are mixed, because the program has summed
        over shards. "share" gives each shard an equal share of such a gradient. "reduce" reduces
        these gradients, and `GradientSet.already_reduced` has their positions. "refuse" raises an
        error.
      or_else: text for an error. If a wrapper around the stage's wrapper reduces gradients, the
        error proposes to exchange the two wrappers, or else what this text says. None if the stage
        also takes reduced gradients, of which each shard then has an equal share.
      warning: the warning about mixed gradients that are reduced, with fields for the wrapper's
        name, the variables and the operations that mix shards; "" for no warning.
      adds_up: whether the stage only adds up the gradients of all shards. Then a shard may hold any
        term of the sum, and not just its own gradient: an expert's gradient for the examples of all
        shards, for example.
      recomputes: whether the stage computes gradients in `GradientSet.from_sums` again, without the
        shards that it skips. Then the stage gets the gradients in `from_sums` reduced, with their
        positions in `already_reduced`, whatever `mixed` is. It gets gradients that depend on no
        shard's data, but are split over a replica axis, in the same way.
    """

    mixed: Literal["share", "reduce", "refuse"] = "share"
    or_else: str | None = None
    warning: str = ""
    adds_up: bool = False
    recomputes: bool = False


class Weights(NamedTuple):
    """The weights of a set of gradients.

    Attributes:
      total: float32 scalar, the weight of all shards together; inside an island of
        `OuterOptimizer`, of all shards of the island. Differences of islands in an outer step have
        the weight of each island, `[islands...]`.
      of_shards: float32 `[shard dims...]`, the weight of each shard; None for equal weights.
    """

    total: mtf.Tensor
    of_shards: mtf.Tensor | None = None

    def by_shard(self, axes: ReplicaAxes) -> mtf.Tensor:
        """Returns the weight of each shard, float32 `[shard dims...]`, for these replica axes."""
        if self.of_shards is not None:
            return self.of_shards
        return mtf.broadcast(self.total * (1.0 / axes.num_shards), mtf.Shape(list(axes.shard_dims)))


class Mask(NamedTuple):
    """The part of a step's gradients that a stage adds up: it may skip shards, or the whole step.

    Attributes:
      number: the number of contributions that are added up, a scalar: the number of shards or
        islands that are not skipped, or 1 or 0 for the step as a whole. Outer steps with weights
        give the sum of the islands' weights here.
      weight: the weight of these contributions, a float32 scalar; None without weights.
      skipped: the gradients that are skipped, which may hold NaNs: a boolean scalar for all
        gradients of the step, or `[shard dims...]`; None if no gradient is skipped.
      asked: boolean `[shard dims...]`: the shards that are not skipped if their gradients are
        finite; None if the mask does not say which shards these are.
    """

    number: mtf.Tensor
    weight: mtf.Tensor | None = None
    skipped: mtf.Tensor | None = None
    asked: mtf.Tensor | None = None

    @classmethod
    def of_step(cls, mesh: mtf.Mesh, skip: mtf.Tensor | None, weights: Weights | None) -> Mask:
        """Returns the mask of a step that is skipped as a whole or not at all.

        `mesh` is the mesh of the gradients. `skip` is a boolean mtf scalar, true if the step is
        skipped; None if it never is. `weights` are the weights of the gradients; None without any.
        """
        number = mtf.constant(mesh, 1, mtf.Shape([]), tf.int32)
        if skip is not None:
            number -= mtf.cast(skip, tf.int32)
        weight = None if weights is None else weights.total * mtf.cast(number, tf.float32)
        return cls(number, weight, skip)


class OnlyWhen(NamedTuple):
    """The settings, from a stage with a condition, of the branch in which later stages run.

    Attributes:
      holds: a boolean scalar, the same on all processors: whether a step runs the branch.
      gate: the gate (which holds back writes) that the branch waits for; None inside another
        branch.
      wait_for: operations of the step that the branch waits for, besides the gate.
      first: a function that makes the set of gradients for the branch, inside the branch, from the
        set that the stage returned; None if the branch gets that set.
      last: a function that makes the last operations of the branch. They run even if the condition
        of a branch inside this one does not hold.
    """

    holds: mtf.Tensor
    gate: Gate | None
    wait_for: Sequence[mtf.Operation] = ()
    first: Callable[[GradientSet], GradientSet] | None = None
    last: Callable[[], Sequence[mtf.Operation]] = list


@dataclasses.dataclass(frozen=True)
class GradientSet:
    """The gradients of one call of `apply_grads`, at one stage of the pipeline.

    Attributes:
      grads: the gradient of each variable, or None; at least one is not None.
      variables: the mesh variables. For `StepBuilder.reduce_now` with `extra`, there may be a
        `VariablePiece` in place of a variable: a range of the numbers in each core's slice.
      form: the form of all gradients.
      divisor: a scalar by which the gradients are divided after they are reduced; None for 1.
      dtypes: for each gradient, the dtype to which it is cast after it is reduced, or None if it is
        not cast. None in place of the tuple if no gradient is cast.
      already_reduced: the positions of gradients that are reduced although the form is `PER_SHARD`,
        because shards are mixed in them. Sums of such gradients over several steps count as
        reduced, too.
      from_sums: by position, for some of the gradients in `already_reduced`: the sums over shards
        from which the gradient was computed. A stage that skips shards can compute the gradient
        again from the sums without these shards.
      weights: the weights of the gradients, which are those of a weighted mean; None if no weights
        were given.
      mask: what the stage adds up of the gradients; None for stages that do not add up.
      unreduced: if gradients are reduced, the set before the reduction, from which each shard's
        part can be read; None if that set is not known.
      condition: the condition under which later stages run, from the stage that returned the set;
        None if they run in the same steps as that stage.
      branch: the branch of the step in which the gradients exist; None if they exist in every step.
    """

    grads: tuple[mtf.Tensor | None, ...]
    variables: tuple[mtf.Variable, ...]
    form: Form = Form.PENDING
    divisor: mtf.Tensor | None = None
    dtypes: tuple[tf.DType | None, ...] | None = None
    already_reduced: frozenset[int] = frozenset()
    from_sums: Mapping[int, GradientFromSums] = dataclasses.field(default_factory=dict)
    weights: Weights | None = None
    mask: Mask | None = None
    unreduced: GradientSet | None = None
    condition: OnlyWhen | None = None
    branch: Branch | None = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "branch", StepPlan.of(self.graph).open_branch)

    @property
    def graph(self) -> mtf.Graph:
        """The mtf graph of the variables."""
        return self.variables[0].graph

    @property
    def mesh(self) -> mtf.Mesh:
        """The mesh of the first gradient; the scalars of a step are on it."""
        return self.present[0].mesh

    @property
    def present(self) -> list[mtf.Tensor]:
        """The gradients that are not None."""
        return [g for g in self.grads if g is not None]

    @property
    def owners(self) -> list[mtf.Variable]:
        """The variables of the gradients in `present`, in the same order."""
        return [v for g, v in zip(self.grads, self.variables) if g is not None]

    def with_grads(
        self, grads: Sequence[mtf.Tensor | None], form: Form | None = None, **others: Any
    ) -> GradientSet:
        """Returns a copy of the set with other gradients.

        Args:
          grads: a gradient or None for each of `variables`, in the same order.
          form: the form of these gradients; None keeps the form of the set.
          **others: new values of other fields.
        """
        form = form or self.form
        return dataclasses.replace(self, grads=tuple(grads), form=form, **others)

    def with_present(
        self, present: Sequence[mtf.Tensor], form: Form | None = None, **others: Any
    ) -> GradientSet:
        """Returns a copy of the set in which `present` replaces the gradients that are not None.

        `present` has one gradient for each gradient of the set that is not None, in the same order.
        `form` is the form of these gradients; None keeps the form of the set. `others` are new
        values of other fields.
        """
        return self.with_grads(map_present(self.grads, lambda _: present), form, **others)

    def only_when(self, holds: mtf.Tensor, gate: Gate | None, **others: Any) -> GradientSet:
        """Returns a copy of the set with a condition: later stages run only in some steps.

        A stage that has a `condition` returns this copy. `holds` is a boolean scalar, true in the
        steps in which later stages run. `gate` is the gate that holds back the writes of the stage;
        the branch waits for it, too. `others` are more fields of `OnlyWhen`.
        """
        return dataclasses.replace(self, condition=OnlyWhen(holds, gate, **others))

    def change_reduced(self, change: Callable[[mtf.Tensor], mtf.Tensor]) -> GradientSet:
        """Returns a copy of the set, in which gradients in `already_reduced` are changed.

        `change` is a function that takes one of these gradients and returns the new tensor.
        """
        grads = enumerate(self.grads)
        return self.with_grads(
            [change(g) if g is not None and i in self.already_reduced else g for i, g in grads]
        )


def divide_and_cast(gradients: GradientSet, opt: Any) -> GradientSet:
    """Divides reduced gradients by the divisor of their set, and casts them to the set's dtypes.

    `opt` is the optimizer that gets the returned gradients. Gradients are not cast to a dtype
    narrower than float32, unless `opt` is Mesh-TF's MomentumOptimizer. The returned set has no
    divisor and no dtypes.
    """
    dtypes, divisor = gradients.dtypes, gradients.divisor
    if dtypes is None and divisor is None:
        return gradients
    divisors = {}
    if divisor is not None:
        divisors = {
            m: on_mesh(divisor, m) for m in dict.fromkeys(g.mesh for g in gradients.present)
        }

    def finish(total: mtf.Tensor, dtype: tf.DType | None, optimizer: Any) -> mtf.Tensor:
        if divisors:
            wide = total if total.dtype.size >= 4 else mtf.cast(total, tf.float32)
            total = mtf.divide(wide, mtf.cast(divisors[total.mesh], wide.dtype))
        dtype = total.dtype if dtype is None else _inner_dtype(dtype, optimizer)
        return total if total.dtype == dtype else mtf.cast(total, dtype)

    results = [
        None if g is None else finish(g, dtypes[i] if dtypes else None, optimizer_of(opt, v))
        for i, (g, v) in enumerate(zip(gradients.grads, gradients.variables))
    ]
    return gradients.with_grads(results, divisor=None, dtypes=None)


def gather_parts(gradients: GradientSet) -> GradientSet:
    """Returns full gradients on each replica (`Form.REDUCED`), gathered from replicas' parts.

    `gradients` are of `Form.PART`. Gradients of variables that are not split are full already.
    """
    pairs = list(zip(gradients.present, gradients.owners))
    parts = [g for g, v in pairs if g.shape != v.shape]
    if not parts:
        return gradients.with_grads(gradients.grads, Form.REDUCED)
    whole = iter(GatherParts(parts, [v.shape for g, v in pairs if g.shape != v.shape]).outputs)
    return gradients.with_present(
        [g if g.shape == v.shape else next(whole) for g, v in pairs], Form.REDUCED
    )


def without_frozen(
    opt: Any, grads: list[mtf.Tensor | None], variables: Sequence[mtf.Variable]
) -> list[mtf.Tensor | None]:
    """Returns `grads` with None for variables that the optimizer `opt` does not update.

    `ByVariable` can leave variables as they are. The gradients of these variables are neither
    reduced nor accumulated, nor counted in norms.
    """
    return [None if optimizer_of(opt, v) is None else g for g, v in zip(grads, variables)]


def _inner_dtype(dtype: tf.DType, opt: Any) -> tf.DType:
    """Returns the dtype in which the inner optimizer `opt` gets a gradient of `dtype`.

    The result is `dtype`, but at least float32. For Mesh-TF's MomentumOptimizer it is always
    `dtype` itself.
    """
    # Mesh-TF 0.1.21's Momentum adds gradients to a velocity of the variable's dtype; the others
    # cast to float32 themselves.
    if dtype.size >= 4 or isinstance(opt, mtf.optimize.MomentumOptimizer):
        return dtype
    return tf.float32


def check_updates(opt: Any, variables: Sequence[mtf.Variable]) -> None:
    """Raises ValueError if the inner optimizer `opt` cannot update one of `variables`.

    Mesh-TF's AdamWeightDecayOptimizer cannot decay variables whose values are narrower than
    float32. Optimizers of this package have a method `check_variable`.
    """
    for one, some in grouped(variables, [optimizer_of(opt, v) for v in variables]).items():
        if isinstance(one, mtf.optimize.AdamWeightDecayOptimizer) and one.weight_decay_rate:
            _check_decay(one, some)
        for variable in some if hasattr(one, "check_variable") else ():
            one.check_variable(variable)


def cast_for(opt: Any, gradients: GradientSet) -> GradientSet:
    """Casts gradients to the dtypes that the inner optimizer needs.

    `opt` is the inner optimizer. If it is Mesh-TF's MomentumOptimizer, each gradient is cast to the
    dtype of its variable's value. Other optimizers get the gradients as they are.
    """
    of = [optimizer_of(opt, v) for v in gradients.variables]
    pairs = list(zip(gradients.grads, gradients.variables))
    other = [
        g is not None
        and g.dtype != v.activation_dtype
        and isinstance(one, mtf.optimize.MomentumOptimizer)
        for (g, v), one in zip(pairs, of)
    ]
    if not any(other):
        return gradients
    warn_once(
        "narrow momentum",
        "mtf.optimize.MomentumOptimizer adds up gradients in the dtype of activations, %s: small "
        "ones are lost. Use MeshOptimizer(tf.train.MomentumOptimizer(...)), which adds up in "
        "float32.",
        gradients.variables[other.index(True)].activation_dtype.name,
    )
    return gradients.with_grads(
        [mtf.cast(g, v.activation_dtype) if casts else g for (g, v), casts in zip(pairs, other)]
    )


def _check_decay(opt: mtf.optimize.AdamWeightDecayOptimizer, variables: Iterable[Any]) -> None:
    # Mesh-TF 0.1.21 adds the decay in the dtype of activations to an update in float32.
    excluded = opt.exclude_from_weight_decay or ()
    narrow = [
        v
        for v in variables
        if v.activation_dtype.size < 4 and not any(re.search(r, v.name) for r in excluded)
    ]
    if narrow:
        raise ValueError(
            "mtf.optimize.AdamWeightDecayOptimizer cannot decay variables whose activations are "
            f"{narrow[0].activation_dtype.name}: {counted([v.name for v in narrow], 'variable')}. "
            "Use gs.AdamWOptimizer, which decays in float32 and has bias correction, or exclude "
            "them by exclude_from_weight_decay."
        )


class Reduced(NamedTuple):
    """A record of the first reduction of gradients in a step.

    Attributes:
      parts: the gradients before the reduction, pending or per shard.
      sums: the gradients after the reduction, in full or as replicas' parts.
      branch: the branch of the step in which they are reduced; None if every step reduces them.
      strategy: the reduction strategy.
    """

    parts: list[mtf.Tensor]
    sums: list[mtf.Tensor]
    branch: Branch | None
    strategy: Strategy
