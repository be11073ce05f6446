"""SyncReplicasOptimizer: makes an update once enough shards have contributed fresh gradients."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Mapping, Sequence, Union

import gin

from mtf_gradsync import compat_v1
from mtf_gradsync._common import check_flag, check_whole_number, counted, elements
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.compat_v1 import NOT_GIVEN, OptimizerLike, given_optimizer, is_v1
from mtf_gradsync.compat_v1.opt_argument import refuse_with_v1
from mtf_gradsync.gradients import arguments
from mtf_gradsync.gradients.arguments import PassedOnArguments
from mtf_gradsync.gradients.measures import NotFinite
from mtf_gradsync.gradients.reduce_gradients import GradientFromSums
from mtf_gradsync.gradients.shards import Recoverability, SumGradients, split_into_shards
from mtf_gradsync.mesh.axes import LayoutLike, MeshShapeLike, ReplicaAxes
from mtf_gradsync.optimizers import replicas
from mtf_gradsync.optimizers.average import KeepsAverages, MoveAverages, check_averages
from mtf_gradsync.optimizers.pipeline.accumulators import (
    Accumulators,
    ZerosWhere,
    multiply_by_count,
)
from mtf_gradsync.optimizers.pipeline.builder import StepBuilder
from mtf_gradsync.optimizers.pipeline.forms import Form, GradientSet, Mask, PerShard
from mtf_gradsync.optimizers.pipeline.stack import ONE_FOR_EACH_MESH, Condition, Place, Stage
from mtf_gradsync.optimizers.pipeline.words import About, Line
from mtf_gradsync.optimizers.skips import Skips, check_limit
from mtf_gradsync.optimizers.wrapper import CommonArguments, StepAttribute
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.reduce.compressed import WireDtype


@gin.configurable(module="mtf_gradsync")
class SyncReplicasOptimizer(replicas.SessionInterface, KeepsAverages):
    """A wrapper that averages fresh gradients of replicas, and applies them once there are enough.

    The replicas are the shards of the mesh, which all take every step. In a step a replica does not
    contribute its gradient if the gradient is stale (computed for an older update step) or not
    finite, or if the mask `contributes` leaves the replica out. In all other cases it contributes
    the gradient. After `replicas_to_aggregate` contributions, in one step or several, their average
    is applied once, and the local step of every replica becomes the new update step. On other steps
    variables and slots do not change.

    The loss is the mean of the replicas' losses. It is given as a scalar, or as a tensor with the
    shard dims, which has one loss for each replica; `compute_gradients` averages these losses. So
    the gradient is a sum of one term for each replica, and the term is 1/num_shards of the
    replica's contribution. When all replicas contribute, the update is that of the whole batch.

    The state is in variables: `<variable>/gradient_accumulator` for each variable; for each replica
    `<name>/local_step`, `<name>/made` (contributions), `<name>/dropped` (steps without a
    contribution) and `<name>/missed` (steps since the last contribution); and `<name>/count`
    (contributions since the last update), `<name>/update_step` (updates) and `<name>/waiting`
    (steps since the last update).

    References:
      https://www.tensorflow.org/api_docs/python/tf/compat/v1/train/SyncReplicasOptimizer

    Examples:
      >>> mesh = {"mesh_shape": "all:4", "layout": "batch:all"}
      >>> opt = gs.SyncReplicasOptimizer(mtf.optimize.SgdOptimizer(0.1), 3, **mesh)
      >>> print(gs.describe(opt))
      every step          add up gradients of replicas, if finite and not stale          (sync...)
      once 3 contributed  reduce over batch, 4 shards: fused; average the contributions  (sync...)
                          update by Sgd
    """

    shown = (
        ("update step", "update_step"),
        ("made", "sync_replicas/contributions"),
        ("dropped", "sync_replicas/dropped"),
    )
    _weight = StepAttribute[Union[mtf.Variable, None]](None)

    def __init__(
        self,
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
        reduce_dtype: WireDtype | None = None,
    ) -> None:
        """Wraps an optimizer.

        Args:
          opt: a Mesh-TF optimizer, or a class or factory of one. With an optimizer of
            `tf.compat.v1.train` the result is `tf.compat.v1.train.SyncReplicasOptimizer`, and
            arguments for the mesh have no effect. A subclass takes mesh optimizers only.
          replicas_to_aggregate: the number of contributions to an update, 1 or more. With fewer
            than there are replicas, some may skip a step; with more, an update takes several steps.
          total_num_replicas: number of shards; None takes the mesh's.
          variable_averages: decay of moving averages, or a `tf.train.ExponentialMovingAverage`.
          variables_to_average: the variables to average; only with variable_averages.
          use_locking: has no effect.
          name: name of the wrapper, prefix of its state.
          contributes: which replicas may contribute in this step, one boolean for each: a tf
            tensor, array or list of shape `[num_shards]`, or of the sizes of the shard dims, or an
            mtf tensor of shape `[shard dims...]`. None for all.
          local_steps: the update step for which each replica has computed its gradient of this
            step: whole numbers, in the same shapes. None takes the variable `<name>/local_step`,
            which each update sets to the new update step for all replicas.
          max_steps_without_update: the largest number of steps in a row without an update. One more
            raises an error that lists the replicas that did not contribute, and the variables whose
            gradients are not finite (see `NoUpdateError`). None for no limit.
          accept_summed: whether to accept gradients that are reduced already, so that replicas are
            mixed in them (the program has clipped them by the global norm, for example). Replicas
            that do not contribute are then in the sum, too, and a NaN of one replica keeps all
            replicas from contributing.
          learning_rate: the learning rate for opt; only if opt is a class or factory.
          axes: the replica axes (`ReplicaAxes`); or give mesh_shape and layout. Without either
            they are those of the mesh that the program has made for this graph.
          mesh_shape: Mesh-TF's mesh shape.
          layout: Mesh-TF's layout rules.
          batch_dims: names of the tensor dimensions that the batch is split along.
          reducer: the reduction strategy; None takes `FusedAllReduce()`.
          reduce_dtype: the dtype that gradients are sent in, by `CompressedAllReduce`: "bfloat16",
            "float16" or the tf dtype. Accumulators keep their dtype, and each processor's sum is
            rounded once. None sends the accumulators' dtype. Sharded updates use their own reducer.

        Raises:
          ValueError: an argument is out of range, or there is no mesh.
          TypeError: an argument has the wrong type, or opt is a Keras optimizer.
        """
        replicas_to_aggregate = check_whole_number("replicas_to_aggregate", replicas_to_aggregate)
        accept_summed = check_flag("accept_summed", accept_summed)
        limit = check_limit(max_steps_without_update)
        opt = given_optimizer(opt, learning_rate, type(self).__name__)
        if type(self) is SyncReplicasOptimizer and is_v1(opt):
            refuse_with_v1(
                opt,
                contributes=contributes,
                local_steps=local_steps,
                max_steps_without_update=max_steps_without_update,
            )
            self._turn_into_v1(
                compat_v1.SyncReplicasOptimizer,
                opt,
                replicas_to_aggregate,
                total_num_replicas,
                variable_averages=variable_averages,
                variables_to_average=variables_to_average,
                use_locking=use_locking,
                name=name,
            )
            return
        rule, averaged = check_averages(variable_averages, variables_to_average)
        common = CommonArguments(name, axes, mesh_shape, layout, batch_dims, reducer)
        self._wrap(opt, common, "the replicas", reduce_dtype)
        if total_num_replicas not in (None, self.axes.num_shards):
            raise ValueError(
                f"total_num_replicas must be the mesh's number of shards, {self.axes.num_shards} "
                f"for {self.axes!r}, got {total_num_replicas!r}."
            )
        replicas.check_per_replica("contributes", "boolean", contributes, self.axes)
        replicas.check_per_replica("local_steps", "whole number", local_steps, self.axes)
        del use_locking
        self._to_aggregate = replicas_to_aggregate
        self._rule, self._averaged = rule, averaged
        self._contributes, self._local_steps = contributes, local_steps
        self._limit = limit
        self._accept_summed = accept_summed
        self._check_order()

    def _check_step(self, global_step: Any, name: Any) -> None:
        if global_step is None:
            raise ValueError(
                "A global step is required to recognise stale gradients, got None: give "
                "global_step, a scalar mtf or tf variable that counts updates, or use apply_grads."
            )
        super()._check_step(global_step, name)

    def stages(self, place: Place) -> list[Stage]:
        axes = place.axes
        assert axes is not None  # as the wrapper needs to know the mesh
        return [
            _AggregateReplicas(self, axes),
            MoveAverages(self._rule, self._averaged, self._slots, self.name),
        ]

    def apply_gradients(
        self,
        grads_and_vars: arguments.GradsAndVars,
        global_step: Any = None,
        name: Any = None,
        weights: Any = None,
        **kwargs: Any,
    ) -> list[mtf.Operation]:
        """Takes this step's contributions, and applies the average once there are enough.

        Args:
          grads_and_vars: pairs as `compute_gradients` returns them.
          global_step: an mtf or tf variable, required. Steps with an update add one to it.
          name: name of the operation that advances global_step; None takes the wrapper's name.
          weights: how much the loss of the step stands for, such as its number of examples. None
            takes the weights that `compute_gradients` was given, if any.
          **kwargs: more arguments for `apply_grads` of the innermost optimizer.

        Returns:
          A flat list of mtf operations.

        Raises:
          TypeError: an argument has the wrong type.
          ValueError: there is no variable or no global step, or a gradient does not fit.
        """
        listed = elements(grads_and_vars)
        if listed == []:
            raise ValueError(f"Must supply at least one variable, got grads_and_vars={listed!r}.")
        self._check_step(global_step, name)
        pairs = arguments.check_pairs(grads_and_vars if listed is None else listed)
        if all(grad is None for grad, _ in pairs):
            return self.apply_grads(*zip(*pairs), weights=weights, **kwargs)
        return super().apply_gradients(pairs, global_step, name, weights, **kwargs)

    @property
    def update_step_now(self) -> mtf.Tensor | None:
        """The number of updates made, including the current step's: an int32 mtf scalar.

        The number is to be fetched together with the step. The attribute is None before there is a
        step.
        """
        return self._now and self._now.update_step

    @property
    def in_sums_now(self) -> mtf.Tensor | None:
        """The number of contributions since the last update, including the current step's.

        The number is an int32 mtf scalar, to be fetched together with the step. The attribute is
        None before there is a step.
        """
        return self._now and self._now.count

    def reported(self) -> dict[str, mtf.Tensor]:
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
        """Returns all variables of the stack: the inner optimizer's, then the wrapper's."""
        return super().variables() + ([self._weight] if self._weight else [])


@dataclasses.dataclass(frozen=True)
class _AggregateReplicas(Stage):
    """The stage that adds up replicas' contributions, and passes on their average.

    Later stages and the update run only in steps in which there are enough contributions for an
    update.
    """

    wrapper: SyncReplicasOptimizer
    axes: ReplicaAxes
    gives, _leaves = Form.REDUCED, Form.PENDING
    finite = "skips"
    _divides = "average the contributions"
    _wants_reduced = _counts_shards = True
    _one_mesh, _sums_in = ONE_FOR_EACH_MESH, "wide"

    @property
    def _needs_shards(self) -> bool:
        return not self.wrapper._accept_summed and self.axes.num_shards > 1

    @property
    def _skips_shards(self) -> bool:  # type: ignore[override]
        return self._needs_shards

    @property
    def takes(self) -> PerShard:  # type: ignore[override]
        if self._needs_shards:
            return PerShard("refuse", "give it accept_summed=True", recomputes=True)
        return PerShard("reduce", recomputes=True)

    @property
    def _can_update_each_step(self) -> bool:
        """Whether one step can have enough contributions for an update."""
        return self.wrapper._to_aggregate <= self.axes.num_shards

    @property
    def condition(self) -> Condition:  # type: ignore[override]
        when = f"once {self.wrapper._to_aggregate} contributed"
        return Condition(when, as_call=not self._can_update_each_step)

    def describe(self, about: About) -> list[Line]:
        asked = " that are asked to contribute" * (self.wrapper._contributes is not None)
        return [Line(f"add up gradients of replicas{asked}, if finite and not stale")]

    def check(
        self,
        grads: Sequence[mtf.Tensor | None],
        variables: Sequence[mtf.Variable],
        arguments: PassedOnArguments,
    ) -> None:
        wrapper = self.wrapper
        for grad, variable in zip(grads, variables):
            if grad is not None and wrapper._has_own_copy(variable):
                raise ValueError(
                    f"Variable {variable.name!r} of shape {variable.shape.to_string} has the "
                    "shard dims, a copy for each replica: SyncReplicasOptimizer averages the "
                    "gradients of variables that replicas share."
                )
        if not variables:
            return
        if self._needs_shards:
            own = [None if g is None or wrapper._shard_dims(g.shape) else g for g in grads]
            names = [f"variable {v.name!r}" for v in variables]
            Recoverability(own, self.axes).check(names, recomputes=True)
        mesh = variables[0].mesh
        replicas.check_tensor_mesh("contributes", wrapper._contributes, mesh)
        replicas.check_tensor_mesh("local_steps", wrapper._local_steps, mesh)
        elsewhere = [v.name for v in wrapper._averaged if v.mesh is not mesh]
        if elsewhere:
            raise ValueError(
                f"variables_to_average has {counted(elsewhere, 'variable')} of another mesh or "
                "graph than the variables with gradients; make an optimizer for each graph."
            )

    def apply(self, gradients: GradientSet, step: StepBuilder) -> GradientSet:
        wrapper, given = self.wrapper, gradients
        axes, reducer, mesh = self.axes, wrapper.reducer, gradients.mesh
        make = functools.partial(replicas.make_state, mesh, wrapper.name, axes.shard_dims)
        before = step.state(wrapper, make)
        steps = replicas.steps_of_gradients(wrapper._local_steps, before.local_step, axes)
        own, reduced, parts = _split_by_replica(gradients, axes, reducer)
        weights = gradients.weights
        weight_of = weights and weights.by_shard(axes)
        fresh, wanted = replicas.fresh_replicas(
            own, reduced, steps, before.update_step, wrapper._contributes, weight_of, axes, reducer
        )
        # Besides gradients, only this flag is reduced over the replica axes.
        contributed = mtf.anonymize(mtf.cast(fresh, tf.int32))
        contributions, weight = mtf.reduce_sum(contributed), None
        if weights is not None:
            weight = mtf.reduce_sum(mtf.cast(fresh, tf.float32) * weight_of)
        mask = Mask(contributions, weight, mtf.logical_not(fresh), asked=wanted)
        gradients = dataclasses.replace(gradients, mask=mask)
        # All replicas contribute, and there are no contributions of earlier steps.
        alone = mtf.equal(mtf.reduce_min(contributed) - before.count.value, 1)
        accumulators = Accumulators(
            _sum_contributions(gradients, parts, wrapper),
            wrapper._slots,
            is_share=True,
            # If one step can be enough, only steps that are not enough need accumulators.
            direct=alone if self._can_update_each_step else None,
            owner=wrapper.name,
            counter=before.count.name,
        )
        count = before.count.value + contributions
        due = mtf.greater_equal(count, wrapper._to_aggregate)
        gate = accumulators.add(step)
        now = replicas.after_step(before, steps, contributed, count, mtf.cast(due, tf.int32))
        writes = [mtf.assign(v, x) for v, x in zip(before, now)]
        divisor = mtf.cast(count, tf.float32) / axes.num_shards
        if weight is not None:
            divisor = accumulators.weight
            kept = 1.0 - mtf.cast(due, tf.float32)
            writes.append(mtf.assign(accumulators.weight_state, divisor * kept))
        step.write(writes, gate)
        skips: Skips | None = None
        if wrapper._limit:
            skips = Skips(
                wrapper.name,
                [v.name for v in given.owners],
                [f"(shard {number})" for number in range(axes.num_shards)],
                last="Not finite in the last step:",
                waiting=[before.waiting],
                limit=wrapper._limit,
                missed=[before.missed],
            )
            step.at_end(skips.end_of_step)
            with step.branch_when(mtf.greater(now.waiting, wrapper._limit), gate):
                found = NotFinite(given.present, axes, reducer).outputs[0]
                step.add(skips.report([mtf.anonymize(found)]))
        mtf.scalar_summary(f"summary/{wrapper.name}/update_step", now.update_step)
        replicas.ReplicaSummaries(f"summary/{wrapper.name}/made", now.made)
        replicas.ReplicaSummaries(f"summary/{wrapper.name}/dropped", now.dropped)

        def note() -> None:
            wrapper._set_step_attributes(before, now, skips)
            wrapper._weight = accumulators.weight_state

        step.when_built(note)
        if weight is not None:
            return accumulators.take_when(due, step, gate, weight=divisor)
        share = 1.0 / axes.num_shards
        return accumulators.take_when(due, step, gate, divisor, of_reduced=share)


# For some gradients, by position, each replica's parts of the sums that they are made of.
_Parts = Mapping[int, Sequence[mtf.Tensor]]


def _split_by_replica(
    gradients: GradientSet, axes: ReplicaAxes, reducer: Strategy
) -> tuple[list[mtf.Tensor], list[mtf.Tensor], _Parts]:
    """Splits gradients into those of single replicas, reduced ones, and replicas' terms of sums.

    Some reduced gradients are computed from sums over the replicas (`GradientSet.from_sums`), so
    that each replica's term of these sums can still be read.

    Args:
      gradients: the gradients, per shard or reduced.
      axes: the replica axes.
      reducer: the reduction strategy.

    Returns:
      Three values. A list of tensors in which a NaN stops only one replica from contributing: the
      gradients of single replicas, and the replicas' terms of sums that are in the third value. A
      list of the reduced gradients in which replicas are mixed. And a dictionary: for the position
      in the set of each gradient that is computed from sums, the list of the terms of these sums, a
      tensor `[shard dims...] + sum dims` for each sum.
    """
    made = gradients.from_sums
    sums = [x for one in made.values() for x in one.sums]
    each = iter(split_into_shards(sums, axes, reducer, accept_summed=False))
    parts = {i: [x for _, x in zip(one.sums, each) if x is not None] for i, one in made.items()}
    own = [x for some in parts.values() for x in some]
    reduced: list[mtf.Tensor] = []
    for i, grad in enumerate(gradients.grads):
        if grad is not None and i not in made:
            (reduced if i in gradients.already_reduced else own).append(grad)
    return own, reduced, parts


def _sum_contributions(
    gradients: GradientSet, parts: _Parts, wrapper: SyncReplicasOptimizer
) -> GradientSet:
    """Makes every reduced gradient in a set the sum of the contributions to this step.

    A gradient that can be computed again from sums over the replicas is computed without the terms
    of skipped replicas. In any other reduced gradient, replicas cannot be told apart. Such a
    gradient is the mean over all replicas, and is multiplied by the number of contributions or by
    their total weight. Per-shard gradients stay as they are.

    Args:
      gradients: the gradients of the step, with the mask of replicas.
      parts: for some gradients, each replica's terms of sums, as `_split_by_replica` returns them.
      wrapper: the wrapper, which has the replica axes and the reduction strategy.
    """
    axes, reducer, mask = wrapper.axes, wrapper.reducer, gradients.mask
    assert mask is not None
    counts = mask.number if mask.weight is None else mask.weight

    def contribution(term: mtf.Tensor) -> mtf.Tensor:
        # The terms are 1/num_shards of the contributions, or parts of the sum of the weights.
        if gradients.weights is None:
            return term * float(axes.num_shards)
        return mtf.cast(multiply_by_count(gradients.weights.total, term), term.dtype)

    def made_again(one: GradientFromSums, some: Sequence[mtf.Tensor]) -> mtf.Tensor:
        kept = [contribution(x) for x in ZerosWhere(some, mask.skipped).outputs]
        dims = [[d for d in x.shape.dims if d in axes.shard_dims] for x in kept]
        sums = SumGradients(kept, dims, reducer, axes.batch_dims).outputs
        # The operations that compute the gradient take each input in the same dtype as before.
        shared = [mtf.cast(multiply_by_count(counts, x), x.dtype) for x in one.shared]
        return one.compute_from(sums, shared)

    again = {i: made_again(one, parts[i]) for i, one in gradients.from_sums.items()}
    counted = gradients.change_reduced(lambda g: multiply_by_count(counts, g))
    return counted.with_grads([again.get(i, g) for i, g in enumerate(counted.grads)])
