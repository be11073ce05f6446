"""GradientAccumulationOptimizer: an update of the gradients of several microbatch steps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from typing import Any, Literal, Mapping, NamedTuple, Sequence, Union

import gin
import numpy as np

from mtf_gradsync import compat_v1
from mtf_gradsync._common import check_flag, log_once, warn_once
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import meshes_made
from mtf_gradsync._private.tensorflow import optimizers_inside
from mtf_gradsync.compat_v1 import NOT_GIVEN, OptimizerLike, given_optimizer, is_v1
from mtf_gradsync.compat_v1.opt_argument import refuse_with_v1
from mtf_gradsync.gradients.arguments import PassedOnArguments, is_scalar
from mtf_gradsync.gradients.operations import on_mesh
from mtf_gradsync.mesh.axes import LayoutLike, MeshShapeLike, ReplicaAxes
from mtf_gradsync.optimizers.pipeline.accumulators import Accumulators, without_skipped
from mtf_gradsync.optimizers.pipeline.builder import StepBuilder
from mtf_gradsync.optimizers.pipeline.forms import Form, GradientSet, Mask, Partition, PerShard
from mtf_gradsync.optimizers.pipeline.order import needs_not_finite, reduces
from mtf_gradsync.optimizers.pipeline.stack import Condition, Place, Stage
from mtf_gradsync.optimizers.pipeline.words import About, Line
from mtf_gradsync.optimizers.schedules import (
    Passes,
    check_passes,
    check_schedule,
    hint_if_micro_steps_are_counted,
    passes_at,
)
from mtf_gradsync.optimizers.sharded_variables import (
    nothing_to_split,
    replicas_share_copies,
    shapes_of_parts,
)
from mtf_gradsync.optimizers.skip_functions import SkipFn, State, call_skip_fn, check_skip_fn
from mtf_gradsync.optimizers.skips import (
    ReportsSkips,
    Skips,
    check_limit,
    names_of_rows,
    not_finite_flags,
    waiting_after_step,
    waiting_state,
)
from mtf_gradsync.optimizers.state import ACCUMULATOR, SUMS_NOT_KEPT, named_state, update_counter
from mtf_gradsync.optimizers.wrapper import CommonArguments, StepAttribute
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.reduce.compressed import WireDtype
from mtf_gradsync.step.conditional import values_after

#: Where gradients of microbatch steps add up: on each shard, reduced over the mesh, or reduced in
#: parts, of which each replica has one.
Accumulate = Literal["local", "synced", "sharded"]
LOCAL: Accumulate = "local"
SYNCED: Accumulate = "synced"
SHARDED: Accumulate = "sharded"


_HOW = {
    LOCAL: ": each shard adds up its own gradients, which are reduced once an update",
    SYNCED: ": gradients are reduced on every microbatch step",
    SHARDED: ": gradients are reduced on every microbatch step, and each replica adds up its part",
}
_WHAT = {
    LOCAL: "add up gradients on each shard",
    SYNCED: "add up the sums",
    SHARDED: "add up each replica's part of the sums",
}
_SYNCED_INSTEAD = (
    "Accumulate reduced gradients, by accumulate='synced', for one update of all variables"
)


class _Counters(NamedTuple):
    """The counters of an accumulation: integer mtf variables, or their values after a step."""

    mini_step: Any
    update_step: Any
    skipped: Any
    waiting: Any  # None without a limit
    weight: Any  # float32; None without weights


@gin.configurable(module="mtf_gradsync")
class GradientAccumulationOptimizer(ReportsSkips):
    """A wrapper that adds up several microbatch steps' gradients, and applies them once.

    On microbatch steps without an update the inner optimizer does not run, and variables and slots
    do not change. If gradients accumulate locally, such a step reduces no gradients.

    Gradients accumulate in one of three ways. "local": each shard adds up its own gradients, and
    the sums are reduced once for each update; the mesh must be known when the graph is built.
    "synced": gradients are reduced on each microbatch step, and then added up. "sharded": gradients
    are reduced on each microbatch step, and each replica receives and adds up only its part of the
    reduced gradients, in 1/num_shards of the memory (ZeRO-2). With `ShardedUpdateOptimizer` inside,
    the update uses these parts; without that wrapper, the sums are gathered for the update. The log
    says once in which of these ways gradients accumulate.

    The state is in the variables `<variable>/gradient_accumulator`, one for each variable, and in
    the counters `<name>/mini_step` (microbatch steps in the sums), `<name>/update_step` (updates)
    and `<name>/skipped` (skipped microbatch steps). With max_steps_without_update there is
    `<name>/waiting`, the number of microbatch steps since the last update. If gradients have
    weights, there is `<name>/weight`, the sum of the weights in the accumulators.

    Attributes:
      accumulate: how gradients accumulate, "local", "synced" or "sharded"; None if the choice is
        made when gradients are applied.
      backward_passes_per_step: microbatch steps for each update, as given.

    References:
      horovod.tensorflow.DistributedOptimizer(backward_passes_per_step=...), optax.MultiSteps;
      Rajbhandari et al., "ZeRO", 2019 (stage 2)

    Examples:
      >>> mesh = {"mesh_shape": "all:4", "layout": "batch:all"}
      >>> opt = gs.GradientAccumulationOptimizer(mtf.optimize.SgdOptimizer(0.1), 8, **mesh)
      >>> print(gs.describe(opt))
      every step  add up gradients on each shard      (GradientAccumulationOptimizer)
      every 8th   reduce over batch, 4 shards: fused  (GradientAccumulationOptimizer)
                  update by Sgd
    """

    shown = (
        ("microbatch step", "accumulation/micro_step"),
        ("update step", "update_step"),
        ("skipped", "accumulation/skipped"),
    )
    backward_passes_per_step: Passes
    _chosen_way = StepAttribute[Union[Accumulate, None]](None)
    _found_axes = StepAttribute[Union[ReplicaAxes, None]](None)

    def __init__(
        self,
        opt: OptimizerLike,
        backward_passes_per_step: Passes = gin.REQUIRED,
        average_aggregated_gradients: bool = False,
        should_skip_update_fn: SkipFn | None = None,
        accumulator_dtype: tf.DType | None = None,
        checkpoint_accumulators: bool = True,
        accumulate: Accumulate | None = None,
        sparse_as_dense: bool = False,
        allreduce_fn: compat_v1.AllReduceFn | None = None,
        name: str = "GradientAccumulationOptimizer",
        learning_rate: Any = NOT_GIVEN,
        axes: ReplicaAxes | None = None,
        mesh_shape: MeshShapeLike | None = None,
        layout: LayoutLike | None = None,
        batch_dims: str | Sequence[str] = ("batch",),
        reducer: Strategy | None = None,
        reduce_dtype: WireDtype | None = None,
        max_steps_without_update: int | None = None,
        flush: Any = None,
    ) -> None:
        """Wraps an optimizer.

        Args:
          opt: a Mesh-TF optimizer, or a class or factory of one. With an optimizer of
            `tf.compat.v1.train` the result is `compat_v1.GradientAccumulationOptimizer`, and
            arguments for the mesh or checkpoints have no effect. A subclass takes mesh optimizers
            only.
          backward_passes_per_step: microbatch steps for each update: a whole number of 1 or more,
            or a function from the number of updates so far (mtf int32 scalar) to such a number. An
            accumulation keeps one number until its update. If a function returns a tensor that is
            less than 1, the step fails.
          average_aggregated_gradients: whether to divide the sum by its number of microbatch steps.
          should_skip_update_fn: decides whether to skip a microbatch step: a function from the
            list of its gradients to a boolean mtf scalar, such as `skip_not_finite`,
            `skip_large_updates(norm)`, `skip_spikes()`, or your own. A skipped microbatch step adds
            nothing to the sum and does not count. None skips nothing: a NaN then stays in the sum
            until the update.
          accumulator_dtype: the dtype of accumulators; None takes the gradient's dtype, but at
            least float32. If gradients have weights, float32 is used instead of float16, whose
            range is too small.
          checkpoint_accumulators: whether checkpoints hold the sums. If not, a restart begins a
            new accumulation, and local sums need no master copy on the host.
          accumulate: how gradients accumulate: "local", "synced" or "sharded" (see
            `GradientAccumulationOptimizer`). None takes "local" if the mesh is known when gradients
            are applied: it is given, or it is the only mesh that the program has made for this
            graph by then. Otherwise, and if a wrapper around this one reduces on every step, None
            takes "synced".
          sparse_as_dense: whether to turn `tf.IndexedSlices` into dense gradients; only with an
            optimizer of `tf.compat.v1.train`. Gradients of mesh variables are always dense.
          allreduce_fn: only with an optimizer of `tf.compat.v1.train`; see
            `compat_v1.GradientAccumulationOptimizer`.
          name: name of the wrapper, prefix of its counters.
          learning_rate: the learning rate for opt; only if opt is a class or factory.
          axes: the replica axes (`ReplicaAxes`); or give mesh_shape and layout. Without either they
            are those of the mesh that the program has made for this graph.
          mesh_shape: Mesh-TF's mesh shape.
          layout: Mesh-TF's layout rules.
          batch_dims: names of the tensor dimensions that the batch is split along.
          reducer: the reduction strategy; None takes `FusedAllReduce()`.
          reduce_dtype: the dtype that gradients are sent in, by `CompressedAllReduce`: "bfloat16",
            "float16" or the tf dtype. Accumulators keep their dtype, and each processor's sum is
            rounded once. None sends the accumulators' dtype. Sharded updates use their own reducer.
            If a wrapper around this one reduces the gradients, its reducer sends them, in its own
            dtype; but sharded sums are always sent by this wrapper's reducer, in reduce_dtype.
          max_steps_without_update: the largest number of microbatch steps in a row without an
            update, because should_skip_update_fn skips them or their weights are 0. One more raises
            an error that names variables and shards (see `NoUpdateError`). None for no limit.
          flush: whether to update on this step even if the sums have fewer microbatch steps, as on
            the last step of a training: a boolean scalar (a tf or mtf tensor or variable), or a
            function without arguments that makes one when gradients are applied. If the step is
            skipped, the update has the microbatch steps before it. None never updates early.

        Raises:
          ValueError: an argument is out of range, or arguments contradict each other.
          TypeError: an argument has the wrong type, or opt is a Keras optimizer.
        """
        dtype = _floating(accumulator_dtype)
        opt = given_optimizer(opt, learning_rate, type(self).__name__)
        if type(self) is GradientAccumulationOptimizer and is_v1(opt):
            refuse_with_v1(
                opt,
                should_skip_update_fn=should_skip_update_fn,
                max_steps_without_update=max_steps_without_update,
                flush=flush,
            )
            self._turn_into_v1(
                compat_v1.GradientAccumulationOptimizer,
                opt,
                backward_passes_per_step,
                average_aggregated_gradients,
                sparse_as_dense,
                allreduce_fn,
                dtype,
                name,
            )
            hint_if_micro_steps_are_counted(optimizers_inside(opt)[-1], name)
            return
        if allreduce_fn is not None:
            raise ValueError(
                "allreduce_fn is only for optimizers of tf.compat.v1, but got allreduce_fn="
                f"{allreduce_fn!r} with {opt!r}. On a mesh, give reducer= a strategy."
            )
        backward_passes_per_step = check_passes(backward_passes_per_step)
        check_skip_fn(should_skip_update_fn)
        if accumulate not in (None, *_HOW):
            raise ValueError(
                f"accumulate must be {LOCAL!r}, {SYNCED!r}, {SHARDED!r} or None, got "
                f"{accumulate!r}."
            )
        self._accumulates = backward_passes_per_step != 1 or should_skip_update_fn is not None
        one_update = 1 if callable(backward_passes_per_step) else backward_passes_per_step
        why = f"an update takes backward_passes_per_step={backward_passes_per_step!r} steps"
        limit = check_limit(max_steps_without_update, one_update, why)
        _check_flush(flush)
        needs_mesh = accumulate in (LOCAL, SHARDED) and self._accumulates
        common = CommonArguments(name, axes, mesh_shape, layout, batch_dims, reducer)
        self._wrap(opt, common, "the shards" if needs_mesh else "", reduce_dtype)
        self._given_way = accumulate or (None if self.axes is None else LOCAL)
        self.backward_passes_per_step = backward_passes_per_step
        self._average = check_flag("average_aggregated_gradients", average_aggregated_gradients)
        self._skip_fn = should_skip_update_fn
        self._limit = limit
        self._flush = flush
        self._dtype = dtype
        self._checkpointed = check_flag("checkpoint_accumulators", checkpoint_accumulators)
        self._check_order()
        hint_if_micro_steps_are_counted(self.innermost(), name)

    @property
    def axes(self) -> ReplicaAxes | None:
        """The replica axes: as given, or as found when gradients were applied; or None."""
        return self._given_axes or vars(self).get("_found_axes")

    @property
    def accumulate(self) -> Accumulate | None:
        """How gradients accumulate; None until the choice is made, when gradients are applied."""
        return self._given_way or self._chosen_way

    def stages(self, place: Place) -> list[Stage]:
        if not self._accumulates:  # it does what the inner optimizer does, in any stack
            return []
        where, axes, why = self._given_way, place.axes, ""
        if where is None and place.program is not None:
            islands = place.islands
            found = islands.inside if islands else place.program.find_replica_axes(place.names)
            is_split = found is not None and found.num_shards > 1
            why = _why_synced(place, is_known=found is not None)
            where = LOCAL if is_split and not why else SYNCED
            axes = found if where == LOCAL else None
        parts: Partition | None = None
        if where == SHARDED:
            if axes is None or axes.num_shards == 1:
                where, why = SYNCED, ", because there is one replica: no sum can be sharded"
            else:
                shapes_of = functools.partial(self._shapes_of_parts, axes)
                parts = Partition(axes, self._gradient_reducer, shapes_of, self.name)
        return [_Accumulate(self, where or SYNCED, axes, why, parts)]

    def _shapes_of_parts(
        self, axes: ReplicaAxes, variables: Sequence[mtf.Variable]
    ) -> Mapping[mtf.Variable, mtf.Shape]:
        """Returns the shapes of replicas' parts of the sums of gradients that are split.

        The keys are the variables whose sum is split; a value is the shape of one replica's part.
        `axes` are the replica axes, over which sums are split. `variables` are the variables with
        gradients. If replicas share one memory, no sum is split and the result is {}.
        """
        if replicas_share_copies(axes):
            return {}
        sums = {v: self._slots.get(v, ACCUMULATOR) for v in variables}
        before = {v: x.shape for v, x in sums.items() if x is not None}
        found = shapes_of_parts(variables, axes, before=before)
        # The user asked for parts.
        return found or shapes_of_parts(variables, axes, min_size=0, before=before)

    @property
    def mini_step(self) -> mtf.Variable | None:
        """The number of microbatch steps in the sum so far; None if nothing accumulates (yet)."""
        return self.state and self.state.mini_step

    @property
    def update_step(self) -> mtf.Variable | None:
        """The number of updates made so far (int32); None before gradients were applied."""
        return self.state and self.state.update_step

    @property
    def update_step_now(self) -> mtf.Tensor | None:
        """The number of updates made, including the current step's: an int32 mtf scalar.

        The number is to be fetched together with the step. The attribute is None before gradients
        were applied, or if every step makes an update.
        """
        return self._now and self._now.update_step

    @property
    def in_sums_now(self) -> mtf.Tensor | None:
        """The number of microbatch steps in the sums after the current step: an int32 mtf scalar.

        The number is to be fetched together with the step, and is 0 if the step makes an update.
        The attribute is None before gradients were applied, or if every step makes an update.
        """
        return self._now and self._now.mini_step

    @property
    def skipped(self) -> mtf.Variable | None:
        """The number of microbatch steps skipped (int32); None before gradients were applied."""
        return self.state and self.state.skipped

    def reported(self) -> dict[str, mtf.Tensor]:
        now = self._now
        if now is None:
            return {}
        steps = {"update_step": now.update_step, "accumulation/micro_step": now.mini_step}
        if self._skip_fn is not None:
            steps["accumulation/skipped"] = now.skipped
        if now.waiting is not None:
            steps["accumulation/steps_without_update"] = now.waiting
        return steps

    def _note_step(self, step: StepBuilder) -> None:
        super()._note_step(step)
        if not self._accumulates:
            remedy = (
                f"{self.name} has backward_passes_per_step=1 and no accumulators; with "
                "backward_passes_per_step=lambda step: 1 its first step applies them."
            )
            tf.add_to_collection(SUMS_NOT_KEPT, (f"{self.name}/mini_step", remedy))

    def _dtype_of_weighted_sums(self) -> tf.DType | None:
        """Returns the dtype in which gradients times weights are added up.

        The dtype is accumulator_dtype, but float32 in place of float16, with a warning. If
        accumulator_dtype was not given, the result is None, which stands for each gradient's own
        dtype, but at least float32.
        """
        if self._dtype != tf.float16:
            return self._dtype
        warn_once(
            f"{self.name} float16 weights",
            "%s: gradients times weights (tokens) add up in float32, as they are soon beyond the "
            "65504 of accumulator_dtype=float16. For half the memory give tf.bfloat16.",
            self.name,
        )
        return tf.float32


_MIXED_WARNING = (
    "%s: the program itself needs the sums of the gradients of %s in every microbatch step (for "
    "%s), so gradients are reduced in each microbatch step, and then added up. To reduce them once "
    "an update, put what needs the sums inside the wrapper that accumulates, as "
    "ClipByGlobalNormOptimizer, which then clips the accumulated gradients."
)


@dataclasses.dataclass(frozen=True)
class _Accumulate(Stage):
    """The stage that adds up gradients, and passes on the sums when an update is due.

    Attributes:
      wrapper: the wrapper that the stage belongs to.
      where: how gradients accumulate: "local", "synced" or "sharded".
      axes: the replica axes; None if they are not known. "synced" does not need them.
      why: the end of a sentence for the log: why gradients do not accumulate in a way that costs
        less. "" if there is nothing to say.
    """

    wrapper: GradientAccumulationOptimizer
    where: Accumulate
    axes: ReplicaAxes | None
    why: str = ""
    _parts: Partition | None = None
    gives = Form.REDUCED
    _wants_reduced = True

    @property
    def _leaves(self) -> Form:  # type: ignore[override]
        return Form.PART if self._parts else Form.PENDING

    def within(self, inside: Sequence[Stage], others: Sequence[Any]) -> Stage:
        of_updates = next((s._partition for s in inside if s._partition is not None), None)
        if self._parts is None or of_updates is None:
            return self
        # The update goes on from the sums.
        settings = self._parts
        parts = of_updates._replace(strategy=settings.strategy, name=settings.name)
        return dataclasses.replace(self, _parts=parts)

    @property
    def takes(self) -> Form | PerShard:  # type: ignore[override]
        if self.where != LOCAL:
            return Form.PART if self._parts else Form.REDUCED
        or_else = "accumulate reduced gradients, by accumulate='synced'"
        return PerShard("reduce", or_else, _MIXED_WARNING, adds_up=True)

    @property
    def condition(self) -> Condition:  # type: ignore[override]
        passes = self.wrapper.backward_passes_per_step
        return Condition(passes, as_call=True, counts_every_step=True)

    @property
    def _sums_in(self) -> Any:
        return self.wrapper._dtype or "wide"

    @property
    def _divides(self) -> str:  # type: ignore[override]
        passes = self.wrapper.backward_passes_per_step
        by = "their number of microbatch steps" if callable(passes) else f"{passes:,}"
        return f"divide by {by}" if self.wrapper._average and passes != 1 else ""

    @property
    def finite(self) -> str:  # type: ignore[override]
        return "skips" if getattr(self.wrapper._skip_fn, "skips_not_finite", False) else ""

    @property
    def _one_mesh(self) -> str:  # type: ignore[override]
        return "" if self.where == SYNCED else _SYNCED_INSTEAD

    def check(
        self,
        grads: Sequence[mtf.Tensor | None],
        variables: Sequence[mtf.Variable],
        arguments: PassedOnArguments,
    ) -> None:
        """Logs how gradients accumulate; raises ValueError if that is not possible.

        Gradients cannot accumulate if the sums are to be sharded and no variable can be split, or
        if should_skip_update_fn looks at the loss and the gradients come from no loss. `grads` has
        the gradient, or None, of each of `variables`. `arguments` is not used.
        """
        given = [v for g, v in zip(grads, variables) if g is not None]
        if given:
            if callable(self.wrapper.backward_passes_per_step):
                check_schedule(self.wrapper.backward_passes_per_step, given[0].graph)
            check_skip = getattr(self.wrapper._skip_fn, "check", None)
            if check_skip is not None:
                check_skip([g for g in grads if g is not None])
            parts = self._parts
            if parts is not None and not (
                parts.shapes_of(given) or replicas_share_copies(parts.axes)
            ):
                raise ValueError(
                    f"accumulate={SHARDED!r} {nothing_to_split(given, parts.axes)}Give "
                    f"accumulate={SYNCED!r}, or a mesh whose sizes divide a dimension."
                )
            name, how = self.wrapper.name, _HOW[self.where]
            level = logging.WARNING if self.why else logging.INFO
            log_once(f"{name} {how} {self.why}", level, "%s%s%s.", name, how, self.why)

    def describe(self, about: About) -> list[Line]:
        wrapper = self.wrapper
        what = f"{_WHAT[self.where]}{self.why}"
        if wrapper._dtype is not None:
            what += f", {wrapper._dtype.name}"
        elif about.variables:
            dtypes = {v.activation_dtype for v in about.variables}
            wide = {(d if d.size >= 4 else tf.float32).name for d in dtypes}
            what += f", {' and '.join(sorted(wide))}"
        if self._parts is not None and about.variables:
            count = len(self._parts.shapes_of(about.variables))
            what += f": {count} of {len(about.variables)} variables are split"
        if wrapper._skip_fn is not None:
            fn = wrapper._skip_fn
            what += f"; skip steps by {getattr(fn, '__name__', type(fn).__name__)}"
        if wrapper._flush is not None and wrapper._flush is not False:
            what += "; update early where flush is true"
        return [Line(what)]

    def apply(self, gradients: GradientSet, step: StepBuilder) -> GradientSet:
        wrapper, mesh = self.wrapper, gradients.mesh
        name, skip_fn, checkpointed = wrapper.name, wrapper._skip_fn, wrapper._checkpointed
        skips: Skips | None = None
        kept: State = []

        def make_counters() -> _Counters:
            return _Counters(
                named_state(mesh, f"{name}/mini_step", checkpointed=checkpointed, stacked=True),
                update_counter(mesh, name),
                named_state(mesh, f"{name}/skipped", stacked=skip_fn is None),
                waiting_state(mesh, name, wrapper._limit) if skip_fn is not None else None,
                None,  # only some steps have weights
            )

        before = step.plan.state(wrapper, name, make_counters)
        weights = gradients.weights
        if weights is not None:
            waiting = before.waiting or waiting_state(mesh, name, wrapper._limit)
            before = before._replace(waiting=waiting)
        mini_step, skipped = (on_mesh(c.value, mesh) for c in (before.mini_step, before.skipped))
        for state in before[:3]:
            mtf.scalar_summary(f"summary/{state.name}", state.value)
        checked, skip = gradients, None
        if skip_fn is not None:
            if weights is not None:  # without data, a mean may be 0 / 0
                gradients = without_skipped(gradients, mtf.less_equal(weights.total, 0.0))
            received, strategy = step.received[-1], wrapper.reducer
            skip, state_after = call_skip_fn(skip_fn, gradients, received, strategy, name)
            skip = step.agreed(on_mesh(skip, mesh), by_any=True)
            kept = state_after(skip)
        mask = Mask.of_step(mesh, skip, weights)
        accumulators = Accumulators(
            dataclasses.replace(gradients, mask=mask),
            wrapper._slots,
            wrapper._dtype if weights is None else wrapper._dtype_of_weighted_sums(),
            checkpointed,
            owner=name,
            counter=before.mini_step.name,
        )
        before, weight = before._replace(weight=accumulators.weight_state), accumulators.weight
        count = mini_step + mask.number
        passes: Any = wrapper.backward_passes_per_step
        if callable(passes):
            with step.plan.outside_of_branches():
                passes = passes_at(passes, before.update_step.value, name)
        passes = on_mesh(passes, mesh) if isinstance(passes, mtf.Tensor) else passes
        due = mtf.greater_equal(count, passes)
        if skip_fn is not None:
            # A checkpoint may hold more microbatch steps than an update takes now; a skipped step
            # brings no update even then.
            due = mtf.logical_and(due, mtf.greater(mask.number, 0))
        if wrapper._flush is not None:
            flag = wrapper._flush
            if callable(flag):
                flag = flag()
                _check_flush(flag)
            flag = flag.value if isinstance(flag, mtf.Variable) else flag
            if not isinstance(flag, mtf.Tensor):
                flag = mtf.import_tf_tensor(mesh, tf.convert_to_tensor(flag), mtf.Shape([]))
            flush = mtf.logical_and(on_mesh(flag, mesh), mtf.greater(count, 0))
            due = mtf.logical_or(due, flush)
        updated = mtf.cast(due, tf.int32)
        has_update = updated
        if weight is not None:
            has_data = step.agreed(mtf.greater(weight, 0.0), by_any=True)
            has_update *= mtf.cast(has_data, tf.int32)
        # The update itself advances `update_step`, because a wrapper inside may skip the update.
        now = _Counters(
            count * (1 - updated),
            None,
            skipped + (1 - mask.number),
            before.waiting and waiting_after_step(before.waiting, has_update),
            None if weight is None else weight * mtf.cast(1 - updated, tf.float32),
        )
        gate = accumulators.add(step)
        counted_now = [(v, on_mesh(x, v.mesh)) for v, x in zip(before, now) if x is not None]
        counts = step.plan.graph.combine_assignments(
            [mtf.assign(v, x) for v, x in (*counted_now, *kept)]
        )
        step.write(counts, gate)
        # As they were before a reduction, gradients may tell more about shards.
        received = step.received[-1]
        axes, of_shards_only = step.shard_numbering(received)
        if skip_fn is not None or before.waiting is not None:
            skips = self._make_skips(checked, before, axes)
        if skip is not None and skips is not None:
            with step.branch_when(skip, gate):
                found = not_finite_flags(received, checked, axes, wrapper.reducer, of_shards_only)
                step.add(skips.report(found, [now.skipped]))
        divisor = count if wrapper._average else None
        if weight is not None:
            # The result is as large as the sum of `count` mean gradients.
            divisor = None if wrapper._average else weight / mtf.cast(count, tf.float32)

        def at_end(operations: Sequence[mtf.Operation]) -> Sequence[mtf.Operation]:
            (made,) = values_after([before.update_step], operations)
            checks = skips.end_of_step(operations) if skips else []
            after = now._replace(update_step=made)

            def note() -> None:
                wrapper._chosen_way, wrapper._found_axes = self.where, self.axes
                wrapper._set_step_attributes(before, after, skips)

            step.when_built(note)
            return checks

        step.at_end(at_end)
        return accumulators.take_when(due, step, gate, divisor, weight)

    def _make_skips(
        self, gradients: GradientSet, before: _Counters, axes: ReplicaAxes | None
    ) -> Skips:
        wrapper = self.wrapper
        name = getattr(wrapper._skip_fn, "__name__", type(wrapper._skip_fn).__name__)
        return Skips(
            wrapper.name,
            [v.name for v in gradients.owners],
            names_of_rows(axes),
            "microbatch step skipped, gradients that are not finite:",
            f"none, but should_skip_update_fn {name} says so",
            counts=() if wrapper._skip_fn is None else [before.skipped],
            waiting=() if before.waiting is None else [before.waiting],
            limit=wrapper._limit,
        )


def _why_synced(place: Place, is_known: bool) -> str:
    """Returns why each shard cannot add up its own gradients, as the end of a sentence for the log.

    The result is "" if each shard can add up its own gradients. `place` is the wrapper's place in
    its stack, and `is_known` says whether the replica axes are known.
    """
    kinds = [(one.wrapper, one.stages) for one in place.around]
    outer = next((name for name, x in kinds if reduces(x) and not needs_not_finite(x)), None)
    if outer is not None:
        return f", because {outer} around it does so: turn them round, to reduce once an update"
    assert place.program is not None
    if place.program.num_meshes > 1:
        return (
            ", because variables are on several meshes: use a wrapper for each mesh, to reduce "
            "once an update"
        )
    if is_known or len(meshes_made()) == 1:
        return ""
    what = "several meshes" if meshes_made() else "no mesh yet"
    return (
        f", because the program has made {what}: give mesh_shape and layout, to reduce once an "
        "update, or accumulate='synced'"
    )


def _floating(dtype: Any) -> tf.DType | None:
    if dtype is None:
        return None
    with contextlib.suppress(TypeError):
        if tf.as_dtype(dtype).is_floating:
            return tf.as_dtype(dtype)
    raise ValueError(
        f"accumulator_dtype must be a floating dtype such as tf.float32, got {dtype!r}."
    )


def _check_flush(flush: Any) -> None:
    if flush is None or callable(flush) or isinstance(flush, (bool, np.bool_)):
        return
    if not is_scalar(flush) or flush.dtype.base_dtype != tf.bool:
        raise TypeError(
            "flush must be a boolean scalar, such as tf.placeholder_with_default(False, []), got "
            f"{flush!r}."
        )
