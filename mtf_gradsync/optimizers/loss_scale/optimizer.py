"""LossScaleOptimizer: scales the loss, and leaves out steps that are not finite."""

from __future__ import annotations

from typing import Any, Callable, Literal, Sequence

import gin

from mtf_gradsync._numbers import is_number, is_whole
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.compat_v1 import NOT_GIVEN, MeshOptimizerLike, given_optimizer
from mtf_gradsync.gradients import ScaledLosses, global_norm, not_finite, unscaled_gradients
from mtf_gradsync.mesh.axes import LayoutLike, MeshShapeLike, ReplicaAxes, axes_of_program
from mtf_gradsync.optimizers.loss_scale.hook import LossScaleHook
from mtf_gradsync.optimizers.loss_scale.not_finite import (
    NotFinite,
    TellNotFinite,
    places_variable,
)
from mtf_gradsync.optimizers.loss_scale.state import (
    LossScaleState,
    Rule,
    after_step,
    held_after_step,
    make_state,
)
from mtf_gradsync.optimizers.wrapper import Wrapper
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.step import Branch, Conditional, Gate, Plan

DYNAMIC: Literal["dynamic"] = "dynamic"
# Scales whose reciprocals are far from float32's limits, too.
_LEAST, _MOST = 1e-30, 1e30


@gin.configurable(module="mtf_gradsync")
class LossScaleOptimizer(Wrapper):
    """Multiplies the loss by a scale, divides gradients by it, and applies another optimizer.

    Gradients of narrow floats (float16) then do not become zero where they are small. A step with
    a gradient that is not finite, on any shard, is left out whole: variables and slots keep their
    bits, and a global step that is handed to `apply_gradients` does not advance. A dynamic scale is
    divided by `multiplier` then, and multiplied by it after `growth_steps` updates without such a
    step.

    The loss keeps its value; what is scaled is the gradient that `mtf.gradients` begins with. So
    it works with gradients of `compute_gradients`, which come without the scale, and with those of
    `mtf.gradients` as pipelines compute them, in microbatches too. Gradients narrower than float32
    are float32 after that.

    Stand it outside of what sums and clips: `LossScaleOptimizer(CrossShardOptimizer(opt))`. Inside
    `GradientAccumulationOptimizer` it decides once an update, and an update is left out with all of
    its micro steps. Around optimizers that leave out what is not finite by themselves
    (`SyncReplicasOptimizer`; accumulation with `skip_not_finite`) it moves the scale, and they
    leave out.

    State, by name: `<name>/scale`, `<name>/good_steps`, `<name>/skipped`.

    References:
      Micikevicius et al., "Mixed precision training", 2018;
      `tf.keras.mixed_precision.LossScaleOptimizer`
    """

    # A loss that is not finite need not end training then.
    leaves_out_not_finite = True
    # It has to see them.
    moves_by_not_finite = True

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
            are left out just the same.
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
        self._rule = _rule(
            loss_scale, initial_scale, growth_steps, multiplier, min_scale, max_scale
        )
        inner = given_optimizer(opt, learning_rate, type(self).__name__)
        super().__init__(inner, name, axes, mesh_shape, layout, batch_dims, reducer)
        # Of the graph that gradients were applied in last: variables, and values after a step.
        self._state: LossScaleState | None = None
        self._now: LossScaleState | None = None
        self._updated: mtf.Tensor | None = None
        self._writes: list[mtf.Operation] = []
        self._told: TellNotFinite | None = None

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
        """Steps left out so far (int32); None before gradients were computed or applied."""
        return self._state and self._state.skipped

    @property
    def told(self) -> TellNotFinite | None:
        """What tells of steps that were left out; None before gradients were applied."""
        return self._told

    def make_session_run_hook(self) -> LossScaleHook:
        """Makes a hook that logs which gradients of which shards a step was left out for.

        On placement meshes the step itself prints that, and the hook does nothing.

        Returns:
          A `tf.train.SessionRunHook`. Its `begin` raises ValueError if gradients were not applied
          before.
        """
        return LossScaleHook(self)

    def progress_fields(self) -> dict[str, mtf.Tensor]:
        """Scale and steps left out, with the step that they are fetched with."""
        now = self._values_now()
        if now is None:
            return {}
        fields = {"left out": now.skipped}
        return {"loss scale": now.scale, **fields} if self._rule.is_dynamic else fields

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
            self._now = held_after_step(self._state, self._writes)
        return self._now

    def _step_updated(self) -> mtf.Tensor | None:
        return self._updated

    def _check_inner_stack(self) -> None:
        for inner in self.inner_stack():
            if isinstance(inner, LossScaleOptimizer):
                raise ValueError(
                    "A LossScaleOptimizer inside another one would scale the loss twice; use one."
                )
            if getattr(inner, "skips_updates", False) and not _leaves_out(inner):
                kind = type(inner).__name__
                raise ValueError(
                    f"LossScaleOptimizer around {kind} needs micro steps that are not finite left "
                    f"out there: turn them round, {kind}(LossScaleOptimizer(opt), ...), which "
                    "decides once an update, or give it should_skip_update_fn=skip_not_finite."
                )

    def _entered(
        self, grads: Sequence[mtf.Tensor | None], variables: Sequence[mtf.Variable]
    ) -> list[mtf.Tensor | None]:
        def scale() -> float | mtf.Tensor:
            state = self._state_of(variables[0].mesh)
            return state.scale.value if self._rule.is_dynamic else self._rule.initial

        return unscaled_gradients(grads, scale, self.name, [v.name for v in variables])

    def _state_of(self, mesh: mtf.Mesh) -> LossScaleState:
        plan = Plan.of(mesh.graph)
        state = plan.state(self, self.name, lambda: make_state(mesh, self.name, self._rule))
        self._state = state
        return state

    def _to_inner(
        self, grads: list[mtf.Tensor | None], variables: list[mtf.Variable]
    ) -> list[mtf.Operation]:
        plan = Plan.of(variables[0].graph)
        applied = plan.part(ScaledLosses)
        if self.name in applied.applied:
            raise ValueError(
                f"{self.name} has applied gradients in this graph already; whether a step is left "
                "out is decided for all of them: give apply_grads all variables at once."
            )
        applied.applied |= {self.name}
        before = self._state_of(variables[0].mesh)
        told: list[mtf.Operation] = []
        decided: list[mtf.Tensor] = []

        def hold(
            sums: Sequence[mtf.Tensor | None], build: Callable[[], list[mtf.Operation]]
        ) -> list[mtf.Operation]:
            """Makes an update only where what it takes is finite."""
            present = [g for g in sums if g is not None]
            finite = self._are_finite(present)
            gate = self._gate([*present, finite])
            update = Conditional(finite, gate, Branch(plan, build), [], as_call=False)
            told.extend(self._tell(finite, gate, grads, present, variables))
            decided.append(finite)
            return update.updates

        inner_leaves_out = any(map(_leaves_out, self.inner_stack()))
        apply = self._inner_apply_unsummed
        if inner_leaves_out:
            updates = self._beside(grads, variables, told, decided)
        elif apply is not None:
            updates = self._apply_inner(grads, variables, lambda g, v: apply(g, v, list, hold))
        else:
            sums = self._summed(grads, variables)
            updates = hold(sums, lambda: self._apply_inner(sums, variables))
        (finite,) = decided
        after = after_step(before, finite, self._rule)
        writes = [mtf.assign(v, x) for v, x in zip(before.present, after.present)]
        gate = self._gate([finite])
        if gate is not None:
            gate.hold(writes)
        self._writes = writes
        self._now = None if plan.is_in_branch else after
        if plan.is_in_branch:
            self._updated = None
        elif inner_leaves_out:
            self._updated = super()._step_updated()
        else:
            self._updated = mtf.cast(finite, tf.int32)
        return [*updates, *told, *writes]

    def _beside(
        self,
        grads: list[mtf.Tensor | None],
        variables: list[mtf.Variable],
        told: list[mtf.Operation],
        decided: list[mtf.Tensor],
    ) -> list[mtf.Operation]:
        """Watches what an inner optimizer leaves out by itself."""
        # Where it tells shards apart, each shard's gradient is looked at; or else their sum, in
        # which more can overflow.
        if any(map(_tells_apart, self.inner_stack())):
            taken = grads
            present = [g for g in taken if g is not None]
            found = NotFinite(present, self._axes_now(), self.reducer).outputs[0]
            finite = mtf.less_equal(mtf.reduce_sum(found), 0.0)
        else:
            taken = self._summed(grads, variables)
            present = [g for g in taken if g is not None]
            finite = self._are_finite(present)
        told.extend(self._tell(finite, self._gate([finite]), grads, present, variables))
        decided.append(finite)
        return self._apply_inner(taken, variables)

    def _are_finite(self, sums: list[mtf.Tensor]) -> mtf.Tensor:
        """Whether sums, or parts of them, are, a boolean scalar."""
        if any(getattr(inner, "takes_norm", False) for inner in self.inner_stack()):
            # Its squares overflow before they do, and the norm would make them NaN.
            return mtf.less(global_norm(sums, self.reducer), float("inf"))
        return mtf.less_equal(not_finite(sums, self.reducer), 0.0)

    def _gate(self, tensors: list[mtf.Tensor]) -> Gate | None:
        """What writes wait for; inside a branch everything waits already."""
        plan = Plan.of(tensors[0].graph)
        return None if plan.is_in_branch else Gate(plan, tensors)

    def _axes_now(self) -> ReplicaAxes | None:
        return self.axes or axes_of_program(self._shard_names)

    def _tell(
        self,
        finite: mtf.Tensor,
        gate: Gate | None,
        grads: Sequence[mtf.Tensor | None],
        sums: Sequence[mtf.Tensor],
        variables: Sequence[mtf.Variable],
    ) -> list[mtf.Operation]:
        """Names what is not finite, where something is not."""
        plan, mesh = Plan.of(finite.graph), finite.mesh
        axes = self._axes_now()
        parts = [g for g in grads if g is not None]
        names = [v.name for g, v in zip(grads, variables) if g is not None]
        self._told = None
        skipped = self._state_of(mesh).skipped

        def tell() -> list[mtf.Operation]:
            found = []
            if axes:
                of_shards = NotFinite(parts, axes, self.reducer, only_apart=True)
                found.append(mtf.anonymize(of_shards.outputs[0]))
            found.append(mtf.anonymize(NotFinite(sums, None, self.reducer).outputs[0]))
            rows = sum(x.shape.size for x in found) // len(names)
            variable = places_variable(mesh, f"{self.name}/not_finite", rows, len(names))
            self._told = TellNotFinite(found, variable, skipped, names, self.name)
            return [self._told]

        bad = mtf.logical_not(finite)
        return Conditional(bad, gate, Branch(plan, tell), [], as_call=False).updates


def _tells_apart(opt: Any) -> bool:
    """Whether an optimizer takes each shard's gradients."""
    return getattr(opt, "accumulate", None) == "local" or getattr(
        opt, "tells_replicas_apart", False
    )


def _leaves_out(opt: Any) -> bool:
    """Whether an optimizer leaves out what is not finite by itself."""
    return bool(getattr(opt, "leaves_out_not_finite", False))


def _rule(
    loss_scale: Any,
    initial_scale: Any,
    growth_steps: Any,
    multiplier: Any,
    min_scale: Any,
    max_scale: Any,
) -> Rule:
    """Checks the arguments that say how a scale moves."""
    is_dynamic = loss_scale == DYNAMIC if isinstance(loss_scale, str) else False
    if not is_dynamic and not _is_positive(loss_scale):
        raise ValueError(
            f"loss_scale must be {DYNAMIC!r} or a number greater than 0 that float32 can hold, as "
            f"{_LEAST:g} to {_MOST:g}, got {loss_scale!r}."
        )
    scales = {"initial_scale": initial_scale, "min_scale": min_scale, "max_scale": max_scale}
    for name, value in scales.items():
        if not _is_positive(value):
            raise ValueError(
                f"{name} must be greater than 0 and one that float32 can hold, as {_LEAST:g} to "
                f"{_MOST:g}, got {value!r}."
            )
    if is_dynamic and not min_scale <= initial_scale <= max_scale:
        raise ValueError(
            "initial_scale must lie between min_scale and max_scale, got "
            + ", ".join(f"{name}={value!r}" for name, value in scales.items())
            + "."
        )
    if not _is_positive(multiplier) or not multiplier > 1:
        raise ValueError(f"multiplier must be finite and greater than 1, got {multiplier!r}.")
    if not is_whole(growth_steps):
        raise ValueError(f"growth_steps must be a whole number of 1 or more, got {growth_steps!r}.")
    initial = float(initial_scale if is_dynamic else loss_scale)
    return Rule(
        is_dynamic, initial, int(growth_steps), float(multiplier), float(min_scale),
        float(max_scale),
    )  # fmt: skip


def _is_positive(value: Any) -> bool:
    return is_number(value) and _LEAST <= value <= _MOST
