"""What a wrapper consists of: stages between the loss and the new values of variables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Callable, Literal, NamedTuple, Sequence

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.optimizers.pipeline.forms import Form, GradientSet
from mtf_gradsync.optimizers.pipeline.reduction import Reduction

if TYPE_CHECKING:
    from mtf_gradsync.optimizers.pipeline.builder import StepBuilder


class Stage:
    """One stage of a training step; the base class passes gradients on as they are.

    The builder calls the stages of a stack from the outermost wrapper to the innermost. It
    converts gradients to the form that a stage takes, and then to the form that it gives.

    Attributes:
      takes: the form of gradients that `apply` wants; `REDUCED` stands for `PART`, too, where the
        updates of the stack are sharded. None for gradients as they are.
      gives: the form that gradients are to have after the stage; None for what `apply` returns.
      wants_reduced: whether parts of reduced gradients are of no use to the stage: it adds them up in
        accumulators that are laid out like variables.
      mixed: of a stage that takes `PER_SHARD`: what to do about gradients in which the shards are
        mixed. Each shard takes an equal share; or they are reduced, and `already_reduced` of the
        set has their positions; or it is an error.
      mixed_warning: a warning about those that are reduced, filled with the wrapper's name, the
        variables and the operations that mix the shards; "" for none.
    """

    takes: Form | None = None
    gives: Form | None = None
    wants_reduced = False
    mixed: Literal["share", "reduce", "refuse"] = "share"
    mixed_warning = ""

    def apply(self, gradients: GradientSet, step: StepBuilder) -> GradientSet:
        """Does the stage's work.

        Args:
          gradients: in the form that the stage takes.
          step: the step that is being built, which operations and conditions are added to.

        Returns:
          The gradients for the next stage.
        """
        del step
        return gradients

    def update(
        self,
        gradients: GradientSet,
        step: StepBuilder,
        apply_inner: Callable[[GradientSet], list[mtf.Operation]],
    ) -> list[mtf.Operation]:
        """Makes the inner optimizer's update, or one around it.

        Args:
          gradients: what the inner optimizer is to get.
          step: the step that is being built.
          apply_inner: calls the inner optimizer.

        Returns:
          The operations of the update.
        """
        del step
        return apply_inner(gradients)

    def after_update(
        self, updates: Sequence[mtf.Operation], step: StepBuilder
    ) -> list[mtf.Operation]:
        """Adds what comes after the update, on the steps that have one.

        `step.value_after` gives what a variable holds then. The innermost wrapper's stages come
        first.

        Args:
          updates: the operations of the update.
          step: the step that is being built.

        Returns:
          Further operations of the step.
        """
        del updates, step
        return []

    def end_of_step(
        self, operations: Sequence[mtf.Operation], step: StepBuilder
    ) -> list[mtf.Operation]:
        """Adds what comes last, on every step.

        Args:
          operations: all other operations of the step.
          step: the step that is being built.

        Returns:
          Further operations of the step.
        """
        del operations, step
        return []


class Segment(NamedTuple):
    """The stages of one wrapper.

    Attributes:
      stages: in the order in which gradients pass through them.
      reduction: how the wrapper reduces gradients.
      name: the wrapper's name.
    """

    stages: Sequence[Stage]
    reduction: Reduction
    name: str
