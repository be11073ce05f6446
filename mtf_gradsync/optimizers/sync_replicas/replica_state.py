"""What is known of each replica: its step, its contributions, and how long it sat out."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.mesh.kind import is_simd
from mtf_gradsync.optimizers.state.variables import (
    counter,
    note_per_shard,
    root_scope,
    state_variable,
)
from mtf_gradsync.optimizers.sync_replicas.no_update import Watch, beginning

_OF_REPLICAS = ("local_step", "made", "dropped", "missed")


class ReplicaState(NamedTuple):
    """int32 mesh variables, or their values after a step, whole on every processor.

    Attributes:
      local_step: `[shards...]`, the step that each replica's next gradient is for.
      made: `[shards...]`, contributions of each replica.
      dropped: `[shards...]`, steps on which a replica did not contribute.
      missed: `[shards...]`, of these, the ones in a row up to now.
      count: contributions since the last update.
      update_step: updates made, the global step that local steps are compared with.
      waiting: steps since the last update.
    """

    local_step: Any
    made: Any
    dropped: Any
    missed: Any
    count: Any
    update_step: Any
    waiting: Any


def make_state(mesh: mtf.Mesh, name: str, shard_dims: Sequence[mtf.Dimension]) -> ReplicaState:
    """Makes the variables, `<name>/<field>`.

    Args:
      mesh: the mesh.
      name: name of the wrapper.
      shard_dims: the dims that number the replicas.

    Returns:
      The variables, in checkpoints too. On another number of shards a checkpoint's counts are
      added up or moved, and every replica starts with the step of the last update.
    """
    shape = mtf.anonymous_shape(mtf.Shape(list(shard_dims)))
    fills = {"local_step": f"{name}/update_step", "missed": 0}
    fields = {}
    for field in ReplicaState._fields:
        # Of a stacked variable nobody could tell where it is, and the hook reads some of these.
        if field not in _OF_REPLICAS:
            fields[field] = counter(mesh, f"{name}/{field}", stacked=False)
            continue
        with root_scope():
            variable = state_variable(mesh, f"{name}/{field}", shape, tf.int32, stacked=False)
        note_per_shard(variable, shape.ndims, fill=fills.get(field))
        fields[field] = variable
    return ReplicaState(**fields)


def after_step(
    before: ReplicaState,
    steps: mtf.Tensor,
    came: mtf.Tensor,
    count: mtf.Tensor,
    made: mtf.Tensor,
) -> ReplicaState:
    """The values after a step.

    Args:
      before: the variables.
      steps: the local steps that this step's gradients are for.
      came: which replicas contributed, int32 `[shards...]`.
      count: contributions since the last update, these included.
      made: whether an update is due, int32.

    Returns:
      What the variables hold next.
    """
    update_step = before.update_step.value + made
    return ReplicaState(
        local_step=steps * (1 - made) + mtf.broadcast(update_step * made, came.shape),
        made=before.made.value + came,
        dropped=before.dropped.value + (1 - came),
        missed=(before.missed.value + 1) * (1 - came),
        count=count * (1 - made),
        update_step=update_step,
        waiting=(before.waiting.value + 1) * (1 - made),
    )


class Limit(mtf.Operation):
    """Sees to it that not too many steps go by without an update.

    On placement meshes the step fails. A TPU program cannot fail by itself; there the session
    hook looks at the variables.

    Attributes:
      limit: the largest number of steps in a row without an update.
      takes_a_hook: whether steps do not fail by themselves.
    """

    def __init__(self, state: ReplicaState, now: ReplicaState, limit: int):
        """Checks a step.

        Args:
          state: the variables.
          now: their values after the step.
          limit: the largest number of steps in a row without an update.
        """
        super().__init__([now.waiting, now.missed], name="max_steps_without_update")
        self.limit = limit
        self.takes_a_hook = False
        self._state = state
        self._done: Any = weakref.WeakKeyDictionary()
        # Of each lowering, what to read `waiting` and `missed` from after a step.
        self._found: list[tuple[Any, Any]] = []

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        if is_simd(lowering.mesh_impl(self)):
            self._done[lowering] = tf.no_op()
            variables = (lowering.variables[v] for v in (self._state.waiting, self._state.missed))
            waiting, missed = (v.laid_out_tensor.one_slice for v in variables)
            self._found.append((waiting, missed))
            self.takes_a_hook = True
            return
        waiting, missed = (whole(lowering, x) for x in self.inputs)
        missed = tf.reshape(missed, [-1])
        # A step that fails leaves its state as it was: what it found has to be kept elsewhere.
        kept = _on_the_host(waiting, 0), _on_the_host(waiting, [0] * self.inputs[1].shape.size)
        keep = [v.assign(x, read_value=False) for v, x in zip(kept, (waiting, missed))]
        self._found.append(kept)
        with tf.control_dependencies(keep):
            waiting, missed = tf.identity(waiting), tf.identity(missed)
        absent = tf.where_v2(tf.greater(missed, 0))
        self._done[lowering] = tf.Assert(
            tf.less_equal(waiting, self.limit),
            [beginning(self.limit), tf.reshape(absent, [-1])],
            summarize=1000,
        )

    def done(self, lowering: mtf.Lowering) -> tf.Operation:
        """The check."""
        return self._done[lowering]

    def watch(self) -> Watch:
        """Adds to the default graph what tells an error by this check from others.

        Returns:
          What to ask after a step.
        """
        return Watch(self.limit, [(w.read_value(), m.read_value()) for w, m in self._found])


def _on_the_host(like: tf.Tensor, value: Any) -> tf.Variable:
    """An int32 variable of the process that a tensor is in; in no checkpoint."""
    spec = tf.DeviceSpec.from_string(like.device)
    host = tf.DeviceSpec(spec.job, spec.replica, spec.task, "CPU", 0)
    with tf.device(host.to_string()):
        return tf.Variable(
            tf.constant(value, tf.int32),
            trainable=False,
            collections=[tf.GraphKeys.LOCAL_VARIABLES],
            use_resource=True,
            name="found_by_max_steps_without_update",
        )


class ReplicaSummaries(mtf.Operation):
    """Scalar summaries of each replica's counts."""

    def __init__(self, name: str, counts: mtf.Tensor):
        """Adds summaries.

        Args:
          name: what their names begin with; "/replica_0" and so on follow.
          counts: `[shards...]`, whole on every processor.
        """
        super().__init__([counts], name=name)

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        (counts,) = self.inputs
        values = tf.unstack(tf.reshape(whole(lowering, counts), [-1]), counts.shape.size)
        for number, value in enumerate(values):
            summary = (f"{self.name}/replica_{number}", value)
            tf.add_to_collection(mtf.utils.SCALAR_SUMMARIES_COLLECTION_KEY, summary)


def whole(lowering: mtf.Lowering, x: mtf.Tensor) -> tf.Tensor:
    """The tf tensor of something that is whole on every processor."""
    return lowering.tensors[x].to_laid_out_tensor().all_slices[0]
