"""The state of each replica: its step, its contributions, and its skipped steps."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.optimizers.state.variables import named_state

_OF_REPLICAS = ("local_step", "made", "dropped", "missed")


class ReplicaState(NamedTuple):
    """int32 mesh variables, or their values after a step, the same on every processor.

    Attributes:
      local_step: `[shards...]`, the update step that each replica's next gradient is for, unless
        the program gives it.
      made: `[shards...]`, contributions of each replica.
      dropped: `[shards...]`, steps on which a replica did not contribute.
      missed: `[shards...]`, the number of these since its last contribution.
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
    """Makes the variables, `<name>/<field>`, which checkpoints hold.

    On another number of shards a checkpoint's counts are added up or moved, and every replica
    starts with the step of the last update; after a checkpoint without them, the global step.
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
    """Returns the variables' new values.

    `steps` are the local steps that the gradients are for, `count` has this step's contributions,
    and `contributed`, `[shards...]`, and `updated` are 0 or 1 (int32).
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
    """Scalar summaries, `<name>/replica_0` and so on, of counts that every processor has."""

    def __init__(self, name: str, counts: mtf.Tensor):
        super().__init__([counts], name=name)

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        (counts,) = self.inputs
        values = tf.unstack(tf.reshape(shared_value(lowering, counts), [-1]), counts.shape.size)
        for number, value in enumerate(values):
            summary = (f"{self.name}/replica_{number}", value)
            tf.add_to_collection(mtf.utils.SCALAR_SUMMARIES_COLLECTION_KEY, summary)


def shared_value(lowering: mtf.Lowering, x: mtf.Tensor) -> tf.Tensor:
    """Returns the tf tensor of a value that is the same on every processor."""
    return lowering.tensors[x].to_laid_out_tensor().all_slices[0]
