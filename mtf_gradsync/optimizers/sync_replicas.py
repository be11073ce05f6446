"""SyncReplicasOptimizer: an update when enough shards have contributed a fresh gradient."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, Sequence

import gin

from mtf_gradsync._tf_compat import mtf, tf
from mtf_gradsync.gradients import per_shard, shards_not_finite
from mtf_gradsync.optimizers import checks
from mtf_gradsync.optimizers.accumulators import Accumulators
from mtf_gradsync.optimizers.averages import check_decay, moving_average, updated_averages
from mtf_gradsync.optimizers.leave_out import LeaveOut
from mtf_gradsync.optimizers.state import claim_name, counter, note_per_shard, state_variable
from mtf_gradsync.optimizers.wrapper import _NOT_GIVEN, Wrapper
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.update import after, is_ungated, settle


class ReplicaState(NamedTuple):
    """int32 mesh variables, or their values after a step.

    Attributes:
      local_step: `[shard dims]`, the step that each replica's next gradient is for.
      made: `[shard dims]`, contributions of each replica.
      dropped: `[shard dims]`, steps on which a replica did not contribute.
      count: contributions since the last update.
      update_step: updates made, the global step that local steps are compared with.
      waiting: steps since the last update.
    """

    local_step: Any
    made: Any
    dropped: Any
    count: Any
    update_step: Any
    waiting: Any


@gin.configurable(module="mtf_gradsync")
class SyncReplicasOptimizer(Wrapper):
    """Averages gradients of fresh replicas and applies them once enough have come.

    The replicas are the shards of the mesh, in lock step. A replica contributes unless its
    gradient is stale (its local step is less than the update step), holds a NaN or an infinity,
    or the caller's mask leaves it out. When `replicas_to_aggregate` contributions have come, over
    one step or several, their average is applied once and every replica's local step becomes the
    new update step. Until then variables and slots stand still.

    State, by name: `<variable>/gradient_accumulator` for each variable, and `<name>/local_step`,
    `/made`, `/dropped`, `/count`, `/update_step`, `/waiting`.

    References:
      https://www.tensorflow.org/api_docs/python/tf/compat/v1/train/SyncReplicasOptimizer
    """

    def __init__(
        self,
        opt: Any,
        replicas_to_aggregate: int = gin.REQUIRED,
        total_num_replicas: int | None = None,
        variable_averages: Any = None,
        variables_to_average: Sequence[mtf.Variable] | None = None,
        use_locking: bool = False,
        name: str = "sync_replicas",
        contributes: Any = None,
        max_steps_without_update: int | None = None,
        learning_rate: Any = _NOT_GIVEN,
        axes: Any = None,
        mesh_shape: Any = None,
        layout: Any = None,
        batch_dims: str | Sequence[str] = ("batch",),
        reducer: Strategy | None = None,
    ):
        """Wraps an optimizer.

        Args:
          opt: a Mesh-TF optimizer, or a class or factory of one.
          replicas_to_aggregate: contributions that an update takes, 1 or more. Fewer than there
            are replicas leave room for ones that sit out; more make several steps an update.
          total_num_replicas: number of shards; None takes the mesh's.
          variable_averages: decay of moving averages, or a `tf.train.ExponentialMovingAverage`.
          variables_to_average: what is averaged; only with variable_averages.
          use_locking: updates of a mesh never overlap; has no effect.
          name: name of the wrapper, prefix of its state.
          contributes: which replicas may contribute in this step: a boolean mtf tensor of shape
            `[shard dims...]`, a tf tensor of shape `[num_shards]`, or None for all.
          max_steps_without_update: largest number of steps in a row without an update; one more
            raises an error (placement meshes) that lists the replicas that did not contribute.
          learning_rate: only with a class or factory as opt: passed on untouched.
          axes: the replica axes (`ReplicaAxes`); or give mesh_shape and layout.
          mesh_shape: Mesh-TF's mesh shape.
          layout: Mesh-TF's layout rules.
          batch_dims: names of the tensor dimensions that the batch is split along.
          reducer: how sums cross the mesh; None takes `FusedAllReduce()`.

        Raises:
          ValueError: an argument is out of range, or the mesh is not given.
          TypeError: an argument has the wrong type, or opt is a Keras or TensorFlow optimizer.
        """
        _check_whole("replicas_to_aggregate", replicas_to_aggregate)
        if max_steps_without_update is not None:
            _check_whole("max_steps_without_update", max_steps_without_update)
        decay = check_decay(variable_averages)
        if (decay is None) != (variables_to_average is None):
            raise ValueError(
                "variable_averages and variables_to_average go together, got "
                f"{variable_averages!r} and {variables_to_average!r}."
            )
        averaged = checks.check_variables(variables_to_average or ())
        super().__init__(opt, name, learning_rate, axes, mesh_shape, layout, batch_dims, reducer)
        if self.axes is None:
            raise ValueError(
                "SyncReplicasOptimizer has to know the replicas when the graph is built: give "
                "mesh_shape and layout (or axes)."
            )
        if total_num_replicas not in (None, self.axes.num_shards):
            raise ValueError(
                f"total_num_replicas must be the mesh's number of shards, {self.axes.num_shards} "
                f"for {self.axes!r}, got {total_num_replicas!r}."
            )
        del use_locking
        self._to_aggregate = int(replicas_to_aggregate)
        self._decay, self._averaged = decay, averaged
        self._contributes = contributes
        self._limit = max_steps_without_update
        self._state_of: Any = weakref.WeakKeyDictionary()
        self._state: ReplicaState | None = None
        self._progress: dict[str, mtf.Tensor] = {}

    @property
    def state(self) -> ReplicaState | None:
        """The replicas' mesh variables; None before gradients were applied."""
        return self._state

    def average(self, var: mtf.Variable) -> mtf.Variable | None:
        """The moving average of a variable, or None if it is not averaged."""
        return moving_average(var) if var in self._averaged else None

    def progress_fields(self) -> dict[str, mtf.Tensor]:
        """Scalars that tell how training goes, the step that they are fetched with included."""
        return dict(self._progress)

    def variables(self) -> list[mtf.Variable]:
        """All variables that the stack made: the inner optimizer's, then the wrapper's."""
        return super().variables() + list(self._state or ())

    def _check_shapes(
        self, grads: Sequence[mtf.Tensor | None], variables: Sequence[mtf.Variable]
    ) -> None:
        super()._check_shapes(grads, variables)
        for variable in variables:
            if self._has_own_copy(variable):
                raise ValueError(
                    f"Variable {variable.name!r} of shape {variable.shape.to_string} has the "
                    "shard dims, a copy for each replica: SyncReplicasOptimizer averages the "
                    "gradients of variables that replicas share."
                )

    def _local_steps(self) -> mtf.Tensor:
        """The step that each replica's gradient was computed for, `[shard dims...]`."""
        return self._state.local_step.value

    def _to_inner(
        self, grads: list[mtf.Tensor | None], variables: list[mtf.Variable]
    ) -> list[mtf.Operation]:
        graph, mesh = variables[0].graph, variables[0].mesh
        if is_ungated(graph):
            raise ValueError(
                "SyncReplicasOptimizer cannot stand inside an optimizer that skips updates."
            )
        if graph not in self._state_of:
            claim_name(graph, self.name, self)
            self._state_of[graph] = self._make_state(mesh)
        self._state = before = self._state_of[graph]
        shards = per_shard(grads, self.axes, self.reducer)
        steps = self._local_steps()
        fresh = self._fresh(shards, steps)
        accumulators = Accumulators(
            LeaveOut.apply(shards, mtf.logical_not(fresh)), variables, self._slots
        )
        came = mtf.cast(fresh, tf.int32)
        count = before.count.value + mtf.reduce_sum(came, output_shape=mtf.Shape([]))
        due = mtf.greater_equal(count, self._to_aggregate)

        def update(sums: list[mtf.Tensor | None]) -> list[mtf.Operation]:
            totals = self._summed(sums, variables)
            mean = [g if g is None else mtf.divide(g, mtf.cast(count, g.dtype)) for g in totals]
            operations = self._apply_inner(mean, variables)
            if self._decay is None:
                return operations
            return [*operations, *updated_averages(self._decay, self._averaged, operations)]

        gate, updates = accumulators.when_due(due, update)
        made = mtf.cast(due, tf.int32)
        update_step = before.update_step.value + made
        now = ReplicaState(
            local_step=steps * (1 - made) + mtf.broadcast(update_step * made, steps.shape),
            made=before.made.value + came,
            dropped=before.dropped.value + (1 - came),
            count=count * (1 - made),
            update_step=update_step,
            waiting=(before.waiting.value + 1) * (1 - made),
        )
        check = self._limit and _Limit(now.waiting, mtf.anonymize(came), self._limit)
        writes = [mtf.assign(v, x) for v, x in zip(before, now)]
        settle(gate)

        def wait(lowering: mtf.Lowering) -> list[tf.Operation]:
            return [gate.barrier(lowering), *([check.done(lowering)] if check else [])]

        after(writes, wait)
        self._report(now)
        return [*updates, *writes]

    def _make_state(self, mesh: mtf.Mesh) -> ReplicaState:
        shape = mtf.Shape(list(self.axes.shard_dims))

        def of_replicas(name: str) -> mtf.Variable:
            variable = state_variable(mesh, f"{self.name}/{name}", shape, tf.int32)
            note_per_shard(variable, shape.ndims)
            return variable

        return ReplicaState(
            *[of_replicas(name) for name in ReplicaState._fields[:3]],
            *[counter(mesh, f"{self.name}/{name}") for name in ReplicaState._fields[3:]],
        )

    def _fresh(self, shards: Sequence[mtf.Tensor | None], steps: mtf.Tensor) -> mtf.Tensor:
        """Which replicas contribute in this step, boolean `[shard dims...]`."""
        present = [g for g in shards if g is not None]
        bad = shards_not_finite(present, self.axes, self.reducer)
        fresh = mtf.logical_and(
            mtf.less_equal(bad, 0.0),
            mtf.greater_equal(steps, mtf.broadcast(self._state.update_step.value, steps.shape)),
        )
        if self._contributes is None:
            return fresh
        mask = self._contributes
        if not isinstance(mask, mtf.Tensor):
            mask = tf.reshape(tf.cast(mask, tf.int32), steps.shape.to_integer_list)
            mask = mtf.greater(mtf.import_tf_tensor(steps.mesh, mask, steps.shape), 0)
        return mtf.logical_and(fresh, mask)

    def _report(self, now: ReplicaState) -> None:
        def total(x: mtf.Tensor) -> mtf.Tensor:
            return mtf.reduce_sum(x, output_shape=mtf.Shape([]))

        self._progress = {
            "update step": now.update_step,
            "contributions": total(now.made),
            "dropped": total(now.dropped),
        }
        for name, value in self._progress.items():
            mtf.scalar_summary(f"summary/{self.name}/{name.replace(' ', '_')}", value)


class _Limit(mtf.Operation):
    """Fails when too many steps went by without an update."""

    def __init__(self, waiting: mtf.Tensor, came: mtf.Tensor, limit: int):
        super().__init__([waiting, came], name="max_steps_without_update")
        self._limit = limit
        self._done: Any = weakref.WeakKeyDictionary()

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        mesh_impl = lowering.mesh_impl(self)
        if isinstance(mesh_impl, mtf.simd_mesh_impl.SimdMeshImpl):
            self._done[lowering] = tf.no_op()
            return
        waiting, came = (lowering.tensors[x].to_laid_out_tensor() for x in self.inputs)
        waiting, came = waiting.tensor_list[0], came.tensor_list[0]
        self._done[lowering] = tf.Assert(
            tf.less_equal(waiting, self._limit),
            [
                f"No update for more than max_steps_without_update={self._limit} steps. These "
                "replicas (shards, row by row) did not contribute in this step:",
                tf.reshape(tf.where_v2(tf.equal(tf.reshape(came, [-1]), 0)), [-1]),
            ],
            summarize=1000,
        )

    def done(self, lowering: mtf.Lowering) -> tf.Operation:
        """The check."""
        return self._done[lowering]


def _check_whole(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of 1 or more, got {value!r}.")
