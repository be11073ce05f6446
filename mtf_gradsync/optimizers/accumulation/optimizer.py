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
from mtf_gradsync.optimizers.pipeline import (
    Form,
    GradientSet,
    Stage,
    StepBuilder,
    Traits,
)
from mtf_gradsync.optimizers.pipeline.accumulators import Accumulators
from mtf_gradsync.optimizers.state.leave_out import LeaveOut
from mtf_gradsync.optimizers.state.variables import scalar_state
from mtf_gradsync.optimizers.wrapper import Wrapper
from mtf_gradsync.reduce import Strategy

#: Where gradients of micro steps add up: on each shard, or reduced over the mesh.
Accumulate = Literal["local", "synced"]
LOCAL: Accumulate = "local"
SYNCED: Accumulate = "synced"


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

    accumulate: Accumulate
    # An optimizer may serve several graphs; the last one is what its properties tell of.
    _counters: _Counters | None
    _update_step_now: mtf.Tensor | None
    _progress: dict[str, mtf.Tensor]

    def __new__(
        cls,
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
    ) -> Any:
        """Wraps an optimizer.

        There is no ``__init__``: given an optimizer of `tf.compat.v1.train`, the class makes an
        object of another one. A subclass with arguments of its own overrides ``__new__``.

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
        opt = given_optimizer(opt, learning_rate, cls.__name__)
        if is_v1(opt):
            if should_skip_update_fn is not None:
                raise ValueError(
                    "should_skip_update_fn goes with mesh optimizers; got it with the TensorFlow "
                    f"optimizer {opt!r}."
                )
            counterpart = compat_v1.GradientAccumulationOptimizer(
                opt,
                backward_passes_per_step,  # type: ignore[arg-type]  # it refuses functions itself
                average_aggregated_gradients,
                sparse_as_dense,
                allreduce_fn,
                accumulator_dtype and _floating(accumulator_dtype),
                name,
            )
            hints.hint_if_micro_steps_are_counted(optimizers_inside(opt)[-1], name)
            return counterpart
        if allreduce_fn is not None:
            raise ValueError(
                "allreduce_fn goes with optimizers of tf.compat.v1; on a mesh a strategy sums: "
                f"give reducer=. Got allreduce_fn={allreduce_fn!r} with {opt!r}."
            )
        check_passes(backward_passes_per_step)
        check_skip_fn(should_skip_update_fn)
        dtype = None if accumulator_dtype is None else _floating(accumulator_dtype)
        if accumulate not in (None, LOCAL, SYNCED):
            raise ValueError(
                f"accumulate must be {LOCAL!r}, {SYNCED!r} or None, got {accumulate!r}."
            )
        self = super().__new__(cls)
        self._wrap(opt, NOT_GIVEN, name, axes, mesh_shape, layout, batch_dims, reducer)
        if accumulate == LOCAL and self.axes is None:
            self.axes = axes_of_pipeline(cls.__name__, "the shards", batch_dims)
        self.accumulate = accumulate or (LOCAL if self.axes is not None else SYNCED)
        self._passes = backward_passes_per_step
        self._average = bool(average_aggregated_gradients)
        self._skip_fn = should_skip_update_fn
        self.traits = Traits(
            reduces=self.accumulate == SYNCED,
            needs_shards=self.accumulate == LOCAL,
            or_else="accumulate reduced gradients, by accumulate='synced'",
            schedules_updates=backward_passes_per_step != 1 or should_skip_update_fn is not None,
            skips_not_finite=getattr(should_skip_update_fn, "leaves_out_not_finite", False),
        )
        self._check_order()
        self._dtype = dtype
        self._checkpointed = bool(checkpoint_accumulators)
        self._counters = None
        self._update_step_now = None
        self._progress = {}
        hints.hint_if_micro_steps_are_counted(self.innermost(), name)
        return self

    def stages(self) -> list[Stage]:
        """See `Wrapper.stages`."""
        return [_Accumulate(self)] if self.traits.schedules_updates else []

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

    def _note_counters(self, counters: _Counters, after_step: _Counters) -> None:
        self._counters, self._update_step_now = counters, after_step.update_step
        self._progress = {"micro step": after_step.mini_step, "update step": after_step.update_step}
        if self._skip_fn is not None:
            self._progress["skipped"] = after_step.skipped

    def _make_counters(self, mesh: mtf.Mesh) -> _Counters:
        return _Counters(
            scalar_state(mesh, f"{self.name}/mini_step", checkpointed=self._checkpointed),
            get_update_step(mesh, self.name).operation,
            scalar_state(mesh, f"{self.name}/skipped"),
        )


class _Accumulate(Stage):
    """Adds gradients up, and passes the sums on when an update is due."""

    gives = Form.REDUCED

    def __init__(self, wrapper: GradientAccumulationOptimizer):
        self._wrapper = wrapper

    def apply(self, gradients: GradientSet, step: StepBuilder) -> GradientSet:
        wrapper, mesh = self._wrapper, gradients.variables[0].mesh
        counters = step.plan.state(wrapper, wrapper.name, lambda: wrapper._make_counters(mesh))
        mini_step, update_step, skipped = (c.value for c in counters)
        for state in counters:
            mtf.scalar_summary(f"summary/{state.name}", state.value)
        micro = self._micro_gradients(gradients, step)
        counted = mtf.constant(mesh, 1, mtf.Shape([]), tf.int32)
        if wrapper._skip_fn is not None:
            skip = says_skip(wrapper._skip_fn, micro.present, wrapper.reducer)
            micro = micro.with_grads(LeaveOut.apply(micro.grads, skip))
            counted -= mtf.cast(skip, tf.int32)
            step.write_state(when=lambda: mtf.logical_not(skip))
        accumulators = Accumulators(
            micro.grads,
            micro.variables,
            wrapper._slots,
            wrapper._dtype,
            wrapper._checkpointed,
            counter=counters.mini_step.name,
        )
        count = mini_step + counted
        due = mtf.greater_equal(count, passes_at(wrapper._passes, update_step))
        if wrapper._skip_fn is not None:
            # A checkpoint may hold more micro steps than are asked for now; what was skipped
            # brings no update even then.
            due = mtf.logical_and(due, mtf.greater(counted, 0))
        updated = mtf.cast(due, tf.int32)
        after_step = _Counters(
            count * (1 - updated), update_step + updated, skipped + (1 - counted)
        )
        step.when_built(lambda: wrapper._note_counters(counters, after_step))
        gate = accumulators.add(step)
        counts = step.plan.graph.combine_assignments(
            [mtf.assign(c, value) for c, value in zip(counters, after_step)]
        )
        step.write(counts, gate)
        sums = accumulators.take_when(due, step, gate, counts_every_step=True)
        return gradients.with_grads(
            sums,
            Form.PENDING,
            divisor=count if wrapper._average else None,
            dtypes=tuple(accumulators.dtypes),
        )

    def _micro_gradients(self, gradients: GradientSet, step: StepBuilder) -> GradientSet:
        """The gradients to add up: one a shard, or reduced over the mesh now."""
        wrapper = self._wrapper
        reduction = wrapper._gradient_reduction()
        if wrapper.accumulate == SYNCED:
            return step.reduce_whole(gradients, reduction)
        axes, grads = wrapper.axes, gradients.grads
        assert axes is not None  # what "local" has found
        own = [None if g is None or wrapper._shard_dims(g.shape) else g for g in grads]
        mixed = mixed_gradients(own, axes)
        if mixed:
            warn_once(
                "gradients summed on each micro step",
                "%s: the program itself needs the sums of the gradients of %s on every micro step "
                "(for %s), so they are reduced on each of them, and their sums are added up. Do "
                "that after accumulation: ClipByGlobalNormOptimizer inside it clips the sum.",
                wrapper.name,
                [gradients.variables[i].name for i in mixed],
                ", ".join(dict.fromkeys(repr(op.name) for op in mixed.values())),
            )
        local = [None if i in mixed else g for i, g in enumerate(grads)]
        shards = per_shard(local, axes, wrapper.reducer)
        if not mixed:
            step.per_shard = gradients.with_grads(shards, Form.PER_SHARD)
        summed = gradients.with_grads([g if i in mixed else None for i, g in enumerate(grads)])
        summed = step.reduce_whole(summed, reduction)
        return gradients.with_grads(
            [w if i in mixed else g for i, (g, w) in enumerate(zip(shards, summed.grads))],
            Form.PER_SHARD,
        )


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
    return scalar_state(mesh, f"{name}/update_step", start="global_step").value


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
