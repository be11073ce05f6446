"""The replicas of SyncReplicasOptimizer: contributions, freshness, TensorFlow's methods."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import numpy as np

from mtf_gradsync._common import counted, is_whole_number
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients import not_finite, shards_not_finite
from mtf_gradsync.gradients.arguments import is_tensor
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.optimizers.skips import ReportsSkips
from mtf_gradsync.optimizers.state import named_state
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.step.conditional import WatchHook

_OF_REPLICAS = ("local_step", "made", "dropped", "missed")


class ReplicaState(NamedTuple):
    """The int32 counters of the replicas: mesh variables, or their values after a step.

    Attributes:
      local_step: `[shards...]`, the update step that each replica's next gradient is for, unless
        the program gives it.
      made: `[shards...]`, the number of contributions of each replica.
      dropped: `[shards...]`, the number of steps on which a replica did not contribute.
      missed: `[shards...]`, the number of steps since the last contribution of a replica.
      count: the number of contributions since the last update.
      update_step: the number of updates made, which local steps are compared with.
      waiting: the number of steps since the last update.
    """

    local_step: Any
    made: Any
    dropped: Any
    missed: Any
    count: Any
    update_step: Any
    waiting: Any


def make_state(mesh: mtf.Mesh, name: str, shard_dims: Sequence[mtf.Dimension]) -> ReplicaState:
    """Makes the counters of the replicas, as variables on `mesh`; checkpoints hold them.

    The variable of each field of `ReplicaState` is called `<name>/<field>`, where `name` is the
    wrapper's name. `shard_dims` are the dimensions that number the replicas. If a checkpoint is
    from another number of shards, the counts of its shards are added up or moved to other shards,
    and local_step is update_step for every replica. If a checkpoint has no counters, update_step
    begins with the checkpoint's global step.
    """
    of_replicas = mtf.anonymous_shape(mtf.Shape(list(shard_dims)))
    # In a run without the wrapper every step was an update.
    starts = {"local_step": f"{name}/update_step", "update_step": "global_step"}
    fills: dict[str, float | str] = {"local_step": f"{name}/update_step", "missed": 0}

    def make(field: str) -> mtf.Variable:
        # Not stacked, as a `Watch` cannot find a stacked variable.
        shape = of_replicas if field in _OF_REPLICAS else mtf.Shape([])
        return named_state(
            mesh,
            f"{name}/{field}",
            shape,
            start=starts.get(field, 0),
            num_shard_dims=shape.ndims,
            fill=fills.get(field),
        )

    return ReplicaState(*map(make, ReplicaState._fields))


def after_step(
    before: ReplicaState,
    steps: mtf.Tensor,
    contributed: mtf.Tensor,
    count: mtf.Tensor,
    updated: mtf.Tensor,
) -> ReplicaState:
    """Returns the values that the counters get in a step, as int32 mtf tensors.

    Args:
      before: the mtf variables of the counters.
      steps: `[shards...]`, the update step that each replica's gradient is for.
      contributed: `[shards...]`, 1 for replicas that contributed in this step, else 0.
      count: the number of contributions since the last update, including this step's.
      updated: 1 if the step made an update, else 0.
    """
    update_step = before.update_step.value + updated
    return ReplicaState(
        local_step=steps * (1 - updated) + mtf.broadcast(update_step * updated, steps.shape),
        made=before.made.value + contributed,
        dropped=before.dropped.value + (1 - contributed),
        missed=(before.missed.value + 1) * (1 - contributed),
        count=count * (1 - updated),
        update_step=update_step,
        waiting=(before.waiting.value + 1) * (1 - updated),
    )


class ReplicaSummaries(mtf.Operation):
    """An operation that adds a scalar summary of each replica's count, `<name>/replica_0` etc.

    `counts` is an mtf tensor with a count for each replica, the same on all processors.
    """

    def __init__(self, name: str, counts: mtf.Tensor):
        super().__init__([counts], name=name)

    def lower(self, lowering: mtf.Lowering) -> None:
        (counts,) = self.inputs
        shared = lowering.tensors[counts].to_laid_out_tensor().all_slices[0]
        values = tf.unstack(tf.reshape(shared, [-1]), counts.shape.size)
        for number, value in enumerate(values):
            summary = (f"{self.name}/replica_{number}", value)
            tf.add_to_collection(mtf.utils.SCALAR_SUMMARIES_COLLECTION_KEY, summary)


def check_per_replica(name: str, kind: str, value: Any, axes: ReplicaAxes) -> None:
    """Raises TypeError or ValueError for an argument that is not one value per replica.

    Args:
      name: the argument's name, for the error.
      kind: what each value has to be: "whole number", or "boolean", for which whole numbers are
        allowed, too (0 for False).
      value: the argument: an mtf tensor with the shard dims, or a tf tensor, array or list of shape
        `[num_shards]` or of the sizes of the shard dims. None passes.
      axes: the replica axes, whose shards are the replicas.
    """
    if value is None:
        return
    dims = list(axes.shard_dims)
    # A flat list, or a tensor with the sizes of the shard dims.
    shapes = list(dict.fromkeys([(axes.num_shards,), tuple(d.size for d in dims)]))
    wanted = (
        f"{name} must have one {kind} for each of the {axes.num_shards} replicas: an mtf tensor "
        f"of shape {mtf.Shape(dims).to_string}, or a tf tensor, array or list of shape "
        + " or ".join(str(list(shape)) for shape in shapes)
    )
    if is_tensor(value):
        shape, dtype = value.shape, value.dtype.base_dtype
    else:
        try:
            array = np.asarray(value)
            shape, dtype = tf.TensorShape(array.shape), tf.as_dtype(array.dtype)
        except (TypeError, ValueError, NotImplementedError):
            # Lists of unequal lengths, of tensors, or of other objects than numbers.
            raise TypeError(f"{wanted}; got {value!r}.") from None
    if not (dtype.is_integer or (kind == "boolean" and dtype == tf.bool)):
        raise TypeError(f"{wanted}; got the dtype {dtype.name} of {value!r}.")
    if isinstance(value, (mtf.Tensor, mtf.Variable)):
        fits = set(shape.dims) == set(dims)
    else:
        fits = any(shape.is_compatible_with(x) for x in shapes)
    if not fits:
        raise ValueError(f"{wanted}; got the shape {shape} of {value!r}.")


def check_tensor_mesh(name: str, value: Any, mesh: mtf.Mesh) -> None:
    """Raises ValueError if an argument is an mtf tensor that is not on `mesh`.

    `value` is the argument, and `name` its name, for the error. A value that is no mtf tensor or
    variable is accepted.
    """
    if isinstance(value, (mtf.Tensor, mtf.Variable)) and value.mesh is not mesh:
        raise ValueError(
            f"{name}={value!r} is on another mesh than the variables; give a tensor on their mesh."
        )


def steps_of_gradients(local_steps: Any, variable: mtf.Variable, axes: ReplicaAxes) -> mtf.Tensor:
    """Returns, for each replica, the update step for which its gradient was computed.

    `local_steps` is the argument of `SyncReplicasOptimizer`, a whole number for each replica. If
    `local_steps` is None, the result is the value of `variable`, the counter
    `ReplicaState.local_step`. The result is an int32 mtf tensor of the shape of `variable`, the
    same on every processor. `axes` are the replica axes, whose shards are the replicas.
    """
    if local_steps is None:
        return variable.value
    return _import_per_replica(
        local_steps, variable.mesh, mtf.Shape(list(axes.shard_dims)), variable.shape
    )


def fresh_replicas(
    per_shard: Sequence[mtf.Tensor],
    reduced: Sequence[mtf.Tensor],
    steps: mtf.Tensor,
    update_step: mtf.Variable,
    contributes: Any,
    weights: mtf.Tensor | None,
    axes: ReplicaAxes,
    strategy: Strategy,
) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Returns which replicas contribute, and which would if all gradients were finite.

    A replica contributes if its gradient is finite and not stale, `contributes` is true for it, and
    its weight is not 0. A gradient is stale if its step is less than the update step.

    Args:
      per_shard: per-shard gradients.
      reduced: gradients that are summed over all replicas: a NaN in one of these keeps all replicas
        from contributing.
      steps: the update step that each replica's gradient is for, from `steps_of_gradients`.
      update_step: the variable with the number of updates made.
      contributes: the argument of `SyncReplicasOptimizer`: a value for each replica; None for all.
      weights: float32 `[shard dims...]`, the weight of each replica, 0 if it has no data; None if
        there are no weights.
      axes: the replica axes.
      strategy: the reduction strategy, for flags of gradients that are not finite.

    Returns:
      Two boolean mtf tensors `[shard dims...]`, split over the replica axes.
    """
    dims = mtf.Shape(list(axes.shard_dims))
    # A processor has a full reduced gradient, unless the layout splits it over a replica axis.
    split = [g for g in reduced if axes.free_shard_dims(g.shape) != axes.shard_dims]
    shards = [*per_shard, *(g for g in reduced if g not in split)]
    found = [shards_not_finite(shards, axes, strategy)] if shards else []
    if split:
        found.append(mtf.broadcast(not_finite(split, strategy), dims))
    bad = mtf.add_n(found)
    behind = mtf.broadcast(update_step.value, steps.shape) - steps
    # Each processor takes its own slice of a tensor that all of them have: nothing is sent.
    behind = mtf.reshape(behind, bad.shape)
    wanted = mtf.less_equal(behind, 0)
    if contributes is not None:
        mask = _import_per_replica(contributes, bad.mesh, bad.shape, bad.shape)
        wanted = mtf.logical_and(wanted, mtf.not_equal(mask, 0))
    if weights is not None:
        wanted = mtf.logical_and(wanted, mtf.greater(weights, 0.0))
    return mtf.logical_and(mtf.less_equal(bad, 0.0), wanted), wanted


def _import_per_replica(
    value: Any, mesh: mtf.Mesh, shard_shape: mtf.Shape, result_shape: mtf.Shape
) -> mtf.Tensor:
    """Returns a value per replica as an int32 mtf tensor of shape `result_shape`.

    `value` has passed `check_per_replica`. It has a whole number or a boolean (1 for True) for each
    replica. `shard_shape` has the shard dims, in the order that numbers the replicas.
    `result_shape` has the same sizes as `shard_shape`, but the dimensions may have other names. The
    result is on `mesh`.
    """
    value = value.value if isinstance(value, mtf.Variable) else value
    if isinstance(value, mtf.Tensor):
        whole_numbers = mtf.cast(value, tf.int32)
        if value.shape != shard_shape:
            whole_numbers = mtf.transpose(whole_numbers, shard_shape)
        return mtf.reshape(whole_numbers, result_shape)
    return mtf.import_tf_tensor(
        mesh, tf.reshape(tf.cast(value, tf.int32), result_shape.to_integer_list), result_shape
    )


class EmptyQueueRunner(tf.train.QueueRunner):
    """A queue runner without threads: the update is part of the training step of a mesh."""

    def __init__(self) -> None:
        # The parent's constructor is not called, as it needs a queue.
        self._exceptions_raised: list[Exception] = []

    @property
    def name(self) -> str:
        """The name that the queue of TensorFlow's optimizer has, `sync_token_q`."""
        return "sync_token_q"

    def create_threads(
        self, sess: Any, coord: Any = None, daemon: bool = False, start: bool = False
    ) -> list[Any]:
        """Returns an empty list of threads, whatever the arguments are: there is nothing to queue.

        The arguments are those with which TensorFlow calls a `tf.train.QueueRunner`.
        """
        del sess, coord, daemon, start
        return []


class SyncReplicasHook(WatchHook):
    """A hook that checks that a session can train, and on TPUs that it makes updates."""

    def __init__(self, optimizer: SessionInterface, is_chief: bool, num_tokens: int):
        """Makes the hook; `SessionInterface.make_session_run_hook` calls this.

        Args:
          optimizer: the optimizer whose variables and updates the hook checks.
          is_chief: whether this process is the chief, which checks num_tokens.
          num_tokens: the number of tokens to begin with, as for `get_init_tokens_op`; -1 for
            replicas_to_aggregate.
        """
        super().__init__(lambda: optimizer.steps_without_update)
        self._optimizer, self._is_chief, self._num_tokens = optimizer, is_chief, num_tokens
        self._not_ready: Any = None

    def begin(self) -> None:
        """Raises ValueError if no gradients were applied yet, or num_tokens is too small."""
        self._optimizer._check_applied("its hook is used")
        if self._is_chief:
            self._optimizer.get_init_tokens_op(self._num_tokens)
        with tf.control_dependencies(None):
            self._not_ready = tf.report_uninitialized_variables(tf.global_variables())
        super().begin()

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Raises RuntimeError if variables are not initialized."""
        missing = [name.decode() for name in session.run(self._not_ready)]
        if missing:
            raise RuntimeError(
                "The model is not ready for SyncReplicasOptimizer, as variables are not "
                f"initialized: {counted(missing, 'variable')}. Run their initializers first."
            )
        super().after_create_session(session, coord)


class SessionInterface(ReportsSkips):
    """A wrapper with the methods of `tf.compat.v1.train.SyncReplicasOptimizer` for sessions."""

    axes: ReplicaAxes
    _to_aggregate: int

    def make_session_run_hook(  # type: ignore[override]  # the arguments are TensorFlow's
        self, is_chief: bool, num_tokens: int = -1
    ) -> SyncReplicasHook:
        """Returns a hook that checks that variables are initialized, and that updates are made.

        Once the session exists, the hook checks that variables are initialized. On TPUs the hook
        raises `NoUpdateError` after more than max_steps_without_update steps without an update;
        on other devices the step or the session raises this error.

        Args:
          is_chief: whether this process is the chief, which checks num_tokens.
          num_tokens: the number of tokens to begin with; -1 for replicas_to_aggregate. On a mesh
            nothing uses tokens, but too few raise an error, as in TensorFlow's optimizer.

        Returns:
          A `tf.train.SessionRunHook`. Its `begin` raises ValueError if gradients were not applied
          before, or num_tokens are too few.
        """
        return SyncReplicasHook(self, is_chief, num_tokens)

    def get_init_tokens_op(self, num_tokens: int = -1) -> tf.Operation:
        """Returns an operation that does nothing, as replicas in lock step need no tokens.

        A token lets a replica of TensorFlow's optimizer begin its next step. On a mesh all
        replicas take every step together.

        Args:
          num_tokens: tokens to begin with; -1 for replicas_to_aggregate. It is checked as by
            TensorFlow's optimizer.

        Returns:
          A tf operation.

        Raises:
          ValueError: gradients were not applied before, or num_tokens is less than
            replicas_to_aggregate - total_num_replicas.
        """
        self._check_applied("get_init_tokens_op")
        needed = self._to_aggregate - self.axes.num_shards
        if not is_whole_number(num_tokens, -1):
            raise ValueError(f"num_tokens must be a whole number, or -1, got {num_tokens!r}.")
        if num_tokens != -1 and num_tokens < needed:
            raise ValueError(
                f"Too few tokens to finish the first step: num_tokens={num_tokens}, and "
                f"replicas_to_aggregate - total_num_replicas is {needed}."
            )
        return tf.no_op(name="init_tokens")

    def get_chief_queue_runner(self) -> tf.train.QueueRunner:
        """Returns a queue runner without threads, as the update is part of the training step.

        Raises:
          ValueError: gradients were not applied before.
        """
        self._check_applied("get_chief_queue_runner")
        return EmptyQueueRunner()
