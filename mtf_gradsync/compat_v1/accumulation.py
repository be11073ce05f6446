"""Wrappers of TensorFlow 1 optimizers without a mesh: counterparts of the mesh wrappers."""

from __future__ import annotations

import contextlib
from typing import Any, Iterable, NamedTuple, Sequence

from mtf_gradsync._common import check_flag, check_whole_number, counted, is_number
from mtf_gradsync._private.libraries import tf
from mtf_gradsync._private.tensorflow import (
    control_flow_v1,
    create_slots,
    number_of_tpu_shards,
    optimizers_inside,
)
from mtf_gradsync.compat_v1.opt_argument import AllReduceFn, OffMesh, Reduction


class _State(NamedTuple):
    """The local variables of one training operation.

    `count` is the number of microbatch steps since the last update. `sums` are the sums of the
    gradients of these steps, one for each gradient that is not None.
    """

    count: tf.Variable
    sums: list[tf.Variable]


class GradientAccumulationOptimizer(OffMesh, tf.train.Optimizer):
    """An optimizer that adds up gradients of several microbatch steps, and applies the sum once.

    The sums are in local variables, on the worker if the graph has several tasks. No checkpoint
    holds the sums, and a restart begins a new accumulation. The sums are initialized together with
    all other local variables (by `tf.compat.v1.local_variables_initializer`,
    MonitoredTrainingSession or Estimator).

    References:
      horovod.tensorflow.DistributedOptimizer(backward_passes_per_step=...)
    """

    def __init__(
        self,
        opt: tf.train.Optimizer,
        backward_passes_per_step: int,
        average_aggregated_gradients: bool = False,
        sparse_as_dense: bool = False,
        allreduce_fn: AllReduceFn | None = None,
        accumulator_dtype: tf.DType | None = None,
        name: str = "GradientAccumulationOptimizer",
    ):
        """Wraps an optimizer.

        Args:
          opt: the optimizer.
          backward_passes_per_step: microbatch steps for each update, 1 or more.
          average_aggregated_gradients: whether to divide the sum by backward_passes_per_step.
          sparse_as_dense: whether to turn `tf.IndexedSlices` into dense gradients. If false,
            `tf.IndexedSlices` are an error.
          allreduce_fn: a function that is called in each update with the sums and their variables.
            It returns what the optimizer is to get in place of the sums, not divided yet.
          accumulator_dtype: the dtype of the sums; None takes the gradient's dtype, but at least
            float32.
          name: prefix of the names of this optimizer's variables and operations.

        Raises:
          TypeError: backward_passes_per_step is a function, which goes with mesh optimizers only.
          ValueError: backward_passes_per_step is no whole number of 1 or more, or opt is a
            SyncReplicasOptimizer.
        """
        if callable(backward_passes_per_step):
            raise TypeError(
                "backward_passes_per_step must be a whole number with a tf.compat.v1 optimizer, "
                f"got {backward_passes_per_step!r}: counters of steps are local variables with "
                "such an optimizer, so that a schedule would begin anew with every session."
            )
        passes = check_whole_number("backward_passes_per_step", backward_passes_per_step)
        if any(isinstance(o, tf.train.SyncReplicasOptimizer) for o in optimizers_inside(opt)):
            raise ValueError(
                "GradientAccumulationOptimizer around SyncReplicasOptimizer would put the queues "
                "of its workers into a conditional. SyncReplicasOptimizer adds up gradients: use "
                "it alone, with replicas_to_aggregate multiplied by "
                f"{backward_passes_per_step}, the backward_passes_per_step."
            )
        super().__init__(use_locking=False, name=name)
        self.opt = self._opt = opt  # the latter for wrappers of others that look inside
        self._passes = passes
        self._average = check_flag("average_aggregated_gradients", average_aggregated_gradients)
        self._sparse_as_dense = check_flag("sparse_as_dense", sparse_as_dense)
        self._allreduce = allreduce_fn
        self._dtype = accumulator_dtype
        self._states: list[_State] = []

    def compute_gradients(self, loss: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """Returns the gradients of one microbatch step, as the inner optimizer computes them.

        The arguments are passed on to `compute_gradients` of the inner optimizer. The result is a
        list of pairs (gradient, variable).

        Raises:
          TypeError: the loss or a variable is one of Mesh-TensorFlow.
        """
        self._refuse_mesh(loss, args, kwargs)
        return self.opt.compute_gradients(loss, *args, **kwargs)

    def apply_gradients(
        self, grads_and_vars: Iterable[Any], global_step: Any = None, name: str | None = None
    ) -> tf.Operation:
        """Adds gradients to the sums; the inner optimizer applies the sums when they are complete.

        Args:
          grads_and_vars: pairs as `compute_gradients` returns them; a gradient may be None.
          global_step: a variable to add one to on every microbatch step, or None.
          name: name of the returned operation.

        Returns:
          The operation that makes a microbatch step, with an update if one is due.

        Raises:
          RuntimeError: there is no graph to build, because execution is eager.
          TypeError: a gradient or variable is one of Mesh-TensorFlow.
          ValueError: there is no gradient, one is sparse and sparse_as_dense is not given, a
            variable's shape is not known, or shards of a TPU program would keep separate sums.
        """
        pairs = list(grads_and_vars)
        self._refuse_mesh(pairs, global_step)
        if self._passes == 1 and self._allreduce is None:
            return self.opt.apply_gradients(pairs, global_step, name)
        self._check(pairs)
        with tf.init_scope():
            if tf.executing_eagerly():
                raise RuntimeError(
                    "GradientAccumulationOptimizer makes operations for sessions of tf.compat.v1: "
                    "use it in a tf.Graph, or after tf.compat.v1.disable_eager_execution()."
                )
        # Made inside the conditional, slots would get its name as a prefix.
        create_slots(self.opt, [v for g, v in pairs if g is not None])
        collected = list(tf.get_collection(tf.GraphKeys.TRAIN_OP))
        with tf.name_scope(name, self.get_name()) as scope:
            grads = [g if g is None else tf.convert_to_tensor(g) for g, _ in pairs]
            variables = [v for _, v in pairs]
            if self._passes == 1:
                step = self._apply(grads, grads, variables, global_step)
            else:
                step = self._micro_step(grads, variables, global_step)
            step = tf.group(step, name=scope)
        # The inner optimizer has put operations of a conditional there, which cannot be fetched.
        train_ops = tf.get_collection_ref(tf.GraphKeys.TRAIN_OP)
        train_ops[:] = [*collected, step]
        return step

    def get_slot(self, var: Any, name: str) -> Any:
        """Returns the inner optimizer's slot `name` of the variable `var`, or None."""
        return self.opt.get_slot(var, name)

    def get_slot_names(self) -> list[str]:
        """Returns the names of the slots of the inner optimizer."""
        return self.opt.get_slot_names()

    def described(self) -> list[tuple[str, Any]]:
        """Returns what `mtf_gradsync.describe` prints about the optimizer, a pair for each line.

        A pair is a text that says what is done, and the number of steps in which it is done once.
        """
        reduces = ["call allreduce_fn"] * (self._allreduce is not None)
        if self._passes == 1:
            return [(what, 1) for what in reduces]
        what = [*reduces, *[f"divide by {self._passes:,}"] * self._average] or ["take the sums"]
        return [("add up gradients on this worker", 1), ("; ".join(what), self._passes)]

    def variables(self) -> list[Any]:
        """Returns the inner optimizer's variables, then the counters and sums of this graph."""
        own = [v for state in self._states for v in (state.count, *state.sums)]
        here = tf.get_default_graph()
        return [*self.opt.variables(), *(v for v in own if v.graph is here)]

    def _check(self, pairs: Sequence[Any]) -> None:
        present = [(g, v) for g, v in pairs if g is not None]
        if not present:
            raise ValueError(
                "No gradients provided for any variable: "
                f"{counted([v.name for _, v in pairs], 'variable')}; check the loss."
            )
        for grad, variable in present:
            if isinstance(grad, tf.IndexedSlices) and not self._sparse_as_dense:
                raise ValueError(
                    f"The gradient of {variable.name!r} is tf.IndexedSlices, which are not added "
                    "up: give sparse_as_dense=True to make it dense."
                )
            if not variable.shape.is_fully_defined():
                raise ValueError(
                    f"{variable.name!r} has the shape {variable.shape}; gradients are added up for "
                    "variables whose shape is known when the graph is built."
                )
        shards = number_of_tpu_shards() or 1
        inside = optimizers_inside(self.opt)
        sums_shards = any(isinstance(o, tf.tpu.CrossShardOptimizer) for o in inside)
        if shards > 1 and self._passes > 1 and (sums_shards or self._allreduce):
            raise ValueError(
                "In a TPU program all cores share the variables, so that no variable can "
                "hold the sums of one core's gradients. Reduce gradients first, by "
                "CrossShardOptimizer(GradientAccumulationOptimizer(opt, ...))."
            )

    def _micro_step(self, grads: Sequence[Any], variables: list[Any], global_step: Any) -> Any:
        state = self._make_state(grads, variables)
        present = [g for g in grads if g is not None]
        added = [s.assign_add(tf.cast(g, s.dtype)).op for s, g in zip(state.sums, present)]
        with tf.control_dependencies(added):
            count = state.count.assign_add(1)

        def update() -> tf.Tensor:
            sums = [s.read_value() for s in state.sums]
            applied = self._apply(sums, grads, variables, global_step)
            with tf.control_dependencies([applied, *sums]):
                cleared = [s.assign(tf.zeros_like(s)).op for s in state.sums]
                cleared.append(state.count.assign(0).op)
            with tf.control_dependencies(cleared):
                return tf.constant(True)

        def skip() -> tf.Tensor:
            passed = []
            if global_step is not None:
                passed.append(tf.assign_add(global_step, tf.ones([], global_step.dtype.base_dtype)))
            with tf.control_dependencies(passed):
                return tf.constant(False)

        written = [*variables, *([] if global_step is None else [global_step])]
        # Functions cannot write reference variables.
        are_references = any(v.dtype != v.dtype.base_dtype for v in written)
        with control_flow_v1() if are_references else contextlib.nullcontext():
            return tf.cond(tf.greater_equal(count, self._passes), update, skip)

    def _apply(
        self, sums: Sequence[Any], grads: Sequence[Any], variables: list[Any], global_step: Any
    ) -> tf.Operation:
        """Returns the operation by which the inner optimizer applies sums of gradients.

        Before the inner optimizer is called, `allreduce_fn` is called, and sums are divided if
        averages are wanted. `grads` are the gradients of this microbatch step, one or None for each
        variable. These gradients only tell which variables have sums, and to which dtypes the sums
        are cast for the inner optimizer. `global_step` is the variable to add one to, or None.
        """
        present = [s for s in sums if s is not None]
        owners = [v for g, v in zip(grads, variables) if g is not None]
        if self._allreduce is not None:
            reduced = list(self._allreduce(present, owners))
            if len(reduced) != len(present):
                raise ValueError(
                    f"allreduce_fn got {len(present)} gradients and returned {len(reduced)}; it "
                    "has to return one gradient for each that it got, in the same order."
                )
            present = reduced
        if self._average and self._passes > 1:
            present = [tf.divide(s, tf.cast(self._passes, s.dtype)) for s in present]
        totals = iter(present)
        pairs = [
            (None if g is None else tf.cast(next(totals), g.dtype), v)
            for g, v in zip(grads, variables)
        ]
        return self.opt.apply_gradients(pairs, global_step)

    def _make_state(self, grads: Sequence[Any], variables: Sequence[Any]) -> _State:
        def zeros(grad: tf.Tensor, variable: Any) -> tf.Tensor:
            wide = grad.dtype if grad.dtype.size >= 4 else tf.float32
            return tf.zeros(variable.shape, self._dtype or wide)

        # On a parameter server workers would share these: they are placed where this operation is.
        with tf.init_scope():
            here = tf.no_op(name="here")
            with here.graph.colocate_with(here):
                state = _State(
                    _local(tf.zeros([], tf.int32), "mini_step"),
                    [
                        _local(zeros(g, v), v.op.name)
                        for g, v in zip(grads, variables)
                        if g is not None
                    ],
                )
        self._states.append(state)
        return state


def _local(value: tf.Tensor, name: str) -> tf.Variable:
    return tf.Variable(
        value,
        trainable=False,
        collections=[tf.GraphKeys.LOCAL_VARIABLES],
        name=name,
        use_resource=True,
    )


class CrossShardOptimizer(OffMesh, tf.tpu.CrossShardOptimizer):
    """`tf.compat.v1.tpu.CrossShardOptimizer`, which also runs outside of TPU programs.

    Outside of a TPU program TensorFlow's class adds operations that no CPU or GPU can run. This
    class only calls the inner optimizer there. Like TensorFlow's class, it logs that it assumes one
    shard.

    Attributes:
      opt: the inner optimizer.
    """

    def __init__(
        self,
        opt: tf.train.Optimizer,
        reduction: Reduction = tf.losses.Reduction.MEAN,
        name: str = "CrossShardOptimizer",
        group_assignment: list[list[int]] | None = None,
    ):
        """Wraps an optimizer, with the arguments of `tf.compat.v1.tpu.CrossShardOptimizer`.

        Args:
          opt: the optimizer.
          reduction: how the losses of shards are joined: by their mean or their sum.
          name: name of the wrapper.
          group_assignment: for each group of shards that reduce only with each other, the list of
            their numbers; None for one group of all shards.
        """
        super().__init__(opt, reduction, name, group_assignment)
        self.opt = opt

    def described(self) -> list[tuple[str, Any]]:
        """Returns what `mtf_gradsync.describe` prints about the optimizer, a pair for each line.

        A pair is a text that says what is done, and the number of steps in which it is done once.
        """
        return [("sum over the shards of a TPU program, if this is one", 1)]

    def apply_gradients(
        self, grads_and_vars: Iterable[Any], global_step: Any = None, name: str | None = None
    ) -> tf.Operation:
        """Applies gradients; in a TPU program it first sums them over the program's shards.

        Args:
          grads_and_vars: pairs as ``compute_gradients`` returns them.
          global_step: a variable to add one to, or None.
          name: name of the returned operation.

        Returns:
          The operation that makes the update.

        Raises:
          TypeError: a gradient or variable is one of Mesh-TensorFlow.
          ValueError: grads_and_vars is malformed.
        """
        pairs = list(grads_and_vars)
        if number_of_tpu_shards() is not None:
            return super().apply_gradients(pairs, global_step, name)
        self._refuse_mesh(pairs, global_step)
        return self.opt.apply_gradients(pairs, global_step, name)


class SyncReplicasOptimizer(OffMesh, tf.train.SyncReplicasOptimizer):
    """TensorFlow's SyncReplicasOptimizer, which also refuses gradients and variables of a mesh."""

    def __init__(
        self,
        opt: tf.train.Optimizer,
        replicas_to_aggregate: int,
        total_num_replicas: int | None = None,
        variable_averages: Any = None,
        *arguments: Any,
        **named: Any,
    ):
        """Wraps an optimizer; see `tf.compat.v1.train.SyncReplicasOptimizer`.

        Args:
          opt: the optimizer.
          replicas_to_aggregate: how many gradients of a variable make one update.
          total_num_replicas: how many replicas there are; None means replicas_to_aggregate.
          variable_averages: a `tf.train.ExponentialMovingAverage`, or a number, the decay of one.
          *arguments: further arguments of TensorFlow's class.
          **named: further arguments of TensorFlow's class, by name.

        Raises:
          ValueError: opt is a GradientAccumulationOptimizer, or a number is not whole or less
            than 1.
        """
        if any(isinstance(o, GradientAccumulationOptimizer) for o in optimizers_inside(opt)):
            raise ValueError(
                "SyncReplicasOptimizer updates on the parameter server, where sums of "
                "GradientAccumulationOptimizer would begin anew with every worker that starts. "
                "SyncReplicasOptimizer adds up gradients itself: give it the inner optimizer, and "
                "multiply replicas_to_aggregate by backward_passes_per_step."
            )
        replicas_to_aggregate = check_whole_number("replicas_to_aggregate", replicas_to_aggregate)
        if total_num_replicas is not None:
            total_num_replicas = check_whole_number("total_num_replicas", total_num_replicas)
        if is_number(variable_averages):
            variable_averages = tf.train.ExponentialMovingAverage(variable_averages)
        super().__init__(
            opt, replicas_to_aggregate, total_num_replicas, variable_averages, *arguments, **named
        )
