"""Stages, the parts of wrappers, between the gradients and the new values of variables."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Callable, Literal, NamedTuple, Sequence

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
      takes: the form of gradients for `apply`; `REDUCED` includes `PART` if the updates of the
        stack are sharded. None for any form.
      gives: the form of gradients after the stage; None for the one that `apply` returns.
      wants_reduced: whether the stage needs reduced gradients and not parts, as it adds them up
        in accumulators that are laid out like variables.
      mixed: if the stage takes `PER_SHARD`, what to do about gradients in which shards are mixed:
        each shard takes an equal share, or they are reduced (`already_reduced` of the set has
        their positions), or it is an error.
      reads_shown: whether `after_update` reads values for evaluation, which stages inside or around
        this one may replace (`StepBuilder.show`): it is called after theirs.
      mixed_warning: a warning about those that are reduced, with fields for the wrapper's name, the
        variables and the operations that mix shards; "" for none.
    """

    takes: Form | None = None
    gives: Form | None = None
    wants_reduced = False
    mixed: Literal["share", "reduce", "refuse"] = "share"
    mixed_warning = ""
    reads_shown = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Takes the deprecated name `wants_whole` for `wants_reduced`."""
        super().__init_subclass__(**kwargs)
        if "wants_whole" in vars(cls):
            text = f"{cls.__name__}.wants_whole is deprecated: use wants_reduced."
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            cls.wants_reduced = vars(cls)["wants_whole"]

    def apply(self, gradients: GradientSet, step: StepBuilder) -> GradientSet:
        """Does the stage's work.

        Args:
          gradients: gradients in the form that the stage takes.
          step: the step that is being built, to add operations and conditions to.

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
          gradients: the gradients for the inner optimizer.
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
        """Adds operations after the update, on steps that have one.

        `step.value_after` returns the new value of a variable. The innermost wrapper's stages are
        called first, and those with `reads_shown` last.

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
        """Adds the last operations, on every step.

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
      stages: the stages, in the order in which gradients pass through them.
      reduction: how the wrapper reduces gradients, with the wrapper's name.
    """

    stages: Sequence[Stage]
    reduction: Reduction
