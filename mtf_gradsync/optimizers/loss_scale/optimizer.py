"""LossScaleOptimizer: scales the loss, and skips steps that are not finite."""

from __future__ import annotations

from typing import Any, Literal, Sequence, Union

import gin

from mtf_gradsync._numbers import check_whole, is_number
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.compat_v1 import NOT_GIVEN, MeshOptimizerLike
from mtf_gradsync.gradients.losses import ScaledLosses, unscaled_gradients
from mtf_gradsync.gradients.measures import NotFinite, global_norm, not_finite
from mtf_gradsync.mesh.axes import LayoutLike, MeshShapeLike, ReplicaAxes, axes_of_program
from mtf_gradsync.optimizers.loss_scale.not_finite import TellNotFinite
from mtf_gradsync.optimizers.loss_scale.state import LossScaleState, Rule, after_step, make_state
from mtf_gradsync.optimizers.own_arguments import OwnArguments, variables_behind
from mtf_gradsync.optimizers.pairs import OfStep
from mtf_gradsync.optimizers.pipeline import GradientSet, Stage, StepBuilder, Traits, traits_of
from mtf_gradsync.optimizers.told import TellsSkips
from mtf_gradsync.optimizers.wrapper import Wrapper
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.step import Gate, Plan, values_after

DYNAMIC: Literal["dynamic"] = "dynamic"
# Scales whose reciprocals are far from float32's limits, too.
_LEAST, _MOST = 1e-30, 1e30


@gin.configurable(module="mtf_gradsync")
class LossScaleOptimizer(TellsSkips, Wrapper):
    """Multiplies the loss by a scale, divides gradients by it, and applies another optimizer.

    Gradients of narrow floats (float16) then do not become zero where they are small. A step with
    a gradient that is not finite, on any shard, is skipped as a whole: variables and slots keep
    their bits, and a global step that is given to `apply_gradients` does not advance. A dynamic
    scale is divided by `multiplier` then, and multiplied by it after `growth_steps` updates without
    such a step.

    The loss keeps its value; what is scaled is the gradient that `mtf.gradients` begins with. So
    it works with gradients of `compute_gradients`, which come without the scale, and with those of
    `mtf.gradients` as pipelines compute them, in microbatches too. Gradients narrower than float32
    are float32 after that.

    Stand it outside of what sums and clips: `LossScaleOptimizer(CrossShardOptimizer(opt))`. Inside
    `GradientAccumulationOptimizer` it decides once an update, and an update is skipped with all of
    its micro steps. Around optimizers that skip what is not finite by themselves
    (`SyncReplicasOptimizer`; accumulation with `skip_not_finite`) it moves the scale, and they
    skip.

    State, by name: `<name>/scale`, `<name>/good_steps`, `<name>/skipped`.

    References:
      Micikevicius et al., "Mixed precision training", 2018;
      `tf.keras.mixed_precision.LossScaleOptimizer`
    """

    traits = Traits(watches_not_finite=True)
    shown = (("loss scale", "loss_scale/scale"), ("left out", "loss_scale/skipped"))

    # Of the graph that gradients were applied in last: variables, and values after a step.
    _state = OfStep[Union[LossScaleState, None]](None)
    _now = OfStep[Union[LossScaleState, None]](None)
    _writes = OfStep[Sequence[mtf.Operation]](())

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
    ):
        """Wraps an optimizer.

        Args:
          opt: a Mesh-TF optimizer, or a class or factory of one.
          loss_scale: "dynamic", or a number greater than 0 that stays. With a fixed scale, steps
            are skipped just the same.
          initial_scale: what a dynamic scale begins with.
          growth_steps: updates in a row without a gradient that is not finite, after which a
            dynamic scale grows.
          multiplier: what it grows and shrinks by, greater than 1. Powers of two keep the bits of
            gradients.
          min_scale: it does not shrink below.
          max_scale: it does not grow beyond.
          name: name of the wrapper, prefix of its state.
          learning_rate: only with a class or factory as opt: passed on untouched.
          axes: the replica axes, by which shards are told in the log; or give mesh_shape and
            layout. Without either they are those of the mesh that the program has made for this
            graph.
          mesh_shape: Mesh-TF's mesh shape.
          layout: Mesh-TF's layout rules.
          batch_dims: names of the tensor dimensions that the batch is split along.
          reducer: how sums cross the mesh; None takes `FusedAllReduce()`.

        Raises:
          ValueError: an argument is out of range, or arguments contradict each other.
          TypeError: an argument has the wrong type.
        """
        scales = {"initial_scale": initial_scale, "min_scale": min_scale, "max_scale": max_scale}
        self._rule = _rule(loss_scale, growth_steps, multiplier, scales)
        self._wrap(opt, learning_rate, name, axes, mesh_shape, layout, batch_dims, reducer)
        self._check_order()

    def stages(self) -> list[Stage]:
        """See `Wrapper.stages`."""
        return [_SkipNotFinite(self)]

    @property
    def scale(self) -> mtf.Variable | float | None:
        """The scale: a number if it is fixed; None before gradients were computed or applied."""
        if not self._rule.is_dynamic:
            return self._rule.initial
        return self._state and self._state.scale

    @property
    def good_steps(self) -> mtf.Variable | None:
        """Updates since the scale moved (int32); None before, or if it is fixed."""
        return self._state and self._state.good_steps

    @property
    def skipped(self) -> mtf.Variable | None:
        """Steps skipped so far (int32); None before gradients were computed or applied."""
        return self._state and self._state.skipped

    def reported(self) -> dict[str, mtf.Tensor]:
        """See `mtf_gradsync.reported`."""
        now = self._values_now()
        if now is None:
            return {}
        names = {"scale": now.scale, "good_steps": now.good_steps, "skipped": now.skipped}
        return {f"loss_scale/{name}": x for name, x in names.items() if x is not None}

    def variables(self) -> list[mtf.Variable]:
        """All variables that the stack made: the inner optimizer's, then the wrapper's."""
        return super().variables() + (self._state.present if self._state else [])

    def _values_now(self) -> LossScaleState | None:
        """The state after a step."""
        if self._now is None and self._state is not None and self._writes:
            # Written in a branch, so that the values are known outside only by reading them.
            values = iter(values_after(self._state.present, self._writes))
            self._now = LossScaleState(*[x if x is None else next(values) for x in self._state])
        return self._now

    def without_scale(
        self, grads: list[mtf.Tensor | None], variables: Sequence[mtf.Variable]
    ) -> list[mtf.Tensor | None]:
        """See `Wrapper.without_scale`."""

        def scale() -> float | mtf.Tensor:
            state = self._state_of(variables[0].mesh)
            return state.scale.value if self._rule.is_dynamic else self._rule.initial

        return unscaled_gradients(grads, scale, self.name, [v.name for v in variables])

    def check_arguments(self, own: OwnArguments, variables: Sequence[mtf.Variable]) -> None:
        """Raises ValueError for an argument by which an optimizer would take the scale out again.

        A fixed scale is a number, which cannot be told from another.
        """
        scale = self._state and self._state.scale
        for name, tensor in own.tensors():
            if scale is not None and variables_behind(tensor) == {scale}:
                raise ValueError(
                    f"The argument {name} for {self.innermost()!r} is made of the scale of "
                    f"{self.name}, but the gradients that {self.name} passes on are without it: "
                    "leave the argument out, or give a scale of your own."
                )

    def _state_of(self, mesh: mtf.Mesh) -> LossScaleState:
        plan = Plan.of(mesh.graph)
        state = plan.state(self, self.name, lambda: make_state(mesh, self.name, self._rule))
        self._state = state
        return state

    def _axes_now(self) -> Any:
        return self.axes or axes_of_program(self._shard_names)


class _SkipNotFinite(Stage):
    """Makes an update only where the gradients are finite, and moves the scale."""

    def __init__(self, wrapper: LossScaleOptimizer):
        self._wrapper = wrapper

    def apply(self, gradients: GradientSet, step: StepBuilder) -> GradientSet:
        wrapper = self._wrapper
        losses = step.plan.part(ScaledLosses)
        if wrapper.name in losses.applied:
            raise ValueError(
                f"{wrapper.name} has applied gradients in this graph already; whether a step is "
                "skipped is decided for all of them: give apply_grads all variables at once."
            )
        losses.applied |= {wrapper.name}
        before = wrapper._state_of(gradients.variables[0].mesh)
        inside = [traits_of(x) for x in wrapper.inner_stack()]
        reduction = wrapper._gradient_reduction()
        # What is inside may skip what is not finite by itself: then this one only moves the scale.
        is_beside = any(traits.skips_not_finite for traits in inside)
        if not is_beside:
            passed_on = step.reduce(gradients, reduction)
        elif any(traits.needs_shards for traits in inside):
            passed_on = gradients
        else:
            # More can overflow in their sum than in each shard's gradients.
            passed_on = step.reduce_whole(gradients, reduction)
        if passed_on.form.is_reduced:
            finite = self._are_finite(passed_on.present, any(t.squares for t in inside))
            finite = step.agreed(finite)
        else:
            found = NotFinite(passed_on.present, wrapper._axes_now(), wrapper.reducer).outputs[0]
            finite = mtf.less_equal(mtf.reduce_sum(found), 0.0)
        gate = step.gate([finite] if is_beside else [*passed_on.present, finite])
        self._report(finite, gate, gradients, passed_on, before, step)
        after = after_step(before, finite, wrapper._rule)
        wrapper._writes = [mtf.assign(v, x) for v, x in zip(before.present, after.present)]
        step.write(wrapper._writes, gate)
        wrapper._now = None if step.plan.is_in_branch else after
        if not is_beside:
            step.only_when(finite, gate, as_call=False)
        return passed_on

    def _are_finite(self, sums: list[mtf.Tensor], are_squared: bool) -> mtf.Tensor:
        """Whether reduced gradients, or parts of them, are, a boolean scalar."""
        reducer = self._wrapper.reducer
        if are_squared:
            # Their squares overflow before they do, and the norm would make them NaN.
            return mtf.less(global_norm(sums, reducer), float("inf"))
        return mtf.less_equal(not_finite(sums, reducer), 0.0)

    def _report(
        self,
        finite: mtf.Tensor,
        gate: Gate | None,
        gradients: GradientSet,
        passed_on: GradientSet,
        before: LossScaleState,
        step: StepBuilder,
    ) -> None:
        """Names what is not finite, where something is not."""
        wrapper = self._wrapper
        axes, names = wrapper._axes_now(), [v.name for v in gradients.owners]
        wrapper._told = None

        def tell() -> list[mtf.Operation]:
            found = []
            if axes:
                of_shards = NotFinite(gradients.present, axes, wrapper.reducer, only_apart=True)
                found.append(mtf.anonymize(of_shards.outputs[0]))
            of_sums = NotFinite(passed_on.present, None, wrapper.reducer)
            found.append(mtf.anonymize(of_sums.outputs[0]))
            wrapper._told = TellNotFinite(found, before.skipped, names, wrapper.name)
            return [wrapper._told]

        step.beside_when(mtf.logical_not(finite), gate, tell)


def _rule(loss_scale: Any, growth_steps: Any, multiplier: Any, scales: dict[str, Any]) -> Rule:
    """Checks the arguments that say how a scale moves."""
    is_dynamic = isinstance(loss_scale, str) and loss_scale == DYNAMIC
    initial, least, most = scales.values()
    given = scales if is_dynamic else {**scales, "loss_scale": loss_scale}
    for name, value in given.items():
        if not _is_positive(value):
            what = f"{DYNAMIC!r} or a number greater" if name == "loss_scale" else "greater"
            raise ValueError(
                f"{name} must be {what} than 0 and one that float32 can hold, as {_LEAST:g} to "
                f"{_MOST:g}, got {value!r}."
            )
    if is_dynamic and not least <= initial <= most:
        raise ValueError(
            "initial_scale must lie between min_scale and max_scale, got "
            + ", ".join(f"{name}={value!r}" for name, value in scales.items())
            + "."
        )
    if not _is_positive(multiplier) or not multiplier > 1:
        raise ValueError(f"multiplier must be finite and greater than 1, got {multiplier!r}.")
    check_whole("growth_steps", growth_steps)
    initial = float(initial if is_dynamic else loss_scale)
    return Rule(
        is_dynamic, initial, int(growth_steps), float(multiplier), float(least), float(most)
    )


def _is_positive(value: Any) -> bool:
    return is_number(value) and _LEAST <= value <= _MOST
