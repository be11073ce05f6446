"""LossScaleOptimizer: scales the loss so that small gradients survive narrow dtypes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple, Sequence

import gin

from mtf_gradsync._common import check_whole_number, is_number, walk
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.compat_v1 import NOT_GIVEN, MeshOptimizerLike
from mtf_gradsync.gradients.arguments import PassedOnArguments
from mtf_gradsync.gradients.losses import ScaledLosses, unscaled_gradients
from mtf_gradsync.gradients.measures import NotFinite, global_norm, not_finite
from mtf_gradsync.gradients.operations import on_mesh
from mtf_gradsync.mesh.axes import LayoutLike, MeshShapeLike, ReplicaAxes
from mtf_gradsync.optimizers.pipeline.builder import StepBuilder
from mtf_gradsync.optimizers.pipeline.forms import Form, GradientSet
from mtf_gradsync.optimizers.pipeline.order import needs_shards, skips_not_finite
from mtf_gradsync.optimizers.pipeline.stack import Condition, Place, Stage, stages_of
from mtf_gradsync.optimizers.pipeline.words import About, Line
from mtf_gradsync.optimizers.skips import (
    ReportsSkips,
    Skips,
    check_limit,
    names_of_rows,
    not_finite_flags,
    waiting_after_step,
    waiting_state,
)
from mtf_gradsync.optimizers.state import named_state
from mtf_gradsync.optimizers.wrapper import CommonArguments, StepAttribute
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.step.conditional import values_after
from mtf_gradsync.step.plan import StepPlan
from mtf_gradsync.step.writes import Gate


class ScaleRule(NamedTuple):
    """The settings by which a loss scale changes.

    Attributes:
      is_dynamic: whether the scale changes at all.
      initial: the first value of the scale, or the fixed scale.
      growth_steps: the number of updates in a row without a skipped step after which the scale
        grows.
      multiplier: the factor by which the scale grows and shrinks.
      lowest: the smallest value of the scale.
      highest: the largest value of the scale.
    """

    is_dynamic: bool
    initial: float
    growth_steps: int
    multiplier: float
    lowest: float
    highest: float


class LossScaleState(NamedTuple):
    """The scale and its counters: mtf variables, or their values after a step.

    Attributes:
      scale: float32, the loss scale; None if it is fixed.
      good_steps: int32, the number of updates in a row with finite gradients since the scale
        changed; None if the scale is fixed.
      skipped: int32, the number of steps skipped so far.
      waiting: int32, the number of steps since the last update; None without a limit.
    """

    scale: Any
    good_steps: Any
    skipped: Any
    waiting: Any

    @property
    def present(self) -> list[Any]:
        """The fields that are not None, in order: mtf variables, or mtf scalars after a step."""
        return [x for x in self if x is not None]


def after_step(
    before: LossScaleState, finite: mtf.Tensor, has_data: mtf.Tensor | None, rule: ScaleRule
) -> LossScaleState:
    """Returns the values that the scale and its counters get in a step, as mtf scalars.

    Args:
      before: the mtf variables of the scale and its counters.
      finite: a boolean scalar: whether all gradients are finite.
      has_data: a boolean scalar: whether the step has data; None if every step has. A step without
        data does not change the scale.
      rule: the settings by which the scale changes.
    """
    updated = finite if has_data is None else mtf.logical_and(finite, has_data)
    known = [] if has_data is None else [has_data]

    def skipped(count: tf.Tensor, is_finite: tf.Tensor) -> tf.Tensor:
        return count + tf.cast(tf.logical_not(is_finite), tf.int32)

    def good_steps(count: tf.Tensor, is_finite: tf.Tensor, *has_data: tf.Tensor) -> tf.Tensor:
        more = (count + 1) * tf.cast(is_finite, tf.int32)
        more *= tf.cast(more < rule.growth_steps, tf.int32)
        return tf.where_v2(has_data[0], more, count) if has_data else more

    def scale(
        now: tf.Tensor, count: tf.Tensor, is_finite: tf.Tensor, *has_data: tf.Tensor
    ) -> tf.Tensor:
        # A scale beyond a limit, as after a change of limits, is set to the limit.
        lower = tf.maximum(now / rule.multiplier, rule.lowest)
        higher = tf.minimum(now * rule.multiplier, rule.highest)
        grows = count + 1 >= rule.growth_steps
        new = tf.where_v2(is_finite, tf.where_v2(grows, higher, now), lower)
        return tf.where_v2(has_data[0], new, now) if has_data else new

    count = mtf.cwise(skipped, [before.skipped.value, finite], tf.int32)
    waiting = before.waiting and waiting_after_step(before.waiting, mtf.cast(updated, tf.int32))
    if not rule.is_dynamic:
        return LossScaleState(None, None, count, waiting)
    good = before.good_steps.value
    return LossScaleState(
        mtf.cwise(scale, [before.scale.value, good, finite, *known], tf.float32),
        mtf.cwise(good_steps, [good, finite, *known], tf.int32),
        count,
        waiting,
    )


DYNAMIC: Literal["dynamic"] = "dynamic"
# Scales that, like their reciprocals, are far from float32's limits.
_LEAST, _MOST = 1e-30, 1e30


@gin.configurable(module="mtf_gradsync")
class LossScaleOptimizer(ReportsSkips):
    """A wrapper that multiplies the loss by a scale, and divides gradients by it.

    A loss scale keeps small gradients of narrow dtypes (float16) from becoming zero. A step with a
    gradient that is not finite, on any shard, is skipped: variables and slots do not change, and a
    global step that is given to `apply_gradients` does not advance. A skipped step also divides a
    dynamic scale by `multiplier`. After `growth_steps` updates in a row without a skipped step, a
    dynamic scale is multiplied by `multiplier`.

    The loss tensor keeps its value, because the scale multiplies the number 1 with which
    `mtf.gradients` begins: the gradient of the loss with respect to itself. So gradients may come
    from `compute_gradients`, which returns them unscaled, or from `mtf.gradients`, also in
    microbatches. Unscaled gradients are at least float32.

    Put this wrapper around wrappers that reduce and clip:
    `LossScaleOptimizer(CrossShardOptimizer(opt))`. Inside `GradientAccumulationOptimizer` it skips
    whole updates, with all of their microbatch steps. If an optimizer inside skips gradients that
    are not finite (`SyncReplicasOptimizer`; accumulation with `skip_not_finite`), this wrapper only
    changes the scale. A gradient that is not finite does not change the scale if
    `SyncReplicasOptimizer` skips the gradient's shard and another shard contributes.

    The state is in the variables `<name>/scale`, `<name>/good_steps` (updates in a row since the
    scale changed) and `<name>/skipped` (skipped steps). If max_steps_without_update is given, there
    is also `<name>/waiting` (steps since the last update).

    References:
      Micikevicius et al., "Mixed precision training", 2018;
      `tf.keras.mixed_precision.LossScaleOptimizer`

    Examples:
      >>> opt = gs.LossScaleOptimizer(mtf.optimize.SgdOptimizer(0.1))
      >>> print(gs.describe(gs.CrossShardOptimizer(opt)))
      every step  divide by the loss scale, dynamic, at first 32,768  (LossScaleOptimizer)
                  reduce over the replica axes: fused                 (CrossShardOptimizer)
                  skip steps that are not finite                      (LossScaleOptimizer)
                  update by Sgd
    """

    _scales_loss = True
    shown = (("loss scale", "loss_scale/scale"), ("skipped", "loss_scale/skipped"))

    _writes = StepAttribute[Sequence[mtf.Operation]](())

    def __init__(
        self,
        opt: MeshOptimizerLike,
        loss_scale: Literal["dynamic"] | float = DYNAMIC,
        initial_scale: float = 2.0**15,
        growth_steps: int = 2000,
        multiplier: float = 2.0,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
        name: str = "LossScaleOptimizer",
        learning_rate: Any = NOT_GIVEN,
        axes: ReplicaAxes | None = None,
        mesh_shape: MeshShapeLike | None = None,
        layout: LayoutLike | None = None,
        batch_dims: str | Sequence[str] = ("batch",),
        reducer: Strategy | None = None,
        max_steps_without_update: int | None = None,
    ):
        """Wraps an optimizer.

        Args:
          opt: a Mesh-TF optimizer, or a class or factory of one.
          loss_scale: "dynamic", or a fixed number greater than 0. A fixed scale skips steps, too.
          initial_scale: the first value of a dynamic scale.
          growth_steps: the number of updates in a row without a skipped step after which a dynamic
            scale grows; 2**31 - 1, the largest value, means never.
          multiplier: the factor by which a dynamic scale grows and shrinks, greater than 1. A power
            of two adds no rounding.
          min_scale: the smallest value of a dynamic scale.
          max_scale: the largest value of a dynamic scale.
          name: name of the wrapper, prefix of its state.
          learning_rate: the learning rate for opt; only if opt is a class or factory.
          axes: the replica axes, which number the shards in the log; or give mesh_shape and
            layout. Without either they are those of the mesh that the program has made for this
            graph.
          mesh_shape: Mesh-TF's mesh shape.
          layout: Mesh-TF's layout rules.
          batch_dims: names of the tensor dimensions that the batch is split along.
          reducer: the reduction strategy; None takes `FusedAllReduce()`.
          max_steps_without_update: the largest number of steps in a row that are skipped or have
            no data (a weight of 0); one more raises an error that names variables and shards (see
            `NoUpdateError`). Inside accumulation, steps are updates. None for no limit.

        Raises:
          ValueError: an argument is out of range, or arguments contradict each other.
          TypeError: an argument has the wrong type.
        """
        scales = {"initial_scale": initial_scale, "min_scale": min_scale, "max_scale": max_scale}
        self._rule = _scale_rule(loss_scale, growth_steps, multiplier, scales)
        common = CommonArguments(name, axes, mesh_shape, layout, batch_dims, reducer, learning_rate)
        self._wrap(opt, common)
        self._limit = check_limit(max_steps_without_update)
        self._check_order()
        skipping = [x for x in self.inner_stack() if skips_not_finite(stages_of(x))]
        if self._limit and skipping:
            kind = type(skipping[0]).__name__
            raise ValueError(
                f"max_steps_without_update={self._limit!r}: {kind} inside "
                f"{type(self).__name__} decides which steps are skipped; give this limit to "
                f"{kind}."
            )

    def stages(self, place: Place) -> list[Stage]:
        del place
        return [_SkipNotFinite(self)]

    @property
    def scale(self) -> mtf.Variable | float | None:
        """The scale: an mtf variable, or a number if it is fixed.

        A scale that is not fixed is None before gradients were computed or applied.
        """
        if not self._rule.is_dynamic:
            return self._rule.initial
        return self.state and self.state.scale

    @property
    def good_steps(self) -> mtf.Variable | None:
        """The number of updates in a row since the scale changed: an int32 mtf variable.

        The attribute is None if the scale is fixed, or before gradients were computed or applied.
        """
        return self.state and self.state.good_steps

    @property
    def skipped(self) -> mtf.Variable | None:
        """The number of skipped steps: an int32 mtf variable.

        The attribute is None before gradients were computed or applied.
        """
        return self.state and self.state.skipped

    def reported(self) -> dict[str, mtf.Tensor]:
        now = self._state_after_step()
        fields = now._asdict() if now else {}
        names = {"waiting": "steps_without_update"}
        return {
            f"loss_scale/{names.get(name, name)}": x for name, x in fields.items() if x is not None
        }

    def _state_after_step(self) -> LossScaleState | None:
        """Returns the values that the scale and its counters have after the current step.

        The values are mtf scalars, to fetch together with the step. They exist in every step, even
        if the assignments of the scale are in a branch that some steps do not run. The result is
        None before there is a step.
        """
        if self._now is None and self.state is not None and self._writes:
            # A branch of the step writes the values, which have to be read outside of it.
            values = iter(values_after(self.state.present, self._writes))
            self._now = LossScaleState(*[x if x is None else next(values) for x in self.state])
        return self._now

    def without_scale(
        self, grads: list[mtf.Tensor | None], variables: Sequence[mtf.Variable]
    ) -> list[mtf.Tensor | None]:
        def scale() -> float | mtf.Tensor:
            state = self._state_of(variables[0].mesh)
            return state.scale.value if self._rule.is_dynamic else self._rule.initial

        return unscaled_gradients(grads, scale, self.name, [v.name for v in variables])

    def _check_arguments_scaled(self, inner_arguments: PassedOnArguments) -> None:
        """Raises ValueError if an argument for the innermost optimizer is computed from the scale.

        The innermost optimizer gets gradients without the scale. With such an argument (a factor 1
        / scale, say) it would divide by the scale a second time. `inner_arguments` are the
        arguments that `apply_grads` passes on to the innermost optimizer. If the scale is fixed, no
        error is raised: a fixed scale is a number, which cannot be recognised in an argument.
        """
        scale = self.state and self.state.scale
        for name, tensor in inner_arguments.named_tensors():
            made_by = walk([tensor.operation], lambda op: [x.operation for x in op.inputs])
            behind = {op for op in made_by if isinstance(op, mtf.Variable)}
            if scale is not None and behind == {scale}:
                raise ValueError(
                    f"The argument {name} for {self.innermost()!r} is computed from the scale of "
                    f"{self.name}, but {self.name} passes on gradients without the scale: do not "
                    "give the argument, or give another scale."
                )

    def _state_of(self, mesh: mtf.Mesh) -> LossScaleState:
        plan = StepPlan.of(mesh.graph)
        self.state = plan.state(self, self.name, lambda: self._make_state(mesh))
        return self.state

    def _make_state(self, mesh: mtf.Mesh) -> LossScaleState:
        """Makes the variables of the scale and of its counters on `mesh`; checkpoints hold them.

        The variable of each field of `LossScaleState` is called `<name>/<field>`. If the scale is
        fixed, `scale` and `good_steps` are None. Without a limit `waiting` is None.
        """
        name, rule, scale, good_steps = self.name, self._rule, None, None
        if rule.is_dynamic:
            scale = named_state(mesh, f"{name}/scale", dtype=tf.float32, start=rule.initial)
            good_steps = named_state(mesh, f"{name}/good_steps")
        skipped = named_state(mesh, f"{name}/skipped")
        return LossScaleState(scale, good_steps, skipped, waiting_state(mesh, name, self._limit))


@dataclasses.dataclass(frozen=True)
class _SkipNotFinite(Stage):
    """The stage that skips updates with gradients that are not finite, and changes the scale.

    Attributes:
      wrapper: the wrapper.
      inside: the stages inside the wrapper in a stack, also those inside optimizers of other
        libraries.
      inner_skips_shards: whether a stage inside skips single shards (that of
        `SyncReplicasOptimizer`). The mask of such a stage decides whether gradients are
        finite: a gradient that is not finite does not count if its shard is skipped.
    """

    wrapper: LossScaleOptimizer
    inside: tuple[Stage, ...] = ()
    inner_skips_shards: bool = False
    finite, _sums_in = "needs", "wide"

    @property
    def _inner_stage_skips(self) -> bool:
        """Whether a stage inside skips gradients that are not finite.

        If a stage inside does, the stage of the loss scale skips no step, and only changes the
        scale.
        """
        return any(stage.finite == "skips" for stage in self.inside)

    @property
    def condition(self) -> Condition | None:  # type: ignore[override]
        return None if self.inner_skips_shards or self._inner_stage_skips else Condition()

    @property
    def takes(self) -> Form | None:  # type: ignore[override]
        # The sum can overflow even if no shard's gradient does.
        by_shard = self._inner_stage_skips and needs_shards(self.inside)
        return None if self.inner_skips_shards or by_shard else Form.REDUCED

    def within(self, inside: Sequence[Stage], others: Sequence[Stage]) -> Stage:
        inner_skips_shards = any(stage._counts_shards for stage in inside)
        return dataclasses.replace(
            self, inside=(*inside, *others), inner_skips_shards=inner_skips_shards
        )

    def check(
        self,
        grads: Sequence[mtf.Tensor | None],
        variables: Sequence[mtf.Variable],
        arguments: PassedOnArguments,
    ) -> None:
        self.wrapper._check_arguments_scaled(arguments)
        name = self.wrapper.name
        owners = [v for g, v in zip(grads, variables) if g is not None]
        if owners and name in StepPlan.of(owners[0].graph).extension(ScaledLosses).applied:
            raise ValueError(
                f"{name} has applied gradients in this graph already, but it has to decide "
                "for all variables together whether to skip a step: give apply_grads the "
                "gradients of all of them at once."
            )

    def describe(self, about: About) -> list[Line]:
        rule = self.wrapper._rule
        kind = "dynamic, at first" if rule.is_dynamic else "fixed,"
        lines = [Line(f"divide by the loss scale, {kind} {rule.initial:,.6g}", first=True)]
        if self.inner_skips_shards or self._inner_stage_skips:
            return [*lines, Line("adapt the scale to skips of the wrappers inside")]
        return [*lines, Line("skip steps that are not finite")]

    def apply(self, gradients: GradientSet, step: StepBuilder) -> GradientSet:
        wrapper = self.wrapper
        losses = step.plan.extension(ScaledLosses)
        losses.applied |= {wrapper.name}
        before, rule = wrapper._state_of(gradients.variables[0].mesh), wrapper._rule
        given = step.received[-1]  # before they were reduced
        axes, of_shards_only = step.shard_numbering(given)

        def change_scale(
            held: list[mtf.Tensor], finite: mtf.Tensor, has_data: mtf.Tensor | None
        ) -> Gate | None:
            """Writes the scale and its counters, reports a skipped step, returns the writes' gate.

            The writes wait for `held`, the gradients that later stages get if this stage may skip
            the step. `finite` and `has_data` (None if every step has data) are boolean scalars.
            """
            finite = on_mesh(finite, before.skipped.mesh)
            has_data = None if has_data is None else on_mesh(has_data, finite.mesh)
            gate = step.gate([*held, finite])
            after = after_step(before, finite, has_data, rule)
            skips = Skips(
                wrapper.name,
                [v.name for v in gradients.owners],
                names_of_rows(axes),
                "step skipped, gradients that are not finite:",
                "none by itself, but the norm of all",
                counts=[before.skipped],
                waiting=[before.waiting] if wrapper._limit else (),
                limit=wrapper._limit,
                scales=[before.scale] if rule.is_dynamic else (),
                lowest_scale=rule.lowest,
            )
            now = [after.skipped, *([] if after.scale is None else [after.scale])]
            with step.branch_when(mtf.logical_not(finite), gate):
                reducer = wrapper.reducer
                found = not_finite_flags(given, gradients, axes, reducer, of_shards_only)
                step.add(skips.report(found, now))
            writes = [mtf.assign(v, x) for v, x in zip(before.present, after.present)]
            step.write(writes, gate)
            known = None if step.plan.is_in_branch else after

            def note() -> None:
                wrapper._set_step_attributes(before, known, skips)
                wrapper._writes = writes

            step.when_built(note)
            step.at_end(skips.end_of_step)
            return gate

        if self.inner_skips_shards:
            # Gradients of shards that a stage inside skips do not count.
            step.when_finite_is_known(functools.partial(change_scale, []))
            return gradients
        has_data: mtf.Tensor | None = None
        if gradients.weights is not None:
            has_data = step.agreed(mtf.greater(gradients.weights.total, 0.0), True)
        if gradients.form.is_reduced:
            if any(stage.squares for stage in self.inside):
                # The norm of finite gradients may be infinite, and a clip by it would make NaNs.
                norm = global_norm(gradients.present, wrapper.reducer)
                finite = mtf.less(norm, float("inf"))
            else:
                finite = mtf.less_equal(not_finite(gradients.present, wrapper.reducer), 0.0)
            if gradients.weights is not None:  # without data, a mean may be 0 / 0
                no_data = mtf.less_equal(gradients.weights.total, 0.0)
                finite = mtf.logical_or(finite, on_mesh(no_data, finite.mesh))
            finite = step.agreed(finite)
        else:
            own_axes = step.axes_now(given.present)
            found = NotFinite(gradients.present, own_axes, wrapper.reducer).outputs[0]
            finite = mtf.less_equal(mtf.reduce_sum(found), 0.0)
        if self._inner_stage_skips:
            change_scale([], finite, has_data)
            return gradients
        return gradients.only_when(finite, change_scale(gradients.present, finite, has_data))


def _scale_rule(
    loss_scale: Any, growth_steps: Any, multiplier: Any, scales: dict[str, Any]
) -> ScaleRule:
    """Returns the settings of a loss scale; raises ValueError if an argument is wrong.

    `loss_scale` is "dynamic", or the number that is the fixed scale. `growth_steps` is the number
    of updates in a row without a skipped step after which the scale grows. `multiplier` is the
    factor by which it grows and shrinks. `scales` has the values of initial_scale, min_scale and
    max_scale by these names, in this order.
    """
    is_dynamic = isinstance(loss_scale, str) and loss_scale == DYNAMIC
    initial, least, most = scales.values()
    given = scales if is_dynamic else {**scales, "loss_scale": loss_scale}
    for name, value in given.items():
        if not _is_positive(value):
            what = f"{DYNAMIC!r} or a number greater" if name == "loss_scale" else "greater"
            raise ValueError(
                f"{name} must be {what} than 0, from {_LEAST:g} to {_MOST:g} so that float32 can "
                f"hold it, got {value!r}."
            )
    if is_dynamic and not least <= initial <= most:
        raise ValueError(
            "initial_scale must be between min_scale and max_scale, got "
            + ", ".join(f"{name}={value!r}" for name, value in scales.items())
            + "."
        )
    if not _is_positive(multiplier) or not multiplier > 1:
        raise ValueError(f"multiplier must be finite and greater than 1, got {multiplier!r}.")
    growth = check_whole_number("growth_steps", growth_steps)
    initial = float(initial if is_dynamic else loss_scale)
    return ScaleRule(is_dynamic, initial, growth, float(multiplier), float(least), float(most))


def _is_positive(value: Any) -> bool:
    return is_number(value) and _LEAST <= value <= _MOST
