"""The stages that are added to a stack of any wrappers if gradients have weights."""

from __future__ import annotations

import dataclasses

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.optimizers.pipeline.builder import StepBuilder
from mtf_gradsync.optimizers.pipeline.forms import GradientSet
from mtf_gradsync.optimizers.pipeline.stack import Condition, Stack, Stage
from mtf_gradsync.optimizers.pipeline.weights import weighted_shards
from mtf_gradsync.optimizers.slots import SlotBook
from mtf_gradsync.optimizers.state import named_state
from mtf_gradsync.reduce import Strategy


def with_weights(stack: Stack, axes: ReplicaAxes | None, slots: SlotBook) -> Stack:
    """Returns a stack with the stages that gradients with weights need, first and last.

    Args:
      stack: a completed stack.
      axes: the replica axes of the shards that have weights; None if they are not known.
      slots: records the counter of updates without data.
    """
    outermost = stack.segments[0].reduction
    first = _WeighShards(outermost.strategy, axes)
    return stack._replace(first=(first,), last=(_OnlyWithData(outermost.name, slots),))


@dataclasses.dataclass(frozen=True)
class _WeighShards(Stage):
    """The first stage: it fits the gradients of shards to weights (see `weighted_shards`)."""

    strategy: Strategy
    axes: ReplicaAxes | None

    def apply(self, gradients: GradientSet, step: StepBuilder) -> GradientSet:
        del step
        weights = gradients.weights
        assert weights is not None
        return gradients.with_grads(
            weighted_shards(gradients.grads, weights, self.axes, self.strategy)
        )


@dataclasses.dataclass(frozen=True)
class _OnlyWithData(Stage):
    """The last stage: it lets only gradients with a weight above 0 make an update.

    It counts the updates that it skips. State: `<name of the outermost wrapper>/without_data`.
    """

    name: str
    slots: SlotBook
    condition = Condition()

    def apply(self, gradients: GradientSet, step: StepBuilder) -> GradientSet:
        assert gradients.weights is not None
        has_data = step.agreed(mtf.greater(gradients.weights.total, 0.0), by_any=True)
        counter = named_state(has_data.mesh, f"{self.name}/without_data", stacked=True)
        self.slots.record([counter], [])
        gate = step.gate([*gradients.present, has_data])
        now = counter.value + 1 - mtf.cast(has_data, tf.int32)
        step.write([mtf.assign(counter, now)], gate)
        step.counts_without_data = counter
        return gradients.only_when(has_data, gate)
