"""SyncReplicasOptimizer: an update when enough shards have contributed a fresh gradient."""

from __future__ import annotations

from typing import Any, Sequence

import gin

from mtf_gradsync import compat_v1
from mtf_gradsync._numbers import is_whole
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.compat_v1 import NOT_GIVEN, OptimizerLike, given_optimizer, is_v1
from mtf_gradsync.gradients import check_told_apart, per_shard
from mtf_gradsync.mesh.axes import LayoutLike, MeshShapeLike, ReplicaAxes, axes_of_pipeline
from mtf_gradsync.optimizers import checks
from mtf_gradsync.optimizers.average import AVERAGE, check_averages, move_averages
from mtf_gradsync.optimizers.pipeline import Form, GradientSet, Stage, StepBuilder, Traits
from mtf_gradsync.optimizers.pipeline.accumulators import Accumulators, Bypass
from mtf_gradsync.optimizers.state.leave_out import LeaveOut
from mtf_gradsync.optimizers.sync_replicas import freshness
from mtf_gradsync.optimizers.sync_replicas.hooks import NothingToQueue, SyncReplicasHook
from mtf_gradsync.optimizers.sync_replicas.no_update import StepsWithoutUpdate
from mtf_gradsync.optimizers.sync_replicas.replica_state import (
    ReplicaState,
    ReplicaSummaries,
    after_step,
    make_state,
)
from mtf_gradsync.optimizers.wrapper import Wrapper
from mtf_gradsync.reduce import Strategy


@gin.configurable(module="mtf_gradsync")
class SyncReplicasOptimizer(Wrapper):
    """Averages gradients of fresh replicas and applies them once enough have come.

    The replicas are the shards of the mesh, in lock step. A replica contributes unless its
    gradient is stale (for an older step than the update step), holds a NaN or an infinity, or a
    mask leaves it out. When `replicas_to_aggregate` contributions have come, over one step or
    several, their average is applied once and every replica's local step becomes the new update
    step. Until then variables and slots stand still.

    The loss is the mean over the replicas' losses, a number or, with the shard dims, one for each
    replica; `compute_gradients` makes the mean then. What a replica adds to the gradient of the
    mean, pending or per shard, is 1/num_shards of its contribution: when all contribute, the
    update is that of the whole batch.

    State, by name: `<variable>/gradient_accumulator` for each variable, and `<name>/local_step`,
    `/made`, `/dropped`, `/missed`, `/count`, `/update_step`, `/waiting`.

    References:
      https://www.tensorflow.org/api_docs/python/tf/compat/v1/train/SyncReplicasOptimizer
    """

    axes: ReplicaAxes
    # Of the graph that gradients were applied in last: variables, and values after a step.
    _state: ReplicaState | None
    _now: ReplicaState | None
    _steps_without_update: StepsWithoutUpdate | None

    def __new__(
        cls,
        opt: OptimizerLike,
        replicas_to_aggregate: int = gin.REQUIRED,
        total_num_replicas: int | None = None,
        variable_averages: Any = None,
        variables_to_average: Sequence[mtf.Variable] | None = None,
        use_locking: bool = False,
        name: str = "sync_replicas",
        contributes: Any = None,
        local_steps: Any = None,
        max_steps_without_update: int | None = None,
        accept_summed: bool = False,
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
            `tf.compat.v1.train` the result is `tf.compat.v1.train.SyncReplicasOptimizer`, and
            arguments that tell of the mesh have no effect.
          replicas_to_aggregate: contributions that an update takes, 1 or more. Fewer than there
            are replicas leave room for ones that sit out; more make several steps an update.
          total_num_replicas: number of shards; None takes the mesh's.
          variable_averages: decay of moving averages, or a `tf.train.ExponentialMovingAverage`.
          variables_to_average: what is averaged; only with variable_averages.
          use_locking: updates of a mesh never overlap; has no effect.
          name: name of the wrapper, prefix of its state.
          contributes: which replicas may contribute in this step: booleans, as a tf tensor, array
            or list of shape `[num_shards]` or of the shard dims' sizes, or as an mtf tensor of
            shape `[shard dims...]`; None for all.
          local_steps: the update step that each replica's gradient of this step is for, where the
            program knows: whole numbers in the same forms. None takes `<name>/local_step`, which
            each update sets to the new update step for all.
          max_steps_without_update: largest number of steps in a row without an update; one more
            raises an error that lists the replicas that did not contribute. On SIMD meshes it
            takes the hook of `make_session_run_hook`.
          accept_summed: take gradients, too, in which the replicas cannot be told apart (they were
            clipped by a norm of all, say), in place of an error. A replica that is left out is in
            such a gradient all the same, and its NaN drops all replicas.
          learning_rate: only with a class or factory as opt.
          axes: the replica axes (`ReplicaAxes`); or give mesh_shape and layout. Without either
            they are those of the mesh that the program has made for this graph.
          mesh_shape: Mesh-TF's mesh shape.
          layout: Mesh-TF's layout rules.
          batch_dims: names of the tensor dimensions that the batch is split along.
          reducer: how sums cross the mesh; None takes `FusedAllReduce()`.

        Raises:
          ValueError: an argument is out of range, or there is no mesh.
          TypeError: an argument has the wrong type, or opt is a Keras optimizer.
        """
        _check_count("replicas_to_aggregate", replicas_to_aggregate)
        if max_steps_without_update is not None:
            _check_count("max_steps_without_update", max_steps_without_update)
        opt = given_optimizer(opt, learning_rate, cls.__name__)
        if is_v1(opt):
            for what, value in (
                ("contributes", contributes),
                ("local_steps", local_steps),
                ("max_steps_without_update", max_steps_without_update),
            ):
                if value is not None:
                    raise ValueError(
                        f"{what} goes with mesh optimizers; got it with the TensorFlow optimizer "
                        f"{opt!r}."
                    )
            return compat_v1.sync_replicas(
                opt,
                replicas_to_aggregate,
                total_num_replicas,
                variable_averages,
                variables_to_average,
                use_locking,
                name,
            )
        decay, averaged = check_averages(variable_averages, variables_to_average)
        self = super().__new__(cls)
        self._wrap(opt, NOT_GIVEN, name, axes, mesh_shape, layout, batch_dims, reducer)
        if self.axes is None:
            self.axes = axes_of_pipeline(cls.__name__, "the replicas", batch_dims)
        if total_num_replicas not in (None, self.axes.num_shards):
            raise ValueError(
                f"total_num_replicas must be the mesh's number of shards, {self.axes.num_shards} "
                f"for {self.axes!r}, got {total_num_replicas!r}."
            )
        freshness.check_contributes(contributes, self.axes)
        freshness.check_local_steps(local_steps, self.axes)
        del use_locking
        self._to_aggregate = int(replicas_to_aggregate)
        self._decay, self._averaged = decay, averaged
        self._contributes, self._local_steps = contributes, local_steps
        self._max_steps = max_steps_without_update
        self.traits = Traits(
            needs_shards=not accept_summed and self.axes.num_shards > 1,
            or_else="give it accept_summed=True",
            schedules_updates=True,
            skips_not_finite=True,
            averages=bool(averaged),
            skips_shards=self.axes.num_shards > 1 and not accept_summed,
        )
        self._check_order()
        self._state = None
        self._now = None
        self._steps_without_update = None
        return self

    def stages(self) -> list[Stage]:
        """See `Wrapper.stages`."""
        return [_AggregateReplicas(self)]

    @property
    def state(self) -> ReplicaState | None:
        """The replicas' mesh variables; None before gradients were applied."""
        return self._state

    def apply_gradients(
        self, grads_and_vars: checks.GradsAndVars, global_step: Any = None, name: Any = None
    ) -> list[mtf.Operation]:
        """Takes this step's contributions, and applies their average if enough have come.

        Args:
          grads_and_vars: pairs as `compute_gradients` returns them.
          global_step: an mtf or tf variable to add one to after an update is applied, and only
            then. Required, as TensorFlow's optimizer has it; `apply_grads` goes without.
          name: name of the operation that advances global_step; None takes the wrapper's name.

        Returns:
          A flat list of mtf operations.

        Raises:
          TypeError: an argument has the wrong type.
          ValueError: there is no variable or no global step, or a gradient does not fit.
        """
        if hasattr(grads_and_vars, "__len__") and not len(grads_and_vars):
            raise ValueError("Must supply at least one variable: grads_and_vars is empty.")
        if global_step is None:
            raise ValueError(
                "A global step is required to tell stale gradients: give apply_gradients "
                "global_step, a scalar mtf or tf variable that counts updates, or use apply_grads."
            )
        pairs = checks.check_pairs(grads_and_vars)
        if all(grad is None for grad, _ in pairs):
            checks.check_step(global_step)
            return []
        return super().apply_gradients(pairs, global_step, name)

    def make_session_run_hook(self, is_chief: bool, num_tokens: int = -1) -> SyncReplicasHook:
        """Makes a hook for the session.

        When the session is there, it checks that the variables are initialized. On SIMD meshes it
        reads after each run whether more than max_steps_without_update steps went by without an
        update, and raises `NoUpdateError` then.

        Args:
          is_chief: whether num_tokens is checked.
          num_tokens: as for `get_init_tokens_op`.

        Returns:
          A `tf.train.SessionRunHook`. Its `begin` raises ValueError if gradients were not applied
          before, or tokens are too few.
        """
        return SyncReplicasHook(self, is_chief, num_tokens)

    def get_init_tokens_op(self, num_tokens: int = -1) -> tf.Operation:
        """An operation that does nothing: replicas in lock step need no tokens to begin.

        A token lets a replica of TensorFlow's optimizer begin its next step. On a mesh all
        replicas take every step together, and get their token, the new local step, with the
        update.

        Args:
          num_tokens: tokens to begin with; -1 for replicas_to_aggregate. Checked as TensorFlow's
            optimizer does.

        Returns:
          A tf operation.

        Raises:
          ValueError: gradients were not applied before, or num_tokens is less than
            replicas_to_aggregate - total_num_replicas.
        """
        self._check_applied("get_init_tokens_op")
        needed = self._to_aggregate - self.axes.num_shards
        if not is_whole(num_tokens, -1):
            raise ValueError(f"num_tokens must be a whole number, or -1, got {num_tokens!r}.")
        if num_tokens != -1 and num_tokens < needed:
            raise ValueError(
                f"Too few tokens to finish the first step: num_tokens={num_tokens}, and "
                f"replicas_to_aggregate - total_num_replicas is {needed}."
            )
        return tf.no_op(name="init_tokens")

    def get_chief_queue_runner(self) -> tf.train.QueueRunner:
        """A queue runner without threads: the update is part of the training step.

        Raises:
          ValueError: gradients were not applied before.
        """
        self._check_applied("get_chief_queue_runner")
        return NothingToQueue()

    @property
    def steps_without_update(self) -> StepsWithoutUpdate | None:
        """The check of max_steps_without_update; None without any, or before gradients came."""
        return self._steps_without_update

    def _check_applied(self, method: str) -> None:
        if self._state is None:
            raise ValueError(
                f"{method} has to be called after apply_gradients (or apply_grads) of "
                f"{type(self).__name__}."
            )

    def _scale_loss(self, loss: mtf.Tensor) -> mtf.Tensor:
        dims = self._shard_dims(loss.shape)
        return loss * (1.0 / mtf.Shape(dims).size) if dims else loss

    def average(self, var: mtf.Variable) -> mtf.Variable | None:
        """The moving average of a variable; makes nothing.

        Args:
          var: a mesh variable, or its value.

        Returns:
          An `mtf.Variable`; None if the variable is not averaged, or before gradients were applied.
          `mtf_gradsync.moving_average` makes one in a graph that only evaluates.
        """
        (variable,) = checks.check_variables([var])
        return self._slots.get(variable, AVERAGE) if variable in self._averaged else None

    @property
    def update_step_now(self) -> mtf.Tensor | None:
        """Updates made, with the step that it is fetched with; None before gradients came."""
        return self._now and self._now.update_step

    def progress_fields(self) -> dict[str, mtf.Tensor]:
        """Update step, and contributions made and dropped of each replica.

        They count the step that they are fetched with.
        """
        now = self._now
        if now is None:
            return {}
        return {"update step": now.update_step, "made": now.made, "dropped": now.dropped}

    def reported(self) -> dict[str, mtf.Tensor]:
        """See `mtf_gradsync.reported`."""
        now = self._now
        if now is None:
            return {}
        return {
            "update_step": now.update_step,
            "sync_replicas/contributions": now.made,
            "sync_replicas/dropped": now.dropped,
            "sync_replicas/waiting_contributions": now.count,
            "sync_replicas/steps_without_update": now.waiting,
        }

    def variables(self) -> list[mtf.Variable]:
        """All variables that the stack made: the inner optimizer's, then the wrapper's."""
        return super().variables() + list(self._state or ())

    def check(self, grads: Sequence[mtf.Tensor | None], variables: Sequence[mtf.Variable]) -> None:
        """See `Wrapper.check`."""
        for grad, variable in zip(grads, variables):
            if grad is not None and self._has_own_copy(variable):
                raise ValueError(
                    f"Variable {variable.name!r} of shape {variable.shape.to_string} has the "
                    "shard dims, a copy for each replica: SyncReplicasOptimizer averages the "
                    "gradients of variables that replicas share."
                )
        if not variables:
            return
        if self.traits.needs_shards:
            own = [None if g is None or self._shard_dims(g.shape) else g for g in grads]
            check_told_apart(own, self.axes, [f"variable {v.name!r}" for v in variables])
        mesh = variables[0].mesh
        freshness.check_mesh("contributes", self._contributes, mesh)
        freshness.check_mesh("local_steps", self._local_steps, mesh)
        elsewhere = [v.name for v in self._averaged if v.mesh is not mesh]
        if elsewhere:
            raise ValueError(
                f"variables_to_average {elsewhere} are on another mesh, or in another graph, than "
                "the variables that gradients are applied to; make an optimizer for each graph."
            )

    def _note_states(self, before: ReplicaState, now: ReplicaState) -> None:
        self._state, self._now = before, now

    def _summarize(self, now: ReplicaState) -> None:
        mtf.scalar_summary(f"summary/{self.name}/update_step", now.update_step)
        ReplicaSummaries(f"summary/{self.name}/made", now.made)
        ReplicaSummaries(f"summary/{self.name}/dropped", now.dropped)


class _AggregateReplicas(Stage):
    """Adds up what fresh replicas contribute, and passes the average on when enough have."""

    gives = Form.REDUCED

    def __init__(self, wrapper: SyncReplicasOptimizer):
        self._wrapper = wrapper

    def apply(self, gradients: GradientSet, step: StepBuilder) -> GradientSet:
        wrapper = self._wrapper
        axes, reducer, mesh = wrapper.axes, wrapper.reducer, gradients.variables[0].mesh
        before = step.plan.state(
            wrapper, wrapper.name, lambda: make_state(mesh, wrapper.name, axes.shard_dims)
        )
        shards = gradients.with_grads(
            per_shard(gradients.grads, axes, reducer, accept_summed=True), Form.PER_SHARD
        )
        if wrapper.traits.needs_shards:
            step.per_shard = shards
        steps = freshness.steps_of_gradients(wrapper._local_steps, before.local_step, axes)
        fresh = freshness.fresh_replicas(
            shards.present, steps, before.update_step, wrapper._contributes, axes, reducer
        )
        skipped = mtf.logical_not(fresh)
        # Where one step can be enough, accumulators are for the steps that are not.
        one_step = wrapper._to_aggregate <= axes.num_shards
        if not one_step:
            shards = shards.with_grads(LeaveOut.apply(shards.grads, skipped))
        accumulators = Accumulators(
            shards.grads,
            shards.variables,
            wrapper._slots,
            is_share=True,
            counter=before.count.name,
        )
        # The only thing but gradients that is reduced over the replica axes.
        contributed = mtf.anonymize(mtf.cast(fresh, tf.int32))
        count = before.count.value + mtf.reduce_sum(contributed)
        due = mtf.greater_equal(count, wrapper._to_aggregate)
        # All of them, and nothing waits from the steps before.
        alone = mtf.equal(mtf.reduce_min(contributed) - before.count.value, 1)
        step.write_state(when=lambda: mtf.greater(mtf.reduce_sum(contributed), 0))
        gate = accumulators.add(step, Bypass(alone, skipped) if one_step else None)
        now = after_step(before, steps, contributed, count, mtf.cast(due, tf.int32))
        step.write([mtf.assign(v, x) for v, x in zip(before, now)], gate)
        self._before, self._now = before, now
        wrapper._summarize(now)
        step.when_built(lambda: wrapper._note_states(before, now))
        sums = accumulators.take_when(due, step, gate, counts_every_step=False)
        # The terms are 1/num_shards of what replicas contribute.
        divisor = mtf.cast(count, tf.float32) / axes.num_shards
        return gradients.with_grads(
            sums, Form.PENDING, divisor=divisor, dtypes=tuple(accumulators.dtypes)
        )

    def after_update(
        self, updates: Sequence[mtf.Operation], step: StepBuilder
    ) -> list[mtf.Operation]:
        wrapper = self._wrapper
        return move_averages(wrapper._decay, wrapper._averaged, updates, step, wrapper._slots)

    def end_of_step(
        self, operations: Sequence[mtf.Operation], step: StepBuilder
    ) -> list[mtf.Operation]:
        wrapper = self._wrapper
        wrapper._steps_without_update = None
        if not wrapper._max_steps:
            return []
        check = StepsWithoutUpdate(self._before, self._now, operations, wrapper._max_steps)
        wrapper._steps_without_update = check
        return [check]


def _check_count(name: str, value: Any) -> None:
    if not is_whole(value):
        raise ValueError(f"{name} must be a whole number of 1 or more, got {value!r}.")
