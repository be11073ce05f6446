"""GradientAccumulationOptimizer: one update, and one communication, for several micro steps."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Sequence

import gin

from mtf_gradsync import compat_v1
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.tensorflow import optimizers_inside
from mtf_gradsync._warn import warn_once
from mtf_gradsync.compat_v1 import NOT_GIVEN, OptimizerLike, given_optimizer, is_v1
from mtf_gradsync.gradients import mixed_gradients, per_shard
from mtf_gradsync.mesh.axes import LayoutLike, MeshShapeLike, ReplicaAxes, axes_of_pipeline
from mtf_gradsync.optimizers.accumulation import hints
from mtf_gradsync.optimizers.accumulation.passes import Passes, check_passes, passes_at
from mtf_gradsync.optimizers.accumulation.skipping import SkipFn, check_skip_fn, says_skip
from mtf_gradsync.optimizers.seen import seen_now
from mtf_gradsync.optimizers.state.accumulators import Accumulators
from mtf_gradsync.optimizers.state.leave_out import LeaveOut
from mtf_gradsync.optimizers.state.variables import counter
from mtf_gradsync.optimizers.wrapper import Wrapper
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.step import Plan

#: Where gradients of micro steps add up: on each shard, or summed over the mesh.
Accumulate = Literal["local", "synced"]
LOCAL: Accumulate = "local"
SYNCED: Accumulate = "synced"
_NESTED = (
    "A GradientAccumulationOptimizer inside another one would count the outer's updates as micro "
    "steps; use one, with the product of both backward_passes_per_step."
)


class _Counters(NamedTuple):
    """Integer scalars: mtf variables, or their values after a step."""

    mini_step: Any
    update_step: Any
    skipped: Any


@gin.configurable(module="mtf_gradsync")
class GradientAccumulationOptimizer(Wrapper):
    """Adds up the gradients of several micro steps, then applies another optimizer once.

    On the micro steps in between nothing crosses the mesh for the gradients, the inner
    optimizer's arithmetic does not run, and variables and slots keep their bits.

    Gradients accumulate in one of two places. "local": each shard adds up its own partial sums,
    and the mesh is crossed once an update; takes the mesh when the graph is built. "synced":
    gradients are summed over the mesh on each micro step; takes nothing.

    State, by name: `<variable>/gradient_accumulator` for each variable, and
    `<name>/mini_step`, `<name>/update_step`, `<name>/skipped`.

    References:
      horovod.tensorflow.DistributedOptimizer(backward_passes_per_step=...), optax.MultiSteps
    """

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
    ):
        """Wraps an optimizer.

        Args:
          opt: a Mesh-TF optimizer, or a class or factory of one. With an optimizer of
            `tf.compat.v1.train` the result is `compat_v1.GradientAccumulationOptimizer`, and
            arguments that tell of the mesh or of checkpoints have no effect.
          backward_passes_per_step: micro steps for each update: a whole number of 1 or more, or a
            function from the update step (mtf int32 scalar) to one. A function is asked when an
            update begins: the number never changes in the middle of an accumulation.
          average_aggregated_gradients: divide the sum by the number of micro steps in it.
          should_skip_update_fn: says which micro steps are left out, from the list of their
            gradients: `skip_not_finite`, `skip_large_updates(norm)`, or a function of yours that
            returns a boolean mtf scalar. A micro step that is left out does not count. None
            leaves out nothing: a NaN then stays in the sum until the update.
          accumulator_dtype: dtype to add up in; None takes the gradient's, but at least float32.
          checkpoint_accumulators: whether checkpoints hold the sums. If not, a restart begins a
            fresh accumulation, and local sums need no master copy on the host.
          accumulate: "local", "synced", or None for "local" where the mesh is given.
          sparse_as_dense: only with an optimizer of `tf.compat.v1.train`: turn `tf.IndexedSlices`
            into dense gradients. Those of mesh variables are always dense.
          allreduce_fn: only with such an optimizer; see there.
          name: name of the wrapper, prefix of its counters.
          learning_rate: only with a class or factory as opt: passed on untouched.
          axes: the replica axes (`ReplicaAxes`); or give mesh_shape and layout. Without either,
            accumulate="local" takes those of the mesh that the program has made for this graph.
          mesh_shape: Mesh-TF's mesh shape.
          layout: Mesh-TF's layout rules.
          batch_dims: names of the tensor dimensions that the batch is split along.
          reducer: how sums cross the mesh; None takes `FusedAllReduce()`.

        Raises:
          ValueError: an argument is out of range, or arguments contradict each other.
          TypeError: an argument has the wrong type, or opt is a Keras optimizer.
        """
        inner = given_optimizer(opt, learning_rate, type(self).__name__)
        if is_v1(inner):
            if should_skip_update_fn is not None:
                raise ValueError(
                    "should_skip_update_fn goes with mesh optimizers; got it with the TensorFlow "
                    f"optimizer {inner!r}."
                )
            self.counterpart = compat_v1.GradientAccumulationOptimizer(
                inner,
                backward_passes_per_step,  # type: ignore[arg-type]  # it refuses functions itself
                average_aggregated_gradients,
                sparse_as_dense,
                allreduce_fn,
                accumulator_dtype and _floating(accumulator_dtype),
                name,
            )
            hints.hint_if_micro_steps_are_counted(optimizers_inside(inner)[-1], name)
            return
        if allreduce_fn is not None:
            raise ValueError(
                "allreduce_fn goes with optimizers of tf.compat.v1; on a mesh a strategy sums: "
                f"give reducer=. Got allreduce_fn={allreduce_fn!r} with {inner!r}."
            )
        check_passes(backward_passes_per_step)
        check_skip_fn(should_skip_update_fn)
        dtype = None if accumulator_dtype is None else _floating(accumulator_dtype)
        if accumulate not in (None, LOCAL, SYNCED):
            raise ValueError(
                f"accumulate must be {LOCAL!r}, {SYNCED!r} or None, got {accumulate!r}."
            )
        super().__init__(inner, name, axes, mesh_shape, layout, batch_dims, reducer)
        if accumulate == LOCAL and self.axes is None:
            self.axes = axes_of_pipeline(type(self).__name__, "the shards", batch_dims)
        self.accumulate: Accumulate = accumulate or (LOCAL if self.axes is not None else SYNCED)
        self._passes = backward_passes_per_step
        self._average = bool(average_aggregated_gradients)
        self._skip_fn = should_skip_update_fn
        # A loss that is not finite need not end training then.
        self.leaves_out_not_finite = getattr(should_skip_update_fn, "leaves_out_not_finite", False)
        if self.leaves_out_not_finite:
            self._check_hides_nothing()
        # Whether some steps bring no update.
        self.skips_updates = self._passes != 1 or self._skip_fn is not None
        self._dtype = dtype
        self._checkpointed = bool(checkpoint_accumulators)
        # An optimizer may serve several graphs; the last one is what its properties tell of.
        self._counters: _Counters | None = None
        self._update_step_now: mtf.Tensor | None = None
        self._progress: dict[str, mtf.Tensor] = {}
        hints.hint_if_micro_steps_are_counted(self.innermost(), name)

    @property
    def backward_passes_per_step(self) -> Passes:
        """Micro steps for each update, as the constructor was told."""
        return self._passes

    @property
    def mini_step(self) -> mtf.Variable | None:
        """Micro steps in the sum so far; None before gradients were applied, or without any."""
        return self._counters and self._counters.mini_step

    @property
    def update_step(self) -> mtf.Variable | None:
        """Updates made so far (int32); None before gradients were applied."""
        return self._counters and self._counters.update_step

    @property
    def update_step_now(self) -> mtf.Tensor | None:
        """`update_step` with the step that it is fetched with; None where all steps update."""
        return self._update_step_now

    @property
    def skipped(self) -> mtf.Variable | None:
        """Micro steps left out so far (int32); None before gradients were applied."""
        return self._counters and self._counters.skipped

    def progress_fields(self) -> dict[str, mtf.Tensor]:
        """Scalars that tell how training goes: micro step, update step, micro steps left out.

        They count the step that they are fetched with.
        """
        return dict(self._progress)

    def reported(self) -> dict[str, mtf.Tensor]:
        """See `mtf_gradsync.reported`."""
        fields = self._progress
        names = {
            "update_step": "update step",
            "accumulation/micro_step": "micro step",
            "accumulation/skipped": "skipped",
        }
        return {tag: fields[name] for tag, name in names.items() if name in fields}

    def variables(self) -> list[mtf.Variable]:
        """All variables that the stack made: the inner optimizer's, then the wrapper's."""
        return super().variables() + list(self._counters or ())

    def _to_inner(
        self, grads: list[mtf.Tensor | None], variables: list[mtf.Variable]
    ) -> list[mtf.Operation]:
        if not self.skips_updates:
            return self._apply_inner(grads, variables)
        mesh = variables[0].mesh
        plan = Plan.of(mesh.graph)
        if plan.is_in_branch:
            raise ValueError(_NESTED)
        counters = plan.state(self, self.name, lambda: self._make_counters(mesh))
        mini_step, update_step, skipped = (c.value for c in counters)
        for state in counters:
            mtf.scalar_summary(f"summary/{state.name}", state.value)
        micro = self._micro_gradients(grads, variables)
        counted = mtf.constant(mesh, 1, mtf.Shape([]), tf.int32)
        if self._skip_fn is not None:
            present = [g for g in micro if g is not None]
            skip = says_skip(self._skip_fn, present, self.reducer)
            micro = LeaveOut.apply(micro, skip)
            counted -= mtf.cast(skip, tf.int32)
        accumulators = Accumulators(
            micro,
            variables,
            self._slots,
            self._dtype,
            self._checkpointed,
            counter=counters.mini_step.name,
        )
        count = mini_step + counted
        due = mtf.greater_equal(count, passes_at(self._passes, update_step))
        if self._skip_fn is not None:
            # A checkpoint may hold more micro steps than are asked for now; what was left out
            # brings no update even then.
            due = mtf.logical_and(due, mtf.greater(counted, 0))

        divisor = count if self._average else None

        def update(sums: list[mtf.Tensor | None]) -> list[mtf.Operation]:
            return self._apply_totals(sums, accumulators.dtypes, variables, divisor)

        gate, updates = accumulators.when_due(due, update)
        updated = mtf.cast(due, tf.int32)
        after_step = _Counters(
            count * (1 - updated), update_step + updated, skipped + (1 - counted)
        )
        self._counters, self._update_step_now = counters, after_step.update_step
        self._progress = {"micro step": after_step.mini_step, "update step": after_step.update_step}
        if self._skip_fn is not None:
            self._progress["skipped"] = after_step.skipped
        counts = plan.graph.combine_assignments(
            [mtf.assign(c, value) for c, value in zip(counters, after_step)]
        )
        gate.hold(counts)
        return [*updates, *counts]

    def _check_inner_stack(self) -> None:
        if any(isinstance(o, GradientAccumulationOptimizer) for o in self.inner_stack()):
            raise ValueError(_NESTED)

    def _make_counters(self, mesh: mtf.Mesh) -> _Counters:
        return _Counters(
            counter(mesh, f"{self.name}/mini_step", self._checkpointed),
            get_update_step(mesh, self.name).operation,
            counter(mesh, f"{self.name}/skipped"),
        )

    def _micro_gradients(
        self, grads: Sequence[mtf.Tensor | None], variables: Sequence[mtf.Variable]
    ) -> list[mtf.Tensor | None]:
        """The gradients to add up: one a shard, or summed over the mesh now."""
        if self.accumulate == SYNCED:
            return self._summed(grads, variables)
        assert self.axes is not None  # what "local" has found
        own = [None if g is None or self._shard_dims(g.shape) else g for g in grads]
        mixed = mixed_gradients(own, self.axes)
        if mixed:
            warn_once(
                "gradients summed on each micro step",
                "%s: the program itself needs the sums of the gradients of %s on every micro step "
                "(for %s), so they cross the mesh on each of them, and are added up whole. Do that "
                "after accumulation: ClipByGlobalNormOptimizer inside it clips the sum.",
                self.name,
                [variables[i].name for i in mixed],
                ", ".join(dict.fromkeys(repr(op.name) for op in mixed.values())),
            )
        local = [None if i in mixed else g for i, g in enumerate(grads)]
        summed = [g if i in mixed else None for i, g in enumerate(grads)]
        shards = per_shard(local, self.axes, self.reducer)
        if not mixed:
            self.shards = seen_now(shards)
        summed = self._summed(summed, variables)
        return [w if i in mixed else g for i, (g, w) in enumerate(zip(shards, summed))]


def get_update_step(mesh: mtf.Mesh, name: str = "GradientAccumulationOptimizer") -> mtf.Tensor:
    """The number of updates made so far, for schedules of the inner optimizer.

    It can be had before the wrapper exists, and is the same counter, in any variable scope. With
    one pass an update and nothing to leave out the wrapper counts nothing: it stays 0, and the
    global step counts updates.

    Args:
      mesh: the mesh that is trained on.
      name: name of the wrapper.

    Returns:
      An int32 mtf scalar.
    """
    # Without a wrapper every step was an update.
    return counter(mesh, f"{name}/update_step", start="global_step").value


def _floating(dtype: Any) -> tf.DType:
    try:
        result = tf.as_dtype(dtype)
    except TypeError:
        result = None
    if result is None or not result.is_floating:
        raise ValueError(
            f"accumulator_dtype must be a floating dtype such as tf.float32, got {dtype!r}."
        )
    return result
